"""The CPU attention kernels against their plain references, and the merge of segments as a property."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.kernels.decode_attention import (
    KEYS_PER_TASK,
    decode_attention,
    decode_attention_reference,
    plan_decode,
)
from fathom.kernels.extend_attention import extend_attention, extend_attention_reference, merge_segments

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def paged_problem(lengths, heads, kv_heads, dim, dtype, value_dim=None, seed=0):
    """Random pool whose slots are dealt to the requests in random order, unused slots poisoned with NaN."""
    torch.manual_seed(seed)
    slots = sum(lengths) + 7
    order = torch.randperm(slots, dtype=torch.int32)
    table = torch.full((len(lengths) + 2, max(lengths)), -1, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 2)[: len(lengths)]
    keys = torch.full((slots, kv_heads, dim), float("nan"), dtype=dtype)
    values = torch.full((slots, kv_heads, value_dim or dim), float("nan"), dtype=dtype)
    begin = 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        own = order[begin : begin + length]
        table[row, :length] = own
        keys[own.long()] = torch.randn(length, kv_heads, dim).to(dtype)
        values[own.long()] = torch.randn(length, kv_heads, value_dim or dim).to(dtype)
        begin += length
    query = torch.randn(len(lengths), heads, dim).to(dtype)
    return query, keys, values, table, rows, torch.tensor(lengths)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "window", "dtype"),
    [
        ([1], 4, 2, 64, -1, torch.float32),
        ([63, 64, 65, 1], 4, 2, 64, -1, torch.float32),
        ([KEYS_PER_TASK, KEYS_PER_TASK + 1, 3 * KEYS_PER_TASK - 5], 8, 4, 64, -1, torch.bfloat16),
        ([700, 5, 2000], 4, 2, 64, 128, torch.bfloat16),
        ([700, 5], 4, 2, 64, 0, torch.float32),
        ([700, 5], 3, 1, 80, -1, torch.float16),
    ],
)
def test_decode_attention_equals_reference(lengths, heads, kv_heads, dim, window, dtype):
    query, keys, values, table, rows, lens = paged_problem(lengths, heads, kv_heads, dim, dtype)
    plan = plan_decode(rows, lens, kv_heads, window)
    output, lse = decode_attention(query, keys, values, table, plan, dim**-0.5)
    want, want_lse = decode_attention_reference(query, keys, values, table, rows, lens, dim**-0.5, window)
    # Both read the same rounded keys and accumulate in float32.
    torch.testing.assert_close(output, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=1e-4)


def test_decode_attention_with_other_value_dim():
    query, keys, values, table, rows, lens = paged_problem([90, 1100], 4, 2, 64, torch.float32, value_dim=32)
    output, _ = decode_attention(query, keys, values, table, plan_decode(rows, lens, 2), 0.125)
    want, _ = decode_attention_reference(query, keys, values, table, rows, lens, 0.125)
    torch.testing.assert_close(output, want, atol=2e-5, rtol=1e-4)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    kv_heads=st.integers(1, 4),
    window=st.one_of(st.just(-1), st.integers(0, 3000)),
)
@settings(max_examples=60, deadline=None)
def test_decode_plan_covers_each_visible_key_once(lengths, kv_heads, window):
    plan = plan_decode(torch.arange(len(lengths)), torch.tensor(lengths), kv_heads, window)
    seen = {}
    for request, head, start, stop in zip(plan.request, plan.head, plan.start, plan.stop, strict=True):
        assert 0 < stop - start <= KEYS_PER_TASK
        seen.setdefault((request, head), []).extend(range(start, stop))
    for request, length in enumerate(lengths):
        first = max(0, length - window - 1) if window >= 0 else 0
        for head in range(kv_heads):
            assert seen[request, head] == list(range(first, length))
    assert list(plan.first[1:] - plan.first[:-1]) == [
        -(-len(seen[r, h]) // KEYS_PER_TASK) for r in range(len(lengths)) for h in range(kv_heads)
    ]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("prefix", [0, 1, 200])
@pytest.mark.parametrize("new", [1, 2, 130])
@pytest.mark.parametrize("window", [-1, 0, 50, 1000])
def test_extend_attention_equals_reference(dtype, prefix, new, window):
    torch.manual_seed(prefix + new)
    query = torch.randn(new, 6, 32).to(dtype)
    keys = torch.randn(prefix + new, 2, 32).to(dtype)
    values = torch.randn(prefix + new, 2, 32).to(dtype)
    before = (keys[:prefix], values[:prefix]) if prefix else None
    output = extend_attention(query, keys[prefix:], values[prefix:], 0.2, window, before)
    want = extend_attention_reference(query, keys, values, 0.2, window)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_extend_attention_with_other_value_dim():
    query, keys, values = torch.randn(9, 4, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 16)
    output = extend_attention(query, keys[11:], values[11:], 0.2, prefix=(keys[:11], values[:11]))
    torch.testing.assert_close(output, extend_attention_reference(query, keys, values, 0.2))


@given(split=st.integers(1, 99), spread=st.floats(0.1, 30))
@settings(max_examples=50, deadline=None)
def test_merged_segments_equal_attention_over_their_union(split, spread):
    torch.manual_seed(split)
    scores, values = torch.randn(3, 100) * spread, torch.randn(3, 100, 8)

    def attend(part):
        s = scores[:, part]
        return torch.einsum("bn,bnd->bd", s.softmax(-1), values[:, part]), s.logsumexp(-1)

    merged, lse = merge_segments(*attend(slice(0, split)), *attend(slice(split, 100)))
    want, want_lse = attend(slice(0, 100))
    torch.testing.assert_close(merged, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, want_lse)
