"""Products of few rows on packed and plain weights, the halves of a decoder layer, and layers together."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.decoder_layer_cpu import AfterAttention, BeforeAttention
from fathom.kernels.decoder_layers_cpu import DecoderLayers, Reads
from fathom.kernels.few_rows_linear_cpu import (
    FEW_ROWS,
    NOTHING,
    WIDTHS,
    blocks_of,
    few_rows_linear,
    packed_rows,
)
from fathom.kernels.kv_pair import KvPair
from fathom.kernels.paged_attention_cpu import paged_attention, plan_packed
from fathom.kernels.plain_linear_cpu import plain_blocks
from fathom.kernels.store_kv_cpu import store_kv
from fathom.kernels.two_segment_attention import plan_segments, two_segment_attention

needs_products = pytest.mark.skipif(not has_bfloat16_products(), reason="the processor has no AVX512-BF16")
ways = pytest.mark.parametrize("width", [*(pytest.param(n, marks=needs_products) for n in WIDTHS), None])
"""Outputs that are packed together; None for weights as they are."""

EPS = 1e-5
HIDDEN, INNER, POSITIONS = 96, 192, 50


def pack(weight):
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1024)


def random(*shape, scale=1.0):
    return (torch.randn(shape) * scale).bfloat16()


def lay_out(weight, width):
    """[blocks * inputs / 2, width] int32, a weight in blocks of ``width`` outputs; or plain."""
    if width is None:
        return plain_blocks(weight)
    outputs, inputs = weight.shape
    whole = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % width))
    pairs = whole.view(-1, width, inputs // 2, 2).transpose(1, 2).contiguous()
    return pairs.view(torch.int32).view(-1, width).numpy()


def matrix(outputs, inputs, width):
    """A weight, and its lines."""
    weight = random(outputs, inputs, scale=inputs**-0.5)
    return weight, lay_out(weight, width)


def as_bits(tensor):
    return tensor.view(torch.uint16).numpy()


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 32), (100, 96), (1000, 512), (320, 1088), (8, 64), (96, 4128)]
)
@pytest.mark.parametrize("rows", [1, 3, 4, 9, FEW_ROWS])
@pytest.mark.parametrize("with_bias", [False, True])
@ways
def test_a_product_of_few_rows_is_rounded_once(outputs, inputs, rows, with_bias, width):
    torch.manual_seed(0)
    weight, lines = matrix(outputs, inputs, width)
    if lines is None:
        assert outputs % 32, "outputs fill no blocks"
        return
    x, bias = random(rows, inputs), random(outputs)
    got = few_rows_linear(x, lines, outputs, bias if with_bias else None)
    want = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert got.dtype == torch.bfloat16 and got.shape == (rows, outputs)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5)
    for r in range(rows):
        alone = few_rows_linear(x[r : r + 1], lines, outputs, bias if with_bias else None)
        assert torch.equal(alone[0], got[r]), "a row does not depend on its company"


@needs_products
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 64), (100, 96), (1000, 512)])
def test_onednn_lays_weights_out_as_the_kernels_read_them(outputs, inputs):
    torch.manual_seed(1)
    weight = random(outputs, inputs)
    packed = pack(weight)
    lines = blocks_of(packed, weight)
    assert lines is not None, "in another way on this processor: few rows are multiplied by oneDNN, slowly"
    assert np.array_equal(lines, lay_out(weight, lines.shape[1]))
    ids = torch.tensor([[outputs - 1, 0], [3, outputs // 2]])
    assert torch.equal(packed_rows(ids, lines, outputs), weight[ids])


@needs_products
def test_no_other_layout_is_taken():
    torch.manual_seed(1)
    weight = random(256, 64)
    packed = pack(weight)
    width = blocks_of(packed, weight).shape[1]
    count = 256 // width
    for block in (0, count // 3, count // 2, count - 1):
        other = weight.clone()
        other[block * width + 5, 7] += 1
        assert blocks_of(packed, other) is None, f"block {block}"
    odd = random(64, 48)
    assert blocks_of(pack(odd), odd) is None, "lines are whole runs of pairs"


def test_plain_weights_are_read_where_they_are():
    weight, x = random(128, 64), random(1, 64)
    lines = plain_blocks(weight)
    weight.normal_()
    torch.testing.assert_close(few_rows_linear(x, lines, 128), x @ weight.T, rtol=2**-7, atol=1e-5)
    assert plain_blocks(random(64, 128).T) is None, "rows are not in the order of memory"
    assert plain_blocks(random(64, 48)) is None, "inputs are no whole lines"
    assert plain_blocks(torch.zeros(64, 64, dtype=torch.float16)) is None


class Layer:
    """A decoder layer's parameters, its two halves, and the same in plain PyTorch."""

    def __init__(self, heads, kv_heads, dim, rotary_dim, head_norms, bias, width=None):
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        query, key = heads * dim, kv_heads * dim
        self.norms = [1 + random(HIDDEN, scale=0.2) for _ in range(2)]
        self.head_norms = [1 + random(dim, scale=0.2) for _ in range(2)] if head_norms else []
        self.bias = random(query + 2 * key) if bias else None
        shapes = ((query + 2 * key, HIDDEN), (HIDDEN, query), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        self.matrices = [matrix(*shape, width) for shape in shapes]
        angles = torch.randn(POSITIONS, rotary_dim // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
        projection, output, gate_up, down = (lines for _, lines in self.matrices)
        gains = map(as_bits, self.head_norms) if head_norms else (NOTHING, NOTHING)
        self.before = BeforeAttention(
            as_bits(self.norms[0]),
            EPS,
            projection,
            as_bits(self.bias) if bias else NOTHING,
            *gains,
            as_bits(self.cos_sin),
            dim,
            query,
            key,
            key,
        )
        self.after = AfterAttention(output, as_bits(self.norms[1]), EPS, gate_up, down)

    def weight(self, i):
        return self.matrices[i][0].float()

    def plain_before(self, positions, hidden, residual):
        total = hidden.float() if residual is None else hidden.float() + residual.float()
        projected = rounded(norm(total, self.norms[0])) @ self.weight(0).T
        projected = rounded(projected if self.bias is None else projected + self.bias.float())
        query, key, value = projected.split([n * self.dim for n in (self.heads, *[self.kv_heads] * 2)], -1)
        query, key = (x.reshape(len(x), -1, self.dim) for x in (query, key))
        if self.head_norms:
            query, key = (
                rounded(norm(x, gain)) for x, gain in zip((query, key), self.head_norms, strict=True)
            )
        query, key = (self.turn(x, positions).flatten(1) for x in (query, key))
        return query, key, value, rounded(total)

    def turn(self, x, positions):
        turned = self.cos_sin.shape[1]
        cos, sin = self.cos_sin.float()[positions].unsqueeze(1).chunk(2, -1)
        a, b = x[..., :turned].chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., turned:]], -1)

    def plain_after(self, attended, residual):
        total = rounded(attended.float() @ self.weight(1).T) + residual.float()
        gate, up = rounded(rounded(norm(total, self.norms[1])) @ self.weight(2).T).chunk(2, -1)
        return rounded(torch.nn.functional.silu(gate) * up) @ self.weight(3).T, rounded(total)


