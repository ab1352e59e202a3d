"""Decode steps that are captured once per batch size and replayed, over depth pages.

To SGLang every captured step has one row per request. A pass over several tokens of each request is captured as
such a step too, of as many requests as it has rows; whose they are is in the numbers that attention reads.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_exec

from fathom.runtime.kv.view import Batch
from fathom.runtime.sglang_host.attention.triton_attention import (
    ALTERNATING,
    DENSE,
    RENEWING,
    SEVERAL,
    TritonAttentionBackend,
)

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

WIDER = 2, 3, 5
"""Sizes of passes over several tokens that are captured beside those of steps, times the largest of these."""
MOST_ROWS = 64
"""Such sizes are at most this."""


def with_wider(sizes: Sequence[int]) -> list[int]:
    """Sizes of steps, and those of passes over several tokens that are larger than each of them."""
    most = max(sizes)
    wider = {min(times * most, MOST_ROWS) for times in WIDER}
    return sorted({*sizes, *(size for size in wider if size > most)})


def captured_rows() -> int:
    """The most rows of what is captured where there is a draft; 0 where nothing is."""
    decode = get_exec().graph.cuda_graph_config.decode
    return 0 if decode.backend == Backend.DISABLED or not decode.bs else with_wider(decode.bs)[-1]


def share_logits(device: str) -> None:
    """Make the buffer that all runners' logits are written to, for more rows than SGLang would."""
    rows = captured_rows()
    if rows:
        shared = GraphSharedOutput(device=torch.device(device), max_rows=rows)
        GraphSharedOutput._process_shared = shared


class Variants:
    """What is captured of each batch size: requests that read everything, such as decode slow and fast, such as
    renew selections, and drafted tokens that are verified.

    Of the form of SGLang's ``AttentionGraphVariants``.
    """

    def __init__(self, backend: TritonAttentionBackend) -> None:
        self.backend = backend

    @property
    def capture_labels(self) -> tuple[str, ...]:
        alternating = () if self.backend.slow_fast is None else (ALTERNATING, RENEWING)
        return (DENSE, *alternating, *((SEVERAL,) if self.backend.several else ()))

    def select(self, forward_batch: "ForwardBatch") -> str:
        step = self.backend.alternating
        if step is None:
            return DENSE if self.backend.given is None else SEVERAL
        return RENEWING if step.capacity else ALTERNATING


class CountingGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner of captured decode steps, with variants and sizes of our own and a count of each variant.

    Attributes:
        labels: of all variants; narrow: of those that have one row of each request.
        variants: what decides between them, given the backend.
        most: requests of a step.
        replayed: how many steps were replayed, by label.
    """

    labels: tuple[str, ...]
    narrow: tuple[str, ...]
    variants: Callable[[Any], Any]
    attn_backend: TritonAttentionBackend
    most: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.replayed = dict.fromkeys(self.labels, 0)
        super().__init__(*args, **kwargs)

    @property
    def attention_graph_variants(self) -> Any:
        return type(self).variants(self.attn_backend)

    @attention_graph_variants.setter
    def attention_graph_variants(self, _: Any) -> None:
        """SGLang's own are of models that our backends do not serve."""

    @property
    def capture_bs(self) -> list[int]:
        return self._sizes

    @capture_bs.setter
    def capture_bs(self, sizes: list[int]) -> None:
        self.most = max(sizes)
        self._sizes = with_wider(sizes) if self.attn_backend.several else sizes

    def capture_one_shape(
        self,
        size: int,
        forward: Any,
        stream_idx: Any = None,
        variant_label: Any = None,
        attention_variant: str = DENSE,
    ) -> None:
        too_large = size > self.most and attention_variant in self.narrow
        if too_large or (size == 1 and attention_variant == SEVERAL):
            return
        with self.attn_backend.capturing(attention_variant):
            super().capture_one_shape(size, forward, stream_idx, variant_label, attention_variant)

    def takes(self, requests: int, entries: int, rows: int) -> bool:
        """Whether a captured step can take the place of what the backend is to compute.

        Args:
            entries: tokens of all requests; rows: those that are computed.
        """
        largest = self.max_bs if rows > requests else self.most
        if rows > largest or (self.disable_padding and rows not in self.capture_bs):
            return False
        return self.attn_backend.replays(requests, entries)

    def can_run_graph(self, forward_batch: "ForwardBatch") -> bool:
        lengths = forward_batch.seq_lens_cpu
        if lengths is None:
            return False
        requests = len(lengths)
        return self.takes(requests, int(lengths.sum()), requests) and super().can_run_graph(forward_batch)

    def execute(self, forward_batch: "ForwardBatch", *args: Any, **kwargs: Any) -> Any:
        self.replayed[self.attention_graph_variants.select(forward_batch)] += 1
        return super().execute(forward_batch, *args, **kwargs)


