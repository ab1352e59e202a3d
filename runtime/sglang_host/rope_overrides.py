"""``--json-model-override-args`` for a model's positions: what is not overridden stays the model's own.

Transformers 5 keeps the base of a model's rotations (``rope_theta``) and how they are scaled in one dictionary,
``rope_parameters``, and ``rope_scaling`` is a name for all of it. SGLang puts an override in its place: with the
YaRN of a model's card the base is 10,000 whatever the model was trained with, and a base that is overridden alone
is read by nobody. Here an override does what the same words do in the model's ``config.json``.
"""

from collections.abc import Mapping
from typing import Any

from sglang.srt.configs import model_config
from transformers import PretrainedConfig

WHOLE, SCALING = "rope_parameters", "rope_scaling"
BESIDE = ("rope_theta", "partial_rotary_factor")
"""What ``config.json`` may have beside the scaling."""

_get_config = model_config.get_config


def install() -> None:
    """Let SGLang read models' configurations by way of :func:`get_config`. Before it reads the first."""
    model_config.get_config = get_config


def get_config(*args: Any, model_override_args: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """SGLang's function of this name."""
    if model_override_args and _of_positions(model_override_args):
        plain = _get_config(*args, model_override_args={}, **kwargs)
        model_override_args = completed(model_override_args, plain)
    return _get_config(*args, model_override_args=model_override_args, **kwargs)


def _of_positions(overrides: Mapping[str, Any]) -> bool:
    return any(
        key in (WHOLE, SCALING, *BESIDE) or (isinstance(value, dict) and _of_positions(value))
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
    if not (given or beside) or not isinstance(own, dict) or "rope_theta" not in own:
        return result  # another subject, a model without rotations, or one that has them by kind of layer
    scaling = next(reversed(given.values())) if given else own
    if scaling is None:
        scaling = {"rope_type": "default"}
    if isinstance(scaling, dict):
        result.pop(SCALING, None)
        result[WHOLE] = {key: own[key] for key in BESIDE if key in own} | scaling | beside
    return result
