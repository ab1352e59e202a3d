"""Prefill attention by FlashInfer, with PyTorch for its kernels: values, plans, memory, and when Triton remains."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flashinfer_wrapper import OnDevice, Ragged, Wrapper
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.kernels.paged_extend import paged_extend_reference
from fathom.kernels.store_kv import EIGHT_BITS
from fathom.runtime.kv.device_view import DeviceTables
from fathom.runtime.kv.memory import Growth, KvMemory
from fathom.runtime.kv.view import Batch, SpanView, Views
from fathom.runtime.plan import PrefillPlan, Step
from fathom.runtime.sglang_host.attention import flashinfer_prefill
from fathom.runtime.sglang_host.attention.flashinfer_prefill import FlashInferPrefill

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 64, 90
CPU, HALF, SCALE = torch.device("cpu"), torch.float16, 0.1
ROOT = Path(__file__).resolve().parents[2]


def prefill(spans=1, make=Wrapper, dtype=HALF, room=0):
    return FlashInferPrefill(spans, HEADS, KV_HEADS, DIM, dtype, CPU, 132, make, Ragged, room)


def span_view(lengths, new, seed=0):
    """Segments that read ``lengths`` random slots, the last ``new`` of them their own."""
    rng = np.random.default_rng(seed)
    parts = [rng.permutation(SLOTS - 1)[:length] + 1 for length in lengths]
    entry, query = (np.concatenate([[0], np.cumsum(counts)]).astype(np.int64) for counts in (lengths, new))
    write = [part[length - own :] for part, length, own in zip(parts, lengths, new, strict=True)]
    slots = np.concatenate([[], *parts]).astype(np.int32)
    return SpanView(slots.__getitem__, entry, query, np.concatenate([[], *write]).astype(np.int64))


def pool(seed=0, slots=SLOTS):
    noise = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(slots, KV_HEADS, DIM, generator=noise).to(HALF) for _ in range(2))


def attend(made, span, view, there, kv, seed=0):
    """Query and answer; the host may not look at what lies on the device."""
    rows = int(view.query[-1])
    query = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(HALF)
    output = torch.full((rows, HEADS, DIM), math.nan, dtype=HALF)
    hidden = tuple(x.as_subclass(OnDevice) for x in kv)
    made.attend(span, view, there, query, hidden, SCALE, output)
    return query, output


def on_device(there):
    return dataclasses.replace(there, table=there.table.as_subclass(OnDevice))


def expected(view, query, kv):
    """Row for row over the pool, where the rows' own keys are the last entries of their segment."""
    keys, values = kv
    lengths, new = np.diff(view.entry), np.diff(view.query)
    table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    for row, slots in enumerate(np.split(view.slots, view.entry[1:-1])):
        table[row, : len(slots)] = torch.from_numpy(slots)
    ends = [torch.from_numpy(view.slots[end - n : end]) for end, n in zip(view.entry[1:], new, strict=True)]
    own = torch.cat(ends).long()
    prefixes, rows = torch.from_numpy(lengths - new), torch.arange(len(lengths))
    bounds = torch.from_numpy(view.query)
    return paged_extend_reference(
        query, keys[own], values[own], keys, values, table, rows, prefixes, bounds, SCALE
    )[0]


def check(view, query, output, kv):
    torch.testing.assert_close(output.float(), expected(view, query, kv), atol=2e-3, rtol=2e-3)


segments = st.lists(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=5
)


@given(steps=st.lists(segments, min_size=1, max_size=4))
@settings(max_examples=40)
def test_each_step_of_each_layer_is_attention_over_its_tables(steps):
    """Two spans of two layers, in buffers that are filled again in place and at times have to grow."""
    tables, made = DeviceTables(2, segments=2, entries=30, rows=9, device="cpu"), prefill(spans=2)
    for number, step in enumerate(steps):
        for span in range(2):
            view = span_view(*zip(*step, strict=True), seed=2 * number + span)
            there = on_device(tables.fill(span, view))
            for layer in range(2):
                kv = pool(seed=layer)
                query, output = attend(made, span, view, there, kv, seed=number)
                if len(query):
                    check(view, query, output, kv)
    assert made.plans == 2 * sum(any(new for _, new in step) for step in steps)


