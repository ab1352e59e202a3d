"""The attention backend for GPUs by itself: what it gives a decode launch, and what it refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from fathom.runtime.kv.device_view import DeviceTables
from fathom.runtime.kv.lists import ListView, SlotLists
from fathom.runtime.kv.memory import Growth, KvMemory
from fathom.runtime.kv.view import Batch
from fathom.runtime.plan import build
from fathom.runtime.sglang_host.attention import attention_layers, span_attention, triton_attention
from fathom.runtime.sglang_host.draft.draft_attention import Captured, TritonDraftBackend
from fathom.runtime.sglang_host.draft.draft_graphs import DraftGraphRunner
from fathom.runtime.sglang_host.step import passes
from fathom.runtime.sglang_host.step.decode_graphs import DecodeGraphRunner

ROWS, LONGEST, SPANS, HEADS, KV_HEADS, DIM = 8, 64, 2, 4, 2, 16


class Pool:
    """The part of ``DepthKvPool`` that a backend uses; one layer per span."""

    size, spans, span = 400, SPANS, 1

    def __init__(self):
        self.keys, self.values = (torch.zeros(401, KV_HEADS, DIM) for _ in range(2))
        self.written = []

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def set_kv_buffer(self, layer, slots, keys, values):
        self.written.append((layer.layer_id, slots.data_ptr(), slots.tolist()))


def runner(**changed):
    fields = {
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "use_mla_backend": False,
        "sliding_window_size": None,
        "model": torch.nn.Module(),
        "kv_cache_dtype": torch.float32,
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(ROWS, LONGEST, dtype=torch.int32)),
        "token_to_kv_pool": Pool(),
        "token_to_kv_pool_allocator": SimpleNamespace(memory=KvMemory(400, 1, SPANS, 400)),
    }
    return SimpleNamespace(**(fields | changed))


def layer(number, window=-1):
    return SimpleNamespace(
        layer_id=number,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=0.25,
        logit_cap=0.0,
        attn_type=AttentionType.DECODER,
        is_cross_attention=False,
        sliding_window_size=window,
    )


WINDOW = 6
CHUNK = 24
"""Prompt tokens of a step at most; more than there are request rows."""


@pytest.fixture(autouse=True)
def schedule(monkeypatch):
    given = SimpleNamespace(chunked_prefill_size=CHUNK, max_prefill_tokens=10)
    monkeypatch.setattr(triton_attention, "get_schedule", lambda: given)
    return given


@pytest.fixture
def launches(monkeypatch):
    """What attention was called with: layouts of its tensors, addresses of those that stay, and its numbers."""
    seen = []

    def layout(x, stays):
        return (x.shape, x.stride(), x.data_ptr() if stays else 0) if isinstance(x, torch.Tensor) else x

    def record(passing):
        return lambda *given: seen.append([layout(x, i not in passing) for i, x in enumerate(given)])

    # What a step computes and is given lies where SGLang's captured step has it.
    monkeypatch.setattr(triton_attention, "paged_decode", record({0, 8}))
    monkeypatch.setattr(triton_attention, "paged_extend", record({0, 1, 2, 12}))
    monkeypatch.setattr(attention_layers, "windows_of", lambda _, spans, __: [[WINDOW]] * spans)
    return seen


class Life:
    """Requests that grow when they are told; every second one has a private table from the second span on."""

    def __init__(self, made):
        self.table, self.memory = made.req_to_token_pool.req_to_token, made.token_to_kv_pool_allocator.memory
        dense, shallow = (build(policy, SPANS, 1) for policy in ({}, {"depth_cutoff": 1}))
        for row in range(4):
            self.memory.open(row, shallow if row % 2 else dense, 4)
        self.length, self.taken = dict.fromkeys(range(4), 0), 0

    def grow(self, row, tokens):
        begin, end = self.length[row], self.length[row] + tokens
        own = np.arange(self.taken + 1, self.taken + 1 + tokens)
        self.memory.grow([Growth(row, begin, end, own)])
        self.table[row, begin:end] = torch.from_numpy(own)
        self.taken, self.length[row] = self.taken + tokens, end

    def batch(self, rows, new):
        slots = [self.table[row, : self.length[row]].numpy() for row in rows]
        return Batch.plain(np.array(rows), np.array([*map(len, slots)]), slots, np.array(new))


def compute(backend, rows, window=-1):
    for span in range(SPANS):
        new = torch.zeros(rows, KV_HEADS * DIM)
        backend.forward_decode(torch.zeros(rows, HEADS * DIM), new, new, layer(span, window), None)


def test_a_decode_launch_depends_on_the_batchs_size_alone(launches):
    """Requests of any lengths, at any rows: all that a captured launch would hold on to stays the same."""
    made = runner()
    backend, life = triton_attention.TritonAttentionBackend(made), Life(made)
    for step, rows in enumerate([(0, 1, 2), (3, 0, 1), (2, 3, 1)]):
        for row in rows:
            life.grow(row, 5 + 3 * step + row)
        backend.set_batch(life.batch(rows, [1, 1, 1]))
        compute(backend, 3)
    assert all(launch == launches[i % SPANS] for i, launch in enumerate(launches))
    assert launches[0] != launches[1]
    written = made.token_to_kv_pool.written
    assert len(written) == 6 and len({(number, at) for number, at, _ in written}) == SPANS
    assert len({tuple(slots) for _, _, slots in written}) == 6
    assert backend.tables.grown == 0


@pytest.mark.parametrize(("chunk", "most"), [(CHUNK, CHUNK), (-1, 10 + LONGEST), (None, 10 + LONGEST)])
def test_prompts_need_no_second_lists(launches, schedule, chunk, most):
    """Those of a GPU take gigabytes: a chunk's rows have room in the first, beside a decode row of each request."""
    schedule.chunked_prefill_size = chunk
    made = runner()
    backend, life = triton_attention.TritonAttentionBackend(made), Life(made)
    assert ROWS < CHUNK and backend.tables.first.sizes[2] >= ROWS + most
    for row, tokens in ((0, CHUNK), (2, 5)):
        life.grow(row, tokens)
    backend.set_batch(life.batch([0, 2], [CHUNK, 1]))
    for span in range(SPANS):
        backend.device_view(span, backend.views[span])
    assert backend.tables.grown == 0


