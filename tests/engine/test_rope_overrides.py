"""An override of a model's positions does what the same words in its config.json do."""

import json

import pytest
import transformers
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.hf_transformers_utils import get_rope_config

from fathom.runtime.sglang_host.models import rope_overrides

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    """A function: a model's family, what its config.json says, overrides -> SGLang's configuration."""
    monkeypatch.setattr("sglang.srt.configs.model_config.get_config", rope_overrides.get_config)

    def read(family, said, overrides):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        getattr(transformers, f"{family}Config")(
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
            hidden_size=64,
            head_dim=32,
            architectures=[f"{family}ForCausalLM"],
        ).save_pretrained(folder)
        file = folder / "config.json"
        content = json.loads(file.read_text())
        content.pop("rope_parameters")
        file.write_text(json.dumps(content | said))
        return ModelConfig(str(folder), model_override_args=json.dumps(overrides))

    return read


@pytest.mark.parametrize("scaling", [{}, YARN])
def test_olmo_3_in_the_words_of_transformers_5(configuration, monkeypatch, scaling):
    """SGLang's class for its configuration would have another base, or end the engine where it is scaled."""
    monkeypatch.setattr(rope_overrides.Olmo3Config, "__init__", rope_overrides.init_olmo3)
    kind = scaling or {"rope_type": "default"}
    told = [
        configuration("Olmo3", {"rope_parameters": {"rope_theta": 500000.0} | kind}, {}),
        configuration("Olmo3", {"rope_theta": 500000.0, "rope_scaling": scaling or None}, {}),
    ]
    new, old = (get_rope_config(config.hf_config) for config in told)
    assert new == old and new[0] == 500000.0
    assert (new[1] or {}).get("factor") == scaling.get("factor")


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": None},
        {"rope_theta": 40000.0},
        {"rope_theta": 40000.0, "rope_scaling": YARN},
        {"rope_scaling": YARN | {"rope_theta": 50000.0}},
        {"rope_parameters": YARN | {"rope_theta": 50000.0}},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("Qwen3", {"rope_theta": 1000000.0}),
        ("Llama", {"rope_theta": 500000.0, "rope_scaling": YARN | {"factor": 2.0}}),
        ("Glm4", {"rope_theta": 20000.0, "partial_rotary_factor": 0.25}),
    ],
)
def test_an_override_is_what_the_file_could_have_said(configuration, family, own, overrides):
    overridden = configuration(family, own, overrides)
    kept = own if "rope_parameters" not in overrides else own.keys() - {"rope_scaling"}
    written = configuration(family, {key: own[key] for key in kept} | overrides, {})
    expected = get_rope_config(written.hf_text_config)
    base, scaling = get_rope_config(overridden.hf_text_config)
    # Transformers notes the scaling's kind under a second name where it has read it from a file.
    assert (base, scaling | {"type": scaling["rope_type"]}) == (
        expected[0],
        expected[1] | {"type": expected[1]["rope_type"]},
    )
    assert base != 10000 and overridden.context_len == written.context_len


def test_other_overrides_are_left_alone(configuration):
    own = {"rope_theta": 1000000.0}
    plain, changed = (configuration("Qwen3", own, each) for each in ({}, {"num_hidden_layers": 1}))
    assert changed.num_hidden_layers == 1
    assert get_rope_config(changed.hf_text_config) == get_rope_config(plain.hf_text_config)


GEMMA = {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": YARN | {"factor": 2.0}}


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": None},
        {"rope_theta": 40000.0},
        {"rope_local_base_freq": 20000.0},
        {"rope_theta": 40000.0, "rope_local_base_freq": 20000.0, "rope_scaling": YARN},
        {
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 60000.0},
            }
        },
    ],
    ids=json.dumps,
)
def test_gemma_3_has_rotations_by_kind_of_layer(configuration, overrides):
    """The older words are those of layers that see everything, and of the others' base."""
    kept = GEMMA if "rope_parameters" not in overrides else {}
    overridden, written = (
        configuration("Gemma3Text", *told).hf_text_config.rope_parameters
        for told in ((GEMMA, overrides), (kept | overrides, {}))
    )
    for kind in ("full_attention", "sliding_attention"):
        assert overridden[kind] == written[kind]
