"""A draft is a model of its own: where SGLang would load the part of a checkpoint that drafts for its own model.

Of some families, most of them with experts, SGLang takes a draft for such a part, by the name of its architecture.
That part is another class, which asks for the target's hidden states at its first pass, and there are none.
"""

from functools import wraps

from sglang.srt.configs.model_config import ModelConfig


def install() -> None:
    """Leave a draft its architecture. Before SGLang reads the first configuration."""
    ModelConfig._config_draft_model = _keep


@wraps(ModelConfig._config_draft_model)
def _keep(self: ModelConfig) -> None:
    pass
