"""The CPU attention kernels against their plain references, and the merge of segments as a property."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import assert_fair, gapped_reach, paged_problem, reaches
from torch.nn.functional import scaled_dot_product_attention

from fathom.kernels import paged_attention_cpu
from fathom.kernels.extend_attention import extend_attention, extend_attention_reference, merge_segments
from fathom.kernels.paged_attention_cpu import (
    KEYS_PER_TASK,
    paged_attention,
    paged_attention_reference,
    plan_packed,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check_paged(problem, kv_heads, reach, scale):
    query, pool, slots, entry, queries = problem
    tasks = plan_packed(entry, queries, kv_heads, reach)
    output, lse = paged_attention(query, pool, slots.view(1, -1), tasks, scale)
    want, want_lse = paged_attention_reference(
        query, pool, slots, entry.tolist(), queries.tolist(), scale, reach
    )
    # Both read the same rounded keys and accumulate in float32.
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=1e-4)
    allowed = 2e-5 + 1e-4 * want.abs()
    if paged_attention_cpu.takes_products(query.dtype, pool[0].dtype, query.shape[2], pool[1].shape[2]):
        # Each weight may be rounded to the eight bits of bfloat16.
        sizes = pool[0], pool[1].abs()
        spread, _ = paged_attention_reference(
            query, sizes, slots, entry.tolist(), queries.tolist(), scale, reach
        )
        allowed += 2.0**-8 * spread
    assert ((output - want).abs() <= allowed).all(), (output - want).abs().max()
    return output


@pytest.fixture(params=["bfloat16 products", "float32 arithmetic"])
def arithmetic(request, monkeypatch):
    """Both forms of the inner loops, where the processor has both."""
    if request.param == "float32 arithmetic":
        monkeypatch.setattr(paged_attention_cpu, "has_bfloat16_products", lambda: False)


@pytest.mark.parametrize(
    ("lengths", "news", "heads", "kv_heads", "dim", "window", "dtype"),
    [
        ([1], [1], 4, 2, 64, -1, torch.float32),
        ([63, 64, 65, 1], [1, 1, 1, 1], 4, 2, 64, -1, torch.float32),
        (
            [KEYS_PER_TASK, KEYS_PER_TASK + 1, 3 * KEYS_PER_TASK - 5],
            [1, 1, 1],
            8,
            4,
            64,
            -1,
            torch.bfloat16,
        ),
        ([700, 5, 2000], [1, 1, 1], 4, 2, 64, 128, torch.bfloat16),
        ([700, 5], [1, 1], 4, 2, 64, 0, torch.float32),
        ([700, 5], [1, 1], 3, 1, 80, -1, torch.float16),
        ([7], [7], 4, 4, 32, -1, torch.float32),
        ([KEYS_PER_TASK + 3, 70, 9, 2000], [5, 1, 9, 16], 4, 2, 64, -1, torch.float32),
        ([KEYS_PER_TASK + 3, 70, 9, 2000], [5, 1, 9, 16], 3, 1, 80, -1, torch.bfloat16),
        ([700, 5, 2000, 130], [3, 5, 16, 1], 4, 2, 64, 128, torch.bfloat16),
        ([700, 90], [70, 90], 2, 2, 32, 6, torch.float32),
        ([700, 5], [4, 5], 4, 2, 64, 0, torch.float32),
        # Later queries see nothing of the first task.
        ([2000, 1900, 9], [16, 9, 4], 4, 2, 64, 1500, torch.bfloat16),
        ([1900, 2000], [4, 7], 4, 4, 32, 1500, torch.float32),
        ([3, 1500], [1, 1], 36, 12, 32, -1, torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("arithmetic")
def test_paged_attention_equals_reference(lengths, news, heads, kv_heads, dim, window, dtype):
    problem = paged_problem(lengths, news, heads, kv_heads, dim, dtype)
    for reach in reaches(lengths, news, window):
        check_paged(problem, kv_heads, reach, dim**-0.5)


def test_a_reach_beyond_all_entries_changes_no_bit():
    query, pool, slots, entry, queries = paged_problem([700, 90], [5, 9], 4, 2, 64, torch.bfloat16)
    limited = np.r_[np.full(5, 10**6), np.arange(86, 95)]
    whole, same = (check_paged((query, pool, slots, entry, queries), 2, x, 0.125) for x in (None, limited))
    assert torch.equal(same, whole)
    # Where the last query is limited, the others have masks that hide nothing.
    limited[-1] = 3
    other = check_paged((query, pool, slots, entry, queries), 2, limited, 0.125)
    assert torch.equal(other[:-1], whole[:-1]) and not torch.equal(other[-1], whole[-1])


def test_paged_attention_with_other_value_dim():
    check_paged(paged_problem([90, 1100], [1, 6], 4, 2, 64, torch.float32, value_dim=32), 2, None, 0.125)
    check_paged(paged_problem([90, 1100], [1, 1], 4, 2, 64, torch.bfloat16, value_dim=32), 2, None, 0.125)


@pytest.mark.usefixtures("arithmetic")
def test_other_number_formats_are_refused():
    pool = (torch.zeros(4, 2, 16, dtype=torch.float64),) * 2
    tasks = plan_packed(np.array([0, 4]), np.array([0, 1]), 2)
    with pytest.raises(TypeError, match=r"torch.float64 is not supported on the CPU; legal: torch.float32, "):
        paged_attention(torch.zeros(1, 4, 16), pool, torch.zeros(1, 4, dtype=torch.int32), tasks, 1.0)


def test_a_query_is_answered_alike_alone_and_among_others():
    """What drafted tokens are judged by is what decoding them one at a time would have given, to the bit."""
    query, pool, slots, entry, queries = paged_problem([3000], [6], 4, 2, 64, torch.bfloat16)
    together = check_paged((query, pool, slots, entry, queries), 2, None, 0.125)
    for j in range(6):
        tasks = plan_packed(np.array([0, 3000 - 6 + j + 1]), np.array([0, 1]), 2)
        alone, _ = paged_attention(query[j : j + 1], pool, slots.view(1, -1), tasks, 0.125)
        assert torch.equal(alone[0], together[j])


@given(
    requests=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 40)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 4),
    window=st.one_of(st.just(-1), st.integers(0, 3000)),
    gaps=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_tasks_cover_each_visible_key_once(requests, kv_heads, window, gaps):
    lengths, news = zip(*[(max(length, new), new) for length, new in requests], strict=True)
    entry, queries = (np.concatenate([[0], np.cumsum(counts)]) for counts in (lengths, news))
    reach = reaches(lengths, news, window)[-1 if gaps else 0]
    tasks = plan_packed(entry, queries, kv_heads, reach)
    seen, runs = {}, Counter()
    for request, first, many, start, stop in zip(
        tasks.request, tasks.head, tasks.heads, tasks.start, tasks.stop, strict=True
    ):
        assert 0 < stop - start <= KEYS_PER_TASK
        for head in range(first, first + many):
            seen.setdefault((request, head), []).extend(range(start, stop))
            runs[request, head] += 1
    differ = False
    for request, (length, new) in enumerate(zip(lengths, news, strict=True)):
        limits = np.full(new, length) if reach is None else reach[queries[request] :][:new]
        oldest = np.maximum(np.arange(length - new, length) - limits, 0)
        first, differ = oldest[0], differ or oldest[-1] > oldest[0]
        for head in range(kv_heads):
            assert seen[request, head] == list(range(entry[request] + first, entry[request + 1]))
    assert runs == {pair: -(-len(keys) // KEYS_PER_TASK) for pair, keys in seen.items()}
    assert tasks.reach.dtype == np.int64
    assert np.array_equal(tasks.reach, reach) if differ else len(tasks.reach) == 0
    assert_fair(tasks)
    assert tasks.first[0] == 0 and tasks.first[-1] == len(tasks.request)
    for request, (begin, end) in enumerate(pairwise(tasks.first)):
        assert (tasks.request[begin:end] == request).all()


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
    for reach in reaches([prefix + new], [new], window):
        output = extend_attention(query, keys[prefix:], values[prefix:], 0.2, reach, before)
        want, _ = extend_attention_reference(query, keys, values, 0.2, reach)
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_long_extends_are_cut_where_their_queries_see():
    """More queries than are taken at a time, over a prefix."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(1300, 2, 16), torch.randn(1400, 1, 16), torch.randn(1400, 1, 16)
    for reach in reaches([1400], [1300], 300):
        output = extend_attention(query, keys[100:], values[100:], 0.2, reach, (keys[:100], values[:100]))
        torch.testing.assert_close(output, extend_attention_reference(query, keys, values, 0.2, reach)[0])
        tensor = torch.from_numpy(reach)
        again = extend_attention(query, keys[100:], values[100:], 0.2, tensor, (keys[:100], values[:100]))
        assert torch.equal(again, output)


