"""Write a trained checkpoint as a LlamaForCausalLM folder (bf16 safetensors), and read it back.

The files are written directly, without Transformers' model classes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .model import Llama, ModelConfig
from .tokenizer import MODEL_MAX_LENGTH, load_tokenizer

MODELS = Path(__file__).parent / "models"

_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def hf_names(layers: int) -> dict[str, str]:
    """Our parameter name -> Transformers' name."""
    names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    for i in range(layers):
        names |= {f"layers.{i}.{a}": f"model.layers.{i}.{b}.weight" for a, b in _NAMES.items()}
    return names


def hf_config(cfg: ModelConfig, tokenizer) -> dict:
    """The contents of config.json for LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.ffn,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_base},
        "max_position_embeddings": MODEL_MAX_LENGTH,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": True,
        **special_ids(tokenizer),
    }


def special_ids(tokenizer) -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def export(state: dict[str, Tensor], cfg: ModelConfig, tokenizer, folder: str | Path) -> None:
    """Write weights, config, generation config and tokenizer to `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = hf_names(cfg.layers)
    weights = {names[k]: v.detach().to(torch.bfloat16).contiguous() for k, v in state.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    for name, data in (
        ("config.json", hf_config(cfg, tokenizer)),
        ("generation_config.json", special_ids(tokenizer)),
    ):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n")
    tokenizer.save_pretrained(folder)


def load_model(path: str | Path) -> Llama:
    """Our float32 model from an exported folder or from a trainer checkpoint (rounded to bf16 either way)."""
    path = Path(path)
    if path.suffix == ".pt":
        saved = torch.load(path, weights_only=False, map_location="cpu")
        cfg = ModelConfig.from_dict(saved["config"])
        state = saved["model"]
    else:
        raw = json.loads((path / "config.json").read_text())
        cfg = ModelConfig(
            vocab=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            ffn=raw["intermediate_size"],
            rope_base=raw["rope_parameters"]["rope_theta"],
            eps=raw["rms_norm_eps"],
        )
        weights = load_file(path / "model.safetensors")
        state = {ours: weights[theirs] for ours, theirs in hf_names(cfg.layers).items()}
    model = Llama(cfg)
    model.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in state.items()})
    return model.requires_grad_(False)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("checkpoint")
    p.add_argument("folder")
    p.add_argument("--tokenizer", required=True)
    args = p.parse_args(argv)
    saved = torch.load(args.checkpoint, weights_only=False, map_location="cpu")
    cfg = ModelConfig.from_dict(saved["config"])
    export(saved["model"], cfg, load_tokenizer(args.tokenizer), args.folder)


if __name__ == "__main__":
    main()