def rounded(x):
    return x.bfloat16().float()


def norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain.float()


def assert_near(got, want):
    """Sums that differ in the last bit may be rounded to the other side: within steps of the largest value."""
    assert got.dtype == torch.bfloat16 and got.is_contiguous()
    step = want.abs().max() * 2**-8
    difference = (got.float() - want).abs()
    assert difference.max() <= 3 * step
    assert difference.mean() <= step / 3


LAYERS = {
    "llama": (6, 2, 32, 32, False, False),
    "bias": (4, 4, 16, 16, False, True),
    "head_norms": (4, 1, 64, 64, True, False),
    "half_turned": (3, 3, 32, 16, True, True),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("rows", [1, 3, 4, 9, FEW_ROWS])
@pytest.mark.parametrize("first", [False, True])
@ways
def test_the_halves_of_a_layer_are_what_plain_pytorch_gives(kind, rows, first, width):
    torch.manual_seed(rows)
    layer = Layer(*LAYERS[kind], width)
    hidden, residual = random(rows, HIDDEN), None if first else random(rows, HIDDEN)
    positions = torch.randint(0, POSITIONS, (rows,))
    got = layer.before(positions, hidden, residual)
    for one, want in zip(got, layer.plain_before(positions, hidden, residual), strict=True):
        assert_near(one, want)
    attended = random(rows, layer.heads * layer.dim)
    done = layer.after(attended, got[3])
    for one, want in zip(done, layer.plain_after(attended, got[3]), strict=True):
        assert_near(one, want)
    for r in range(rows):
        own = slice(r, r + 1)
        alone = layer.before(positions[own], hidden[own], None if first else residual[own])
        alone += layer.after(attended[own], got[3][own])
        for one, all_rows in zip(alone, got + done, strict=True):
            assert torch.equal(one[0], all_rows[r]), "a row does not depend on its company"


@pytest.mark.parametrize("position", [-1, POSITIONS])
def test_a_position_without_angles_is_refused(position):
    layer = Layer(*LAYERS["llama"])
    with pytest.raises(IndexError, match=f"0 .. {POSITIONS - 1}"):
        layer.before(torch.tensor([0, position]), random(2, HIDDEN), None)


SLOTS, COMPACT = 300, 40


class Model:
    """A few layers with their KV, and a step of them piece by piece."""

    def __init__(self, kind, count=3, width=None):
        heads, kv_heads, dim, *_ = LAYERS[kind]
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.layers = [Layer(*LAYERS[kind], width) for _ in range(count)]
        # A model's layers share the table of angles.
        for layer in self.layers:
            layer.cos_sin = self.layers[0].cos_sin
            object.__setattr__(layer.before, "cos_sin", self.layers[0].before.cos_sin)
        self.pools = [KvPair(*(random(SLOTS, kv_heads, dim) for _ in range(2))) for _ in range(count)]
        # Compact buffers lie head by head.
        self.compacts = [
            KvPair(*(random(kv_heads, COMPACT, dim).transpose(0, 1) for _ in range(2))) for _ in range(count)
        ]
        self.scale = dim**-0.5
        halves = [(layer.before, layer.after) for layer in self.layers]
        self.together = DecoderLayers(halves, heads, kv_heads, self.scale)

    def copies(self):
        return [KvPair(*(x.clone() for x in pool)) for pool in self.pools]

    def piece_by_piece(self, pools, attend, positions, hidden, writes):
        residual = None
        for i, layer in enumerate(self.layers):
            query, key, value, residual = layer.before(positions, hidden, residual)
            key, value = (x.view(len(x), self.kv_heads, self.dim) for x in (key, value))
            assert store_kv(key, value, pools[i], torch.from_numpy(writes[i]))
            query = query.view(len(query), self.heads, self.dim)
            attended = attend(i, query, pools[i]).flatten(1).bfloat16()
            hidden, residual = layer.after(attended, residual)
        return hidden, residual


def steps(model, rows):
    """What layers read whose tables are read as they are, and with a compact run for every other request; for each
    layer another table and other slots to write. Beside it how a layer attends by itself.
    """
    count = len(model.layers)
    lengths = np.random.default_rng(rows).integers(1, 200, rows)
    entry = np.concatenate([[0], np.cumsum(lengths)])
    writes = [np.roll(np.arange(SLOTS - rows, SLOTS), i) for i in range(count)]
    lines = [
        np.random.default_rng(i).integers(0, SLOTS - rows, entry[-1]).astype(np.int32) for i in range(count)
    ]
    for line, write in zip(lines, writes, strict=True):
        line[entry[1:] - 1] = write
    packed = [torch.from_numpy(line)[None] for line in lines]
    tasks = plan_packed(entry, np.arange(rows + 1), model.kv_heads)

    def plain(i, query, pool):
        return paged_attention(query, pool, packed[i], tasks, model.scale)[0]

    yield Reads(tasks, packed, writes, model.pools, model.pools), plain
    squares = [torch.zeros(rows, lengths.max(), dtype=torch.int32) for _ in range(count)]
    for square, line in zip(squares, lines, strict=True):
        for row, (begin, end) in enumerate(pairwise(entry)):
            square[row, : end - begin] = torch.from_numpy(line[begin:end])
    ends, each = torch.from_numpy(lengths), torch.arange(rows)
    fast = (each % 2).bool()
    begin, held = torch.where(fast, ends - 1, 0), torch.where(fast, COMPACT // 2, 0)
    plan = plan_segments(each, begin, ends, each % 2, held, each * 0 - 1, model.kv_heads)

    def two(i, query, pool):
        return two_segment_attention(query, pool, model.compacts[i], squares[i], plan, model.scale)[0]

    yield Reads(plan.tasks, squares, writes, model.pools, model.compacts), two


def part(reads, which):
    """Some of the layers."""
    columns = (reads.tables, reads.writes, reads.pools, reads.compacts)
    return Reads(reads.tasks, *(column[which] for column in columns))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("rows", [1, 3, 9, FEW_ROWS])
@ways
def test_layers_together_are_the_same_layers_to_the_bit(kind, rows, width):
    torch.manual_seed(rows)
    model = Model(kind, width=width)
    positions, hidden = torch.randint(0, POSITIONS, (rows,)), random(rows, HIDDEN)
    before = model.copies()
    (packed, plain), (two_segments, two) = steps(model, rows)
    mixed = [part(packed, slice(0, 1)), part(two_segments, slice(1, 3))]
    for runs, attend in (
        ([packed], plain),
        ([two_segments], two),
        (mixed, lambda i, *given: (two if i else plain)(i, *given)),
    ):
        for pool, kept in zip(model.pools, before, strict=True):
            for own, old in zip(pool, kept, strict=True):
                own.copy_(old)
        given, pools = hidden.clone(), model.copies()
        want = model.piece_by_piece(pools, attend, positions, hidden, packed.writes)
        got = model.together(positions, hidden, runs)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)
        for pool, other in zip(model.pools, pools, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(pool, other, strict=True))
        assert torch.equal(hidden, given)


def test_what_layers_together_refuse():
    torch.manual_seed(0)
    model = Model("llama")
    (reads, _), _ = steps(model, 1)
    hidden, position = random(1, HIDDEN), torch.tensor([3])
    with pytest.raises(IndexError, match=f"position outside 0 .. {POSITIONS - 1}"):
        model.together(torch.tensor([POSITIONS]), hidden, [reads])
    outside = [*reads.writes[:2], np.array([SLOTS])]
    with pytest.raises(IndexError, match=f"slot outside 0 .. {SLOTS - 1}"):
        model.together(
            position, hidden, [Reads(reads.tasks, reads.tables, outside, model.pools, model.pools)]
        )
    other = [
        *model.pools[:2],
        KvPair(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in model.pools[2])),
    ]
    mixed = Reads(reads.tasks, reads.tables, reads.writes, other, other)
    pools = model.copies()
    assert model.together(position, hidden, [mixed]) is None, "pools of two layouts"
    apart = [part(reads, slice(0, 2)), part(mixed, slice(2, 3))]
    assert model.together(position, hidden, apart) is None, "a later run's slots are no blocks of memory"
    for pool, kept in zip(model.pools, pools, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pool, kept, strict=True)), "nothing was computed"
    wider = Layer(*LAYERS["half_turned"])
    halves = [(layer.before, layer.after) for layer in (model.layers[0], wider)]
    with pytest.raises(ValueError, match="2 forms"):
        DecoderLayers(halves, model.heads, model.kv_heads, model.scale)
