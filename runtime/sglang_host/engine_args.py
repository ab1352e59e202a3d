"""SGLang's server arguments: defaults for a machine without a GPU, and what depth pages need on one with a GPU."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fathom.runtime import control_groups
from fathom.runtime.plan import choose_span

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from transformers import PretrainedConfig

CPU_LORA_BACKEND = "torch_native"
"""SGLang's name for a backend of adapters in PyTorch; on a CPU it is ours, see cpu_lora.py."""

CPU_BACKEND = "torch_native"
"""The slot of our own attention backend on a CPU: see cpu_attention.py."""

CPU_FLAGS = {
    "--device": "cpu",
    "--attention-backend": CPU_BACKEND,
    "--sampling-backend": "pytorch",
    "--lora-backend": CPU_LORA_BACKEND,
    # Nothing overlaps on a CPU: the same cores would run both halves, one step later.
    "--disable-overlap-schedule": None,
    # An idle scheduler would otherwise poll on a core of its own.
    "--sleep-on-idle": None,
    "--chunked-prefill-size": "2048",
    "--mem-fraction-static": "0.5",
}


GPU_DEPTH_PAGES = "FATHOM_GPU_DEPTH_PAGES"
"""Environment variable that ``fathom serve`` sets: 1 for depth pages on a GPU, which has to be there, 0 for none,
or :data:`WHERE_POSSIBLE`. Where it is not set (``sglang serve`` beside Fathom), a GPU is SGLang's own."""
WHERE_POSSIBLE = "where-possible"
"""Depth pages on a GPU that takes them."""
OLDEST_GPU = 8, 0
"""Compute capability. Older ones have less shared memory than the kernels ask for."""

OLDEST_WITH_E4M3 = 8, 9
"""Compute capability. Of keys and values of 8 bits, older GPUs have e5m2."""

TRITON_BACKEND = "fathom_triton"
"""Our attention backend's name on a GPU. SGLang takes it for one that launches Triton kernels, which it is."""


class Rule(NamedTuple):
    """An option that depth pages leave no choice about.

    Attributes:
        flags: SGLang's flags for it; none where it has no default of ours, or is in the environment.
        holds: whether parsed arguments are so; it is looked at whatever they came from.
        asks, why: what they have to be, and the reason.
        contrary: other flags that ask for the opposite; ours are left out then, so that it is refused.
    """

    flags: tuple[str, ...]
    holds: Callable[[Any], bool]
    asks: str
    why: str
    contrary: tuple[str, ...] = ()


def _graphs_of_whole_decode_steps(args: Any) -> bool:
    graphs = args.cuda_graph_config
    return graphs.decode.backend in ("full", "disabled") and graphs.prefill.backend == "disabled"


def _buffers_filled_before_each_replay(_: Any) -> bool:
    from sglang.srt.environ import envs

    return not envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get()


