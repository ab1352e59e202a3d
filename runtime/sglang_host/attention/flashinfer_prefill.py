"""Prefill attention on a GPU by FlashInfer's kernels, where they take the layout of the depth pages.

One wrapper per span, because a plan belongs to the lengths of one span's tables and is kept in the wrapper's own
workspace. A plan is made from what the host knows of a step, and is the plan of all layers of its span.

The paged kernels read keys and values where they lie, an address for each. On request, steps of many rows have
them copied into one piece of memory first, layer by layer, for the kernels that read such pieces. Keys and values
of 8 bits are read no other way: the copies are of the queries' type.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from fathom.kernels.store_kv import EIGHT_BITS
from fathom.runtime.kv.device_view import DUMMY, DeviceTables, DeviceView
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.options import AUTO, GATHERED, TRITON
from fathom.runtime.staging import staged

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

ASKED_FOR = "asked for by --gpu-prefill-attention"
NO_GPU = "FlashInfer needs an NVIDIA GPU"
HEAD_DIMS = (64, 128, 256)
FEW_ROWS = 16
"""Up to so many query rows per segment a step is about reading KV: FlashInfer's kernels for sm_90 give a segment
one program per head and 128 rows, however long it is; Triton's split its entries. Where they meet is not known."""
PLAN_BYTES = (8 << 20) + 4 * 32768
"""On the device, of each wrapper: its integer workspace and its buffer of lengths."""
ROWS_PER_COPY = 1024
"""Query rows that read an entry, on average over a step's entries, from which on it is worth a copy. With four
heads on each KV head, a copy at 4 TB/s then costs a sixteenth of what attention at 500 TFLOP/s does."""
MOST_COPIED = 1 << 18
"""Entries of a step: those of 8 KV heads of 128 take 1 GiB."""
ROWS_PER_WIDENED = 256
"""The same of 8 bits: a copy then costs at most a quarter of what attention does, which by Triton's kernels takes
twice as long (206 TFLOP/s of 487 on an H100). By those figures, not measured."""
WIDENED_AT_ONCE = 1 << 15
"""Entries of 8 bits that are copied in one go: as bytes, before they become numbers of 16 bits."""
TRIED = np.array([[1, 1], [40, 40], [700, 130], [300, 1]])
"""Entries and rows of the segments that are tried at start: one row, rows without a prefix, some behind many."""
FAR = 0.05
"""Largest difference from PyTorch's float32 that 16-bit products of standard normal numbers may have."""


@dataclass
class Options:
    """What the operator asked for; set once per process, before the engine is made.

    Attributes:
        prefill: one of ``options.PREFILL_ATTENTION``.
    """

    prefill: str = AUTO


OPTIONS = Options()


class PagedWrapper(Protocol):
    """The part of ``flashinfer.BatchPrefillWithPagedKVCacheWrapper`` that is used."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        """Prepare ``run`` for segments of these lengths."""

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Attention as planned."""


class RaggedWrapper(Protocol):
    """The part of ``flashinfer.BatchPrefillWithRaggedKVCacheWrapper`` that is used."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        **options: Any,
    ) -> None:
        """Prepare ``run`` for segments of these lengths."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Attention as planned."""


