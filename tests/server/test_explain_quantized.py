"""What `fathom explain` counts of quantized models, by hand."""

import json

import pytest

from fathom.runtime import cost
from fathom.server import cli

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "dtype": "bfloat16",
    "max_position_embeddings": 4096,
}
LAYERS, HEAD = 4 * (2 * 64 * 16 * (4 + 2) + 3 * 64 * 128), 64 * 100
KV_NUMBERS = 4 * 2 * 2 * 16


def compressed(bits, **more):
    weights = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": True, "group_size": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | more}},
        "ignore": ["lm_head"],
    }


SAID = {
    "FP8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4 + 20 / 128),
    "GPTQ": ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, 8),
    "W8A8": (compressed(8), 8),
    "W4A16": (compressed(4, strategy="group", group_size=32), 4 + 16 / 32),
    "W4A16, zeros": (compressed(4, strategy="group", group_size=32, symmetric=False), 4 + 20 / 32),
    "NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
    "NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    "only KV": ({"quant_method": "compressed-tensors", "config_groups": {}}, 16),
    "nothing": (None, 16),
}


@pytest.fixture
def explain(tmp_path, capsys):
    """A function: what a config says of quantization, options -> the figures."""

    def ask(said, *options):
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"quantization_config": said}))
        words = [
            "explain",
            str(tmp_path),
            "--json",
            "--prompt-tokens",
            "100",
            "--output-tokens",
            "2",
            *options,
        ]
        code, told = cli.main(words), capsys.readouterr()
        return json.loads(told.out) if code == 0 else told.err

    return ask


@pytest.mark.parametrize("name", SAID)
def test_weights_that_a_step_reads(explain, name):
    """The head's are as they were."""
    said, bits = SAID[name]
    found = explain(said, "--policy", '{"depth_cutoff": 3}')
    weights = LAYERS * bits / 8 + HEAD * 2
    dense, policy = (found["costs"][name] for name in ("dense", "policy"))
    assert dense["step_weight_bytes"] == policy["step_weight_bytes"] == pytest.approx(weights)
    ratio = (weights + dense["step_kv_bytes"]) / (weights + policy["step_kv_bytes"])
    assert found["ratios"]["tpot"] == pytest.approx(ratio)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("said", "options", "itemsize"),
    [
        (compressed(8), (), 2),
        (compressed(8) | {"kv_cache_scheme": SCHEME}, (), 1),
        (compressed(8) | {"kv_cache_scheme": SCHEME}, ("--kv-cache-dtype", "bfloat16"), 2),
        (compressed(8) | {"kv_cache_scheme": SCHEME | {"type": "int"}}, (), 2),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, (), 1),
    ],
)
def test_keys_and_values_that_a_checkpoint_asks_for(explain, said, options, itemsize):
    assert explain(said, *options)["costs"]["dense"]["kv_bytes"] == 101 * KV_NUMBERS * itemsize


def test_modelopt_says_it_beside(explain, tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
    )
    assert explain(None)["costs"]["dense"]["step_weight_bytes"] == LAYERS + HEAD * 2


def test_layers_that_were_left_as_they_were(explain):
    said = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"]}
    assert any("(model.layers.0.mlp.down_proj) are counted as" in note for note in explain(said)["notes"])
    said["modules_to_not_convert"].pop()
    assert not any("quantized" in note for note in explain(said)["notes"])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "hqq"}, "weights quantized by hqq are not modelled"),
        ({"quant_method": "awq"}, "'bits' is missing"),
        ({"quant_method": "awq", "bits": 0}, "weights of 0 bits"),
        ("fp8", "quantization_config must be an object"),
    ],
)
def test_what_cannot_be_counted(explain, said, message):
    assert message in explain(said)


def test_layers_of_different_bits():
    groups = {f"group_{bits}": compressed(bits)["config_groups"]["group_0"] for bits in (4, 8)}
    with pytest.raises(ValueError, match="layers of 4 and 8 bits are not modelled"):
        cost.ModelShape.from_config(
            SHAPE | {"quantization_config": compressed(8) | {"config_groups": groups}}
        )
