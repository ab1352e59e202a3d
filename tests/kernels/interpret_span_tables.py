"""Run with TRITON_INTERPRET=1: the kernel that writes a step's page tables against its reference."""

import random
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

import interpreter_pace

from fathom.kernels import span_tables

ROWS, LONGEST, PAGES, BLOCK = 5, 3000, 900, 256


def compare(
    spans: int, page_size: int, lengths: list[list[int]], new: list[int], beyond: int, seed: int
) -> None:
    """``lengths`` by span and request; every other table is a private one, another one at each span."""
    draw, requests = random.Random(seed), len(new)
    head = torch.full((spans, 5, requests + 3), 7, dtype=torch.int32)
    for span, counts in enumerate(lengths):
        begin = torch.tensor([1, *(count + beyond for count in counts)]).cumsum(0)[:-1]
        own = min(new[0], min(counts))
        first = own * torch.arange(requests)
        source = [draw.randrange(ROWS) for _ in counts]
        source = [row if (span + i) % 2 else -1 - row for i, row in enumerate(source)]
        prefix = torch.tensor(counts) - own
        for part, numbers in enumerate((begin, counts, prefix, source, first)):
            head[span, part, :requests] = torch.as_tensor(numbers)
    most = 1 + beyond * requests + max(map(sum, lengths))
    blocks = -(-LONGEST // BLOCK)
    tables = (
        torch.randint(PAGES * page_size, (ROWS, LONGEST), dtype=torch.int32),
        torch.randint(PAGES, (spans, PAGES), dtype=torch.int32),
        torch.randperm(spans * ROWS * blocks).view(spans, ROWS, blocks).int(),
        torch.randint(PAGES, (spans * ROWS * blocks, BLOCK), dtype=torch.int32),
    )
    got, want = (
        (torch.full((spans, most), -5, dtype=torch.int32), torch.full((spans, most), -5, dtype=torch.int64))
        for _ in range(2)
    )
    longest = max(map(max, lengths))
    span_tables.span_tables_triton(head, *got, requests, longest, beyond, *tables, page_size)
    span_tables.span_tables_torch(head, *want, requests, beyond, *tables, page_size)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert (got[0][:, 1:] >= 0).any() and (got[0][:, 0] == -5).all()


interpreter_pace.install()
torch.manual_seed(0)
cases = [
    (1, 1, [[1]], [1], 0),
    (3, 1, [[5, 1, 9], [1, 1, 1], [2500, 3, 1024]], [1, 1, 1], 0),
    (2, 4, [[7, 30, 1025, 4, 1], [7, 30, 2049, 4, 1]], [1] * 5, 0),
    (2, 16, [[600, 17], [33, 1030]], [12, 12], 0),
    (2, 4, [[7, 1023, 9], [30, 2040, 4]], [1, 1, 1], 11),
]
for number, case in enumerate(cases):
    compare(*case, seed=number)
print(f"{len(cases)} cases")