@given(steps=st.lists(segments, min_size=1, max_size=4), room=st.integers(1, 120), rows=st.integers(1, 20))
@settings(max_examples=60)
def test_steps_of_many_rows_read_copies(steps, room, rows):
    tables, made = DeviceTables(2, segments=2, entries=30, rows=9, device="cpu"), prefill(2, room=room)
    gathered = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_prefill, "ROWS_PER_COPY", rows)
        for number, step in enumerate(steps):
            entries, pairs = sum(length for length, _ in step), sum(length * new for length, new in step)
            gathered += entries <= room and pairs >= rows * entries
            view = span_view(*zip(*step, strict=True), seed=number)
            there = on_device(tables.fill(1, view))
            for layer in range(2):
                kv = pool(seed=layer)
                query, output = attend(made, 1, view, there, kv, seed=number)
                if len(query):
                    check(view, query, output, kv)
    assert made.gathered_plans == gathered
    assert made.plans == sum(any(new for _, new in step) for step in steps)


def test_requests_in_mixed_states():
    """Chunks of dense and of SPEED requests: anchors that are computed again, and rows that only keep a place."""
    layers, memory = 3, KvMemory(3 * 80, 1, 3, 80)
    plans = [PrefillPlan(layers, 1), *[PrefillPlan(layers, 1, (Step(2, "SPEED"),))] * 3]
    begins, ends, prompts = [4, 0, 5, 9], [20, 6, 8, 13], [30, 6, 20, 11]
    free, virtual = iter(range(1, 80)), []
    for row, (plan, begin, end, prompt) in enumerate(zip(plans, begins, ends, prompts, strict=True), 1):
        virtual.append(np.array([next(free) for _ in range(end)]))
        memory.open(row, plan, prompt)
        for low, high in ((0, begin), (begin, end)):
            if low < high:
                memory.grow([Growth(row, low, high, virtual[-1][low:high])])
    rows = np.arange(1, 5)
    again, ghost = np.array([False, False, False, True]), np.array([False, False, True, False])
    upper = Batch(rows, np.array(ends), virtual, np.array([16, 1, 1, 3]), again, ghost)
    lower = Batch(
        rows,
        np.array(ends),
        virtual,
        np.array([16, 6, 3, 4]),
        np.array([False, False, False, True]),
        ghost & 0,
    )
    tables, made, kv = DeviceTables(3, 4, 99, 40, "cpu"), prefill(spans=3), pool(slots=3 * 80 + 1)
    seen = []
    for span, batch in enumerate((lower, lower, upper)):
        view = Views(memory, batch)[span]
        query, output = attend(made, span, view, on_device(tables.fill(span, view)), kv)
        check(view, query, output, kv)
        seen.append(list(zip(np.diff(view.query).tolist(), np.diff(view.entry).tolist(), strict=True)))
    assert seen[0] == seen[1] == [(16, 20), (6, 6), (3, 8), (1, 1), (4, 13)]
    assert seen[2][0] == (16, 20) and (1, 1) in seen[2]  # the ghost, with the dummy slot


def test_a_plan_serves_all_layers_of_its_span_and_step():
    tables, made = DeviceTables(2, 4, 99, 40, "cpu"), prefill(spans=2)
    views = [span_view([30, 9], [5, 9], seed) for seed in range(2)]
    for _ in range(7):
        for span, view in enumerate(views):
            attend(made, span, view, tables.fill(span, view), pool())
    assert made.plans == 2
    # Another view in between takes the span's buffers: its plan and this one's are made anew.
    other = span_view([12], [12])
    for view in (other, views[0]):
        attend(made, 0, view, tables.fill(0, view), pool())
    assert made.plans == 4


def test_a_view_that_comes_back_to_the_buffers_is_planned_again():
    """Another one, which Triton read, lay there meanwhile, or in larger ones."""
    tables, made = DeviceTables(1, 4, 40, 40, "cpu"), prefill()
    view, kv = span_view([30, 9], [20, 9]), pool()
    for between in ([20], [80]):
        attend(made, 0, view, tables.fill(0, view), kv)
        tables.fill(0, span_view(between, [1], seed=5))
        query, output = attend(made, 0, view, tables.fill(0, view), kv)
        check(view, query, output, kv)
    assert made.plans == 3 and tables.grown == 1


def test_a_plan_is_not_written_over_while_its_copy_may_be_on_the_way(monkeypatch):
    happened = []

    class Event:
        def record(self):
            happened.append("record")

        def synchronize(self):
            happened.append("wait")

    class Noting(Wrapper):
        def plan(self, *args, **options):
            happened.append("plan")
            super().plan(*args, **options)

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    tables, made = DeviceTables(2, 4, 99, 40, "cpu"), prefill(2, Noting)
    for span in (0, 1, 0):
        view = span_view([30], [20], len(happened))
        attend(made, span, view, tables.fill(span, view), pool())
    assert happened == ["plan", "record", "plan", "record", "wait", "plan", "record"]


