"""Checkpoints that are read as those of another architecture: what is in them is a text model that SGLang has.

*Language models of checkpoints that take images too*, served alone: ``--language-model-only``. SGLang has the
option, for three architectures: it leaves out the tower, and refuses what is no text. Here such a checkpoint is
read as one of an ordinary text model, with that model's configuration, class and names of tensors
(:mod:`language_weights`), so that whatever is made for text models serves it, every mechanism first. The three
positions that a token has in a Qwen-VL or a GLM-V are one and the same for a text's, and its rotations those of a
plain Qwen or GLM.

*A twin under another name*: SGLang would run it by Transformers' own code, whose layers nobody can split.
"""

import re
from contextvars import ContextVar
from copy import copy
from functools import partial, wraps
from typing import Any

from sglang.srt.configs import model_config
from sglang.srt.server_args import ServerArgs
from transformers import CONFIG_MAPPING, PretrainedConfig

from fathom.runtime.sglang_host.models import language_weights, rope_overrides

Kind = tuple[str, str]
"""A text model's type, and SGLang's class of it."""

GLM4, GLM4_MOE = ("glm4", "Glm4ForCausalLM"), ("glm4_moe", "Glm4MoeForCausalLM")
QWEN2, QWEN3 = ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")
QWEN3_MOE = ("qwen3_moe", "Qwen3MoeForCausalLM")
LANGUAGE_MODELS: dict[str, Kind] = {
    "gemma3_text": ("gemma3_text", "Gemma3ForCausalLM"),
    "glm4v_text": GLM4,
    "glm4v_moe_text": GLM4_MOE,
    "llama": ("llama", "LlamaForCausalLM"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": QWEN2,
    "qwen2_vl_text": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen3": QWEN3,
    "qwen3_vl_text": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_moe_text": QWEN3_MOE,
}
"""By the type of the part of a checkpoint's configuration that is its language model's."""
ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
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
TWINS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "SeedOssForCausalLM": (
        QWEN2,
        {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    ),
}
"""Text models of which SGLang has a twin, where their configuration says this."""
RENAMED = {"Ernie4_5ForCausalLM": "Ernie4_5_ForCausalLM"}
"""What Transformers calls a model, and SGLang: by the former name it has none."""

SERVED = tuple(sorted({architecture for _, architecture in LANGUAGE_MODELS.values()}))
OF_SECTIONS = ("mrope_section", "mrope_interleaved")
"""What of ``rope_parameters`` says which of three positions a pair of numbers turns by."""
OF_ALL = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "compression_config")
"""What may be said of a whole checkpoint, and is its language model's."""
NAMED = re.compile(r"(?:model(\\?\.))?language_model(\\?\.)(?:model\\?\.)?")
"""How the names of a language model's parts begin, in patterns too."""

_asked: ContextVar[bool] = ContextVar("language_model_only", default=False)
_ours: ContextVar[bool] = ContextVar("not Transformers' code", default=True)
"""Whether a model may be of another architecture here: Transformers' code knows it by its own names."""
_init = model_config.ModelConfig.__init__


def install() -> None:
    """Let SGLang read models' configurations by way of :func:`get_config`. Before it reads the first."""
    model_config.get_config = get_config
    rope_overrides.Olmo3Config.__init__ = rope_overrides.init_olmo3
    model_config.ModelConfig.__init__ = init
    known = dict.fromkeys((*ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES, *SERVED))
    ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES = tuple(known)


def register() -> None:
    """Have SGLang's text models take such checkpoints' weights. In processes that load some, before they do."""
    from sglang.srt.models.registry import ModelRegistry

    for architecture in SERVED:
        ModelRegistry.models[architecture] = language_weights.taking(ModelRegistry.models[architecture])


@wraps(_init)
def init(self: Any, *args: Any, **options: Any) -> None:
    """SGLang's method of this name, which does not tell who reads configurations what is asked for."""
    ours = _ours.set(options.get("model_impl") != model_config.ModelImpl.TRANSFORMERS)
    asked = _asked.set(bool(options.get("language_model_only")))
    try:
        _init(self, *args, **options)
    finally:
        _asked.reset(asked)
        _ours.reset(ours)