def test_a_captured_layer_with_a_window_is_given_the_same_for_any_lengths(launches):
    made = runner()
    backend, life, size = triton_attention.TritonAttentionBackend(made), Life(made), 4
    backend.init_cuda_graph_state(size, size)
    for step, rows in enumerate([(0, 1, 2), (3, 0), (2, 3, 1)]):
        for row in rows:
            life.grow(row, 5 + 3 * step + row)
        backend.set_batch(life.batch(rows, [1] * len(rows)))
        backend.padded_to = size
        backend._fill_near([backend.views[span] for span in range(SPANS)])
        compute(backend, size, WINDOW)
    assert all(launch == launches[i % SPANS] for i, launch in enumerate(launches))


@pytest.mark.parametrize("window", [-1, WINDOW])
def test_a_launch_over_several_rows_depends_on_their_number_alone(launches, window):
    """A few tokens of some requests, more of one: the captured launch, and what else it writes, stays the same."""
    made = runner()
    backend, life, size = triton_attention.TritonAttentionBackend(made), Life(made), 8
    if window >= 0:
        backend.init_cuda_graph_state(size, size)
    with backend.capturing(triton_attention.SEVERAL):
        for step, (rows, new) in enumerate([((0, 1, 2), (2, 3, 1)), ((3,), (7,)), ((1, 0), (4, 4))]):
            for row in rows:
                life.grow(row, 8 + 3 * step + row)
            backend.given = life.batch(rows, new)
            backend.init_forward_metadata_out_graph(SimpleNamespace(batch_size=size))
            compute(backend, size, window)
    assert len(launches) == 3 * SPANS and launches[0] != launches[1]
    for i, launch in enumerate(launches):
        assert launch == launches[i % SPANS]
    written = [slots for _, _, slots in made.token_to_kv_pool.written]
    assert all(len(slots) == size for slots in written) and len({tuple(slots) for slots in written}) == 6
    assert backend.tables.grown == 0