def test_wrappers_share_a_workspace_that_every_plan_fits_in():
    made = prefill(spans=3)
    workspaces = {held.wrapper.workspace.data_ptr() for held in made._paged}
    assert len(workspaces) == 1 and not made._ragged
    # 132 multiprocessors, 64 heads over 8: 33 programs per KV head, each with 128 rows of 128 numbers and a sum.
    size = flashinfer_prefill.float_bytes(64, 8, 128, 132)
    assert size == 64 * 33 * 128 * (128 + 1) * 4
    assert flashinfer_prefill.device_bytes(4, 64, 8, 128, 132) == size + 4 * ((8 << 20) + 131072)
    assert flashinfer_prefill.float_bytes(64, 8, 256, 132) == 64 * 33 * 64 * 257 * 4
    made = prefill(spans=3, room=50)
    workspaces |= {held.wrapper.workspace.data_ptr() for held in (*made._paged, *made._ragged)}
    assert len(workspaces) == 2 and len(made._ragged) == 3
    copies = 2 * 1000 * 8 * 128 * 2
    assert (
        flashinfer_prefill.device_bytes(4, 64, 8, 128, 132, 1000) == size + 8 * ((8 << 20) + 131072) + copies
    )


def test_its_own_wrapper_takes_what_it_is_given():
    """FlashInfer's Python of the locked version, in a process of its own, with the compiled functions replaced."""
    script = Path(__file__).with_name("real_flashinfer.py")
    path = [str(Path(sys.prefix) / "flashinfer"), str(ROOT / "tests")]
    run = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    version, *made = run.stdout.splitlines()
    assert f"flashinfer-python=={version}" in (ROOT / "requirements" / "cuda.lock").read_text().split()
    assert made == ["fa2 plan run plan run", "fa3 plan run plan run"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and FlashInfer")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (6, 2, 64), (8, 1, 256), (4, 4, 128)])
def test_on_a_gpu(heads, kv_heads, dim, dtype):
    device = torch.device("cuda")
    processors = flashinfer_prefill.processors_of(device)
    made = FlashInferPrefill(1, heads, kv_heads, dim, dtype, device, processors, room=2000)
    assert made.difference() <= flashinfer_prefill.FAR
    assert made.plans == 2 and made.gathered_plans == 1


@needs_gpu
def test_steps_that_are_launched_before_the_device_begins():
    """Their plans wait in line behind each other, and each finds its own."""
    device = torch.device("cuda")
    made = FlashInferPrefill(2, HEADS, KV_HEADS, DIM, HALF, device, flashinfer_prefill.processors_of(device))
    tables, kv = DeviceTables(2, 8, 400, 400, device), pool()
    on_gpu = tuple(x.to(device) for x in kv)
    made.difference()
    torch.cuda._sleep(1 << 30)
    launched = []
    for step, (lengths, new) in enumerate([([80, 9], [70, 9]), ([17], [17]), ([60, 50, 40], [1, 40, 2])]):
        for span in range(2):
            view = span_view(lengths, new, 2 * step + span)
            query = torch.randn(sum(new), HEADS, DIM).to(HALF)
            output = torch.empty_like(query, device=device)
            made.attend(
                *(span, view, tables.fill(span, view), query.pin_memory().to(device, non_blocking=True)),
                *(on_gpu, SCALE, output),
            )
            launched.append((view, query, output))
    for view, query, output in launched:
        check(view, query, output.cpu(), kv)


@pytest.mark.parametrize("counts", [([8], [9]), ([0], [1])])
def test_the_stand_in_is_strict_about_lengths(counts):
    view = dataclasses.replace(span_view(*counts), write=np.zeros(sum(counts[1]), np.int64))
    with pytest.raises(ValueError, match="rows without entries"):
        attend(prefill(), 0, view, DeviceTables(1, 4, 99, 40, "cpu").fill(0, view), pool())


def test_steps_of_a_few_rows_and_other_layers_are_left_to_triton():
    made, kv = prefill(), pool()
    query = torch.zeros(40, HEADS, DIM, dtype=HALF)
    there = SimpleNamespace(most_new=17, packed=True)
    view = span_view([80], [40])
    assert made.takes(query, kv, view, there)
    assert not made.takes(query, kv, view, SimpleNamespace(most_new=16, packed=True))
    assert not made.takes(query, kv, view, SimpleNamespace(most_new=17, packed=False))
    assert not made.takes(query.float(), kv, view, there)
    assert not made.takes(query[:, 1:], kv, view, there)
    assert not made.takes(query, (kv[0], kv[1][..., 1:]), view, there)
    assert not made.takes(query, (kv[0], kv[1].bfloat16()), view, there)
    assert not made.takes(query, tuple(x.to(EIGHT_BITS[0]) for x in kv), view, there)


@pytest.mark.parametrize("narrow", EIGHT_BITS)
def test_numbers_of_8_bits_are_read_from_copies_or_left_to_triton(narrow, monkeypatch):
    monkeypatch.setattr(flashinfer_prefill, "ROWS_PER_WIDENED", 30)
    monkeypatch.setattr(flashinfer_prefill, "WIDENED_AT_ONCE", 7)
    made = FlashInferPrefill(1, HEADS, KV_HEADS, DIM, HALF, CPU, 132, Wrapper, Ragged, 80, narrow)
    kv = tuple(x.to(narrow) for x in pool())
    query, there = torch.zeros(40, HEADS, DIM, dtype=HALF), SimpleNamespace(most_new=17, packed=True)
    assert made.takes(query, kv, span_view([80], [40]), there)
    assert not made.takes(query, kv, span_view([80], [29]), there)  # few rows read an entry
    assert not made.takes(query, kv, span_view([81], [40]), there)  # no room
    assert not made.takes(query, pool(), span_view([80], [40]), there)
    view = span_view([44, 36], [40, 36])
    query, output = attend(made, 0, view, DeviceTables(1, 4, 99, 80, "cpu").fill(0, view), kv)
    check(view, query, output, tuple(x.to(HALF) for x in kv))
    assert made.gathered_plans == made.plans == 1 and not made._paged


TAKEN = {
    "kv_dtype": torch.bfloat16,
    "model_dtype": torch.bfloat16,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "value_dim": 128,
    "device": torch.device("cuda", 0),
}
REASONS = [
    ({"device": CPU}, "FlashInfer needs an NVIDIA GPU"),
    ({"kv_dtype": torch.float32}, "8 bits, float16 and bfloat16, not float32"),
    ({"kv_dtype": torch.float8_e4m3fn, "model_dtype": torch.float32}, "not float32 and float8_e4m3fn"),
    ({"model_dtype": torch.float16}, "queries of the KV's type, not float16 and bfloat16"),
    ({"value_dim": 64}, "keys and values of one size, not 128 and 64"),
    ({"head_dim": 96, "value_dim": 96}, "heads of 64, 128, 256, not 96"),
    ({"kv_heads": 5}, "32 over 5"),
]


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())