def has_e4m3() -> bool:
    """Whether the GPU, or one that none is seen of, has e4m3."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= OLDEST_WITH_E4M3


def _token_by_token(_: Any) -> bool:
    from sglang.srt.environ import envs

    return not envs.SGLANG_USE_HND_KVCACHE.get()


ROWS_TOGETHER = Rule(
    (),
    lambda args: (
        args.attn_cp_size == args.dcp_size == 1
        and args.moe_a2a_backend == "none"
        and args.moe_dense_tp_size is None
        and not args.enable_layernorm_sp
        and not args.enable_attn_tp_input_scattered
        and not args.enable_two_batch_overlap
    ),
    "--attn-cp-size 1, --dcp-size 1, --moe-a2a-backend none and none of --moe-dense-tp-size, "
    "--enable-layernorm-sp, --enable-attn-tp-input-scattered and --enable-two-batch-overlap",
    "each device has all rows of a step and all tokens of its heads",
)
NOTHING_BY_SLOT = Rule(
    (),
    lambda args: not args.enable_return_routed_experts,
    "no --enable-return-routed-experts",
    "SGLang keeps them by the slot of a token's KV, and depth pages have more slots than it expects",
)
ONE_COPY = Rule(
    (),
    lambda args: args.dp_size == 1,
    "--dp-size 1",
    "replicas are servers of their own",
)
ONE_STAGE = Rule(
    (),
    lambda args: args.pp_size == 1,
    "--pp-size 1",
    "a model is spread over devices by --tp-size",
)
WIDE = None, "auto", "bf16", "bfloat16"
WIDE_KV = Rule(
    (),
    lambda args: args.kv_cache_dtype in WIDE and args.speculative_draft_kv_cache_dtype in WIDE,
    "--kv-cache-dtype auto or bfloat16, and the same for --speculative-draft-kv-cache-dtype",
    "the kernels of a CPU read keys and values of 16 or 32 bits",
)
NARROW = "fp8_e4m3", "fp8_e5m2"
"""SGLang's names of the types of keys and values in ``store_kv.EIGHT_BITS``, in the same order."""
KV_OF_A_GPU = Rule(
    (),
    lambda args: {args.kv_cache_dtype, args.speculative_draft_kv_cache_dtype} <= {*WIDE, *NARROW},
    f"--kv-cache-dtype auto, bfloat16, {' or '.join(NARROW)}, and the same for --speculative-draft-kv-cache-dtype",
    "the kernels read no other keys and values",
)
E4M3_OF_A_GPU = Rule(
    (),
    lambda args: NARROW[0] not in {args.kv_cache_dtype, args.speculative_draft_kv_cache_dtype} or has_e4m3(),
    f"{NARROW[1]} in place of {NARROW[0]}",
    "GPUs have the latter from compute capability 8.9 on",
)
OWN_DRAFT = Rule(
    (),
    lambda args: args.speculative_draft_attention_backend is None,
    "no --speculative-draft-attention-backend",
    "no other backend reads the draft's KV",
)
KV_BY_TOKEN = Rule(
    (),
    _token_by_token,
    "SGLANG_USE_HND_KVCACHE=0",
    "the kernels read keys and values token by token",
)
NO_COPIES = Rule(
    (),
    lambda args: not args.hicache_storage_backend,
    "no --hicache-storage-backend",
    "it copies KV by slot, which depth pages do not have",
)
NO_CANARY = Rule(
    (),
    lambda args: args.kv_canary == "none",
    "no --kv-canary",
    "it knows other pools of KV than theirs",
)
ANYWHERE = (
    *(ROWS_TOGETHER, NOTHING_BY_SLOT, NO_COPIES, NO_CANARY, ONE_COPY, ONE_STAGE),
    *(OWN_DRAFT, KV_BY_TOKEN),
)
"""Asked for on a CPU too."""

CPU_RULES = (
    Rule((), lambda args: args.device == "cpu", "--device cpu", "PyTorch sees no other device"),
    Rule(
        (),
        lambda args: (
            {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend}
            <= {CPU_BACKEND, None}
        ),
        f"--attention-backend {CPU_BACKEND}",
        "the name has Fathom's own behind it, and no other backend reads depth pages",
    ),
    Rule(
        (),
        lambda args: not (args.enable_torch_compile or args.enable_forward_pass_metrics),
        "neither --enable-torch-compile nor --enable-forward-pass-metrics",
        "SGLang has them for GPUs",
    ),
    Rule(
        (),
        lambda args: args.offload_group_size <= 0 and args.weight_cache_mode == "off",
        "neither --offload-group-size nor --weight-cache-mode",
        "weights are in the memory that computes",
    ),
    Rule(
        (),
        lambda args: args.ep_size == 1,
        "--ep-size 1",
        "each process looks for every expert",
    ),
    Rule(
        (),
        lambda args: (
            args.load_format not in ("bitsandbytes", "gguf")
            and args.modelopt_quant is None
            and not args.rl_quant_profile
        ),
        "neither --load-format bitsandbytes or gguf nor --modelopt-quant nor --rl-quant-profile",
        "SGLang's kernels for quantized weights need a GPU",
    ),
    WIDE_KV,
    *ANYWHERE,
)

CPU_LORA_RULES = (
    Rule(
        (),
        lambda args: args.lora_backend == CPU_LORA_BACKEND,
        f"--lora-backend {CPU_LORA_BACKEND}",
        "the others launch kernels on a GPU",
    ),
    Rule(
        (),
        lambda args: not args.enable_lora_overlap_loading,
        "no --enable-lora-overlap-loading",
        "adapters are in the memory that computes",
    ),
)

