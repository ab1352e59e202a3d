"""Quantized models that cannot be served: one line that names the model, the method and what is legal."""

import json
import shutil

import pytest
import torch
from sglang.srt import utils
from sglang.srt.configs.model_config import ModelConfig

from fathom.server import serve
from fathom.server.command import checks, command_line, depth_pages, quantized
from fathom.server.command.checks import StartError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": True, "desc_act": False}


@pytest.fixture
def folder(tmp_path):
    """A function: what a config.json says of quantization -> the demo's target with it, without weights."""

    def make(said):
        shutil.copytree(checks.demo_model(), tmp_path, dirs_exist_ok=True)
        (tmp_path / "model.safetensors").unlink()
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
        return tmp_path

    return make


def start(*words):
    """As ``fathom serve`` does it, up to the first process."""
    work = command_line.plan([*map(str, words)])
    draft = [] if work.draft is None else ["--speculative-draft-model-path", work.draft]
    arguments = serve._server_args([*work.engine_flags, *draft], work.engine)
    serve._learn_limits(work, arguments)
    return checks.described(arguments, work.draft is not None)


@pytest.mark.parametrize("method", ["gptq", "hqq", "torchao", "fp8", "awq", "compressed-tensors"])
def test_no_method_is_served_without_a_gpu(folder, method):
    """Whether SGLang has it, under that name, or not: nobody is told to take another."""
    path = folder(GPTQ | {"quant_method": method, "format": "int-quantized", "config_groups": {}})
    with pytest.raises(StartError) as told:
        start(path)
    kernels = "for which SGLang's kernels need a GPU"
    assert str(told.value) == f"{path} would have quantized weights ({method}), {kernels}"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (GPTQ, r"\(gptq\) of a form that SGLang does not serve: it serves gptq with bits 4 or 8, sym true, "),
        ({"quant_method": "hqq"}, r"\(hqq\), which SGLang does not serve: it serves fp8, .*gptq_marlin, "),
        ({"bits": 4}, "quantization_config in its config.json names no quant_method"),
    ],
)
def test_methods_that_sglang_does_not_have(folder, monkeypatch, said, message):
    monkeypatch.setattr(depth_pages, "on_gpu", lambda: True)
    with pytest.raises(StartError, match=message):
        start(folder(said))


def test_a_draft_of_a_method_that_sglang_does_not_have(folder):
    with pytest.raises(StartError, match=r"would have quantized weights \(hqq\), for which"):
        start(checks.demo_model(), "--draft-model-path", folder({"quant_method": "hqq"}))


@pytest.mark.parametrize("said", ["fp8", [1]])
def test_a_quantization_config_that_is_none(folder, said):
    path = folder(said)
    with pytest.raises(StartError, match=r"config\.json: quantization_config must be an object"):
        checks.check_model(str(path))


@pytest.mark.parametrize("flag", ["--quantization", "--speculative-draft-model-quantization"])
def test_unquant_is_a_legal_value(flag):
    """SGLang's word for no quantization was refused as an unknown method."""
    assert [each.quantization for each in start("--demo", flag, "unquant")] == [None, None]


@pytest.mark.parametrize(
    "words",
    [
        ("--load-format", "gguf"),
        ("--load-format", "bitsandbytes"),
        ("--modelopt-quant", "fp8"),
        ("--rl-quant-profile", "some.json"),
    ],
)
def test_options_that_quantize_without_a_gpu(words):
    """They ended in a traceback, or changed nothing."""
    with pytest.raises(StartError, match=f"{words[0]}.*: SGLang's kernels for quantized weights need a GPU"):
        start("--demo", *words)


def described(path, method, dtype):
    model = ModelConfig(str(path))
    model.quantization, model.dtype = method, dtype
    return model


@pytest.mark.parametrize(
    ("method", "dtype", "legal"),
    [
        ("awq", torch.bfloat16, "float16"),
        ("awq_marlin", torch.float32, "float16 or bfloat16"),
        ("fp8", torch.float32, "bfloat16 or float16"),
        ("w4afp8", torch.float16, "bfloat16"),  # and float8, which --dtype does not have
        ("compressed-tensors", torch.float32, "float16 or bfloat16"),
    ],
)
def test_types_that_a_method_does_not_multiply(folder, method, dtype, legal):
    name, path = str(dtype).removeprefix("torch."), folder(None)
    with pytest.raises(StartError, match=f"quantized by {method}, which need --dtype {legal}, got {name}$"):
        quantized.refuse_model(described(path, method, dtype), "auto")
    quantized.refuse_model(described(path, method, getattr(torch, legal.split()[0])), "auto")


@pytest.mark.parametrize(("method", "least"), [("modelopt_fp8", (8, 9)), ("w8a8_fp8", (8, 9)), ("fp8", None)])
def test_gpus_that_are_too_old(folder, monkeypatch, method, least):
    model = described(folder(None), method, torch.bfloat16)
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(utils, "get_device_capability", lambda found=capability: found)
        if least is None or capability >= least:
            quantized.refuse_model(model, "auto")
            continue
        with pytest.raises(StartError, match=r"need a GPU of compute capability 8\.9 or newer; .* has 8\.0"):
            quantized.refuse_model(model, "auto")


@pytest.mark.parametrize("installed", [False, True])
def test_a_package_that_is_not_installed(folder, monkeypatch, installed):
    monkeypatch.setattr(quantized, "find_spec", lambda name: name if installed else None)
    model = described(folder(None), "bitsandbytes", torch.bfloat16)
    if installed:
        quantized.refuse_model(model, "auto")
        return
    with pytest.raises(StartError, match="not installed: pip install bitsandbytes"):
        quantized.refuse_model(model, "auto")


def test_it_is_asked_before_the_model_is_loaded(monkeypatch):
    """The draft's, too."""
    asked = []
    monkeypatch.setattr(quantized, "refuse_model", lambda model, load_format: asked.append(model.model_path))
    start("--demo")
    work = command_line.plan(["--demo"])
    assert asked == [work.model, work.draft]
