"""SGLang's forward as a staircase, without an engine: whatever the batch, every row stays the token that it is.

The made-up model's hidden state of a row is its token and its position; it stores that as KV, with a random key,
and gives it as logits. Queries and keys depend on request, layer and position alone.
"""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import fastkv as oracle
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from fathom.runtime.config import POLICY_KEY, Policy
from fathom.runtime.kv.audit import check
from fathom.runtime.kv.memory import Growth, KvMemory
from fathom.runtime.kv.view import Batch, Views
from fathom.runtime.sglang_host import requests
from fathom.runtime.sglang_host.attention.span_attention import KeysStored, SpanAttentionBackend
from fathom.runtime.sglang_host.memory.hidden_buffer import HiddenBuffer
from fathom.runtime.sglang_host.step import passes
from fathom.runtime.sglang_host.step.compression import Compression, CompressionStep
from fathom.runtime.sglang_host.step.kept_prefill import KeptForward
from fathom.runtime.sglang_host.step.spans import SpanForward
from fathom.runtime.specprefill.select import select_prompt

LAYERS, SPAN, TSP, CUTOFF = 8, 2, 4, 6
PAGES, HEADS, DIM, SCALE = 8000, 2, 16, 0.5
SPEED = {"depth_cutoff": CUTOFF}
UNANCHORED = SPEED | {"anchors": "none"}
FASTKV = {"tsp_rate": 0.3}
RETAINED = {"kv_retention_rate": 0.1}
JUDGED = {"prefill_keep_rate": 0.5, "min_prompt_tokens": 0}
AUTO = {"prefill_keep_rate": "auto", "min_prompt_tokens": 0}


@pytest.fixture(autouse=True, scope="module")
def layout():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.LAYOUT, "tsp_layer", TSP)
        patch.setattr(requests.LAYOUT, "propagation_buffer", 1000)
        patch.setattr(passes, "FEWEST_ENDED", 2)
        requests._plan.cache_clear()
        yield
    requests._plan.cache_clear()


class Request:
    def __init__(self, row, policy, prompt, output=0, chosen=None):
        custom = {POLICY_KEY: Policy(**policy).to_wire()}
        self.sampling_params = SimpleNamespace(custom_params=custom, sampling_seed=None)
        self.kv, self.lora_id = SimpleNamespace(req_pool_idx=row), f"adapter {row}"
        self.origin_input_ids = [1000 * row + at for at in range(prompt)]
        self.output_ids = [1000 * row + 500 + at for at in range(output)]
        self.policy, self.chosen, self.length, self.virtual, self.job = policy, chosen, 0, [], None

    def states(self, positions, drafted=()):
        """[token, position] at some positions, as the model has them."""
        tokens = [*self.origin_input_ids, *self.output_ids, *drafted]
        return [[tokens[at], at] for at in positions]


class Backend:
    storing, ended_rows = False, 0
    store_alone = SpanAttentionBackend.store_alone

    def __init__(self, memory, early):
        # Beside requests that decode slow and fast no row leaves before its layer is done.
        self.memory, self.taps, self.alternating = memory, {}, None if early else "the step's"
        self.token_to_kv_pool = SimpleNamespace(span=SPAN)

    def set_batch(self, batch):
        self.batch, self.views = batch, Views(self.memory, batch)


class Adapters:
    """In place of SGLang's manager of LoRA adapters: whose each row is, as it was told last."""

    def prepare_lora_batch(self, batch):
        assert batch.batch_size == len(batch.lora_ids) == len(batch.extend_seq_lens_cpu)
        self.counts = batch.extend_seq_lens_cpu
        self.owners = np.repeat(batch.lora_ids, self.counts).tolist()