class DecodeGraphRunner(CountingGraphRunner):
    """The target's, asked for the steps that a captured one can take the place of.

    Attributes:
        batch: of the step that was replayed last.
    """

    labels, variants = (DENSE, ALTERNATING, RENEWING, SEVERAL), Variants
    narrow = (DENSE,)
    batch: "ForwardBatch | None" = None

    def execute(self, forward_batch: "ForwardBatch", *args: Any, **kwargs: Any) -> Any:
        self.batch = forward_batch
        return super().execute(forward_batch, *args, **kwargs)

    def capture_one_shape(self, size: int, forward: Any, *args: Any) -> None:
        def around(*inner: Any, **kwargs: Any) -> Any:
            # The auxiliary lane's work is a part of what is captured, up to the barrier at its end.
            backend = self.attn_backend
            slow_fast = backend.slow_fast if backend.captures == RENEWING else None
            with nullcontext() if slow_fast is None else slow_fast.executor.step():
                return forward(*inner, **kwargs)

        super().capture_one_shape(size, around, *args)

    def moved_on(self, tokens: torch.Tensor) -> "ForwardBatch | None":
        """The batch that was replayed last, each request a token longer, for SGLang's runner to replay as it is.

        Nothing of the batch is composed anew. Of SGLang's own buffers a captured step reads the tokens and their
        positions, which the runner copies there, and what stays the same.

        Args:
            tokens: [requests] the new ones.

        Returns:
            None where no captured step can take the place of this one, or there is no room behind the last.
        """
        batch, backend = self.batch, self.attn_backend
        if batch is None or not backend.moves_on():
            return None
        if batch.mrope_positions is not None or batch.ngram_embedding_info is not None:
            return None
        assert batch.seq_lens_cpu is not None and batch.positions is not None
        lengths = batch.seq_lens_cpu + 1
        if not self.takes(len(lengths), entries := int(lengths.sum()), len(lengths)):
            return None
        batch.input_ids, batch.positions = tokens, batch.positions + 1
        batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens + 1, lengths, entries
        backend.move_on()
        batch.mark_forward_metadata_ready()
        return batch

    def several(self, rows: Batch, compose: Callable[[], "ForwardBatch"]) -> "LogitsProcessorOutput | None":
        """Logits [rows, vocabulary] of several rows of each request, and hidden states where a server has any,
        valid until the next replay.

        For a pass within a step of SGLang's that is computed layer by layer.

        Args:
            compose: makes the batch that SGLang replays: each row a request of its own.

        Returns:
            None where no captured step can take the place of the pass.
        """
        self.attn_backend.given = rows
        # SGLang's timer, where the operator has it on, runs around this already, and asserts that there is one.
        runner = self.model_runner
        timer, runner.device_timer = runner.device_timer, None
        try:
            if not self.takes(len(rows.rows), int(rows.lengths.sum()), int(rows.query[-1])):
                return None
            return self.execute(compose())
        finally:
            self.attn_backend.given = None
            runner.device_timer = timer
