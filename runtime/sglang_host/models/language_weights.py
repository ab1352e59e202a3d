"""Tensors of checkpoints that take images too, as those of their language models alone (:mod:`language_models`)."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import parse_safetensors_file_metadata, try_to_load_from_cache
from sglang.srt.models.utils import WeightsMapper
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, cached_file

from fathom.runtime.sglang_host.models.weight_files import headers

NAMES = WeightsMapper(
    orig_to_new_prefix={
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head": "lm_head",
        **dict.fromkeys(
            f"{prefix}{part}"
            for prefix in ("", "model.")
            for part in ("image_newline", "multi_modal_projector.", "vision_tower.", "visual.")
        ),
        **dict.fromkeys(("mlp1.", "vision_model.")),
    }
)
"""The language model's tensors under the names of a text model's; those of what sees, under none."""
EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(.*)")
"""What may hold a matrix of each expert."""


def taking(model: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class of SGLang's that takes the weights of checkpoints with more than a language model."""

    def load_weights(
        self: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **options: Any
    ) -> Any:
        own = by_expert(NAMES.apply(weights), self.config.hidden_size)
        return model.load_weights(self, own, *args, **options)

    members = {"hf_to_sglang_mapper": NAMES, "load_weights": load_weights, "__module__": model.__module__}
    return type(model.__name__, (model,), members)


def by_expert(
    weights: Iterable[tuple[str, torch.Tensor]], hidden_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with those of all experts in one as a text model's are, each for itself, [outputs, inputs].

    In one they are [experts, inputs, outputs] as the models were published, and [experts, outputs, inputs] where
    Transformers has saved them since.

    Raises:
        ValueError: for such as are quantized, or square, so that nothing tells the two apart.
    """
    for name, tensor in weights:
        if (match := EXPERTS.fullmatch(name)) is None:
            yield name, tensor
            continue
        layer, kind, more = match.groups()
        if more or tensor.ndim != 3 or tensor.shape[1] == tensor.shape[2]:
            what = "quantized" if more or tensor.ndim != 3 else "square"
            raise ValueError(
                f"--language-model-only does not take {what} weights of all experts in one: {name}"
            )
        down = kind == "down_proj"
        # The hidden states are what this projection puts out, and what the others take.
        outputs_first = tensor.shape[1 if down else 2] == hidden_size
        for expert, matrix in enumerate(tensor if outputs_first else tensor.transpose(1, 2)):
            parts = {"down": matrix} if down else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
            for part, values in parts.items():
                yield f"{layer}.{expert}.{part}_proj.weight", values


def is_tied(model: str, revision: str | None, overrides: Mapping[str, Any], part: str) -> bool:
    """Whether the output's matrix is the input's: there is no other in the checkpoint.

    Configurations say it in either of their two parts, or leave it to defaults, which differ: they are asked where
    nothing tells what is in the checkpoint.

    Args:
        overrides: the operator's, of the language model's configuration.
        part: the name of that part.
    """
    name = "tie_word_embeddings"
    if name in overrides:
        return bool(overrides[name])
    if (tensors := _tensors(model, revision)) is not None:
        return not any(each.startswith("lm_head.") for each in NAMES.apply_list(tensors))
    content, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    return bool(content.get(name, (content.get(part) or {}).get(name, False)))


def _tensors(model: str, revision: str | None) -> list[str] | None:
    """Names of a checkpoint's tensors; None where none of the usual files tells them."""
    try:
        if (folder := Path(model)).is_dir() and (files := sorted(folder.glob("*.safetensors"))):
            return [name for file in files for name, *_ in headers(str(file))]
        for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
            file = cached_file(model, index, revision=revision, _raise_exceptions_for_missing_entries=False)
            if file is not None:
                return list(json.loads(Path(file).read_text("utf-8"))["weight_map"])
        if folder.is_dir():
            return None
        if isinstance(file := try_to_load_from_cache(model, SAFE_WEIGHTS_NAME, revision=revision), str):
            return [name for name, *_ in headers(file)]
        return list(parse_safetensors_file_metadata(model, SAFE_WEIGHTS_NAME, revision=revision).tensors)
    except (OSError, ValueError):  # no network, no such file, an address that is no repository's
        return None
