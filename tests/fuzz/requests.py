"""Requests, drawn at random: prompts that share beginnings, policies, sampling, and what else a client may do."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fuzz import policies
from fuzz.worlds import World

from fathom.runtime.specprefill.config import PROTECTABLE

Ids = list[int]

WORDS = ("red", "box", "key", "code", "of", "the", "wooden", "drawer", "is", "Lena", "in", "writer.", "1574")
LOWEST, HIGHEST = 6, 2000
"""Ids that prompts are drawn from: words, not the tokenizer's marks."""
LONGEST = 900
BEAM_MARGIN = 20
"""Tokens of the context that a beam search leaves free."""
CONTROLS = frozenset({"flush", "pause", "abort all", "load again"})
"""Kinds that ask for no answer."""
REPEATABLE = frozenset({"greedy", "seeded", "grammar", "altered", "prompt logprobs", "leave"})
"""Kinds of which one request sends one body."""
REPEATED = frozenset({"seeded", "grammar", "altered"})
"""Kinds without a reference: each is sent twice, and compared with itself."""


@dataclass
class Request:
    """What one client does.

    Attributes:
        kind: "greedy", or what is special about it.
        n: answers that are asked for.
        adapter: the name of a LoRA adapter; None for the model alone.
        delay: seconds after the wave's start.
        extra: further members of the body.
        details: of its kind.
    """

    prompt: Ids
    policy: dict[str, Any]
    new_tokens: int
    kind: str = "greedy"
    sampling: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    adapter: str | None = None
    stream: bool = False
    logprobs: bool = False
    priority: int = 0
    delay: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Turn:
    """A further turn of a session; ``drop``: without the answer before it."""

    ids: Ids
    policy: dict[str, Any]
    new_tokens: int
    drop: bool


