"""Requests whose keys and values lie in scattered slots of one pool, and the tasks that read them."""

from itertools import pairwise

import numpy as np
import torch

from fathom.kernels.paged_attention_cpu import TASK_IN_KEYS


def paged_problem(lengths, news, heads, kv_heads, dim, dtype, value_dim=None, seed=0):
    """Random pool whose slots are dealt to the requests in random order, unused slots poisoned with NaN."""
    torch.manual_seed(seed)
    slots = torch.randperm(sum(lengths) + 7, dtype=torch.int32)[: sum(lengths)]
    pool = tuple(
        torch.full((len(slots) + 7, kv_heads, size), float("nan"), dtype=dtype)
        for size in (dim, value_dim or dim)
    )
    for part in pool:
        part[slots.long()] = torch.randn(len(slots), *part.shape[1:]).to(dtype)
    entry, queries = (np.concatenate([[0], np.cumsum(counts)]) for counts in (lengths, news))
    return torch.randn(sum(news), heads, dim).to(dtype), pool, slots, entry, queries


def reaches(lengths, news, window):
    """The reach of each query, [queries] int64, of a window in tokens, -1 for all: where entries are consecutive
    tokens, and where tokens between them are missing, some of them between a request's queries.
    """
    return [None] if window < 0 else [np.full(sum(news), window), gapped_reach(lengths, news, window)[0]]


def gapped_reach(lengths, news, window):
    """[queries] int64, and the ascending positions of each request's entries."""
    rng = np.random.default_rng(0)
    found, places = [], []
    for length, new in zip(lengths, news, strict=True):
        steps = np.where(rng.random(length) < 0.05, rng.integers(1, 20, length), 1)
        steps[length - rng.integers(1, max(new, 2))] += window // 2
        positions, own = np.cumsum(steps), np.arange(length - new, length)
        found.append(own - np.searchsorted(positions, positions[own] - window))
        places.append(positions)
    return np.concatenate(found), places


def assert_fair(tasks):
    """Each task is one thread's, and no thread has more than its part of the work and one task besides."""
    shares = tasks.shares.tolist()
    assert shares[0] == 0 and shares[-1] == len(tasks.row) and shares == sorted(shares)
    assert len(shares) == torch.get_num_threads() + 1
    work = tasks.heads * (tasks.stop - tasks.start + TASK_IN_KEYS)
    each = [work[begin:end].sum() for begin, end in pairwise(shares)]
    assert max(each) <= work.sum() / len(each) + work.max()
