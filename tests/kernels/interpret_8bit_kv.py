"""Run with TRITON_INTERPRET=1: the Triton kernels over pools of 8-bit numbers.

What reads such a pool gives what its reference gives of the same numbers in float32; what copies moves bytes; what
stores rounds as PyTorch does, and keeps to the largest number.
"""

import sys
from pathlib import Path

import torch
from triton.knobs import runtime

sys.path.append(str(Path(__file__).parents[1]))

import interpreter_pace

from fathom.kernels import (
    compact_kv,
    pack_segment,
    paged_decode,
    paged_extend,
    store_kv,
    two_segment_attention,
    window_scores,
    window_scores_triton,
)

HEADS, KV_HEADS, DIM, VALUE_DIM, SCALE = 6, 2, 20, 12, 0.3
SLOTS, LENGTHS = 330, [3, 130, 97]
ROWS = torch.tensor([2, 0, 1], dtype=torch.int32)
TYPES = (torch.float32, torch.float16)


def pool_of(dtype):
    """Slots that nobody reads hold NaN."""
    torch.manual_seed(1)
    table = torch.randperm(SLOTS)[: 3 * 100].view(3, 100)
    table = torch.nn.functional.pad(table, (0, 30)).int()
    table[0, 100:] = torch.tensor(sorted(set(range(SLOTS)) - set(table.flatten().tolist()))[:30])
    read = torch.cat([table[row, :length] for row, length in zip(ROWS.tolist(), LENGTHS, strict=True)]).long()
    pool = []
    for dim in (DIM, VALUE_DIM):
        wide = torch.full((SLOTS, KV_HEADS, dim), float("nan"))
        wide[read] = torch.randn(len(read), KV_HEADS, dim)
        pool.append(wide.to(dtype))
    return tuple(pool), table


