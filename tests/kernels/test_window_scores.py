"""Window scores on the CPU against their references: block borders, ragged batches, 16-bit keys, large logits."""

import pytest
import torch

from fathom.kernels import window_scores, window_scores_cpu
from fathom.kernels.window_scores import (
    pool_saliency,
    pooled_max_scores,
    pooled_max_scores_reference,
    row_mean_scores,
    row_mean_scores_reference,
    window_of,
)

SHAPES = [
    # rows, lengths, heads, kv_heads, dim
    ([1], [1], 2, 1, 16),
    ([8], [5], 4, 2, 16),
    ([8], [13], 4, 4, 16),
    ([8, 1, 3], [700, 512, 30], 4, 2, 16),
    ([2, 8], [1029, 1537], 6, 2, 20),
    ([8, 3], [2100, 60], 4, 2, 64),
]


def problem(rows, lengths, heads, kv_heads, dim, dtype=torch.float32, causal=False, spread=1.0):
    """Random pool with the requests' keys in random slots; unused slots and table entries are poison."""
    torch.manual_seed(sum(lengths))
    slots = sum(lengths) + 9
    order = torch.randperm(slots, dtype=torch.int32)
    table = torch.full((len(rows), max(lengths) + 3), 2**30, dtype=torch.int32)
    keys = torch.full((slots, kv_heads, dim), float("nan"), dtype=dtype)
    begin = 0
    for row, length in enumerate(lengths):
        table[row, :length] = order[begin : begin + length]
        keys[table[row, :length].long()] = torch.randn(length, kv_heads, dim).to(dtype)
        begin += length
    query = (torch.randn(sum(rows), heads, dim) * spread).to(dtype)
    return query, keys, window_of(rows, lengths, table, causal)


@pytest.fixture(params=[512, 1 << 22], ids=["blocks", "whole"])
def block_bytes(request, monkeypatch):
    """The smallest blocks there are (512 keys; one KV head), and one block for everything."""
    monkeypatch.setattr(window_scores, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(window_scores_cpu, "KEPT_BYTES", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_pooled_max_equals_reference(shape, dtype, block_bytes):
    query, keys, window = problem(*shape, dtype=dtype)
    want = pooled_max_scores_reference(query, keys, window, 0.25)
    got = pooled_max_scores(query, keys, window, 0.25)
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("pool", [1, 3, 5, 13, 31])
def test_pooled_max_for_other_widths(pool, block_bytes):
    query, keys, window = problem([3, 2], [600, 9], 4, 2, 16)
    want = pooled_max_scores_reference(query, keys, window, 0.25, pool)
    torch.testing.assert_close(pooled_max_scores(query, keys, window, 0.25, pool), want, atol=1e-7, rtol=1e-5)


def test_pooled_max_runs_over_layers_in_place():
    (query, keys, window), (_, more, _) = problem([4], [90], 4, 2, 16), problem([4], [91], 4, 2, 16)
    more = more[: len(keys)].nan_to_num(0.5)
    first = pooled_max_scores(query, keys, window, 0.25)
    alone = pooled_max_scores(query, more, window, 0.25)
    want = torch.maximum(first, alone)
    assert not torch.equal(want, first) and not torch.equal(want, alone)
    assert pooled_max_scores(query, more, window, 0.25, out=first) is first
    assert torch.equal(first, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_row_mean_equals_reference(shape, causal, dtype, block_bytes):
    rows = [min(r, n) for r, n in zip(shape[0], shape[1], strict=True)]
    query, keys, window = problem(rows, *shape[1:], dtype=dtype, causal=causal)
    got = row_mean_scores(query, keys, window, 0.25)
    torch.testing.assert_close(
        got, row_mean_scores_reference(query, keys, window, 0.25), atol=1e-7, rtol=1e-5
    )
    # Each row's attention sums to one, and so does their mean.
    torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:2]), atol=1e-4, rtol=0)


def test_large_logits_do_not_overflow(block_bytes):
    query, keys, window = problem([2], [1200], 2, 1, 16, spread=200.0)
    got = row_mean_scores(query, keys, window, 1.0)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, row_mean_scores_reference(query, keys, window, 1.0), atol=1e-6, rtol=1e-3)


def test_a_request_scores_the_same_in_any_batch():
    query, keys, window = problem([8, 1, 3], [700, 512, 30], 4, 2, 16)
    together, means = (score(query, keys, window, 0.25) for score in (pooled_max_scores, row_mean_scores))
    for index, rows, length in window.requests():
        own = window_of([window.rows[index]], [length], window.slots[index : index + 1], False)
        assert torch.equal(pooled_max_scores(query[rows], keys, own, 0.25), together[rows])
        assert torch.equal(
            row_mean_scores(query[rows], keys, own, 0.25)[0], means[index, :, : own.slots.shape[1]]
        )


def test_equal_keys_get_equal_scores(block_bytes):
    """Away from the ends pooling adds equal numbers in one order: exact ties stay ties."""
    query, keys, window = problem([2], [1300], 2, 1, 16)
    keys[:] = 0.5
    scores = pooled_max_scores(query, keys, window, 0.25)[:, 6:1294]
    assert len(scores.unique()) == 1
    assert len(row_mean_scores(query, keys, window, 0.25)[:, :, :1300].unique()) == 1


def test_saliency_pools_before_the_window_only():
    mean = torch.zeros(4, 12)
    mean[:, 11] = 9.0  # in the window: must not leak into the tokens before it
    mean[0, 2] = mean[3, 9] = 1.0
    got = pool_saliency(mean, before=10, groups=2, pool=3)
    want = torch.zeros(2, 10)
    want[0, 1:4] = want[1, 8:10] = 0.5
    assert torch.equal(got, want)
    assert torch.equal(pool_saliency(mean, before=10, groups=1, pool=3)[0], want.mean(0))
    assert pool_saliency(mean, before=0, groups=2).shape == (2, 0)


def test_illegal_shapes_are_refused():
    query, keys, window = problem([3], [20], 4, 2, 16)
    with pytest.raises(ValueError, match="does not fit"):
        row_mean_scores(query[:2], keys, window, 1.0)
    with pytest.raises(ValueError, match="odd"):
        pooled_max_scores(query, keys, window, 1.0, pool=4)
    with pytest.raises(ValueError, match="out must be"):
        pooled_max_scores(query, keys, window, 1.0, out=torch.zeros(3, 20))
    with pytest.raises(ValueError, match="more rows than keys"):
        window_of([21], [20], window.slots, True)
    with pytest.raises(ValueError, match="exceeds"):
        window_of([1], [24], window.slots, False)
    with pytest.raises(ValueError, match="at least one"):
        window_of([0], [20], window.slots, False)


def test_triton_kernels_in_the_interpreter(interpret):
    assert "13 comparisons" in interpret("interpret_window_scores.py")
