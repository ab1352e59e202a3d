"""The draft's decode steps, captured once per batch size and replayed."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

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


class DraftGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner of captured decode steps, for passes that the draft composes itself.

    Attributes:
        replayed: how many steps were replayed, by what was captured.
    """

    attn_backend: TritonDraftBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.replayed = {PLAIN: 0, LOOKING: 0}
        super().__init__(*args, **kwargs)

    @property
    def attention_graph_variants(self) -> DraftVariants:
        return DraftVariants(self.attn_backend)

    @attention_graph_variants.setter
    def attention_graph_variants(self, _: Any) -> None:
        """SGLang's own are of models that our backend does not serve."""

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
        self.replayed[self.attention_graph_variants.select(forward_batch)] += 1
        output = self.execute(forward_batch)
        self.attn_backend.hand_over(forward_batch.batch_size)
        return output.next_token_logits.clone()
