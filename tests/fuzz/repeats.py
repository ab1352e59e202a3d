"""Answers that no oracle has: each is compared with the one that the same request got before."""

import json
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from fuzz.clients import Wrong
from fuzz.reference import Reference
from fuzz.requests import Request
from greedy import TOLERANCE

TIE = 1e-3
"""Tokens whose logits or log-probabilities are as close may change places."""

Answer = dict[str, Any]


class Repeats:
    """Answers to seeded, constrained and altered requests, and to greedy ones that choose entries at random."""

    def __init__(self, reference: Reference, counts: Counter[str]) -> None:
        self.reference, self.counts = reference, counts
        self._seen: dict[str, Answer] = {}

    def check(
        self, request: Request, policy: dict[str, Any], ends: Collection[int], unknown: bool, answer: Answer
    ) -> None:
        """Compare with the answer before.

        Args:
            policy: as it took effect. ends: ids that end the answer.
            unknown: whether the oracles cannot compute the logits either.
        """
        sampling = request.sampling
        if answer["meta_info"].get("num_retractions", 0) and any("penalty" in name for name in sampling):
            return  # what a penalty counts begins anew
        key = json.dumps([request.prompt, policy, sampling, sorted(ends)], sort_keys=True)
        before = self._seen.setdefault(key, answer)
        if before is not answer and self._same(request, policy, ends, unknown, answer, before):
            self.counts["repeats compared"] += 1
        whole = sampling.get("top_k") == -1 and sampling.get("top_p") == 1.0
        if request.kind == "seeded" and request.logprobs and whole and not unknown:
            self._seeded_logprobs(request, policy, ends, answer)

    def _same(
        self,
        request: Request,
        policy: dict[str, Any],
        ends: Collection[int],
        unknown: bool,
        answer: Answer,
        before: Answer,
    ) -> bool:
        """Whether they could be compared; one of them may have been asked for fewer tokens."""
        tokens, others = answer["output_ids"], before["output_ids"]
        at = difference(tokens, others)
        if at is not None:
            if request.kind == "seeded" and not unknown:
                told = {"forced": tokens[: at + 1], "seed": request.sampling["sampling_seed"]}
                if self._undecided(request, policy, ends, at, others[at], told):
                    self.counts["not compared: decided by rounding"] += 1
                    return False
            raise Wrong(f"token {at} is another one than when it was asked before", others)
        shorter = min(answer, before, key=lambda each: len(each["output_ids"]))
        if len(tokens) != len(others) and shorter["meta_info"]["finish_reason"]["type"] != "length":
            raise Wrong(f"{len(tokens)} tokens, and {len(others)} when it was asked before", others)
        if len(tokens) == len(others) and answer["text"] != before["text"]:
            raise Wrong("the same tokens with another text", before["text"])
        return True

    def _undecided(
        self,
        request: Request,
        policy: dict[str, Any],
        ends: Collection[int],
        at: int,
        other: int,
        told: dict[str, Any],
    ) -> bool:
        """Whether rounding may have drawn the other token: one as likely lies beside it in the order of draws."""
        asked = (request.prompt, policy, at + 1, ends)
        row = self.reference.expected(*asked, **told).logits[at].log_softmax(-1)
        close = abs(float(row[told["forced"][at]] - row[other])) < TIE
        return close or self.reference.decided_by_rounding(*asked, **told)

    def _seeded_logprobs(
        self, request: Request, policy: dict[str, Any], ends: Collection[int], answer: Answer
    ) -> None:
        """Of the tokens that were drawn, where no top-k and top-p cut anything off."""
        sampling, tokens = request.sampling, answer["output_ids"]
        asked = (request.prompt, policy, len(tokens), ends)
        told = {"forced": tokens, "seed": sampling["sampling_seed"]}
        rows = self.reference.expected(*asked, **told).logits
        entries = answer["meta_info"]["output_token_logprobs"]
        if len(entries) != len(tokens):
            raise Wrong(f"log-probabilities of {len(entries)} tokens, there are {len(tokens)}")
        want = [
            float((row / sampling["temperature"]).log_softmax(-1)[token])
            for row, token in zip(rows, tokens, strict=True)
        ]
        worst = max(abs(value - entry[0]) for value, entry in zip(want, entries, strict=True))
        if worst > 3 * TOLERANCE:
            if not self.reference.decided_by_rounding(*asked, **told):
                raise Wrong(f"log-probabilities of what was drawn off by {worst}", want)
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


def difference(tokens: list[int], others: list[int]) -> int | None:
    """Where one of them first has another token."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), None)


def off(value: float, want: float) -> float:
    """Difference of two log-probabilities; of very unlikely tokens relative to how unlikely they are."""
    return abs(value - want) / max(1.0, -value / 10)
