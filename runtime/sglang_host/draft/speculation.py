"""Speculative decoding in one engine step: the draft proposes, the target verifies in one pass, both roll back.

To SGLang it stays a decode step of one token per request. Room for the drafted tokens is taken before the forward
and what is rejected is given back after it, so that between steps a request holds exactly what it has put out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch

from fathom.runtime.kv.view import Batch
from fathom.runtime.sfi.trigger import Stretch
from fathom.runtime.sglang_host.attention.span_attention import virtual_slots
from fathom.runtime.sglang_host.draft.draft_model import Read
from fathom.runtime.sglang_host.draft.draft_side import DraftSide
from fathom.runtime.sglang_host.draft.lookahead import Prompt
from fathom.runtime.sglang_host.memory.tails import Tail, Tails
from fathom.runtime.sglang_host.requests import alternates, ends_of
from fathom.runtime.sglang_host.sampling.grammars import forget, trial
from fathom.runtime.sglang_host.step import passes
from fathom.runtime.sglang_host.step.bursts import lengthen
from fathom.runtime.sglang_host.step.decode_graphs import DecodeGraphRunner
from fathom.runtime.sglang_host.step.rows import (
    RowSampler,
    Run,
    SampledRows,
    allows,
    drafts,
    fetched,
    grammar_mask,
    grouped,
)
from fathom.runtime.staging import send

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class Proposal:
    """Tokens drafted for one request of a batch.

    Attributes:
        index: the request's place in the batch; tail: room for the tokens.
        tokens: what was drafted; probs: [1, vocabulary] each was drawn from, None where no chance was in it.
        masks: of the grammar, before each token and after the last.
        ahead: the look-ahead that the tokens come from, if they do.
        ended: whether the last token ends what the grammar allows.
        stretch: of a request that decodes slow and fast: how far it may go before a slow step.
        tried: the request's grammar while tokens are tried on it.
    """

    index: int
    tail: Tail
    sampler: RowSampler
    tokens: list[int] = field(default_factory=list)
    probs: list[torch.Tensor | None] = field(default_factory=list)
    masks: list[torch.Tensor | None] = field(default_factory=list)
    ahead: Prompt | None = None
    ended: bool = False
    stretch: Stretch | None = None
    tried: Any = None


def room_for_output(proposal_limit: int, request: Any) -> int:
    """How many drafted tokens can still be put out before the one that ends the answer.

    That is the last one that its length allows, or the next one where its grammar has come to an end: a request may
    go on behind the ids that end other answers.
    """
    if request.grammar is not None and request.grammar.is_terminated():
        return 0
    left = request.sampling_params.max_new_tokens - len(request.output_ids)
    return max(min(proposal_limit, left - 1), 0)


def propose(
    batch: ScheduleBatch, side: DraftSide, tails: Tails, stretches: Mapping[Any, Stretch]
) -> list[Proposal]:
    """Draft tokens for the requests of a decode batch that want them and have room for them.

    Args:
        stretches: how far requests go on with fast steps. A slow step verifies nothing.
    """
    places, wanted = [], []
    for index, request in enumerate(batch.reqs):
        if not drafts(request):
            continue
        width = room_for_output(side.width(request), request)
        if (stretch := stretches.get(request)) is not None:
            width = min(width, stretch.left - 1)
        if width > 0:
            places.append(index)
            wanted.append((request, width))
    proposals = [
        Proposal(
            index,
            tail,
            RowSampler(tail.request, batch.sampling_info, index),
            stretch=stretches.get(tail.request),
        )
        for index, tail in zip(places, tails.take(wanted), strict=True)
        if tail.count
    ]
    if proposals:
        _draft(proposals, side)
    return _shrunk(proposals, tails)


def _shrunk(proposals: Sequence[Proposal], tails: Tails) -> list[Proposal]:
    """Those with tokens; a draft that met the end of the answer leaves room unused."""
    shorter = tails.shrink([p.tail for p in proposals], [len(p.tokens) for p in proposals])
    for proposal, tail in zip(proposals, shorter, strict=True):
        proposal.tail = tail
    return [proposal for proposal in proposals if proposal.tokens]


def propose_ahead(batch: ScheduleBatch, side: DraftSide, tails: Tails) -> list[Proposal]:
    """Take up what the draft said while it judged the prompts that end in this prefill batch.

    These tokens go through the target in the same forward as the kept tokens of the prompt, so that the first
    output may be several tokens. Not for a request that decodes slow and fast: its first step is slow.
    """
    # Log-probabilities of prompt tokens fill the rows of the logits.
    full = batch.return_logprob and any(
        start < new for start, new in zip(batch.extend_logprob_start_lens, batch.extend_lens, strict=True)
    )
    said: list[tuple[int, Prompt]] = []
    for index, request in enumerate(batch.reqs):
        state = side.state(request)
        ahead, state.ahead = state.ahead, None
        if ahead is not None and not full and drafts(request) and not alternates(request):
            said.append((index, ahead))
    wanted = [(batch.reqs[i], room_for_output(len(ahead.tokens), batch.reqs[i])) for i, ahead in said]
    proposals = [
        Proposal(index, tail, RowSampler(tail.request, batch.sampling_info, index), ahead=ahead)
        for (index, ahead), tail in zip(said, tails.take(wanted), strict=True)
    ]
    for proposal, (_, ahead) in zip(proposals, said, strict=True):
        _take_up(proposal, ahead.tokens[: proposal.tail.count], side.model.vocabulary)
    return _shrunk(proposals, tails)


def _take_up(proposal: Proposal, tokens: Sequence[int], vocabulary: int) -> None:
    """Propose tokens up to the first that the request's grammar does not allow."""
    grammar = trial(proposal.sampler.request.grammar)
    for token in tokens:
        mask = grammar_mask(grammar, vocabulary)
        if grammar is not None:
            # Not by trying: llguidance does not recover from a token that it forbids.
            if grammar.is_terminated() or not allows(mask, token):
                break
            grammar.accept_token(token)
        proposal.tokens.append(token)
        proposal.probs.append(None)
        proposal.masks.append(mask)
    proposal.masks.append(grammar_mask(grammar, vocabulary))
    if grammar is not None and proposal.tokens:
        proposal.ended = grammar.is_terminated()
        forget(grammar, proposal.sampler.request.grammar, len(proposal.tokens))


