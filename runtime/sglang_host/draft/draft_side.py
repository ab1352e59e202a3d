"""What the draft does in an engine step: it reads what its requests bring, and judges prompts."""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from fathom.runtime.draft.pace import LONGEST_REST, Evidence, Pace, shared_evidence
from fathom.runtime.kv.lists import SlotLists
from fathom.runtime.sglang_host import requests
from fathom.runtime.sglang_host.draft.draft_attention import Captured
from fathom.runtime.sglang_host.draft.draft_model import DraftModel, Read
from fathom.runtime.sglang_host.draft.lookahead import Prompt, groups, look_ahead
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.step.rows import drafts, fetched, is_greedy, without_overflow
from fathom.runtime.specprefill.select import Selection, select_prompt
from fathom.runtime.specprefill.step import RANDOM, random_scores
from fathom.runtime.staging import send, take

CATCH_UP = LONGEST_REST
"""Generated tokens that may wait until the draft reads them, where it does not draft."""


@dataclass
class Options:
    """What the operator set for drafting; once per process.

    Attributes:
        cost: time of a draft step as a share of a target step's, or None to estimate it from the models.
    """

    cost: float | None = None


OPTIONS = Options()


@dataclass(frozen=True)
class Guess:
    """The token that the draft expects next, and the probability that it gives it."""

    token: int
    sure: float


@dataclass
class DraftState:
    """What the draft knows of one request.

    Attributes:
        pace: how many tokens to draft next.
        read: tokens, from the first one on, whose KV the draft holds.
        read_in_all: tokens that it has read for this request; those that it found in the cache are not among them.
        selection: which prompt tokens enter the target, once decided; it outlives a retraction.
        ahead: what the draft would say after the prompt, while that can still be of use.
        guess: of the token after those that have been read, until that one is known.
    """

    pace: Pace
    read: int = 0
    read_in_all: int = 0
    selection: Selection | None = None
    ahead: Prompt | None = None
    guess: Guess | None = None


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
        evidence: what the target made of the draft's tokens lately.
    """

    model: DraftModel
    rows: torch.Tensor
    totals: Counters = field(default_factory=Counters)
    evidence: Evidence = field(default_factory=shared_evidence)
    states: weakref.WeakKeyDictionary[Req, DraftState] = field(default_factory=weakref.WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.cost = self.model.step_cost() if OPTIONS.cost is None else OPTIONS.cost

    def state(self, request: Req) -> DraftState:
        """The request's state, made at first sight."""
        state = self.states.get(request)
        if state is None:
            most = requests.policy_of(request).get("draft_tokens", 0)
            state = self.states[request] = DraftState(Pace(max(most, 1), self.cost, self.evidence))
        return state

    def slots(self, request: Req, end: int) -> torch.Tensor:
        """[end] int32 virtual slots of a request's first tokens: a part of the table."""
        return self.rows[request.kv.req_pool_idx, :end]

    def lists(self, ends: Sequence[tuple[Req, int]]) -> SlotLists:
        """Of each request the slots of its first tokens."""
        return SlotLists([self.slots(request, end) for request, end in ends])

    def readable(self, reading: Sequence[tuple[Req, int]]) -> list[Read]:
        """What the draft has not read of each request's first ``end`` tokens."""
        return [
            Read(which, end, self._unread(request)[: end - self.state(request).read])
            for which, (request, end) in enumerate(reading)
        ]

    def _unread(self, request: Req) -> list[int]:
        prompt, read = len(request.origin_input_ids), self.state(request).read
        return [*request.origin_input_ids[read:], *request.output_ids[max(read - prompt, 0) :]]

    def read_prefill(self, batch: ScheduleBatch) -> bool:
        """Read the new prompt tokens of a prefill batch, and judge the prompts that end in it.

        Returns:
            Whether there was anything for the draft to do.
        """
        decoding = set(batch.decoding_reqs or ())
        reading: list[tuple[Req, int]] = []
        for request, begin, new in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            if request not in decoding and requests.uses_draft(request):
                # What is behind the prefix has been read: by this request, or by the one that left it in the cache.
                self.state(request).read = begin
                reading.append((request, begin + new))
        if not reading:
            return False
        captured = Captured(torch.empty(0))
        logits = self.read(reading, self.lists(reading), captured)
        whole = [
            drafts(request) and end == len(request.origin_input_ids) + len(request.output_ids)
            for request, end in reading
        ]
        asked = [(request, int(known)) for (request, _), known in zip(reading, whole, strict=True)]
        rows = [place for place, known in enumerate(whole) if known]
        for (request, _), found in zip(reading, _guesses(asked, take(logits, rows)), strict=True):
            self.state(request).guess = found[0] if found else None
        judged = [
            place
            for place, (request, end) in enumerate(reading)
            if self.state(request).selection is None
            and requests.is_judged(request)
            and end >= requests.prompt_tokens(request)
        ]
        self._judge([reading[place][0] for place in judged], take(logits, judged), captured, judged)
        return True

    def read(
        self, reading: Sequence[tuple[Req, int]], lists: SlotLists, captured: Captured | None = None
    ) -> torch.Tensor:
        """Read each request up to ``end``; logits [requests, vocabulary] after its last token."""
        reads = self.readable(reading)
        logits = self.model.read(lists, reads, captured)
        for (request, end), read in zip(reading, reads, strict=True):
            self._note(request, end, read)
        return logits

    def _note(self, request: Req, end: int, read: Read) -> None:
        state = self.state(request)
        state.read = end
        state.read_in_all += len(read.tokens)
        self.totals.read += len(read.tokens)

    def width(self, request: Req) -> int:
        """Tokens to draft in the next step, which the guess of the token that it brings decides too."""
        state = self.state(request)
        if state.guess is not None and state.pace.patience is None:
            _learn(state.pace, [state.guess], self._unread(request)[:1])
            state.guess = None
        return state.pace.width()

    def catch_up(self, batch: ScheduleBatch) -> None:
        """Read generated tokens that have piled up: so that the prefix cache may keep them, and to see whether the
        draft would have foreseen them."""
        reading = []
        # Beams have more rows.
        for request, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=False):
            if requests.uses_draft(request):
                # Where steps overlap, the last token may be unknown yet.
                length = min(length, len(request.origin_input_ids) + len(request.output_ids))
                state = self.state(request)
                patience = state.pace.patience if drafts(request) else None
                if length - state.read >= (patience or CATCH_UP):
                    reading.append((request, length))
        if reading:
            self._read_and_compare(reading)

    def _read_and_compare(self, reading: Sequence[tuple[Req, int]]) -> None:
        reads = self.readable(reading)
        logits = self.model.read(self.lists(reading), reads, every=True)
        counts = [len(read.tokens) for read in reads]
        compared = [drafts(request) for request, _ in reading]
        rows = np.flatnonzero(np.repeat(compared, counts)).tolist()
        asked = [
            (request, count if compares else 0)
            for (request, _), count, compares in zip(reading, counts, compared, strict=True)
        ]
        found = _guesses(asked, take(logits, rows))
        for (request, end), read, own, compares in zip(reading, reads, found, compared, strict=True):
            state = self.state(request)
            if compares:
                first = [] if state.guess is None else [state.guess]
                *guesses, state.guess = first + own
                _learn(state.pace, guesses, read.tokens[1 - len(first) :])
            self._note(request, end, read)

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
                {layer: [take(parts[0], at)] for layer, parts in captured.queries.items()},
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
        """For the engine's state (JSON-safe); bytes are those of all devices."""
        shared_by, sizes = self.model.runner.ps.tp_size, self.model.pool.get_kv_size_bytes()
        return {
            "model": self.model.runner.model_config.model_path,
            **devices.numbers_of(self.model.runner),
            "layers": self.model.pool.layer_num,
            "slots": self.model.scratch - self.model.pool.page_size,
            "kv_bytes": int(sum(sizes)) * shared_by,
            "requests": len(self.states),
            "step_cost": self.cost,
            "ended_rows": self.model.backend.ended_rows,
            "placed_lists": self.model.placed_lists,
            "replayed_steps": getattr(self.model.graphs, "replayed", {}),
        } | vars(self.totals)