GPU_RULES = (
    Rule(
        ("--device", "cuda"),
        lambda args: args.device == "cuda",
        "--device cuda",
        "kernels are launched there",
    ),
    Rule(
        ("--attention-backend", TRITON_BACKEND),
        lambda args: (
            {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend}
            <= {TRITON_BACKEND, None}
        ),
        f"--attention-backend {TRITON_BACKEND}",
        "no other backend reads depth pages",
    ),
    Rule(
        ("--cuda-graph-backend-prefill", "disabled"),
        _graphs_of_whole_decode_steps,
        "--cuda-graph-backend-prefill disabled, and full or disabled for --cuda-graph-backend-decode",
        "prefill drops rows between layers; a decode step is captured as a whole",
    ),
    Rule(
        (),
        _buffers_filled_before_each_replay,
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH=0",
        "what a captured step reads is sent from new memory of the host before each replay",
    ),
    Rule(
        ("--sampling-backend", "pytorch"),
        lambda args: args.sampling_backend == "pytorch",
        "--sampling-backend pytorch",
        "drafted tokens are verified against SGLang's PyTorch sampler",
    ),
    Rule(
        ("--enforce-disable-flashinfer-allreduce-fusion",),
        lambda args: args.flashinfer_allreduce_fusion_backend is None,
        "--enforce-disable-flashinfer-allreduce-fusion",
        "rows are chosen between layers, where a fused reduction is still to come",
        ("--flashinfer-allreduce-fusion-backend",),
    ),
    Rule(
        (),
        lambda args: args.ep_size >= 1 and args.tp_size % args.ep_size == 0,
        "an --ep-size that divides --tp-size",
        "experts are shared out among its processes",
    ),
    KV_OF_A_GPU,
    E4M3_OF_A_GPU,
    *ANYWHERE,
)

# The pool is the host's memory, written to when it is made: take what can be used, not half of the machine. Beside
# it a container has to hold the weights and three processes, together 1.1 GB for the demo.
CPU_KV_BYTES = 4 << 30
CONTAINER_SHARE = 4
CPU_KV_CONTEXTS = 16  # requests of full context length


DECODE_INTERVAL = "--prefill-decode-interval"
MIXED_CHUNKS = "--enable-mixed-chunk"


def with_decode_interval(argv: list[str]) -> list[str]:
    """``argv``, where it says nothing of it, with a decode step between two prefills.

    SGLang's default is none: nobody decodes before the last chunk of a long prompt, or the last prompt that waits,
    is computed. Where chunks are mixed, those who decode are in each. For depth pages only: SGLang's own
    admission takes a chunk without asking whether those who decoded in between have left its room.
    """
    given = {arg.split("=", 1)[0] for arg in argv}
    return argv if given & {DECODE_INTERVAL, MIXED_CHUNKS} else [*argv, DECODE_INTERVAL, "1"]


def with_cpu_defaults(argv: list[str]) -> list[str]:
    """``argv`` with each CPU default that it does not set itself."""
    given = {arg.split("=", 1)[0] for arg in argv}
    result = list(argv)
    for flag, value in CPU_FLAGS.items():
        if flag not in given:
            result += [flag] if value is None else [flag, value]
    return result


def text_of(config: "PretrainedConfig") -> "PretrainedConfig":
    """A checkpoint's part that is its language model's, or all of it."""
    part = getattr(config, "llm_config", None)
    return part if hasattr(part, "num_attention_heads") else config.get_text_config()


def kv_bytes_per_token(config: "PretrainedConfig", dtype_bytes: int) -> int:
    """KV bytes of one token over all layers."""
    text = text_of(config)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * kv_heads * head_dim * dtype_bytes


