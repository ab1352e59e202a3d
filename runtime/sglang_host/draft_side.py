"""What the draft does in an engine step: it reads what its requests bring, and judges prompts."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from fathom.runtime.draft.pace import Pace
from fathom.runtime.sglang_host import requests
from fathom.runtime.sglang_host.draft_model import Captured, DraftModel, Read
from fathom.runtime.sglang_host.lookahead import Prompt, groups, look_ahead
from fathom.runtime.specprefill.select import Selection, select_prompt
from fathom.runtime.specprefill.step import RANDOM, random_scores

CATCH_UP = 32
"""Generated tokens that may wait until the draft reads them, where it does not draft."""


@dataclass
class DraftState:
    """What the draft knows of one request.

    Attributes:
        pace: how many tokens to draft next.
        read: tokens, from the first one on, whose KV the draft holds.
        selection: which prompt tokens enter the target, once decided; it outlives a retraction.
        ahead: what the draft would say after the prompt, while that can still be of use.
    """

    pace: Pace
    read: int = 0
    selection: Selection | None = None
    ahead: Prompt | None = None


@dataclass
class Counters:
    """Totals of this process, tokens."""

    read: int = 0
    prompts_judged: int = 0
    prompt_tokens_judged: int = 0
    prompt_tokens_kept: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass
class DraftSide:
    """The draft model and what it knows of the requests that are alive.

    Attributes:
        rows: SGLang's request table: [rows, positions] virtual slots.
    """

    model: DraftModel
    rows: torch.Tensor
    totals: Counters = field(default_factory=Counters)
    states: weakref.WeakKeyDictionary[Req, DraftState] = field(default_factory=weakref.WeakKeyDictionary)

    def state(self, request: Req) -> DraftState:
        """The request's state, made at first sight."""
        if request not in self.states:
            most = requests.policy_of(request).get("draft_tokens", 0)
            self.states[request] = DraftState(Pace(max(most, 1)))
        return self.states[request]

    def slots(self, request: Req, end: int) -> np.ndarray:
        """[end] virtual slots of a request's first tokens."""
        return self.rows[request.kv.req_pool_idx, :end].cpu().numpy().astype(np.int64)

    def readable(self, request: Req, end: int) -> Read:
        """What the draft has not read of a request's first ``end`` tokens."""
        tokens = [*request.origin_input_ids, *request.output_ids][self.state(request).read : end]
        return Read(self.slots(request, end), tokens)

    def read_prefill(self, batch: ScheduleBatch) -> None:
        """Read the new prompt tokens of a prefill batch, and judge the prompts that end in it."""
        decoding = set(batch.decoding_reqs or ())
        reading: list[tuple[Req, int]] = []
        for request, begin, new in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            if request not in decoding and requests.uses_draft(request):
                # What is behind the prefix has been read: by this request, or by the one that left it in the cache.
                self.state(request).read = begin
                reading.append((request, begin + new))
        if not reading:
            return
        captured = Captured(torch.empty(0))
        logits = self.read(reading, captured)
        judged = [
            place
            for place, (request, end) in enumerate(reading)
            if self.state(request).selection is None
            and requests.is_judged(request)
            and end >= requests.prompt_tokens(request)
        ]
        self._judge([reading[place][0] for place in judged], logits[judged], captured, judged)

    def read(self, reading: Sequence[tuple[Req, int]], captured: Captured | None = None) -> torch.Tensor:
        """Read each request up to ``end``; logits [requests, vocabulary] after its last token."""
        reads = [self.readable(request, end) for request, end in reading]
        logits = self.model.read(reads, captured)
        for (request, end), read in zip(reading, reads, strict=True):
            self.state(request).read = end
            self.totals.read += len(read.tokens)
        return logits

    def catch_up(self, batch: ScheduleBatch) -> None:
        """Read generated tokens that have piled up, so that the prefix cache may keep them."""
        reading = [
            (request, length)
            for request, length in zip(
                batch.reqs, batch.seq_lens_cpu.tolist(), strict=False
            )  # beams have more rows
            if requests.uses_draft(request) and length - self.state(request).read >= CATCH_UP
        ]
        if reading:
            self.read(reading)

    def _judge(
        self, chosen: Sequence[Req], logits: torch.Tensor, captured: Captured, places: list[int]
    ) -> None:
        """Decide which prompt tokens of each request enter the target."""
        scored = []
        for request, row, place in zip(chosen, logits, places, strict=True):
            if requests.policy_of(request)["prefill_selection"] == RANDOM:
                config = requests.specprefill_of(request)
                self._decide(request, random_scores(request.origin_input_ids, config.chunk))
            else:
                scored.append((request, row, place))
        prompts = [self._prompt(request) for request, _, _ in scored]
        together = groups(prompts)
        for group in together:
            own = [scored[i] for i in group]
            at = [place for _, _, place in own]
            first = Captured(
                captured.rows,
                {layer: [parts[0][at]] for layer, parts in captured.queries.items()},
                captured.scale,
            )
            asked = [prompts[i] for i in group]
            scores, rows = look_ahead(self.model, asked, torch.stack([row for _, row, _ in own]), first)
            begin = 0
            for (request, _, _), prompt, count in zip(own, asked, rows, strict=True):
                self._decide(request, scores[begin : begin + count, : len(prompt.slots)])
                self.state(request).ahead = prompt
                begin += count
        for i in (i for group in together[:-1] for i in group):
            prompts[i].scratch = prompts[i].scratch[:0]  # another group wrote there since

    def _prompt(self, request: Req) -> Prompt:
        steps = requests.specprefill_of(request).lookahead
        return Prompt(self.slots(request, requests.prompt_tokens(request)), steps, requests.ends_of(request))

    def _decide(self, request: Req, scores: torch.Tensor) -> None:
        config, spans = requests.specprefill_of(request), requests.protected_spans(request)
        selection = select_prompt(scores, spans, config)
        self.state(request).selection = selection
        self.totals.prompts_judged += 1
        self.totals.prompt_tokens_judged += selection.prompt_tokens
        self.totals.prompt_tokens_kept += len(selection.tokens)

    def report(self) -> dict[str, Any]:
        """For the engine's state (JSON-safe)."""
        keys, values = self.model.pool.get_kv_size_bytes()
        return {
            "model": self.model.runner.model_config.model_path,
            "layers": self.model.pool.layer_num,
            "slots": self.model.scratch - self.model.pool.page_size,
            "kv_bytes": int(keys + values),
            "requests": len(self.states),
        } | vars(self.totals)
