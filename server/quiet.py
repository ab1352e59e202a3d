"""Keeps quiet what SGLang and Triton say on every start and end about other machines and themselves."""

import logging
import os
import re
import warnings

from starlette.exceptions import HTTPException

LOGGERS = (
    "sglang.srt.arg_groups.attention_hook",  # CUDA graphs are off on a CPU
    "sglang.kernels.jit.utils.arch",  # no CUDA
    "sglang.srt.distributed.bootstrap",  # no AMX
    "sglang.srt.entrypoints.openai.serving_rerank",  # a chat model has no rerank tokens
    "sglang.srt.models.registry",  # model files whose optional packages are not installed
)
GRAMMARS = ("sglang.srt.constrained.grammar_manager", "sglang.srt.constrained.xgrammar_backend")
"""Loggers that write out a client's whole grammar if it does not compile; another one says why it does not."""
REFUSALS = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.managers.scheduler_components.batch_result_processor",
)
"""Loggers of what was wrong with a client's request, in which its own words are."""
REFUSED = (
    *("[http_server] Error: ", "Invalid request"),
    *("Failed to compile", "Grammar preprocessing timed out", "Grammar accept_token failed"),
)
RETOLD = re.compile("(The JSON string is|Accepted tokens):.*", re.DOTALL)
"""In these words a grammar's compiler repeats what it was given, and a grammar the answer and itself."""
LONGEST_REFUSAL = 500
FORMATS = (
    *("sglang.srt.entrypoints.openai.serving_responses", "sglang.srt.entrypoints.anthropic.serving"),
    "sglang.srt.entrypoints.openai.serving_base",
)
"""Loggers of routes that log an illegal request, or a header with labels that is no JSON, with its traceback."""
KERNEL_MODULES = (
    "sglang.srt.layers.quantization.awq.awq",
    "sglang.srt.layers.quantization.gguf",
    "sglang.kernels.ops.attention.fla.utils",
)


def hush_loggers() -> None:
    """Let the loggers in ``LOGGERS`` report errors only, in this process."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def guard_log() -> None:
    """Keep what clients send from filling this process's log, and from passing for lines of it."""
    for name in GRAMMARS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for name in REFUSALS:
        logging.getLogger(name).addFilter(on_one_line)


def on_one_line(record: logging.LogRecord) -> bool:
    """Log filter: a refusal is one line of bounded length."""
    message = record.getMessage()
    if message.startswith(REFUSED):
        message = " ".join(RETOLD.sub("", message).split())
        record.msg, record.args = message[:LONGEST_REFUSAL], None
    return True


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
