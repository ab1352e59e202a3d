"""Depth pages on a machine with a GPU, as far as one without can tell: who is chosen, what is asked of SGLang, and
what is put in its places."""

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.runner_utils import pool
from sglang.srt.platforms import (
    current_platform,  # first: it asks our plugin, which could not answer while half loaded
)
from sglang.srt.runtime_context import get_resources

from fathom.benchmarks.servers import free_port
from fathom.runtime.sglang_host import engine_args, platform
from fathom.runtime.sglang_host.engine_args import GPU_DEPTH_PAGES, WHERE_POSSIBLE
from fathom.runtime.sglang_host.machine import gpu_streams
from fathom.server.command import command_line, depth_pages

CPU, CUDA = (f"{platform.__name__}:{name}" for name in ("FathomCpuPlatform", "FathomCudaPlatform"))


def test_here_it_is_a_cpu():
    assert isinstance(current_platform, platform.FathomCpuPlatform)


@pytest.mark.parametrize(
    ("accelerator", "cuda", "capability", "asked", "chosen"),
    [
        (False, None, None, "0", CPU),
        (False, None, None, WHERE_POSSIBLE, CPU),
        (False, None, None, "1", CPU),  # the command line refuses that, with the reason
        (
            True,
            "13.0",
            (9, 0),
            None,
            None,
        ),  # not `fathom serve`: SGLang's own command beside an installed Fathom
        (True, "13.0", (9, 0), "0", None),
        (True, "13.0", (9, 0), WHERE_POSSIBLE, CUDA),
        (True, "13.0", (8, 0), WHERE_POSSIBLE, CUDA),
        (True, "13.0", (7, 5), WHERE_POSSIBLE, None),
        (True, "13.0", (7, 5), "1", CUDA),
        (True, None, None, WHERE_POSSIBLE, None),  # an accelerator of another maker
        (True, None, None, "1", None),
    ],
)
def test_who_has_the_machine(monkeypatch, accelerator, cuda, capability, asked, chosen):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerator)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv(GPU_DEPTH_PAGES, raising=False)
    if asked is not None:
        monkeypatch.setenv(GPU_DEPTH_PAGES, asked)
    assert platform.activate() == chosen
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


def test_depth_pages_on_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setenv(GPU_DEPTH_PAGES, "1")
    with pytest.raises(ValueError, match="--gpu-depth-pages needs an NVIDIA GPU that PyTorch sees"):
        engine_args.build(["--model-path", "m"])


