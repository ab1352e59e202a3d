"""No request waits for Triton: whatever steps ask for on a GPU was compiled at start.

Nothing is compiled or launched here. Triton's own binder says of each launch which compiled form it takes: types,
what is known of numbers and addresses, constants, options.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from fathom.kernels import dispatch
from fathom.kernels.compact_kv import compact_kv
from fathom.kernels.triton_aot import discover
from fathom.kernels.window_scores import pool_saliency, row_mean_scores, window_of
from fathom.runtime import decode
from fathom.runtime.decode import Shape, SlowFast
from fathom.runtime.decode_step import AS_SERVED, Entry
from fathom.runtime.fastkv.select import Sizes, propagated_tokens, retained_entries
from fathom.runtime.kv.memory import KvMemory
from fathom.runtime.kv.view import Batch
from fathom.runtime.sfi.config import SfiConfig
from fathom.runtime.sfi.options import SfiOptions
from fathom.runtime.sfi.refresh import InOrder
from fathom.runtime.sfi.rules import RANDOM, Reading
from fathom.runtime.sglang_host.attention import triton_attention
from fathom.runtime.sglang_host.attention.attention_layers import windowed
from fathom.runtime.sglang_host.attention.triton_attention import TritonAttentionBackend
from fathom.runtime.sglang_host.draft import draft_model
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.step import compression

ROWS, LONGEST, SLOTS, SPANS = 16, 40003, 60000, 2
TRIGGERS = np.zeros(10, bool)
BY_WARP, STORE = "_by_warp_kernel", "_store_kernel"


@pytest.fixture
def forms(monkeypatch):
    """The compiled forms that launches have asked for so far, of a GPU of capability 9.0 with 132 processors."""
    backend, binders, asked = make_backend(GPUTarget("cuda", 90, 32)), {}, set()

    def run(self, *args, grid, warmup, **kwargs):
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binders[self](*args, **kwargs)
        asked.add((self.fn.__name__, *map(str, specialization), str(options)))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)  # launches for tensors of the host
    monkeypatch.setattr(decode, "lanes_of", lambda device: (InOrder(), 4))
    monkeypatch.setattr(devices, "largest", lambda values: values)
    monkeypatch.setattr(triton_attention, "most_prefilled", lambda longest: 64)
    return asked


class Server:
    """What a server makes at start: the target's backend, slow-fast decoding, FastKV and a draft's look-ahead.

    The upper of two layers has a sliding window, or -1 for none.
    """

    def __init__(self, heads, kv_heads, dim, dtype, kv_dtype, window):
        self.windows = -1, window
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.pool = [torch.zeros(SLOTS + 1, kv_heads, dim, dtype=kv_dtype) for _ in range(2)]
        config = SimpleNamespace(
            is_encoder_decoder=False,
            num_attention_heads=heads,
            get_num_kv_heads=lambda devices: kv_heads,
            dtype=dtype,
        )
        buffers = SimpleNamespace(
            size=SLOTS,
            spans=SPANS,
            span=1,
            get_key_buffer=lambda layer: self.pool[0],
            get_value_buffer=lambda layer: self.pool[1],
            set_kv_buffer=lambda *given: None,
        )
        table = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        runner = SimpleNamespace(
            model_config=config,
            use_mla_backend=False,
            sliding_window_size=None,
            model=torch.nn.ModuleList(
                RadixAttention(heads, dim, 0.125, kv_heads, number, sliding_window_size=size)
                for number, size in enumerate(self.windows)
            ),
            kv_cache_dtype=kv_dtype,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool=buffers,
            token_to_kv_pool_allocator=SimpleNamespace(memory=KvMemory(SLOTS, 1, SPANS, SLOTS)),
            ps=SimpleNamespace(tp_size=1),
        )
        self.backend = TritonAttentionBackend(runner)
        self.backend.processors = 132
        shape = Shape(SPANS, 1, heads, kv_heads, dim, dim, kv_dtype, LONGEST, ROWS, query_dtype=dtype)
        shape = replace(shape, windowed=windowed(runner.model))
        options = SfiOptions(SfiConfig(selected=1000), buffer_mib=64, evidence_mib=1)
        self.slow_fast = SlowFast(shape, options, TRIGGERS)
        compression.warm_up(*self.pool, heads, dtype)
        self.draft = draft_model.DraftModel.__new__(draft_model.DraftModel)
        self.draft.pool, self.draft.runner = buffers, SimpleNamespace(model_config=config)
        self.draft._warm_up(heads)

    def layer(self, number):
        return SimpleNamespace(
            layer_id=number,
            tp_q_head_num=self.heads,
            tp_k_head_num=self.kv_heads,
            tp_v_head_num=self.kv_heads,
            qk_head_dim=self.dim,
            v_head_dim=self.dim,
            scaling=0.125,
            logit_cap=0.0,
            attn_type=AttentionType.DECODER,
            is_cross_attention=False,
            sliding_window_size=self.windows[number],
        )

    def attend(self, lengths, new, decodes):
        """A step's attention; queries, keys and values are parts of one projection, as models give them."""
        slots = [np.arange(1, length + 1) for length in lengths]
        self.backend.set_batch(Batch.plain(np.arange(len(new)), np.array(lengths), slots, np.array(new)))
        for number in range(SPANS):
            widths = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
            parts = torch.empty(sum(new), sum(widths), dtype=self.dtype).split(widths, -1)
            forward = self.backend.forward_decode if decodes else self.backend.forward_extend
            forward(*parts, self.layer(number), None)

    def prefill(self, prefixes, new):
        self.attend([*map(sum, zip(prefixes, new, strict=True))], new, decodes=False)

    def alternate(self, lengths, generated, new=None, prefixes=(), reading=AS_SERVED):
        """A step of requests that alternate, the last ones of the batch, behind such as prefill."""
        first, new = len(prefixes), new or []
        entries = [
            Entry(first + place, length, [1] * generated, reading=reading)
            for place, length in enumerate(lengths)
        ]
        step = self.backend.alternating = self.slow_fast.begin(entries)
        with self.slow_fast.executor.step():
            before = [*map(sum, zip(prefixes, new, strict=True))]
            self.attend([*before, *lengths], [*new, *[1] * len(lengths)], decodes=not new)
        self.backend.alternating = None
        step.finish()
        return step

    def compress(self, prompt, window, kept_above):
        """FastKV at the end of a prompt: the window's attention, both choices, and the copies of what is kept."""
        slots = torch.zeros(prompt, dtype=torch.int64)
        queries = torch.zeros(window, self.heads, self.dim, dtype=self.dtype)
        seen = window_of([window], [prompt], slots.view(1, -1), causal=True)
        mean = row_mean_scores(queries, self.pool[0], seen, 0.125)[0]
        sizes = Sizes(prompt, prompt, window)
        forced = torch.zeros(1, dtype=torch.int64) if kept_above else None
        propagated_tokens(pool_saliency(mean, sizes.ranked, 1), sizes, 0.2, forced)
        kept = retained_entries(pool_saliency(mean, sizes.ranked, self.kv_heads), sizes, 0.1)
        source, target = torch.zeros(kept.shape, dtype=torch.int64), torch.zeros(kept.shape[1])
        compact_kv(*self.pool, source, target.long(), disjoint=True)

    def look_ahead(self, prompts, rows):
        queries = torch.zeros(sum(rows), self.heads, self.dim, dtype=self.dtype)
        slots = [torch.zeros(length, dtype=torch.int32) for length in prompts]
        self.draft.scores({0: queries, 1: queries.clone()}, rows, slots, 0.125)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "kv_dtype", "window"),
    [
        (8, 2, 128, torch.bfloat16, torch.bfloat16, -1),
        (16, 2, 256, torch.bfloat16, torch.bfloat16, -1),
        (16, 2, 256, torch.bfloat16, torch.bfloat16, 511),
        (6, 3, 64, torch.float16, torch.float16, -1),
        (4, 2, 64, torch.float32, torch.float32, -1),
        (8, 2, 128, torch.bfloat16, torch.float8_e4m3fn, -1),
    ],
    ids=str,
)
def test_steps_ask_for_nothing_that_was_not_compiled_at_start(
    forms, heads, kv_heads, dim, dtype, kv_dtype, window
):
    server = Server(heads, kv_heads, dim, dtype, kv_dtype, window)
    compiled = frozenset(forms)
    # What keeps the evidence of some shapes keeps none of others; PyTorch stores what is not rounded.
    names = {name for name, *_ in compiled}
    assert names | {BY_WARP, STORE} == {item.kernel.__name__ for _, item in discover()}
    assert (BY_WARP in names) == (kv_dtype == torch.bfloat16 and heads // kv_heads < 8)
    assert (STORE in names) == (kv_dtype == torch.float8_e4m3fn)

    def check(what):
        new = sorted({name for name, *_ in forms - compiled})
        assert new == [], f"{what}: compiled within a request"

    for prompt in (300, 301, 1024, 2049, 8192, 9000, 1, 3, 17, 33):
        for prefix in (0, 1, 16, 255, 700, 8191, 30000):
            server.prefill([prefix], [prompt])
            check(f"prefill of {prompt} tokens behind {prefix}")
    for batch in range(1, 6):
        server.prefill([0, 333, 64, 5000, 7][:batch], [301, 13, 9, 2, 1][:batch])
        check(f"prefill of {batch} requests")
    grown = server.backend.tables.grown
    server.prefill([30000] * ROWS, [9] * ROWS)
    assert server.backend.tables.grown > grown
    check("prefixes that are shared by so many that the tables grow")
    for rows in range(1, 9):
        server.attend([300 + 1201 * row for row in range(rows)], [1] * rows, decodes=True)
        check(f"decode of {rows} requests")
    capacities, generated = set(), 0
    for rows, longest in ((1, 300), (2, 8192), (3, 8193), (4, 9001), (4, 16), (1, 40000), (5, 700)):
        for reading in (AS_SERVED, Reading(RANDOM, seed=3)):
            server.slow_fast.clear()
            for generated in (1, 2):
                lengths = [longest - row for row in range(rows)]
                capacities.add(server.alternate(lengths, generated, reading=reading).capacity)
                check(f"step {generated} of {rows} requests that alternate, {longest} tokens")
    assert capacities >= {0, 1, 2, 3, 4}
    server.slow_fast.clear()
    for generated in (1, 2):
        server.alternate([900, 301], generated, new=[513, 7], prefixes=[0, 1000])
        check("requests that alternate behind such as prefill")
    for prompt in (16, 300, 301, 8192, 8193, 9000):
        for window in (8, 3, 32):
            server.compress(prompt, min(window, prompt - 1), kept_above=window == 3)
            check(f"FastKV, prompt of {prompt} tokens, window of {window}")
    for prompts, rows in (
        *(([300 + 17 * rows], [rows]) for rows in range(1, 9)),
        ([8192], [8]),
        ([9000, 8193], [8, 5]),
        ([301, 9000, 7], [1, 16, 8]),
        ([5, 6, 7, 8, 9], [2] * 5),
    ):
        server.look_ahead(prompts, rows)
        check(f"look-ahead of {rows} tokens behind prompts of {prompts}")
