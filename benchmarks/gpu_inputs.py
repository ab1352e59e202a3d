"""Random inputs for a GPU's kernels: what an operation is asked to do, KV in scattered pages, what a call costs.

Everything that a call must not read is NaN or names a slot that holds NaN, and everything that it must write is
poisoned before: a key beyond a request's end, or an entry left out, shows in the values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

ATTENTION_TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of outputs whose weights are rounded to the values' dtype before they are multiplied."""
SCORE_TOLERANCE = 5e-4
"""Of what is computed from exact products in float32: log-sum-exp, logits, norms, scores."""
EXACT = 0.0

Pair = tuple[str, torch.Tensor, torch.Tensor, float]
"""Name, result, what the reference has, and the largest relative error of a row."""


@dataclass(frozen=True)
class Setting:
    """What an operation is asked to do.

    Attributes:
        heads, kv_heads, head_dim, value_dim: of the attention.
        lengths: KV entries of each request.
        dtype, device: of queries and KV.
        seed: of the random inputs.
        kv_dtype: of KV, where it is another one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    seed: int
    kv_dtype: torch.dtype | None = None

    @property
    def held(self) -> torch.dtype:
        """The type of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return self.kv_heads * (self.head_dim + self.value_dim) * self.held.itemsize

    def row_bytes(self, output_bytes: int) -> int:
        """Bytes of one token's query, its output of ``output_bytes`` per number, and its log-sum-exp."""
        return self.heads * (self.head_dim * self.dtype.itemsize + self.value_dim * output_bytes + 4)

    def product_flops(self, pairs: int) -> int:
        """Floating-point operations of attention over so many pairs of a query row and a key."""
        return 2 * pairs * self.heads * (self.head_dim + self.value_dim)

    @property
    def processors(self) -> int:
        """Multiprocessors of the device; 1 where it has none."""
        if self.device.type != "cuda":
            return 1
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def shape(self) -> str:
        """In words, for tables."""
        runs = [(length, len(list(same))) for length, same in itertools.groupby(self.lengths)]
        lengths = " + ".join(f"{count} x {length}" for length, count in runs)
        if len(runs) == self.batch > 1:
            lengths = "/".join(map(str, self.lengths))
        width = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}-{self.value_dim}"
        return f"{lengths}, {self.heads}/{self.kv_heads} heads of {width}"


@dataclass
class Problem:
    """One call of an operation on inputs that are there.

    Attributes:
        call: does it; its results, buffers that are changed in place included. Doing it again changes nothing.
        poison: spoils what the call has to write in place.
        pairs: results beside the reference's; of the last request alone, or a part of it, if the second argument
            says so.
        bytes: fewest that a call moves: each input that it needs is read once, each result written once.
        flops: floating-point operations of its matrix products, 0 where it has none.
    """

    call: Callable[[], Any]
    pairs: Callable[[Any, bool], Iterator[Pair]]
    bytes: int
    flops: int = 0
    poison: Callable[[], Any] = field(default=lambda: None)


class Inputs:
    """Random numbers of one setting, on its device."""

    def __init__(self, s: Setting) -> None:
        self.s, self.there = s, {"device": s.device}
        self.source = torch.Generator(s.device).manual_seed(s.seed)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*size, generator=self.source, dtype=dtype or self.s.dtype, **self.there)

    def held(self, *size: int) -> torch.Tensor:
        """Keys or values."""
        return self.normal(*size).to(self.s.held)

    def heads_of(self, tokens: int, heads: int, dim: int) -> torch.Tensor:
        """[tokens, heads, dim] whose tokens are not contiguous: a slice, as of a QKV projection's output."""
        return self.normal(tokens, heads + 1, dim)[:, :heads]

    def order(self, count: int) -> torch.Tensor:
        """The numbers below ``count`` in random order, int32."""
        return torch.randperm(count, generator=self.source, **self.there).int()

    def below(self, high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=self.source, dtype=torch.int32, **self.there)

    def integers(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, **self.there)

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Filled with NaN."""
        return torch.full(size, float("nan"), dtype=dtype, **self.there)


class Pool:
    """One layer's KV of all requests, in pages dealt in random order.

    Attributes:
        keys, values: [slots, kv_heads, dim] or, in pages, [pages, page, kv_heads, dim]; NaN where no request's
            entry is.
        padded: [batch, width] int32 page table; it names a page of NaN beyond a request's pages.
        table: the same as the engine has it: one flat list, row ``rows[i]`` begins where request i does.
        pages: of each request.
    """

    def __init__(self, inputs: Inputs, page: int = 1) -> None:
        s = inputs.s
        self.pages = [triton.cdiv(length, page) for length in s.lengths]
        count = sum(self.pages)
        order = inputs.order(count + 1)
        own, nowhere = order[:count].split(self.pages), int(order[count])
        buffers = []
        for dim in (s.head_dim, s.value_dim):
            buffer = inputs.normal(count + 1, page, s.kv_heads, dim)
            buffer[nowhere] = float("nan")
            for pages, length in zip(own, s.lengths, strict=True):
                if length % page:
                    buffer[int(pages[-1]), length % page :] = float("nan")
            buffers.append((buffer.squeeze(1) if page == 1 else buffer).to(s.held))
        self.keys, self.values = buffers
        width = max(self.pages) + 1
        self.padded = order.new_full((s.batch, width), nowhere)
        for row, pages in zip(self.padded, own, strict=True):
            row[: len(pages)] = pages
        edge = order.new_full((width + 1,), nowhere)
        flat = torch.cat((edge[:1], order[:count], edge))
        self.table = flat.as_strided((count + 2, width), (1, 1))
        begins = [1 + sum(self.pages[:i]) for i in range(s.batch)]
        self.rows = inputs.integers(begins)

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


def part(s: Setting, last: bool) -> slice:
    """Requests that are compared."""
    return slice(s.batch - 1 if last else 0, s.batch)