def test_the_draft_says_when_it_has_read_the_request_table():
    """Once for each pass over lists of slots: later views of the same lists read what was placed."""
    backend = TritonDraftBackend(runner())
    backend.read(
        ListView(lists := SlotLists([torch.arange(3), torch.arange(4)]), [0, 1], [3, 4], [2, 1]), None
    )
    assert backend.read_done is None
    backend.device_view(0, backend.view)
    first = backend.read_done
    assert first is not None
    backend.read(ListView(lists, [0], [3], [1]), None)
    backend.device_view(0, backend.view)
    assert backend.read_done is first
    backend.read(ListView(SlotLists([torch.arange(2)]), [0], [2], [1]), None)
    backend.device_view(0, backend.view)
    assert backend.read_done is not first


def test_what_a_replay_gave_outlives_the_next_one(monkeypatch):
    """Of the draft's steps: logits and queries of the rows that were asked for lie in buffers of their own."""
    backend, captured = TritonDraftBackend.__new__(TritonDraftBackend), Captured(torch.arange(2))
    backend.captured, backend.scale, backend.queries = captured, 0.5, torch.randn(3, 4, HEADS, DIM)
    backend.view = ListView(SlotLists([torch.arange(3), torch.arange(4)]), [0, 1], [3, 4], [1, 1])
    output = torch.randn(2, 9)
    graphs = DraftGraphRunner.__new__(DraftGraphRunner)
    graphs.attn_backend, graphs.replayed = backend, {"plain": 0, "looking": 0}
    replayed = SimpleNamespace(next_token_logits=output)
    monkeypatch.setattr(DecodeCudaGraphRunner, "execute", lambda self, batch: replayed)
    queries, logits = backend.queries[:, :2].clone(), output.clone()
    got = graphs.logits(SimpleNamespace(batch_size=2))
    for buffer in (output, backend.queries):
        buffer.fill_(torch.nan)
    assert got.equal(logits) and captured.scale == 0.5
    assert all(captured.queries[layer][0].equal(own) for layer, own in enumerate(queries))
    assert graphs.replayed == {"plain": 0, "looking": 1} and len(captured.queries) == 3


def test_sizes_of_steps_and_of_passes_over_several_tokens():
    """Steps up to the largest that was asked for, passes up to five times it; filled up unless that is off."""
    graphs = DecodeGraphRunner.__new__(DecodeGraphRunner)
    graphs.attn_backend, graphs.disable_padding = (
        SimpleNamespace(several=True, replays=lambda *_: True),
        False,
    )
    graphs.capture_bs = [1, 4]
    graphs.max_bs = max(graphs.capture_bs)
    assert graphs.capture_bs == [1, 4, 8, 12, 20]
    assert [rows for rows in range(1, 30) if graphs.takes(rows, 99, rows)] == [1, 2, 3, 4]
    assert [rows for rows in range(2, 30) if graphs.takes(1, 99, rows)] == list(range(2, 21))
    graphs.disable_padding = True
    assert [rows for rows in range(1, 30) if graphs.takes(rows, 99, rows)] == [1, 4]
    assert [rows for rows in range(2, 30) if graphs.takes(1, 99, rows)] == [4, 8, 12, 20]
    graphs.attn_backend.several = False
    graphs.capture_bs = [1, 4]
    assert graphs.capture_bs == [1, 4]


