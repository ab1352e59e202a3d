"""Sends a drawn request as its client does, and brings what came back into one form."""

import json
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from fuzz.requests import Request
from fuzz.worlds import World
from greedy import TOP, body_of

CHOSEN = [7, 300, 1999]
"""Ids whose log-probabilities are asked for beside the most likely ones."""
PAUSE_SECONDS = 0.3


class Wrong(AssertionError):
    """Something is not as it should be; ``expected`` is what it should have been, where that can be shown."""

    def __init__(self, why: str, expected: Any = None) -> None:
        super().__init__(why)
        self.expected = expected


@dataclass
class Reply:
    """What one body got.

    Attributes:
        request: whose body it was; of a session or a list of prompts, a request of its own for each.
        status: HTTP's, or that of an error event in a stream; 0 where the client did not wait for it.
        text: of an error. answers: as ``/generate`` gives them, or the chat completion.
    """

    request: Request
    status: int
    text: str = ""
    answers: list[dict[str, Any]] = field(default_factory=list)


class Client:
    """All clients of one server. They wait for ever: who stands still is noticed elsewhere."""

    def __init__(self, url: str, world: World) -> None:
        self.world = world
        self.http = httpx.Client(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None))

    def send(self, request: Request) -> list[Reply]:
        """Do what the request says.

        Raises:
            Wrong: when events of a stream contradict each other.
            httpx.HTTPError: when the server does not answer.
        """
        time.sleep(request.delay)
        send = {
            "flush": self._flush,
            "pause": self._pause,
            "abort all": self._abort_all,
            "load again": self._load_again,
            "abort": self._abort,
            "session": self._session,
            "batch": self._batch,
            "chat": self._chat,
        }.get(request.kind)
        if send is not None:
            return send(request)
        return [self._stream(request) if request.stream else self._post(request)]

    def body(self, request: Request) -> dict[str, Any]:
        """Of ``/generate``."""
        body = body_of(request.prompt, request.policy, request.new_tokens, **request.sampling)
        if request.n > 1:
            body["sampling_params"]["n"] = request.n
        body["return_logprob"] = request.logprobs
        body["top_logprobs_num"] = TOP if request.logprobs and compared(request) else 0
        if request.logprobs and request.kind == "greedy":
            body["token_ids_logprob"] = CHOSEN
        if request.kind == "prompt logprobs":
            body["logprob_start_len"] = request.details["start"]
        if request.stream:
            body["stream"] = True
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        return body | self._priority(request) | request.extra

    def _priority(self, request: Request) -> dict[str, int]:
        return {"priority": request.priority} if self.world.prioritized else {}

    def _post(self, request: Request, **more: Any) -> Reply:
        return _read(request, self.http.post("/generate", json=self.body(request) | more))

    def _stream(self, request: Request) -> Reply:
        with self.http.stream("POST", "/generate", json=self.body(request)) as response:
            if response.status_code != 200:
                response.read()
                return _read(request, response)
            lines: Iterable[str] = response.iter_lines()
            if request.kind == "leave":
                for number, _ in enumerate(lines):
                    if number >= request.details["events"]:
                        break
                return Reply(request, 0)
            answer: dict[str, Any] | None = None
            for line in lines:
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Reply(request, event["error"].get("code", 500), json.dumps(event))
                answer = joined(answer, event, self.world.incremental)
        if answer is None:
            raise Wrong("a stream without an event")
        return Reply(request, 200, answers=[answer])

    def _flush(self, request: Request) -> list[Reply]:
        return [_read(request, self.http.post("/flush_cache"))]

    def _abort_all(self, request: Request) -> list[Reply]:
        return [_read(request, self.http.post("/abort_request", json={"abort_all": True}))]

    def _pause(self, request: Request) -> list[Reply]:
        paused = self.http.post("/pause_generation", json={"mode": request.details["mode"]})
        time.sleep(PAUSE_SECONDS)
        resumed = self.http.post("/continue_generation", json={})
        return [_read(request, response) for response in (paused, resumed)]

    def _load_again(self, request: Request) -> list[Reply]:
        """Unload an adapter, which waits for those who use it, and load it; others bring it back before."""
        listed = self.http.get("/v1/models").json()["data"]
        folders = {model["id"]: model["root"] for model in listed}
        if request.adapter not in folders:  # another client is at it
            return [Reply(request, 200)]
        told = {"lora_name": request.adapter}
        gone = self.http.post("/unload_lora_adapter", json=told)
        back = self.http.post("/load_lora_adapter", json=told | {"lora_path": folders[request.adapter]})
        return [_read(request, response) for response in (gone, back)]

    def _abort(self, request: Request) -> list[Reply]:
        name = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self._post, request, rid=name)
            time.sleep(request.details["after"])
            self.http.post("/abort_request", json={"rid": name})
            return [waiting.result()]

    def _batch(self, request: Request) -> list[Reply]:
        prompts = [request.prompt, *request.details["more"]]
        reply = self._post(request, input_ids=prompts)
        if reply.status != 200:
            longest = max(prompts, key=len)
            return [replace(reply, request=replace(request, prompt=longest))]
        per_prompt = [reply.answers[i : i + 1] for i in range(len(reply.answers))]
        if len(per_prompt) != len(prompts):
            raise Wrong(f"{len(per_prompt)} answers for {len(prompts)} prompts")
        pairs = zip(prompts, per_prompt, strict=True)
        return [Reply(replace(request, prompt=prompt), 200, answers=answers) for prompt, answers in pairs]

    def _chat(self, request: Request) -> list[Reply]:
        body = {
            "model": "fuzzed",
            "messages": request.details["messages"],
            "temperature": 0,
            "max_tokens": request.new_tokens,
            "ignore_eos": True,
            "fathom": request.policy,
        }
        if request.adapter is not None:
            body["model"] = request.adapter
        return [_read(request, self.http.post("/v1/chat/completions", json=body | self._priority(request)))]

    def _session(self, request: Request) -> list[Reply]:
        opened = self.http.post("/open_session", json={"capacity_of_str_len": 100_000})
        name, replies, last = opened.json(), [], None
        turn = replace(request, details={})
        for following in [None, *request.details["turns"]]:
            ids, drop = turn.prompt, False
            if following is not None:
                ids, drop = following.ids, following.drop
                before = turn.prompt + ([] if drop else last["output_ids"])
                turn = replace(
                    turn, prompt=before + ids, policy=following.policy, new_tokens=following.new_tokens
                )
            params = {"id": name, "rid": last and last["meta_info"]["id"], "drop_previous_output": drop}
            replies.append(self._post(turn, input_ids=ids, session_params=params))
            if replies[-1].status != 200 or aborted(last := replies[-1].answers[0]):
                break
        self.http.post("/close_session", json={"session_id": name})
        return replies


