"""RMSNorm, rotary embedding and SiLU on the CPU against their references, and that SGLang dispatches to them."""

import os
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from fathom.kernels.numba_cpu import (
    as_array,
    exp_float32,
    exp_of_negative,
    from_float32,
    log_float32,
    prefetch,
    to_float32,
)
from fathom.kernels.rms_norm import rms_norm, rms_norm_reference
from fathom.kernels.rotary import rotary, rotary_reference
from fathom.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One step of the last place: kernel and reference round once, from float32 values that differ in the last bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
TOKENS = [1, 3, 700]  # on the calling thread, and as a parallel loop


def assert_same(got, want):
    assert got.dtype == want.dtype and got.is_contiguous()
    # Values near zero come from cancelled float32 sums, whose error is relative to the terms.
    torch.testing.assert_close(got, want, rtol=TOLERANCE[want.dtype], atol=2e-6)


@njit
def exp_all(x, out):
    for i in range(len(x)):
        out[i] = exp_float32(x[i])


@njit
def exp_of_negatives(x, out):
    for i in range(len(x)):
        out[i] = exp_of_negative(x[i])


@njit
def log_all(x, out):
    for i in range(len(x)):
        out[i] = log_float32(x[i])


@njit
def round_trip(bits, wide, back):
    for i in range(len(bits)):
        wide[i] = to_float32(bits[i])
        back[i] = from_float32(wide[i], back)


@njit
def round_all(x, out):
    for i in range(len(x)):
        out[i] = from_float32(x[i], out)


@njit
def ask(x):
    for i in range(0, 1000, 100):
        prefetch(x, i, 3)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_prefetch_reads_nothing_and_may_lie_outside(dtype):
    x = np.ones((4, 8), dtype)
    before = x.copy()
    ask(x)
    assert (x == before).all()
    assert any(name in next(iter(ask.inspect_asm().values())) for name in ("prefetcht1", "prfm"))


def test_exp_of_negative_is_the_other_exp_until_nothing_is_left():
    x = np.linspace(-86, 0, 300_001).astype(np.float32)
    got, want = np.empty((2, len(x)), np.float32)
    exp_of_negatives(x, got)
    exp_all(x, want)
    assert (got == want).all() and got[-1] == 1
    ends = np.float32([-np.inf, -1e30, -86.1])
    got = np.empty_like(ends)
    exp_of_negatives(ends, got)
    assert ((got >= 0) & (got < 5e-38)).all()


def test_exp_is_accurate_and_right_at_the_ends():
    x = np.linspace(-87.3, 88.72, 300_001).astype(np.float32)
    got = np.empty_like(x)
    exp_all(x, got)
    assert np.max(np.abs(got / np.exp(x.astype(np.float64)) - 1)) < 1e-6
    ends = np.float32([-np.inf, -1e30, -104.5, 0, 88.73, 1e30, np.inf, np.nan])
    got = np.empty_like(ends)
    exp_all(ends, got)
    np.testing.assert_array_equal(got, np.float32([0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan]))
    small = np.float32([-88, -95, -103])  # results below the smallest normal number
    got = np.empty_like(small)
    exp_all(small, got)
    np.testing.assert_allclose(got, np.exp(small.astype(np.float64)), atol=1.5e-45)


