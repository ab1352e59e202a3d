"""The engine's side of FastKV without an engine: real pages, views, staircase and taps over random numbers."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import fastkv as oracle

from fathom.runtime import staircase
from fathom.runtime.fastkv.step import config_of, propagation_step, retention
from fathom.runtime.kv.audit import check
from fathom.runtime.kv.memory import Growth, KvMemory
from fathom.runtime.kv.view import Batch, Views
from fathom.runtime.plan import build
from fathom.runtime.sglang_host.memory.hidden_buffer import HiddenBuffer
from fathom.runtime.sglang_host.step import compression
from fathom.runtime.sglang_host.step.compression import Compression, CompressionStep, selectors
from fathom.runtime.staircase import Work

LAYERS, HEADS, KV_HEADS, DIM, SCALE, TSP = 4, 4, 2, 16, 0.25, 2
PAGES = 8000
EXACT = {"tsp_rate": 1.0, "kv_retention_rate": 1.0, "retention_policy": "saliency", "depth_cutoff": "full"}


def plan_of(policy, tokens, span):
    fields = EXACT | policy
    config, above = config_of(fields, TSP), build(fields, LAYERS, span)
    step = propagation_step(config, tokens, above.anchored_above(0))
    return build(fields, LAYERS, span, [lambda *_: step], retention(config, tokens))


class Model:
    """Queries, keys and values that depend on request, layer and position alone."""

    def __init__(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(LAYERS, tokens, *shape, generator=generator)

        self.query, self.keys, self.values = (
            random(HEADS, DIM) * 2,
            random(KV_HEADS, DIM),
            random(KV_HEADS, DIM),
        )


class Engine:
    """Batches of some requests through the staircase; a layer stores its keys and calls the tap."""

    def __init__(self, span, page_size, buffer=4096):
        self.span = span
        self.memory = KvMemory(PAGES, page_size, LAYERS // span, PAGES)
        self.side = Compression(self.memory, HiddenBuffer(buffer, 3, torch.float32, "cpu"))
        slots = (PAGES + 1) * page_size
        self.keys = [torch.zeros(slots, KV_HEADS, DIM) for _ in range(span)]
        self.values = [torch.zeros(slots, KV_HEADS, DIM) for _ in range(span)]
        self.free_virtual = list(range(PAGES, 0, -1))
        self.requests = {}

    def add(self, row, plan, prompt, model, seed=None):
        self.memory.open(row, plan, prompt)
        self.requests[row] = SimpleNamespace(
            plan=plan, prompt=prompt, model=model, seed=seed, virtual=[], length=0
        )

    def step(self, ends):
        """Bring each row to a length; what the last layer saw per row, and the sets that were selected."""
        size, growth = self.memory.page_size, []
        for row, end in ends.items():
            request = self.requests[row]
            new = [self.free_virtual.pop() for _ in range(-(-end // size) - len(request.virtual))]
            growth.append(Growth(row, request.length, end, np.array(new, np.int64)))
            request.virtual += new
        self.memory.grow(growth)
        rows, states = list(ends), [self.requests[row] for row in ends]
        works = [Work(s.plan, s.length, end, s.prompt) for s, end in zip(states, ends.values(), strict=True)]
        lengths = np.array(list(ends.values()))
        virtual = [np.array(s.virtual)[np.arange(n) // size] * size + np.arange(n) % size
                   for s, n in zip(states, lengths, strict=True)]  # fmt: skip
        plain = (np.array(rows), lengths, virtual)
        fakes = [
            SimpleNamespace(
                kv=SimpleNamespace(req_pool_idx=row),
                sampling_params=SimpleNamespace(sampling_seed=state.seed),
            )
            for row, state in zip(rows, states, strict=True)
        ]
        host = Host(
            self, plain, [s.model for s in states], CompressionStep(self.side, works, fakes, self.span)
        )
        host.position = staircase.first_rows(works).position
        staircase.climb(host, works, staircase.first_rows(works), selectors(host.compression, host.states))
        for job in host.compression.finish():
            host.compression.settle(job)
            if job.compacted:
                self.memory.shared.release(np.array(states[job.index].virtual))  # nobody else uses them here
        for state, end in zip(states, ends.values(), strict=True):
            state.length = end
        check(
            self.memory.pool,
            self.memory.shared,
            self.memory.tables,
            np.zeros(0, np.int64),
            self.memory.retained,
        )
        return host

    def entries(self, row, layer, head):
        """Positions that a head holds at a layer, recognised by their keys and values."""
        request, span = self.requests[row], layer // self.span
        if span < self.memory.tables.first_private(row):
            size = self.memory.page_size
            at = np.arange(request.length)
            slots = self.memory.shared.slots(span, np.array(request.virtual)[at // size] * size + at % size)
        else:
            slots = self.memory.tables.slots(row, span)
        held = self.keys[layer % self.span][torch.from_numpy(slots.astype(np.int64)), head]
        values = self.values[layer % self.span][torch.from_numpy(slots.astype(np.int64)), head]
        known = request.model.keys[layer, :, head]
        found = torch.cdist(held, known).argmin(1)
        assert torch.equal(held, known[found]) and torch.equal(
            values, request.model.values[layer, found, head]
        )
        return found.tolist()


class Host:
    def __init__(self, engine, plain, models, compression):
        self.engine, self.plain, self.models, self.compression = engine, plain, models, compression
        self.seen = {}

    def states(self, rows):
        hidden = torch.from_numpy(self.position[rows]).float()
        return hidden.view(-1, 1).expand(-1, 3), hidden.view(-1, 1).expand(-1, 3) * 2

    def pays(self, rows, stay):
        return False

    def keep(self, rows, index):
        self.position = self.position[index]

    def recall(self, earlier, order):
        states = list(self.compression.recall(earlier))
        for (hidden, residual), positions in zip(states, earlier.values(), strict=True):
            assert hidden[:, 0].tolist() == positions.tolist() and torch.equal(residual, hidden * 2)
        self.position = np.concatenate([self.position, *earlier.values()])[order]

    def run(self, rows, low, high):
        assert (self.position == rows.position).all()
        engine, requests = self.engine, len(self.models)
        again = np.bincount(rows.request[rows.again], minlength=requests).astype(bool)
        ghost = np.bincount(rows.request[rows.ghost], minlength=requests).astype(bool)
        new = np.bincount(rows.request, minlength=requests) - again
        batch = Batch(*self.plain, new, again, ghost)
        self.compression.start(rows, self.plain[1], np.concatenate(self.plain[2]))
        for layer in range(low, high):
            pick = list(zip(rows.request.tolist(), rows.position.tolist(), strict=True))
            query, key, value = (
                torch.stack([getattr(self.models[i], name)[layer, p] for i, p in pick])
                for name in ("query", "keys", "values")
            )
            span_view = Views(engine.memory, batch)[layer // engine.span]
            assert len(span_view.write) == len(rows)
            keys, values = engine.keys[layer % engine.span], engine.values[layer % engine.span]
            write = torch.from_numpy(span_view.write)
            keys[write], values[write] = key, value
            self.compression.tap(layer, query, keys, values, SCALE)
            for i in range(requests):
                self.seen[i, layer] = rows.position[rows.request == i].tolist()


def wanted(model, n, policy):
    """By layer: the positions seen, and what each KV head keeps."""
    fields = EXACT | policy
    exists, sets, kept = list(range(n)), [], []
    cutoff = fields["depth_cutoff"]
    for layer in range(LAYERS):
        if layer == cutoff:
            exists = sorted({0, n - 1})
        matrix = oracle.attention(model.query[layer, exists], model.keys[layer, exists], SCALE)
        scores = oracle.saliency(matrix, KV_HEADS)
        if fields["retention_policy"] == "streaming":
            before = max(len(exists) - 8, 0)
            scores = [[float("inf") if i < 4 else i for i in range(before)]] * KV_HEADS
        rate = fields["kv_retention_rate"]
        sets.append(exists)
        kept.append([[exists[i] for i in oracle.keep(s, len(exists), n, rate)] for s in scores])
        if layer == TSP - 1 and fields["tsp_rate"] < 1:
            forced = [0] if cutoff != "full" else []
            one = oracle.saliency(matrix, 1)[0]
            exists = [exists[i] for i in oracle.keep(one, n, n, fields["tsp_rate"], forced=forced)]
    return sets, kept


POLICIES = [
    {"kv_retention_rate": 0.1},
    {"kv_retention_rate": 0.3, "retention_policy": "streaming"},
    {"tsp_rate": 0.2},
    {"tsp_rate": 0.2, "kv_retention_rate": 0.1},
    {"tsp_rate": 0.1, "kv_retention_rate": 0.4},
    {"tsp_rate": 0.2, "kv_retention_rate": 0.1, "depth_cutoff": 3},
    {},
]


@pytest.mark.parametrize("chunk", [7, 64, 256, 10_000])
@pytest.mark.parametrize(("span", "page_size"), [(1, 1), (2, 4)])
def test_sets_and_copies_are_the_oracles(chunk, span, page_size):
    """All policies and lengths in one batch, chunk by chunk, then two generated tokens one by one."""
    engine, cases = Engine(span, page_size), {}
    for policy in POLICIES:
        if policy.get("depth_cutoff", 0) % span:
            continue
        for n in (1, 5, 8, 9, 12, 77, 400):
            row = len(cases) + 1
            model = Model(n + 2, seed=row)
            cases[row] = (policy, n, model)
            engine.add(row, plan_of(policy, n, span), n, model)
    # A few prompts in each step, in any order: they end together or one before the other.
    order = random.Random(chunk).sample(sorted(cases), len(cases))
    for together in (order[first : first + 3] for first in range(0, len(order), 3)):
        seen = {}
        while left := [row for row in together if engine.requests[row].length < cases[row][1]]:
            host = engine.step({row: min(engine.requests[row].length + chunk, cases[row][1]) for row in left})
            seen |= {row: host.seen.get((place, LAYERS - 1)) for place, row in enumerate(left)}
        for row in together:
            policy, n, model = cases[row]
            sets, kept = wanted(model, n, policy)
            assert all(engine.entries(row, layer, head) == kept[layer][head] for layer in range(LAYERS)
                       for head in range(KV_HEADS)), (policy, n)  # fmt: skip
            if policy.get("tsp_rate", 1) < 1 and n > 8:
                assert seen[row] == sets[LAYERS - 1]
        assert engine.side.buffer.used == 0 and not engine.side.queries
    for more in (1, 2):
        engine.step({row: n + more for row, (_, n, _) in cases.items()})
    for row, (policy, n, model) in cases.items():
        _, kept = wanted(model, n, policy)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                assert engine.entries(row, layer, head) == [*kept[layer][head], n, n + 1]


@pytest.mark.parametrize("cut", [40, 77, 79, 85])
def test_a_prompt_that_ends_inside_a_step_with_generated_tokens(cut):
    """A request that was taken back: its prompt and what it has generated come as one."""
    for policy in POLICIES:
        engine, n = Engine(1, 4), 77
        model = Model(n + 9, seed=3)
        engine.add(1, plan_of(policy, n, 1), n, model)
        for end in sorted({min(cut, n + 9), n + 9}):
            engine.step({1: end})
        _, kept = wanted(model, n, policy)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                assert engine.entries(1, layer, head) == [*kept[layer][head], *range(n, n + 9)]


def test_the_buffer_is_bounded_and_given_back():
    buffer = HiddenBuffer(5, 3, torch.float32, "cpu")
    hidden = torch.arange(12.0).view(4, 3)
    buffer.put(1, np.array([2, 3, 5, 8]), hidden, None)
    assert (buffer.used, buffer.peak, buffer.nbytes) == (4, 4, 2 * 5 * 3 * 4)
    with pytest.raises(RuntimeError, match="4 of 5"):
        buffer.put(2, np.array([0, 1]), hidden[:2], None)
    assert torch.equal(buffer.get(1, np.array([8, 3]))[0], hidden[[3, 1]])
    buffer.drop(1)
    buffer.drop(1)
    assert (buffer.used, buffer.peak) == (0, 4)
    buffer.put(2, np.arange(5), torch.ones(5, 3), torch.zeros(5, 3))
    assert buffer.get(2, np.array([4]))[1] is not None


def test_a_request_that_goes_away_leaves_nothing():
    engine, model = Engine(1, 1), Model(300, seed=1)
    engine.add(1, plan_of({"tsp_rate": 0.2, "kv_retention_rate": 0.1}, 300, 1), 300, model)
    engine.step({1: 296})
    assert engine.side.buffer.used == 296 and engine.side.queries
    engine.memory.close(1)
    engine.memory.shared.release(np.array(engine.requests[1].virtual))
    assert engine.side.buffer.used == 0 and not engine.side.queries
    assert engine.memory.pool.free == engine.memory.pool.total


def test_random_entries_belong_to_the_seed_and_the_layer():
    engine, model = Engine(2, 1), Model(200, seed=1)
    policy = {"kv_retention_rate": 0.2, "retention_policy": "random"}
    for row, seed in enumerate((1, 1, 2, None), 1):
        engine.add(row, plan_of(policy, 200, 2), 200, model, seed)
    engine.step(dict.fromkeys((1, 2, 3, 4), 200))
    kept = [[engine.entries(row, layer, 0) for layer in range(LAYERS)] for row in (1, 2, 3, 4)]
    assert kept[0] == kept[1]
    assert len({tuple(entries) for row in kept[1:] for entries in row}) == 3 * LAYERS


@pytest.mark.parametrize("name", ["saliency", "streaming", "random"])
def test_attention_is_kept_for_a_policy_that_looks_at_it_alone(name):
    engine = Engine(1, 1)
    plan = plan_of({"kv_retention_rate": 0.2, "retention_policy": name}, 300, 1)
    engine.add(1, plan, 300, Model(300, seed=1))
    engine.step({1: 296})
    assert bool(engine.side.queries) == (name == "saliency")


class Recorder:
    """A policy that remembers what it was shown."""

    needs_saliency = False

    def __init__(self):
        self.shown = []

    def scores(self, context):
        self.shown.append(context)
        return torch.zeros(context.kv_heads, len(context.positions))


def test_a_policy_is_shown_what_its_contract_says(monkeypatch):
    """Original positions above a selection too, and no attention unless it asks, though FastKV scored the layer."""
    recorder, engine, model = Recorder(), Engine(2, 1), Model(200, seed=1)
    monkeypatch.setattr(compression, "load_policy", lambda name: recorder)
    policy = {"tsp_rate": 0.2, "kv_retention_rate": 0.1}
    engine.add(1, plan_of(policy, 200, 2), 200, model, seed=7)
    engine.step({1: 200})
    sets, _ = wanted(model, 200, policy)
    assert [shown.positions.tolist() for shown in recorder.shown] == [seen[:-8] for seen in sets]
    assert [shown.layer for shown in recorder.shown] == list(range(LAYERS))
    assert all((c.kv_heads, c.seed, c.saliency) == (KV_HEADS, 7, None) for c in recorder.shown)


def test_the_time_of_scoring_is_that_of_all_layers(monkeypatch):
    """By a clock that moves on by a second whenever somebody looks at it: at each layer before and after."""
    monkeypatch.setattr(compression, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    engine = Engine(2, 1)
    engine.add(1, plan_of({"tsp_rate": 0.2, "kv_retention_rate": 0.1}, 200, 2), 200, Model(200, seed=1))
    (job,) = engine.step({1: 200}).compression.jobs.values()
    assert job.scoring_seconds == LAYERS
