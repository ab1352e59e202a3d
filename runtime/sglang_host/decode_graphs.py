"""Decode steps that are captured once per batch size and replayed, over depth pages."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from fathom.runtime.sglang_host.triton_attention import (
    ALTERNATING,
    DENSE,
    RENEWING,
    TritonAttentionBackend,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class Variants:
    """What is captured of each batch size: requests that read everything, such as decode slow and fast, and such as
    renew selections.

    Of the form of SGLang's ``AttentionGraphVariants``.
    """

    def __init__(self, backend: TritonAttentionBackend) -> None:
        self.backend = backend

    @property
    def capture_labels(self) -> tuple[str, ...]:
        return (DENSE,) if self.backend.slow_fast is None else (DENSE, ALTERNATING, RENEWING)

    def select(self, forward_batch: "ForwardBatch") -> str:
        step = self.backend.alternating
        if step is None:
            return DENSE
        return RENEWING if step.capacity else ALTERNATING


class CountingGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner of captured decode steps, with variants of our own and a count of each.

    Attributes:
        labels: of all variants; variants: what decides between them, given the backend.
        replayed: how many steps were replayed, by label.
    """

    labels: tuple[str, ...]
    variants: Callable[[Any], Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.replayed = dict.fromkeys(self.labels, 0)
        super().__init__(*args, **kwargs)

    @property
    def attention_graph_variants(self) -> Any:
        return type(self).variants(self.attn_backend)

    @attention_graph_variants.setter
    def attention_graph_variants(self, _: Any) -> None:
        """SGLang's own are of models that our backends do not serve."""

    def execute(self, forward_batch: "ForwardBatch", *args: Any, **kwargs: Any) -> Any:
        self.replayed[self.attention_graph_variants.select(forward_batch)] += 1
        return super().execute(forward_batch, *args, **kwargs)


class DecodeGraphRunner(CountingGraphRunner):
    """The target's, asked for the steps that a captured one can take the place of."""

    attn_backend: TritonAttentionBackend
    labels, variants = (DENSE, ALTERNATING, RENEWING), Variants

    def capture_one_shape(
        self,
        size: int,
        forward: Any,
        stream_idx: Any = None,
        variant_label: Any = None,
        attention_variant: str = DENSE,
    ) -> None:
        def around(*args: Any, **kwargs: Any) -> Any:
            # The auxiliary lane's work is a part of what is captured, up to the barrier at its end.
            slow_fast = self.attn_backend.slow_fast if attention_variant == RENEWING else None
            with nullcontext() if slow_fast is None else slow_fast.executor.step():
                return forward(*args, **kwargs)

        with self.attn_backend.capturing(attention_variant):
            super().capture_one_shape(size, around, stream_idx, variant_label, attention_variant)

    def can_run_graph(self, forward_batch: "ForwardBatch") -> bool:
        lengths = forward_batch.seq_lens_cpu
        return (
            lengths is not None
            and self.attn_backend.replays(lengths)
            and super().can_run_graph(forward_batch)
        )