def _draft(proposals: Sequence[Proposal], side: DraftSide) -> None:
    """Read what the draft has not read, then decode, all requests at once."""
    lists = side.lists([(p.tail.request, p.tail.begin + p.tail.count) for p in proposals])
    logits = side.read([(p.tail.request, p.tail.begin) for p in proposals], lists)
    running = list(enumerate(proposals))
    for proposal in proposals:
        proposal.tried = trial(proposal.sampler.request.grammar)
    while running:
        chose = _choose([p for _, p in running], logits)
        running = [each for each, any_ in zip(running, chose, strict=True) if any_ and _goes_on(each[1])]
        if running:
            reads = [Read(which, p.tail.begin + len(p.tokens), p.tokens[-1:]) for which, p in running]
            logits = side.model.read(lists, reads)
    for proposal in proposals:
        grammar, count = proposal.tried, len(proposal.tokens)
        if _is_last(proposal) and proposal.probs[-1] is None:
            # The target's own choice after the tokens before it is as good, and costs no row. Not so of a token
            # that was drawn: left out because of what it is, it would be said too rarely.
            proposal.tokens.pop()
            proposal.probs.pop()
        else:
            proposal.masks.append(grammar_mask(grammar, logits.shape[1]))
            proposal.ended = grammar is not None and grammar.is_terminated()
        if grammar is not None:
            forget(grammar, proposal.sampler.request.grammar, count)


