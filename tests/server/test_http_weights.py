"""Weights that are not of the kind that a model's layers take: no server answers by their bare numbers."""

import json
import shutil

import pytest
import torch
from conftest import save_random_model
from greedy import ask
from safetensors.torch import load_file, save_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import QUANTIZATION_METHODS

from fathom.runtime.sglang_host.models import weight_files
from fathom.server.command import quantized
from fathom.server.command.checks import StartError

PROMPT = list(range(300, 340))


def as_fp8(name, weight):
    scale = weight.abs().max() / 448
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def as_int8(name, weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def as_int4(name, weight, tensor, dim):
    """Eight numbers in each 32 bits, as AWQ and GPTQ store them; their values do not matter here."""
    packed = torch.zeros(weight.shape[1 - dim], weight.shape[dim] // 8, dtype=torch.int32)
    stem = name.removesuffix("weight")
    return {stem + tensor: packed, f"{stem}scales": torch.ones(weight.shape[1] // 32, len(weight)).half()}


FORMATS = {
    "fp8": as_fp8,
    "int8": as_int8,
    "awq": lambda name, weight: as_int4(name, weight, "qweight", 0),
    "compressed-tensors": lambda name, weight: as_int4(name, weight, "weight_packed", 1),
    "bitsandbytes": lambda name, weight: {name: torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)},
}


@pytest.fixture
def checkpoint(tiny_model, tmp_path):
    """A function: format -> the tiny model with its projections in it, and a config that does not say so."""

    def make(kind):
        shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
        tensors = load_file(tmp_path / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors |= FORMATS[kind](name, tensors.pop(name))
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return make


@pytest.mark.parametrize("kind", FORMATS)
def test_new_weights_that_are_quantized(server, checkpoint, kind):
    """The server would say that it has them, and answer by numbers without their scales, or by the old weights."""
    before = ask(server, PROMPT, None)["output_ids"]
    reply = server.client.post("/update_weights_from_disk", json={"model_path": str(checkpoint(kind))})
    assert reply.status_code == 400
    assert (
        "a quantized weight" in reply.json()["message"] and "quantization_config" in reply.json()["message"]
    )
    server.flush()
    assert ask(server, PROMPT, None)["output_ids"] == before


def test_new_weights_of_another_shape(server, tmp_path):
    """SGLang would take the part of them that fits, and say that it has them all."""
    before = ask(server, PROMPT, None)["output_ids"]
    other = save_random_model(tmp_path, intermediate_size=256, initializer_range=0.3)
    reply = server.client.post("/update_weights_from_disk", json={"model_path": str(other)})
    assert reply.status_code == 400
    assert "proj.weight has the shape [" in reply.json()["message"]
    server.flush()
    assert ask(server, PROMPT, None)["output_ids"] == before


def test_new_weights_that_are_cut_off(server, tmp_path):
    """Of two files the second: SGLang would have changed what is in the first."""
    before = ask(server, PROMPT, None)["output_ids"]
    whole = save_random_model(tmp_path, initializer_range=0.3) / "model.safetensors"
    tensors, files = load_file(whole), ("1.safetensors", "2.safetensors")
    whole.unlink()
    for file, names in zip(files, (list(tensors)[::2], list(tensors)[1::2]), strict=True):
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    (tmp_path / files[1]).write_bytes((tmp_path / files[1]).read_bytes()[:-1000])
    reply = server.client.post("/update_weights_from_disk", json={"model_path": str(tmp_path)})
    assert reply.status_code == 400 and "2.safetensors cannot be read: " in reply.json()["message"]
    server.flush()
    assert ask(server, PROMPT, None)["output_ids"] == before


def test_new_weights_that_cannot_take_the_place_of_the_served():
    served = {"a.weight": (2, 4), "b.weight": (3,)}
    weight_files.refuse_change("model", None, {"a.weight": (2, 4), "lm_head.weight": (4, 4)}, served)
    weight_files.refuse_change("model", "fp8", served, served)
    with pytest.raises(ValueError, match=r"a\.weight has the shape \[2, 8\], in the served model \[2, 4\]"):
        weight_files.refuse_change("model", None, served | {"a.weight": (2, 8)}, served)
    with pytest.raises(ValueError, match=r"tensors of other names, a\.weight for one"):
        weight_files.refuse_change("model", None, {"c.weight": (2, 4)}, served)
    with pytest.raises(ValueError, match="weights of awq are laid out anew"):
        weight_files.refuse_change("model", "awq", served, served)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_of_quantized_weights_does_not_start(checkpoint, kind):
    model = ModelConfig(str(checkpoint(kind)))
    with pytest.raises(StartError, match=r": model\.layers\.0\..* a quantized weight, .*quantization_config"):
        quantized.refuse_model(model, "auto")
    quantized.refuse_model(model, "dummy")  # reads none
    model.quantization, model.dtype = "awq", torch.float16
    quantized.refuse_model(model, "auto")  # its layers take what is theirs


@pytest.mark.parametrize("method", sorted(weight_files.BEFOREHAND))
def test_plain_weights_for_layers_that_quantize_none(tiny_model, method):
    """Of which SGLang makes zeros and scales of whatever the memory held, or a traceback; a draft gets the method
    of ``--quantization``, too.
    """
    assert method in QUANTIZATION_METHODS
    model = ModelConfig(str(tiny_model))
    model.quantization, model.dtype = method, torch.bfloat16 if method == "w4afp8" else torch.float16
    with pytest.raises(
        StartError, match=f"no quantized weights, and layers of {method} quantize none: leave"
    ):
        quantized.refuse_model(model, "auto")
    quantized.refuse_model(model, "dummy")


def test_files_that_are_not_the_models(checkpoint, tiny_model):
    """Beside those of the index."""
    folder = checkpoint("fp8")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    own = shutil.copy(tiny_model / "model.safetensors", folder / "own.safetensors")
    weight_map = dict.fromkeys(load_file(own), "own.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weight_files.refuse_folder(str(folder), None)
    (folder / "own.safetensors").unlink()
    with pytest.raises(StartError, match=r"own\.safetensors"):
        quantized.refuse_model(ModelConfig(str(folder)), "auto")


@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_pytorch(checkpoint, kind, tmp_path):
    folder = checkpoint(kind)
    file = tmp_path / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), file)
    with pytest.raises(ValueError, match="a quantized weight"):
        weight_files.refuse_files("model", None, [str(file)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_weights(tmp_path, dtype):
    """With what else may lie beside them: masks, positions, numbers of tokens."""
    file = save_random_model(tmp_path, dtype=dtype) / "model.safetensors"
    weight_files.refuse_folder(str(tmp_path), None)
    beside = {
        "attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "attn.masked_bias": torch.ones(2, 2, dtype=torch.bool),
        "position_ids": torch.arange(8)[None],
        "relative_position_index": torch.zeros(4, 4, dtype=torch.int32),
        "attn.k_scale": torch.tensor(0.5),
        "num_batches_tracked": torch.tensor(1),
    }
    save_file(load_file(file) | beside, file)
    weight_files.refuse_folder(str(tmp_path), None)
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    weight_files.refuse_files("model", None, [str(tmp_path / "pytorch_model.bin")])
