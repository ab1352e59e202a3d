"""Entry points of the engine's child processes, passed to SGLang's launcher.

Each child starts here, so that what SGLang needs before its first import, the check of every seam, and our
classes are in place before any of SGLang's code runs.
"""

import sys
from typing import Any

from fathom.runtime.sglang_host import imports
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.runtime.sglang_host.options import EngineOptions

torchvision_ops.declare()

SEAM_EXIT_CODE = 3


def install(options: EngineOptions) -> None:
    """Put our scheduler and, on a platform of ours, our attention backend and memory in SGLang's places."""
    import torch._dynamo
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.managers import scheduler as scheduler_module
    from sglang.srt.platforms import current_platform

    from fathom.runtime.sglang_host.draft import draft_config
    from fathom.runtime.sglang_host.machine import gloo
    from fathom.runtime.sglang_host.models import adapter_files, language_models, longrope, weight_files
    from fathom.runtime.sglang_host.platform import (
        DepthPagePlatform,
        FathomCpuPlatform,
        FathomCudaPlatform,
    )
    from fathom.runtime.sglang_host.sampling import (
        grammars,
        penalties,
        seeds,
        stop_patterns,
        stop_strings,
        unsound,
    )
    from fathom.runtime.sglang_host.scheduler import FathomScheduler
    from fathom.runtime.sglang_host.scheduling import sessions

    scheduler_module.Scheduler = FathomScheduler
    ours = isinstance(current_platform, DepthPagePlatform)
    gloo.share_device()
    language_models.install()
    draft_config.install()
    longrope.install()
    seeds.install(ours)
    sessions.install()
    adapter_files.install()
    penalties.install(ours)
    stop_patterns.install()
    stop_strings.install()
    unsound.install()
    grammars.mask_failed()
    weight_files.install()
    if ours:
        from sglang.srt.mem_cache import registry

        from fathom.runtime.sglang_host.attention import flashinfer_prefill
        from fathom.runtime.sglang_host.draft import draft_side
        from fathom.runtime.sglang_host.memory import kv_tree
        from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT
        from fathom.runtime.sglang_host.scheduling import short_prompts
        from fathom.runtime.sglang_host.step import slow_fast

        register_attention_backend(current_platform.get_default_attention_backend())(attention_backend)
        LAYOUT.span, LAYOUT.used = options.depth_span, True
        LAYOUT.tsp_layer, LAYOUT.propagation_buffer = options.tsp_layer, options.propagation_buffer
        LAYOUT.shallow_factor = options.shallow_factor
        slow_fast.SETTINGS.options = options.sfi
        draft_side.OPTIONS.cost = options.draft_cost
        short_prompts.OPTIONS.share = options.short_prompt_share
        flashinfer_prefill.OPTIONS.prefill = options.gpu_prefill
        registry.default_radix_cache_factory = kv_tree.factory
    if isinstance(current_platform, FathomCudaPlatform):
        from fathom.runtime.sglang_host.layers import gpu_ops

        gpu_ops.register()
    if isinstance(current_platform, FathomCpuPlatform):
        from fathom.runtime.sglang_host.layers import cpu_heads, cpu_lora, cpu_ops

        # On a CPU torch.compile calls the machine's C++ compiler, in the middle of somebody's request.
        torch._dynamo.config.disable = True
        gloo.without_nccl()
        cpu_heads.install()
        cpu_ops.register()
        cpu_lora.register()
        grammars.mask_without_gpu()


def attention_backend(model_runner: Any) -> Any:
    """The attention backend of the target, or of the draft; on Triton where its kernels run."""
    import torch

    from fathom.kernels.dispatch import INTERPRETED
    from fathom.runtime.sglang_host.attention.cpu_attention import CpuAttentionBackend
    from fathom.runtime.sglang_host.attention.triton_attention import TritonAttentionBackend
    from fathom.runtime.sglang_host.draft.draft_attention import DraftAttentionBackend, TritonDraftBackend

    if INTERPRETED or torch.device(model_runner.device).type == "cuda":
        return (TritonDraftBackend if model_runner.is_draft_worker else TritonAttentionBackend)(model_runner)
    return (DraftAttentionBackend if model_runner.is_draft_worker else CpuAttentionBackend)(model_runner)


def verify_or_exit(role: str) -> None:
    """Check the seams of this process; exit with one line on stderr when SGLang is not as we know it."""
    from fathom.runtime.sglang_host.seams import seams

    try:
        seams.verify(role)
    except seams.SeamError as error:
        print(f"fathom: {error}", file=sys.stderr, flush=True)
        sys.exit(SEAM_EXIT_CODE)


def run_scheduler_process(*args: Any, options: EngineOptions, **kwargs: Any) -> None:
    """SGLang's scheduler process, running Fathom's scheduler. All else as SGLang's function of this name."""
    with imports.uncollected():
        from sglang.srt.managers.scheduler import run_scheduler_process as run
        from sglang.srt.plugins import load_plugins

        load_plugins()  # may hook what we rely on: before the check, not after
        verify_or_exit("scheduler")
        install(options)
    run(*args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's detokenizer process. Arguments as SGLang's function of this name."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run

    from fathom.runtime.sglang_host.reports import detokenizer

    verify_or_exit("detokenizer")
    detokenizer.install()
    run(*args, **kwargs)
