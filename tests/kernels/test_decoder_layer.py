"""Products of few rows on packed weights, and the halves of a decoder layer, against plain PyTorch."""

import pytest
import torch

from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.decoder_layer_cpu import AfterAttention, BeforeAttention
from fathom.kernels.packed_linear_cpu import FEW_ROWS, NOTHING, blocks_of, packed_linear

pytestmark = pytest.mark.skipif(not has_bfloat16_products(), reason="the processor has no AVX512-BF16")

EPS = 1e-5
HIDDEN, INNER, POSITIONS = 96, 192, 50


def pack(weight):
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1024)


def random(*shape, scale=1.0):
    return (torch.randn(shape) * scale).bfloat16()


def matrix(outputs, inputs):
    """A weight, and its packed lines with what keeps them alive."""
    weight = random(outputs, inputs, scale=inputs**-0.5)
    packed = pack(weight)
    lines = blocks_of(packed, weight)
    assert lines is not None, "oneDNN lays weights out as the kernels expect"
    return weight, packed, lines


def as_bits(tensor):
    return tensor.view(torch.uint16).numpy()


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (100, 96), (1000, 512), (320, 1088), (8, 64)])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, FEW_ROWS])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_is_rounded_once(outputs, inputs, rows, with_bias):
    torch.manual_seed(0)
    weight, _packed, lines = matrix(outputs, inputs)
    x, bias = random(rows, inputs), random(outputs)
    got = packed_linear(x, lines, outputs, bias if with_bias else None)
    want = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert got.dtype == torch.bfloat16 and got.shape == (rows, outputs)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5)
    for r in range(rows):
        alone = packed_linear(x[r : r + 1], lines, outputs, bias if with_bias else None)
        assert torch.equal(alone[0], got[r]), "a row does not depend on its company"


def test_only_the_layout_that_the_kernel_reads_is_taken():
    torch.manual_seed(1)
    weight, packed, _lines = matrix(256, 64)
    for block in range(4):
        other = weight.clone()
        other[block * 64 + 5, 7] += 1
        assert blocks_of(packed, other) is None, f"block {block}"
    odd = random(64, 48)
    assert blocks_of(pack(odd), odd) is None, "lines are whole runs of pairs"


class Layer:
    """A decoder layer's parameters, its two halves, and the same in plain PyTorch."""

    def __init__(self, heads, kv_heads, dim, rotary_dim, head_norms, bias):
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        query, key = heads * dim, kv_heads * dim
        self.norms = [1 + random(HIDDEN, scale=0.2) for _ in range(2)]
        self.head_norms = [1 + random(dim, scale=0.2) for _ in range(2)] if head_norms else []
        self.bias = random(query + 2 * key) if bias else None
        shapes = ((query + 2 * key, HIDDEN), (HIDDEN, query), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        self.matrices = [matrix(*shape) for shape in shapes]
        angles = torch.randn(POSITIONS, rotary_dim // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
        projection, output, gate_up, down = (lines for _, _, lines in self.matrices)
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
def test_the_halves_of_a_layer_are_what_plain_pytorch_gives(kind, rows, first):
    torch.manual_seed(rows)
    layer = Layer(*LAYERS[kind])
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
