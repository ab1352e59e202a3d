"""Attention that a few query rows pay to a prompt, reduced to one score per prompt token.

Two reductions of ``softmax(q · k * scale)`` over paged keys:

- :func:`pooled_max_scores` (SpecPrefill, section 3.2): average-pooled along the prompt, then the running maximum
  over heads and, call by call, over layers; one score per query row and token.
- :func:`row_mean_scores` (FastKV, Eq. 1 before its pooling; SnapKV): mean over the query rows; one score per head
  and token. :func:`pool_saliency` then ranks the tokens before the window.

The keys are read twice (once for the softmax statistics, once for the scores), block by block; on a CPU
``window_scores_cpu`` reads them once for the means and keeps a few heads' exponentials. ``*_reference`` are the
plain-PyTorch references; on a GPU the Triton kernels of ``window_scores_triton`` run. Scores beyond a request's
length are 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fathom.kernels import window_scores_triton
from fathom.kernels.dispatch import runs_triton

BLOCK_BYTES = 512 << 10
"""Size of the CPU path's block of probabilities, written and read several times: half a core's cache."""


@dataclass(frozen=True)
class Window:
    """Query rows of a batch and the keys they look at; built once per step, read by every layer.

    Attributes:
        rows: number of query rows of each request; the requests' rows are packed one after the other.
        lengths: number of keys of each request, at least 1.
        slots: [batch, max_keys] integers on the keys' device: the slot of each key; entries beyond a request's
            length are not read.
        causal: whether the rows are the request's last tokens and each sees the keys up to its own (row i of n sees
            keys ``0 .. length - n + i``); otherwise every row sees all keys.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: torch.Tensor
    causal: bool

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.lengths) == len(self.slots):
            raise ValueError(
                f"{len(self.rows)} row counts, {len(self.lengths)} lengths, {len(self.slots)} slot rows"
            )
        if min(self.lengths, default=1) < 1 or min(self.rows, default=1) < 1:
            raise ValueError("every request needs at least one row and one key")
        if max(self.lengths, default=0) > self.slots.shape[1]:
            raise ValueError(
                f"length {max(self.lengths)} exceeds the slot table's {self.slots.shape[1]} columns"
            )
        if self.causal and any(r > n for r, n in zip(self.rows, self.lengths, strict=True)):
            raise ValueError("a causal window cannot have more rows than keys")

    @property
    def total_rows(self) -> int:
        return sum(self.rows)

    @cached_property
    def _device_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = np.concatenate([[0], np.cumsum(self.rows)])
        numbers = torch.from_numpy(np.concatenate([starts, self.lengths]).astype(np.int32))
        if self.slots.is_cuda:  # pinned, the copy is not waited for
            numbers = numbers.pin_memory()
        starts, lengths = numbers.to(self.slots.device, non_blocking=True).tensor_split([len(starts)])
        return starts, lengths

    def device_arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """Slots, first row [batch + 1] and lengths [batch] on the device; most rows and keys of a request."""
        return self.slots, *self._device_tables, max(self.rows), max(self.lengths)

    def requests(self) -> Iterator[tuple[int, slice, int]]:
        """Index, packed rows and number of keys of each request."""
        begin = 0
        for index, (count, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            yield index, slice(begin, begin + count), length
            begin += count


def window_of(rows: Sequence[int], lengths: Sequence[int], slots: torch.Tensor, causal: bool) -> Window:
    """A :class:`Window` from any sequences of integers.

    Raises:
        ValueError: when the sizes do not fit together.
    """
    return Window(tuple(map(int, rows)), tuple(map(int, lengths)), slots, causal)


def pooled_max_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    window: Window,
    scale: float,
    pool: int = 13,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """SpecPrefill's score of each prompt token for each look-ahead row, maximum over heads and earlier layers.

    Where heads are spread over devices, the scores are the maximum over the devices' results.

    Args:
        query: [total_rows, heads, head_dim] after rotary embedding: per request its last prompt token and the first
            generated ones; float32, bfloat16 or float16.
        keys: [slots, kv_heads, head_dim], one layer of the pool; last dimension contiguous.
        window: not causal; its keys are the prompt's only.
        scale: factor on the dot products.
        pool: odd width of the average pooling; zeros beyond the prompt's ends count: the divisor is ``pool``.
        out: [total_rows, max_keys] float32, what earlier layers returned; changed in place.

    Returns:
        ``out``, or a new tensor of that shape for the first layer.

    Raises:
        ValueError: for shapes that do not fit, an even ``pool`` or a causal window.
    """
    _check(query, keys, window)
    if window.causal or pool % 2 == 0:
        raise ValueError("SpecPrefill's rows see the whole prompt, and its pooling width is odd")
    shape = (window.total_rows, window.slots.shape[1])
    if out is None:
        out = torch.zeros(shape, dtype=torch.float32, device=query.device)
    elif out.shape != shape or out.dtype != torch.float32:
        raise ValueError(f"out must be float32 {list(shape)}, got {out.dtype} {list(out.shape)}")
    if runs_triton(query):
        window_scores_triton.pooled_max(query, keys, *window.device_arguments(), scale, pool, out)
    else:
        _pooled_max_cpu(query, keys, window, scale, pool, out)
    return out


def row_mean_scores(query: torch.Tensor, keys: torch.Tensor, window: Window, scale: float) -> torch.Tensor:
    """Mean over a request's query rows of the attention each head pays to each key.

    Not for layers with a sliding window: the rows see all keys up to their own.

    Args:
        query: [total_rows, heads, head_dim] after rotary embedding: the last tokens of each request.
        keys: [slots, kv_heads, head_dim], one layer of the pool; last dimension contiguous.
        window: usually causal.
        scale: factor on the dot products.

    Returns:
        [batch, heads, max_keys] float32.

    Raises:
        ValueError: for shapes that do not fit.
    """
    _check(query, keys, window)
    shape = (len(window.rows), query.shape[1], window.slots.shape[1])
    out = torch.zeros(shape, dtype=torch.float32, device=query.device)
    if runs_triton(query):
        window_scores_triton.row_mean(query, keys, *window.device_arguments(), window.causal, scale, out)
    else:
        from fathom.kernels.window_scores_cpu import row_mean_cpu

        row_mean_cpu(query, keys, window, scale, out)
    return out


def pool_saliency(mean: torch.Tensor, before: int, groups: int, pool: int = 7) -> torch.Tensor:
    """Max-pool along the tokens before the window, then average the heads of each group (FastKV, Eq. 1 and 2).

    Args:
        mean: [heads, keys] of one request, from :func:`row_mean_scores`.
        before: number of tokens before the window; only these are pooled and ranked.
        groups: KV heads for retention, 1 for propagation; divides ``heads``.
        pool: odd width; stride 1, same length.

    Returns:
        [groups, before] float32.
    """
    if mean.shape[0] % groups or pool % 2 == 0:
        raise ValueError(f"{mean.shape[0]} heads in {groups} groups, pooling width {pool}")
    if before <= 0:
        return mean.new_empty(groups, 0)
    pooled = torch.nn.functional.max_pool1d(mean[:, None, :before], pool, stride=1, padding=pool // 2)
    return pooled.view(groups, -1, before).mean(1)


def _check(query: torch.Tensor, keys: torch.Tensor, window: Window) -> None:
    if (
        query.shape[0] != window.total_rows
        or query.shape[2] != keys.shape[2]
        or query.shape[1] % keys.shape[1]
    ):
        raise ValueError(
            f"query {list(query.shape)} does not fit keys {list(keys.shape)} and {window.total_rows} rows"
        )


# The references.


def probabilities_reference(
    query: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """Attention [heads, rows, keys] float32 of one request's rows, with an explicit mask.

    Args:
        query: [rows, heads, head_dim]; keys: [slots, kv_heads, head_dim]; slots: [keys].
    """
    rows, length = query.shape[0], len(slots)
    k = keys[slots.long()].float().repeat_interleave(query.shape[1] // keys.shape[1], 1)
    logits = torch.einsum("rhd,nhd->hrn", query.float(), k) * scale
    if causal:
        hidden = torch.arange(length) > torch.arange(length - rows, length).unsqueeze(1)
        logits = logits.masked_fill(hidden.to(logits.device), float("-inf"))
    return logits.softmax(-1)


def pooled_max_scores_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    window: Window,
    scale: float,
    pool: int = 13,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference for :func:`pooled_max_scores`; same arguments."""
    if out is None:
        out = torch.zeros(window.total_rows, window.slots.shape[1], device=query.device)
    for index, rows, length in window.requests():
        p = probabilities_reference(query[rows], keys, window.slots[index, :length], scale, causal=False)
        pooled = torch.nn.functional.avg_pool1d(p, pool, stride=1, padding=pool // 2, count_include_pad=True)
        out[rows, :length] = torch.maximum(out[rows, :length], pooled.amax(0))
    return out


def row_mean_scores_reference(
    query: torch.Tensor, keys: torch.Tensor, window: Window, scale: float
) -> torch.Tensor:
    """Reference for :func:`row_mean_scores`; same arguments."""
    out = torch.zeros(len(window.rows), query.shape[1], window.slots.shape[1], device=query.device)
    for index, rows, length in window.requests():
        slots = window.slots[index, :length]
        out[index, :, :length] = probabilities_reference(query[rows], keys, slots, scale, window.causal).mean(
            1
        )
    return out


# The CPU path.


class _Logits:
    """Scaled dot products of one request, block by block along its keys.

    The rows of a block are [kv_heads, group * rows]: query heads of a KV head side by side, so nothing is repeated.
    """

    def __init__(self, query: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, scale: float):
        rows, heads, dim = query.shape
        self.kv_heads, self.rows, self.length = keys.shape[1], rows, len(slots)
        self.group = heads // self.kv_heads
        packed = query.float().view(rows, self.kv_heads, self.group, dim).permute(1, 2, 0, 3)
        self.query = packed.reshape(self.kv_heads, self.group * rows, dim) * scale
        self.keys, self.slots = keys, slots

    def blocks(self, margin: int = 0) -> Iterator[tuple[int, int]]:
        """Bounds of the blocks; with ``margin`` they are made smaller by what is computed on either side."""
        whole = max(BLOCK_BYTES // (4 * self.kv_heads * self.group * self.rows), 512, 8 * margin)
        size = whole - 2 * margin
        if self.length <= whole:
            size = self.length
        for begin in range(0, self.length, size):
            yield begin, min(begin + size, self.length)

    def block(self, begin: int, end: int) -> torch.Tensor:
        """[kv_heads, group * rows, end - begin] float32."""
        k = self.keys.index_select(0, self.slots[begin:end]).float()
        return torch.bmm(self.query, k.permute(1, 2, 0))

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Row maxima and reciprocal sums [kv_heads, group * rows, 1], and the logits where one block holds all."""
        top = torch.full((*self.query.shape[:2], 1), float("-inf"))
        total = torch.zeros_like(top)
        logits = None
        for begin, end in self.blocks():
            logits = self.block(begin, end)
            new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
            weights = (logits - new_top).exp_()
            total = total * (top - new_top).exp_() + weights.sum(-1, keepdim=True)
            top = new_top
        whole = logits if logits is not None and logits.shape[-1] == self.length else None
        return top, total.reciprocal_(), whole

    def probabilities(self, margin: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Block bounds and [kv_heads, group * rows, end - begin + 2 * margin]; 0 beyond the prompt's ends."""
        top, inverse, whole = self.statistics()
        for begin, end in self.blocks(margin):
            first, last = max(begin - margin, 0), min(end + margin, self.length)
            logits = self.block(first, last) if whole is None else whole
            p = logits.sub_(top).exp_().mul_(inverse)
            pad = (first - (begin - margin), end + margin - last)
            yield begin, end, torch.nn.functional.pad(p, pad) if any(pad) else p


def _window_sums(p: torch.Tensor, width: int) -> torch.Tensor:
    """Sums of ``width`` neighbours along the last dimension; ``width - 1`` entries shorter.

    Sums of 1, 2, 4, … neighbours are added up: log(width) additions, in the same order at every position, so that
    equal inputs give equal sums.
    """
    size = p.shape[-1] - width + 1
    total, taken, power, length = None, 0, p, 1
    while True:
        if width & length:
            part = power[..., taken : taken + size]
            total = part.clone() if total is None else total.add_(part)
            taken += length
        length *= 2
        if length > width:
            break
        half = length // 2
        power = power[..., :-half] + power[..., half:]
    assert total is not None
    return total


def _pooled_max_cpu(
    query: torch.Tensor, keys: torch.Tensor, window: Window, scale: float, pool: int, out: torch.Tensor
) -> None:
    for index, rows, length in window.requests():
        logits = _Logits(query[rows], keys, window.slots[index, :length], scale)
        for begin, end, p in logits.probabilities(pool // 2):
            sums = _window_sums(p, pool).view(-1, logits.rows, end - begin)
            part = out[rows, begin:end]
            torch.maximum(part, sums.amax(0).div_(pool), out=part)
