"""On a GPU the pool leaves room for what lies beside it: SFI's buffers, waiting hidden states, the draft's KV."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

from fathom.kernels.span_tables import BLOCK
from fathom.runtime.kv.memory import KvMemory
from fathom.runtime.kv.mirror import PageMirror
from fathom.runtime.sfi.options import SfiOptions
from fathom.runtime.sfi.refresh import RING_SLOTS, EvidenceRing
from fathom.runtime.sglang_host.draft.draft_model import SCRATCH_SLOTS
from fathom.runtime.sglang_host.memory import gpu_memory
from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT
from fathom.runtime.sglang_host.step import decode_graphs

MIB = 1 << 20


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """What SGLang was told of captured decode steps; they are off."""
    decode = PhaseConfig(Backend.DISABLED, bs=[1, 2, 100])
    exec_args = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=CudaGraphConfig(decode)))
    monkeypatch.setattr(decode_graphs, "get_exec", lambda: exec_args)
    return decode


@pytest.fixture(autouse=True)
def schedule(monkeypatch):
    """What SGLang was told of requests: nothing."""
    told = SimpleNamespace(max_running_requests=None)
    monkeypatch.setattr(gpu_memory, "get_schedule", lambda: told)
    return told


def worker(layers, kv_heads=8, head_dim=128, vocabulary=1000, devices=1):
    ps = SimpleNamespace(tp_size=devices)
    config = SimpleNamespace(
        num_attention_heads=32,
        get_num_kv_heads=lambda tp: kv_heads // tp,
        head_dim=head_dim,
        v_head_dim=head_dim,
        context_len=32768,
        hidden_size=4096,
        vocab_size=vocabulary,
        dtype=torch.bfloat16,
    )
    runner = SimpleNamespace(
        layer_info=SimpleNamespace(num_effective_layers=layers),
        kv_cache_dtype=torch.bfloat16,
        model_config=config,
        device="cpu",
        ps=ps,
    )
    return SimpleNamespace(model_config=config, model_runner=runner, ps=ps)


@pytest.fixture
def layout(monkeypatch):
    """As of a server of 32 layers in spans of 8, with FastKV's selection and its buffer."""
    for name, value in {"span": 8, "tsp_layer": 16, "propagation_buffer": 1000}.items():
        monkeypatch.setattr(LAYOUT, name, value)


