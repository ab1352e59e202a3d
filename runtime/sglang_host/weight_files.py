"""Checkpoints of quantized weights that nothing in their config tells of: refused before a weight is read.

SGLang copies such numbers into a model's weights without the scales beside them, or passes over names that it does
not know, leaves those weights as they were, and says that all went well. Where a model's quantization is known, its
layers take what is theirs.
"""

import contextlib
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import filter_duplicate_safetensors_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

Headers = Iterator[tuple[str, str, int]]
"""Names of tensors, their types as safetensors calls them, and how many dimensions they have."""

SCALED = ("F8_", "F6_", "F4", "I8")
"""How types begin whose numbers have scales."""
INTEGERS = ("U8", "I16", "I32")
"""Types that hold several small numbers each, if weights are of them; masks and positions are too."""
WEIGHTS = ("weight", "W_q")
"""In the last part of its name: ``qweight`` (AWQ, GPTQ), ``weight_packed``, ``weight``, ``W_q`` (HQQ)."""
TYPES = {torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32"}

_get_weights_iterator = DefaultModelLoader._get_weights_iterator


def install() -> None:
    """Look at every checkpoint that a model is loaded or updated from."""
    DefaultModelLoader._get_weights_iterator = get_weights_iterator


def get_weights_iterator(self: DefaultModelLoader, source: Any, **options: Any) -> Any:
    """SGLang's method of this name.

    Raises:
        ValueError: for quantized weights, before the first is read, where the model's are not quantized.
    """
    model = source.model_config
    if model is not None and model.quantization is None:
        _, files, _ = self._prepare_weights(
            source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
        )
        refuse_quantized(source.model_or_path, files)
    return _get_weights_iterator(self, source, **options)


def refuse_folder(folder: str) -> None:
    """The same of a model's folder, for who has not begun to load; one without safetensors is left for later.

    Raises:
        ValueError: for quantized weights.
    """
    files = [str(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    refuse_quantized(folder, filter_duplicate_safetensors_files(files, folder, SAFE_WEIGHTS_INDEX_NAME))


def refuse_quantized(model: str, files: Iterable[str]) -> None:
    """Refuse files that hold quantized weights.

    Args:
        model: what they are of.

    Raises:
        ValueError: with the first such tensor.
    """
    for file in files:
        for name, kind, dimensions in _headers(file):
            if is_quantized(name, kind, dimensions):
                raise ValueError(
                    f"{model}: {name} is of {kind}, a quantized weight, and nothing says how: config.json needs "
                    "the quantization_config that such weights were saved with"
                )


def is_quantized(name: str, kind: str, dimensions: int) -> bool:
    """Whether a tensor can only be a quantized weight."""
    last = name.rpartition(".")[2]
    packed = kind in INTEGERS and any(word in last for word in WEIGHTS)
    return dimensions > 1 and (kind.startswith(SCALED) or packed)


def _headers(file: str) -> Headers:
    """A file that cannot be read is SGLang's to report."""
    if file.endswith(".safetensors"):
        with contextlib.suppress(SafetensorError, OSError), safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118  it has no other way to be asked
                about = stored.get_slice(name)
                yield name, about.get_dtype(), len(about.get_shape())
        return
    try:
        tensors = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except (RuntimeError, OSError, pickle.UnpicklingError):
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            wide = tensor.is_floating_point() and tensor.element_size() > 1
            kind = "" if wide else TYPES.get(tensor.dtype, "F8_" if tensor.is_floating_point() else "")
            yield name, kind, tensor.dim()
