"""The draft's decode steps, and passes over a few tokens of each request, captured once per size and replayed."""

from typing import TYPE_CHECKING

import torch

from fathom.runtime.sglang_host.attention.triton_attention import SEVERAL
from fathom.runtime.sglang_host.draft.draft_attention import LOOKING, PLAIN, TritonDraftBackend
from fathom.runtime.sglang_host.step.decode_graphs import CountingGraphRunner

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DraftVariants:
    """What is captured of each size: a step, one that keeps the queries of all layers, and a pass over several
    tokens of each request.

    Of the form of SGLang's ``AttentionGraphVariants``.
    """

    capture_labels = PLAIN, LOOKING, SEVERAL

    def __init__(self, backend: TritonDraftBackend) -> None:
        self.backend = backend

    def select(self, forward_batch: "ForwardBatch") -> str:
        view = self.backend.view
        if int(view.query[-1]) > len(view.which):
            return SEVERAL
        return PLAIN if self.backend.captured is None else LOOKING


class DraftGraphRunner(CountingGraphRunner):
    """The draft's, for passes that it composes itself."""

    attn_backend: TritonDraftBackend
    labels, variants = DraftVariants.capture_labels, DraftVariants
    narrow = (PLAIN, LOOKING)

    def takes_view(self) -> bool:
        """Whether a captured step can take the place of the pass that the backend's view describes."""
        view = self.attn_backend.view
        return self.takes(len(view.which), view.lists.total, int(view.query[-1]))

    @torch.no_grad()
    def logits(self, forward_batch: "ForwardBatch") -> torch.Tensor:
        """[rows, vocabulary], which the next replay leaves alone; the backend's view is set already."""
        output = self.execute(forward_batch)
        self.attn_backend.hand_over(forward_batch.batch_size)
        return output.next_token_logits.clone()
