"""Run with TRITON_INTERPRET=1: attention over a span's page table against its plain references.

No bfloat16: the interpreter's ``dot`` multiplies its bit patterns. float16 takes the same path through the kernels.
"""

import sys
from pathlib import Path

import torch
from triton.knobs import runtime

sys.path.append(str(Path(__file__).parents[1]))

import interpreter_pace

from fathom.kernels.paged_decode import paged_decode, paged_decode_reference
from fathom.kernels.paged_extend import paged_extend, paged_extend_reference

FP32, FP16 = torch.float32, torch.float16
# Output to write to, and error of one rounding of what is stored in it.
TOLERANCE = {FP32: 2e-5, FP16: 2e-3}
SCALE = 0.2


def pool(slots, page, kv_heads, dim, dtype, layers=3, layer=1):
    """One layer's view of a pool of pages in which the layers and K and V interleave; everything else is NaN."""
    pages = -(-slots // page)
    whole = torch.full((pages, layers, 2, page, kv_heads, dim + 8), float("nan"), dtype=dtype)
    return whole[:, layer, 0, :, :, :dim], whole[:, layer, 1, :, :, :dim]


def problem(lengths, heads, kv_heads, dim, dtype, page):
    """Entries of each request in pages dealt in random order; table rows in random order, -1 beyond the length."""
    needed = [-(-length // page) for length in lengths]
    keys, values = pool((sum(needed) + 2) * page, page, kv_heads, dim, dtype)
    order = torch.randperm(len(keys))
    rows = torch.randperm(len(lengths) + 2)[: len(lengths)]
    table = torch.full((len(lengths) + 2, max(*needed, 1) + 1), -1, dtype=torch.int32)
    begin = 0
    for row, length, pages in zip(rows.tolist(), lengths, needed, strict=True):
        own = order[begin : begin + pages]
        table[row, :pages] = own
        for buffer in (keys, values):
            entries = torch.full((pages * page, kv_heads, dim), float("nan"))
            entries[:length] = torch.randn(length, kv_heads, dim)
            buffer[own] = entries.unflatten(0, (pages, page)).to(dtype)
        begin += pages
    if page == 1:
        keys, values = keys.squeeze(1), values.squeeze(1)
    return keys, values[..., : value_dim(dim)], table, rows


def value_dim(dim):
    """Values are narrower than keys in the cases with an odd width."""
    return 12 if dim == 20 else dim


def heads_first(*shape, dtype):
    """Packed [tokens, heads, dim] whose tokens and heads are not contiguous, as a slice of a QKV projection is."""
    tokens, heads, dim = shape
    return torch.randn(tokens, heads + 3, dim).to(dtype)[:, 1 : heads + 1]


def check(got, want, dtype):
    """Equal to the reference, -inf where it is."""
    for mine, reference in zip(got, want, strict=True):
        torch.testing.assert_close(mine.float(), reference, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


DECODE = [
    # lengths, heads, kv_heads, dim, dtype, page
    ([1], 4, 4, 16, FP32, 1),
    ([0, 130, 64, 0, 65], 8, 2, 32, FP32, 1),
    ([3, 0, 200], 9, 3, 20, FP32, 16),
    ([70, 1], 32, 1, 16, FP16, 4),
    ([0], 2, 1, 16, FP16, 1),
    ([300, 17], 4, 2, 64, FP16, 16),
    ([1] * 127 + [200, 0, 64, 130] + [0] * 9 + [1], 2, 1, 16, FP16, 1),  # more than are looked at at a time
]


def compare_decode(lengths, heads, kv_heads, dim, dtype, page):
    keys, values, table, rows = problem(lengths, heads, kv_heads, dim, dtype, page)
    query = heads_first(len(lengths), heads, dim, dtype=dtype)
    arguments = query, keys, values, table, rows, torch.tensor(lengths, dtype=torch.int32), SCALE
    want = paged_decode_reference(*arguments)
    got = paged_decode(*arguments, 3)
    check(got, want, dtype)
    assert got[0].dtype == FP32
    assert got[1].isneginf().any(1).tolist() == [length == 0 for length in lengths]
    into = torch.full((len(lengths), heads + 1, value_dim(dim)), 7.0, dtype=dtype)
    for pieces in (1, 2, 9):
        check(paged_decode(*arguments, pieces, into[:, :heads]), want, dtype)
    assert (into[:, heads] == 7).all()


def compare_tables_per_head():
    """Each KV head has entries of its own: (request, head) is a row, slot * kv_heads + head an entry."""
    heads, kv_heads, dim, lengths = 6, 3, 16, [40, 0, 9, 70, 1, 33]
    keys, values = torch.randn(80, kv_heads, dim), torch.randn(80, kv_heads, dim)
    table = torch.stack([torch.randperm(80)[:70] for _ in lengths])
    query = torch.randn(len(lengths) // kv_heads, heads, dim)
    folded = table * kv_heads + (torch.arange(len(lengths)) % kv_heads).unsqueeze(1)
    rows = torch.arange(len(lengths))
    buffers = (buffer.view(-1, 1, dim) for buffer in (keys, values))
    by_head = query.view(len(lengths), heads // kv_heads, dim)
    counts = torch.tensor(lengths, dtype=torch.int32)
    output, _ = paged_decode(by_head, *buffers, folded.int(), rows, counts, SCALE, 2)
    for row, length in enumerate(lengths):
        at, kv_head = table[row, :length], row % kv_heads
        weights = (by_head[row] @ keys[at, kv_head].T * SCALE).softmax(-1)
        torch.testing.assert_close(output[row], weights @ values[at, kv_head], atol=2e-5, rtol=2e-5)


EXTEND = [
    # prefixes, new tokens, heads, kv_heads, dim, dtype, page, splits
    ([0], [1], 4, 4, 16, FP32, 1, 1),
    ([0, 70, 5], [40, 1, 33], 4, 2, 32, FP32, 1, 1),
    ([150, 0, 33], [3, 5, 1], 9, 3, 20, FP32, 16, 3),
    ([10, 0, 40], [0, 70, 5], 8, 2, 16, FP16, 4, 1),
    ([130], [8], 32, 8, 32, FP16, 16, 2),
]


def compare_extend(prefixes, new, heads, kv_heads, dim, dtype, page, splits):
    keys, values, table, rows = problem(prefixes, heads, kv_heads, dim, dtype, page)
    tokens = sum(new)
    query = heads_first(tokens, heads, dim, dtype=dtype)
    own = [heads_first(tokens, kv_heads, width, dtype=dtype) for width in (dim, value_dim(dim))]
    bounds = torch.tensor([0, *new]).cumsum(0).int()
    prefix = torch.tensor(prefixes, dtype=torch.int32)
    arguments = query, *own, keys, values, table, rows, prefix, bounds
    want = paged_extend_reference(*arguments, SCALE)
    check(paged_extend(*arguments, max(new), SCALE, splits), want, dtype)
    into = torch.empty(tokens, heads, value_dim(dim), dtype=dtype)
    got, _ = paged_extend(*arguments, max(new) + 9, SCALE, splits, into)
    check((into,), want[:1], dtype)
    assert got is into
    # As in a captured step: requests without a row behind the others, and tiles for fewer tokens than some have.
    padded = torch.nn.functional.pad(prefix, (0, 2)), torch.cat([bounds, bounds[-1:].expand(2)])
    given = *arguments[:6], torch.nn.functional.pad(rows, (0, 2)), *padded
    check(paged_extend(*given, max(new) + 9, SCALE, splits, usual_new=2), want, dtype)
    for window in (0, 9, 40):
        reach = torch.cat([within(window, prefix, own) for prefix, own in zip(prefixes, new, strict=True)])
        want = paged_extend_reference(*arguments, SCALE, reach)
        check(paged_extend(*given, max(new) + 9, SCALE, splits, usual_new=2, reach=reach.int()), want, dtype)
        check(paged_extend(*arguments, max(new), SCALE, splits, reach=reach.int()), want, dtype)


def within(window, prefix, new):
    """[new] of tokens at positions with gaps: how many before it each has among those of so many positions."""
    position = torch.randint(1, 4, (prefix + new,)).cumsum(0)
    seen = position >= position[prefix:].unsqueeze(1) - window
    return (seen & (position < position[prefix:].unsqueeze(1))).sum(1)


if __name__ == "__main__":
    assert runtime.interpret, "set TRITON_INTERPRET=1"
    interpreter_pace.install()
    torch.manual_seed(0)
    for case in DECODE:
        compare_decode(*case)
    compare_tables_per_head()
    for case in EXTEND:
        compare_extend(*case)
    sys.stdout.write(f"{len(DECODE)} decode and {len(EXTEND)} extend cases\n")
