"""SGLang's request table on a CPU, in memory that is taken where it is written to.

It has a row as long as the context for each of the 2,048 requests or more that might run: 8 GB at a million tokens,
of which SGLang writes every byte before the first request is there.
"""

import contextlib
import mmap

import torch
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


def zeros(rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] int32 on the host; what is not written to takes no memory."""
    size = rows * columns * torch.int32.itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # one of which would be taken for the first token of a row
    return torch.frombuffer(memory, dtype=torch.int32, count=rows * columns).view(rows, columns)


class RequestTable(ReqToTokenPool):
    """SGLang's, with rows of :func:`zeros`."""

    def __init__(self, size: int, max_context_len: int, device: str, enable_memory_saver: bool) -> None:
        super().__init__(size, 0, device, enable_memory_saver)
        self.max_context_len = max_context_len
        self.req_to_token = zeros(self._alloc_size, max_context_len)


def install() -> None:
    """Let this process's table be one of ours."""
    kv_cache_configurator.ReqToTokenPool = RequestTable
