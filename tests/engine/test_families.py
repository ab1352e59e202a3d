"""Models that are not plain Llamas."""

from types import SimpleNamespace

import pytest
import transformers
from conftest import save_random_model
from greedy import TOLERANCE, ask
from interpreted import SERVED, check_all
from noisy import draft_flags, noisy_copy
from sglang.srt.configs.model_config import ModelConfig

from fathom.runtime.sglang_host.draft import draft_config
from fathom.runtime.sglang_host.scheduler import ignored_window

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.9}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
FAMILIES = {
    "Phi3": {},
    "Glm4": {"rope_parameters": SCALED | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "Gemma": {"tie_word_embeddings": True},
    "Apertus": {},
    "Olmo2": {"hidden_size": 128},
    "HunYuanDenseV1": {"use_qk_norm": True},
    "SeedOss": {},
    "Ernie4_5": {"num_nextn_predict_layers": 1},  # heads that its checkpoints may have beside the layers
    "Ministral3": {"rope_parameters": YARN | {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}},
    "Cohere2": {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": True, **WINDOWS},
    "Gemma3Text": {
        **WINDOWS,
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    },
}
TOLERANCES = {"Gemma": 3e-3, "Apertus": 5e-3}
"""SGLang rounds some of their constants to bfloat16."""

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
WITH_EXPERTS = {
    "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "Glm4Moe": {
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        **GROUPS,
        **EXPERTS,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(start_server, tmp_path, triggers, family, monkeypatch):
    """With a draft of its own family; noise on norms and biases too, which are ones and zeros in random models."""
    # The one class without "Text" in its name, of which the configuration is the text's.
    monkeypatch.setattr(transformers, "Gemma3TextForCausalLM", transformers.Gemma3ForCausalLM, raising=False)
    (plain := tmp_path / "plain").mkdir()
    save_random_model(plain, family, pad_token_id=0, **FAMILIES[family])
    # Of Apertus, constants would get noise that SGLang rounds away.
    target = noisy_copy(plain, tmp_path / "target", 0.0 if family == "Apertus" else 0.05)
    draft = noisy_copy(target, tmp_path / "draft", 0.01)
    server = start_server(target, *SERVED, *draft_flags(draft))
    check_all(server, target, draft, triggers, TOLERANCES.get(family, TOLERANCE))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_and_a_draft_of_another_family(start_server, tmp_path, close_draft, triggers, family):
    """Their tables of tokens are padded to different lengths."""
    known = transformers.AutoConfig.from_pretrained(close_draft).vocab_size
    target = save_random_model(tmp_path, family, vocab_size=known + 128, **WITH_EXPERTS[family])
    server = start_server(target, *SERVED, *draft_flags(close_draft))
    check_all(server, target, close_draft, triggers)
    prompt = [*range(6, 90), known + 100, *range(90, 150)]

    def said(policy, **sampling):
        return ask(server, prompt, policy, 8, **sampling)["output_ids"]

    biased = {"logit_bias": {str(known + 110): 1e4}}
    assert said({"speculative": True}) == said({})
    assert said({"speculative": True}, **biased) == said({}, **biased) == [known + 110] * 8
    judged = {"prefill_keep_rate": 0.5, "min_prompt_tokens": 64}
    assert said(judged | {"speculative": True}) == said(judged)
    assert server.stop() == 0


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_draft_with_experts_is_the_model_that_it_is(tmp_path, monkeypatch, family):
    """SGLang would load the part of such a checkpoint that drafts for the model itself."""
    monkeypatch.setattr(ModelConfig, "_config_draft_model", ModelConfig._config_draft_model)
    draft_config.install()
    save_random_model(tmp_path, family, **WITH_EXPERTS[family])
    config = ModelConfig(str(tmp_path), is_draft_model=True).hf_config
    assert config.architectures == [f"{family}ForCausalLM"]


USED = {"sliding_window": 4096, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "changes", "context", "applied", "told"),
    [
        ("Mistral", {"sliding_window": 4096}, 32768, None, True),
        ("Mistral", {"sliding_window": 4096}, 4096, None, False),  # no prompt is longer
        ("Mistral", {"sliding_window": 4096}, 32768, 4096, False),  # the layers have it
        ("Mistral", {"sliding_window": None}, 32768, None, False),
        ("Qwen2", {"sliding_window": 4096}, 32768, None, False),  # not used, as in Qwen2.5
        ("Qwen2", USED | {"max_window_layers": 28}, 32768, None, True),
        ("Qwen2", USED | {"max_window_layers": 32}, 32768, None, False),  # in none of the 32 layers
        ("Llama", {}, 32768, None, False),
    ],
)
def test_a_window_that_sglang_does_not_apply_is_told(family, changes, context, applied, told):
    config = getattr(transformers, f"{family}Config")(**changes)
    config.architectures = [f"{family}ForCausalLM"]
    notice = ignored_window(
        SimpleNamespace(hf_text_config=config, hf_config=config, context_len=context), applied
    )
    assert bool(notice) == told
    assert not told or (f"{family}ForCausalLM" in notice and "--context-length 4096" in notice)
