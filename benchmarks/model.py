"""The bench model: a Llama of a given shape with seeded random weights, made on the spot and cached.

Speed does not depend on what the weights say, so nothing is downloaded. The weights are scaled so that hidden
states and logits keep a healthy spread (a model that repeats one token would hide differences between
servers).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_FORMAT = 1
"""Raised whenever the same shape and seed would give other files than before."""

_SPECIAL = ("<s>", "</s>", "<unk>")
BOS, EOS, UNK = range(len(_SPECIAL))
FIRST_WORD = len(_SPECIAL)
"""Token ids from here on are ordinary words; prompts are drawn from them."""


@dataclass(frozen=True)
class Shape:
    """A Llama shape. Widths are in elements, `seed` fixes every weight."""

    layers: int = 16
    hidden: int = 1024
    intermediate: int = 2816
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 32000
    max_position: int = 65536
    dtype: str = "bfloat16"
    seed: int = 0

    @property
    def key(self) -> str:
        """Twelve hex digits that change with any field or with the file format."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        width = {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * width


BENCH = Shape()
TINY = Shape(
    layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, vocab=512, max_position=4096
)


def draft_of(shape: Shape) -> Shape:
    """A draft for a target: half as wide, a quarter as deep, 1/16 of its FLOPs or so, and the same vocabulary.

    Its weights are as random as the target's, so the two agree on nothing: what a draft costs can be measured with
    it, not what it saves in decoding.
    """
    return replace(
        shape,
        layers=max(1, shape.layers // 4),
        hidden=shape.hidden // 2,
        intermediate=shape.intermediate // 2,
        heads=max(1, shape.heads // 2),
        kv_heads=max(1, shape.kv_heads // 2),
        seed=shape.seed + 1,
    )


def shape_of(folder: Path) -> Shape:
    """The shape of a checkpoint on disk, for the cost model. Its weights stay what they are.

    Raises:
        ValueError: for a folder without a config of such a model.
    """
    try:
        return shape_from(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: no config.json of a decoder ({type(error).__name__}: {error})") from None


def shape_from(config: Mapping[str, Any]) -> Shape:
    """The shape in a Hugging Face configuration. KeyError for one that lacks a size."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=config["vocab_size"],
        max_position=config["max_position_embeddings"],
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
    )


def scrambled(folder: Path, cache: Path) -> Path:
    """A copy of a checkpoint that knows nothing: each matrix drawn anew with the spread it had.

    The worst draft there is for the model that the checkpoint is a good draft of, at the same cost.
    """
    import torch
    from safetensors.torch import load_file, save_file

    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    target = cache / f"scrambled-{name}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for at, (key, tensor) in enumerate(sorted(tensors.items())):
            if tensor.dim() > 1:
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(at))
                tensors[key] = (noise * tensor.float().std()).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def config_json(shape: Shape) -> dict:
    """The `config.json` that SGLang, vLLM and Transformers read."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_position,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "vocab_size": shape.vocab,
    }


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor names of a Llama, each with its shape [out, in] (norms: [hidden])."""
    q, kv, h, m = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.hidden,
        shape.intermediate,
    )
    names = {
        "model.embed_tokens.weight": (shape.vocab, h),
        "model.norm.weight": (h,),
        "lm_head.weight": (shape.vocab, h),
    }
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        names |= {
            at + "input_layernorm.weight": (h,),
            at + "post_attention_layernorm.weight": (h,),
            at + "self_attn.q_proj.weight": (q, h),
            at + "self_attn.k_proj.weight": (kv, h),
            at + "self_attn.v_proj.weight": (kv, h),
            at + "self_attn.o_proj.weight": (h, q),
            at + "mlp.gate_proj.weight": (m, h),
            at + "mlp.up_proj.weight": (m, h),
            at + "mlp.down_proj.weight": (h, m),
        }
    return names


def _weights(shape: Shape) -> dict:
    """Each tensor from its own generator, seeded by its name: the order of making them does not matter."""
    import torch

    tensors = {}
    for name, size in weight_shapes(shape).items():
        if len(size) == 1:
            tensor = torch.ones(size)
        else:
            seed = int.from_bytes(hashlib.sha256(f"{shape.seed}/{name}".encode()).digest()[:7], "big")
            scale = 1.0 if "embed" in name else 1.0 / math.sqrt(size[1])
            tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
        tensors[name] = tensor.to(getattr(torch, shape.dtype))
    return tensors


def _tokenizer(shape: Shape):
    """One word per id (`w17`): every generated token is text of its own and none waits for the next."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *(f"w{i}" for i in range(FIRST_WORD, shape.vocab))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=_SPECIAL[UNK]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=_SPECIAL[BOS],
        eos_token=_SPECIAL[EOS],
        unk_token=_SPECIAL[UNK],
        model_max_length=shape.max_position,
    )


def _write(shape: Shape, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(_weights(shape), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(shape).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config_json(shape), indent=2) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def ensure(shape: Shape, cache: Path) -> Path:
    """The folder of the model, made if the cache has none of this shape and seed. Safe beside another run."""
    target = cache / f"llama-{shape.layers}x{shape.hidden}-{shape.dtype}-{shape.key}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="making-", dir=cache))
    try:
        _write(shape, folder)
        folder.chmod(0o755)
        os.rename(folder, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target
