"""Whether KV is in depth pages on this machine, and what is refused, or left out, where that is or is not so.

SGLang's platform is chosen when it is first asked for, in every process, from the environment: :func:`choose` comes
before that, all else after.
"""

import os
from typing import Any

from fathom.server.command.checks import StartError

EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"
"""Names of the number of experts in models' configurations."""
EXPERT_ALIGNMENT = 32
"""To a multiple of this, on each device, SGLang widens experts on a CPU."""
OFF = "--no-gpu-depth-pages"
NEED = "an NVIDIA GPU of compute capability 8.0 or newer, or a machine without a GPU"
HINT = f"KV was in depth pages; without them ({OFF}) every request is served dense, by SGLang's own path"
"""For an operator whose server did not start on a GPU."""


def choose(asked: bool | None) -> None:
    """Say whether depth pages are wanted on a GPU, for SGLang's platform in this process and in its children.

    Args:
        asked: what the operator says, or None for depth pages on any GPU that takes them.
    """
    from fathom.runtime.sglang_host.engine_args import GPU_DEPTH_PAGES, WHERE_POSSIBLE

    os.environ[GPU_DEPTH_PAGES] = WHERE_POSSIBLE if asked is None else str(int(asked))


def used() -> bool:
    """Whether KV is in depth pages."""
    from sglang.srt.platforms import current_platform  # first: it loads our plugin

    from fathom.runtime.sglang_host.platform import DepthPagePlatform

    return isinstance(current_platform, DepthPagePlatform)


def on_gpu() -> bool:
    """Whether KV is in depth pages, on a GPU."""
    from sglang.srt.platforms import current_platform

    from fathom.runtime.sglang_host.platform import FathomCudaPlatform

    return isinstance(current_platform, FathomCudaPlatform)


def why_not(asked: bool | None) -> str:
    """Why KV is not in depth pages; "" where it is.

    Args:
        asked: as :func:`choose`.
    """
    if used():
        return ""
    return f"{OFF} was given" if asked is False else f"KV in depth pages needs {NEED}"


def refuse_model(model: Any, devices: int) -> None:
    """Refuse a model that Fathom's way of serving on this machine does not take, before its weights are loaded.

    Args:
        model: SGLang's ``ModelConfig``, of a target or a draft.
        devices: that share its heads, ``--tp-size``.

    Raises:
        StartError: with the reason, and what serves the model.
    """
    if not used():
        return
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    reasons = {
        "multi-head latent attention": model.attention_arch == AttentionArch.MLA,
        "layers with a recurrent state": bool(mambaish_config(model)),
        "sliding-window layers with KV memory of their own": model.is_hybrid_swa,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        where = "" if on_gpu() else ", on a GPU,"
        raise StartError(
            f"{model.model_path} has {' and '.join(found)}, which depth pages do not take: with {OFF}{where} "
            "models are served dense, without a draft, by SGLang's own path"
        )
    if not on_gpu():
        _refuse_without_gpu(model, devices)


def _refuse_without_gpu(model: Any, devices: int) -> None:
    if model.quantization:
        raise StartError(quantized_weights(model.model_path, model.quantization))
    if (heads := model.get_total_num_kv_heads()) % devices:
        raise StartError(
            f"--tp-size must divide the {heads} KV heads of {model.model_path}, got {devices}: without a GPU all "
            "devices have as many, and none is on several"
        )
    if (width := _expert_width(model.hf_text_config)) % (EXPERT_ALIGNMENT * devices):
        raise StartError(
            f"{model.model_path} has experts of width {width}, on {devices} devices: without a GPU it has to be a "
            f"multiple of {EXPERT_ALIGNMENT * devices}, to which SGLang would widen them by numbers that nobody set"
        )


def quantized_weights(path: str, method: str) -> str:
    """Why a model of such weights is not served without a GPU."""
    return f"{path} would have quantized weights ({method}), for which SGLang's kernels need a GPU"


def _expert_width(config: Any) -> int:
    """Of a model's mixture of experts; 0 where it has none."""
    if not any(getattr(config, name, None) for name in EXPERTS):
        return 0
    width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", 0)
    return width if isinstance(width, int) else 0
