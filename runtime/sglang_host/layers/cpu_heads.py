"""The size of heads of a model without a GPU, where it is not the hidden size divided among them.

SGLang notes there how many heads a model had before it adds some to share them evenly, which is not done here (see
:func:`fathom.server.command.depth_pages.refuse_model`). Its Qwen2 passes over ``head_dim`` if it finds that number:
the beginnings of the weights are loaded, and the first request ends the engine.
"""

from typing import Any

from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp

BEFORE = "original_num_attention_heads"


def adjusted(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """SGLang's function of another name, for heads of any size.

    Args:
        model_config: SGLang's ``ModelConfig``; changed.
        load_config: SGLang's ``LoadConfig``.
        tp_size: devices that share the model.
    """
    result = adjust_config_with_unaligned_cpu_tp(model_config, load_config, tp_size)
    for config in (result.hf_config, result.hf_text_config):
        heads = getattr(config, BEFORE, None)
        if heads is not None and heads * model_config.head_dim != getattr(config, "hidden_size", None):
            delattr(config, BEFORE)
    return result


def install() -> None:
    """Put our function in SGLang's place."""
    from sglang.srt.model_executor import model_runner

    model_runner.adjust_config_with_unaligned_cpu_tp = adjusted
