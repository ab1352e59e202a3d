"""SFI's Selector up to Top-K: from attention logits and key norms to refined log-scores (Eqs. 6 to 23).

``selector_scores_torch`` is the reference of the CPU kernel in ``selector_scores_cpu.py`` and of the three Triton
kernels here: row statistics of the logits; evidence and prior with the sums that the fusion weight needs; fused
score, soft non-maximum suppression and cross-head exclusivity.
"""

from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import INTERPRETED, runs_triton
from fathom.kernels.triton_aot import signature


class ScoreParameters(Protocol):
    """Hyper-parameters by role; symbols and equations of the paper in the comments."""

    power: float  # alpha, Eq. 7
    norm_decay: float  # gamma, Eq. 9
    position_decay: float  # beta, Eq. 11
    position_curve: float  # p, Eq. 11
    tail_brake: float  # eta, Eq. 11
    prior_clip: float  # lambda_clip, Eq. 17
    nms_strength: float  # alpha_soft, Eq. 21
    nms_radius: int  # half width of N(j), Eq. 20
    cross_head: float  # alpha_cross, Eq. 23
    temperature: float  # T, Eq. 22
    epsilon: float


def selector_scores(
    logits: torch.Tensor,
    key_norms: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    c: Any,
    pitch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Refined log-scores of every candidate.

    Args:
        logits: [requests, kv_heads, query_rows, n] float32, contiguous.
        key_norms: [requests, kv_heads, n] float32, contiguous.
        begin, end: [requests] int32 or int64; the candidates of a request are ``begin .. end - 1``. What the inputs
            hold elsewhere is ignored.
        c: :class:`ScoreParameters`.
        pitch: [1] int32, on a GPU: entries from the start of one row to that of the next, in the inputs and in the
            scores, where ``n`` is not their number but that of what the inputs' memory is divided into.

    Returns:
        [requests, kv_heads, n] float32; outside the candidates anything.
    """
    if runs_triton(logits):
        return selector_scores_triton(logits, key_norms, begin, end, c, pitch)
    if logits.device.type == "cpu":
        from fathom.kernels.selector_scores_cpu import selector_scores_cpu

        return selector_scores_cpu(logits, key_norms, begin, end, c)
    return selector_scores_torch(logits, key_norms, begin, end, c)


def selector_scores_torch(
    logits: torch.Tensor, key_norms: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, c: Any
) -> torch.Tensor:
    """:func:`selector_scores` in plain PyTorch."""
    index = torch.arange(logits.shape[-1], device=logits.device)
    outside = ((index < begin.unsqueeze(-1)) | (index >= end.unsqueeze(-1))).unsqueeze(1)
    fused = fused_scores(logits, key_norms, begin, end, outside, c)
    z = fused.add_(c.epsilon).log_().masked_fill_(outside, float("-inf"))
    peak = window_max(z, c.nms_radius)
    z = z - c.nms_strength * (peak - z)
    share = (z / c.temperature).softmax(1)
    z += c.cross_head * share.clamp_(min=c.epsilon).log_()
    return z.masked_fill_(outside, float("-inf"))


def fused_scores(
    logits: torch.Tensor,
    key_norms: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    outside: torch.Tensor,
    c: Any,
) -> torch.Tensor:
    """The calibrated distribution s (Eqs. 6 to 18), [requests, kv_heads, n]; zero outside the candidates."""
    share = logits.masked_fill(outside.unsqueeze(1), float("-inf")).softmax(-1)
    evidence = share[:, :, 0] if logits.shape[2] == 1 else share.pow_(c.power).mean(2).pow_(1 / c.power)
    evidence = evidence.masked_fill(outside, 0)
    evidence /= evidence.sum(-1, keepdim=True)
    index = torch.arange(logits.shape[-1], device=logits.device)
    u = (index - begin.unsqueeze(-1)).float() / ((end - begin - 1).float() + c.epsilon).unsqueeze(-1)
    u = u.clamp(0, 1)
    position = torch.exp(-c.position_decay * u**c.position_curve) * (1 - u + c.epsilon) ** c.tail_brake
    prior = (key_norms + c.epsilon).pow_(-c.norm_decay) * position.unsqueeze(1)
    prior = prior.masked_fill_(outside, 0)
    prior /= prior.sum(-1, keepdim=True)
    weight = fusion_weight(evidence, prior, c.prior_clip)
    return evidence.lerp_(prior, weight.unsqueeze(-1))


def fusion_weight(evidence: torch.Tensor, prior: torch.Tensor, clip: float) -> torch.Tensor:
    """lambda* of Eq. 18, [...], for distributions [..., n]. Equal distributions give 0."""
    difference = evidence - prior
    top = (evidence * difference).sum(-1)
    bottom = difference.square().sum(-1)
    return torch.where(bottom > 0, top / bottom, 0).clamp(0, clip)


def window_max(x: torch.Tensor, radius: int) -> torch.Tensor:
    """Largest value within ``radius`` places along the last dimension, itself included; NaN-free float input."""
    width, covered = 2 * radius + 1, 1
    y = torch.nn.functional.pad(x, (radius, radius), value=float("-inf"))
    while 2 * covered <= width:
        y = torch.maximum(y[..., :-covered], y[..., covered:])
        covered *= 2
    rest = width - covered
    return torch.maximum(y[..., : y.shape[-1] - rest], y[..., rest:]) if rest else y


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
BLOCK = 512
PARTS = 64
"""Programs that share the candidates of a request and KV head."""
REFINERS = 512
"""Programs that share those of a request: as many as an H100 runs at a time. Which of the requests of a captured
step choose anew no launch knows; programs of the others end at once."""
MOST_WIDE = 64
"""Candidates in a run, at most."""


@triton.jit
def _part(begin, end, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The candidates that one of PARTS programs looks at."""
    size = tl.cdiv(tl.cdiv(end - begin, PARTS), BLOCK) * BLOCK
    first = begin + part * size
    return first, tl.minimum(first + size, end)


@triton.jit(do_not_specialize=["begin", "end"])
def _statistics_kernel(
    logits, begin, end, pitch, stats, kv_heads, rows,
    THERE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of each query row over one part of the candidates."""
    pair, part = tl.program_id(0), tl.program_id(1)
    request = pair // kv_heads
    low, high = tl.load(begin + request), tl.load(end + request)
    if low >= high:
        return
    width = tl.load(pitch) if THERE else pitch
    first, last = _part(low, high, part, PARTS, BLOCK)
    row = tl.arange(0, ROWS)
    source = logits + (pair.to(tl.int64) * rows + row[:, None]) * width
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(first, last, BLOCK):
        j = start + tl.arange(0, BLOCK)
        there = (row[:, None] < rows) & (j[None, :] < last)
        x = tl.load(source + j[None, :], mask=there, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        exponents = (x - safe[:, None]) * LOG2_E
        total = total * tl.exp2((top - safe) * LOG2_E) + tl.sum(tl.exp2(exponents), 1)
        top = new_top
    target = stats + (pair * PARTS + part) * 2 * ROWS + row
    tl.store(target, top)
    tl.store(target + ROWS, total)


@triton.jit
def _log2(x, PTX: tl.constexpr):
    """Binary logarithm; in PTX by one instruction, to 2**-22 of itself (of 1, near 1), where Triton's has forty."""
    if PTX:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f, f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log2(x)
    return result


@triton.jit(do_not_specialize=["begin", "end"])
def _mixture_kernel(
    logits, key_norms, begin, end, pitch, stats, evidence, prior, sums, kv_heads, rows,
    power, norm_decay, position_decay, position_curve, tail_brake, epsilon,
    THERE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Evidence and prior before their normalisation, and the sums that it and the fusion weight need."""
    pair, part = tl.program_id(0), tl.program_id(1)
    request = pair // kv_heads
    low, high = tl.load(begin + request), tl.load(end + request)
    if low >= high:
        return
    width = tl.load(pitch) if THERE else pitch
    first, last = _part(low, high, part, PARTS, BLOCK)
    row, parts = tl.arange(0, ROWS), tl.arange(0, PARTS)
    base = stats + (pair * PARTS + parts[:, None]) * 2 * ROWS + row[None, :]
    part_top = tl.load(base)
    top = tl.max(part_top, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(base + ROWS) * tl.exp2((part_top - top[None, :]) * LOG2_E), 0)
    # p ** alpha = 2 ** (alpha * log2 p), with log2 p = x * LOG2_E - whole
    whole = top * LOG2_E + tl.log2(tl.where(row < rows, total, 1.0))
    at = pair.to(tl.int64) * width
    source = logits + (pair.to(tl.int64) * rows + row[:, None]) * width
    per_span = 1 / ((high - low - 1).to(tl.float32) + epsilon)
    per_row, per_power = 1 / rows, 1 / power
    sum_f = tl.zeros((BLOCK,), tl.float32)
    sum_r = tl.zeros((BLOCK,), tl.float32)
    sum_ff = tl.zeros((BLOCK,), tl.float32)
    sum_fr = tl.zeros((BLOCK,), tl.float32)
    sum_rr = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        j = start + tl.arange(0, BLOCK)
        there = j < last
        x = tl.load(source + j[None, :], mask=(row[:, None] < rows) & there[None, :], other=float("-inf"))
        mu = tl.sum(tl.exp2(power * (x * LOG2_E - whole[:, None])), 0) * per_row
        f = tl.where(mu > 0, tl.exp2(_log2(tl.where(mu > 0, mu, 1.0), PTX) * per_power), 0.0)
        u = (j - low).to(tl.float32) * per_span
        curve = tl.where(u > 0, tl.exp2(position_curve * _log2(tl.where(u > 0, u, 1.0), PTX)), 0.0)
        norm = tl.load(key_norms + at + j, mask=there, other=1.0)
        # 1 - u, and nothing at the last candidate: a product with a rounded 1 / n may miss 1.
        rest = (high - 1 - j).to(tl.float32) * per_span
        exponent = tail_brake * _log2(tl.maximum(rest, 0.0) + epsilon, PTX) - position_decay * LOG2_E * curve
        r = tl.where(there, tl.exp2(exponent - norm_decay * _log2(norm + epsilon, PTX)), 0.0)
        tl.store(evidence + at + j, f, mask=there)
        tl.store(prior + at + j, r, mask=there)
        sum_f += f
        sum_r += r
        sum_ff += f * f
        sum_fr += f * r
        sum_rr += r * r
    target = sums + pair * 5 * PARTS + part
    tl.store(target, tl.sum(sum_f, 0))
    tl.store(target + PARTS, tl.sum(sum_r, 0))
    tl.store(target + 2 * PARTS, tl.sum(sum_ff, 0))
    tl.store(target + 3 * PARTS, tl.sum(sum_fr, 0))
    tl.store(target + 4 * PARTS, tl.sum(sum_rr, 0))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _fused(f_at, r_at, of_f, of_r, j, low, high, real):
    """Fused scores of the candidates ``j`` (Eq. 18), 0 where there is none."""
    own = real[:, None] & ((j >= low) & (j < high))[None, :]
    s = of_f * tl.load(f_at + j[None, :], mask=own, other=0.0)
    return s + of_r * tl.load(r_at + j[None, :], mask=own, other=0.0)


@triton.jit(do_not_specialize=["begin", "end"])
def _refine_kernel(
    evidence, prior, sums, begin, end, pitch, scores, kv_heads,
    prior_clip, nms_strength, cross_head, temperature, epsilon,
    THERE: tl.constexpr, HEADS: tl.constexpr, RADIUS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Fusion (Eq. 18), soft non-maximum suppression (Eq. 21) and cross-head exclusivity (Eq. 23) of some blocks.

    A window's maximum is put together from maxima over runs of WIDE candidates (van Herk, 1992): from its first
    place to the end of a run, of whole runs, and from the start of a run to its last place.
    """
    request = tl.program_id(0)
    low, high = tl.load(begin + request).to(tl.int32), tl.load(end + request).to(tl.int32)
    if low >= high:
        return
    width = tl.load(pitch) if THERE else pitch
    head, parts = tl.arange(0, HEADS), tl.arange(0, PARTS)
    real = head < kv_heads
    base = sums + (request * kv_heads + head[:, None]) * 5 * PARTS + parts[None, :]
    sum_f = tl.sum(tl.load(base, mask=real[:, None], other=0.0), 1)
    sum_r = tl.sum(tl.load(base + PARTS, mask=real[:, None], other=0.0), 1)
    sum_f = tl.where(sum_f > 0, sum_f, 1.0)
    sum_r = tl.where(sum_r > 0, sum_r, 1.0)
    ff = tl.sum(tl.load(base + 2 * PARTS, mask=real[:, None], other=0.0), 1) / (sum_f * sum_f)
    fr = tl.sum(tl.load(base + 3 * PARTS, mask=real[:, None], other=0.0), 1) / (sum_f * sum_r)
    rr = tl.sum(tl.load(base + 4 * PARTS, mask=real[:, None], other=0.0), 1) / (sum_r * sum_r)
    bottom = ff - 2 * fr + rr
    weight = tl.where(bottom > 0, (ff - fr) / tl.where(bottom > 0, bottom, 1.0), 0.0)
    weight = tl.minimum(tl.maximum(weight, 0.0), prior_clip)
    of_f, of_r = ((1 - weight) / sum_f)[:, None], (weight / sum_r)[:, None]

    row = (request.to(tl.int64) * kv_heads + head[:, None]) * width
    f_at, r_at, to = evidence + row, prior + row, scores + row
    for start in range(low + tl.program_id(1) * BLOCK, high, tl.num_programs(1) * BLOCK):
        j = start + tl.arange(0, BLOCK)
        s = _fused(f_at, r_at, of_f, of_r, j, low, high, real)
        peak = s
        if RADIUS > 0:
            WHOLE: tl.constexpr = 2 * RADIUS // WIDE
            RUNS: tl.constexpr = BLOCK // WIDE
            x = _fused(f_at, r_at, of_f, of_r, j - RADIUS, low, high, real)
            tops = tl.associative_scan(x.reshape(HEADS, RUNS, WIDE), 2, _larger, reverse=True)
            for run in range(1, WHOLE):
                x = _fused(f_at, r_at, of_f, of_r, j - RADIUS + run * WIDE, low, high, real)
                tops = tl.maximum(tops, tl.max(x.reshape(HEADS, RUNS, WIDE), 2, keep_dims=True))
            x = _fused(f_at, r_at, of_f, of_r, j - RADIUS + WHOLE * WIDE, low, high, real)
            tops = tl.maximum(tops, tl.associative_scan(x.reshape(HEADS, RUNS, WIDE), 2, _larger))
            if WHOLE * WIDE < 2 * RADIUS:
                x = _fused(f_at, r_at, of_f, of_r, j + RADIUS - WIDE, low, high, real)
                x = tl.associative_scan(x.reshape(HEADS, RUNS, WIDE), 2, _larger, reverse=True)
                tops = tl.maximum(tops, x)
                x = _fused(f_at, r_at, of_f, of_r, j + RADIUS, low, high, real)
                tops = tl.maximum(tops, tl.associative_scan(x.reshape(HEADS, RUNS, WIDE), 2, _larger))
            peak = tops.reshape(HEADS, BLOCK)
        z = _log2(s + epsilon, PTX)
        z -= nms_strength * (_log2(peak + epsilon, PTX) - z)
        scaled = tl.where(real[:, None], z / temperature, float("-inf"))
        top = tl.max(scaled, 0)
        all_heads = top + _log2(tl.sum(tl.exp2(scaled - top[None, :]), 0), PTX)
        z += cross_head * tl.maximum(scaled - all_heads[None, :], tl.log2(epsilon))
        tl.store(to + j[None, :], z / LOG2_E, mask=real[:, None] & (j < high)[None, :])


def _refined(kv_heads: int, radius: int) -> dict[str, int]:
    """Constants of the third kernel: of powers of two, the runs no longer than the radius."""
    heads, wide = triton.next_power_of_2(kv_heads), min(1 << max(radius.bit_length() - 1, 0), MOST_WIDE)
    return {"HEADS": heads, "RADIUS": radius, "WIDE": wide, "BLOCK": max(1024 // heads, 32, wide)}


def selector_scores_triton(
    logits: torch.Tensor,
    key_norms: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    c: Any,
    pitch: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`selector_scores` in three launches; no host synchronisation."""
    requests, kv_heads, rows, n = logits.shape
    if not (logits.is_contiguous() and key_norms.is_contiguous()):
        raise ValueError("logits and key_norms must be contiguous")
    row_block = triton.next_power_of_2(rows)
    # A tile holds all rows; more rows, fewer candidates at a time.
    block = max(BLOCK // max(row_block // 8, 1), 32)
    pairs = requests * kv_heads
    stats = logits.new_empty(pairs, PARTS, 2, row_block)
    sums = logits.new_empty(pairs, 5, PARTS)
    evidence, prior, scores = (torch.empty_like(key_norms) for _ in range(3))
    there = {"THERE": pitch is not None, "PARTS": PARTS}
    width = n if pitch is None else pitch
    _statistics_kernel[(pairs, PARTS)](
        logits, begin, end, width, stats, kv_heads, rows, ROWS=row_block, BLOCK=block, **there
    )
    _mixture_kernel[(pairs, PARTS)](
        logits, key_norms, begin, end, width, stats, evidence, prior, sums, kv_heads, rows,
        c.power, c.norm_decay, c.position_decay, c.position_curve, c.tail_brake, c.epsilon,
        ROWS=row_block, BLOCK=block, PTX=not INTERPRETED, **there,
    )  # fmt: skip
    _refine_kernel[(requests, REFINERS)](
        evidence, prior, sums, begin, end, width, scores, kv_heads,
        c.prior_clip, c.nms_strength, c.cross_head, c.temperature, c.epsilon,
        **_refined(kv_heads, c.nms_radius), PTX=not INTERPRETED, **there,
    )  # fmt: skip
    return scores


def specializations() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernel, signature and constants of typical launches, for compilation without a device."""
    tensors = ["logits", "key_norms", "stats", "evidence", "prior", "sums", "scores"]
    types = dict.fromkeys(tensors, "*fp32") | {"begin": "*i64", "end": "*i64"}
    numbers = [name for name in ScoreParameters.__annotations__ if name != "nms_radius"]
    types |= dict.fromkeys(numbers, "fp32")
    few, many = {"ROWS": 4, "PARTS": PARTS, "BLOCK": 512}, {"ROWS": 64, "PARTS": PARTS, "BLOCK": 64}
    ptx = {"PTX": True}
    refine = ptx | {"PARTS": PARTS} | _refined(8, 16)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (_statistics_kernel, few),
        (_statistics_kernel, many),
        (_mixture_kernel, ptx | few),
        (_mixture_kernel, ptx | many),
        (_refine_kernel, refine),
        (_refine_kernel, refine | _refined(8, 24)),  # not as many whole runs as fill a window
    ]
    # A captured step has one query row per head.
    captured = [(_statistics_kernel, few), (_mixture_kernel, ptx | few), (_refine_kernel, refine)]
    return [
        (kernel, signature(kernel, types | {"pitch": kind}, constants), constants)
        for kind, there in (("i32", cases), ("*i32", captured))
        for kernel, given in there
        for constants in [{"THERE": kind == "*i32"} | given]
    ]
