"""SGLang's attention backend on the Triton kernels in ``kernels/``, for depth pages on a GPU; prefill by FlashInfer
where it takes the layout.

Without a GPU it runs in Triton's interpreter, one program after the other: how it is tested.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.runtime_context import get_schedule

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.key_shares import pick_pieces
from fathom.kernels.paged_decode import paged_decode
from fathom.kernels.paged_extend import TILES, paged_extend, pick_splits, tiles_of
from fathom.kernels.span_tables import BLOCK, span_tables
from fathom.kernels.store_kv import EIGHT_BITS, narrowed, store_kv_8bit
from fathom.runtime.captured import CapturedStep
from fathom.runtime.config import MOST_DRAFTED
from fathom.runtime.decode import SlowFast
from fathom.runtime.decode_step import Step
from fathom.runtime.kv.device_view import DeviceTables, DeviceView
from fathom.runtime.kv.mirror import PageMirror
from fathom.runtime.kv.near import Near, NearBuffers, near
from fathom.runtime.kv.view import Batch, SpanView, TableView
from fathom.runtime.sglang_host.attention import attention_layers, flashinfer_prefill
from fathom.runtime.sglang_host.attention.attention_layers import is_windowed
from fathom.runtime.sglang_host.attention.span_attention import SpanAttentionBackend
from fathom.runtime.sglang_host.engine_args import has_e4m3
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.staging import send

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner


DENSE, ALTERNATING, RENEWING, SEVERAL = "dense", "alternating", "renewing", "several"
"""What is captured: steps of requests that read everything, of such as alternate, of such as choose anew, and
passes over several tokens of requests that read everything."""

SHARED = 4
"""Entries that the tables of a captured step may name for each slot of the pool: requests share prefixes. A step
that names more is not replayed."""
MOST_NEW = 1 + MOST_DRAFTED
"""Tokens of a request in a captured pass."""
USUAL_NEW = 8
"""Tokens of a request that its programs are made for; the KV is read once more for each further eight."""
FEWEST_NEW = 4
"""Tokens that a request of such a pass is taken to have, where its programs are counted."""


def most_prefilled(longest: int) -> int:
    """Prompt tokens that a step computes at most; ``longest`` is the context."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or 0
    # Without chunks whole prompts are added until there are enough tokens, whatever the length of the last one.
    return chunk if chunk > 0 else schedule.max_prefill_tokens + longest


