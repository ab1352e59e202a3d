"""SGLang's attention backend for machines without a GPU, on the kernels in ``kernels/``.

It is registered under SGLang's name ``torch_native``: SGLang takes any backend name it does not know for one that
launches Triton kernels, so this slot is the one that keeps every helper on its PyTorch path.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from fathom.kernels import (
    compact_kv_cpu,
    paged_attention_cpu,
    prefill_attention_cpu,
    sampling_cpu,
    store_kv_cpu,
    window_scores_cpu,
)
from fathom.kernels.amx_cpu import has_amx
from fathom.kernels.decoder_layers_cpu import Reads
from fathom.kernels.extend_attention import extend_attention
from fathom.kernels.paged_attention_cpu import Tasks, paged_attention, plan_packed, takes_products
from fathom.kernels.prefill_attention_cpu import plan_tiles, prefill_attention
from fathom.kernels.store_kv_cpu import store_kv
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sglang_host.attention.span_attention import SpanAttentionBackend
from fathom.runtime.sglang_host.layers import cpu_layers, cpu_linear, cpu_ops
from fathom.runtime.sglang_host.machine import devices

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


Place: TypeAlias = list[slice] | torch.Tensor
"""Where KV lies in a layer's pool: ascending runs of slots, or an index where the runs are too short for slices."""

SHORT_RUN = 64

FEW_QUERIES = 17
"""Up to so many new tokens of a request, the kernel of decode steps computes them: it is fast for few, and the most
that can be drafted, 16 after one, are judged as they would be decoded."""

FEW_ROWS = 128
"""Up to so many query rows on a KV head as well, where prefill has no bfloat16 products."""


@dataclass(frozen=True)
class FewQueries:
    """The segments of a view that have few query rows.

    Attributes:
        segments: [segments] bool, which they are.
        rows: their rows of the packed query; None for all.
        slots: [1, entries] int32 of their entries.
    """

    segments: np.ndarray
    rows: torch.Tensor | None
    slots: torch.Tensor
    tasks: Tasks


def _few_queries(
    span_view: SpanView, kv_heads: int, most: int, window: int, skipped: np.ndarray | None
) -> FewQueries:
    """Those of at most ``most`` queries that are not skipped; ``window`` is the layer's."""
    key = ("few", kv_heads, most, window)
    if key not in span_view.cache:
        entry, query, slots = span_view.entry, span_view.query, span_view.slots
        chosen = np.diff(query) <= most
        if skipped is not None:
            chosen &= ~skipped
        entries, queries = (np.diff(x)[chosen].astype(np.int64).tobytes() for x in (entry, query))
        reach, rows = span_view.reach(window), None
        if not chosen.all():
            packed = np.flatnonzero(np.repeat(chosen, np.diff(query)))
            rows, reach = torch.from_numpy(packed), None if reach is None else reach[packed]
            slots = slots[np.repeat(chosen, np.diff(entry))]
        tasks = _plan_few(entries, queries, kv_heads, None if reach is None else reach.tobytes())
        span_view.cache[key] = FewQueries(chosen, rows, torch.from_numpy(slots).view(1, -1), tasks)
    return span_view.cache[key]


@functools.lru_cache(maxsize=8)
def _plan_few(entries: bytes, queries: bytes, kv_heads: int, reach: bytes | None) -> Tasks:
    """The work for requests of so many entries and queries, and of each query how far it sees, int64: spans whose
    tables are as long share a plan.
    """
    entry, query = (np.cumsum([0, *np.frombuffer(counts, np.int64)]) for counts in (entries, queries))
    # A copy: kernels are compiled for arrays that may be written to.
    return plan_packed(
        entry, query, kv_heads, None if reach is None else np.frombuffer(reach, np.int64).copy()
    )


def _tiles(span_view: SpanView, chosen: np.ndarray, layer: "RadixAttention") -> np.ndarray:
    """The plan of ``prefill_attention`` for some segments."""
    heads, kv_heads, window = layer.tp_q_head_num, layer.tp_k_head_num, layer.sliding_window_size
    key = ("tiles", heads, kv_heads, window, chosen.tobytes())
    if key not in span_view.cache:
        reach = span_view.reach(window)
        tiles = plan_tiles(span_view.entry, span_view.query, chosen, heads, kv_heads, reach)
        span_view.cache[key] = tiles
    return span_view.cache[key]


def _place(slots: np.ndarray) -> Place:
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    if (len(breaks) + 1) * SHORT_RUN > len(slots) and len(breaks):
        return torch.from_numpy(slots.astype(np.int64))
    bounds = np.concatenate([[0], breaks, [len(slots)]])
    return [slice(int(slots[i]), int(slots[i]) + int(j - i)) for i, j in pairwise(bounds.tolist()) if j > i]


def _places(span_view: SpanView) -> list[tuple[slice, Place, Place]]:
    """Per segment its rows of the packed query, and where the KV before them and their own lies."""
    if "places" not in span_view.cache:
        found = []
        bounds = zip(
            span_view.query.tolist(), span_view.query[1:].tolist(), span_view.entry[1:].tolist(), strict=False
        )
        for i, (begin, stop, end) in enumerate(bounds):
            middle = end - (stop - begin)
            before, own = span_view.slots[int(span_view.entry[i]) : middle], span_view.slots[middle:end]
            found.append((slice(begin, stop), _place(before), _place(own)))
        span_view.cache["places"] = found
    return span_view.cache["places"]


def _read(pool: torch.Tensor, place: Place, dtype: torch.dtype) -> torch.Tensor:
    """The KV at a place: a view where it is one run, else a copy."""
    if isinstance(place, torch.Tensor):
        return pool.index_select(0, place).to(dtype)
    runs = [pool[run] for run in place] or [pool[:0]]
    return (runs[0] if len(runs) == 1 else torch.cat(runs)).to(dtype)