class Drawer:
    """Draws the requests of one server.

    Attributes:
        history: prompts and the greedy answers to them, from which later prompts go on.
        texts: of such answers, in which stop strings are found.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        rng = random.Random(f"{world.seed}/documents")
        self.documents = [self._ids(rng, LONGEST + 100) for _ in range(4)]
        self.history: list[tuple[Ids, Ids]] = []
        self.texts: list[str] = []

    def wave(self, number: int, size: int | None = None) -> list[Request]:
        """The requests that are sent at once; some of them twice, the second time with drafting on or off."""
        rng = random.Random(f"{self.world.seed}/wave {number}")
        size = size or rng.choice([1, 3, 6, 10, 16, 24, 36])
        drawn = [self.request(random.Random(f"{self.world.seed}/{number}/{i}")) for i in range(size)]
        again = [
            request
            for request in drawn
            if request.kind in REPEATED or (request.kind in REPEATABLE and rng.random() < 0.15)
        ]
        return drawn + [self.twin(request) for request in again]

    def twin(self, request: Request) -> Request:
        """The same request, drafted for where it was not."""
        twin = copy.deepcopy(request)
        if self.world.draft:
            drafted = not self.drafts(request.policy)
            twin.policy["speculative"] = drafted
            if not drafted:
                twin.policy.pop("draft_tokens", None)
        return twin

    def drafts(self, policy: dict[str, Any]) -> bool:
        """Whether a policy drafts, said or not."""
        preset = policy.get("preset")
        default = self.world.drafted_default if preset is None else preset != "exact"
        return policy.get("speculative", default)

    def remember(self, prompt: Ids, answer: Ids, text: str) -> None:
        """An answer that was compared."""
        self.history = [*self.history[-29:], (prompt, answer)]
        self.texts = [*self.texts[-29:], text[:200]]

    def request(self, rng: random.Random) -> Request:
        request = Request(
            self.prompt(rng),
            policies.draw(rng, self.world),
            rng.choice([1, 2, 3, 8, 16, 24, 40, 60, 90, 200]),
            stream=rng.random() < 0.3,
            logprobs=rng.random() < 0.35,
            priority=rng.randint(0, 3),
            delay=rng.choice([0, 0, 0, rng.random() * 0.5]),
        )
        if self.world.tight and rng.random() < 0.04:
            request.new_tokens = max(self.world.context - len(request.prompt), 1)
        shares, changes = zip(*KINDS, strict=True)
        (change,) = rng.choices(changes, shares)
        change(self, rng, request)
        if request.n > 1:
            request.stream = False
        if self.world.adapters and request.kind != "beams":
            self._adapt(rng, request)
        return request

    def _adapt(self, rng: random.Random, request: Request) -> None:
        """Give it an adapter or none; now and then it is one that takes an adapter away and brings it back."""
        names = [adapter.name for adapter in self.world.adapters]
        request.adapter = rng.choice([None, *names])
        if request.kind == "greedy" and rng.random() < 0.04:
            request.kind, request.adapter, request.delay = "load again", rng.choice(names), rng.random()

    def prompt(self, rng: random.Random) -> Ids:
        kind = rng.random()
        if self.history and kind < 0.5:
            prompt, answer = rng.choice(self.history)
            if kind < 0.15:
                return list(prompt)
            if kind < 0.4:
                cut = rng.choice([len(answer), len(answer), rng.randint(0, len(answer))])
                more = self._ids(rng, rng.choice([0, 1, 3, 8, 20]))
                return (prompt + answer[:cut] + more)[: self.world.context + 5]
            return prompt[: rng.randint(1, len(prompt))]
        length = self._length(rng)
        shared = rng.choice([length, length, rng.randint(0, length), 0])
        return rng.choice(self.documents)[:shared] + self._ids(rng, length - shared)

    def _length(self, rng: random.Random) -> int:
        """Around the ends of chunks, pages and SpecPrefill's chunks, or anything up to the context."""
        chunks = rng.choice([1, 1, 2, 3, 4]) * (self.world.chunk if self.world.chunk > 0 else 64)
        near = [1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 65, chunks - 1, chunks, chunks + 1]
        near.append(self.world.page * rng.randint(1, 16) + rng.choice([-1, 0, 1]))
        some = [rng.randint(1, 300) for _ in range(3)] + [rng.randint(60, 200) for _ in range(2)]
        length = rng.choice([*near, *some, rng.randint(1, self.world.context + 4)])
        return max(1, min(length, LONGEST))

    @staticmethod
    def _ids(rng: random.Random, count: int) -> Ids:
        return [rng.randrange(LOWEST, HIGHEST) for _ in range(count)]

    # What makes a request special: each changes one that was drawn as a plain greedy one.

    def plain(self, rng: random.Random, request: Request) -> None:
        pass

    def leave(self, rng: random.Random, request: Request) -> None:
        """The client leaves after some events of the stream."""
        request.kind, request.stream, request.new_tokens = "leave", True, rng.choice([1, 20, 300])
        request.details = {"events": rng.randint(0, 6)}

    def illegal(self, rng: random.Random, request: Request) -> None:
        request.kind = "illegal"
        request.policy, name = policies.illegal(rng, self.world)
        request.details = {"field": name}

    def seeded(self, rng: random.Random, request: Request) -> None:
        request.kind = "seeded"
        request.sampling = {
            "temperature": rng.choice([0.5, 0.8, 1.2]),
            "sampling_seed": rng.randint(0, 5),
            "top_k": rng.choice([-1, -1, 5]),
            "top_p": rng.choice([1.0, 0.9]),
            "min_p": rng.choice([0.0, 0.0, 0.1]),
        }

    def grammar(self, rng: random.Random, request: Request) -> None:
        request.kind = "grammar"
        integer = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
        rules = [{"regex": "[0-9]{3,9}"}, {"regex": "(a|b|c| )*x"}]
        rules += [{"json_schema": '{"type": "boolean"}'}, {"json_schema": integer}]
        request.sampling = rng.choice(rules) | {"ignore_eos": rng.random() < 0.3}

    def stop_tokens(self, rng: random.Random, request: Request) -> None:
        stops = [token for _, answer in self.history for token in answer] or self._ids(rng, 1)
        chosen = rng.sample(stops, min(len(stops), rng.choice([1, 4, 10])))
        request.sampling = {"stop_token_ids": chosen, "ignore_eos": False}
        if self.history and rng.random() < 0.5:
            request.prompt = list(rng.choice(self.history)[0])

    def several(self, rng: random.Random, request: Request) -> None:
        request.n = rng.choice([2, 3])

    def beams(self, rng: random.Random, request: Request) -> None:
        """A beam search, which SGLang has for pages of one token and without adapters."""
        if self.world.page > 1:
            return
        request.kind, request.stream, request.logprobs = "beams", False, False
        request.policy = policies.without_dropping({}, self.world)
        width = rng.choice([2, 3, 5])
        request.sampling = {"beam_width": width, "n": rng.choice([width, rng.randint(1, width)])}
        request.new_tokens = rng.choice([1, 2, 7, 16, 30])
        request.prompt = request.prompt[: self.world.context - request.new_tokens - BEAM_MARGIN]

    def altered(self, rng: random.Random, request: Request) -> None:
        """Logits are changed before the most likely token is taken."""
        request.kind = "altered"
        least = {"min_new_tokens": 5, "ignore_eos": False, "stop_token_ids": self._ids(rng, 30)}
        penalties = [{"frequency_penalty": 0.7}, {"repetition_penalty": 1.3}]
        request.sampling = rng.choice([*penalties, {"logit_bias": {"17": 3.0, "99": -3.0}}, least])
        if "min_new_tokens" in request.sampling:
            request.new_tokens = max(request.new_tokens, 8)

    def stop_strings(self, rng: random.Random, request: Request) -> None:
        if self.texts:
            text = rng.choice(self.texts)
            at = rng.randint(0, max(len(text) - 2, 0))
            stops = [text[at : at + rng.choice([1, 2, 5])] or "x", rng.choice(self.texts)[:3] or "y"]
            request.kind, request.sampling = "altered", {"stop": stops}

    def prompt_logprobs(self, rng: random.Random, request: Request) -> None:
        request.kind, request.logprobs = "prompt logprobs", True
        request.details = {"start": rng.choice([0, 0, 1, rng.randint(0, len(request.prompt))])}
        request.policy = policies.without_dropping(request.policy, self.world)

    def flush(self, rng: random.Random, request: Request) -> None:
        request.kind = "flush"

    def pause(self, rng: random.Random, request: Request) -> None:
        request.kind, request.delay = "pause", rng.random()
        request.details = {"mode": rng.choice(["retract", "retract", "in_place"])}

    def abort(self, rng: random.Random, request: Request) -> None:
        """Another client ends it by its name."""
        request.kind, request.new_tokens, request.stream = "abort", 200, False
        request.details = {"after": rng.random() * 0.7}

    def abort_all(self, rng: random.Random, request: Request) -> None:
        request.kind, request.delay = "abort all", rng.random()

    def session(self, rng: random.Random, request: Request) -> None:
        """Turns that go on from each other's answers."""
        request.kind, request.stream = "session", False
        request.prompt, request.new_tokens = request.prompt[:200], min(request.new_tokens, 60)
        turns = []
        for _ in range(rng.choice([1, 2, 3])):
            ids = self.prompt(rng)[: rng.choice([1, 5, 40, 120])]
            policy = policies.draw(rng, self.world) if rng.random() < 0.5 else request.policy
            turns.append(Turn(ids, policy, rng.choice([1, 5, 20, 60]), rng.random() < 0.2))
        request.details = {"turns": turns}

    def chat(self, rng: random.Random, request: Request) -> None:
        """Messages, whose instructions SpecPrefill protects, or what else the policy says."""
        request.kind, request.stream, request.logprobs = "chat", False, False
        lengths = {"system": rng.choice([0, 10, 60, 150]), "user": rng.choice([3, 30, 120, 250])}
        texts = {role: " ".join(rng.choices(WORDS, k=count)) for role, count in lengths.items()}
        request.details = {"messages": [{"role": r, "content": text} for r, text in texts.items() if text]}
        if "prefill_keep_rate" in request.policy and rng.random() < 0.5:
            kinds = rng.sample(PROTECTABLE, rng.randint(0, len(PROTECTABLE)))
            request.policy = request.policy | {"prefill_protect": kinds}

    def batch(self, rng: random.Random, request: Request) -> None:
        """Several prompts in one body."""
        request.kind, request.stream = "batch", False
        request.details = {"more": [self.prompt(rng) for _ in range(rng.choice([1, 2, 4]))]}

    def keyed(self, rng: random.Random, request: Request) -> None:
        """Prefixes are found by its own kind only."""
        request.extra = rng.choice([{"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "s"}])

    def preset(self, rng: random.Random, request: Request) -> None:
        request.policy = policies.preset(rng, self.world)


KINDS: tuple[tuple[float, Callable[[Drawer, random.Random, Request], None]], ...] = (
    (13, Drawer.plain),
    (10, Drawer.leave),
    (5, Drawer.illegal),
    (7, Drawer.seeded),
    (6, Drawer.grammar),
    (10, Drawer.stop_tokens),
    (5, Drawer.several),
    (3, Drawer.beams),
    (4, Drawer.altered),
    (4, Drawer.stop_strings),
    (6, Drawer.prompt_logprobs),
    (2, Drawer.flush),
    (2, Drawer.pause),
    (2.5, Drawer.abort),
    (0.5, Drawer.abort_all),
    (6, Drawer.session),
    (4, Drawer.chat),
    (3, Drawer.batch),
    (3, Drawer.keyed),
    (4, Drawer.preset),
)
"""How often in a hundred a request is of a kind, and what makes it one."""