def cpu_pool_tokens(
    config: "PretrainedConfig",
    dtype_bytes: int,
    context_length: int | None,
    draft: "PretrainedConfig | None" = None,
    depth_span: int | None = None,
    shallow_factor: int | None = None,
) -> int:
    """Size of the KV pool on a CPU in tokens: 4 GiB, a quarter of the container's limit or 16 contexts, the least.

    Args:
        config: the model's Hugging Face configuration; draft: the draft model's, whose KV counts too.
        dtype_bytes: size of one element of the KV cache.
        context_length: the operator's limit, if any.
        depth_span, shallow_factor: the operator's layers per depth page, and virtual slots per token.

    Raises:
        PlanError: for layers per depth page that do not divide the model's.
    """
    text = text_of(config)
    per_token = kv_bytes_per_token(config, dtype_bytes)
    if draft is not None:
        # The draft has a slot for each virtual one, of which there are at most as many per token as spans.
        spans = text.num_hidden_layers // choose_span(text.num_hidden_layers, depth_span)
        per_token += min(shallow_factor or spans, spans) * kv_bytes_per_token(draft, dtype_bytes)
    context = context_length or text.max_position_embeddings
    limit = control_groups.memory()
    size = CPU_KV_BYTES if limit is None else min(CPU_KV_BYTES, limit // CONTAINER_SHARE)
    return min(size // per_token, CPU_KV_CONTEXTS * context)


def _limit_cpu_pool(argv: list[str], depth_span: int | None, shallow_factor: int | None) -> list[str]:
    """Set ``--max-total-tokens`` unless the operator did; leave an unreadable model for SGLang to report."""
    from transformers import AutoConfig

    given, _ = _parser().parse_known_args(argv)
    if given.max_total_tokens is not None or given.model_path is None:
        return argv
    try:
        how = {"trust_remote_code": given.trust_remote_code}
        config = AutoConfig.from_pretrained(given.model_path, revision=given.revision, **how)
        dtype_bytes = 4 if given.dtype in ("float", "float32") else 2
        path, revision = given.speculative_draft_model_path, given.speculative_draft_model_revision
        draft = None if path is None else AutoConfig.from_pretrained(path, revision=revision, **how)
        virtual = depth_span, shallow_factor
        tokens = cpu_pool_tokens(config, dtype_bytes, given.context_length, draft, *virtual)
    except (OSError, ValueError, AttributeError):
        return argv
    return [*argv, "--max-total-tokens", str(tokens)]


def with_gpu_rules(argv: list[str]) -> list[str]:
    """``argv`` with what depth pages on a GPU ask for, where it says nothing of it itself."""
    given = {arg.split("=", 1)[0] for arg in argv}
    return [
        *argv,
        *(
            word
            for rule in GPU_RULES
            if not given & {*rule.flags[::2], *rule.contrary}
            for word in rule.flags
        ),
    ]


DETERMINISTIC = "--enable-deterministic-inference"


def _refuse_deterministic(argv: list[str]) -> None:
    """Before SGLang does, by a message about an attention backend that it was not given.

    Raises:
        ValueError: where it is asked for.
    """
    if DETERMINISTIC in argv:
        why = "the rounding of its sums depends on what else is in a batch"
        raise ValueError(f"KV in depth pages cannot be had with {DETERMINISTIC}: {why}")


def check_rules(args: Any, rules: Sequence[Rule], asker: str) -> None:
    """Refuse arguments under which depth pages would not work.

    Args:
        args: SGLang's arguments; on a GPU as they were resolved.
        asker: what needs them to be so.

    Raises:
        ValueError: naming what is asked for, and why.
    """
    for rule in rules:
        if not rule.holds(args):
            raise ValueError(f"{asker} needs {rule.asks}: {rule.why}")


def _parser() -> argparse.ArgumentParser:
    """A parser of SGLang's flags."""
    from fathom.runtime.sglang_host.machine import torchvision_ops

    torchvision_ops.declare()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def options() -> frozenset[str]:
    """The flags that SGLang has; its parser takes the beginning of one for the whole."""
    return frozenset(_parser()._option_string_actions)


def build(argv: list[str], depth_span: int | None = None, shallow_factor: int | None = None) -> "ServerArgs":
    """Parse SGLang's own flags.

    Args:
        argv: flags of ``sglang serve``, ``--model-path`` included.
        depth_span, shallow_factor: as :func:`cpu_pool_tokens`, where there is no GPU.

    Raises:
        SystemExit: from SGLang's parser, for an unknown flag or an illegal value.
        ValueError: where depth pages are wanted and cannot be had.
    """
    from fathom.runtime.sglang_host.machine import torchvision_ops

    torchvision_ops.declare()
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.platforms import current_platform
    from sglang.srt.server_args import prepare_server_args

    from fathom.runtime.sglang_host.platform import FathomCpuPlatform, FathomCudaPlatform

    if isinstance(current_platform, FathomCudaPlatform):
        if TRITON_BACKEND not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([TRITON_BACKEND])
        try:
            _refuse_deterministic(argv)
            args = prepare_server_args(with_gpu_rules(with_decode_interval(argv)))
            args.resolve_once()
            check_rules(resolved_view(args), GPU_RULES, "KV in depth pages")
        except ValueError as error:
            raise ValueError(f"{error} (--no-gpu-depth-pages serves dense, by SGLang's own path)") from None
        return args
    if os.getenv(GPU_DEPTH_PAGES, "0") == "1":
        raise ValueError("--gpu-depth-pages needs an NVIDIA GPU that PyTorch sees; there is none")
    if isinstance(current_platform, FathomCpuPlatform):
        _refuse_deterministic(argv)
        argv = with_cpu_defaults(with_decode_interval(argv))
        args = prepare_server_args(_limit_cpu_pool(argv, depth_span, shallow_factor))
        check_rules(args, CPU_RULES, "KV in depth pages without a GPU")
        if args.enable_lora or args.lora_paths or args.enable_lora_overlap_loading:
            check_rules(args, CPU_LORA_RULES, "LoRA without a GPU")
        args.resolve_once()
        return args
    return prepare_server_args(argv)
