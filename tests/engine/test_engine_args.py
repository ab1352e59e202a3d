"""SGLang's flags on a machine without a GPU: defaults that give way, and a KV pool that fits."""

from types import SimpleNamespace

import pytest

from fathom.runtime import control_groups
from fathom.runtime.sglang_host import engine_args


def test_defaults_give_way_to_what_is_given():
    argv = ["--model-path", "m", "--chunked-prefill-size=64", "--sampling-backend", "x"]
    flags = engine_args.with_cpu_defaults(argv)
    assert flags[: len(argv)] == argv
    added = flags[len(argv) :]
    assert "--chunked-prefill-size" not in added
    assert "--sampling-backend" not in added
    assert added[added.index("--device") + 1] == "cpu"
    assert "--sleep-on-idle" in added


@pytest.mark.parametrize(
    ("argv", "interval"),
    [
        ([], 1),
        (["--prefill-decode-interval", "0"], 0),
        (["--prefill-decode-interval=3"], 3),
        (["--enable-mixed-chunk"], 0),
        (["--enable-mixed-chunk", "--prefill-decode-interval", "2"], 2),
    ],
)
def test_somebody_decodes_between_two_prefills(tiny_model, argv, interval):
    """Unless each chunk has those who decode in it, or the operator says otherwise."""
    built = engine_args.build(["--model-path", str(tiny_model), *argv])
    assert (built.prefill_decode_interval or 0) == interval


def config(**fields):
    text = SimpleNamespace(
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        hidden_size=4096,
        max_position_embeddings=131072,
    )
    for name, value in fields.items():
        setattr(text, name, value)
    return SimpleNamespace(get_text_config=lambda: text)