class TritonAttentionBackend(SpanAttentionBackend):
    """Paged attention in Triton: float32, bfloat16 and float16, KV of 8 bits too, any group and head size, chunked
    prefill.

    KV of 8 bits is read as it is stored by whoever reads it, the rows' own pass included: what a token sees does
    not depend on where a prompt is cut into chunks.
    """

    name = "Triton"
    mirror: PageMirror | None = None
    """Made at the first step that needs it: a draft's never do."""
    padded_to = 0
    """Rows that the step is filled up to: the size of a captured step, 0 where none is replayed."""
    several = False
    """Whether passes over several tokens of each request are captured; told before the first capture."""
    given: Batch | None = None
    """While such a pass may be replayed: its rows."""
    slow_fast: SlowFast | None = None
    """Whose steps are captured too; told before the first capture."""
    captured_step: CapturedStep | None = None
    """Stands for the steps of requests which alternate in what is captured and replayed."""
    captures = DENSE
    """What is being captured, if something is."""
    near: NearBuffers | None = None
    """What captured layers with sliding windows read; None where there are none."""
    most_near = 0
    """Most entries before a segment's own there, in the step that is replayed."""

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__(model_runner)
        kv_dtype = model_runner.kv_cache_dtype
        if kv_dtype not in (torch.float32, torch.float16, torch.bfloat16, *EIGHT_BITS):
            raise NotImplementedError(
                f"the Triton attention backend has no {kv_dtype} KV; use --kv-cache-dtype auto"
            )
        if kv_dtype in EIGHT_BITS:
            attention_layers.refuse_kv_scales(model_runner.model, torch.finfo(kv_dtype).max)
        if kv_dtype == torch.float8_e4m3fn and not has_e4m3():
            raise NotImplementedError("this GPU has no e4m3; use --kv-cache-dtype fp8_e5m2 or bfloat16")
        rows, self.longest = self.req_to_token.shape
        device = self.req_to_token.device
        spans = getattr(self.token_to_kv_pool, "spans", 1)
        entries = SHARED * max(self.token_to_kv_pool.size, self.longest)
        # Larger buffers than the first are not only for more rows: all of their lists would be there twice.
        self.tables = DeviceTables(spans, rows, entries, rows + most_prefilled(self.longest), device)
        self.flashinfer, reason = flashinfer_prefill.choose(model_runner, spans, device)
        self.prefill_attention = f"Triton: {reason}" if reason else "FlashInfer"
        self.runner = model_runner
        self.processors = 1
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.narrow = self.token_to_kv_pool.get_key_buffer(0).dtype in EIGHT_BITS
        if runs_triton(self.tables.first.slots):
            self._warm_up(devices.heads_of(model_runner.model_config, model_runner.ps.tp_size)[0])

    def _warm_up(self, heads: int) -> None:
        """Compile what steps launch, so that no request waits for it (cached on disk).

        Attention in the model's type: prefill's for each of its tiles, with one split, which writes the output, and
        with several, which write float32 for the merge; and decode's.
        """
        pool = self.token_to_kv_pool.get_key_buffer(0), self.token_to_kv_pool.get_value_buffer(0)
        kv_heads = pool[0].shape[1]
        there = {"dtype": self.runner.model_config.dtype, "device": pool[0].device}
        stored = {"dtype": pool[0].dtype} if self.narrow else {}
        room = self.tables.first
        # The dummy slot's row of the table, and no entry of it; what is written goes there.
        table, none = room.slots[0].unsqueeze(1), room.head[0, 0, :1]
        for splits in (1, 2):
            for lines in TILES:
                new = max(lines * kv_heads // heads, 1)
                query, output = (torch.zeros(new, heads, x.shape[2], **there) for x in pool)
                keys, values = (torch.zeros(new, kv_heads, x.shape[2], **(there | stored)) for x in pool)
                bounds = torch.arange(2, dtype=torch.int32, device=query.device) * new
                rows = query, keys, values, *pool, table, none, none, bounds, new, 1.0, splits, output
                paged_extend(*rows)
                if attention_layers.windowed(self.runner.model):
                    paged_extend(*rows, reach=torch.zeros(new, dtype=torch.int32, device=query.device))
        paged_decode(query[:1], *pool, table, none, none, 1.0, 1, output[:1])
        if self.narrow:
            keys, values = (torch.zeros(1, kv_heads, x.shape[2], **there) for x in pool)
            store_kv_8bit(keys, values, pool, room.write[0, :1])
        blocks = torch.zeros(1, BLOCK, dtype=torch.int32, device=room.head.device)
        lists = room.head, room.slots, room.write
        # No request.
        span_tables(
            *lists, 0, 1, 0, self.req_to_token, blocks, blocks.unsqueeze(0), blocks, self.memory.page_size
        )

    @property
    def looked_up_steps(self) -> int:
        """Steps whose page tables the device has written itself."""
        return self.tables.looked_up

    @property
    def moved_steps(self) -> int:
        """Steps that read the page tables of the step before them, a token further."""
        return self.tables.moved

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        if self.rows is None and forward_batch.rids is None:
            # Nobody's requests, which SGLang makes up at start to tune kernels: one row each, as before a capture.
            self.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        else:
            super().init_forward_metadata(forward_batch)

    # --- CUDA graphs: what SGLang's runner of captured decode steps asks for ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.tables.widen(max_bs, max_num_tokens)
        windows = attention_layers.windows_of(self.runner.model, self.tables.spans, self.span_of)
        if any(windows):
            sizes = max(max_bs, max_num_tokens), max_num_tokens
            self.near = NearBuffers(windows, *sizes, self.req_to_token.device)
        if self.slow_fast is not None:
            self.captured_step = CapturedStep(self.slow_fast, max_bs)

    def replays(self, requests: int, entries: int) -> bool:
        """Whether a captured step can take the place of a decode step, or of the pass that is given.

        A captured step is the model's own forward, of which nobody sees the layers. Its buffers are the first ones,
        which hold ``SHARED`` entries for each slot of the pool.

        Args:
            entries: tokens of all requests.
        """
        given = self.given
        if self.watched or (self.replaced and given is None):
            return False
        rows, most = (requests, 1) if given is None else (int(given.query[-1]), int(given.new.max()))
        if self.alternating is None:
            serves = most <= MOST_NEW
        else:
            serves = self.captured_step is not None and self.captured_step.serves(self.alternating, rows)
        return serves and self.tables.first.hold(requests, entries + requests * (1 + self.beyond), rows)

    @contextmanager
    def capturing(self, what: str) -> Iterator[None]:
        """Within it a step of this kind is captured."""
        self.captures = what
        try:
            yield
        finally:
            self.captures = DENSE

    def set_batch(self, batch: Batch) -> None:
        super().set_batch(batch)
        self.padded_to = 0

    def init_forward_metadata_out_graph(
        self, forward_batch: "ForwardBatch", in_capture: bool = False
    ) -> None:
        """Fill the buffers that a captured step reads; before a capture with dummies alone.

        Args:
            forward_batch: filled up to a size that is captured, its last ``num_padding`` requests made up.
        """
        if in_capture:
            none = np.zeros(0, np.int64)
            self.set_batch(Batch.plain(none, none, [], none))
        elif self.given is not None:
            self.set_batch(self.given)
        else:
            assert self.rows is not None and forward_batch.seq_lens_cpu is not None
            rows = self.rows.cpu().numpy()
            assert len(rows) == forward_batch.batch_size - forward_batch.num_padding
            # A part of what the next step is filled into.
            lengths = forward_batch.seq_lens_cpu[: len(rows)].cpu().numpy().copy()
            self.set_decode_batch(rows, lengths)
        self.padded_to = forward_batch.batch_size
        views = [self.views[span] for span in range(self.tables.spans)]
        there = [self.device_view(span * self.token_to_kv_pool.span, view) for span, view in enumerate(views)]
        self._fill_near(views)
        if self.captures in (ALTERNATING, RENEWING) or self.alternating is not None:
            assert self.captured_step is not None
            self.captured_step.fill(self.padded_to, self.alternating, views, there)

    def moves_on(self) -> bool:
        """Whether :meth:`move_on` may follow: the last step was a captured one, with room behind each request."""
        return bool(self.padded_to) and self.tables.moves_on()

    def move_on(self) -> None:
        """Fill the buffers for the step behind theirs: of the same requests, each a token longer."""
        before, padded_to = self.batch, self.padded_to
        self.set_decode_batch(before.rows, before.lengths + 1)
        self.padded_to = padded_to
        views = [self.views[span] for span in range(self.tables.spans)]
        self.tables.move_on([view for view in views if isinstance(view, TableView)])
        self._fill_near(views)
        if self.alternating is not None:
            assert self.captured_step is not None
            there = [self.tables.fill(span, view, padded_to) for span, view in enumerate(views)]
            self.captured_step.fill(padded_to, self.alternating, views, there)

    def shared_read_ends(self, fm: "ForwardMode") -> SharedReadEnds:
        # A captured step reads its own buffers only; SGLang's tables are read when these are filled.
        return SharedReadEnds.PRE_REPLAY if fm.is_decode() else super().shared_read_ends(fm)

    # --- views on the device ---

    def device_view(self, layer_id: int, span_view: SpanView) -> DeviceView:
        """The view in the buffers of the layer's span."""
        span = self.span_of(layer_id)
        if isinstance(span_view, TableView) and not self.tables.holds(span, span_view, self.padded_to):
            self._look_up()
        return self.tables.fill(span, span_view, self.padded_to)

    def _look_up(self) -> None:
        """Have the device write what it can of this step's lists; nothing waits for it, nor it for the host.

        It is the step's only look at SGLang's request table and at the pages behind it: whoever composes the next
        batch may write there once that is over, which SGLang is told by an event.
        """
        views: list[TableView] = []
        while len(views) < self.tables.spans and isinstance(view := self.views[len(views)], TableView):
            views.append(view)
        if self.mirror is None:
            self.mirror = PageMirror(
                self.memory, len(self.req_to_token), self.longest, self.req_to_token.device
            )
        self.mirror.refresh(self.batch.rows.tolist())
        self.tables.look_up(views, self.mirror, self.req_to_token, self.padded_to)
        done = torch.get_device_module(self.req_to_token.device).Event()
        done.record()
        self.runner.shared_read_done_event = done

    def _fill_near(self, views: Sequence[SpanView]) -> None:
        """Have captured layers with sliding windows read these views, of all spans."""
        if self.near is not None:
            self.most_near = self.near.fill(views, self.padded_to)

    def _near(self, layer: "RadixAttention", span_view: SpanView, there: DeviceView) -> Near:
        """What a layer with a sliding window reads."""
        window, span = layer.sliding_window_size, self.span_of(layer.layer_id)
        if self.padded_to and self.near is not None:
            return self.near.near(span, window, len(there.begin), len(there.write), self.most_near)
        if ("near", window) not in span_view.cache:
            device = self.req_to_token.device
            span_view.cache["near", window] = near(span_view, window, device, self.padded_to)
        return span_view.cache["near", window]

    def slots_to_write(self, layer_id: int, span_view: SpanView) -> torch.Tensor:
        return self.device_view(layer_id, span_view).write

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: "RadixAttention", *args: Any, **kw: Any
    ) -> Any:
        # SGLang captures steps of one row per request; whose the rows are, only attention asks.
        forward = self.forward_extend if self.captures == SEVERAL else super().forward_decode
        return forward(q, k, v, layer, *args, **kw)

    def store(self, layer: "RadixAttention", slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.narrow:
            store_kv_8bit(*self._heads(k, v, layer), self._pool(layer), slots)
        else:
            super().store(layer, slots, k, v)

    def decode(self, query: torch.Tensor, layer: "RadixAttention", span_view: SpanView) -> torch.Tensor:
        there = self.device_view(layer.layer_id, span_view)
        first, lengths = there.begin, there.lengths
        if is_windowed(layer):
            first, lengths, *_ = self._near(layer, span_view, there)
        elif self.captures in (ALTERNATING, RENEWING):
            assert self.captured_step is not None
            renews = self.captures == RENEWING
            return self.captured_step.attend(
                layer.layer_id, query, self._pool(layer), there, layer.scaling, renews
            )
        output = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        # From shapes alone: a captured launch serves any lengths.
        pieces = pick_pieces(layer.tp_k_head_num, self.processors)
        paged_decode(query, *self._pool(layer), there.table, first, lengths, layer.scaling, pieces, output)
        return output

    def _alternate(
        self, step: Step, query: torch.Tensor, layer: "RadixAttention", span_view: SpanView
    ) -> torch.Tensor:
        there = self.device_view(layer.layer_id, span_view)
        return step.attend(layer.layer_id, query, self._pool(layer), span_view, layer.scaling, there)

    def extend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        layer: "RadixAttention",
        span_view: SpanView,
        output: torch.Tensor,
        skipped: np.ndarray | None,
    ) -> None:
        there = self.device_view(layer.layer_id, span_view)
        pool = self._pool(layer)
        flashinfer = self.flashinfer
        if (
            flashinfer is not None
            and self.stored
            and skipped is None
            and not is_windowed(layer)
            and flashinfer.takes(query, pool, span_view, there)
        ):
            flashinfer.attend(
                self.span_of(layer.layer_id), span_view, there, query, pool, layer.scaling, output
            )
            return
        if new is None:
            new = pool[0][there.write], pool[1][there.write]
        elif self.narrow:
            # Not from the pool: a row whose keys it has already writes them to the dummy slot.
            new = narrowed(new[0], pool[0].dtype), narrowed(new[1], pool[1].dtype)
        begin, most_prefix, longest, reach = there.begin, there.most_prefix, self.longest, None
        prefixes = there.prefixes if skipped is None else self._prefixes(span_view, skipped)
        if is_windowed(layer):
            _, _, begin, prefixes, reach, most_prefix = self._near(layer, span_view, there)
            longest = min(longest, layer.sliding_window_size)
        segments, most_new, usual_new = len(prefixes), there.most_new, None
        if self.captures == SEVERAL:
            # From shapes alone: a captured launch serves any requests of so many rows.
            segments, most_new = -(-segments // FEWEST_NEW), min(segments, MOST_NEW)
            most_prefix, usual_new = longest, min(most_new, USUAL_NEW)
        group = layer.tp_q_head_num // layer.tp_k_head_num
        widths = layer.qk_head_dim, layer.v_head_dim
        tiles = tiles_of(usual_new or most_new, group, *widths, query.element_size())
        programs = tiles * segments * layer.tp_k_head_num
        paged_extend(
            query,
            *new,
            *pool,
            there.table,
            begin,
            prefixes,
            there.bounds,
            most_new,
            layer.scaling,
            pick_splits(programs, most_prefix, self.processors),
            output,
            usual_new,
            reach,
        )

    def _prefixes(self, span_view: SpanView, skipped: np.ndarray) -> torch.Tensor:
        """Entries before the rows, none for the segments whose rows are computed elsewhere."""
        if "prefixes" not in span_view.cache:
            counts = np.diff(span_view.entry) - np.diff(span_view.query)
            counts = np.where(skipped, 0, counts).astype(np.int32)
            span_view.cache["prefixes"] = send(counts, self.req_to_token.device)
        return span_view.cache["prefixes"]
