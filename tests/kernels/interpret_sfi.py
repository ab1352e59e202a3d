"""Run with TRITON_INTERPRET=1: SFI's Triton kernels against the plain paths.

No bfloat16: the interpreter's ``dot`` multiplies its bit patterns. float16 takes the same path through the kernels.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from triton.knobs import runtime

sys.path.append(str(Path(__file__).parents[1]))

import interpreter_pace
import interpreter_scans

from fathom.kernels import (
    key_shares,
    pack_segment,
    selector_scores,
    stable_top_k,
    two_segment_attention,
)

PARAMETERS = SimpleNamespace(
    power=0.5,
    norm_decay=0.5,
    position_decay=0.568,
    position_curve=1.8,
    tail_brake=0.4,
    prior_clip=0.3,
    nms_strength=0.5,
    nms_radius=5,
    cross_head=0.35,
    temperature=2.0,
    epsilon=1e-8,
)
OTHERS = SimpleNamespace(
    **{**vars(PARAMETERS), "power": 0.8, "norm_decay": 0, "tail_brake": 0, "nms_radius": 0, "cross_head": 1.0}
)


def compare_scores(kv_heads: int, rows: int, n: int, begin: list[int], end: list[int], c) -> int:
    logits = torch.randn(len(begin), kv_heads, rows, n) * 4
    norms = torch.rand(len(begin), kv_heads, n) + 0.5
    first, last = torch.tensor(begin), torch.tensor(end)
    index = torch.arange(n)
    outside = (index < first[:, None]) | (index >= last[:, None])
    logits.masked_fill_(outside[:, None, None], float("nan"))  # never written
    norms.masked_fill_(outside[:, None], float("nan"))
    own = ~outside[:, None].expand(norms.shape)
    want = selector_scores.selector_scores_torch(logits, norms, first, last, c)[own]
    got = selector_scores.selector_scores_triton(logits, norms, first, last, c)[own]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    # The same memory as that of a captured step: for more requests that are shorter.
    more = torch.tensor([*begin, 0, 0]), torch.tensor([*end, 0, 0])
    per = -(-len(begin) * n // (len(begin) + 2))
    logits, norms = (padded(x, (len(begin) + 2, *x.shape[1:-1], per)) for x in (logits, norms))
    pitch = torch.tensor([n], dtype=torch.int32)
    scores = selector_scores.selector_scores_triton(logits, norms, *more, c, pitch)
    assert torch.equal(scores.flatten()[: own.numel()].view(own.shape)[own], got)
    # Its best, from there: those of the whole tensor.
    budget = torch.tensor([[min(40, n)], *[[7]] * (len(begin) + 1)])
    lows, highs = (x.unsqueeze(-1) for x in more)
    chosen, _ = stable_top_k.stable_top_k(scores, lows, highs, budget, 50, pitch)
    whole = scores.flatten()[: own.numel()].view(own.shape)
    few = [x[: len(begin)] for x in (lows, highs, budget)]
    assert torch.equal(chosen[: len(begin)], stable_top_k.stable_top_k(whole, *few, 50)[0])
    return 1


def compare_radius(radius: int) -> int:
    c = SimpleNamespace(**{**vars(PARAMETERS), "nms_radius": radius})
    logits, norms = torch.randn(2, 2, 1, 700) * 4, torch.rand(2, 2, 700) + 0.5
    # Of 123 candidates the last is at 122 / 122 of the way, which is 1; 122 times the rounded 1 / 122 is less.
    given = logits, norms, torch.tensor([1, 7]), torch.tensor([700, 130]), c
    want, got = selector_scores.selector_scores_torch(*given), selector_scores.selector_scores_triton(*given)
    torch.testing.assert_close(got[0, :, 1:], want[0, :, 1:], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(got[1, :, 7:130], want[1, :, 7:130], atol=1e-4, rtol=1e-5)
    return 1


def padded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The same memory, and a little more, in another shape."""
    found = torch.full(shape, float("nan"))
    found.view(-1)[: x.numel()] = x.flatten()
    return found


def compare_top_k(n: int) -> int:
    """Scores that differ in any of their bits, some of them the same."""
    scores = torch.randn(3, 2, n) * 10.0 ** torch.randint(-3, 4, (3, 2, n))
    scores = torch.where(torch.rand(scores.shape) < 0.3, scores.round(), scores)
    scores[0, 0, ::3] *= -0.0
    scores[1, :, ::5] = float("-inf")
    begin = torch.randint(0, n + 1, (3, 1))
    end, budget = torch.maximum(begin, torch.randint(0, n + 1, (3, 1))), torch.randint(0, n + 3, (3, 2))
    end[0], begin[0] = n, 0
    width = int(budget.max())
    return same_top_k(scores, begin, end, budget, width)


