"""Tasks that threads take over from each other: each is done once, whoever is late."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import get_num_threads, njit, prange
from numba.extending import overload

from fathom.kernels.numba_cpu import INNER, literal_values, match_torch_threads
from fathom.kernels.work_sharing_cpu import even_shares, on_threads, share_of, take


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


@njit
def _mark(thread, threads, times, by):
    begin, end = share_of(len(times), thread, threads)
    for i in range(begin, end):
        if times[i] < 0:
            raise ValueError("a negative count")
        times[i] += 1
        by[i] = thread


@njit
def _mark_all(threads, times, by):
    on_threads(_mark, threads, times, by)


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
@pytest.mark.parametrize("items", [0, 1, 8, 100])
def test_each_thread_is_called_once_with_its_share(threads, items):
    times, by = np.zeros((2, items), np.int64)
    for _ in range(20):
        times[:], by[:] = 0, -1
        _mark_all(threads, times, by)
        assert (times == 1).all()
    sizes = np.bincount(by, minlength=threads)
    assert (np.diff(by) >= 0).all() and sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_thread_raises_is_raised(threads):
    times, by = np.zeros((2, 4), np.int64)
    times[2] = -1
    with pytest.raises(ValueError, match="a negative count"):
        _mark_all(threads, times, by)
    assert times[2] == -1 and times[0] == 1


def _sum(thread, threads, given, sizes):
    """Replaced where it is compiled."""


@overload(_sum, jit_options=INNER, prefer_literal=True)
def _sum_of_constants(thread, threads, given, sizes):
    first, second = literal_values(sizes)

    def add(thread, threads, given, sizes):
        values, (result, factor) = given
        for i in range(first):
            result[thread] += factor * values[i] + second

    return add


@pytest.mark.parametrize("first, second", [(3, 5), (4, 4)])
def test_constants_of_a_kernel_are_constants_in_its_threads(first, second):
    @njit
    def kernel(values, result, factor):
        on_threads(_sum, len(result), (values, (result, factor)), (first, second))

    values, result = np.arange(4.0), np.zeros(2)
    kernel(values, result, 2.0)
    assert result.tolist() == [2 * values[:first].sum() + first * second] * 2


FROM_DISK = """
import sys, torch
from fathom.kernels.rms_norm import _norm_rows, rms_norm
x = torch.randn(64, 2048)
want = torch.nn.functional.rms_norm(x, (2048,), eps=1e-5)
assert torch.allclose(rms_norm(x, torch.ones(2048), 1e-5)[0], want, atol=1e-5)
print(sum(_norm_rows.stats.cache_hits.values()))
"""


def test_kernels_read_from_the_disk_start_the_threads_they_need(tmp_path):
    """In a process in which nothing else has: what they call is not known before."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for hits in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", FROM_DISK], capture_output=True, text=True, timeout=120, env=environment
        )
        assert done.stdout == f"{hits}\n", done.stderr


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
