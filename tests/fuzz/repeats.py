"""Answers that no oracle has: each is compared with the one that the same request got before."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fuzz.clients import Wrong
from fuzz.reference import Reference
from fuzz.requests import Request
from greedy import TOLERANCE
from oracles.drawing import may_draw

TIE = 1e-3
"""Tokens whose logits or log-probabilities are as close may change places."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What was asked for, as it took effect.

    Attributes:
        ends: ids that end the answer.
        unknown: whether the oracles cannot compute the logits either.
    """

    request: Request
    policy: dict[str, Any]
    ends: frozenset[int]
    unknown: bool

    @property
    def key(self) -> str:
        """The same for requests whose answers have to be the same."""
        asked = self.request
        parts = [asked.prompt, asked.adapter, self.policy, asked.sampling, sorted(self.ends)]
        return json.dumps(parts, sort_keys=True)

    def drawn(self, tokens: list[int]) -> dict[str, Any]:
        """Arguments of ``Reference.expected`` for the tokens that were drawn."""
        return {
            "prompt": self.request.prompt,
            "policy": self.policy,
            "new_tokens": len(tokens),
            "ends": self.ends,
            "forced": tokens,
            "seed": self.request.sampling["sampling_seed"],
        }


class Repeats:
    """Answers to seeded, constrained and altered requests, and to greedy ones that choose entries at random."""

    def __init__(self, reference: Reference, counts: Counter[str]) -> None:
        self.reference, self.counts = reference, counts
        self._seen: dict[str, Answer] = {}

    def check(self, asked: Asked, answer: Answer) -> None:
        """Compare with the answer before, and what was drawn with what the oracle's logits draw."""
        request, sampling = asked.request, asked.request.sampling
        before = self._seen.setdefault(asked.key, answer)
        if before is not answer and self._same(asked, answer, before):
            self.counts["repeats compared"] += 1
        if request.kind == "seeded" and not asked.unknown:
            self._drawn(asked, answer["output_ids"])
            if request.logprobs and sampling["top_k"] == -1 and sampling["top_p"] == 1.0:
                self._logprobs(asked, answer)

    def _same(self, asked: Asked, answer: Answer, before: Answer) -> bool:
        """Whether they could be compared; one of them may have been asked for fewer tokens."""
        tokens, others = answer["output_ids"], before["output_ids"]
        at = difference(tokens, others)
        if at is not None:
            if asked.request.kind == "seeded" and self._rounded(asked, (tokens, others), at):
                self.counts["not compared: decided by rounding"] += 1
                return False
            raise Wrong(f"token {at} is another one than when it was asked before", others)
        shorter = min(answer, before, key=lambda each: len(each["output_ids"]))
        if len(tokens) != len(others) and _end(shorter) != "length":
            raise Wrong(f"{len(tokens)} tokens, and {len(others)} when it was asked before", others)
        # A stop string that a stream's events have said already cannot be taken back.
        said = self.reference.world.incremental and "stop" in asked.request.sampling
        alike = len(tokens) == len(others) and _end(answer) == _end(before)
        if alike and not said and answer["text"] != before["text"]:
            raise Wrong("the same tokens with another text", before["text"])
        return True

    def _reference(self, asked: Asked) -> Reference:
        return self.reference.of(asked.request.adapter)

    def _rounded(self, asked: Asked, answers: Iterable[list[int]], at: int) -> bool:
        """Whether rounding may have drawn another token at this place.

        Where the oracles cannot tell, SFI may have chosen between two entries of one score: of two candidates the
        mixture of least norm (Eq. 18) often makes that so.
        """
        if asked.unknown:
            return bool(asked.policy.get("decode") == "slow_fast")
        drawn = [tokens[: at + 1] for tokens in answers]
        close = all(self._strange(asked, tokens) is None for tokens in drawn)
        return close or self._reference(asked).decided_by_rounding(**asked.drawn(drawn[0]))

    def _drawn(self, asked: Asked, tokens: list[int]) -> None:
        """Whether the oracle's logits and the seed draw these tokens."""
        strange = self._strange(asked, tokens)
        if strange is None:
            self.counts["draws compared"] += len(tokens)
            return
        if not self._reference(asked).decided_by_rounding(**asked.drawn(tokens[: strange + 1])):
            raise Wrong(f"token {strange} of {len(tokens)} is none that the seed draws")
        self.counts["not compared: decided by rounding"] += 1

    def _strange(self, asked: Asked, tokens: list[int]) -> int | None:
        """The place of the first token that the oracle does not draw there."""
        rows, sampling = self._reference(asked).expected(**asked.drawn(tokens)).logits, asked.request.sampling
        last = len(asked.request.prompt) - 1
        drawn = enumerate(zip(rows, tokens, strict=True))
        return next((i for i, (row, t) in drawn if not may_draw(row, t, last + i, sampling, TIE)), None)

    def _logprobs(self, asked: Asked, answer: Answer) -> None:
        """Log-probabilities of the tokens that were drawn, where no top-k and top-p cut anything off."""
        tokens, entries = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
        if len(entries) != len(tokens):
            raise Wrong(f"log-probabilities of {len(entries)} tokens, there are {len(tokens)}")
        drawn = asked.drawn(tokens)
        temperature = asked.request.sampling["temperature"]
        rows = [
            (row / temperature).log_softmax(-1) for row in self._reference(asked).expected(**drawn).logits
        ]
        known = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        worst = max(abs(value - entry[0]) for value, entry in zip(known, entries, strict=True))
        if worst > 3 * TOLERANCE:
            if not self._reference(asked).decided_by_rounding(**drawn, moved=worst):
                raise Wrong(f"log-probabilities of what was drawn off by {worst}", known)
            self.counts["not compared: decided by rounding"] += 1
            return
        self.counts["log-probabilities compared"] += 1

    def check_grammar(self, request: Request, answer: Answer) -> None:
        """A text that ended by itself is in the language, but for the end's own text where the end is no mark."""
        if answer["meta_info"]["finish_reason"]["type"] != "stop":
            return
        endings = map(self.reference.tokenizer.decode, self.reference.ends)
        text = answer["text"]
        text = next((text.removesuffix(ending) for ending in endings if text.endswith(ending)), text)
        rule = request.sampling.get("regex")
        if rule is None:
            try:
                json.loads(text)
            except ValueError:
                raise Wrong(f"{text!r} is no JSON") from None
        elif not re.fullmatch(rule, text):
            raise Wrong(f"{text!r} is not in the grammar")
        self.counts["texts held against their grammar"] += 1


def _end(answer: Answer) -> str:
    return answer["meta_info"]["finish_reason"]["type"]


def difference(tokens: list[int], others: list[int]) -> int | None:
    """Where one of them first has another token."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), None)
