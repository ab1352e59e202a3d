"""Run with TRITON_INTERPRET=1: the Triton kernels on pools, tables and evidence of the sizes that GPUs have.

Offsets there are beyond 2**31, and a product of 32-bit numbers would wrap around. Memory that is not touched is not
taken, so what the kernels read lies at the far ends.
"""

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.append(str(Path(__file__).parents[1]))

import interpreter_bfloat16
import interpreter_pace

from fathom.kernels import (
    compact_kv,
    key_shares,
    pack_segment,
    paged_decode,
    paged_extend,
    selector_scores,
    span_tables,
    stable_top_k,
    two_segment_attention,
    window_scores,
    window_scores_triton,
)

NORESERVE = 0x4000
SLOTS, KV_HEADS, HEADS, DIM = 10_000_000, 8, 16, 128
CONTEXT, ROWS, SPANS = 1 << 20, 4096, 8
WRAPS = 1 << 31
CLOSE = {"atol": 2e-3, "rtol": 2e-3}


def far(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until somebody writes to them; of so many that 32 bits do not count them."""
    size = torch.Size(shape).numel()
    assert size > WRAPS, f"{shape} has {size} elements"
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags), dtype=dtype).view(shape)


KV = tuple(far(SLOTS, KV_HEADS, DIM, dtype=torch.float16) for _ in range(2))
TABLE = far(ROWS, CONTEXT, dtype=torch.int32)


def entries(count: int) -> torch.Tensor:
    """[count] int32 slots at the far end of the pool, with keys and values in them."""
    slots = SLOTS - 1 - torch.randperm(count + 9)[:count]
    for buffer in KV:
        buffer[slots] = torch.randn(count, KV_HEADS, DIM).half()
    return slots.int()


def near(slots: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A small pool of what is in these slots, and a table that names it; for the references."""
    found = tuple(buffer[slots.long().flatten()] for buffer in KV)
    return found, torch.arange(slots.numel(), dtype=torch.int32).view(slots.shape)


def close(got, want) -> None:
    for mine, reference in zip(got, want, strict=True):
        torch.testing.assert_close(mine, reference, **CLOSE)


def attention() -> None:
    """Two requests in the last rows of a wide table."""
    lengths, rows = torch.tensor([70, 9], dtype=torch.int32), torch.tensor([ROWS - 2, ROWS - 1]).int()
    table = TABLE[:, -70:]
    table[-2:] = entries(140).view(2, 70)
    small, small_table = near(table[-2:])
    query, own = torch.randn(2, HEADS, DIM).half(), torch.arange(2)
    want = paged_decode.paged_decode_reference(query, *small, small_table, own, lengths, 0.1)
    close(paged_decode.paged_decode(query, *KV, table, rows, lengths, 0.1, 2), want)

    query, new = torch.randn(5, HEADS, DIM).half(), [torch.randn(5, KV_HEADS, DIM).half() for _ in range(2)]
    bounds = torch.tensor([0, 3, 5]).int()
    want = paged_extend.paged_extend_reference(query, *new, *small, small_table, own, lengths, bounds, 0.1)
    close(paged_extend.paged_extend(query, *new, *KV, table, rows, lengths, bounds, 3, 0.1, 2), want)


def scores_of_a_window() -> None:
    slots, query = entries(150).view(1, -1), torch.randn(3, HEADS, DIM).half()
    small, table = near(slots)
    windows = [window_scores.window_of([3], [150], x, False) for x in (slots, table)]
    for mine, reference, shape, options in (
        (
            window_scores_triton.row_mean,
            window_scores.row_mean_scores_reference,
            (1, HEADS, 150),
            (False, 0.1),
        ),
        (window_scores_triton.pooled_max, window_scores.pooled_max_scores_reference, (3, 150), (0.1, 13)),
    ):
        got = torch.zeros(shape)
        mine(query, KV[0], *windows[0].device_arguments(), *options, got)
        torch.testing.assert_close(got, reference(query, small[0], windows[1], 0.1), atol=1e-4, rtol=1e-3)


def copies() -> None:
    """Kept entries to other slots, and a selection into buffers laid out as those of ``runtime/decode.py``."""
    kept, target = entries(3 * KV_HEADS).view(KV_HEADS, 3), (SLOTS // 2 + torch.arange(3)).int()
    compact_kv.compact_kv(*KV, kept, target, disjoint=True)
    for buffer in KV:
        for head, own in enumerate(kept):
            assert torch.equal(buffer[target.long(), head], buffer[own.long(), head])

    tokens = WRAPS // (DIM * (KV_HEADS - 1)) + 100
    buffers = tuple(far(KV_HEADS, tokens, DIM, dtype=torch.float16).transpose(0, 1) for _ in range(2))
    first, start = CONTEXT - 50, torch.tensor([tokens - 9, 0])
    TABLE[-1, first:] = entries(50)
    indices = torch.tensor([first + 3, first + 7, -1]).int().expand(2, KV_HEADS, 3)
    pack_segment.pack_segment(KV, buffers, TABLE, torch.tensor([ROWS - 1, -1]), start, indices, 0)
    for buffer, packed in zip(KV, buffers, strict=True):
        assert torch.equal(packed[tokens - 9 : tokens - 7], buffer[TABLE[-1, [first + 3, first + 7]].long()])
    for dtype, rounded in ((torch.float16, CLOSE["atol"]), (torch.bfloat16, 2e-2)):
        alternate(buffers, tokens - 9, dtype, rounded)


def alternate(
    buffers: tuple[torch.Tensor, torch.Tensor], start: int, dtype: torch.dtype, rounded: float
) -> None:
    """Two packed entries and the last ten of the longest table; logits into the last row of large evidence.

    What is there, read as numbers of this type.
    """
    capacity = WRAPS // (CONTEXT * KV_HEADS) + 1
    evidence = two_segment_attention.Evidence(
        far(capacity, HEADS, CONTEXT, dtype=torch.float32),
        far(capacity, KV_HEADS, CONTEXT, dtype=torch.float32),
    )
    (small, table), query = near(TABLE[-1:, -10:]), torch.randn(1, HEADS, DIM).to(dtype)
    small, pool, buffers = (tuple(x.view(dtype) for x in pair) for pair in (small, KV, buffers))
    packed = tuple(buffer[start : start + 2] for buffer in buffers)
    seen = two_segment_attention.Evidence(torch.zeros(1, HEADS, 10), torch.zeros(1, KV_HEADS, 10))
    plan = two_segment_attention.SegmentPlan(torch.tensor([[0, 0, 10, 0, 2, 0]]).int(), KV_HEADS)
    want = two_segment_attention.two_segment_attention_reference(query, small, packed, table, plan, 0.1, seen)
    fields = [ROWS - 1, CONTEXT - 10, CONTEXT, start, 2, capacity - 1]
    plan = two_segment_attention.SegmentPlan(torch.tensor([fields]).int(), KV_HEADS)
    output, lse = two_segment_attention.two_segment_attention(
        query, pool, buffers, TABLE, plan, 0.1, evidence
    )
    torch.testing.assert_close(output, want[0], atol=rounded, rtol=rounded)
    torch.testing.assert_close(lse, want[1], **CLOSE)
    torch.testing.assert_close(evidence.logits[-1, :, -10:], seen.logits[0], **CLOSE)
    torch.testing.assert_close(evidence.key_norms[-1, :, -10:], seen.key_norms[0], **CLOSE)


def selection() -> None:
    """Of the last request, among the last entries of rows that are as long as many requests' together."""
    heads, few, width = 2, 40, WRAPS // 8
    requests = WRAPS // (heads * width) + 1
    logits, norms = (far(requests, heads, *rows, width, dtype=torch.float32) for rows in ((2,), ()))
    logits[-1, ..., -few:], norms[-1, :, -few:] = torch.randn(heads, 2, few), 1 + torch.rand(heads, few)
    begin, end = torch.zeros(requests, dtype=torch.int64), torch.zeros(requests, dtype=torch.int64)
    begin[-1], end[-1] = width - few, width
    c = SimpleNamespace(
        power=0.5,
        norm_decay=0.5,
        position_decay=0.5,
        position_curve=1.8,
        tail_brake=0.4,
        prior_clip=0.3,
        nms_strength=0.5,
        nms_radius=3,
        cross_head=0.35,
        temperature=2.0,
        epsilon=1e-8,
    )
    own = logits[-1:, ..., -few:], norms[-1:, :, -few:], torch.tensor([0]), torch.tensor([few])
    want = selector_scores.selector_scores_torch(*own, c)
    scores = selector_scores.selector_scores_triton(logits, norms, begin, end, c)
    torch.testing.assert_close(scores[-1:, :, -few:], want, atol=1e-4, rtol=1e-4)

    limits, budget = [x.view(-1, 1) for x in (begin, end)], torch.tensor([[5]])
    (best,) = want.topk(5).indices.sort().values
    for stable_top_k.SAMPLES in (64, 16):  # among all, and among those that are collected
        indices, counts = stable_top_k.stable_top_k(scores, *limits, budget, 5)
        assert torch.equal(indices[-1], (width - few + best).int())
        assert counts.sum() == 5 * heads


def tables_of_a_step() -> None:
    """The last rows of a request table and of its private tables; slots near the largest that 32 bits name."""
    page, length, pages = 16, 40, WRAPS // 16 - 1
    TABLE[-1, :length] = torch.arange(length, dtype=torch.int32) + 5 * page
    backing = torch.zeros(SPANS, 9, dtype=torch.int32)
    backing[:, 5:8] = pages - torch.arange(3 * SPANS, dtype=torch.int32).view(SPANS, 3)
    directory = far(SPANS, ROWS, WRAPS // (SPANS * ROWS) + 1, dtype=torch.int32)
    blocks = far(WRAPS // span_tables.BLOCK + 3, span_tables.BLOCK, dtype=torch.int32)
    directory[-1, -1, 0] = len(blocks) - 1
    blocks[-1, :3] = pages - 99 + torch.arange(3)
    head = torch.zeros(SPANS, 5, 4, dtype=torch.int32)
    head[:, 1, 0], head[:, 2, 0], head[:, 3, 0] = length, length - 2, ROWS - 1
    head[-1, 3, 0] = -ROWS
    tables = TABLE, backing, directory, blocks, page
    slots, write = torch.zeros(SPANS, length, dtype=torch.int32), torch.zeros(SPANS, 4, dtype=torch.int64)
    want = slots.clone(), write.clone()
    span_tables.span_tables_triton(head, slots, write, 1, length, 0, *tables)
    span_tables.span_tables_torch(head, *want, 1, 0, *tables)
    assert torch.equal(slots, want[0]) and torch.equal(write, want[1])
    assert int(slots.min()) > WRAPS - (1 << 16)


interpreter_pace.install()
interpreter_bfloat16.install()
# The interpreter runs one program after the other.
selector_scores.PARTS = selector_scores.REFINERS = stable_top_k.PARTS = 2
key_shares.PIECES_PER_PROCESSOR = 0.5
CASES = attention, scores_of_a_window, copies, selection, tables_of_a_step
torch.manual_seed(0)
for case in CASES:
    case()
print(f"{len(CASES)} cases")