@pytest.mark.parametrize(("changed", "said"), REASONS)
def test_why_it_is_not_taken(importable, changed, said):
    assert flashinfer_prefill.why_not(**TAKEN) == ""
    assert flashinfer_prefill.why_not(**TAKEN | {"kv_dtype": torch.float8_e5m2}) == ""
    assert said in flashinfer_prefill.why_not(**(TAKEN | changed))


def test_it_is_not_taken_where_it_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert flashinfer_prefill.why_not(**TAKEN).startswith("FlashInfer cannot be imported: ")


def runner(**changed):
    """A model of 32 heads over 8 in bfloat16 on a GPU, as far as the choice looks at it."""
    config = SimpleNamespace(
        num_attention_heads=32,
        get_num_kv_heads=lambda devices: 8 // devices,
        head_dim=128,
        v_head_dim=128,
        dtype=torch.bfloat16,
        context_len=4096,
    )
    fields = {"model_config": config, "kv_cache_dtype": torch.bfloat16, "device": "cuda"}
    return SimpleNamespace(**({"ps": SimpleNamespace(tp_size=1)} | fields | changed))


@pytest.fixture
def gpu(importable, monkeypatch):
    monkeypatch.setattr(flashinfer_prefill, "processors_of", lambda device: 132)


def choose(wrapper=Wrapper, ragged=Ragged, **changed):
    """With the constructor's places for wrappers, and the work in the host's memory."""

    def make(spans, heads, kv_heads, head_dim, dtype, device, processors, room, kv_dtype):
        assert (device.type, processors) == ("cuda", 132)
        shape = spans, heads, kv_heads, head_dim, dtype, CPU, processors
        return FlashInferPrefill(*shape, wrapper, ragged, room, kv_dtype)

    return flashinfer_prefill.choose(runner(**changed), 4, torch.device("cuda"), make)


