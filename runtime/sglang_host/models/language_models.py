"""Checkpoints that are read as those of another architecture: what is in them is a text model that SGLang has.

*Language models of checkpoints that take images too*, served alone: ``--language-model-only``.
SGLang has the option, for three architectures: it leaves out the tower, and refuses what is no text. Here such a
checkpoint is read as one of an ordinary text model, with that model's configuration, class and names of tensors, so
that whatever is made for text models serves it, every mechanism first. The three positions that a token has in a
Qwen-VL are one and the same for a text's, and its rotations those of a plain Qwen; a GLM-V's too.

*A twin under another name*: SGLang would run it by Transformers' own code, whose layers nobody can split.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
from safetensors import safe_open
from sglang.srt.configs import model_config
from sglang.srt.models.utils import WeightsMapper
from sglang.srt.server_args import ServerArgs
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from fathom.runtime.sglang_host.models import rope_overrides

LANGUAGE_MODELS = {
    "glm4v_text": ("glm4", "Glm4ForCausalLM"),
    "glm4v_moe_text": ("glm4_moe", "Glm4MoeForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "seed_oss": ("qwen2", "Qwen2ForCausalLM"),
}
"""By the type of a checkpoint's text configuration: the text model's type, and SGLang's class."""
TWINS = {
    "SeedOssForCausalLM": {
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    },
}
"""Text models of which SGLang has a twin, where their configuration says this."""
ARCHITECTURES = (
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
"""Whose text passes through the language model alone."""

NAMES = WeightsMapper(
    orig_to_new_prefix={
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        **dict.fromkeys(
            f"{prefix}{part}"
            for prefix in ("", "model.")
            for part in ("image_newline", "multi_modal_projector.", "vision_tower.", "visual.")
        ),
        **dict.fromkeys(("mlp1.", "vision_model.")),
    }
)
"""Tensors of such checkpoints under the names of a text model's; of all others, None."""
EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
"""What may hold a matrix of each expert."""
OF_SECTIONS = ("mrope_section", "mrope_interleaved")
"""What of ``rope_parameters`` says which of three positions a pair of numbers turns by."""

_asked: ContextVar[bool] = ContextVar("language_model_only", default=False)
_init = model_config.ModelConfig.__init__


def install() -> None:
    """Let SGLang read models' configurations by way of :func:`get_config`. Before it reads the first."""
    model_config.get_config = get_config
    model_config.ModelConfig.__init__ = init
    own = ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES
    served = {architecture for _, architecture in LANGUAGE_MODELS.values()}
    ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES = (*dict.fromkeys((*own, *ARCHITECTURES, *sorted(served))),)


def register() -> None:
    """Have SGLang's text models take such checkpoints' weights. In processes that load some, before they do."""
    from sglang.srt.models.registry import ModelRegistry

    for architecture in {architecture for _, architecture in LANGUAGE_MODELS.values()}:
        ModelRegistry.models[architecture] = taking(ModelRegistry.models[architecture])


@wraps(_init)
def init(self: Any, *args: Any, **options: Any) -> None:
    """SGLang's method of this name, which does not tell who reads configurations what is asked for."""
    before = _asked.set(bool(options.get("language_model_only")))
    try:
        _init(self, *args, **options)
    finally:
        _asked.reset(before)


def get_config(
    model: str, *args: Any, model_override_args: dict[str, Any] | None = None, **options: Any
) -> PretrainedConfig:
    """SGLang's function of this name, by way of :mod:`rope_overrides`; the language model's where it is asked for.

    Overrides are of the language model then, under the name of its part or not.
    """
    overrides = model_override_args or {}
    read = partial(rope_overrides.get_config, model, *args, **options)
    if _asked.get() and (part := _part_of(read(model_override_args={}))) is not None:
        inner = {name: value for name, value in overrides.items() if name != part}
        whole = read(model_override_args={part: inner | overrides.get(part, {})})
        return alone(whole, getattr(whole, part), _is_tied(model, options.get("revision"), whole))
    config = read(model_override_args=overrides)
    return alone(config, config, bool(config.tie_word_embeddings)) if _is_twin(config) else config


def _is_twin(config: PretrainedConfig) -> bool:
    told = TWINS.get((config.architectures or [""])[0])
    return told is not None and all(getattr(config, name, None) == value for name, value in told.items())


def _part_of(config: PretrainedConfig) -> str | None:
    """The part of a checkpoint's configuration that is its language model's; None where we serve none alone."""
    part = "llm_config" if hasattr(config, "llm_config") else "text_config"
    known = getattr(getattr(config, part, None), "model_type", None) in LANGUAGE_MODELS
    return part if known and (config.architectures or [""])[0] in ARCHITECTURES else None


def _is_tied(model: str, revision: str | None, config: PretrainedConfig) -> bool:
    """Whether the output's matrix is the input's: there is no other in the checkpoint.

    Configurations say it in either of their two parts, or leave it to defaults, which differ.
    """
    found = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if (index := cached_file(model, SAFE_WEIGHTS_INDEX_NAME, **found)) is not None:
        with open(index, encoding="utf-8") as file:
            names: Iterable[str] = json.load(file)["weight_map"]
    elif (whole := cached_file(model, SAFE_WEIGHTS_NAME, **found)) is not None:
        with safe_open(whole, "pt") as file:
            names = file.keys()
    else:
        return bool(getattr(config, "tie_word_embeddings", False))
    return "lm_head.weight" not in NAMES.apply_list(list(names))


def alone(config: PretrainedConfig, inner: PretrainedConfig, tied: bool) -> PretrainedConfig:
    """The configuration of a checkpoint's language model, as a checkpoint of that alone has it.

    Args:
        config: of a checkpoint of ``ARCHITECTURES`` or ``TWINS``.
        inner: its part that is the language model's, or all of it.
        tied: whether the language model's output has the matrix of its input.
    """
    model_type, architecture = LANGUAGE_MODELS[inner.model_type]
    values = inner.to_dict()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype"):
        if values.get(name) is None:
            values[name] = getattr(config, name, None)
    rotations = {name: value for name, value in inner.rope_parameters.items() if name not in OF_SECTIONS}
    for name in ("rope_type", "type"):
        if rotations.get(name) == "mrope":
            rotations[name] = "default"
    if inner.model_type == "qwen3_vl_moe_text":
        values["norm_topk_prob"] = True  # which its router always does
    values |= {"architectures": [architecture], "tie_word_embeddings": tied, "rope_parameters": rotations}
    values.pop("model_type")
    result = CONFIG_MAPPING[model_type](**values)
    result.rope_parameters = rotations  # a configuration completes them by its own rules
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        result.quantization_config = quantized
    return result


def taking(model: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class of SGLang's that takes the weights of checkpoints with more than a language model."""

    def load_weights(
        self: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **options: Any
    ) -> Any:
        return model.load_weights(
            self, by_expert(NAMES.apply(weights), self.config.hidden_size), *args, **options
        )

    members = {"hf_to_sglang_mapper": NAMES, "load_weights": load_weights, "__module__": model.__module__}
    return type(model.__name__, (model,), members)


def by_expert(
    weights: Iterable[tuple[str, torch.Tensor]], hidden_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with those of all experts in one as a text model's are, each for itself, [outputs, inputs].

    In one they are [experts, inputs, outputs] as the models were published, and [experts, outputs, inputs] where
    Transformers has saved them since.
    """
    for name, tensor in weights:
        if (match := EXPERTS.fullmatch(name)) is None:
            yield name, tensor
            continue
        layer, kind = match.groups()
        down = kind == "down_proj"
        # The hidden states are what this projection puts out, and what the others take.
        outputs_first = tensor.shape[1 if down else 2] == hidden_size
        for expert, matrix in enumerate(tensor if outputs_first else tensor.transpose(1, 2)):
            parts = {"down": matrix} if down else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
            for part, values in parts.items():
                yield f"{layer}.{expert}.{part}_proj.weight", values
