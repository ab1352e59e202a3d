"""Which program of a launch attends to which keys, and the merge of what the programs of a row have found.

Decode: the keys of all requests are cut into about as many pieces as a GPU runs programs at a time, all of one
length, so a long request among short ones has more of them. Requests come one after another, and each ends with a
piece of its own, which may be shorter: there is a program for each piece and one more for each request. Lengths are
read on the device and the grid follows from shapes: a launch captured in a CUDA graph can be replayed with others.
In prefill each request's prefix is shared by a fixed number of programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.triton_aot import Specialization, signature

PIECES_PER_PROCESSOR = 4
"""Of a decode launch, for each multiprocessor. Of 2, 4 and 6 the best on an H100."""
PARTS_PER_BLOCK = 16
"""What a merge reads at a time."""
LANES: tl.constexpr = tl.constexpr(32)
"""Requests that are looked at together, one to a lane: each warp then has them all, and none waits for another."""


@triton.jit
def _keys(numbers, i, there, FIELDS: tl.constexpr):
    """Keys of requests: their lengths, or of a descriptor's FIELDS those of both segments (``SegmentPlan``)."""
    if FIELDS == 1:
        return tl.load(numbers + i, mask=there, other=0)
    at = numbers + i * FIELDS
    begin, end = tl.load(at + 1, mask=there, other=0), tl.load(at + 2, mask=there, other=0)
    return tl.load(at + 4, mask=there, other=0) + end - begin


@triton.jit
def _pieces_before(numbers, request, share, FIELDS: tl.constexpr):
    """Pieces of all requests before one."""
    before = tl.zeros((), tl.int32)
    for start in range(0, request, LANES):
        i = start + tl.arange(0, LANES)
        before += tl.sum(tl.cdiv(_keys(numbers, i, i < request, FIELDS), share), 0)
    return before


