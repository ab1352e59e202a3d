"""A model's forward as a staircase: SGLang's ``forward_split_prefill`` between the edges of the batch's plans."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from fathom.runtime import staircase
from fathom.runtime.kv.view import Batch
from fathom.runtime.sglang_host.layers import lora
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.requests import prompt_tokens
from fathom.runtime.sglang_host.step import passes
from fathom.runtime.sglang_host.step.compression import CompressionStep, selectors
from fathom.runtime.staging import send
from fathom.runtime.staircase import Rows, Work, left_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class SpanForward:
    """Takes the place of ``model.forward`` for one batch; implements ``staircase.Host``.

    The hidden states of the rows that are left are in the forward batch, where SGLang's split prefill keeps them.
    """

    def __init__(self, runner: "ModelRunner", batch: "ScheduleBatch", allocator: DepthAllocator) -> None:
        self.runner, self.model, self.backend = runner, runner.model, runner.attn_backend
        self.adapters = [request.lora_id for request in batch.reqs]
        self.vocabulary = runner.model_config.vocab_size
        self.works = [
            Work(allocator.plan_of(request), begin, begin + new, prompt_tokens(request))
            for request, begin, new in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        ]
        self.compression: CompressionStep | None = None
        self.first_tokens = [request.origin_input_ids[0] for request in batch.reqs]

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: "ForwardBatch", **options: Any
    ) -> LogitsProcessorOutput:
        if options.get("input_embeds") is not None:
            raise NotImplementedError("a prompt that comes as embeddings cannot be narrowed")
        self.forward_batch, self.plain = forward_batch, self.backend.batch
        self.logprob_starts = forward_batch.extend_logprob_start_lens_cpu
        self.whole = forward_batch.capture_hidden_mode.need_capture() or self.backend.alternating is not None
        rows = self.first_rows()
        self._load(rows, input_ids, positions)
        self.logits: LogitsProcessorOutput | None = None
        chosen_by = selectors(self.compression, self._hidden) if self.compression else {}
        left = staircase.climb(self, self.works, rows, chosen_by, self._wanted())
        if left is None:
            # Chunks below the end of their prompts: what is sampled for them is dropped.
            dummy = torch.zeros(len(self.works), self.vocabulary, device=input_ids.device)
            return LogitsProcessorOutput(next_token_logits=dummy)
        assert self.logits is not None
        if forward_batch.capture_hidden_mode.is_full():
            self.logits.hidden_states = self._in_their_places(self.logits.hidden_states, left)
        return self.logits

    def _in_their_places(self, states: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Hidden states [new tokens, hidden_size] where SGLang looks for them: request after request.

        Args:
            states: [rows, hidden_size]; what a request has of other tokens, or not, nobody asks for.
        """
        begin, end = np.array([(work.begin, work.end) for work in self.works]).T
        first, at = np.cumsum(end - begin) - (end - begin), rows.position - begin[rows.request]
        new = np.flatnonzero((at >= 0) & (rows.position < end[rows.request]))
        places = states.new_zeros(int((end - begin).sum()), states.shape[1])
        places[send((first[rows.request] + at)[new], states.device)] = states[send(new, states.device)]
        return places

    def first_rows(self) -> Rows:
        """The rows at layer 0."""
        return staircase.first_rows(self.works)

    def _load(self, rows: Rows, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        device = input_ids.device
        own, again = (send(np.flatnonzero(mask), device) for mask in (~rows.again, rows.again))
        self.input_ids = input_ids.new_empty(len(rows))
        self.positions = positions.new_zeros(len(rows))
        self.input_ids[own], self.positions[own] = input_ids, positions
        first = [self.first_tokens[i] for i in rows.request[rows.again].tolist()]
        self.input_ids[again] = send(torch.tensor(first), device, input_ids.dtype)
        self.forward_batch.hidden_states = self.forward_batch.residual = None

    # --- staircase.Host ---

    def run(self, rows: Rows, low: int, high: int) -> None:
        self._begin(rows, low, high)
        self._layers(low, high)

    def pays(self, rows: int, stay: int) -> bool:
        return not self.whole and passes.pays(rows, stay)

    def end(self, rows: Rows, low: int, high: int, stay: np.ndarray) -> None:
        self._begin(rows, low, high)
        last = high - 1
        if low < last:
            self._layers(low, last)
        # Taken out before: what the layer is given it may change in place.
        states = self._states(stay)
        self.backend.store_alone(lambda: self._layers(last, high))
        self.backend.ended_rows += len(rows) - len(stay)
        if len(stay) == 0:
            return
        self._narrow(stay, states)
        self.backend.taps = {}
        self._place(left_of(rows, stay))
        self._layers(last, high)

    def _begin(self, rows: Rows, low: int, high: int) -> None:
        """Layers ``low .. high - 1`` are about to compute these rows."""
        self._place(rows)
        if self.compression is not None and self.compression.jobs:
            self.compression.start(rows, self.plain.lengths, self.plain.virtual)
            self.backend.taps = dict.fromkeys(range(low, high), self.compression.tap)

    def _place(self, rows: Rows) -> None:
        plain, requests = self.plain, len(self.works)
        count = np.bincount(rows.request, minlength=requests)
        again = np.bincount(rows.request[rows.again], minlength=requests).astype(bool)
        ghost = np.bincount(rows.request[rows.ghost], minlength=requests).astype(bool)
        self.backend.set_batch(Batch(plain.rows, plain.lengths, plain.slots, count - again, again, ghost))
        self._resize(rows, count)

    def _layers(self, low: int, high: int) -> None:
        given = self.input_ids, self.positions, self.forward_batch
        self.logits = self.model.forward_split_prefill(*given, (low, high))

    def keep(self, rows: Rows, index: np.ndarray) -> None:
        self._narrow(index, self._states(index))

    def _states(self, rows: np.ndarray) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of some of the rows what the next layer is given; nothing before the first one."""
        return (None, None) if self.forward_batch.hidden_states is None else self._hidden(rows)

    def _narrow(self, rows: np.ndarray, states: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
        """These rows are left, with these states."""
        chosen = send(rows, self.input_ids.device)
        self.input_ids, self.positions = self.input_ids[chosen], self.positions[chosen]
        self.forward_batch.hidden_states, self.forward_batch.residual = states

    def recall(self, earlier: Mapping[int, np.ndarray], order: np.ndarray) -> None:
        assert self.compression is not None
        batch, index = self.forward_batch, send(order, self.input_ids.device)
        states = list(self.compression.recall(earlier))
        batch.hidden_states = torch.cat([batch.hidden_states, *(hidden for hidden, _ in states)])[index]
        if batch.residual is not None:
            batch.residual = torch.cat([batch.residual, *(residual for _, residual in states)])[index]
        positions = send(np.concatenate(list(earlier.values())), self.positions.device, self.positions.dtype)
        self.positions = torch.cat([self.positions, positions])[index]
        # Nothing above layer 0 reads a prompt's token ids.
        self.input_ids = torch.cat([self.input_ids, self.input_ids.new_zeros(len(positions))])[index]

    def _wanted(self) -> np.ndarray | None:
        """[requests] position from which on somebody reads logits; None where no more than usual."""
        if self.logprob_starts is None:
            return None
        starts = [
            min(work.begin + start, work.prompt_tokens - 1)
            for work, start in zip(self.works, self.logprob_starts, strict=True)
        ]
        return np.array(starts)

    def _hidden(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states and residuals of some of the rows."""
        batch, index = self.forward_batch, send(rows, self.input_ids.device)
        return batch.hidden_states[index], None if batch.residual is None else batch.residual[index]

    def _resize(self, rows: Rows, count: np.ndarray) -> None:
        """Tell SGLang how many rows each request has now; what it reads for the logits follows from that."""
        batch = self.forward_batch
        if self.logprob_starts is not None:
            # Where SGLang wants log-probabilities from, as a row: of generated tokens, if the request was
            # taken back.
            begin = np.array([work.begin for work in self.works]) + np.array(self.logprob_starts)
            before = rows.position < begin[rows.request]
            starts = np.bincount(rows.request[before], minlength=len(self.works))
            batch.extend_logprob_start_lens_cpu = starts.tolist()
        batch.extend_seq_lens_cpu = count.tolist()
        batch.extend_seq_lens = send(count, batch.extend_seq_lens.device, batch.extend_seq_lens.dtype)
        batch.extend_num_tokens = int(count.sum())
        lora.assign(self.runner, batch, self.adapters)
