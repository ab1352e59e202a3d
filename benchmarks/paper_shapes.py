"""Models of the papers' shapes with random weights: a configuration and a tokenizer, no weights on disk.

SGLang draws the weights itself (``--load-format dummy``): speed does not depend on what they say.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fathom.benchmarks import model as bench_model

LLAMA, QWEN3 = "llama", "qwen3"
_CLASSES = {LLAMA: "LlamaForCausalLM", QWEN3: "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class Size:
    """A decoder's shape. Widths in elements."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    def config(self, max_position: int, dtype: str) -> dict[str, Any]:
        """The ``config.json`` of this shape."""
        return {
            "architectures": [_CLASSES[self.family]],
            "model_type": self.family,
            "attention_bias": False,
            "bos_token_id": bench_model.BOS,
            "eos_token_id": bench_model.EOS,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": max_position,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": self.tied,
            "torch_dtype": dtype,
            "vocab_size": self.vocab,
        }


SIZES = {
    "llama-3.1-8b": Size(LLAMA, 32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": Size(LLAMA, 80, 8192, 28672, 64, 8, 128, 128256),
    "llama-1b": Size(LLAMA, 16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "qwen3-4b": Size(QWEN3, 36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    "qwen3-0.6b": Size(QWEN3, 28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    "tiny": Size(LLAMA, 8, 64, 128, 4, 2, 16, 512),
    "tiny-draft": Size(LLAMA, 2, 64, 128, 4, 2, 16, 512),
    "tiny-qwen3": Size(QWEN3, 4, 64, 128, 4, 2, 16, 512),
}


def sized(name: str, vocab: int | None = None) -> Size:
    """A shape by name, with another vocabulary for a draft that serves another target.

    Args:
        name: one of ``SIZES``; ``NAME:N`` for its first N layers alone, where the KV of all does not fit. What a
            layer takes is the same; the output head then weighs more.

    Raises:
        ValueError: for an unknown name, with the known ones, and for layers that the shape has not.
    """
    known, _, layers = name.partition(":")
    if known not in SIZES:
        raise ValueError(f"unknown size {known!r}; known: {', '.join(SIZES)}")
    size = replace(SIZES[known], vocab=vocab or SIZES[known].vocab)
    if not layers:
        return size
    if not layers.isdecimal() or not 1 <= int(layers) <= size.layers:
        raise ValueError(f"{name!r}: layers must be in [1, {size.layers}], got {layers!r}")
    return replace(size, layers=int(layers))


def write(size: Size, folder: Path, max_position: int, dtype: str) -> Path:
    """Write the model's folder, without weights; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = bench_model.Shape(vocab=size.vocab, max_position=max_position)
    bench_model._tokenizer(shape).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(size.config(max_position, dtype), indent=2) + "\n")
    (folder / "size.json").write_text(json.dumps(asdict(size)) + "\n")
    return folder
