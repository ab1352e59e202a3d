"""What is compared: each reply with what the oracles expect of its request, or with another reply to the same."""

from collections import Counter
from typing import Any

from fuzz import accounts, beams
from fuzz.clients import CHOSEN, Reply, Wrong, aborted, compared
from fuzz.reference import Reference, off
from fuzz.repeats import TIE, Asked, Repeats, difference
from fuzz.requests import CONTROLS, Drawer, Request
from fuzz.worlds import World
from greedy import TOLERANCE
from oracles import combined

from fathom.runtime.specprefill.config import PROTECTED
from fathom.server.requests.spans import find_spans

TOO_LONG = ("KV pages", "context length", "longer than", "maximum allowed length")
"""Words of the refusals of a prompt that never fits."""
ABORTED = "Aborted by AbortReq"
"""What SGLang says to a request that waited for its grammar when it was aborted."""
PROMPT_TOLERANCE = 2e-3
"""Of a prompt's log-probabilities, which the server computes in chunks."""
MOST_RESTARTS = 60
"""Tokens at which a restart is looked for to explain an answer."""

Answer = dict[str, Any]


class Checker:
    """Compares the replies of one server.

    Attributes:
        counts: what was compared, what was not and why, and which mechanisms ran.
        wave: the requests among which the replies' own ran.
    """

    def __init__(self, world: World, reference: Reference, drawer: Drawer, counts: Counter[str]) -> None:
        self.world, self.reference, self.drawer, self.counts = world, reference, drawer, counts
        self.wave: list[Request] = []
        self.repeats = Repeats(reference, counts)

    def check(self, reply: Reply) -> None:
        """Raises Wrong where the reply is not what its request should get."""
        request, status = reply.request, reply.status
        if request.kind == "illegal":
            return self._refusal(reply)
        if request.kind in CONTROLS:
            if status not in (200, 400):
                raise Wrong(f"{request.kind}: status {status} {reply.text}")
            return None
        if status == 0:
            return None
        if request.kind == "chat":
            request.prompt = self._template(request)
        if status == 400 and any(words in reply.text for words in TOO_LONG):
            return self._too_long(request)
        if status == 400 and ABORTED in reply.text:
            return self._aborted(request, {"message": reply.text})
        if status == 400 and request.kind == "beams" and beams.TOO_FEW_ROWS in reply.text:
            self.counts["beam searches refused"] += 1
            return None
        if status != 200:
            raise Wrong(f"status {status}: {reply.text}")
        if len(reply.answers) != request.n:
            raise Wrong(f"{len(reply.answers)} answers, {request.n} were asked for")
        if request.kind == "beams" and not aborted(reply.answers[0]):
            return self._beams(reply)
        for answer in reply.answers:
            if request.kind == "chat":
                self._chat(request, answer)
            else:
                self._answer(request, answer)
        return None

    def _refusal(self, reply: Reply) -> None:
        field = reply.request.details["field"]
        if reply.status != 400 or f"fathom.{field}" not in reply.text:
            raise Wrong(f"fathom.{field} is illegal, answered with {reply.status}: {reply.text}")
        self.counts["refusals"] += 1

    def _too_long(self, request: Request) -> None:
        """The answer asked for counts; KV is held twice at most, while what is kept of a prompt is copied."""
        room = min(self.world.context, self.world.pool) - 4 * self.world.page - 8
        longest = len(request.prompt) + request.new_tokens
        if 2 * len(request.prompt) < room and longest <= self.world.context:
            raise Wrong(f"a prompt of {len(request.prompt)} tokens was refused as too long")
        self.counts["refused as too long"] += 1

    def _answer(self, request: Request, answer: Answer) -> None:
        meta = answer["meta_info"]
        if aborted(answer):
            return self._aborted(request, meta["finish_reason"])
        if "fathom" not in meta:
            raise Wrong("an answer without an account")
        tokens, retracted = answer["output_ids"], meta.get("num_retractions", 0)
        if not tokens:
            raise Wrong("an answer without a token")
        policy = accounts.in_effect(request, meta["fathom"], self.world)
        self._live(policy, meta["fathom"], retracted)
        if not compared(request) or self._drawn_otherwise(policy):
            if not self._may_differ(meta["fathom"], retracted):
                unknown = self._drawn_otherwise(policy)
                self.repeats.check(Asked(request, policy, self._ends(request), unknown), answer)
            if request.kind == "grammar":
                self.repeats.check_grammar(request, answer)
            return None
        want = self._tokens(request, policy, answer, retracted)
        if want is None:
            return None
        inexact = self._may_differ(meta["fathom"], retracted)
        if request.logprobs and not inexact:
            self._logprobs(request, policy, want, answer)
        if request.kind == "prompt logprobs":
            self._prompt_logprobs(request, answer)
        if not retracted and not self.world.scarce_evidence:
            stopped = tokens[-1] in self._ends(request)
            told = (len(request.prompt), policy, want, len(tokens), stopped, meta["fathom"])
            accounts.check(self.world, *told)
            self.counts["accounts compared"] += 1
        return None

    def _aborted(self, request: Request, reason: dict[str, Any]) -> None:
        if any(words in reason.get("message", "") for words in TOO_LONG):
            return self._too_long(request)
        if request.kind == "abort" or any(other.kind == "abort all" for other in self.wave):
            self.counts["aborted as asked"] += 1
            return None
        raise Wrong(f"the server gave it up: {reason}")

    def _reference(self, request: Request) -> Reference:
        return self.reference.of(request.adapter)

    def _live(self, policy: dict[str, Any], account: Answer, retracted: int) -> None:
        """Which mechanisms the account shows."""
        kept, prompt = account["kept_tokens"], account["prompt_tokens"]
        judged = policy.get("prefill_keep_rate", 1) != 1 and prompt >= policy["min_prompt_tokens"]
        ran = {
            "SPEED": "depth_cutoff" in policy and account["deep_tokens"] < min(kept, prompt),
            "SpecPrefill": judged and kept < prompt,
            "FastKV's selection": account["propagated_tokens"] is not None,
            "KV retention": account["retained_tokens"] < kept,
            "SFI": account["fast_steps"] > 0,
            "drafting": account["accepted_tokens"] > 0,
            "retraction": retracted > 0,
            "a found prefix": account["cached_tokens"] > 0,
            "a prompt in chunks": account["prefill_steps"] > 1,
            "dense fallback": account["dense_fallbacks"] > 0,
            "an adapter": "adapter" in account,
        }
        self.counts.update(name for name, did in ran.items() if did)
        self.counts["answers"] += 1

    def _drawn_otherwise(self, policy: dict[str, Any]) -> bool:
        """Choices at random that the oracle does not make: among cached entries, or by each of two devices."""
        by_device = self.world.devices > 1 and policy.get("sfi_selection") == "random"
        return by_device or policy.get("retention_policy") == "random"

    def _may_differ(self, account: Answer, retracted: int) -> bool:
        """Whether SFI's answer depends on what ran beside it: after a retraction, or with little evidence."""
        slow_fast = account["policy"]["decode"] == "slow_fast"
        return slow_fast and (retracted > 0 or self.world.scarce_evidence)

    def _ends(self, request: Request) -> frozenset[int]:
        if request.sampling.get("ignore_eos", True):
            return frozenset()
        return self.reference.ends | frozenset(request.sampling.get("stop_token_ids", ()))

    def _tokens(
        self, request: Request, policy: dict[str, Any], answer: Answer, retracted: int
    ) -> combined.Answer | None:
        """Compare the tokens of a greedy answer; None where they may differ, and do."""
        tokens, ends = answer["output_ids"], self._ends(request)
        asked = (request.prompt, policy, max(request.new_tokens, len(tokens)), ends)
        want = self._reference(request).expected(*asked)
        stop = next((i for i, token in enumerate(want.tokens) if token in ends), None)
        due = request.new_tokens if stop is None else stop + 1
        account = answer["meta_info"]["fathom"]
        inexact = self._may_differ(account, retracted)
        at = difference(tokens[:due], want.tokens)
        if at is not None:
            if inexact:
                restarts = not self.world.scarce_evidence and retracted == 1 and request.n == 1
                if restarts and not account["dense_fallbacks"] and at < MOST_RESTARTS:
                    self._restarted(request, policy, tokens, at, want)
                else:
                    self.counts["not compared: SFI after a retraction or with little evidence"] += 1
                return None
            row = want.logits[at]
            top = row.topk(2).values
            moved = float(top[0] - row[tokens[at]])
            if float(top[0] - top[1]) < TIE or self._reference(request).decided_by_rounding(
                *asked, moved=moved
            ):
                self.counts["not compared: decided by rounding"] += 1
                return None
            raise Wrong(f"token {at} of {len(tokens)} differs, taken back {retracted} times", want.tokens)
        if len(tokens) != due and not inexact:
            self._cut(request, answer, due, want)
        self.counts["greedy answers compared"] += 1
        self.counts["greedy tokens compared"] += len(tokens)
        self.drawer.remember(request.prompt, tokens, answer["text"])
        return want

    def _cut(self, request: Request, answer: Answer, due: int, want: combined.Answer) -> None:
        """An answer may be shorter than asked for where context or pool end; a prompt's copies need room too."""
        meta, tokens = answer["meta_info"], len(answer["output_ids"])
        reason, account = meta["finish_reason"], meta["fathom"]
        held = len(request.prompt) + tokens
        if account["policy"]["kv_retention_rate"] != 1:
            held += account["retained_tokens"]
        room = min(self.world.context, self.world.pool) - 4 * self.world.page - 8
        if reason["type"] != "length" or tokens > due or held < room:
            raise Wrong(f"{tokens} tokens, not {due}: {reason}", want.tokens)
        self.counts["answers cut at the context or the pool"] += 1

    def _restarted(
        self, request: Request, policy: dict[str, Any], tokens: list[int], at: int, want: combined.Answer
    ) -> None:
        """SFI's tokens from a restart on are those of a request that was taken back at one of the tokens before."""
        told, longest, nearest = (request.prompt, policy, len(tokens), self._ends(request)), 0, 0
        for count in range(at, 0, -1):
            restart = {"forced": want.tokens[:count], "taken_back": count}
            same = difference(self._reference(request).expected(*told, **restart).tokens, tokens)
            if same is None:
                self.counts["SFI's restarts explained"] += 1
                return
            if same > longest:
                longest, nearest = same, count
        restart = {"forced": want.tokens[:nearest], "taken_back": nearest}
        reference = self._reference(request)
        by_rounding = longest > at and reference.decided_by_rounding(*told, **restart)
        if not by_rounding and not reference.is_said_by_rounding(tokens, *told):
            raise Wrong(f"no restart explains token {at} of {len(tokens)}", want.tokens)
        self.counts["not compared: decided by rounding"] += 1

    def _logprobs(
        self, request: Request, policy: dict[str, Any], want: combined.Answer, answer: Answer
    ) -> None:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        told = [(meta["output_top_logprobs"], None)]
        if request.kind == "greedy":
            told.append((meta["output_token_ids_logprobs"], CHOSEN))
        worst = 0.0
        for per_token, ids in told:
            if len(per_token) != len(tokens):
                raise Wrong(f"log-probabilities of {len(per_token)} tokens, there are {len(tokens)}")
            for row, entries in zip(want.logits, per_token, strict=False):
                row = row.log_softmax(-1)
                if ids is not None and [entry[1] for entry in entries] != ids:
                    raise Wrong("log-probabilities of other ids", ids)
                worst = max(worst, *(off(value, row[token]).item() for value, token, *_ in entries))
        self.counts["log-probabilities compared"] += 1
        if worst > TOLERANCE:
            asked = (request.prompt, policy, len(tokens), self._ends(request))
            if not self._reference(request).decided_by_rounding(*asked, moved=worst):
                raise Wrong(f"log-probabilities off by {worst}")
            self.counts["not compared: decided by rounding"] += 1

    def _prompt_logprobs(self, request: Request, answer: Answer) -> None:
        start, prompt = request.details["start"], request.prompt
        told, rows = (
            answer["meta_info"]["input_token_logprobs"],
            self._reference(request).prompt_logprobs(prompt),
        )
        if len(told) != len(prompt) - start:
            raise Wrong(f"log-probabilities of {len(told)} prompt tokens, not {len(prompt) - start}")
        last = rows.shape[1] - 1
        for at, (value, token, *_) in enumerate(told, start):
            if (token, prompt[at]) == (0, last):  # SGLang's
                continue
            if token != prompt[at]:
                raise Wrong(f"prompt token {at} is shown as {token}", prompt[at])
            if value is not None and at > 0 and off(value, rows[at - 1][token]) > PROMPT_TOLERANCE:
                raise Wrong(f"log-probability {value} of prompt token {at}", float(rows[at - 1][token]))
        self.counts["prompts' log-probabilities compared"] += 1

    def _beams(self, reply: Reply) -> None:
        account = reply.answers[0]["meta_info"].get("fathom")
        if account is None:
            raise Wrong("a beam search without an account")
        accounts.in_effect(reply.request, account, self.world)
        same = beams.check(self.reference, reply)
        self.counts["beam searches compared" if same else "not compared: decided by rounding"] += 1

    def _chat(self, request: Request, answer: Answer) -> None:
        messages, choice = request.details["messages"], answer["choices"][0]
        ids, account = request.prompt, answer.get("fathom")
        if choice["finish_reason"] == "abort":
            return self._aborted(request, {})
        if account is None:
            raise Wrong("a chat without an account")
        if account["prompt_tokens"] != len(ids):
            raise Wrong(f"a prompt of {account['prompt_tokens']} tokens, not {len(ids)}")
        policy, spans = accounts.in_effect(request, account, self.world), ()
        if "prefill_keep_rate" in policy:
            kinds = policy.get("prefill_protect", PROTECTED)
            spans = find_spans(self.reference.tokenizer, messages, None, ids, kinds=kinds).tokens()
        self._live(policy, account, 0)
        if self._drawn_otherwise(policy) or self._may_differ(account, self._may_be_taken_back()):
            return None
        asked = (ids, policy, answer["usage"]["completion_tokens"], frozenset(), spans)
        want = self._reference(request).expected(*asked)
        text = self.reference.tokenizer.decode(want.tokens, skip_special_tokens=True)
        if (choice["message"]["content"] or "").strip() != text.strip():
            close = min(float(row.topk(2).values.diff().abs()) for row in want.logits) < TIE
            if not close and not self._reference(request).decided_by_rounding(*asked):
                raise Wrong("another text", [text, want.tokens])
            self.counts["not compared: decided by rounding"] += 1
            return None
        self.counts["chats compared"] += 1
        return None

    def _template(self, request: Request) -> list[int]:
        """The prompt of a chat."""
        messages, template = request.details["messages"], self.reference.tokenizer.apply_chat_template
        return list(template(messages, tokenize=True, add_generation_prompt=True, return_dict=False))

    def _may_be_taken_back(self) -> bool:
        """A chat does not tell whether it was."""
        world = self.world
        paused = any(request.kind == "pause" for request in self.wave)
        return world.tight or bool(world.retract_every) or world.prioritized or paused