def test_log_is_accurate_and_has_a_floor():
    tiny = np.finfo(np.float32).tiny
    x = np.exp(np.linspace(np.log(tiny), 88.7, 300_001)).astype(np.float32)
    x = np.concatenate([x, 1 + np.linspace(-1e-3, 1e-3, 10_001).astype(np.float32)])
    got, want = np.empty_like(x), np.log(np.maximum(x, tiny).astype(np.float64))
    log_all(x, got)
    assert np.max(np.abs(got - want) / np.maximum(np.abs(want), 1)) < 2e-7
    low = np.float32([tiny, tiny / 2, 0, -1])
    got = np.empty_like(low)
    log_all(low, got)
    np.testing.assert_array_equal(got, got[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_convert_as_in_pytorch(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    wide, back = torch.empty(len(every)), torch.empty_like(every)
    round_trip(as_array(every), as_array(wide), as_array(back))
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, every, rtol=0, atol=0, equal_nan=True)

    torch.manual_seed(0)
    halfway = (every[:-1].double() + every[1:].double()) / 2  # ties
    bits = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32).view(torch.float32)
    x = torch.cat([halfway.float(), bits, torch.tensor([float("inf"), -float("inf"), float("nan")])])
    rounded = torch.empty(len(x), dtype=dtype)
    round_all(as_array(x), as_array(rounded))
    torch.testing.assert_close(rounded, x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1, 67, 256])
def test_rms_norm_equals_reference(dtype, tokens, width):
    torch.manual_seed(width)
    x, residual = torch.randn(2, tokens, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    normed, total = rms_norm(x, weight, 1e-5)
    assert total is None
    assert_same(normed, rms_norm_reference(x, weight, 1e-5)[0])
    before = x.clone(), residual.clone()
    normed, total = rms_norm(x, weight, 1e-5, residual)
    want, want_total = rms_norm_reference(x, weight, 1e-5, residual)
    assert_same(normed, want)
    assert torch.equal(total, want_total)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rms_norm_of_other_layouts():
    wide = torch.randn(5, 3, 40)
    weight = torch.nn.Parameter(torch.randn(40))  # as a layer holds it
    assert_same(rms_norm(wide, weight, 1e-6)[0], rms_norm_reference(wide, weight, 1e-6)[0].detach())
    part = wide[:, 1]  # rows apart
    assert_same(rms_norm(part, weight, 1e-6)[0], rms_norm_reference(part, weight, 1e-6)[0].detach())
    for x, gain in [
        (wide.transpose(0, 1), weight),
        (wide[..., ::2], weight[:20]),
        (wide[:0], weight),
        (wide.bfloat16(), weight),
        (wide.double(), weight.double()),
    ]:
        assert rms_norm(x, gain, 1e-6) is None
    assert rms_norm(wide, weight, 1e-6, wide.bfloat16()) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1, 67, 256])
def test_silu_and_mul_equals_reference(dtype, tokens, width):
    torch.manual_seed(width)
    x = (torch.randn(tokens, 2 * width) * 8).to(dtype)
    assert_same(silu_and_mul(x), silu_and_mul_reference(x))
    apart = torch.cat([x, x], 1)[:, : 2 * width]
    assert_same(silu_and_mul(apart), silu_and_mul_reference(x))