def why_not(
    kv_dtype: torch.dtype,
    model_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    device: torch.device,
) -> str:
    """Why FlashInfer does not take a layout; "" where it does."""
    if device.type != "cuda":
        return NO_GPU
    if kv_dtype not in (torch.float16, torch.bfloat16, *EIGHT_BITS):
        return f"FlashInfer is given KV of 8 bits, float16 and bfloat16, not {_name(kv_dtype)}"
    if model_dtype not in ((torch.float16, torch.bfloat16) if kv_dtype in EIGHT_BITS else (kv_dtype,)):
        return f"FlashInfer is given queries of the KV's type, not {_name(model_dtype)} and {_name(kv_dtype)}"
    if head_dim != value_dim:
        return f"FlashInfer is given keys and values of one size, not {head_dim} and {value_dim}"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer has heads of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if heads % kv_heads:
        return f"FlashInfer shares each KV head among equally many heads: {heads} over {kv_heads} cannot be"
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"FlashInfer cannot be imported: {error}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def float_bytes(heads: int, kv_heads: int, head_dim: int, processors: int) -> int:
    """Bytes of a float workspace that every plan fits in.

    A plan that splits entries has at most two programs per multiprocessor over all KV heads, each with a tile of
    float32 results and one sum per row; one that does not split needs none.
    """
    tile = 128 if head_dim < 256 else 64
    return 4 * heads * (2 * processors // kv_heads) * tile * (head_dim + 1)


def device_bytes(
    spans: int, heads: int, kv_heads: int, head_dim: int, processors: int, room: int = 0, narrow: bool = False
) -> int:
    """Bytes of device memory that a :class:`FlashInferPrefill` takes."""
    wrappers = spans * (bool(room) + (not narrow))
    copies = 2 * room * kv_heads * head_dim * torch.bfloat16.itemsize
    return float_bytes(heads, kv_heads, head_dim, processors) + wrappers * PLAN_BYTES + copies


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def paged_wrapper(workspace: torch.Tensor) -> PagedWrapper:
    """FlashInfer's own wrapper; it takes the kernels that suit the GPU."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")


def ragged_wrapper(workspace: torch.Tensor) -> RaggedWrapper:
    """FlashInfer's own wrapper of the kernels that read keys and values in one piece."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    return BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="auto")


@dataclass
class Planned:
    """A span's wrapper, and what its plan is for.

    Attributes:
        copied: an event behind the copy of the plan to the device; None before the first.
    """

    wrapper: Any
    view: SpanView | None = None
    there: DeviceView | None = None
    scale: float = 0.0
    copied: Any = None


class FlashInferPrefill:
    """Causal attention of packed rows over the pool, for the spans of one model.

    All of it runs on one stream: a plan's copy, the lists that it points to and the launches are in that order.

    Attributes:
        plans: how often a span was planned.
        gathered_plans: how often of these for keys and values that are copied first.
        kv_dtype: of keys and values in the pool.
    """

    def __init__(
        self,
        spans: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        processors: int,
        make: Callable[[torch.Tensor], PagedWrapper] = paged_wrapper,
        make_ragged: Callable[[torch.Tensor], RaggedWrapper] = ragged_wrapper,
        room: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            dtype: of queries and output, and of keys and values where ``kv_dtype`` does not say otherwise.
            processors: multiprocessors of the device.
            make, make_ragged: a wrapper over a float workspace [bytes] uint8, which it shares with all others.
            room: for copies of so many entries of a step; 0 to read all where they lie.
            kv_dtype: of keys and values, if not ``dtype``; of 8 bits they are copied, or left to Triton's kernels.
        """
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.dtype, self.device, self.kv_dtype = dtype, device, kv_dtype or dtype
        self.narrow = self.kv_dtype in EIGHT_BITS
        size = float_bytes(heads, kv_heads, head_dim, processors)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self._paged = [Planned(make(workspace)) for _ in range(0 if self.narrow else spans)]
        self._ragged = [Planned(make_ragged(workspace)) for _ in range(spans if room else 0)]
        self._copies = tuple(
            torch.empty(room, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2)
        )
        self.plans = self.gathered_plans = 0

    def takes(
        self, query: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], view: SpanView, there: DeviceView
    ) -> bool:
        """Whether :meth:`attend` is for this layer and step: its sizes, and more than a few rows of a segment.

        FlashInfer reads the entries of all segments one after the other.
        """
        return (
            there.most_new > FEW_ROWS
            and there.packed
            and query.dtype == self.dtype
            and pool[0].dtype == pool[1].dtype == self.kv_dtype
            and (not self.narrow or self.gathers(view))
            and query.shape[1:] == (self.heads, self.head_dim)
            and pool[0].shape[1:] == pool[1].shape[1:] == (self.kv_heads, self.head_dim)
        )

    def attend(
        self,
        span: int,
        view: SpanView,
        there: DeviceView,
        query: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        output: torch.Tensor,
        gathers: bool | None = None,
    ) -> None:
        """Attention of each segment's rows over its entries up to their own, into ``output``.

        Args:
            view: of this step; there: the same in the span's buffers on the device.
            query: [rows, heads, head_dim].
            pool: keys and values [slots, kv_heads, head_dim], with the rows' own in them.
            scale: factor on the dot products.
            output: [rows, heads, head_dim], contiguous.
            gathers: whether from copies, of which there must be room; by default as :meth:`gathers` says.
        """
        if not len(query):
            return
        entries = int(view.entry[-1])
        slots = there.table[DUMMY + 1 :][:entries, 0]
        if not (self.gathers(view) if gathers is None else gathers):
            self._planned(self._paged[span], view, there, scale, slots).run(query, pool, out=output)
            return
        copies = [copy[:entries] for copy in self._copies]
        for held, copy in zip(pool, copies, strict=True):
            if not self.narrow:
                torch.index_select(held, 0, slots, out=copy)
                continue
            raw = held.view(torch.uint8)
            for part, own in zip(copy.split(WIDENED_AT_ONCE), slots.split(WIDENED_AT_ONCE), strict=True):
                part.copy_(raw.index_select(0, own).view(held.dtype))
        self._planned(self._ragged[span], view, there, scale, None).run(query, *copies, out=output)

    def gathers(self, view: SpanView) -> bool:
        """Whether :meth:`attend` copies what a step reads first."""
        entries = int(view.entry[-1])
        read = int(np.diff(view.query) @ np.diff(view.entry))
        per_entry = ROWS_PER_WIDENED if self.narrow else ROWS_PER_COPY
        return entries <= len(self._copies[0]) and read >= per_entry * entries > 0

    def _planned(
        self, held: Planned, view: SpanView, there: DeviceView, scale: float, slots: torch.Tensor | None
    ) -> Any:
        """A span's wrapper with the plan of this step; ``slots`` of its entries, None where they are copied."""
        # A view that is filled in again may lie in other buffers: the plan is of both.
        if held.view is view and held.there is there and held.scale == scale:
            return held.wrapper
        # FlashInfer writes a plan to one block of pinned memory and does not wait for its copy to the device, which
        # an overlapped step leaves behind the whole step before it.
        if held.copied is not None:
            held.copied.synchronize()
        bounds, heads = (
            (self._sent(view.query), self._sent(view.entry)),
            (self.heads, self.kv_heads, self.head_dim),
        )
        options = {
            "head_dim_vo": self.head_dim,
            "causal": True,
            "sm_scale": scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }
        if slots is None:
            held.wrapper.plan(*bounds, *heads, **options)
            self.gathered_plans += 1
        else:
            lengths = np.diff(view.entry)
            last = self._sent(np.minimum(lengths, 1))
            held.wrapper.plan(*bounds, slots, last, *heads, 1, **options, seq_lens=self._sent(lengths))
        if held.copied is None:
            held.copied = torch.get_device_module(self.device).Event()
        held.copied.record()
        held.view, held.there, held.scale = view, there, scale
        self.plans += 1
        return held.wrapper

    def _sent(self, numbers: np.ndarray) -> torch.Tensor:
        """Numbers on the host as FlashInfer reads them there and copies them: int32, pinned."""
        return staged(len(numbers), torch.int32, self.device).copy_(torch.from_numpy(numbers))

    def difference(self) -> float:
        """Largest difference between results of a small made-up step and PyTorch's; builds the kernels.

        From copies too, where there is room for them.
        """
        slots, rows = TRIED.sum(0).tolist()
        noise = torch.Generator(self.device).manual_seed(1)
        query, keys, values = (
            torch.randn(n, heads, self.head_dim, generator=noise, device=self.device).to(dtype)
            for n, heads, dtype in (
                (rows, self.heads, self.dtype),
                *[(slots + 1, self.kv_heads, self.kv_dtype)] * 2,
            )
        )
        order = np.random.default_rng(1).permutation(slots) + 1
        entry, bounds = (np.concatenate([[0], np.cumsum(column)]) for column in TRIED.T)
        view = SpanView(order.astype(np.int32).__getitem__, entry, bounds, np.zeros(rows, np.int64))
        there = DeviceTables(1, len(TRIED), slots, rows, self.device).fill(0, view)
        kinds = [False] * (not self.narrow) + [True] * (slots <= len(self._copies[0]))
        scale = self.head_dim**-0.5
        found = [torch.empty_like(query) for _ in kinds]
        for gathers, output in zip(kinds, found, strict=True):
            self.attend(0, view, there, query, (keys, values), scale, output, gathers)
        wanted = torch.empty_like(query, dtype=torch.float32)
        for i, (length, new) in enumerate(TRIED.tolist()):
            own = slice(int(bounds[i]), int(bounds[i + 1]))
            read = there.table[1 + int(entry[i]) :][:length, 0].long()
            q, k, v = (
                x.transpose(0, 1) for x in (query.float()[own], keys.float()[read], values.float()[read])
            )
            seen = torch.ones(new, length, dtype=torch.bool, device=self.device).tril(length - new)
            wanted[own] = torch.nn.functional.scaled_dot_product_attention(
                *(q[None], k[None], v[None]), attn_mask=seen, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        return float((torch.stack(found).float() - wanted).abs().max())


def choose(
    runner: "ModelRunner", spans: int, device: torch.device, make: Callable[..., Any] = FlashInferPrefill
) -> tuple[FlashInferPrefill | None, str]:
    """What computes the prefill attention of a model beside Triton's kernels, or None and the reason.

    FlashInfer's kernels are built here, or loaded: a request would wait minutes for the compiler. Where that fails,
    or where they do not give what PyTorch gives, Triton's remain.
    """
    if OPTIONS.prefill == TRITON:
        return None, ASKED_FOR
    if device.type != "cuda":
        return None, NO_GPU
    layout = layout_of(runner)
    if reason := why_not(*layout, device):
        return None, reason
    kv_dtype, dtype, heads, kv_heads, head_dim, _ = layout
    shape = spans, heads, kv_heads, head_dim, dtype, device, processors_of(device)
    made = make(*shape, room=_most_copied(runner), kv_dtype=kv_dtype)
    reason = _trial(made)
    if reason:
        logger.warning("prefill attention stays with Triton: %s", reason)
        return None, reason
    return made, ""


def layout_of(runner: "ModelRunner") -> tuple[torch.dtype, torch.dtype, int, int, int, int]:
    """A model's KV type, own type, heads, KV heads, and head sizes of keys and values, on one of its GPUs."""
    config = runner.model_config
    heads, kv_heads = devices.heads_of(config, runner.ps.tp_size)
    return runner.kv_cache_dtype, config.dtype, heads, kv_heads, config.head_dim, config.v_head_dim


def reserved_bytes(runner: "ModelRunner", spans: int) -> int:
    """Bytes of device memory to leave for what :func:`choose` will make for a loaded model."""
    device, layout = torch.device(runner.device), layout_of(runner)
    if OPTIONS.prefill == TRITON or why_not(*layout, device):
        return 0
    _, _, heads, kv_heads, head_dim, _ = layout
    shape = spans, heads, kv_heads, head_dim, processors_of(device)
    return device_bytes(*shape, _most_copied(runner), runner.kv_cache_dtype in EIGHT_BITS)


def _most_copied(runner: "ModelRunner") -> int:
    """Entries of a step that may be copied; as many as are tried at least."""
    copied = OPTIONS.prefill == GATHERED or runner.kv_cache_dtype in EIGHT_BITS
    return min(max(runner.model_config.context_len, int(TRIED.sum(0)[0])), MOST_COPIED) if copied else 0


def _trial(made: FlashInferPrefill) -> str:
    """Why FlashInfer's kernels cannot be relied on here; "" where they can."""
    try:
        difference = made.difference()
    except Exception as error:  # no compiler, a GPU that they are not for: the engine starts all the same
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"FlashInfer's kernels do not run here: {lines[0]}"
    if not difference <= FAR:  # nor if it is no number
        return f"FlashInfer's results differ from PyTorch's by {difference:.3g}"
    return ""
