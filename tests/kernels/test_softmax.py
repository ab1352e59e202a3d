"""A row's blocks of scores, folded one after the other, against a softmax of the whole row in float64."""

import numpy as np
import pytest

from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.softmax_cpu import fold_block

BLOCK, BLOCKS, WIDTH = 64, 5, 8
FORMS = [
    np.float32,
    pytest.param(
        np.uint16, marks=pytest.mark.skipif(not has_bfloat16_products(), reason="no bfloat16 instructions")
    ),
]


def folded(scores, scale, form):
    """Weights [blocks, block] as they were written, sums [width] of one per block, and the row's top and total."""
    top, total = np.full(2, -np.inf, np.float32), np.zeros(2, np.float32)
    sums, written = np.zeros(WIDTH, np.float32), []
    for block in scores:
        weight = np.full(BLOCK, 7, form)
        fold_block(block, np.float32(scale), weight, sums, top, total, 1)
        weight = weight if form == np.float32 else (weight.astype(np.uint32) << 16).view(np.float32)
        sums += weight.sum(dtype=np.float64)
        written.append((weight, top[1]))
    assert top[0] == -np.inf and total[0] == 0
    return written, sums, top[1], total[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("spread", [0.1, 3.0, 90.0])
@pytest.mark.parametrize("rising", [False, True])
def test_folded_blocks_are_the_softmax_of_the_row(form, scale, spread, rising):
    generator = np.random.default_rng(1)
    scores = generator.standard_normal((BLOCKS, BLOCK)).astype(np.float32) * np.float32(spread)
    scores += np.arange(BLOCKS, dtype=np.float32)[:, None] * (spread if rising else -spread)
    scores[1] = -np.inf
    scores[3, 5:] = -np.inf
    exact = scores.astype(np.float64) * scale
    written, sums, top, total = folded(scores, scale, form)
    assert top == pytest.approx(exact.max(), rel=1e-6)
    assert total == pytest.approx(np.exp(exact - top).sum(), rel=2e-5)
    rounding = 2**-8 if form == np.uint16 else 0
    for block, (weight, own_top) in zip(exact, written, strict=True):
        assert np.allclose(weight, np.exp(block - own_top), rtol=rounding + 2e-5, atol=1e-37)
        assert not weight[block == -np.inf].any()
    assert np.allclose(sums, total, rtol=rounding + 2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_large_scores_lose_no_more_than_their_own_last_bits(form):
    """A decode step and a prefill, which scale scores elsewhere, then differ in next to no weight."""
    generator = np.random.default_rng(2)
    scores = (6000 + 8 * generator.standard_normal((BLOCKS, BLOCK))).astype(np.float32)
    _, _, top, total = folded(scores, 0.125, form)
    assert total == pytest.approx(np.exp(scores.astype(np.float64) * 0.125 - top).sum(), rel=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_sees_nothing_weighs_nothing(form):
    written, sums, top, total = folded(np.full((2, BLOCK), -np.inf, np.float32), 1.0, form)
    assert top == -np.inf and total == 0 and not sums.any()
    assert not any(weight.any() for weight, _ in written)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [0, 17, 63])
def test_what_is_not_a_number_stays_visible(form, place):
    scores = np.zeros((1, BLOCK), np.float32)
    scores[0, place] = np.nan
    written, _, _, total = folded(scores, 1.0, form)
    assert np.isnan(written[0][0][place]) and np.isnan(total)