def get_config(
    model: str, *args: Any, model_override_args: dict[str, Any] | None = None, **options: Any
) -> PretrainedConfig:
    """SGLang's function of this name, by way of :mod:`rope_overrides`; the language model's where it is asked for.

    Overrides are of the language model then, under the name of its part or not.

    Raises:
        ValueError: for a checkpoint whose language model we do not serve alone, where that is asked for.
    """
    overrides = model_override_args or {}
    read = partial(rope_overrides.get_config, model, *args, **options)
    if not _ours.get():
        return read(model_override_args=overrides)
    if _asked.get():
        plain = read(model_override_args={})
        part = _part_of(plain)
        inner = {name: value for name, value in overrides.items() if name != part}
        inner |= overrides.get(part) or {}
        if hasattr(plain, part):
            if _architecture(plain) in ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES:
                return read(model_override_args=overrides)
            _refuse(model, plain, getattr(plain, part))
            of_all = {name: inner[name] for name in OF_ALL if name in inner}
            whole = read(model_override_args={part: inner, **of_all})
            tied = language_weights.is_tied(model, options.get("revision"), inner, part)
            return alone(whole, getattr(whole, part), tied)
        overrides = inner  # of a draft that is a text model
    config = read(model_override_args=overrides)
    if _is_twin(config):
        return _as(TWINS[_architecture(config)][0], config, bool(config.tie_word_embeddings))
    if (name := RENAMED.get(_architecture(config))) is not None:
        config = copy(config)  # SGLang keeps the one that it has read
        config.architectures = [name]
    return config


def _architecture(config: PretrainedConfig) -> str:
    return (config.architectures or [""])[0]


def _part_of(config: PretrainedConfig) -> str:
    """What the part of a checkpoint's configuration is called that is its language model's, if there is one."""
    return "llm_config" if hasattr(config, "llm_config") else "text_config"


def _is_twin(config: PretrainedConfig) -> bool:
    _, told = TWINS.get(_architecture(config), (None, {}))
    return bool(told) and all(getattr(config, name, None) == value for name, value in told.items())


def _refuse(model: str, config: PretrainedConfig, inner: Any) -> None:
    """Refuse a checkpoint whose language model we do not serve alone."""
    option, architecture = "--language-model-only", _architecture(config)
    if str(model).endswith(".gguf"):
        raise ValueError(f"{option} takes no GGUF file, got {model}")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{option} does not take {architecture}; it takes {', '.join(ARCHITECTURES)}")
    if (kind := getattr(inner, "model_type", None)) not in LANGUAGE_MODELS:
        raise ValueError(
            f"{option} does not take {architecture} with a language model of type {kind}; it takes "
            f"{', '.join(LANGUAGE_MODELS)}"
        )


def alone(config: PretrainedConfig, inner: PretrainedConfig, tied: bool) -> PretrainedConfig:
    """The configuration of a checkpoint's language model, as a checkpoint of that alone has it.

    Args:
        config: of a checkpoint of ``ARCHITECTURES``.
        inner: its part that is the language model's.
        tied: whether the language model's output has the matrix of its input.
    """
    inner = copy(inner)
    if inner.model_type == "qwen3_vl_moe_text":
        inner.norm_topk_prob = True  # which its router always does
    if inner.dtype is None:
        inner.dtype = config.dtype
    result = _as(LANGUAGE_MODELS[inner.model_type], inner, tied)
    for name in OF_ALL:
        # The whole's first: a part's ids are often the defaults of its class.
        values = (getattr(part, name, None) for part in (config, inner))
        if (value := next((value for value in values if value is not None), None)) is not None:
            setattr(result, name, renamed(value))
    return result


def _as(kind: Kind, config: PretrainedConfig, tied: bool) -> PretrainedConfig:
    """A text model's configuration as that of another type."""
    model_type, architecture = kind
    rotations = {name: value for name, value in config.rope_parameters.items() if name not in OF_SECTIONS}
    for name in ("rope_type", "type"):
        if rotations.get(name) == "mrope":
            rotations[name] = "default"
    values = config.to_dict() | {"architectures": [architecture], "tie_word_embeddings": tied}
    values |= {"rope_parameters": rotations}
    values.pop("model_type")
    result = CONFIG_MAPPING[model_type](**values)
    result.rope_parameters = rotations  # a configuration completes them by its own rules
    return result


def renamed(value: Any) -> Any:
    """What is said of a checkpoint's parts by their names, such as which are not quantized, by a text model's."""
    if isinstance(value, str):
        value = value.replace("language_model.lm_head", "lm_head")
        return NAMED.sub(lambda match: f"model{match[2]}", value)
    if isinstance(value, dict):
        return {renamed(name): renamed(each) for name, each in value.items()}
    return [renamed(each) for each in value] if isinstance(value, list) else value
