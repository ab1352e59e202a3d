"""Keeps quiet what SGLang and Triton say on every start and end about other machines and themselves."""

import atexit
import logging
import os
import sys
import warnings
from typing import NoReturn

LOGGERS = (
    "sglang.srt.arg_groups.attention_hook",  # CUDA graphs are off on a CPU
    "sglang.kernels.jit.utils.arch",  # no CUDA
    "sglang.srt.distributed.bootstrap",  # no AMX
    "sglang.srt.entrypoints.openai.serving_rerank",  # a chat model has no rerank tokens
    "sglang.srt.models.registry",  # model files whose optional packages are not installed
)
KERNEL_MODULES = (
    "sglang.srt.layers.quantization.awq.awq",
    "sglang.srt.layers.quantization.gguf",
    "sglang.kernels.ops.attention.fla.utils",
)


def hush_loggers() -> None:
    """Let the loggers in ``LOGGERS`` report errors only, in this process."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def hush_server() -> None:
    """Quieten the HTTP process; the kernels' warnings also in the processes that it starts."""
    hush_loggers()
    rules = [f"ignore::UserWarning:{module}" for module in KERNEL_MODULES]
    os.environ["PYTHONWARNINGS"] = ",".join([*filter(None, [os.environ.get("PYTHONWARNINGS")]), *rules])
    for module in KERNEL_MODULES:
        warnings.filterwarnings("ignore", category=UserWarning, module=module.replace(".", r"\."))
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")


def leave(code: int) -> NoReturn:
    """End the process without the interpreter's teardown, in which Triton lists all it never freed."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
