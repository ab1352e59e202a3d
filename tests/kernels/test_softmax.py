"""A row's blocks of scores, folded one after the other, against a softmax of the whole row in float64."""

import numpy as np
import pytest

from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.softmax_cpu import KEYS_PER_BLOCK, PARTS, raise_top, unit_of_top, weigh

BLOCKS, WIDTH = 5, 8
FORMS = [
    np.float32,
    pytest.param(
        np.uint16, marks=pytest.mark.skipif(not has_bfloat16_products(), reason="no bfloat16 instructions")
    ),
]


def folded(scores, scale, form):
    """Each block's weights and their top, sums [width] of one per block, and the row's top and total.

    Tops are given as scores.
    """
    top, totals = np.full(2, -np.inf, np.float32), np.zeros((2, PARTS), np.float32)
    sums, written, unit = np.zeros((2, WIDTH), np.float32), [], unit_of_top(form == np.uint16)
    for block in scores:
        given, weights = np.stack([np.full_like(block, 3e8), block]), np.full((3, KEYS_PER_BLOCK), 7, form)
        raise_top(given, 1, np.float32(scale), weights, sums, top, totals, 1)
        weigh(given, 1, np.float32(scale), weights, 2, top, totals, 1)
        assert (weights[:2] == 7).all()
        weight = weights[2] if form == np.float32 else (weights[2].astype(np.uint32) << 16).view(np.float32)
        sums[1] += weight.sum(dtype=np.float64)
        written.append((weight, float(top[1]) * unit))
    assert top[0] == -np.inf and not totals[0].any() and not sums[0].any()
    return written, sums[1], float(top[1]) * unit, totals[1].sum()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 0.125, 96**-0.5, 80**-0.5])
@pytest.mark.parametrize("spread", [0.1, 3.0, 90.0])
@pytest.mark.parametrize("rising", [False, True])
def test_folded_blocks_are_the_softmax_of_the_row(form, scale, spread, rising):
    generator = np.random.default_rng(1)
    scores = generator.standard_normal((BLOCKS, KEYS_PER_BLOCK)).astype(np.float32) * np.float32(spread)
    scores += np.arange(BLOCKS, dtype=np.float32)[:, None] * (spread if rising else -spread)
    scores[1] = -np.inf
    scores[3, 5:] = -np.inf
    exact = scores.astype(np.float64) * scale
    written, sums, top, total = folded(scores, scale, form)
    above = 0 if form == np.float32 else np.log(2)
    assert exact.max() * (1 - 1e-6) <= top <= exact.max() * (1 + 1e-6) + above
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
    scores = (6000 + 8 * generator.standard_normal((BLOCKS, KEYS_PER_BLOCK))).astype(np.float32)
    _, _, top, total = folded(scores, 0.125, form)
    assert total == pytest.approx(np.exp(scores.astype(np.float64) * 0.125 - top).sum(), rel=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_sees_nothing_weighs_nothing(form):
    written, sums, top, total = folded(np.full((2, KEYS_PER_BLOCK), -np.inf, np.float32), 1.0, form)
    assert top == -np.inf and total == 0 and not sums.any()
    assert not any(weight.any() for weight, _ in written)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [0, 17, 63])
def test_what_is_not_a_number_stays_visible(form, place):
    scores = np.zeros((1, KEYS_PER_BLOCK), np.float32)
    scores[0, place] = np.nan
    written, _, _, total = folded(scores, 1.0, form)
    assert np.isnan(written[0][0][place]) and np.isnan(total)


@pytest.mark.skipif(not has_bfloat16_products(), reason="no bfloat16 instructions")
@pytest.mark.parametrize("rising", [False, True])
def test_weights_are_rounded_alike_whatever_a_row_has_seen_before(rising):
    """Prefill, decode, and parts that are mixed afterwards cut rows differently, and give the same output."""
    generator = np.random.default_rng(3)
    scores = 9 * generator.standard_normal((BLOCKS, KEYS_PER_BLOCK)).astype(np.float32)
    scores += np.arange(BLOCKS, dtype=np.float32)[:, None] * (7 if rising else -7)
    together, *_ = folded(scores, 0.3, np.uint16)
    for block, (weight, top) in zip(scores, together, strict=True):
        ((alone, own_top),) = folded(block[None], 0.3, np.uint16)[0]
        factor = 2.0 ** np.round((top - own_top) / np.log(2))
        assert np.array_equal(weight * factor, alone)
        assert weight.any()