def same_top_k(scores: torch.Tensor, begin, end, budget, width: int) -> int:
    indices, counts = stable_top_k.stable_top_k(scores, begin, end, budget, width)
    want = stable_top_k.stable_top_k_reference(scores, begin, end, budget)
    rows = zip(indices.flatten(0, -2), counts.flatten(), strict=True)
    assert [row[:count].tolist() for row, count in rows] == want
    assert (indices[torch.arange(width) >= counts.unsqueeze(-1)] == -1).all()
    return 1


class Taken:
    """The launch that takes; remembers how many scores had reached each row's cut, and the room for them.

    Only those of some rows are still there.
    """

    def __init__(self, kernel, rows: list[int]):
        self.kernel, self.rows = kernel, rows

    def __getitem__(self, grid):
        def launch(scores, *given, **constants):
            *_, self.room, self.found = given[4].T.tolist()
            left = torch.full_like(scores, float("nan"))
            left[self.rows] = scores[self.rows]
            return self.kernel[grid](left, *given, **constants)

        return launch


def compare_collected(n: int, k: int, few: list[int]) -> int:
    """Rows of which a part is collected, and two whose samples mislead; ``few``: where it is too little."""
    found = torch.randn(14, n, generator=torch.Generator().manual_seed(0))
    index, some = torch.arange(n), torch.arange(stable_top_k.SAMPLES)
    begin, end = torch.full((14,), 3), torch.full((14,), n - 2)
    tile = stable_top_k.TILE
    begin[1], end[1] = 0, n
    # From and to where the memory's fours do not begin: one word of 31, and one tile more than the candidates fill.
    end[4] = (n - 8) // 32 * 32 - 1
    begin[6] = 3 + -6 * n % 4
    end[6] = begin[6] + (n - 8) // tile * tile
    sampled = 3 + stable_top_k._sampled.fn(some, n - 5, stable_top_k.SAMPLES)
    assert (((sampled - 3) * len(some) // (n - 5) - some).abs() <= 1).all()
    assert (sampled.diff() > 0).all() and sampled[-1] < n - 2
    found[2] = (found[2] > 0.5).float()
    found[3] = torch.where(found[3] > 0, 0.0, -0.0)
    found[4] = torch.where(index % 9 == 0, -1.0, float("-inf"))
    found[5] = float("inf")
    found[6], found[7] = index, -index
    found[8, n // 2 : n // 2 + k + 9] += 10  # in one tile or two
    found[9] += 10 * ((index + 1) % tile < 2)  # the last and the first of each tile
    found[10, 10:13] = torch.tensor([float("inf"), 3e38, -3e38])
    found[10, 20] = float("-inf")
    found[11, sampled] = 9.0  # what so many samples reach, no other score does
    found[12] = 1 + (index % 7) / 7
    found[12, sampled] = 0.0  # all others reach it
    found[13] = found[13].abs() * 1e-42
    within = (index >= begin[:, None]) & (index < end[:, None])
    found = torch.where(within, found, float("inf"))
    found[0, :3] = float("nan")
    budget = torch.full((14,), k)
    budget[0] = k // 2
    stable_top_k._take_kernel = taken = Taken(kernel := stable_top_k._take_kernel, [*few, 12])
    done = same_top_k(found, begin, end, budget, k)
    capacity = 2 * k + stable_top_k.SAMPLES + 7
    assert [row for row in range(14) if taken.found[row] < budget[row]] == few, taken.found
    assert [row for row in range(14) if taken.room[row] > capacity] == [12], taken.room
    stable_top_k._take_kernel = kernel
    # As memory whose first number is not at a multiple of 16 bytes.
    apart = torch.empty(found.numel() + 1)[1:].view(found.shape).copy_(found)
    return done + same_top_k(apart[:3], begin[:3], end[:3], budget[:3], k)


def compare_attention(
    heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, copies: int = 1
) -> int:
    """Four requests, so many times; the more there are, the fewer and larger the shares of their keys."""
    slots, width = 700, 300
    pool = torch.randn(slots, kv_heads, dim).to(dtype), torch.randn(slots, kv_heads, value_dim).to(dtype)
    # Each head's tokens lie together, as in a server's compact buffers.
    compact = tuple(torch.randn(kv_heads, 200, d).to(dtype).transpose(0, 1) for d in (dim, value_dim))
    table = torch.stack([torch.randperm(slots)[:width] for _ in range(4)]).int()
    # As a part of a projection that holds keys and values too.
    query = torch.randn(4 * copies, heads + 2, dim).to(dtype)[:, 1 : heads + 1]
    columns = [
        [3, 1, 0, 2],
        [0, 200, 5, 0],
        [300, 290, 70, 1],
        [0, 7, 100, 0],
        [0, 150, 64, 0],
        [1, -1, -1, 0],
    ]
    columns = [column * copies for column in columns]
    columns[-1][4:] = [-1] * (len(columns[-1]) - 4)
    plan = two_segment_attention.plan_segments(*map(torch.tensor, columns), kv_heads)
    results = []
    for function in (
        two_segment_attention.two_segment_attention_reference,
        two_segment_attention.two_segment_attention_triton,
    ):
        kept = two_segment_attention.Evidence(
            torch.full((2, heads, width), 7.0), torch.full((2, kv_heads, width), 7.0)
        )
        results.append((*function(query, pool, compact, table, plan, 0.3, kept), kept.logits, kept.key_norms))
        alone = function(query, pool, compact, table, plan, 0.3)
        torch.testing.assert_close(alone, results[-1][:2])
    # In the memory that five shorter rows would have.
    flat = two_segment_attention.Evidence(
        torch.full((5, heads, 2 * width // 5), 7.0),
        torch.full((5, kv_heads, 2 * width // 5), 7.0),
        torch.tensor([width], dtype=torch.int32),
    )
    again = two_segment_attention.two_segment_attention_triton(query, pool, compact, table, plan, 0.3, flat)
    of_one_shape = (flat.logits.view_as(kept.logits), flat.key_norms.view_as(kept.key_norms))
    assert all(map(torch.equal, (*again, *of_one_shape), results[1]))
    output = torch.full_like(again[0], float("nan"), dtype=torch.float16)
    triton = two_segment_attention.two_segment_attention_triton
    into, lse = triton(query, pool, compact, table, plan, 0.3, None, output)
    assert into.data_ptr() == output.data_ptr()
    assert torch.equal(output, again[0].half()) and torch.equal(lse, again[1])
    tolerance = 1e-4 if dtype == torch.float32 else 5e-3  # weights are rounded to the values' dtype
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    return 1


def compare_packing(dim: int, value_dim: int, sink: int) -> int:
    pool = torch.randn(60, 3, dim), torch.randn(60, 3, value_dim)
    table = torch.stack([torch.randperm(60)[:40] for _ in range(3)]).int()
    indices = torch.stack(
        [torch.stack([torch.randperm(36)[:21].sort().values + 4 for _ in range(3)]) for _ in range(3)]
    )
    indices[1, :, 9:] = -1
    indices = indices.int()
    rows, start = torch.tensor([2, 0, -1]), torch.tensor([30, 0, 0])
    got, want = ([torch.zeros(3, 60, d).transpose(0, 1) for d in (dim, value_dim)] for _ in range(2))
    pack_segment.pack_segment_torch(pool, tuple(want), table, rows, start, indices, sink)
    pack_segment.pack_segment_triton(pool, tuple(got), table, rows, start, indices, sink)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    return 1


if __name__ == "__main__":
    assert runtime.interpret, "set TRITON_INTERPRET=1"
    torch.manual_seed(0)
    interpreter_pace.install()
    # As a GPU is given it.
    done = compare_collected(9000, 300, [])
    # The interpreter runs one program after the other.
    key_shares.PIECES_PER_PROCESSOR = 1
    stable_top_k.SAMPLES, stable_top_k.TILE, stable_top_k.PARTS, stable_top_k.GROUP = 256, 256, 3, 8
    stable_top_k.HELD, stable_top_k.BLOCK = 512, 256
    selector_scores.PARTS, selector_scores.REFINERS = 4, 3
    # By elements once: this is what a GPU is given.
    done += compare_scores(2, 1, 40, [3], [37], PARAMETERS)
    interpreter_scans.install()
    done += compare_scores(2, 3, 600, [4, 4, 0, 9], [600, 90, 0, 10], PARAMETERS)
    done += compare_scores(3, 1, 200, [0], [200], PARAMETERS)
    done += compare_scores(1, 20, 150, [5], [149], OTHERS)
    # Radii that are powers of two, between them, and beyond the longest run of a running maximum.
    done += sum(map(compare_radius, (1, 2, 3, 16, 24, 150)))
    done += compare_attention(4, 2, 16, 16, torch.float32)
    done += compare_attention(6, 2, 24, 40, torch.float16)
    done += compare_attention(8, 4, 16, 16, torch.float32, copies=2)
    done += compare_attention(8, 8, 16, 16, torch.float32)
    done += compare_packing(16, 16, 4) + compare_packing(20, 8, 0)
    done += sum(map(compare_top_k, (1, 700, 1000, 5000))) + compare_collected(3001, 100, [11])
    print(done, "comparisons")
