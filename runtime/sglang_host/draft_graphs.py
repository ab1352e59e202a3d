"""The draft's decode steps, captured once per batch size and replayed."""

from typing import TYPE_CHECKING, Any

import torch

from fathom.runtime.sglang_host.decode_graphs import CountingGraphRunner
from fathom.runtime.sglang_host.draft_attention import TritonDraftBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

PLAIN, LOOKING = "plain", "looking"


class DraftVariants:
    """What is captured of each batch size: a step, and one that keeps the queries of all layers.

    Of the form of SGLang's ``AttentionGraphVariants``.
    """

    capture_labels = PLAIN, LOOKING

    def __init__(self, backend: TritonDraftBackend) -> None:
        self.backend = backend

    def select(self, forward_batch: "ForwardBatch") -> str:
        return PLAIN if self.backend.captured is None else LOOKING


class DraftGraphRunner(CountingGraphRunner):
    """The draft's, for passes that it composes itself."""

    attn_backend: TritonDraftBackend
    labels, variants = DraftVariants.capture_labels, DraftVariants

    def capture_one_shape(self, size: int, forward: Any, *args: Any) -> None:
        self.attn_backend.keeps_queries = LOOKING in args
        super().capture_one_shape(size, forward, *args)
        self.attn_backend.keeps_queries = False

    def can_run_graph(self, forward_batch: "ForwardBatch") -> bool:
        lengths = forward_batch.seq_lens_cpu
        return self.attn_backend.replays(lengths) and super().can_run_graph(forward_batch)

    @torch.inference_mode()
    def logits(self, forward_batch: "ForwardBatch") -> torch.Tensor:
        """[requests, vocabulary], which the next replay leaves alone; the backend's view is set already."""
        output = self.execute(forward_batch)
        self.attn_backend.hand_over(forward_batch.batch_size)
        return output.next_token_logits.clone()
