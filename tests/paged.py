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


def assert_fair(tasks):
    """Each task is one thread's, and no thread has more than its part of the work and one task besides."""
    shares = tasks.shares.tolist()
    assert shares[0] == 0 and shares[-1] == len(tasks.row) and shares == sorted(shares)
    assert len(shares) == torch.get_num_threads() + 1
    work = tasks.heads * (tasks.stop - tasks.start + TASK_IN_KEYS)
    each = [work[begin:end].sum() for begin, end in pairwise(shares)]
    assert max(each) <= work.sum() / len(each) + work.max()
