"""Keeps quiet what SGLang and Triton say on every start and end about other machines and themselves."""

import logging
import os
import warnings

from starlette.exceptions import HTTPException

LOGGERS = (
    "sglang.srt.arg_groups.attention_hook",  # CUDA graphs are off on a CPU
    "sglang.kernels.jit.utils.arch",  # no CUDA
    "sglang.srt.distributed.bootstrap",  # no AMX
    "sglang.srt.entrypoints.openai.serving_rerank",  # a chat model has no rerank tokens
    "sglang.srt.models.registry",  # model files whose optional packages are not installed
)
FORMATS = ("sglang.srt.entrypoints.openai.serving_responses", "sglang.srt.entrypoints.anthropic.serving")
"""Loggers of routes that log an illegal request with its traceback."""
KERNEL_MODULES = (
    "sglang.srt.layers.quantization.awq.awq",
    "sglang.srt.layers.quantization.gguf",
    "sglang.kernels.ops.attention.fla.utils",
)


def hush_loggers() -> None:
    """Let the loggers in ``LOGGERS`` report errors only, in this process."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def without_traceback(record: logging.LogRecord) -> bool:
    """Log filter: what a client did wrong, or the engine refused, is told on one line, without SGLang's places."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ValueError | HTTPException):
        record.msg, record.args = f"{record.getMessage()} ({' '.join(str(error).split())})", None
        record.exc_info = None
    return True


def hush_server() -> None:
    """Quieten the HTTP process; the kernels' warnings also in the processes that it starts."""
    hush_loggers()
    for name in FORMATS:
        logging.getLogger(name).addFilter(without_traceback)
    rules = [f"ignore::UserWarning:{module}" for module in KERNEL_MODULES]
    os.environ["PYTHONWARNINGS"] = ",".join([*filter(None, [os.environ.get("PYTHONWARNINGS")]), *rules])
    for module in KERNEL_MODULES:
        warnings.filterwarnings("ignore", category=UserWarning, module=module.replace(".", r"\."))
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")