@pytest.mark.parametrize(
    ("fields", "dtype_bytes", "context", "tokens"),
    [
        ({}, 2, None, (4 << 30) // (2 * 32 * 8 * 128 * 2)),  # 4 GiB at 128 KiB a token
        ({"num_key_value_heads": None}, 2, None, (4 << 30) // (2 * 32 * 32 * 128 * 2)),
        ({"head_dim": None}, 4, None, (4 << 30) // (2 * 32 * 8 * 128 * 4)),
        ({}, 2, 1000, 16000),  # 16 contexts are less
        ({"num_hidden_layers": 1, "max_position_embeddings": 512}, 2, None, 16 * 512),
    ],
)
def test_the_pool_is_4_gib_or_16_contexts(fields, dtype_bytes, context, tokens, monkeypatch):
    monkeypatch.setattr(control_groups, "memory", lambda: None)
    assert engine_args.cpu_pool_tokens(config(**fields), dtype_bytes, context) == tokens


@pytest.mark.parametrize(("limit", "pool"), [(2 << 30, 1 << 29), (16 << 30, 4 << 30), (64 << 30, 4 << 30)])
def test_the_pool_leaves_room_in_a_container(monkeypatch, limit, pool):
    """It is written to when it is made: as large as the container's memory, it would end the engine at once."""
    monkeypatch.setattr(control_groups, "memory", lambda: limit)
    assert engine_args.cpu_pool_tokens(config(), 2, None) == pool // (2 * 32 * 8 * 128 * 2)


@pytest.mark.parametrize(
    ("span", "factor", "slots"),
    [(8, None, 4), (1, None, 32), (16, None, 2), (32, None, 1), (1, 3, 3), (16, 3, 2)],
)
def test_the_pool_leaves_room_for_the_drafts_slots(span, factor, slots, monkeypatch):
    """A slot of the draft's for each virtual one: as many per token as spans, or fewer if the operator says so."""
    monkeypatch.setattr(control_groups, "memory", lambda: None)
    draft = config(num_hidden_layers=4, num_key_value_heads=2, head_dim=64)
    tokens = engine_args.cpu_pool_tokens(config(), 2, None, draft, span, factor)
    assert tokens == (4 << 30) // (2 * 32 * 8 * 128 * 2 + slots * 2 * 4 * 2 * 64 * 2)


def test_built_arguments_keep_the_operators_limit(tiny_model):
    built = engine_args.build(["--model-path", str(tiny_model), "--max-total-tokens", "777"])
    assert built.max_total_tokens == 777
    assert built.device == "cpu"
    limited = engine_args.build(["--model-path", str(tiny_model), "--dtype", "float32"])
    assert limited.max_total_tokens == 16 * 8192


def test_numbers_may_be_written_as_sglang_takes_them(tiny_model):
    built = engine_args.build(
        ["--model-path", str(tiny_model), "--dtype", "float32", "--context-length", "2k"]
    )
    assert (built.context_length, built.max_total_tokens) == (2000, 16 * 2000)
    assert (
        engine_args.build(["--model-path", str(tiny_model), "--max-total-tokens=4Ki"]).max_total_tokens
        == 4096
    )


def test_an_unknown_flag_is_the_parsers_error(tiny_model):
    with pytest.raises(SystemExit):
        engine_args.build(["--model-path", str(tiny_model), "--no-such-flag"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--enable-two-batch-overlap",), r"--enable-two-batch-overlap: each device has"),
        (("--moe-a2a-backend", "deepep", "--tp-size", "2"), r"--moe-a2a-backend none .*: each device has"),
        (("--moe-dense-tp-size", "1", "--tp-size", "2"), r"none of --moe-dense-tp-size, .*: each device has"),
        (("--dp-size", "2"), r"--dp-size 1: replicas are servers of their own"),
        (("--hicache-storage-backend", "file"), r"no --hicache-storage-backend: it copies KV by slot"),
        (("--pp-size", "2"), r"--pp-size 1: a model is spread over devices by --tp-size"),
        (("--tp-size", "2", "--ep-size", "2"), r"--ep-size 1: each process looks for every expert"),
        (("--kv-cache-dtype", "fp8_e5m2"), r"--kv-cache-dtype auto or bfloat16, .*: .* CPU .* 16 or 32 bits"),
        (("--speculative-draft-kv-cache-dtype", "fp8_e5m2"), r"--speculative-draft-kv-cache-dtype: .* bits"),
        (
            ("--speculative-draft-attention-backend", "triton"),
            r"no --speculative-draft-attention-backend: no ",
        ),
        (("--device", "xpu"), r"--device cpu: PyTorch sees no other device"),
        (("--attention-backend", "triton"), r"--attention-backend torch_native: .* no other backend reads"),
        (("--prefill-attention-backend", "triton"), r"--attention-backend torch_native: .* no other"),
        (("--decode-attention-backend", "triton"), r"--attention-backend torch_native: .* no other"),
        (("--enable-torch-compile",), r"neither --enable-torch-compile nor .*: SGLang has them for GPUs"),
        (("--enable-forward-pass-metrics",), r"nor --enable-forward-pass-metrics: SGLang has them for GPUs"),
        (("--enable-return-routed-experts",), r"no --enable-return-routed-experts: .* more slots"),
        (("--kv-canary", "log"), r"no --kv-canary: it knows other pools"),
        (("--offload-group-size", "2"), r"neither --offload-group-size nor .*: weights are in the memory"),
        (("--weight-cache-mode", "daemon"), r"nor --weight-cache-mode: weights are in the memory"),
    ],
)
def test_what_depth_pages_do_not_go_with_is_refused(tiny_model, flags, told):
    with pytest.raises(ValueError, match=f"KV in depth pages without a GPU needs .*{told}"):
        engine_args.build(["--model-path", str(tiny_model), *flags])


def test_what_is_not_deterministic_is_refused_by_its_name(tiny_model):
    """SGLang refuses an attention backend then, which nobody gave."""
    with pytest.raises(ValueError, match=r"cannot be had with --enable-deterministic-inference: .* rounding"):
        engine_args.build(["--model-path", str(tiny_model), "--enable-deterministic-inference"])


def test_adapters_are_not_loaded_beside_a_gpu_that_is_not_there(tiny_model):
    with pytest.raises(ValueError, match="LoRA without a GPU needs no --enable-lora-overlap-loading"):
        engine_args.build(["--model-path", str(tiny_model), "--enable-lora-overlap-loading"])


def test_another_layout_of_kv_is_refused(tiny_model, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(ValueError, match="needs SGLANG_USE_HND_KVCACHE=0: the kernels read"):
        engine_args.build(["--model-path", str(tiny_model)])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--lora-backend", "triton"), "needs --lora-backend torch_native: the others launch kernels"),
        (("--lora-backend=csgmv",), "needs --lora-backend torch_native"),
        (("--enable-lora-overlap-loading",), "needs no --enable-lora-overlap-loading"),
    ],
)
@pytest.mark.parametrize("adapters", [("--lora-paths", "a=b"), ("--enable-lora", "--max-lora-rank", "8")])
def test_adapters_without_a_gpu_are_multiplied_by_our_backend(tiny_model, adapters, flags, told):
    given = ["--model-path", str(tiny_model)]
    assert engine_args.build([*given, *adapters]).lora_backend == "torch_native"
    with pytest.raises(ValueError, match=f"LoRA without a GPU {told}"):
        engine_args.build([*given, *adapters, *flags])
    assert engine_args.build([*given, "--lora-backend", "triton"]).lora_backend == "triton"  # for nothing