def compared(request: Request) -> bool:
    """Whether the answer is held against a reference, token by token."""
    return request.kind not in ("seeded", "grammar", "altered")


def aborted(answer: dict[str, Any]) -> bool:
    return answer["meta_info"]["finish_reason"]["type"] == "abort"


def joined(before: dict[str, Any] | None, event: dict[str, Any], incremental: bool) -> dict[str, Any]:
    """What a stream has said so far.

    Args:
        incremental: events have only what is new; otherwise each repeats what was said.
    """
    if before is None:
        return event
    if not incremental:
        said = before.get("output_ids", [])
        if event.get("output_ids", said)[: len(said)] != said:
            raise Wrong("a stream took tokens back", said)
        return event
    told, new = before["meta_info"], event["meta_info"]
    grown = {
        name: told[name] + value
        for name, value in new.items()
        if name.startswith("output_") and isinstance(value, list) and isinstance(told.get(name), list)
    }
    texts = {name: before[name] + event[name] for name in ("output_ids", "text") if name in event}
    return event | texts | {"meta_info": told | new | grown}


def _read(request: Request, response: httpx.Response) -> Reply:
    if response.status_code != 200:
        return Reply(request, response.status_code, response.text[:2000])
    if not response.headers.get("content-type", "").startswith("application/json"):
        return Reply(request, 200, response.text[:2000])
    answer = response.json()
    return Reply(request, 200, answers=answer if isinstance(answer, list) else [answer])
