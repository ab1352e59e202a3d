"""Prefill attention in bfloat16 products against the plain reference, and its tiles as a property."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import gapped_reach, paged_problem, reaches

from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.paged_attention_cpu import paged_attention_reference
from fathom.kernels.prefill_attention_cpu import KEYS_PER_BLOCK, TILE_ROWS, plan_tiles, prefill_attention

needs_products = pytest.mark.skipif(not has_bfloat16_products(), reason="the processor has no AVX512-BF16")


def attend(problem, kv_heads, reach, scale, chosen=None):
    query, pool, slots, entry, queries = problem
    chosen = np.ones(len(entry) - 1, bool) if chosen is None else np.array(chosen)
    tiles = plan_tiles(entry, queries, chosen, query.shape[1], kv_heads, reach)
    output = torch.full((*query.shape[:2], pool[1].shape[2]), 7.0, dtype=torch.bfloat16)
    prefill_attention(query, pool, slots.numpy(), tiles, scale, output, reach)
    return output


@needs_products
@pytest.mark.parametrize(
    ("lengths", "news", "heads", "kv_heads", "dim", "value_dim", "window"),
    [
        ([300], [300], 4, 2, 64, 64, -1),
        ([1, 2, 63, 64, 65, 131], [1, 2, 63, 64, 65, 131], 3, 1, 32, 96, -1),
        ([900, 70, 9, 2000], [500, 1, 9, 3], 8, 2, 128, 128, -1),
        ([900, 70, 640], [500, 70, 300], 4, 4, 64, 32, 40),
        ([700, 130], [300, 130], 6, 2, 96, 64, 0),
        ([900, 70, 640], [500, 70, 300], 8, 2, 64, 64, 400),
    ],
)
def test_prefill_attention_equals_reference(lengths, news, heads, kv_heads, dim, value_dim, window):
    problem = paged_problem(lengths, news, heads, kv_heads, dim, torch.bfloat16, value_dim)
    query, pool, slots, entry, queries = problem
    scale = dim**-0.5

    def reference(values, reach):
        where = slots, entry.tolist(), queries.tolist()
        return paged_attention_reference(query, (pool[0], values), *where, scale, reach)[0]

    for reach in reaches(lengths, news, window):
        got, want = attend(problem, kv_heads, reach, scale), reference(pool[1], reach)
        # Each weight and the output are rounded to the eight bits of bfloat16.
        allowed = 2e-5 + 2.0**-8 * (reference(pool[1].abs(), reach) + want.abs()) * (1 + 1e-4)
        assert ((got.float() - want).abs() <= allowed).all(), (got.float() - want).abs().max()


@needs_products
@pytest.mark.parametrize("window", [-1, 100])
def test_chunks_change_no_bit(window):
    """A prompt in one piece, and its last tokens as a chunk of their own over the rest."""
    problem = paged_problem([777], [777], 4, 2, 64, torch.bfloat16)
    query, pool, slots, entry, _ = problem
    for reach in reaches([777], [777], window):
        whole = attend(problem, 2, reach, 0.125)
        for new in (700, 300, 65, 1):
            part = query[-new:], pool, slots, entry, np.array([0, new])
            limits = None if reach is None else reach[-new:]
            assert torch.equal(attend(part, 2, limits, 0.125), whole[-new:])


@needs_products
def test_only_chosen_segments_are_written():
    lengths, news = [300, 40, 90], [100, 40, 7]
    problem = paged_problem(lengths, news, 4, 2, 64, torch.bfloat16)
    reach, _ = gapped_reach(lengths, news, 30)
    whole, some = (attend(problem, 2, reach, 0.125, chosen) for chosen in (None, [True, False, True]))
    assert torch.equal(some[:100], whole[:100]) and torch.equal(some[140:], whole[140:])
    assert (some[100:140] == 7).all()


@given(
    requests=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 700)), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 4, 300]),
    kv_heads=st.integers(1, 3),
    window=st.one_of(st.just(-1), st.integers(0, 400)),
    gaps=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_tiles_cover_each_query_once_and_all_it_sees(requests, group, kv_heads, window, gaps):
    lengths, news = zip(*[(max(length, new), new) for length, new in requests], strict=True)
    entry, queries = (np.concatenate([[0], np.cumsum(counts)]) for counts in (lengths, news))
    reach = reaches(lengths, news, window)[-1 if gaps else 0]
    tiles = plan_tiles(entry, queries, np.ones(len(news), bool), group * kv_heads, kv_heads, reach)
    seen = set()
    for start, stop, first, count, head in tiles.tolist():
        segment = int(np.searchsorted(queries, first, side="right")) - 1
        assert count * group <= max(TILE_ROWS, group) and first + count <= queries[segment + 1]
        last = entry[segment + 1] - (queries[segment + 1] - first - count)
        assert stop == last and (start - entry[segment]) % KEYS_PER_BLOCK == 0
        limit = stop if reach is None else reach[first]
        oldest = max(stop - count - limit, entry[segment])
        assert oldest - KEYS_PER_BLOCK < start <= oldest
        for query in range(first, first + count):
            assert (query, head) not in seen
            seen.add((query, head))
    assert len(seen) == sum(news) * kv_heads


def test_the_largest_tiles_come_first():
    entry, queries = np.array([0, 8192, 8800]), np.array([0, 8192, 8400])
    tiles = plan_tiles(entry, queries, np.ones(2, bool), 8, 4)
    work = (tiles[:, 1] - tiles[:, 0]) * tiles[:, 3]
    assert (np.diff(work) <= 0).all() and work[0] > work[-1]
