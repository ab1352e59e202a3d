"""Engine processes as copies of the server process, in place of new ones that import everything again.

SGLang starts its scheduler and its detokenizer by ``spawn``: each imports PyTorch and SGLang anew, as the HTTP
process has just done. A fork has it all at once, and shares the memory.
"""

import multiprocessing
import threading
from types import ModuleType
from typing import Any

from sglang.srt.entrypoints import engine
from sglang.srt.platforms import current_platform

from fathom.runtime.sglang_host.platform import FathomCpuPlatform


class Forking:
    """``multiprocessing`` as SGLang's launcher uses it, whose processes are forks where that is safe.

    It is not with a GPU, whose driver does not survive a fork, nor beside other Python threads, whose locks a copy
    would find held for ever. (Threads of OpenBLAS end before a fork and begin again after it.)
    """

    def __init__(self, stock: ModuleType) -> None:
        self.stock: Any = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def set_start_method(self, method: str, force: bool = False) -> None:
        """What SGLang asks for just before it starts its processes."""
        safe = isinstance(current_platform, FathomCpuPlatform) and threading.active_count() == 1
        self.stock.set_start_method("fork" if safe else method, force)


def install() -> None:
    """Let SGLang's launcher, in this process, start its processes as forks."""
    engine.mp = Forking(multiprocessing)