def _guesses(asked: Sequence[tuple[Req, int]], logits: torch.Tensor) -> list[list[Guess]]:
    """What the draft expects after each row of logits [rows, vocabulary]; one wait for all of them.

    Args:
        asked: requests, with so many rows each; at their temperatures.
    """
    counts = [count for _, count in asked]
    if not len(logits):
        return [[] for _ in counts]
    logits = without_overflow(logits)
    own = [0.0 if is_greedy(request) else request.sampling_params.temperature for request, _ in asked]
    heat = np.repeat(np.array(own, np.float32), counts)
    warm = send(np.flatnonzero(heat), logits.device)
    most = torch.ones(len(logits), device=logits.device)
    if len(warm):
        scaled = logits[warm] / send(heat[heat > 0], logits.device).view(-1, 1)
        most.index_copy_(0, warm, torch.softmax(scaled, -1).amax(-1))
    tokens, sure = fetched([logits.argmax(-1), most])
    guesses = map(Guess, tokens.astype(np.int64).tolist(), sure.tolist())
    return [list(itertools.islice(guesses, count)) for count in counts]


def _learn(pace: Pace, guesses: Sequence[Guess], tokens: Sequence[int]) -> None:
    """Evidence from tokens that were not drafted.

    A draft as good as the target foresees as many tokens as it is sure of: of tokens drawn at random, few.
    """
    stood = sum(guess.token == token for guess, token in zip(guesses, tokens, strict=True))
    pace.learn(stood, sum(guess.sure for guess in guesses))