class CpuAttentionBackend(SpanAttentionBackend):
    """Paged attention on the CPU: float32, bfloat16 and float16, GQA, sliding windows, chunked prefill."""

    name = "CPU"
    packed_weights = 0
    """Matrices whose weights are packed, which nobody can change or read back."""
    wide_weights = 0
    """Matrices that are multiplied in float32, where the processor has no bfloat16 products."""
    joined_layers = 0
    """Decoder layers that take a few rows in two calls."""
    joined_steps = 0
    """Decode steps whose layers were computed together."""

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__(model_runner)
        config = model_runner.model_config
        shape = (
            *devices.heads_of(config, model_runner.ps.tp_size),
            config.head_dim,
            config.v_head_dim,
        )
        paged_attention_cpu.warm_up(*shape, model_runner.kv_cache_dtype)
        self.bfloat16_products = takes_products(config.dtype, model_runner.kv_cache_dtype, *shape[2:])
        self.amx = self.bfloat16_products and has_amx()
        self.bfloat16_keys = model_runner.kv_cache_dtype == torch.bfloat16
        if self.bfloat16_products:
            prefill_attention_cpu.warm_up()
        window_scores_cpu.warm_up(*shape[:3], model_runner.kv_cache_dtype)
        cpu_ops.warm_up(config.dtype)
        store_kv_cpu.warm_up(config.dtype)
        compact_kv_cpu.warm_up(model_runner.kv_cache_dtype)
        sampling_cpu.warm_up()
        self.widens = not cpu_linear.multiplies_bfloat16()
        if not self.widens:
            self.packed_weights = cpu_linear.pack(model_runner.model)
        else:
            self.wide_weights = cpu_linear.widen(model_runner.model)
        self.joined_layers = cpu_layers.join(model_runner.model, self)

    def decode(self, query: torch.Tensor, layer: "RadixAttention", span_view: SpanView) -> torch.Tensor:
        few = _few_queries(span_view, layer.tp_k_head_num, 1, layer.sliding_window_size, None)
        output, _ = paged_attention(query, self._pool(layer), few.slots, few.tasks, layer.scaling)
        return output.to(query.dtype)

    def reads(self, layers: Sequence["RadixAttention"]) -> list[Reads] | None:
        """What layers read in this decode step, in runs of those that have the same work; None where each of them
        has to be seen by itself.
        """
        step = self.alternating
        if self.watched or (step is not None and step.capacity):
            return None
        parts = []
        for _, span in groupby(layers, lambda x: (self.span_of(x.layer_id), x.sliding_window_size)):
            together = list(span)
            work = self._span_reads(together[0])
            for layer in together:
                pool, own = self._pool(layer), self.step_of(layer)
                parts.append((*work, pool, pool if own is None else own.state.compact[layer.layer_id]))
        found = []
        # Spans whose tables are alike have one and the same plan of work.
        for _, run in groupby(parts, lambda part: (id(part[0]), part[1].shape)):
            (tasks, *_), *columns = zip(*run, strict=True)
            found.append(Reads(tasks, *columns))
        return found

    def _span_reads(self, layer: "RadixAttention") -> tuple[Tasks, torch.Tensor, np.ndarray]:
        """Of the span that this layer is in: the work, the page table, and where keys and values go."""
        span_view = self.view_of(layer.layer_id)
        if (step := self.step_of(layer)) is not None:
            plan = step.span_step(layer.layer_id, span_view)
            return plan.step.plan.tasks, plan.table, span_view.write
        few = _few_queries(span_view, layer.tp_k_head_num, 1, layer.sliding_window_size, None)
        return few.tasks, few.slots, span_view.write

    def extend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        layer: "RadixAttention",
        span_view: SpanView,
        output: torch.Tensor,
        skipped: np.ndarray | None,
    ) -> None:
        kv_heads, window = layer.tp_k_head_num, layer.sliding_window_size
        reach = span_view.reach(window)
        pool, dtype = self._pool(layer), query.dtype
        products = takes_products(dtype, pool[0].dtype, layer.qk_head_dim, layer.v_head_dim)
        most = FEW_QUERIES if products else max(FEW_QUERIES, FEW_ROWS * kv_heads // layer.tp_q_head_num)
        few = _few_queries(span_view, kv_heads, most, window, skipped)
        if few.segments.any():
            rows = slice(None) if few.rows is None else few.rows
            output[rows] = paged_attention(query[rows], pool, few.slots, few.tasks, layer.scaling)[0].to(
                dtype
            )
        done = few.segments if skipped is None else few.segments | skipped
        if done.all():
            return
        if products:
            tiles = _tiles(span_view, ~done, layer)
            prefill_attention(query, pool, span_view.slots, tiles, layer.scaling, output, reach)
            return
        keys, values = pool
        if self.widens:
            # PyTorch's products of 16-bit numbers are no faster here, and round attention's weights.
            dtype = torch.float32
        for segment, (packed, before, own) in enumerate(_places(span_view)):
            if not done[segment]:
                output[packed] = extend_attention(
                    query[packed].to(dtype),
                    _read(keys, own, dtype),
                    _read(values, own, dtype),
                    layer.scaling,
                    None if reach is None else reach[packed],
                    (_read(keys, before, dtype), _read(values, before, dtype)),
                )

    def store(self, layer: "RadixAttention", slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if not store_kv(k, v, self._pool(layer), slots):
            super().store(layer, slots, k, v)

    def slots_to_write(self, layer_id: int, span_view: SpanView) -> torch.Tensor:
        if "write" not in span_view.cache:
            span_view.cache["write"] = torch.from_numpy(span_view.write)
        return span_view.cache["write"]
