"""The target's prefill of the prompt tokens that the draft chose, at the positions they have in the prompt.

While a prompt is still arriving, only the draft computes: the target's row of it is a ghost. With the chunk that
brings the last prompt token the choice is made, and the target computes all chosen tokens in that step, in
sub-chunks of at most the engine's chunk size so that activations stay bounded.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from fathom.runtime import staircase
from fathom.runtime.kv.places import Places
from fathom.runtime.plan import SCORED
from fathom.runtime.sglang_host.draft.draft_side import DraftSide
from fathom.runtime.sglang_host.draft.speculation import Proposal
from fathom.runtime.sglang_host.layers import lora
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.requests import is_judged, prompt_tokens
from fathom.runtime.sglang_host.step import passes
from fathom.runtime.sglang_host.step.spans import SpanForward
from fathom.runtime.staging import send
from fathom.runtime.staircase import Rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class KeptForward(SpanForward):
    """A staircase whose judged prompts enter with their kept tokens."""

    def __init__(
        self,
        runner: "ModelRunner",
        batch: "ScheduleBatch",
        allocator: DepthAllocator,
        side: DraftSide,
        chunk: int,
        proposals: Sequence[Proposal] = (),
    ) -> None:
        super().__init__(runner, batch, allocator)
        self.memory, self.requests = allocator.memory, batch.reqs
        self.entering: dict[int, np.ndarray] = {}
        self.before: dict[int, np.ndarray] = {}
        self.drafted = {proposal.index: proposal.tokens for proposal in proposals}
        self.drafted_logits: dict[int, torch.Tensor] = {}
        for index, (request, work) in enumerate(zip(batch.reqs, self.works, strict=True)):
            if not is_judged(request) or work.begin >= work.prompt_tokens:
                continue
            self.entering[index] = np.zeros(0, np.int64)
            if work.end >= work.prompt_tokens:
                self._enter(index, request, side, chunk)

    @property
    def idle(self) -> bool:
        """Whether nothing enters: all of the batch are chunks before the ends of prompts that the draft judges."""
        return len(self.entering) == len(self.works) and not self.before

    def _enter(self, index: int, request: "Req", side: DraftSide, chunk: int) -> None:
        """Split what enters into the sub-chunks that go first and the one that goes with the batch."""
        work, selection = self.works[index], side.state(request).selection
        assert selection is not None, "the prompt has ended and nobody chose from it"
        kept = selection.tokens.cpu().numpy()
        drafted = len(self.drafted.get(index, ()))
        enters = np.concatenate([kept, np.arange(work.prompt_tokens, work.end + drafted)])
        # Everything from the last prompt token on goes with the batch, and what judges the others.
        split = min(max(len(enters) - chunk, 0), max(len(kept) - work.plan.window, 0))
        self.before[index], self.entering[index] = enters[:split], enters[split:]
        row = request.kv.req_pool_idx
        self.memory.choose(row, 0, kept)
        for span in self.memory.tables.lengths(row):
            step = work.plan.step_of_span(span)
            if step is not None and step.kind == SCORED and step.layer == 0:
                count = len(kept) if span in self.memory.pending(row) else len(enters)
                self.memory.tables.truncate(row, span, count)
        self.chunk = chunk

    def first_rows(self) -> Rows:
        for index, positions in self.before.items():
            for begin in range(0, len(positions), self.chunk):
                self._run_before(index, begin, min(begin + self.chunk, len(positions)))
        return staircase.first_rows(self.works, self.entering)

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **options: Any
    ) -> Any:
        wanted, forward_batch.return_logprob = forward_batch.return_logprob, self._may_want(forward_batch)
        output = super().__call__(input_ids, positions, forward_batch, **options)
        forward_batch.return_logprob = wanted
        if self.drafted:
            self._split(output, forward_batch.capture_hidden_mode.is_last())
        return output

    def _may_want(self, forward_batch: Any) -> bool:
        # With drafted rows the logits have more rows than requests; nobody wants a prompt's log-probabilities then.
        return forward_batch.return_logprob and not self.drafted

    def _split(self, output: LogitsProcessorOutput, with_states: bool) -> None:
        """Leave logits [requests, vocabulary], without drafted rows between them, and states of the same rows."""
        logits = output.next_token_logits
        counts = np.array([1 + len(self.drafted.get(index, ())) for index in range(len(self.works))])
        first = np.cumsum(counts) - counts
        for index in self.drafted:
            self.drafted_logits[index] = logits[first[index] : first[index] + counts[index]].clone()
        own = send(first, logits.device)
        output.next_token_logits = logits[own]
        if with_states:
            output.hidden_states = output.hidden_states[own]

    def _resize(self, rows: Rows, count: np.ndarray) -> None:
        super()._resize(rows, count)
        if self.drafted:
            extra = [len(self.drafted.get(index, ())) for index in range(len(count))]
            parts = [[new - more, *[1] * more] for new, more in zip(count.tolist(), extra, strict=True)]
            passes.set_wanted(self.forward_batch, np.concatenate(parts).astype(np.int64))
            pairs = zip(self.adapters, parts, strict=True)
            lora.assign(self.runner, self.forward_batch, [x for x, part in pairs for _ in part])

    def _run_before(self, index: int, begin: int, end: int) -> None:
        """Compute entries ``begin .. end - 1`` of a request's kept tokens, up to where its plan narrows again."""
        request, plan, span = self.requests[index], self.works[index].plan, self.backend.token_to_kv_pool.span
        upper = next((step.layer for step in plan.steps if step.layer > 0), plan.layers)
        positions = self.before[index][begin:end]
        row = request.kv.req_pool_idx
        places = Places(self.before[index][:end], self.works[index].prompt_tokens)
        self.backend.set_batch(self.plain)
        for level in range(upper // span):
            slots = self.memory.tables.slots(row, level, 0, end)
            self.backend.views[level] = passes.segments([slots], [end - begin], [places])
        tokens = tokens_at(request, positions)
        last = np.array([len(positions) - 1])
        batch = passes.prepare(self.runner, tokens, positions, last, adapters=[request.lora_id])
        # Requests of the step that decode slow and fast have no rows here.
        alternating, self.backend.alternating = self.backend.alternating, None
        given = batch.input_ids, batch.positions, batch
        waits = self.compression if plan.propagation is not None else None
        low = upper - 1 if waits is None else upper
        if low > 0:
            self.model.forward_split_prefill(*given, (0, low))
        if waits is not None:
            waits.wait(index, positions, batch.hidden_states, batch.residual)
        else:  # nobody reads what they are above their last layer
            self.backend.store_alone(lambda: self.model.forward_split_prefill(*given, (low, upper)))
            self.backend.ended_rows += len(positions)
        self.backend.alternating = alternating

    def _load(self, rows: Rows, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Tokens and positions of all rows; those of judged prompts do not stand in SGLang's input."""
        ids: list[Any] = []
        begin, offset = np.searchsorted(rows.request, np.arange(len(self.works) + 1)), 0
        for index, work in enumerate(self.works):
            mine, new = slice(begin[index], begin[index + 1]), work.end - work.begin
            if index in self.entering:
                drafted = self.drafted.get(index, [])
                tokens = tokens_at(self.requests[index], rows.position[mine], drafted)
                ids.append(send(torch.tensor(tokens), input_ids.device, input_ids.dtype))
            else:
                if rows.again[mine.start]:
                    first = torch.tensor([self.first_tokens[index]])
                    ids.append(send(first, input_ids.device, input_ids.dtype))
                ids.append(input_ids[offset : offset + new])
            offset += new
        self.input_ids = torch.cat(ids)
        self.positions = send(rows.position.astype(np.int64), positions.device, positions.dtype)
        self.forward_batch.hidden_states = self.forward_batch.residual = None


def tokens_at(request: "Req", positions: np.ndarray, drafted: Sequence[int] = ()) -> list[int]:
    """Token ids of a request, and of what was drafted after it, at some positions."""
    prompt, origin = prompt_tokens(request), request.origin_input_ids
    output = [*request.output_ids, *drafted]
    return [origin[at] if at < prompt else output[at - prompt] for at in positions.tolist()]
