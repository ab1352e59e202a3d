"""Models, drafts and failures of which an operator is told in time; on a GPU also of a way without depth pages."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from sglang.srt.configs.model_config import ModelConfig

from fathom.server import ending, serve
from fathom.server.command import checks, command_line, depth_pages
from fathom.server.command.checks import StartError

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 100}
MODELS = {
    "Llama": ({}, ""),
    "Qwen3": ({}, ""),
    "DeepseekV2": ({"kv_lora_rank": 32}, "multi-head latent attention"),
    "GptOss": ({}, "sliding-window layers with KV memory of their own"),
    "Qwen3Next": ({}, "layers with a recurrent state"),
}


@pytest.fixture
def model(request, tmp_path):
    options, reason = MODELS[request.param]
    config = getattr(transformers, f"{request.param}Config")(
        architectures=[f"{request.param}ForCausalLM"], **TINY, **options
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return ModelConfig(str(tmp_path)), reason


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_a_model_that_depth_pages_do_not_take(model, gpu, monkeypatch):
    config, reason = model
    monkeypatch.setattr(depth_pages, "on_gpu", lambda: gpu)
    if not reason:
        depth_pages.refuse_model(config, 1)
        return
    with pytest.raises(StartError, match=f" has {reason}, which depth pages .*--no-gpu-depth-pages"):
        depth_pages.refuse_model(config, 1)
    monkeypatch.setattr(depth_pages, "used", lambda: False)
    depth_pages.refuse_model(config, 1)


def test_it_is_asked_before_the_model_is_loaded(monkeypatch):
    asked = []
    monkeypatch.setattr(depth_pages, "refuse_model", lambda model, devices: asked.append(model))
    work = command_line.plan(["--demo"])
    arguments = serve._server_args(work.engine_flags, work.engine)
    serve._learn_limits(replace(work, draft=None), arguments)
    assert [model.num_hidden_layers for model in asked] == [8]


def test_the_draft_is_asked_about_too(monkeypatch):
    asked = []
    monkeypatch.setattr(depth_pages, "refuse_model", lambda model, devices: asked.append(model))
    work = command_line.plan(["--demo"])
    draft = ["--speculative-draft-model-path", work.draft]
    arguments = serve._server_args([*work.engine_flags, *draft], work.engine)
    serve._learn_limits(work, arguments)
    assert [model.model_path for model in asked] == [work.model, work.draft]


def test_a_draft_whose_context_is_too_short(tmp_path, monkeypatch):
    """The engine would end with a traceback about a target."""
    work = command_line.plan(["--demo"])
    config = json.loads((Path(work.draft) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    draft = ["--speculative-draft-model-path", str(tmp_path)]

    def described(*words):
        return checks.described(serve._server_args([*work.engine_flags, *draft, *words], work.engine), True)

    own = ModelConfig(work.model).context_len
    message = f"--draft-model-path {tmp_path}: .* 512 tokens, the model's {own}; .*--context-length 512"
    with pytest.raises(StartError, match=message):
        described()
    assert [model.context_len for model in described("--context-length", "512")] == [512, 512]
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    assert [model.context_len for model in described()] == [own, 512]  # SGLang lets its operator say so


@pytest.mark.parametrize("model", ["Llama"], indirect=True)
def test_quantized_weights_without_a_gpu(model, monkeypatch):
    config, _ = model
    config.quantization = "fp8"
    with pytest.raises(StartError, match=r"quantized weights \(fp8\), for which SGLang's kernels need a GPU"):
        depth_pages.refuse_model(config, 1)
    monkeypatch.setattr(depth_pages, "on_gpu", lambda: True)
    depth_pages.refuse_model(config, 1)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("how", ["signal", "exception"])
def test_an_engine_that_does_not_start(gpu, how, monkeypatch, capsys):
    monkeypatch.setattr(depth_pages, "on_gpu", lambda: gpu)
    monkeypatch.setattr(ending, "stop_children", lambda: None)
    monkeypatch.setattr(ending, "leave", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    with pytest.raises(SystemExit) as stop:
        if how == "signal":
            ending.on_engine_failure()
        else:
            failing = {"launch": lambda *_: (_ for _ in ()).throw(RuntimeError("no such thing"))}
            monkeypatch.setitem(sys.modules, "fathom.server.app", SimpleNamespace(**failing))
            for name in ("no_proxy", "NO_PROXY"):
                monkeypatch.setenv(name, "elsewhere")
            serve._run(command_line.plan(["--demo"]), SimpleNamespace(url=lambda: "http://127.0.0.1:1"))
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == checks.FAILURE
    assert lines[0].startswith("fathom serve: error: ")
    assert lines[1:] == ([f"fathom serve: {depth_pages.HINT}"] if gpu else [])


@pytest.mark.parametrize("model", ["Llama"], indirect=True)
@pytest.mark.parametrize(("heads", "devices"), [(2, 4), (3, 2), (6, 4)])
def test_kv_heads_that_devices_do_not_share_evenly_without_a_gpu(model, heads, devices, monkeypatch):
    config, _ = model
    config.get_total_num_kv_heads = lambda: heads
    for even in (1, heads):
        depth_pages.refuse_model(config, even)
    told = f"--tp-size must divide the {heads} KV heads of .*, got {devices}: without a GPU"
    with pytest.raises(StartError, match=told):
        depth_pages.refuse_model(config, devices)
    monkeypatch.setattr(depth_pages, "on_gpu", lambda: True)
    depth_pages.refuse_model(config, devices)


@pytest.mark.parametrize("model", ["Llama"], indirect=True)
@pytest.mark.parametrize(
    ("sizes", "devices", "refused"),
    [
        ({"num_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 96}, 2, False),
        ({"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 128}, 2, True),
        ({"n_routed_experts": 8, "moe_intermediate_size": 40}, 1, True),
        ({"num_local_experts": 4, "intermediate_size": 96}, 1, False),
        ({"num_local_experts": 4, "intermediate_size": 96}, 2, True),
        ({"intermediate_size": 97}, 2, False),
    ],
)
def test_experts_that_sglang_would_widen(model, sizes, devices, refused, monkeypatch):
    config, _ = model
    config.hf_text_config.update(sizes)
    if refused:
        with pytest.raises(StartError, match=f"experts of width .*, on {devices} devices"):
            depth_pages.refuse_model(config, devices)
        monkeypatch.setattr(depth_pages, "on_gpu", lambda: True)
    depth_pages.refuse_model(config, devices)
