"""Groups of one process, or of two, that share a Gloo device."""

import os
from multiprocessing import get_context

import torch
from torch import distributed

from fathom.runtime.sglang_host.machine import gloo

GROUPS, RANKS = 5, 2


def threads():
    return len(os.listdir("/proc/self/task"))


def rank_of(rank, address, found):
    gloo.share_device()
    gloo.share_device()  # an engine that starts again in its process
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    before, sums = threads(), []
    groups = [distributed.new_group(backend="gloo") for _ in range(GROUPS)]
    started = threads() - before
    for power, group in enumerate(groups):
        number = torch.tensor(float((rank + 1) ** power))
        distributed.all_reduce(number, group=group)
        sums.append(number.item())
    found.put((rank, started, sums))
    distributed.destroy_process_group()


def test_groups_share_the_thread_of_a_device(tmp_path):
    """Each has two workers, which sleep until there is something to do, and nothing that wakes by itself."""
    context = get_context("spawn")
    found = context.Queue()
    address = (tmp_path / "store").as_uri()
    ranks = [context.Process(target=rank_of, args=(rank, address, found)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    answers = [found.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(answers) == [
        (rank, 2 * GROUPS, [1 + 2.0**p for p in range(GROUPS)]) for rank in range(RANKS)
    ]


def test_interfaces_that_an_operator_names_are_used(monkeypatch):
    stock = distributed.distributed_c10d.ProcessGroupGloo
    monkeypatch.setenv(gloo.INTERFACES, "lo")
    gloo.share_device()
    assert distributed.distributed_c10d.ProcessGroupGloo is stock


def test_nccl_is_left_alone_without_a_gpu(monkeypatch):
    """Also where PyTorch was built for CUDA and brings it."""
    # Here, not above: the processes of the other test need none of it.
    from sglang.srt.distributed.device_communicators import pynccl_wrapper
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
    from sglang.srt.distributed.utils import StatelessProcessGroup

    asked = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(pynccl_wrapper.ctypes, "CDLL", asked.append)
    monkeypatch.setattr(pynccl_wrapper, "find_nccl_library", pynccl_wrapper.find_nccl_library)
    group = StatelessProcessGroup(rank=0, world_size=2, store=None)
    assert PyNcclCommunicator(group, "cpu").disabled and asked == ["libnccl.so.2"]
    gloo.without_nccl()
    assert PyNcclCommunicator(group, "cpu").disabled and len(asked) == 1