def _choose(proposals: Sequence[Proposal], logits: torch.Tensor) -> list[bool]:
    """The next token of each, from the draft's logits [proposals, vocabulary].

    Returns:
        Whether there was one: a grammar may come to where it allows nothing.
    """
    masks = [grammar_mask(p.tried, logits.shape[1]) for p in proposals]
    found: list[torch.Tensor] = []
    drawn_from: list[torch.Tensor | None] = []
    for part in grouped([1] * len(proposals)):
        some = [p.sampler for p in proposals[part]]
        rows = SampledRows(some, [1] * len(some), logits.device)
        tokens_of_some, probs_of_some = rows.propose(rows.prepare(logits[part], masks[part]))
        found.append(tokens_of_some)
        drawn_from += probs_of_some
    tokens = torch.cat(found).tolist()
    allowed = [allows(mask, token) for mask, token in zip(masks, tokens, strict=True)]
    for proposal, token, probs, mask, may in zip(proposals, tokens, drawn_from, masks, allowed, strict=True):
        if not may:
            continue
        proposal.tokens.append(token)
        proposal.probs.append(probs)
        proposal.masks.append(mask)
        if proposal.tried is not None:
            proposal.tried.accept_token(token)
    return allowed


def _goes_on(proposal: Proposal) -> bool:
    if proposal.tried is not None and proposal.tried.is_terminated():
        return False
    if _is_last(proposal):
        return False
    ends = ends_of(proposal.tail.request)
    return len(proposal.tokens) < proposal.tail.count and proposal.tokens[-1] not in ends


def _is_last(proposal: Proposal) -> bool:
    """Whether the step after the last token is slow, so that no pass may go on behind it."""
    return proposal.stretch is not None and proposal.stretch.ends(proposal.tokens) is not None


class VerifyForward:
    """Takes the place of ``model.forward`` for one decode batch; drafted tokens are rows beside the batch's own."""

    def __init__(self, runner: "ModelRunner", batch: ScheduleBatch, proposals: Sequence[Proposal]) -> None:
        self.runner, self.rows = runner, batch.req_to_token_pool.req_to_token
        self.pool_rows, self.lengths = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
        self.drafted: dict[int, list[int]] = {p.index: p.tokens for p in proposals}
        self.logits: dict[int, torch.Tensor] = {}
        beams = len(self.pool_rows) - len(batch.reqs)  # further rows, of requests that have no adapter
        self.adapters = [request.lora_id for request in batch.reqs] + [None] * beams

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: "ForwardBatch", **_: Any
    ) -> LogitsProcessorOutput:
        tokens: list[int] = []
        places, new, lengths = [], [], []
        for index, (token, length) in enumerate(zip(input_ids.tolist(), self.lengths, strict=True)):
            drafted = self.drafted.get(index, [])
            tokens += [token, *drafted]
            new.append(1 + len(drafted))
            lengths.append(length + len(drafted))
            places.append(np.arange(length - 1, lengths[-1]))
        rows, count, ends = np.array(self.pool_rows), np.array(new), np.array(lengths)
        computed = Batch.plain(rows, ends, virtual_slots(self.rows, rows, ends), count)
        adapters = [x for x, rows_of in zip(self.adapters, new, strict=True) for _ in range(rows_of)]
        given = self.runner, tokens, np.concatenate(places), np.arange(len(tokens))
        capture = forward_batch.capture_hidden_mode
        compose = partial(passes.prepare, *given, adapters=adapters, capture=capture)
        graphs, output = self.runner.decode_cuda_graph_runner, None
        if isinstance(graphs, DecodeGraphRunner):
            output = graphs.several(computed, partial(compose, decode=True))
        if output is None:
            self.runner.attn_backend.set_batch(computed)
            output = passes.run(self.runner, compose())
        first, logits, hidden = np.cumsum(count) - count, output.next_token_logits, output.hidden_states
        self.logits = {i: logits[first[i] : first[i] + count[i]] for i in self.drafted}
        own = send(first, logits.device)
        return LogitsProcessorOutput(
            next_token_logits=logits[own].clone(), hidden_states=None if hidden is None else hidden[own]
        )


