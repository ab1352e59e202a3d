"""What Fathom's attention backends share: the views of a step, where its keys go, taps, and rows that alternate."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType

from fathom.kernels.kv_pair import KvPair
from fathom.runtime.decode_step import Step
from fathom.runtime.kv.view import Batch, SpanView, Views
from fathom.runtime.sglang_host.attention import attention_layers
from fathom.runtime.sglang_host.attention.attention_layers import is_windowed
from fathom.runtime.staging import send

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

Tap = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Sees a layer's prefill attention before it is computed: layer, rotated queries [rows, heads, head_dim], the
pool's keys and values [slots, kv_heads, head_dim] with the new tokens' in them, and the scale of the products."""


def virtual_slots(table: torch.Tensor, rows: np.ndarray, lengths: np.ndarray) -> Sequence[np.ndarray]:
    """[tokens] virtual slots of each request; parts of the table where it is on the host.

    Args:
        table: SGLang's request table [rows, positions], on any device.
    """
    if table.device.type == "cpu":
        host = table.numpy()
        return [host[row, :length] for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)]
    return _FetchedSlots(table, rows, lengths)


class _FetchedSlots(Sequence[np.ndarray]):
    """Virtual slots of a table on a device; copied from there, which waits for it, when the first is asked for."""

    def __init__(self, table: torch.Tensor, rows: np.ndarray, lengths: np.ndarray) -> None:
        self._table, self._rows, self._lengths = table, rows, lengths

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, request: Any) -> Any:
        return self._fetched[request]

    @cached_property
    def _fetched(self) -> list[np.ndarray]:
        rows = send(self._rows, self._table.device, torch.int64)
        host = self._table[rows, : int(self._lengths.max(initial=0))].cpu().numpy()
        return [row[:length] for row, length in zip(host, self._lengths.tolist(), strict=True)]


class KeysStored(Exception):
    """Keys and values of a layer's rows are in the pool; what would follow is not wanted."""