def test_steps_go_before_what_runs_beside_them(monkeypatch):
    made = []
    module = SimpleNamespace(Stream=lambda priority: made.append(priority) or f"stream {len(made)}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    runner = SimpleNamespace(device="cuda", forward_stream="SGLang's")
    try:
        gpu_streams.put_steps_first(runner)
        captured_on = pool.get_or_create_global_graph_capture_stream()
        assert [runner.forward_stream, captured_on] == ["stream 1", "stream 2"] and made == [-1, -1]
    finally:
        get_resources().streams.clear()


REFUSED = {
    ("--attention-backend", "triton"): "no other backend reads depth pages",
    ("--decode-attention-backend=triton",): "no other backend reads depth pages",
    ("--cuda-graph-backend-decode", "breakable"): "a decode step is captured as a whole",
    ("--cuda-graph-config", '{"prefill":{"backend":"full"}}'): "prefill drops rows between layers",
    ("--sampling-backend", "flashinfer"): "SGLang's PyTorch sampler",
    ("--flashinfer-allreduce-fusion-backend", "auto", "--tp-size", "2"): "a fused reduction is still to come",
    ("--attn-cp-size", "2", "--tp-size", "2"): "all rows of a step",
    ("--dcp-size", "2", "--tp-size", "2"): "all tokens of its heads",
    ("--enable-two-batch-overlap",): "all rows of a step",
    ("--moe-a2a-backend", "deepep", "--tp-size", "2"): "all rows of a step",
    ("--moe-dense-tp-size", "1", "--tp-size", "2"): "all rows of a step",
    ("--enable-return-routed-experts",): "more slots than it expects",
    ("--enable-attn-tp-input-scattered", "--tp-size", "2"): "all rows of a step",
    ("--pp-size", "2"): "a model is spread over devices by --tp-size",
    ("--device", "cpu"): "needs --device cuda",
}
BUILD = """
    import json, sys
    from fathom.runtime.sglang_host.machine import torchvision_ops
    torchvision_ops.declare()
    import sglang.srt.platforms as platforms
    from fathom.runtime.sglang_host import engine_args, platform
    platforms._current_platform = platform.FathomCudaPlatform()
    platform.FathomCudaPlatform.get_device_total_memory = lambda self, device_id=0: 80 << 30
    from sglang.srt.arg_groups import overrides
    from sglang.srt.arg_groups.model_override_base import resolved_view

    class Hopper:
        is_sm90 = True
        def __getattr__(self, name, known=overrides.get_platform()):
            return getattr(known, name)

    overrides.get_platform = Hopper
    overrides._FLASHINFER_ALLREDUCE_FUSION_ARCHS |= {"LlamaForCausalLM"}  # which has only models with experts

    found = []
    for flags in json.loads(sys.argv[2]):
        try:
            args = resolved_view(engine_args.build(["--model-path", sys.argv[1], *flags]))
            graphs = args.cuda_graph_config
            found.append([
                args.device, args.attention_backend, args.sampling_backend, args.disable_overlap_schedule,
                graphs.decode.backend, graphs.prefill.backend, args.page_size, args.max_total_tokens,
                args.flashinfer_allreduce_fusion_backend,
            ])
        except ValueError as error:
            found.append(str(error))
    print(json.dumps(found))
"""


def run(script, *arguments):
    """What a script says in a process of its own, in which SGLang's platform is ours for GPUs."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, GPU_DEPTH_PAGES: "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tiny_model):
    """SGLang's arguments as resolved, or why they were refused, by flags."""
    asked = [("--page-size", "16"), ("--disable-cuda-graph",), ("--tp-size", "2"), *REFUSED]
    return dict(zip(asked, json.loads(run(BUILD, str(tiny_model), json.dumps(asked))), strict=True))


def test_what_is_asked_of_sglang(built):
    # The pool of a GPU is measured, not limited to a share of the host's memory.
    want = ["cuda", "fathom_triton", "pytorch", False, "full", "disabled", 16, None, None]
    assert built["--page-size", "16"] == want
    assert built[("--disable-cuda-graph",)][4:6] == ["disabled", "disabled"]
    assert built["--tp-size", "2"] == [*want[:6], 1, None, None]


@pytest.mark.parametrize("flags", REFUSED)
def test_what_does_not_go_with_it(built, flags):
    assert built[flags].startswith("KV in depth pages needs") and REFUSED[flags] in built[flags]
    assert built[flags].endswith("(--no-gpu-depth-pages serves dense, by SGLang's own path)")


def arguments(**changed):
    """SGLang's, as far as the rules look at them."""
    graphs = {"decode": SimpleNamespace(backend="full"), "prefill": SimpleNamespace(backend="disabled")}
    fields = {
        "device": "cuda",
        "attention_backend": engine_args.TRITON_BACKEND,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "cuda_graph_config": SimpleNamespace(**graphs),
        "sampling_backend": "pytorch",
        "flashinfer_allreduce_fusion_backend": None,
        "kv_cache_dtype": "auto",
        "speculative_draft_kv_cache_dtype": None,
        "speculative_draft_attention_backend": None,
        "hicache_storage_backend": None,
        "kv_canary": "none",
        "tp_size": 1,
        "ep_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "moe_a2a_backend": "none",
        "moe_dense_tp_size": None,
        "enable_return_routed_experts": False,
        "enable_layernorm_sp": False,
        "enable_attn_tp_input_scattered": False,
        "enable_two_batch_overlap": False,
    }
    return SimpleNamespace(**(fields | changed))


def test_a_graph_that_would_fill_the_buffers_is_refused(monkeypatch):
    """A replay of it would copy from where the numbers of the step lay in which it was captured."""
    args = arguments()
    engine_args.check_rules(args, engine_args.GPU_RULES, "KV in depth pages")
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    with pytest.raises(ValueError, match="needs SGLANG_ENABLE_METADATA_GLUE_GRAPH=0: what a captured"):
        engine_args.check_rules(args, engine_args.GPU_RULES, "KV in depth pages")


def test_experts_are_shared_out_among_whole_processes():
    def check(**changed):
        engine_args.check_rules(arguments(**changed), engine_args.GPU_RULES, "KV in depth pages")

    check(tp_size=4, ep_size=2)
    for sizes in ({"ep_size": 2}, {"tp_size": 4, "ep_size": 3}, {"ep_size": 0}):
        with pytest.raises(ValueError, match="needs an --ep-size that divides --tp-size"):
            check(**sizes)


@pytest.mark.parametrize("field", ["kv_cache_dtype", "speculative_draft_kv_cache_dtype"])
def test_keys_and_values_of_8_bits(monkeypatch, field):
    def check(dtype):
        engine_args.check_rules(arguments(**{field: dtype}), engine_args.GPU_RULES, "KV in depth pages")

    with pytest.raises(
        ValueError, match="needs --kv-cache-dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2, and the"
    ):
        check("nvfp4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, has_e4m3 in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        check("fp8_e5m2")
        if has_e4m3:
            check("fp8_e4m3")
            continue
        with pytest.raises(ValueError, match=r"needs fp8_e5m2 in place of fp8_e4m3: .* 8\.9 on"):
            check("fp8_e4m3")


INSTALL = """
    from fathom.runtime.sglang_host.machine import torchvision_ops
    torchvision_ops.declare()
    import sglang.srt.platforms as platforms
    from fathom.runtime.sglang_host import options, platform, process
    from fathom.runtime.sglang_host.seams import seams
    from sglang.srt.models import qwen3_moe  # was there first
    platforms._current_platform = platform.FathomCudaPlatform()
    seams.verify("scheduler")
    process.install(options.EngineOptions(depth_span=2, gpu_prefill="triton"))

    import torch, torch._dynamo
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.managers import scheduler
    from sglang.srt.mem_cache import registry
    from fathom.kernels.murmur_hash import murmur_hash32
    from fathom.runtime.sglang_host.attention import flashinfer_prefill
    from fathom.runtime.sglang_host.draft import draft_attention
    from fathom.runtime.sglang_host.layers import gpu_ops
    from fathom.runtime.sglang_host.memory import kv_tree
    from fathom.runtime.sglang_host.step import decode_graphs
    from fathom.runtime.sglang_host.attention import triton_attention
    from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
    from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT, DepthKvPool

    here = platforms.current_platform
    assert scheduler.Scheduler.__name__ == "FathomScheduler"
    assert here.get_mha_kv_pool_cls() is DepthKvPool and here.get_paged_allocator_cls() is DepthAllocator
    assert here.is_out_of_tree() and here.get_dispatch_key_name() == "cuda"
    assert here.get_graph_runner_cls() is decode_graphs.DecodeGraphRunner
    assert here.support_cuda_graph()
    assert (LAYOUT.used, LAYOUT.span) == (True, 2)
    assert flashinfer_prefill.OPTIONS.prefill == "triton"
    assert registry.default_radix_cache_factory is kv_tree.factory
    assert sampler.murmur_hash32 is murmur_hash32
    assert not torch._dynamo.config.disable

    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
    from sglang.srt.models import utils

    assert set(BaseFusedOp._oot_forward_registry) == {"cuda"}
    for layer, dtype, size, forward in (  # SGLang's kernels, where they take the layer
        (RMSNorm, torch.bfloat16, 128, "cuda"),
        (RMSNorm, torch.float32, 128, "native"),
        (SiluAndMul, torch.float16, 80, "cuda"),
        (SiluAndMul, torch.float32, 80, "native"),
        (Llama3RotaryEmbedding, torch.bfloat16, 128, "cuda"),
        (Llama3RotaryEmbedding, torch.bfloat16, 80, "native"),
        (Llama3RotaryEmbedding, torch.float32, 128, "native"),
    ):
        made = layer.__new__(layer)
        torch.nn.Module.__init__(made)
        made.head_size = size
        setattr(made, "forward_" + forward, lambda *args: args)
        x = torch.zeros(1, dtype=dtype)
        given = ("positions", x, x) if layer is Llama3RotaryEmbedding else (x, x)
        assert made._resolve_forward_method()(*given) == given
    # A model that writes keys while it rotates them would take virtual slots for places in the pool.
    assert not utils.enable_fused_set_kv_buffer(None) and not qwen3_moe.enable_fused_set_kv_buffer(None)

    class Runner:
        device = "cuda"
    make = ATTENTION_BACKENDS[here.get_default_attention_backend()]
    for module, name, draft in (
        (triton_attention, "TritonAttentionBackend", False), (draft_attention, "TritonDraftBackend", True)
    ):
        setattr(module, name, lambda runner, name=name: name)
        Runner.is_draft_worker = draft
        assert make(Runner()) == name
    print("installed")
"""


def test_what_is_put_in_sglangs_places():
    """In a process of its own, as the engine is; no CPU kernel takes the place of an operator."""
    assert run(INSTALL) == "installed"


SERVE = """
    import sys, torch
    torch.accelerator.is_available = torch.cuda.is_available = lambda: True
    torch.version.cuda = "13.0"
    from fathom.runtime.sglang_host.machine import torchvision_ops
    torchvision_ops.declare()
    from fathom.server import cli, serve
    from fathom.server.command import checks, command_line
    work = serve._with_fitting_draft(command_line.plan(["--demo"]))
    assert work.draft is None, work
    target, draft = (str(checks.demo_model(name)) for name in ("target", "draft"))
    without = ["--no-gpu-depth-pages", "--port", sys.argv[1]]
    print("code", cli.main(["serve", target, "--draft-model-path", draft, *without]))
    for words in sys.argv[2:]:
        assert cli.main(["serve", target, *words.split(), *without]) == 2
"""


OF_PAGES = (
    "--depth-span 2",
    "--depth-span 2, --shallow-factor 1, --tsp-layer 4, --propagation-buffer 0, --profile x, --draft-cost 0.5, "
    "--short-prompt-share 0.2, --gpu-prefill-attention triton, --sfi-sink 4, --sfi-buffer-mib 8.0",
)


def test_what_needs_depth_pages():
    """Without them the demo leaves its draft out. What else is of them is refused before loading."""
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(SERVE),
            str(free_port()),
            *(o.replace(",", "") for o in OF_PAGES),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {GPU_DEPTH_PAGES: "0"},
    )
    left_out, dense, code, *_ = ran.stdout.splitlines()
    assert left_out == "Fathom leaves out the demo's draft model" and code == "code 2", ran.stderr
    assert dense.startswith("Fathom serves every request dense, by SGLang's own path: --no-gpu-depth-pages")
    told = [line for line in ran.stderr.splitlines() if line.startswith("fathom serve: error: ")]
    why = "KV in depth pages, and there are none: --no-gpu-depth-pages was given"
    assert told == [
        f"fathom serve: error: {options} need{'' if ',' in options else 's'} {why}"
        for options in ("--draft-model-path", *OF_PAGES)
    ]


@pytest.mark.parametrize(
    ("flags", "asked", "told"),
    [([], None, WHERE_POSSIBLE), (["--gpu-depth-pages"], True, "1"), (["--no-gpu-depth-pages"], False, "0")],
)
def test_what_the_command_line_tells_every_process(monkeypatch, flags, asked, told):
    monkeypatch.setenv(GPU_DEPTH_PAGES, "x")
    work = command_line.plan(["--demo", *flags])
    assert work.gpu_depth_pages is asked
    depth_pages.choose(work.gpu_depth_pages)
    assert os.environ[GPU_DEPTH_PAGES] == told
