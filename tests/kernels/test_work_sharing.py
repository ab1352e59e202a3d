"""Tasks that threads take over from each other: each is done once, whoever is late."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import get_num_threads, njit, prange

from fathom.kernels.numba_cpu import match_torch_threads
from fathom.kernels.work_sharing_cpu import even_shares, take


@njit(parallel=True)
def _work(shares, late, times, by):
    """Every task is counted in ``times`` and leaves its thread in ``by``; thread ``late`` is slow at each."""
    taken = shares[:-1].copy()
    for thread in prange(len(taken)):
        x = np.float64(thread)
        while True:
            task = take(taken, shares, thread)
            if task < 0:
                break
            for _ in range(300_000 if thread == late else 300):
                x = np.sqrt(x + 2)
            times[task] += 1
            by[task] = thread + (x < 0)


@pytest.fixture(autouse=True)
def two_threads():
    """However many a test before in this process has left."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    match_torch_threads()
    yield
    torch.set_num_threads(before)
    match_torch_threads()


@pytest.mark.parametrize("shares", [[0, 60, 120], [0, 0, 120], [0, 120, 120], [0, 1, 2], [0, 0, 0], [0, 7]])
@pytest.mark.parametrize("late", [0, 1])
def test_each_task_is_done_once(shares, late):
    cuts = np.array(shares)
    times, by = np.zeros((2, cuts[-1]), np.int64)
    for _ in range(20):
        times[:] = 0
        _work(cuts, late, times, by)
        assert (times == 1).all()


def test_a_thread_that_is_done_takes_what_a_slow_one_has_left():
    if get_num_threads() < 2:
        pytest.skip("needs two cores")
    cuts = np.array([0, 60, 120])
    times, by = np.zeros((2, 120), np.int64)
    for late in (0, 1):
        _work(cuts, late, times, by)
        assert (by[cuts[late] : cuts[late + 1]] != late).any()


def test_even_shares():
    for tasks in (0, 1, 5, 64):
        for threads in (1, 2, 3, 8):
            shares = even_shares(tasks, threads)
            sizes = np.diff(shares)
            assert shares[0] == 0 and shares[-1] == tasks and sizes.max() - sizes.min() <= 1


WITHOUT_LIBGOMP = """
import sys
sys.modules["numba.np.ufunc.omppool"] = None  # cannot be imported
import numba, torch
from fathom.kernels import silu_and_mul
x = torch.randn(64, 2048)
gate, up = x.chunk(2, -1)
assert torch.allclose(silu_and_mul.silu_and_mul(x), torch.nn.functional.silu(gate) * up, atol=1e-5)
print(numba.threading_layer())
"""


def test_without_the_systems_openmp_kernels_run_and_say_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBGOMP], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "workqueue\n", done.stderr
    assert "install libgomp (Debian: libgomp1)" in done.stderr