class SpanAttentionBackend(AttentionBackend):
    """Attention over depth pages; how it is computed is a subclass's business.

    Everything about tables is worked out on the host, from the host's own numbers.
    """

    name = ""
    """In refusals."""
    batch: Batch
    views: Views
    alternating: Step | None = None
    """While a batch runs that has requests which decode slow and fast: what they read, and what every decoding
    request reads, unless drafted tokens of such as read everything are verified."""
    watched = False
    """Whether somebody looks at what each layer is given."""
    replaced = False
    """Whether a step runs in which another forward takes the place of the model's own."""
    ended_rows = 0
    """Rows of prefill of which the last layer that they were in computed keys and values alone."""
    storing = False
    """While a layer is run for its rows' keys and values alone."""
    stored = True
    """Whether the pool has the keys of the rows whose attention is computed."""
    beyond = 0
    """Tokens behind each request's last one for which there is room already, in a decode step."""
    rows: torch.Tensor | None = None
    """[requests] of the batch that is running, on the host, where somebody has told."""

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__()
        config = model_runner.model_config
        if model_runner.use_mla_backend or config.is_encoder_decoder:
            raise NotImplementedError(
                f"the {self.name} attention backend serves decoder-only models with multi-head, grouped-query or "
                "multi-query attention; this model has "
                + ("an encoder" if config.is_encoder_decoder else "multi-head latent attention")
            )
        attention_layers.refuse_scaling(model_runner.model, self.name)
        # SGLang's forward context asks every backend for these two, on behalf of some models.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.memory = model_runner.token_to_kv_pool_allocator.memory
        self.pairs: dict[int, KvPair] = {}
        self.taps: dict[int, Tap] = {}

    # --- how attention is computed ---

    @abstractmethod
    def decode(self, query: torch.Tensor, layer: "RadixAttention", span_view: SpanView) -> torch.Tensor:
        """Attention of one row per segment: query [rows, heads, head_dim], output [rows, heads, value_dim] in its
        type."""

    @abstractmethod
    def extend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        layer: "RadixAttention",
        span_view: SpanView,
        output: torch.Tensor,
        skipped: np.ndarray | None,
    ) -> None:
        """Causal attention of packed rows, into ``output`` [rows, heads, value_dim].

        Args:
            query: [rows, heads, head_dim].
            new: the rows' own keys and values, as the model gave them; None where only the pool has them.
            skipped: [segments] bool, those whose rows are computed elsewhere: what is written to them counts for
                nothing. None where there are none.
        """

    @abstractmethod
    def slots_to_write(self, layer_id: int, span_view: SpanView) -> torch.Tensor:
        """[rows] int64 on the pool's device: where the rows' keys and values go."""

    def store(self, layer: "RadixAttention", slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values [rows, kv_heads, dim] to their slots of the layer's pool."""
        self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)

    # --- SGLang's interface ---

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        rows = (forward_batch.req_pool_indices if self.rows is None else self.rows).cpu().numpy()
        lengths = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
        lengths = lengths.cpu().numpy()
        if forward_batch.forward_mode.is_decode_or_idle():
            self.set_decode_batch(rows, lengths)
            return
        new = np.array(forward_batch.extend_seq_lens_cpu, np.int64)
        self.set_batch(Batch.plain(rows, lengths, virtual_slots(self.req_to_token, rows, lengths), new))

    def set_decode_batch(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """From here on the layers compute the last token of each of these requests."""
        slots = virtual_slots(self.req_to_token, rows, lengths)
        self.set_batch(Batch.plain(rows, lengths, slots, np.ones(len(rows), np.int64), self.beyond))

    def set_batch(self, batch: Batch) -> None:
        """From here on the layers compute these rows."""
        self.batch = batch
        self.views = Views(self.memory, batch)

    def view_of(self, layer_id: int) -> SpanView:
        """What a layer reads and writes in this step."""
        return self.views[self.span_of(layer_id)]

    def span_of(self, layer_id: int) -> int:
        """The span of a layer: layers of one span share a view."""
        return layer_id // self.token_to_kv_pool.span

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        self._refuse(more)
        span_view = self._store(k, v, layer, save_kv_cache)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if (step := self.step_of(layer)) is not None:
            output = self._alternate(step, query, layer, span_view)
        else:
            output = self.decode(query, layer, span_view)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        self._refuse(more)
        span_view = self._store(k, v, layer, save_kv_cache)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if layer.layer_id in self.taps:
            pool = self._pool(layer)
            self.taps[layer.layer_id](layer.layer_id, query, *pool, layer.scaling)
        if self.storing:
            raise KeysStored
        output = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        new = None if k is None else self._heads(k, v, layer)
        if (step := self.step_of(layer)) is None:
            self.extend(query, new, layer, span_view, output, None)
        else:
            own, skipped = self._parts(step, span_view)
            if not skipped.all():
                self.extend(query, new, layer, span_view, output, skipped)
            output[own] = self._alternate(step, query[own], layer, span_view)
        return output.view(len(query), -1)

    def step_of(self, layer: "RadixAttention") -> Step | None:
        """What of the step that is running alternates at a layer; nothing where it looks back over a window."""
        return None if is_windowed(layer) else self.alternating

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def store_alone(self, run: Callable[[], Any]) -> None:
        """Run a layer up to its attention: keys and values of all rows, which are in the pool then, and taps.

        Args:
            run: one layer of the model; it may have changed its input in place.
        """
        self.storing = True
        try:
            run()
        except KeysStored:
            return
        finally:
            self.storing = False
        raise RuntimeError("the layer has computed its attention elsewhere")

    # --- pieces ---

    def _pool(self, layer: "RadixAttention") -> KvPair:
        """Keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of a layer."""
        number = layer.layer_id
        keys, values = (
            self.token_to_kv_pool.get_key_buffer(number),
            self.token_to_kv_pool.get_value_buffer(number),
        )
        known = self.pairs.get(number)
        if known is None or known[0] is not keys or known[1] is not values:
            known = self.pairs[number] = KvPair(keys, values)
        return known

    @staticmethod
    def _heads(
        k: torch.Tensor, v: torch.Tensor, layer: "RadixAttention"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A projection's keys and values by head."""
        keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        return keys, v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)

    def _parts(self, step: Step, span_view: SpanView) -> tuple[torch.Tensor, np.ndarray]:
        """Rows of the packed query that alternate, and [segments] bool, whose they are."""
        if "parts" not in span_view.cache:
            skipped = np.zeros(len(span_view.query) - 1, bool)
            skipped[step.segments] = True
            rows = np.flatnonzero(np.repeat(skipped, np.diff(span_view.query)))
            span_view.cache["parts"] = send(rows, self.req_to_token.device), skipped
        return span_view.cache["parts"]

    def _alternate(
        self, step: Step, query: torch.Tensor, layer: "RadixAttention", span_view: SpanView
    ) -> torch.Tensor:
        """[rows, heads, value_dim] in the query's type, for the rows of the step."""
        return step.attend(layer.layer_id, query, self._pool(layer), span_view, layer.scaling)

    def _refuse(self, asked: dict[str, Any]) -> None:
        """What a model asks of its attention beside the usual, learnt sinks for example, cannot be left out.

        Raises:
            NotImplementedError: with its names.
        """
        if names := [name for name, value in asked.items() if value is not None]:
            raise NotImplementedError(f"the {self.name} attention backend has no {', '.join(sorted(names))}")

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, layer: "RadixAttention", save_kv_cache: bool
    ) -> SpanView:
        if layer.logit_cap > 0 or layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
            raise NotImplementedError(
                f"the {self.name} attention backend has no logit soft-capping, encoder or cross attention"
            )
        span_view = self.view_of(layer.layer_id)
        self.stored = save_kv_cache or k is None
        if save_kv_cache and k is not None:
            self.store(layer, self.slots_to_write(layer.layer_id, span_view), k, v)
        return span_view