def test_everything_beside_the_pool_is_counted(layout, monkeypatch):
    options = SfiOptions()
    monkeypatch.setattr(gpu_memory.SETTINGS, "options", options)
    alone = gpu_memory.reserve_of(worker(32), None)
    run = options.config.compact_tokens * 32 * 8 * (128 + 128) * 2
    compact = max(min(16 * run, 1024 * MIB), run)
    evidence = max(256 * MIB, RING_SLOTS * 4 * 32768 * (32 + 8))
    directory = 4 * 4096 * (32768 // 256) * 4
    assert alone.fixed == compact + evidence + 2 * 1000 * 4096 * 2 + 2 * directory
    # A step's lists, in which a slot may be named four times. Twice, while blocks are added: virtual slots at each
    # span in the shared map, private tables.
    tables = 4 * (4 * 4 * 4 + 2 * (4 * 4 + 4))
    assert alone.per_token == tables
    drafted = gpu_memory.reserve_of(worker(32), worker(16, head_dim=64))
    slot = 2 * 16 * 8 * 64 * 2
    # Two virtual slots where there was one per span.
    assert drafted.per_token == tables - 2 * 4 * 2 * 4 + 2 * (slot + 4 * 4)
    assert drafted.fixed - alone.fixed == SCRATCH_SLOTS * slot


def test_the_directory_of_tables_has_a_row_for_each_request(layout, schedule):
    without = gpu_memory.reserve_of(worker(32), None).fixed
    schedule.max_running_requests = 96
    assert without - gpu_memory.reserve_of(worker(32), None).fixed == 2 * 4 * (4096 - 96) * (32768 // 256) * 4


def test_the_mirror_takes_what_is_counted_for_it():
    """Of pages of one token, all of them in private tables: twice what lies there once blocks have been added."""
    rows, longest, tokens, spans, virtual = 8, 3000, 5000, 4, 2
    memory = KvMemory(spans * tokens, 1, spans, virtual * tokens)
    mirror = PageMirror(memory, rows, longest, "cpu")
    counted = 8 * spans * rows * -(-longest // BLOCK) + tokens * 8 * spans * (1 + virtual)
    assert 0.9 < 2 * mirror._flat.nbytes / counted < 1.1


def test_each_of_two_gpus_counts_its_own_heads(layout, graphs):
    """Compact buffers and evidence fill their budgets on either."""
    graphs.backend, graphs.bs = Backend.FULL, [100]
    one = gpu_memory.reserve_of(worker(32), worker(16))
    two = gpu_memory.reserve_of(worker(32, devices=2), worker(16, devices=2))
    slot, queries = 2 * 16 * 8 * 128 * 2, 100 * 16 * 32 * 128 * 2
    assert one.per_token - two.per_token == 2 * slot // 2
    assert one.fixed - two.fixed == SCRATCH_SLOTS * slot // 2 + queries // 2


def test_compact_buffers_may_take_a_tenth_of_a_gpu(layout, monkeypatch):
    """A model of 8 billion parameters has buffers of 257 MiB: of sixteen, three would be left of 1 GiB. The logits
    of a slow step may take a fiftieth."""
    run = SfiOptions().config.compact_tokens * 32 * 8 * (128 + 128) * 2
    before = gpu_memory.reserve_of(worker(32), None).fixed
    monkeypatch.setattr(gpu_memory, "gpu_bytes", lambda runner: 80 << 30)
    more = (80 << 30) // 50 - 256 * MIB
    assert gpu_memory.reserve_of(worker(32), None).fixed - before == 16 * run - 1024 * MIB + more
    monkeypatch.setattr(gpu_memory, "gpu_bytes", lambda runner: 24 << 30)
    more = (24 << 30) // 50 - 256 * MIB
    assert gpu_memory.reserve_of(worker(32), None).fixed - before == (24 << 30) // 10 - 1024 * MIB + more


def test_flashinfers_workspaces_are_counted_where_it_is_taken(layout, monkeypatch):
    """One integer workspace per span of the target, one for the draft, and a float workspace for each."""
    drafts = worker(32), worker(16, head_dim=64)
    without = gpu_memory.reserve_of(*drafts)
    monkeypatch.setattr(gpu_memory.flashinfer_prefill, "why_not", lambda *_: "")
    monkeypatch.setattr(gpu_memory.flashinfer_prefill, "processors_of", lambda device: 100)
    floats = 32 * (200 // 8) * 128 * 4 * (129 + 65)
    workspaces = 5 * (8 * MIB + 4 * 32768)
    reserve = gpu_memory.reserve_of(*drafts)
    assert reserve.fixed - without.fixed == floats + workspaces
    assert reserve.per_token == without.per_token


@pytest.mark.parametrize(("sizes", "rows"), [([1, 2, 100], 100), ([1, 4], 20), ([1, 16], 64)])
def test_what_the_drafts_captured_steps_leave_is_counted(layout, graphs, sizes, rows):
    """Of the largest size too that is captured for several tokens of each request."""
    without = gpu_memory.reserve_of(worker(32), worker(16))
    graphs.backend, graphs.bs = Backend.FULL, sizes
    queries = rows * 16 * 32 * 128 * 2
    assert gpu_memory.reserve_of(worker(32), worker(16)).fixed - without.fixed == queries
    padded = worker(16, vocabulary=1024)  # then SGLang keeps another buffer of logits
    assert gpu_memory.reserve_of(worker(32), padded).fixed - without.fixed == queries + rows * 1024 * 4


def test_sglang_sizes_its_pool_with_it(monkeypatch):
    for owner, name in (
        (DefaultPoolConfigurator, "_compute_cell_size"),
        (KVCacheConfigurator, "_profile_available_bytes"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    monkeypatch.setattr(gpu_memory, "_cell_size", lambda *_: 700)
    monkeypatch.setattr(gpu_memory, "_available_bytes", lambda *_: 5000)
    gpu_memory.install(gpu_memory.Reserve(fixed=2000, per_token=300))
    assert DefaultPoolConfigurator._compute_cell_size(None, None, 32) == 1000
    assert KVCacheConfigurator._profile_available_bytes(None, 1) == 3000
    gpu_memory.install(gpu_memory.Reserve(fixed=5000, per_token=0))
    with pytest.raises(ValueError, match="no GPU memory is left for KV"):
        KVCacheConfigurator._profile_available_bytes(None, 1)


def test_a_ring_slot_holds_the_longest_request():
    """Whatever is asked for, on a GPU too, where the memory is shared by four slots."""
    shape = SimpleNamespace(longest=9000, heads=32, kv_heads=8)
    small = SfiOptions(evidence_mib=1)
    memory = gpu_memory.Shape.evidence_bytes(shape, small, RING_SLOTS)
    assert EvidenceRing(RING_SLOTS, 32, 8, memory).capacity(9000) == 1