@triton.jit
def own_piece(numbers, batch, pieces, where, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """The piece of this program (KV head, number), of which there are (KV heads, pieces + batch).

    Writes to ``where`` [batch, 2] the number of each request's first program, and how many it has.

    Returns:
        the request, ``batch`` for a program without one; its first key, and the end of its keys.
    """
    number = tl.program_id(1)
    everyone = tl.zeros((), tl.int64)
    for start in range(0, batch, LANES):
        i = start + tl.arange(0, LANES)
        everyone += tl.sum(_keys(numbers, i, i < batch, FIELDS).to(tl.int64), 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(everyone, pieces), BLOCK) * BLOCK, BLOCK).to(tl.int32)
    if (tl.program_id(0) == 0) & (number < batch):
        count = _keys(numbers, number, number < batch, FIELDS)
        tl.store(where + 2 * number, _pieces_before(numbers, number, share, FIELDS))
        tl.store(where + 2 * number + 1, tl.cdiv(count, share))
    request, first, before = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, batch, LANES):
        i = start + tl.arange(0, LANES)
        own = tl.cdiv(_keys(numbers, i, i < batch, FIELDS), share)
        ends = before + tl.cumsum(own, 0)
        past = (ends <= number) & (i < batch)
        request += tl.sum(past.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(past, ends, 0), 0))
        before += tl.sum(own, 0)
    begin = (number - first) * share
    end = tl.minimum(begin + share, _keys(numbers, request, request < batch, FIELDS))
    return request, begin, end


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial, partial_lse, where, output, lse, o_stride_row, o_stride_head, splits,
    WINDOW: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIM_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, head): merges the parts of a row.

    With WINDOW rows of each request the parts are [programs, WINDOW, heads, value_dim], of which ``where`` says the
    request's; with 0 they are [rows, heads, splits, value_dim].
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    if WINDOW > 0:
        first, parts = tl.load(where + row // WINDOW * 2), tl.load(where + row // WINDOW * 2 + 1)
        begin = (first.to(tl.int64) * WINDOW + row % WINDOW) * heads + head
        step = WINDOW * heads
    else:
        begin, parts, step = (row * heads + head) * splits, splits, 1
    e = tl.arange(0, VALUE_DIM_P)
    top, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    merged = tl.zeros([VALUE_DIM_P], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        at, there = begin + part * step, part < parts
        part_lse = tl.load(partial_lse + at, mask=there, other=float("-inf"))
        mask = there[:, None] & (e < VALUE_DIM)[None, :]
        found = tl.load(partial + at[:, None] * VALUE_DIM + e[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, rescale = tl.exp(part_lse - finite), tl.exp(top - finite)
        total = total * rescale + tl.sum(weights, 0)
        merged = merged * rescale + tl.sum(found * weights[:, None], 0)
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    place = row * o_stride_row + head * o_stride_head + e
    tl.store(output + place, (merged / divisor).to(output.dtype.element_ty), mask=e < VALUE_DIM)
    tl.store(lse + row * heads + head, top + tl.log(divisor))


def _merge_constants(window: int, value_dim: int) -> dict[str, int]:
    padded = max(triton.next_power_of_2(value_dim), 16)
    return {"WINDOW": window, "VALUE_DIM": value_dim, "VALUE_DIM_P": padded, "BLOCK": PARTS_PER_BLOCK}


def _merge(
    parts: tuple[torch.Tensor, ...], output: torch.Tensor, splits: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, value_dim = output.shape
    lse = torch.empty(rows, heads, device=output.device)
    constants = _merge_constants(window, value_dim)
    _merge_kernel[(rows, heads)](*parts, output, lse, *output.stride()[:2], splits, **constants)
    return output, lse


def pick_pieces(kv_heads: int, processors: int, each: float | None = None) -> int:
    """Pieces that the keys of all requests are cut into, for each KV head of a decode launch.

    Args:
        each: programs for each multiprocessor, :data:`PIECES_PER_PROCESSOR` by default. One request alone never has
            more: they would wait until others have ended.
    """
    return max(int((each or PIECES_PER_PROCESSOR) * processors) // kv_heads, 1)


class Dealt:
    """Where the programs of a decode launch write.

    Args:
        query: [rows, heads, head_dim], as many rows of each request.
        output: [rows, heads, value_dim] to write to, last dimension contiguous; by default new, float32.

    Attributes:
        programs: for each KV head.
        partial: [programs · window, heads, value_dim] float32, what each program found; lse: its natural
            log-sum-exp.
        where: [batch, 2] int32, written by :func:`own_piece`.
    """

    def __init__(
        self, query: torch.Tensor, value_dim: int, batch: int, pieces: int, output: torch.Tensor | None = None
    ) -> None:
        rows, heads, _ = query.shape
        scratch: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
        self.programs, self.window = pieces + batch, rows // max(batch, 1)
        self.output = torch.empty(rows, heads, value_dim, **scratch) if output is None else output
        self.partial = torch.empty(self.programs * self.window, heads, value_dim, **scratch)
        self.lse = torch.empty(self.programs * self.window, heads, **scratch)
        self.where = torch.empty(batch, 2, dtype=torch.int32, device=query.device)

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp [rows, heads]: 0 and -inf for a request without keys."""
        return _merge((self.partial, self.lse, self.where), self.output, 0, self.window)


class Split:
    """Where a kernel with a fixed number of splits writes: straight to the output if there is one, else to scratch.

    Attributes:
        first, first_lse: what the kernel writes: output, and natural log-sum-exp [rows, heads, splits].
        strides: of ``first``, for row, head and split.
    """

    def __init__(self, query: torch.Tensor, value_dim: int, splits: int, output: torch.Tensor | None) -> None:
        rows, heads, _ = query.shape
        scratch: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
        self.output = torch.empty(rows, heads, value_dim, **scratch) if output is None else output
        self.first_lse = torch.empty(rows, heads, splits, **scratch)
        self.splits = splits
        if splits == 1:
            self.first = self.output
            self.strides = (*self.output.stride()[:2], 0)
        else:
            self.first = torch.empty(rows, heads, splits, value_dim, **scratch)
            self.strides = self.first.stride()[:3]

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp [rows, heads] over all splits."""
        if self.splits == 1:
            return self.output, self.first_lse.squeeze(2)
        return _merge((self.first, self.first_lse, self.first_lse), self.output, self.splits, 0)


def specializations() -> list[Specialization]:
    """What to compile ahead of time."""
    types = dict.fromkeys(("partial", "partial_lse", "lse"), "*fp32") | {"output": "*bf16"}
    found = []
    for window, dim in ((0, 128), (0, 256), (1, 128), (1, 256), (16, 128)):
        constants = _merge_constants(window, dim)
        where = {"where": "*i32" if window else "*fp32"}
        label = f"merge, values of {dim}" + (f", {window} rows of a request" if window else "")
        own = signature(_merge_kernel, types | where, constants)
        found.append(Specialization(label, _merge_kernel, own, constants, {}))
    return found
