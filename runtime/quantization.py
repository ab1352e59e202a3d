"""What a quantized checkpoint's config says of sizes: bits of a weight of the layers, bytes of a key or value."""

from collections.abc import Mapping
from typing import Any

BITS = {"fp8": 8, "mxfp8": 8.25, "w8a8_fp8": 8, "w8a8_int8": 8, "blockwise_int8": 8}
"""Of a weight, where the method alone says it; scales of whole rows and matrices left out."""
MODELOPT = {"FP8": 8, "NVFP4": 4.5}
"""By ``quant_algo``; of 16 numbers in NVFP4, which have a scale of 8 bits, each has half a bit more."""
SCALE_BITS = 16
"""Of a group's scale (AWQ, GPTQ, compressed-tensors)."""
KEPT = "modules_to_not_convert", "ignore", "exclude_modules"
"""What configs call the layers that are not quantized."""
HEADS = "lm_head", "re:.*lm_head", "re:.*lm_head.*", "embed_tokens", "model.embed_tokens"
"""Layers that are counted as they are anyway."""


def told(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a ``config.json`` says of quantization; empty where nothing.

    Raises:
        ValueError: for what is no object.
    """
    said = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(said, Mapping):
        raise ValueError("quantization_config must be an object")
    return said


def layer_bits(config: Mapping[str, Any]) -> float | None:
    """Bits of a weight of the layers' matrices, with its share of a group's scale and zero; None if not quantized.

    Raises:
        ValueError: for a method whose bits are not known, or that gives its layers different ones.
    """
    said = told(config)
    if not said:
        return None
    method = str(said.get("quant_method", "modelopt")).lower()
    if method in BITS:
        return BITS[method]
    if method in ("awq", "gptq", "auto-round"):
        return _in_groups(said["bits"], said.get("group_size"), zeros=True)
    if method == "bitsandbytes":
        scale = 8 if said.get("bnb_4bit_use_double_quant") else 32
        return 4 + scale / 64 if said.get("load_in_4bit") else 8
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(said)
    if method.startswith("modelopt") and (algorithm := said.get("quant_algo")) in (None, *MODELOPT):
        return MODELOPT[algorithm] if algorithm else None
    raise ValueError(f"weights quantized by {method} are not modelled")


def _compressed(said: Mapping[str, Any]) -> float | None:
    groups = [
        group["weights"] for group in (said.get("config_groups") or {}).values() if group.get("weights")
    ]
    found = {
        _in_groups(each["num_bits"], each.get("group_size"), zeros=not each.get("symmetric", True))
        for each in groups
    }
    if len(found) > 1:
        raise ValueError(
            f"layers of {' and '.join(f'{bits:g}' for bits in sorted(found))} bits are not modelled"
        )
    return found.pop() if found else None


def _in_groups(bits: int, size: int | None, zeros: bool) -> float:
    shared = SCALE_BITS + (bits if zeros else 0)
    return bits + (shared / size if size and size > 0 else 0)


def kv_bytes(config: Mapping[str, Any]) -> int | None:
    """Bytes of a key or value with ``--kv-cache-dtype auto``; None where they are of the checkpoint's dtype."""
    said = told(config)
    scheme = said.get("kv_cache_scheme") or {}
    algorithm = said.get("kv_cache_quant_algo")
    narrow = (scheme.get("num_bits"), scheme.get("type")) == (8, "float") or algorithm == "FP8"
    return 1 if narrow else None


def kept_layers(config: Mapping[str, Any]) -> list[str]:
    """Parts of the layers that such a checkpoint leaves as they were, as its config names them."""
    said = told(config)
    names = (name for key in KEPT for name in said.get(key) or ())
    return [name for name in dict.fromkeys(names) if name not in HEADS]
