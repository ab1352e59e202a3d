"""Products of matrices of bfloat16 numbers, by vectors and by AMX's tiles, against float64."""

import importlib

import numpy as np
import pytest
import torch
from numba import njit

from fathom.kernels.amx_cpu import has_amx, store_tiles
from fathom.kernels.bfloat16_cpu import has_bfloat16_products, turn_sixteen

pytestmark = pytest.mark.skipif(not has_bfloat16_products(), reason="the processor has no AVX512-BF16")
needs_amx = pytest.mark.skipif(not has_amx(), reason="the processor has no AMX")


@pytest.fixture(scope="module", params=["bfloat16_cpu", pytest.param("amx_cpu", marks=needs_amx)])
def multiplied(request):
    """``sums[1:][:rows] = left[2:][:rows] @ right`` or ``+=`` if that is to be added, between begin and end."""
    module = importlib.import_module(f"fathom.kernels.{request.param}")
    begin, end, product, add_product = (
        module.begin_products,
        module.end_products,
        module.product,
        module.add_product,
    )

    @njit
    def run(sums, left, rows, right, add):
        others = begin()
        if add:
            add_product(sums, 1, left, 2, rows, right)
        else:
            product(sums, 1, left, 2, rows, right)
        end(others)

    return run


@pytest.mark.parametrize(
    ("rows", "inputs", "columns"), [(16, 32, 32), (32, 64, 64), (48, 96, 96), (80, 256, 160)]
)
@pytest.mark.parametrize("apart", [0, 16])
def test_products_of_matrices(multiplied, rows, inputs, columns, apart):
    torch.manual_seed(rows)
    left, right = torch.randn(rows, inputs).bfloat16(), torch.randn(inputs, columns).bfloat16()
    pairs = right.view(inputs // 2, 2, columns).transpose(1, 2).contiguous().view(torch.int32)
    # Parts of wider and longer arrays, as attention has them.
    wide = torch.full((rows + 2, inputs + 2 * apart), torch.nan, dtype=torch.bfloat16)
    wide[2:, :inputs] = left
    given, right_pairs = wide.view(torch.int32).numpy()[:, : inputs // 2], pairs.squeeze(-1).numpy()
    memory = np.full((rows + 2, columns + apart), np.nan, np.float32)
    sums = memory[1:-1, :columns]
    want = left.double() @ right.double()
    bound = 1e-5 * (left.double().abs() @ right.double().abs())
    for times, add in enumerate((False, True, True), start=1):
        multiplied(memory[:, :columns], given, rows, right_pairs, add)
        assert (np.abs(sums - times * want.numpy()) <= times * bound.numpy()).all()
    assert np.isnan(memory[[0, -1]]).all() and np.isnan(memory[:, columns:]).all(), "nothing else is written"
    alone = np.empty((17, columns), np.float32)
    multiplied(alone, given[-18:], 16, right_pairs, False)
    multiplied(memory[:, :columns], given, rows, right_pairs, False)
    assert np.array_equal(alone[1:], sums[-16:]), "a row does not depend on its company"


@pytest.mark.parametrize("at", [0, 16, 48])
def test_lines_are_turned(at):
    generator = np.random.default_rng(at)
    array = generator.integers(-(2**31), 2**31, (90, 32)).astype(np.int32)
    lines = generator.integers(0, 90, 64)

    @njit
    def run(turned):
        turn_sixteen(array, lines, at, 16, turned)

    turned = np.zeros((40, 64), np.int32)
    run(turned)
    want = np.zeros_like(turned)
    want[16:32, at : at + 16] = array[lines[at : at + 16], 16:].T
    assert np.array_equal(turned, want)


@needs_amx
def test_tiles_are_left_as_they_were():
    """PyTorch's products, which lay the tiles out in their own way, go on as if nothing had been."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(96, 128).bfloat16()
    from fathom.kernels.amx_cpu import CONFIGURATION, begin_products, end_products

    @njit
    def within(seen):
        store_tiles(seen[0])
        others = begin_products()
        store_tiles(seen[1])
        end_products(others)
        store_tiles(seen[2])

    before = torch.nn.functional.linear(x, weight)
    seen = np.full((3, 64), 255, np.uint8)
    within(seen)
    assert np.array_equal(seen[1], CONFIGURATION)
    assert np.array_equal(seen[0], seen[2]) and not np.array_equal(seen[0], seen[1])
    assert torch.equal(torch.nn.functional.linear(x, weight), before)