class Model:
    def __init__(self, backend, residual):
        self.backend, self.with_residual, self.passes = backend, residual, []
        self.adapters = Adapters()
        self.kv = torch.zeros(LAYERS, PAGES + 1, 1, DIM)
        generator = torch.Generator().manual_seed(1)
        # [requests, layers, positions, query heads and the key's, dim]
        self.random = torch.randn(20, LAYERS, 260, HEADS + 1, DIM, generator=generator)
        self.random[..., :2] = 0

    def forward_split_prefill(self, ids, positions, batch, interval):
        low, high = interval
        if low == 0:
            assert batch.hidden_states is None and batch.residual is None
            batch.hidden_states = torch.stack([ids, positions], 1).float()
            batch.residual = batch.hidden_states + 0.5 if self.with_residual else None
        hidden, views = batch.hidden_states, self.backend.views
        self._check(hidden, ids, positions, batch)
        for layer in range(low, high):
            made = self.random[hidden[:, 0].long() // 1000, layer, positions]
            query, key = made[:, :HEADS], made[:, HEADS:].clone()
            key[:, 0, :2] = hidden
            self.kv[layer, views[layer // SPAN].write] = key
            if layer in self.backend.taps:
                # What tells tokens apart in the keys adds nothing to a product with a query.
                self.backend.taps[layer](layer, query, self.kv[layer], self.kv[layer], SCALE)
            if self.backend.storing:
                assert interval == (layer, layer + 1)
                for given in filter(torch.is_tensor, (hidden, batch.residual)):
                    given.fill_(-1)  # as a norm may that adds in place
                raise KeysStored
        self.passes.append(SimpleNamespace(
            edges=interval, log_probs=batch.return_logprob, alternating=self.backend.alternating,
            states=hidden.int().tolist(),
            read=[self.kv[level * SPAN, views[level].slots.astype(np.int64), 0, :2].int().tolist()
                  for level in range(low // SPAN, high // SPAN)],
        ))  # fmt: skip
        if high < LAYERS:
            return None
        last = hidden[np.cumsum(batch.extend_seq_lens_cpu) - 1]
        states = last if batch.capture_hidden_mode.is_last() else hidden
        return LogitsProcessorOutput(last, states if batch.capture_hidden_mode.need_capture() else None)

    def _check(self, hidden, ids, positions, batch):
        assert hidden[:, 1].tolist() == positions.tolist() and ids.dtype == positions.dtype == torch.int64
        assert [f"adapter {token // 1000}" for token in hidden[:, 0].int().tolist()] == self.adapters.owners
        assert batch.residual is None or torch.equal(batch.residual, hidden + 0.5)
        assert batch.extend_seq_lens.tolist() == batch.extend_seq_lens_cpu == self.adapters.counts
        assert batch.extend_num_tokens == sum(batch.extend_seq_lens_cpu) == len(hidden)
        starts = batch.extend_logprob_start_lens_cpu
        if starts is not None:
            parts = zip(positions.split(batch.extend_seq_lens_cpu), starts, self.wanted_from, strict=True)
            for part, start, first in parts:
                assert (part[:start] < first).all() and (part[start:] >= first).all()


class Engine:
    """Steps over some requests, in the order in which the worker takes them."""

    def __init__(self, every, chunk=None, residual=True, early=False, states=CaptureHiddenMode.FULL):
        self.states = CaptureHiddenMode.NULL if early else states
        self.memory = KvMemory(PAGES, 1, LAYERS // SPAN, PAGES)
        self.backend = Backend(self.memory, early)
        self.model = Model(self.backend, residual)
        self.runner = SimpleNamespace(
            model=self.model, attn_backend=self.backend, device="cpu", spec_algorithm=None,
            model_config=SimpleNamespace(vocab_size=2), lora_manager=self.model.adapters,
        )  # fmt: skip
        self.buffer = HiddenBuffer(1000, 2, torch.float32, "cpu")
        self.compression = Compression(self.memory, self.buffer)
        self.plan_of = lambda request: requests.plan_of(request, LAYERS, SPAN)
        self.free, self.chunk, self.every = itertools.count(1), chunk, every
        for request in every:
            prompt = len(request.origin_input_ids)
            self.memory.open(request.kv.req_pool_idx, self.plan_of(request), prompt)

    @staticmethod
    def entered(request):
        return None if request.chosen is None else np.array(request.chosen)

    def state(self, request):
        kept = None if request.chosen is None else torch.tensor(request.chosen)
        return SimpleNamespace(selection=SimpleNamespace(tokens=kept))

    def step(self, ends, drafted=None, starts=None):
        """Bring the first requests to these lengths."""
        batch, drafted = self.every[: len(ends)], drafted or {}
        growth = []
        for index, (request, end) in enumerate(zip(batch, ends, strict=True)):
            until = end + len(drafted.get(index, ()))
            new = np.array([next(self.free) for _ in range(until - len(request.virtual))], np.int64)
            request.virtual = [*request.virtual, *new]
            growth.append(Growth(request.kv.req_pool_idx, request.length, until, new))
        self.memory.grow(growth)
        begins = [request.length for request in batch]
        extends = [end - begin for begin, end in zip(begins, ends, strict=True)]
        asked = SimpleNamespace(reqs=batch, prefix_lens=begins, extend_lens=extends)
        allocator = SimpleNamespace(plan_of=self.plan_of, memory=self.memory)
        if self.chunk:
            proposals = [SimpleNamespace(index=index, tokens=tokens) for index, tokens in drafted.items()]
            forward = KeptForward(self.runner, asked, allocator, self, self.chunk, proposals)
        else:
            forward = SpanForward(self.runner, asked, allocator)
        step = forward.compression = CompressionStep(
            self.compression, forward.works, batch, SPAN, self.entered
        )
        rows, lengths = np.array([request.kv.req_pool_idx for request in batch]), np.array(ends)
        slots = [np.array(request.virtual[:end]) for request, end in zip(batch, ends, strict=True)]
        self.backend.set_batch(Batch.plain(rows, lengths, slots, np.array(extends)))
        states = [state for request, begin, end in zip(batch, begins, ends, strict=True)
                  for state in request.states(range(begin, end))]  # fmt: skip
        ids, positions = torch.tensor(states).T
        if starts is not None:
            self.model.wanted_from = [begin + start for begin, start in zip(begins, starts, strict=True)]
        info = SimpleNamespace(
            input_ids=ids, hidden_states="stale", residual="stale", return_logprob=True,
            extend_logprob_start_lens_cpu=starts, extend_seq_lens=torch.tensor(extends, dtype=torch.int32),
            extend_seq_lens_cpu=extends, capture_hidden_mode=self.states,
        )  # fmt: skip
        self.model.passes.clear()
        output = forward(ids, positions, info)
        assert info.return_logprob
        self._check_states(output, batch, begins, ends)
        self.backend.taps = {}
        for job in step.finish():
            step.settle(job)
            batch[job.index].job = job
            if job.compacted:  # nobody else uses these pages
                self.memory.shared.release(np.array(batch[job.index].virtual))
        for request, end in zip(batch, ends, strict=True):
            request.length = end
        memory = self.memory
        check(memory.pool, memory.shared, memory.tables, np.zeros(0, np.int64), memory.retained)
        return forward, output.next_token_logits

    def _check_states(self, output, batch, begins, ends):
        """Hidden states of those that compute all of their tokens are where SGLang looks for them."""
        if output.hidden_states is None:
            return
        firsts = [end - 1 for end in ends] if self.states.is_last() else begins
        wanted = [(request, state) for request, first, end in zip(batch, firsts, ends, strict=True)
                  for state in request.states(range(first, end))]  # fmt: skip
        for (request, state), found in zip(wanted, output.hidden_states.tolist(), strict=True):
            assert state == found or request.policy

    def held(self, request, layer):
        """What the KV of a request says that it is, at a layer."""
        row, span = request.kv.req_pool_idx, layer // SPAN
        if span < self.memory.tables.first_private(row):
            slots = self.memory.shared.slots(span, np.array(request.virtual[: request.length]))
        else:
            slots = self.memory.tables.slots(row, span)
        return self.model.kv[layer, slots.astype(np.int64), 0, :2].int().tolist()

    def check(self, drafted=None):
        """All prompts are complete: by the policies alone, what each layer must hold."""
        for index, request in enumerate(self.every):
            more = (drafted or {}).get(index, ())
            generated = list(range(len(request.origin_input_ids), request.length + len(more)))
            seen, kept = self.wanted(request)
            for layer, here in enumerate(kept):
                want = request.states(here + generated, more)
                assert self.held(request, layer) == want, (index, request.policy, layer)
            if job := request.job:  # what the request's account is told
                assert job.present_in == [len(here) for here in seen[::SPAN]]
                assert job.kept_in == [len(here) for here in kept[::SPAN]]
            else:
                assert seen == kept and seen[TSP - 1] == seen[TSP]
        assert self.buffer.used == 0 and not self.compression.queries

    def wanted(self, request):
        """By layer the positions that are seen, and those whose entries are kept."""
        policy, prompt, seen, kept = request.policy, len(request.origin_input_ids), [], []
        here = list(range(prompt)) if request.chosen is None else list(request.chosen)
        entered, anchors = len(here), [0] if policy.get("anchors", "bos") == "bos" else []
        for layer in range(LAYERS):
            if layer == CUTOFF and "depth_cutoff" in policy:
                here = sorted({*anchors, prompt - 1})
            made = self.model.random[request.kv.req_pool_idx, layer, here]
            matrix = oracle.attention(made[:, :HEADS], made[:, HEADS:], SCALE)
            scores = oracle.saliency(matrix, 1)[0]
            rate = policy.get("kv_retention_rate", 1)
            seen.append(here)
            kept.append([here[i] for i in oracle.keep(scores, len(here), entered, rate)])
            if layer == TSP - 1 and policy.get("tsp_rate", 1) < 1:
                forced = anchors if "depth_cutoff" in policy else []
                stay = oracle.keep(scores, entered, entered, policy["tsp_rate"], forced=forced)
                here = [here[i] for i in stay]
        return seen, kept


POLICIES = [{}, SPEED, UNANCHORED, FASTKV, FASTKV | SPEED, SPEED]
POLICIES += [RETAINED, RETAINED | UNANCHORED, RETAINED | FASTKV | SPEED, {"tsp_rate": 0.05} | SPEED]


def mixed(output=0):
    return [Request(row, policy, 40, output) for row, policy in enumerate(POLICIES, 1)]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("cuts", [[40], [20, 40], [13, 36, 40], [39, 40], [1, 31, 44]])
def test_all_policies_in_one_batch(cuts, residual, early):
    """Whole prompts, chunks, the last prompt token alone, and a prompt that ends beside generated tokens."""
    engine = Engine(mixed(output=6), residual=residual, early=early)
    for end in cuts:
        _, logits = engine.step([end] * len(POLICIES))
        if end >= 40:
            assert logits.tolist() == [request.states([end - 1])[0] for request in engine.every]
    engine.check()
    _, logits = engine.step([cuts[-1] + 1] * len(POLICIES))
    assert logits.tolist() == [request.states([cuts[-1]])[0] for request in engine.every]
    engine.check()


def test_requests_at_different_places_of_their_prompts():
    engine = Engine(mixed(output=2))
    engine.step([10, 20, 30, 35, 5, 40, 39, 33, 2, 38])
    _, logits = engine.step([40, 40, 31, 40, 6, 41, 40, 34, 3, 39])
    assert [logits[i].tolist() for i in (0, 1, 3, 5)] == [
        engine.every[i].states([end - 1])[0] for i, end in ((0, 40), (1, 40), (3, 40), (5, 41))
    ]
    engine.step([41, 41, 40, 41, 40, 42, 41, 40, 40, 41])
    engine.check()


def test_where_nobody_goes_on_the_layers_above_are_left_out():
    engine = Engine([Request(1, SPEED, 40), Request(2, FASTKV, 40)])
    _, logits = engine.step([30, 30])
    assert [each.edges for each in engine.model.passes] == [(0, TSP), (TSP, CUTOFF)]
    assert logits.tolist() == [[0, 0], [0, 0]]  # one row per request, which nobody reads
    assert engine.buffer.used == 30


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_log_probabilities_begin_at_the_same_token_after_every_narrowing(residual, early):
    """SGLang gives where they begin as a row of what it sent; an anchor comes before that, dropped rows go."""
    every = [Request(1, {}, 40, 3), Request(2, SPEED, 40, 3), Request(3, UNANCHORED, 40, 3)]
    engine = Engine(every, residual=residual, early=early)
    engine.step([30, 30, 10])
    engine.step([40, 43, 40], starts=[0, 10, 29])
    *_, before, last = engine.model.passes
    assert (before.edges, last.edges) == ((CUTOFF - 1 if early else 0, CUTOFF), (CUTOFF, LAYERS))
    assert (engine.backend.ended_rows > 0) == early


def test_a_dense_prompt_leaves_the_last_layer_early_and_its_last_token_goes_through():
    engine = Engine([Request(1, {}, 40), Request(2, {}, 40)], early=True)
    _, logits = engine.step([40, 30])
    assert [(each.edges, len(each.states)) for each in engine.model.passes] == [
        ((0, LAYERS - 1), 70),
        ((LAYERS - 1, LAYERS), 2),
    ]
    assert engine.backend.ended_rows == 68
    assert logits.tolist() == [engine.every[0].states([39])[0], engine.every[1].states([29])[0]]


def test_below_a_cutoff_all_rows_but_the_anchor_and_the_last_are_keys_and_values_alone():
    engine = Engine([Request(1, SPEED, 40)], early=True)
    _, logits = engine.step([40])
    assert [(each.edges, len(each.states)) for each in engine.model.passes] == [
        ((0, CUTOFF - 1), 40),
        ((CUTOFF - 1, CUTOFF), 2),
        ((CUTOFF, LAYERS), 2),
    ]
    assert engine.backend.ended_rows == 38 and logits.tolist() == engine.every[0].states([39])


def test_of_a_chunk_of_which_nothing_goes_on_there_is_no_second_look():
    engine = Engine([Request(1, SPEED, 40)], early=True)
    engine.step([30])
    assert [each.edges for each in engine.model.passes] == [(0, CUTOFF - 1)]
    assert engine.backend.ended_rows == 30


def test_embeddings_are_refused():
    engine = Engine([Request(1, SPEED, 40)])
    forward, _ = engine.step([40])
    with pytest.raises(NotImplementedError, match="embeddings"):
        forward(
            torch.zeros(1), torch.zeros(1), SimpleNamespace(return_logprob=False), input_embeds=torch.zeros(1)
        )


def chunks_of(*chunks):
    """Tokens of some chunks of 32, of a prompt of 200."""
    return [at for at in range(200) if at // 32 in chunks]


CHOSEN, FEW = chunks_of(0, 2, 3, 6), chunks_of(0, 6)
ENTER = [
    ({}, None),
    (JUDGED, CHOSEN),
    (SPEED, None),
    (JUDGED | SPEED, CHOSEN),
    (JUDGED | FASTKV, CHOSEN),
    (JUDGED | FASTKV | UNANCHORED | RETAINED, CHOSEN),
    (AUTO | FASTKV | SPEED | RETAINED, FEW),
    (AUTO, FEW),
    (AUTO | RETAINED | FASTKV, list(range(200))),
    # The last tokens that enter, which FastKV asks, are not the prompt's last ones.
    (AUTO | RETAINED | FASTKV, [*range(100), *range(196, 200)]),
]  # fmt: skip


@pytest.mark.parametrize("chunk", [4, 24, 150])
@pytest.mark.parametrize(
    ("generated", "drafted", "states"),
    [
        (0, {}, CaptureHiddenMode.FULL),
        (30, {}, CaptureHiddenMode.LAST),
        (0, {1: [2900, 2901, 2902], 4: [5900]}, CaptureHiddenMode.LAST),
        (2, {3: [4900, 4901]}, CaptureHiddenMode.FULL),
    ],
)
def test_chosen_tokens_enter_in_pieces_and_nothing_else_does(chunk, generated, drafted, states):
    """Judged prompts that arrive in three chunks, perhaps with generated tokens behind them, as when a request was
    taken back, or with drafted ones; beside a dense prompt and one that SPEED narrows."""
    every = [Request(row, policy, 200, generated, chosen) for row, (policy, chosen) in enumerate(ENTER, 1)]
    engine = Engine(every, chunk, states=states)
    judged = [request for request in every if request.chosen is not None]
    for end in (90, 195):
        forward, _ = engine.step([end] * len(every))
        assert not forward.idle  # the target reads the request table for those beside the judged ones
        rows = [state for each in engine.model.passes for state in each.states]
        assert all(state == request.states([end - 1])[0] for request in judged for state in rows
                   if state[0] // 1000 == request.kv.req_pool_idx)  # fmt: skip
    end = 200 + generated
    forward, logits = engine.step([end] * len(every), drafted)
    assert logits.tolist() == [request.states([end - 1])[0] for request in every]
    assert {index: rows.tolist() for index, rows in forward.drafted_logits.items()} == {
        index: every[index].states(range(end - 1, end + len(tokens)), tokens)
        for index, tokens in drafted.items()
    }
    engine.check(drafted)
    *before, last = (each for each in engine.model.passes if each.edges[0] == 0)
    enters = {request: request.states([*request.chosen, *range(200, end)]) for request in judged}
    for each in before:  # each reads what entered before it, and nobody else's rows are in it
        (own,) = (states for states in enters.values() if each.states[-1] in states)
        read = own[: own.index(each.states[-1]) + 1]
        assert len(each.states) <= chunk and each.alternating is None
        assert each.states == read[-len(each.states) :] and all(level == read for level in each.read)
    assert last.alternating == "the step's" and last.log_probs == (not drafted)
    for request, states in enters.items():
        rows = [state for state in last.states if state[0] // 1000 == request.kv.req_pool_idx]
        more = drafted.get(request.kv.req_pool_idx - 1, ())
        states = request.states([*request.chosen, *range(200, end + len(more))], more)
        count = min(len(states), max(chunk, engine.plan_of(request).window + generated + len(more)))
        # Perhaps after an anchor that is computed again.
        assert rows[-count:] == states[-count:] and rows[:-count] in ([], states[:1])
    if not drafted:  # the next step decodes, beside the prompt of somebody else
        for request in every:
            request.output_ids.append(1000 * request.kv.req_pool_idx + 500 + generated)
        engine.step([end + 1] * len(every))
        engine.check()


def random_request(draw, row, draft):
    """A policy of any mechanisms, a prompt around the sizes of a window and of chunks, perhaps taken back."""
    policy = {}
    if draft and draw.random() < 0.7:
        policy |= {"prefill_keep_rate": draw.choice([0.05, 0.3, 0.6, 0.95, "auto"])}
        policy |= {"min_prompt_tokens": draw.choice([0, 0, 50])}
    if draw.random() < 0.5:
        policy |= {"depth_cutoff": CUTOFF, "anchors": draw.choice(["bos", "none"])}
    for name in ("tsp_rate", "kv_retention_rate"):
        if draw.random() < 0.5:
            policy[name] = draw.choice([0.02, 0.2, 0.5, 0.9])
    prompt = draw.choice([1, 2, 7, 8, 9, 10, 33, 40, 64, 65, 72, 100, 200])
    request = Request(row, policy, prompt, draw.choice([0, 0, 3]))
    if requests.is_judged(request):
        generator = torch.Generator().manual_seed(draw.randrange(1000))
        scores = torch.rand(2, prompt, generator=generator) ** draw.choice([1, 20])
        request.chosen = select_prompt(scores, (), requests.specprefill_of(request)).tokens.tolist()
    return request


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("draft", [False, True])
def test_any_requests_in_any_chunks(draft, early):
    """Some decode while the prompts of others arrive; in the end each layer holds what the oracle says."""
    for seed in range(25):
        draw = random.Random(seed)
        every = [random_request(draw, row, draft) for row in range(1, draw.randint(2, 5))]
        chunk = draw.choice([1, 8, 9, 24, 64, 1000]) if draft else None
        engine = Engine(every, chunk, draw.random() < 0.5, early)
        goals = [len(request.origin_input_ids) + len(request.output_ids) for request in every]
        while any(request.length < goal for request, goal in zip(every, goals, strict=True)):
            ends = []
            for request, goal in zip(every, goals, strict=True):
                step = draw.choice([1, 3, 20, 90, 300])
                if request.length >= goal:
                    token = 1000 * request.kv.req_pool_idx + 500 + len(request.output_ids)
                    request.output_ids.append(token)
                    step, goal = 1, goal + 1000
                ends.append(min(goal, request.length + step))
            if max(ends) > 255:
                break
            _, logits = engine.step(ends)
            for request, end, row in zip(every, ends, logits.tolist(), strict=True):
                assert end < len(request.origin_input_ids) or row == request.states([end - 1])[0]
        else:
            engine.check()