def test_a_pass_within_a_step_is_timed_once(monkeypatch):
    """SGLang's timer asserts that no timed step has another in it."""
    graphs, timer = DecodeGraphRunner.__new__(DecodeGraphRunner), object()
    graphs.model_runner, graphs.attn_backend = (
        SimpleNamespace(device_timer=timer),
        SimpleNamespace(given=None),
    )
    seen = []

    def execute(self, batch):
        seen.append((self.model_runner.device_timer, self.attn_backend.given, batch))
        return "output"

    monkeypatch.setattr(DecodeGraphRunner, "takes", lambda *_: True)
    monkeypatch.setattr(DecodeGraphRunner, "execute", execute)
    rows = Batch.plain(np.array([3]), np.array([9]), [np.arange(9)], np.array([2]))
    assert graphs.several(rows, lambda: "composed") == "output" and seen == [(None, rows, "composed")]
    assert graphs.model_runner.device_timer is timer and graphs.attn_backend.given is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_mla_backend": True}, "the Triton attention backend serves .* multi-head latent attention"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "this model has an encoder"),
        ({"kv_cache_dtype": torch.int8}, "has no torch.int8 KV; use --kv-cache-dtype auto"),
    ],
)
def test_what_it_does_not_do_is_refused_at_start(changed, said):
    with pytest.raises(NotImplementedError, match=said):
        triton_attention.TritonAttentionBackend(runner(**changed))


def test_a_gpu_without_e4m3_is_told_what_it_has(monkeypatch):
    """A checkpoint may ask for it where the command line does not."""
    monkeypatch.setattr(triton_attention, "has_e4m3", lambda: False)
    with pytest.raises(NotImplementedError, match="no e4m3; use --kv-cache-dtype fp8_e5m2"):
        triton_attention.TritonAttentionBackend(runner(kv_cache_dtype=torch.float8_e4m3fn))


def test_soft_capped_logits_are_refused():
    capped = layer(0)
    capped.logit_cap = 30.0
    with pytest.raises(NotImplementedError, match="Triton attention backend has no logit soft-capping"):
        triton_attention.TritonAttentionBackend(runner()).forward_decode(
            *[torch.zeros(1, 1)] * 3, capped, None
        )


@pytest.mark.parametrize("phase", ["forward_decode", "forward_extend"])
def test_what_a_model_asks_of_its_attention_is_not_left_out(phase):
    capped = layer(0)
    capped.logit_cap = 30.0
    forward = getattr(triton_attention.TritonAttentionBackend(runner()), phase)
    given = *[torch.zeros(1, 1)] * 3, capped, None
    with pytest.raises(NotImplementedError, match="the Triton attention backend has no k_rope, sinks"):
        forward(*given, sinks=torch.zeros(4), k_rope=torch.zeros(1), q_rope=None)
    with pytest.raises(NotImplementedError, match="soft-capping"):
        forward(*given, sinks=None)


def test_tables_that_grow_in_a_pass_over_drafted_tokens_serve_the_next_step():
    """SGLang's own steps may write to nothing that was made in PyTorch's inference mode."""
    tables = DeviceTables(1, ROWS, 20, ROWS, "cpu")

    def view(entries):
        lists = SlotLists([torch.arange(1, entries + 1, dtype=torch.int32)])
        return ListView(lists, [0], [entries], [1])

    class Model:
        def forward(self, *_):
            tables.fill(0, view(100))
            return SimpleNamespace(next_token_logits=None)

    made = SimpleNamespace(model=Model(), attn_backend=None)
    with torch.no_grad():
        passes.run(made, SimpleNamespace(input_ids=None, positions=None))
        assert tables.grown == 1
        tables.fill(0, view(90))


def test_slots_of_a_table_on_a_device_are_those_of_one_on_the_host():
    table = torch.arange(5 * 40, dtype=torch.int32).view(5, 40)
    rows, lengths = np.array([3, 0, 4]), np.array([7, 31, 0])
    fetched = span_attention._FetchedSlots(table, rows, lengths)
    assert len(fetched) == len(rows)
    for row, length, *slots in zip(
        rows, lengths, span_attention.virtual_slots(table, rows, lengths), fetched, strict=True
    ):
        assert [each.tolist() for each in slots] == [table[row, :length].tolist()] * 2