@pytest.mark.parametrize("window", [0, 7, 60, 10**6])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_references_under_a_mask(window, kv_heads):
    """Two requests whose entries have missing tokens between them: a query sees what its window holds."""
    lengths, news = [120, 90], [20, 90]
    query, pool, slots, entry, queries = paged_problem(lengths, news, 6, kv_heads, 16, torch.float32)
    reach, positions = gapped_reach(lengths, news, window)
    got, lse = paged_attention_reference(query, pool, slots, entry.tolist(), queries.tolist(), 0.3, reach)
    for request, place in enumerate(positions):
        own, rows = slots[entry[request] : entry[request + 1]].long(), slice(*queries[request : request + 2])
        distance = torch.from_numpy(place[-news[request] :, None] - place)
        mask = (distance >= 0) & (distance <= window)
        k, v = (part[own].transpose(0, 1) for part in pool)
        q = query[rows].transpose(0, 1)
        want = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(got[rows], want.transpose(0, 1))
        scores = (q @ k.repeat_interleave(6 // kv_heads, 0).transpose(1, 2) * 0.3).exp() * mask
        torch.testing.assert_close(lse[rows], scores.sum(-1).log().T)
        extended = extend_attention(
            query[rows],
            *(part[own[-news[request] :]] for part in pool),
            0.3,
            reach[rows],
            tuple(part[own[: -news[request]]] for part in pool),
        )
        torch.testing.assert_close(extended, want.transpose(0, 1))


def test_extend_attention_with_other_value_dim():
    query, keys, values = torch.randn(9, 4, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 16)
    output = extend_attention(query, keys[11:], values[11:], 0.2, prefix=(keys[:11], values[:11]))
    torch.testing.assert_close(output, extend_attention_reference(query, keys, values, 0.2)[0])


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
