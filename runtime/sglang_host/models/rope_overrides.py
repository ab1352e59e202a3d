"""A model's positions in SGLang's words, and overrides of them by ``--json-model-override-args``.

Transformers 5 keeps the base of a model's rotations (``rope_theta``) and how they are scaled in one dictionary,
``rope_parameters``, and ``rope_scaling`` is a name for all of it. SGLang puts an override in its place: with the
YaRN of a model's card the base is 10,000 whatever the model was trained with, and a base that is overridden alone
is read by nobody. Here an override does what the same words do in the model's ``config.json``, and what is not
overridden stays the model's own.

How much scaled rotations change the size of queries and keys has names in SGLang that are not Transformers', which
it passes over: answers are fluent, and another model's. So they are where an OLMo 3 has its positions in that one
dictionary: SGLang has a class of its own for its configuration, which knows the older words alone.
"""

import math
from collections.abc import Mapping
from functools import wraps
from typing import Any

from sglang.srt.configs import model_config
from sglang.srt.configs.olmo3 import Olmo3Config
from transformers import PretrainedConfig

from fathom.runtime.sglang_host.engine_args import text_of

WHOLE, SCALING = "rope_parameters", "rope_scaling"
BESIDE = ("rope_theta", "partial_rotary_factor")
"""What ``config.json`` may have beside the scaling."""

LOCAL, FULL, SLIDING = "rope_local_base_freq", "full_attention", "sliding_attention"
"""The base of layers with a sliding window, as ``config.json`` may have it, and the kinds of layers by which the
dictionary may be divided: scaling and base are of the first kind then."""
BY_POSITION, SHORT = "llama_4_scaling_beta", "original_max_position_embeddings"
"""How much queries grow with each so many positions, a number that SGLang looks for beside ``rope_parameters``."""

_get_config = model_config.get_config
_init_olmo3 = Olmo3Config.__init__


@wraps(_init_olmo3)
def init_olmo3(self: Any, *args: Any, rope_parameters: dict[str, Any] | None = None, **options: Any) -> None:
    """SGLang's method of this name, told in the words that it knows."""
    if rope_parameters:
        scaling = dict(rope_parameters)
        if (base := scaling.pop("rope_theta", None)) is not None:
            options["rope_theta"] = base
        options[SCALING] = scaling if kind_of(scaling) not in (None, "default") else None
    _init_olmo3(self, *args, **options)


def get_config(*args: Any, model_override_args: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """SGLang's function of this name; scaling is in its words too."""
    if model_override_args and _of_positions(model_override_args):
        plain = _get_config(*args, model_override_args={}, **kwargs)
        model_override_args = completed(model_override_args, plain)
    config = _get_config(*args, model_override_args=model_override_args, **kwargs)
    text = text_of(config)
    own: Any = getattr(text, WHOLE, None)
    # With latent attention, SGLang's words are the scores' too.
    if kind_of(own) and not hasattr(text, "kv_lora_rank"):
        text.rope_parameters = spelled(own)
        if BY_POSITION in own and own.get(SHORT) is not None:
            setattr(text, SHORT, own[SHORT])
    return config


def kind_of(parameters: Any) -> str | None:
    """The kind of a model's ``rope_parameters``, which may also be none, or those of several kinds of layers."""
    return parameters.get("rope_type", parameters.get("type")) if isinstance(parameters, Mapping) else None


def spelled(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` in SGLang's words besides Transformers'."""
    result, kind = dict(parameters), kind_of(parameters)
    factor, attention = result.get("factor"), result.get("attention_factor")
    if kind == "linear" and factor is not None:
        result["factor"] = float(factor)
    if kind == "yarn" and factor is not None:
        names = ("mscale", "mscale_all_dim")
        if attention is not None or not all(result.get(name) for name in names):
            for name in names:
                result.pop(name, None)
        if attention is not None:
            result["attn_factor"] = attention / (1 + 0.1 * math.log(max(factor, 1)))
    if kind == "longrope":
        short = result.get(SHORT)
        if attention is None and factor is not None and short is not None:
            attention = math.sqrt(1 + math.log(factor) / math.log(short)) if factor > 1 else 1.0
        if attention is not None:
            result = {"short_mscale": attention, "long_mscale": attention} | result
    return result


def _of_positions(overrides: Mapping[str, Any]) -> bool:
    return any(
        key in (WHOLE, SCALING, LOCAL, *BESIDE) or (isinstance(value, dict) and _of_positions(value))
        for key, value in overrides.items()
    )


def completed(overrides: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Overrides whose positions are whole.

    Args:
        overrides: of a model's configuration, as the operator gives them.
        config: the model's, without them.
    """
    result = dict(overrides)
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(part := getattr(config, key, None), PretrainedConfig):
            result[key] = completed(value, part)
    own = getattr(config, WHOLE, None)
    given = {key: overrides[key] for key in (SCALING, WHOLE) if key in overrides}
    beside = {key: overrides[key] for key in BESIDE if key in overrides}
    if isinstance(own, dict) and FULL in own:
        return result | _by_kind(own, given, beside, overrides.get(LOCAL))
    if not (given or beside) or not isinstance(own, dict) or "rope_theta" not in own:
        return result  # another subject, a model without rotations, or one that has them by kind of layer
    scaling = next(reversed(given.values())) if given else own
    if scaling is None:
        scaling = {"rope_type": "default"}
    if isinstance(scaling, dict):
        result.pop(SCALING, None)
        result[WHOLE] = {key: own[key] for key in BESIDE if key in own} | scaling | beside
    return result


def _by_kind(
    own: dict[str, Any], given: dict[str, Any], beside: dict[str, Any], local: Any
) -> dict[str, Any]:
    """``rope_parameters`` of a model that has them by kind of layer, as Gemma 3, with overrides.

    Args:
        own: the model's. given: scaling, under its older or newer name; beside: what may stand beside it.
        local: the base of layers with a window; None for the model's.
    """
    scaling = next(reversed(given.values()), None)
    if scaling is not None and (not isinstance(scaling, dict) or FULL in scaling):
        return {WHOLE: scaling}
    whole: dict[str, Any] = dict(own[FULL])
    if given:
        whole = {key: whole[key] for key in BESIDE if key in whole}
        whole |= {"rope_type": "default"} if scaling is None else scaling
    sliding: dict[str, Any] = dict(own.get(SLIDING) or {})
    if local is not None:
        sliding["rope_theta"] = local
    return {SCALING: None, WHOLE: {FULL: whole | beside, SLIDING: sliding}}
