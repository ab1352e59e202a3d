"""Run with TRITON_INTERPRET=1: evidence of bfloat16 keys, kept by the kernel whose warps have keys of their own.

Against the reference in float32, and the kernel of everything else. What must not be read is NaN, and what must not
be written stays as it was.
"""

import sys
from pathlib import Path

import torch
from triton.knobs import runtime

sys.path.append(str(Path(__file__).parents[1]))

import interpreter_bfloat16
import interpreter_pace

from fathom.kernels import key_shares, segments_by_warp
from fathom.kernels import two_segment_attention as two

WIDTH, SLOTS, KEPT = 330, 1600, 3
ROUNDED = 2.0**-8  # of a weight
# Columns as in FIELDS: everything, kept; both segments; both, kept; one key; nothing; packed keys alone.
ROWS = [
    (0, 0, WIDTH, 0, 0, 1),
    (1, 200, 290, 7, 150, -1),
    (2, 5, 70, 100, 63, 2),
    (0, 12, 13, 0, 0, 0),
    (1, 0, 0, 0, 0, -1),
    (2, 40, 40, 30, 129, -1),
]


def problem(heads, kv_heads, dim, value_dim, rows):
    """Query, pool, compact buffers and flat table; keys that differ in size, all else NaN."""
    slots = torch.randperm(SLOTS).int()
    flat = slots[-1:].repeat(3 * WIDTH)
    for row, begin, end, *_ in rows:
        own = slice(row * WIDTH + begin, row * WIDTH + end)
        flat[own] = slots[own]
    unused = torch.ones(SLOTS, dtype=torch.bool)
    unused[flat.long()] = False
    unused[slots[-1].long()] = True
    pool = tuple(torch.randn(SLOTS, kv_heads, d) for d in (dim, value_dim))
    pool[0][::7] *= 30
    pool[0][:, 0, 3] *= 40  # a norm that is that of a few numbers
    compact = tuple(torch.randn(kv_heads, 500, d) for d in (dim, value_dim))
    packed = torch.zeros(500, dtype=torch.bool)
    for _, _, _, start, length, _ in rows:
        packed[start : start + length] = True
    for buffer in pool:
        buffer[unused] = float("nan")
    for buffer in compact:
        buffer[:, ~packed] = float("nan")
    query = torch.randn(len(rows), heads + 2, dim).bfloat16()[:, 1 : heads + 1]
    pool, compact = (tuple(x.bfloat16() for x in pair) for pair in (pool, compact))
    # Rows of the table begin at every entry, as in the engine's flat list.
    table = flat.as_strided((2 * WIDTH + 1, WIDTH), (1, 1))
    rows = [(row * WIDTH, *others) for row, *others in rows]
    plan = two.plan_segments(*map(torch.tensor, zip(*rows, strict=True)), kv_heads)
    return query, pool, tuple(x.transpose(0, 1) for x in compact), table, plan, dim**-0.5


def evidence(heads, kv_heads, pitch=None):
    """As it was before anything is kept; with a pitch in the memory that two more and shorter rows would have."""
    each = WIDTH if pitch is None else KEPT * WIDTH // (KEPT + 2)
    count = KEPT if pitch is None else KEPT + 2
    return two.Evidence(
        torch.full((count, heads, each), 7.0), torch.full((count, kv_heads, each), 7.0), pitch
    )


def compare(heads, kv_heads, dim, value_dim, rows, cuts):
    given = problem(heads, kv_heads, dim, value_dim, rows)
    query, pool, compact, table, plan, scale = given
    want_kept = evidence(heads, kv_heads)
    want, want_lse = two.two_segment_attention_reference(*given, want_kept)
    sizes = [(keys, values.abs()) for keys, values in (pool, compact)]
    spread, _ = two.two_segment_attention_reference(query, *sizes, table, plan, scale)
    for pieces in cuts:
        segments_by_warp.pick_pieces = lambda *_, pieces=pieces: pieces
        kept = evidence(heads, kv_heads)
        got = two.two_segment_attention(*given, kept)
        assert got[0].dtype == got[1].dtype == torch.float32
        assert ((got[0] - want).abs() <= 1e-5 + 2 * ROUNDED * spread).all()
        torch.testing.assert_close(got[1], want_lse, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(kept.logits, want_kept.logits, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(kept.key_norms, want_kept.key_norms, atol=0, rtol=1e-5)
        captured = evidence(heads, kv_heads, torch.tensor([WIDTH], dtype=torch.int32))
        again = two.two_segment_attention(*given, captured)
        assert all(map(torch.equal, again, got))
        for a, b in zip((captured.logits, captured.key_norms), (kept.logits, kept.key_norms), strict=True):
            assert torch.equal(a.flatten()[: b.numel()].view(b.shape), b)
            assert (a.flatten()[b.numel() :] == 7).all()
        output = torch.full_like(got[0], float("nan"), dtype=torch.float16)
        into, lse = two.two_segment_attention(*given, kept, output)
        assert into.data_ptr() == output.data_ptr()
        assert torch.equal(output, got[0].half()) and torch.equal(lse, got[1])
    # The other kernel gives the same to within the rounding of weights, and without evidence always.
    plain = two.two_segment_attention(*given)
    assert ((got[0] - plain[0]).abs() <= 1e-5 + 2 * ROUNDED * spread).all()
    torch.testing.assert_close(got[1], plain[1], atol=2e-4, rtol=1e-5)
    return len(cuts)


def launched(heads, kv_heads, dim, dtype, keeps):
    """Whether such a launch takes the kernel in question."""
    calls = []
    own, segments_by_warp.two_segments_by_warp = (
        segments_by_warp.two_segments_by_warp,
        lambda *given: calls.append(given) or (None, None),
    )
    pool = tuple(torch.zeros(8, kv_heads, dim, dtype=dtype) for _ in range(2))
    kept = two.Evidence(torch.zeros(1, heads, 8), torch.zeros(1, kv_heads, 8)) if keeps else None
    plan = two.SegmentPlan(torch.tensor([[0, 0, 8, 0, 0, 0]]).int(), kv_heads)
    query = torch.zeros(1, heads, dim, dtype=dtype)
    two.two_segment_attention(query, pool, pool, torch.arange(8).int().view(1, 8), plan, 1.0, kept)
    segments_by_warp.two_segments_by_warp = own
    return len(calls) == 1


if __name__ == "__main__":
    assert runtime.interpret, "set TRITON_INTERPRET=1"
    interpreter_pace.install()
    interpreter_bfloat16.install()
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    # The interpreter runs one program after the other.
    key_shares.PIECES_PER_PROCESSOR = 1
    assert launched(4, 2, 64, bf16, True) and launched(8, 1, 128, bf16, True)
    for other in (
        (9, 1, 64, bf16, True),
        (4, 2, 32, bf16, True),
        (4, 2, 64, torch.float16, True),
        (4, 2, 64, torch.float32, True),
        (4, 2, 64, bf16, False),
    ):
        assert not launched(*other), other
    cuts = [7, 1, 40]
    done = compare(8, 2, 128, 128, ROWS, cuts)
    done += compare(7, 1, 64, 128, ROWS, cuts[:2])
    done += compare(16, 2, 64, 64, ROWS, cuts[:1])  # no column is left for the norms
    done += compare(2, 2, 128, 64, ROWS[:2], [1])
    done += compare(4, 2, 64, 64, ROWS[3:], [5, 100])
    print(done, "comparisons")
