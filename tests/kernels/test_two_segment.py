"""Two-segment attention, its evidence, and packing: CPU kernels against references; Triton in its interpreter."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import assert_fair

from fathom.kernels.pack_segment import pack_segment
from fathom.kernels.paged_attention_cpu import COMPACT_PER_TASK, KEYS_PER_TASK, takes_products
from fathom.kernels.two_segment_attention import (
    Evidence,
    plan_segments,
    two_segment_attention,
    two_segment_attention_reference,
)

# row, begin, end, compact start, compact length, evidence row
DENSE, FAST, EDGE = (1, 0, 2300, 0, 0, 1), (3, 1900, 2156, 300, 1100, -1), (0, 4, 5, 0, 4, -1)
EMPTY, LAST = (2, 0, 0, 0, 0, -1), (2, 0, 70, 0, 0, 0)


def head_by_head(buffer):
    """[tokens, kv_heads, dim] with each head's tokens lying together, as in a server's compact buffers."""
    return buffer.transpose(0, 1).contiguous().transpose(0, 1)


def problem(heads, kv_heads, dim, value_dim, dtype, seed=0):
    """Scattered slots; the pool's other slots and the compact buffer's unused places are poisoned with NaN."""
    torch.manual_seed(seed)
    width, slots = 2300, 9300
    table = torch.randperm(slots)[: 4 * width].view(4, width).int()

    def filled(count, size, used):
        tensor = torch.full((count, kv_heads, size), float("nan"), dtype=dtype)
        tensor[used] = torch.randn(len(used), kv_heads, size).to(dtype)
        return tensor

    used = table.flatten().long()
    pool = filled(slots, dim, used), filled(slots, value_dim, used)
    taken = torch.cat((torch.arange(0, 4), torch.arange(300, 1400)))
    compact = head_by_head(filled(1500, dim, taken)), head_by_head(filled(1500, value_dim, taken))
    return torch.randn(5, heads, dim).to(dtype), pool, compact, table


def plan_of(requests, kv_heads):
    return plan_segments(*map(torch.tensor, zip(*requests, strict=True)), kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "dtype"),
    [
        (4, 2, 32, 32, torch.float32),
        (3, 1, 80, 48, torch.bfloat16),
        (12, 6, 64, 32, torch.bfloat16),
    ],
)
def test_two_segments_equal_reference(heads, kv_heads, dim, value_dim, dtype):
    query, pool, compact, table = problem(heads, kv_heads, dim, value_dim, dtype)
    plan = plan_of([DENSE, FAST, EDGE, EMPTY, LAST], kv_heads)
    kept, want_kept = (
        Evidence(torch.full((2, heads, 2300), 7.0), torch.full((2, kv_heads, 2300), 7.0)) for _ in range(2)
    )
    got = two_segment_attention(query, pool, compact, table, plan, dim**-0.5, kept)
    want = two_segment_attention_reference(query, pool, compact, table, plan, dim**-0.5, want_kept)
    for a, b in zip((got[1], *vars(kept).values()), (want[1], *vars(want_kept).values()), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    # Where weights are rounded to bfloat16, each by at most half of its last bit.
    sizes = [(keys, values.abs()) for keys, values in (pool, compact)]
    spread, _ = two_segment_attention_reference(query, *sizes, table, plan, dim**-0.5)
    rounding = 2.0**-8 if takes_products(dtype, dtype, dim, value_dim) else 0.0
    assert ((got[0] - want[0]).abs() <= 2e-5 + 1e-4 * want[0].abs() + rounding * spread).all()
    assert (kept.logits[0, ..., 70:] == 7).all()  # nothing is written beyond a request's range
    assert torch.isfinite(kept.logits).all()
    assert (got[0][3] == 0).all() and torch.isneginf(got[1][3]).all()  # a row that sees nothing
    for a, b in zip(got, two_segment_attention(query, pool, compact, table, plan, dim**-0.5), strict=True):
        assert torch.equal(a, b)  # keeping evidence does not change the output
    output = torch.full_like(got[0], float("nan"), dtype=torch.bfloat16)
    into, lse = two_segment_attention(query, pool, compact, table, plan, dim**-0.5, None, output)
    assert into is output and torch.equal(output, got[0].bfloat16()) and torch.equal(lse, got[1])
    wider = torch.cat((query, query, query), 1)[:, heads : 2 * heads]
    assert torch.equal(two_segment_attention(wider, pool, compact, table, plan, dim**-0.5)[0], got[0])


def test_strided_keys_are_read_in_place():
    query, pool, compact, table = problem(4, 2, 32, 32, torch.float32)
    wide = torch.stack(pool, 1)  # [slots, 2, kv_heads, dim]
    plan = plan_of([DENSE, FAST, EDGE, EMPTY, LAST], 2)
    want, _ = two_segment_attention(query, pool, compact, table, plan, 0.2)
    got, _ = two_segment_attention(query, (wide[:, 0], wide[:, 1]), compact, table, plan, 0.2)
    assert torch.equal(got, want)
    by_token = compact[0].contiguous(), compact[1].contiguous()
    got, _ = two_segment_attention(query, pool, by_token, table, plan, 0.2)
    assert torch.equal(got, want)


def test_keys_in_parts_of_lines_are_refused():
    query, pool, compact, table = problem(4, 2, 32, 32, torch.float32)
    plan = plan_of([DENSE, FAST, EDGE, EMPTY, LAST], 2)
    skewed = torch.zeros(9300, 2, 40)[..., :32]
    with pytest.raises(ValueError, match=r"whole lines, got strides \(80, 40, 1\)"):
        two_segment_attention(query, (skewed, pool[1]), compact, table, plan, 0.2)


def test_unknown_dtype_is_refused():
    query, pool, compact, table = problem(4, 2, 32, 32, torch.float64)
    plan = plan_of([DENSE] * 5, 2)
    with pytest.raises(TypeError, match="float64"):
        two_segment_attention(query, pool, compact, table, plan, 0.2)


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=5
    ),
    kv_heads=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_tasks_cover_both_segments_once(requests, kv_heads):
    described = [(i, begin, begin + count, 7, held, -1) for i, (begin, count, held) in enumerate(requests)]
    tasks = plan_of(described, kv_heads).tasks
    seen = {}
    for row, request, first, many, start, stop in zip(*tasks[:6], strict=True):
        assert stop - start <= (COMPACT_PER_TASK if row < 0 else KEYS_PER_TASK)
        for head in range(first, first + many):
            seen.setdefault((request, head), []).extend((row, i) for i in range(start, stop))
    for request, (begin, count, held) in enumerate(requests):
        want = [(-1, 7 + i) for i in range(held)] + [(request, begin + i) for i in range(count)]
        for head in range(kv_heads):
            assert seen[request, head] == want
    assert_fair(tasks)
    for request, (begin, end) in enumerate(pairwise(tasks.first)):
        assert end > begin and (tasks.request[begin:end] == request).all()


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float32, torch.clone), (torch.bfloat16, head_by_head)])
def test_packing_gathers_sink_and_selection_per_head(dtype, layout):
    # One layer's view of a pool that holds three.
    keys, values = torch.randn(50, 3, 2, 8).to(dtype)[:, 1], torch.randn(50, 2, 4).to(dtype)
    table = torch.stack([torch.randperm(50)[:30] for _ in range(3)]).int()
    chosen = torch.tensor(
        [[[4, 9, 11], [5, 6, 29]], [[8, -1, -1], [7, -1, -1]], [[1, 2, 3], [1, 2, 3]]]
    ).int()
    compact = layout(torch.zeros(20, 2, 8, dtype=dtype)), layout(torch.zeros(20, 2, 4, dtype=dtype))
    pack_segment(
        (keys, values), compact, table, torch.tensor([2, 0, -1]), torch.tensor([10, 0, 3]), chosen, 2
    )
    for buffer, origin in zip(compact, (keys, values), strict=True):
        want = torch.zeros_like(buffer)
        for start, row, heads in (
            (10, 2, [[0, 1, 4, 9, 11], [0, 1, 5, 6, 29]]),
            (0, 0, [[0, 1, 8], [0, 1, 7]]),
        ):
            for h, entries in enumerate(heads):
                for t, entry in enumerate(entries):
                    want[start + t, h] = origin[table[row, entry], h]
        assert torch.equal(buffer, want)


def test_triton_kernels_in_the_interpreter(interpret):
    assert "24 comparisons" in interpret("interpret_sfi.py")