def settle(
    batch: ScheduleBatch,
    proposals: Sequence[Proposal],
    logits: Mapping[int, torch.Tensor],
    side: DraftSide,
    tails: Tails,
) -> dict[int, Run]:
    """Decide what stands, give back the rest, and move the batch on.

    Args:
        logits: by place in the batch: [drafted + 1, vocabulary] of the target.

    Returns:
        The runs by place in the batch.
    """
    extra = np.zeros(len(batch.seq_lens_cpu), np.int64)
    prepared, answers = _judged(proposals, logits)
    kept, stand = [], []
    for proposal, (stood, *tokens) in zip(proposals, answers.tolist(), strict=True):
        drafted = proposal.tokens
        tokens = tokens[: stood + 1]
        if proposal.ended:
            tokens = tokens[: len(drafted)]  # nothing follows the end
        elif stood and not allows(proposal.masks[stood], tokens[-1]):
            tokens.pop()  # the grammar allows nothing there, which the next step finds
        if proposal.stretch is not None:
            tokens = tokens[: proposal.stretch.ends(tokens)]  # the next step is slow
        stand.append(tokens)
        accepted = len(tokens) - 1
        kept.append(accepted)
        state = side.state(proposal.tail.request)
        state.read, state.guess = proposal.tail.begin + _read_of(proposal, accepted, side), None
        state.pace.record(len(drafted), min(stood, len(tokens)))
        side.totals.proposed += len(drafted)
        side.totals.accepted += accepted
        extra[proposal.index] = accepted
    samplers = [proposal.sampler for proposal in proposals]
    asked = zip(samplers, prepared, stand, strict=True)
    numbers = fetched([x for sampler, each, tokens in asked for x in sampler.asked_of(each, tokens)])
    runs = {p.index: p.sampler.run(tokens, numbers) for p, tokens in zip(proposals, stand, strict=True)}
    tails.settle([proposal.tail for proposal in proposals], kept)
    longer = torch.from_numpy(extra)
    batch.seq_lens_cpu = batch.seq_lens_cpu + longer
    lengthen(batch, longer)
    batch.seq_lens_sum = None
    return runs


def _judged(
    proposals: Sequence[Proposal], logits: Mapping[int, torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Of each its prepared logits [drafted + 1, vocabulary]; what :meth:`SampledRows.accept` makes of all."""
    prepared: list[torch.Tensor] = []
    answers = []
    width = max(len(p.tokens) for p in proposals)
    for part in grouped([len(p.tokens) + 1 for p in proposals]):
        some = proposals[part]
        own = [logits[p.index] for p in some]
        rows = SampledRows([p.sampler for p in some], [len(p.tokens) + 1 for p in some], own[0].device)
        given = rows.prepare(torch.cat(own), [mask for p in some for mask in p.masks])
        drafted, drawn_from = [p.tokens for p in some], [p.probs for p in some]
        answers.append(rows.accept(given, drafted, drawn_from, [p.tail.begin - 1 for p in some], width))
        prepared += given.split(rows.counts.tolist())
    return prepared, torch.cat(answers)


def _read_of(proposal: Proposal, accepted: int, side: DraftSide) -> int:
    """How many of the accepted tokens the draft has KV of, in the request's own slots."""
    if proposal.ahead is None:
        return min(accepted, len(proposal.tokens) - 1)
    scratch, tail = proposal.ahead.scratch, proposal.tail
    count = min(accepted, len(proposal.ahead.tokens) - 1, len(scratch))
    if count:
        slots = side.slots(tail.request, tail.begin + count)
        side.model.copy(scratch[:count], slots[tail.begin :])
    return count