def test_silu_of_extreme_values():
    x = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("nan"), float("inf")]])
    x = torch.cat([x, torch.ones_like(x)], 1)
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_reference(x), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 20), (6, 2)])
def test_rotary_equals_reference(dtype, tokens, head_dim, rotary_dim):
    torch.manual_seed(head_dim)
    angles = torch.rand(1000, rotary_dim // 2) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    positions = torch.randint(0, 1000, (tokens,))
    # As the projection leaves them: three query heads, a key head and a value head side by side.
    packed = torch.randn(tokens, 5 * head_dim).to(dtype)
    query, key, _ = packed.split([3 * head_dim, head_dim, head_dim], -1)
    before = packed.clone()
    want = rotary_reference(positions, query, key, cos_sin, head_dim)
    for got, expected in zip(rotary(positions, query, key, cos_sin, head_dim), want, strict=True):
        assert_same(got, expected)
    assert torch.equal(packed, before)
    by_head = rotary(positions, query.unflatten(1, (3, -1)), key.unflatten(1, (1, -1)), cos_sin, head_dim)
    for got, expected in zip(by_head, want, strict=True):
        assert_same(got.flatten(1), expected)


def test_rotary_refuses_what_it_does_not_take():
    x, cos_sin, positions = torch.randn(2, 64), torch.randn(10, 64), torch.tensor([0, 9])
    assert rotary(positions, x, x, cos_sin.bfloat16(), 64) is None
    assert rotary(positions.int(), x, x, cos_sin, 64) is None
    assert rotary(positions.unsqueeze(0), x, x, cos_sin, 64) is None
    assert rotary(positions, x[:1], x, cos_sin, 64) is None
    for outside in (-1, 10):
        with pytest.raises(IndexError):
            rotary(torch.tensor([0, outside]), x, x, cos_sin, 64)


DISPATCH = """
    from fathom.runtime.sglang_host import options, process
    process.install(options.EngineOptions())
    import torch
    from sglang.srt.layers import activation, layernorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
    from fathom.runtime.sglang_host.layers import cpu_ops

    torch.manual_seed(0)
    x, residual, wide = torch.randn(3, 5, 64)[:2].unbind() + (torch.randn(5, 128),)
    positions = torch.tensor([7, 0, 3, 9, 1])

    def compare(op, function, *args):
        assert op.dispatch_forward().__func__ is function, op
        got, want = op(*args), op.forward_native(*args)
        got, want = (got, want) if isinstance(got, tuple) else ((got,), (want,))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)

    calls = []
    for module, name in (
        (cpu_ops.rms_norm, "rms_norm"), (cpu_ops.silu_and_mul, "silu_and_mul"), (cpu_ops.rotary, "rotary")
    ):
        def spy(*args, kernel=getattr(module, name), name=name):
            result = kernel(*args)
            calls.append((name, result is not None))
            return result
        setattr(module, name, spy)

    with torch.inference_mode():
        compare(layernorm.RMSNorm(64), cpu_ops.forward_rms_norm, x)
        compare(layernorm.RMSNorm(64), cpu_ops.forward_rms_norm, x, residual)
        compare(activation.SiluAndMul(), cpu_ops.forward_silu_and_mul, wide)
        for rope in (
            RotaryEmbedding(32, 32, 64, 10000, True, torch.float32),
            RotaryEmbedding(32, 8, 64, 10000, True, torch.float32),
            Llama3RotaryEmbedding(32, 32, 64, 10000, True, torch.float32, 8.0, 1.0, 4.0, 32),
        ):
            compare(rope, cpu_ops.forward_rotary, positions, x, residual)
        assert calls == [("rms_norm", True)] * 2 + [("silu_and_mul", True)] + [("rotary", True)] * 3, calls

        # What the kernels do not take is the layer's own business.
        calls.clear()
        compare(layernorm.RMSNorm(64, var_hidden_size=32), cpu_ops.forward_rms_norm, x, residual)
        compare(layernorm.RMSNorm(64, cast_x_before_out_mul=True), cpu_ops.forward_rms_norm, x, residual)
        compare(layernorm.RMSNorm(64, fp32_residual=True), cpu_ops.forward_rms_norm, x, residual)
        compare(layernorm.RMSNorm(64), cpu_ops.forward_rms_norm, x, residual, residual)
        interleaved = RotaryEmbedding(32, 32, 64, 10000, False, torch.float32)
        compare(interleaved, cpu_ops.forward_rotary, positions, x, residual)
        compare(rope, cpu_ops.forward_rotary, positions, x, residual, torch.ones(5, dtype=torch.int64))
        assert calls == [], calls
        compare(layernorm.RMSNorm(64), cpu_ops.forward_rms_norm, x[:0], residual[:0])
        compare(layernorm.RMSNorm(64), cpu_ops.forward_rms_norm, x.bfloat16())
        assert calls == [("rms_norm", False)] * 2, calls
"""


def test_sglang_dispatches_to_the_kernels_and_falls_back(template, tmp_path):
    (log := tmp_path / "log").touch()
    script = Path(__file__).parents[1] / "scripted.py"
    with template.start([textwrap.dedent(DISPATCH)], log, dict(os.environ), script=script) as process:
        assert process.wait(300) == 0, log.read_text()
