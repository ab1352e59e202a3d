"""What the operator asks of the engine's processes. Light to import: the command line reads it before SGLang."""

from dataclasses import dataclass, field

from fathom.runtime.sfi.options import SfiOptions

SHORT_PROMPT_SHARE = 0.5
PREFILL_ATTENTION = AUTO, GATHERED, TRITON = "auto", "gathered", "triton"
"""On a GPU: by FlashInfer where it takes the layout; the same, from copies where a step has many rows; or by
Triton."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of Fathom's scheduler beside SGLang's own; one set for all of a model's processes.

    Attributes:
        depth_span: layers per depth page, or None for the model's default.
        tsp_layer: layers below FastKV's selection, or None where there is none.
        propagation_buffer: longest prompt, in tokens, that FastKV may propagate.
        shallow_factor: tokens that may be held for each one that fits at all depths; None for the default.
        sfi: how requests decode slow and fast.
        draft_cost: time of a draft step as a share of a target step's, or None to estimate it from the models.
        short_prompt_share: of a chunk of a long prompt, at most, that short ones may have.
        gpu_prefill: what computes the attention of prefill on a GPU, one of ``PREFILL_ATTENTION``.
    """

    depth_span: int | None = None
    tsp_layer: int | None = None
    propagation_buffer: int = 0
    shallow_factor: int | None = None
    sfi: SfiOptions = field(default_factory=SfiOptions)
    draft_cost: float | None = None
    short_prompt_share: float = SHORT_PROMPT_SHARE
    gpu_prefill: str = AUTO