class Wrong(Wrapper):
    """Reads each entry one place too early."""

    def plan(self, *args, **options):
        super().plan(*args, **options)
        self.slots = self.slots.roll(1)


class Nothing(Wrapper):
    def run(self, q, paged_kv_cache, *, out):
        return out.fill_(math.nan)


class Broken(Wrapper):
    def plan(self, *args, **options):
        raise RuntimeError("Ninja build failed.\nmany lines")


def test_it_is_tried_before_it_is_taken(gpu):
    made, reason = choose()
    assert reason == "" and len(made._paged) == 4 and made.plans == 1
    assert (made.heads, made.kv_heads, made.head_dim, made.dtype) == (32, 8, 128, torch.bfloat16)


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (Broken, "FlashInfer's kernels do not run here: Ninja build failed."),
        (Wrong, "FlashInfer's results differ from PyTorch's by "),
        (Nothing, "FlashInfer's results differ from PyTorch's by nan"),
    ],
)
def test_where_it_does_not_work_triton_remains(gpu, wrapper, said):
    made, reason = choose(wrapper)
    assert made is None and reason.startswith(said) and "\n" not in reason


class WrongCopies(Ragged):
    def run(self, q, k, v, *, out):
        return super().run(q, k.roll(1, 0), v, out=out)


def test_copies_are_tried_too_where_they_are_asked_for(gpu, monkeypatch):
    monkeypatch.setattr(flashinfer_prefill.OPTIONS, "prefill", "gathered")
    made, reason = choose()
    assert reason == "" and (made.plans, made.gathered_plans) == (2, 1)
    assert [len(copy) for copy in made._copies] == [4096, 4096]
    made, reason = choose(ragged=WrongCopies)
    assert made is None and reason.startswith("FlashInfer's results differ from PyTorch's by ")


def test_copies_of_8_bits_are_tried_however_short_the_context(gpu):
    short = SimpleNamespace(**vars(runner().model_config) | {"context_len": 512})
    narrow = {"model_config": short, "kv_cache_dtype": torch.float8_e4m3fn}
    made, reason = choose(**narrow)
    assert reason == "" and made.plans == made.gathered_plans == 1
    assert choose(ragged=WrongCopies, **narrow)[0] is None


def test_numbers_of_8_bits_are_tried_from_copies(gpu):
    made, reason = choose(kv_cache_dtype=torch.float8_e4m3fn)
    assert reason == "" and (made.plans, made.gathered_plans) == (1, 1)
    made, reason = choose(ragged=WrongCopies, kv_cache_dtype=torch.float8_e4m3fn)
    assert made is None and reason.startswith("FlashInfer's results differ from PyTorch's by ")


def test_what_else_keeps_triton(gpu, monkeypatch):
    assert choose(kv_cache_dtype=torch.float32) == (None, flashinfer_prefill.why_not(**TAKEN | REASONS[1][0]))
    assert flashinfer_prefill.choose(None, 4, CPU) == (None, "FlashInfer needs an NVIDIA GPU")
    monkeypatch.setattr(flashinfer_prefill.OPTIONS, "prefill", "triton")
    assert choose() == (None, "asked for by --gpu-prefill-attention")


def test_its_memory_is_reserved_where_it_will_be_taken(gpu, monkeypatch):
    wanted = flashinfer_prefill.device_bytes(4, 32, 8, 128, 132)
    assert flashinfer_prefill.reserved_bytes(runner(), 4) == wanted
    assert flashinfer_prefill.reserved_bytes(runner(device="cpu"), 4) == 0
    wanted = flashinfer_prefill.device_bytes(4, 32, 8, 128, 132, 4096, narrow=True)
    assert wanted == flashinfer_prefill.device_bytes(4, 32, 8, 128, 132) + 2 * 4096 * 8 * 128 * 2
    assert flashinfer_prefill.reserved_bytes(runner(kv_cache_dtype=torch.float8_e5m2), 4) == wanted
    monkeypatch.setattr(flashinfer_prefill.OPTIONS, "prefill", "gathered")
    wanted = flashinfer_prefill.device_bytes(4, 32, 8, 128, 132, 4096)
    assert flashinfer_prefill.reserved_bytes(runner(), 4) == wanted
    monkeypatch.setattr(flashinfer_prefill.OPTIONS, "prefill", "triton")
    assert flashinfer_prefill.reserved_bytes(runner(), 4) == 0
