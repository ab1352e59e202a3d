"""Checkpoints whose weights are not of the kind that a model's layers take: refused before a weight is read.

Of quantized weights that nothing in a config tells of, SGLang copies the numbers without the scales beside them, or
passes over names that it does not know, leaves those weights as they were, and says that all went well. Plain
weights it copies into layers for small integers, whose scales are then whatever the memory held. New weights of
another shape are cut to the model's, as for a device that has a part of them.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import filter_duplicate_safetensors_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

Shape = tuple[int, ...]
Header = tuple[str, str, Shape]
"""A tensor's name, its type as safetensors calls it, and its shape."""

SCALED = ("F8_", "F6_", "F4", "I8")
"""How types begin whose numbers have scales."""
INTEGERS = ("U8", "I16", "I32")
"""Types that hold several small numbers each, if weights are of them; masks and positions are too."""
WEIGHTS = ("weight", "W_q")
"""In the last part of its name: ``qweight`` (AWQ, GPTQ), ``weight_packed``, ``weight``, ``W_q`` (HQQ)."""
BEFOREHAND = frozenset(
    {
        *("awq", "awq_marlin", "gptq_marlin", "moe_wna16", "w4afp8", "petit_nvfp4"),
        *("w8a8_int8", "blockwise_int8", "auto-round", "auto-round-int8"),
    }
)
"""Methods whose layers take weights that were quantized before, and quantize none."""
TYPES = {torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32"}

SHAPES = "fathom_shapes"
"""The member of SGLang's ``ModelConfig`` that holds the shapes of the tensors that were loaded, by name."""

_get_weights_iterator = DefaultModelLoader._get_weights_iterator


def install() -> None:
    """Look at every checkpoint that a model is loaded or updated from."""
    DefaultModelLoader._get_weights_iterator = get_weights_iterator


def get_weights_iterator(self: DefaultModelLoader, source: Any, **options: Any) -> Any:
    """SGLang's method of this name.

    Raises:
        ValueError: for weights that the model does not take, before the first is read.
    """
    model = source.model_config
    if model is not None:
        if (found := options.get("resolved_source")) is not None:
            files = found.weight_files
        else:
            _, files, _ = self._prepare_weights(
                source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
            )
        refuse_files(source.model_or_path, model.quantization, files)
        shapes = {name: shape for file in files for name, _, shape in headers(file)}
        if (served := getattr(model, SHAPES, None)) is None:
            setattr(model, SHAPES, shapes)
        else:
            refuse_change(source.model_or_path, model.quantization, shapes, served)
    return _get_weights_iterator(self, source, **options)


def refuse_change(
    model: str, quantization: str | None, shapes: Mapping[str, Shape], served: Mapping[str, Shape]
) -> None:
    """Refuse new weights that cannot take the place of those that are served.

    Args:
        model: what the new ones are of.
        quantization: SGLang's method of the served model's layers.
        shapes, served: of the new and of the served model's tensors, by name.

    Raises:
        ValueError: with the reason.
    """
    if quantization in BEFOREHAND:
        raise ValueError(
            f"weights of {quantization} are laid out anew when they are loaded, and cannot be changed while they "
            "are served: start the server again with the new model"
        )
    for name in shapes.keys() & served.keys():
        if shapes[name] != served[name]:
            raise ValueError(
                f"{model}: {name} has the shape {list(shapes[name])}, in the served model {list(served[name])}: "
                "only weights of the same shapes can take their place"
            )
    if served and shapes and not shapes.keys() & served.keys():
        raise ValueError(
            f"{model}: the served model has tensors of other names, {next(iter(served))} for one"
        )


def refuse_folder(folder: str, quantization: str | None) -> None:
    """The same of a model's folder, for who has not begun to load; one without safetensors is left for later.

    Args:
        quantization: SGLang's method of the model's layers.

    Raises:
        ValueError: for weights that the model does not take.
    """
    files = [str(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    files = filter_duplicate_safetensors_files(files, folder, SAFE_WEIGHTS_INDEX_NAME)
    if files:
        refuse_files(folder, quantization, files)


def refuse_files(model: str, quantization: str | None, files: Iterable[str]) -> None:
    """Refuse quantized weights for layers that are not, and plain ones for layers that need them quantized.

    Args:
        model: what the files are of.
        quantization: as :func:`refuse_folder`.

    Raises:
        ValueError: naming a tensor or the method.
    """
    tensors = (tensor for file in files for tensor in headers(file))
    name, kind, _ = next((tensor for tensor in tensors if is_quantized(*tensor)), ("", "", ()))
    if quantization is None and name:
        raise ValueError(
            f"{model}: {name} is of {kind}, a quantized weight, and nothing says how: config.json needs the "
            "quantization_config that such weights were saved with"
        )
    if quantization in BEFOREHAND and not name:
        raise ValueError(
            f"{model} has no quantized weights, and layers of {quantization} quantize none: leave out "
            "--quantization (of a draft: --speculative-draft-model-quantization unquant), or name a checkpoint "
            "that has them"
        )


def is_quantized(name: str, kind: str, shape: Shape) -> bool:
    """Whether a tensor can only be a quantized weight."""
    last = name.rpartition(".")[2]
    packed = kind in INTEGERS and any(word in last for word in WEIGHTS)
    return len(shape) > 1 and (kind.startswith(SCALED) or packed)


def headers(file: str) -> Iterator[Header]:
    """What is in a file.

    Raises:
        ValueError: for safetensors that are broken or cut off.
    """
    if file.endswith(".safetensors"):
        try:
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118  it has no other way to be asked
                    about = stored.get_slice(name)
                    yield name, about.get_dtype(), tuple(about.get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
        return
    try:
        tensors = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except (RuntimeError, OSError, pickle.UnpicklingError):
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            wide = tensor.is_floating_point() and tensor.element_size() > 1
            kind = "" if wide else TYPES.get(tensor.dtype, "F8_" if tensor.is_floating_point() else "")
            yield name, kind, tuple(tensor.shape)