def same(got, want, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 2e-3
    for mine, reference in zip(got, want, strict=True):
        torch.testing.assert_close(mine.float(), reference.float(), atol=tolerance, rtol=tolerance)


def compare_attention(narrow, dtype):
    pool, table = pool_of(narrow)
    wide = tuple(x.float() for x in pool)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    query = torch.randn(3, HEADS, DIM).to(dtype)
    where = table, ROWS, lengths
    same(
        paged_decode.paged_decode(query, *pool, *where, SCALE, 2),
        paged_decode.paged_decode_reference(query, *wide, *where, SCALE),
        dtype,
    )
    new, bounds = [4, 0, 9], torch.tensor([0, 4, 4, 13], dtype=torch.int32)
    query = torch.randn(sum(new), HEADS, DIM).to(dtype)
    own = [torch.randn(sum(new), KV_HEADS, dim).to(narrow) for dim in (DIM, VALUE_DIM)]
    for splits in (1, 2):
        same(
            paged_extend.paged_extend(query, *own, *pool, *where, bounds, 9, SCALE, splits),
            paged_extend.paged_extend_reference(
                query, *(x.float() for x in own), *wide, *where, bounds, SCALE
            ),
            dtype,
        )


def compare_segments(narrow, dtype):
    pool, table = pool_of(narrow)
    compact = tuple(torch.randn(KV_HEADS, 80, dim).to(narrow).transpose(0, 1) for dim in (DIM, VALUE_DIM))
    query = torch.randn(3, HEADS, DIM).to(dtype)
    columns = [ROWS.tolist(), [0, 100, 0], [3, 130, 97], [0, 5, 0], [0, 70, 0], [1, -1, 0]]
    plan = two_segment_attention.plan_segments(*map(torch.tensor, columns), KV_HEADS)
    results = []
    for function, of in (
        (two_segment_attention.two_segment_attention_reference, torch.Tensor.float),
        (two_segment_attention.two_segment_attention_triton, lambda x: x),
    ):
        kept = two_segment_attention.Evidence(
            torch.full((2, HEADS, 130), 7.0), torch.full((2, KV_HEADS, 130), 7.0)
        )
        parts = (query, tuple(map(of, pool)), tuple(map(of, compact)), table, plan, SCALE)
        results.append((*function(*parts, kept), kept.logits, kept.key_norms))
        same(function(*parts), results[-1][:2], dtype)
    same(results[1], results[0], dtype)


def compare_scores(narrow, dtype):
    (keys, _), table = pool_of(narrow)
    query = torch.randn(3 + 5 + 2, HEADS, DIM).to(dtype)
    own = table[ROWS.long()]
    window = window_scores.window_of([3, 5, 2], LENGTHS, own, True)
    want = window_scores.row_mean_scores_reference(query, keys.float(), window, SCALE)
    got = torch.zeros_like(want)
    window_scores_triton.row_mean(query, keys, *window.device_arguments(), True, SCALE, got)
    same((got,), (want,), dtype)
    window = window_scores.window_of([3, 5, 2], LENGTHS, own, False)
    start = torch.rand(10, max(LENGTHS)) * 0.01
    want = window_scores.pooled_max_scores_reference(query, keys.float(), window, SCALE, 13, start.clone())
    window_scores_triton.pooled_max(query, keys, *window.device_arguments(), SCALE, 13, start)
    same((start,), (want,), dtype)


def compare_copies(narrow):
    pool, table = pool_of(narrow)
    raw = [x.view(torch.uint8) for x in pool]
    indices = torch.stack([torch.randperm(60)[:9].sort().values + 4 for _ in range(6)]).view(3, 2, 9).int()
    got, want = (
        tuple(torch.zeros(2, 60, dim, dtype=torch.uint8).transpose(0, 1) for dim in (DIM, VALUE_DIM))
        for _ in range(2)
    )
    rows, start = ROWS.long(), torch.tensor([30, 0, 15])
    pack_segment.pack_segment_torch(tuple(raw), want, table, rows, start, indices, 3)
    packed = tuple(x.view(narrow) for x in got)
    pack_segment.pack_segment_triton(pool, packed, table, rows, start, indices, 3)
    source = torch.stack([torch.randperm(SLOTS // 2)[:19] for _ in range(KV_HEADS)])
    destination = torch.randperm(SLOTS // 2)[:19] + SLOTS // 2
    moved = [x.clone() for x in raw]
    compact_kv.compact_kv_reference(*moved, source, destination)
    compact_kv._launch(*pool, source, destination)
    assert all(map(torch.equal, [*got, *raw], [*want, *moved]))


def compare_stores(narrow, dtype):
    (keys, values), _ = pool_of(narrow)
    numbers = torch.arange(256, dtype=torch.uint8).view(narrow).float()
    numbers = numbers[numbers.isfinite()].sort().values
    half_way = (numbers[1:] + numbers[:-1]) / 2
    edges = torch.tensor([float("nan"), 0.0, -0.0, 500.0, -6e4, 6.5e4, 1e-7, -1e-4])
    beside_it = [half_way.nextafter(torch.tensor(float("inf")) * sign) for sign in (1, -1)]
    given = torch.cat([numbers, half_way, *beside_it, half_way * 1.001, half_way * 0.999, edges]).to(dtype)
    rows = -(-len(given) // (KV_HEADS * DIM))
    own = torch.zeros(rows * KV_HEADS * DIM, dtype=dtype)
    own[: len(given)] = given
    # As a part of a projection that holds queries too.
    beside = torch.randn(rows, KV_HEADS + 4, DIM).to(dtype)
    beside[:, 1 : 1 + KV_HEADS] = own.view(rows, KV_HEADS, DIM)
    new = beside[:, 1 : 1 + KV_HEADS], torch.randn(rows, KV_HEADS, VALUE_DIM).to(dtype) * 40
    slots = torch.randperm(SLOTS)[:rows]
    want = [x.view(torch.uint8).clone() for x in (keys, values)]
    for part, x in zip(want, new, strict=True):
        part[slots] = store_kv.narrowed(x, narrow).view(torch.uint8)
    store_kv.store_kv_8bit(*new, (keys, values), slots)
    nan = torch.full((), float("nan")).to(narrow).view(torch.uint8)
    for got, part in zip((keys, values), want, strict=True):
        assert torch.equal(got.view(torch.uint8), part)
    assert (keys[slots].view(torch.uint8) & 0x7F == nan).sum() == 1
    most = torch.finfo(narrow).max
    assert keys[slots].float().nan_to_num().abs().max() == most
    store_kv.store_kv_8bit(*(x[:0] for x in new), (keys, values), slots[:0])


if __name__ == "__main__":
    assert runtime.interpret, "set TRITON_INTERPRET=1"
    interpreter_pace.install()
    for narrow in store_kv.EIGHT_BITS:
        for dtype in TYPES:
            compare_attention(narrow, dtype)
            compare_segments(narrow, dtype)
            compare_scores(narrow, dtype)
            compare_stores(narrow, dtype)
        compare_copies(narrow)
    print(len(store_kv.EIGHT_BITS) * (4 * len(TYPES) + 1), "comparisons")
