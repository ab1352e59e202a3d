"""Small random checkpoints of models that take images too, and what Transformers answers to a text."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from conftest import DEMO_TARGET, TEXT_MODEL

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CLIP = {"model_type": "clip_vision_model", **PATCHES}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
SEES = BLOCKS | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
WIDE = {"rope_parameters": SECTIONS, "hidden_size": 128}
"""Where heads are a share of the hidden states."""
INTERLEAVED = {"rope_parameters": SECTIONS | {"mrope_interleaved": True}}

GLM = {
    "rope_parameters": SECTIONS | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
    "hidden_size": 128,
    "pad_token_id": 0,
}
GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GLM_SEES = BLOCKS | {"out_hidden_size": 128, "image_size": 28, "patch_size": 14}

SIGLIP = {"model_type": "siglip_vision_model", **PATCHES}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}

FAMILIES = {
    "Gemma3": ({"query_pre_attn_scalar": 32} | WINDOWS, SIGLIP),
    "Glm4v": (GLM, GLM_SEES),
    "Glm4vMoe": (GLM | GLM_EXPERTS, GLM_SEES),
    "InternVL": ({"model_type": "qwen3"}, PATCHES | {"image_size": [28, 28], "patch_size": [14, 14]}),
    "Llava": ({"model_type": "llama"}, CLIP),
    "LlavaNext": ({"model_type": "mistral"}, CLIP),
    "LlavaOnevision": ({"model_type": "qwen2"}, SIGLIP),
    "Mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", **PATCHES}),
    "Qwen2VL": (WIDE, {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 128}),
    "Qwen2_5_VL": (WIDE, BLOCKS | {"out_hidden_size": 128}),
    "Qwen3VL": (INTERLEAVED, SEES),
    "Qwen3VLMoe": (INTERLEAVED | EXPERTS, SEES),
}
"""By the prefix of Transformers' classes: changes to the text's configuration, and the images'."""


def save(folder: Path, family: str, tied: bool = False, **changes: object) -> Path:
    """A checkpoint in float32 with the demo's tokenizer, as Transformers saves it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (DEMO_TARGET / name).exists():
            shutil.copy(DEMO_TARGET / name, folder / name)
    vocabulary = json.loads((DEMO_TARGET / "config.json").read_text())["vocab_size"]
    text, images = FAMILIES[family]
    text = TEXT_MODEL | {"vocab_size": vocabulary, "eos_token_id": vocabulary - 1} | text | changes
    config = getattr(transformers, f"{family}Config")(
        text_config=text | {"tie_word_embeddings": tied}, vision_config=images, tie_word_embeddings=tied
    )
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.to(torch.float32).save_pretrained(folder)
    return folder


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] float32: what the whole model gives a text."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]
