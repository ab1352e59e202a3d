"""What the draft knows of its requests, over random runs of an engine in which all but the draft is made up.

The draft's KV is here what it stands for: at a slot, the tokens up to the one that was read there. A pass that
reads another slot than that of the token before fails, and so does an answer that is not what the target says.
"""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fathom.runtime.config import POLICY_KEY, Policy
from fathom.runtime.sfi.trigger import Stretch
from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from fathom.runtime.sglang_host import requests  # noqa: E402
from fathom.runtime.sglang_host.draft import draft_side, lookahead, speculation  # noqa: E402
from fathom.runtime.sglang_host.draft.draft_side import DraftSide  # noqa: E402
from fathom.runtime.sglang_host.memory.tails import Tail  # noqa: E402
from fathom.runtime.specprefill.select import select_prompt  # noqa: E402
from fathom.runtime.specprefill.step import random_scores  # noqa: E402

VOCABULARY, ROW, SCRATCH, END = 97, 600, 10, 5
POLICIES = {
    "exact": Policy(),
    "draft": Policy(speculative=True, draft_tokens=3),
    "keep": Policy(prefill_keep_rate=0.7, min_prompt_tokens=64),
    "both": Policy(
        speculative=True, prefill_keep_rate=0.7, min_prompt_tokens=64, draft_tokens=4, lookahead=5
    ),
    "longer": Policy(speculative=True, prefill_keep_rate=0.7, min_prompt_tokens=64, lookahead=9),
    "slow": Policy(speculative=True, prefill_keep_rate=0.7, min_prompt_tokens=64, decode="slow_fast"),
    "random": Policy(
        speculative=True, prefill_keep_rate=0.7, min_prompt_tokens=64, prefill_selection="random"
    ),
}


def said(tokens, salt=0) -> int:
    found = hash((salt, *tokens[-6:], len(tokens))) % VOCABULARY
    return END if found < 8 else found


def target_says(tokens) -> int:
    return said(tokens)


def draft_says(tokens, agreement) -> int:
    """What the target says, or something else."""
    return said(tokens) if said(tokens, 1) % 100 < agreement else said(tokens, 2)


def rows_of(tokens) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float() * 9


class Request:
    """Stands for the engine's request."""

    def __init__(self, policy, prompt, tokens, ignore_eos=True):
        self.origin_input_ids, self.output_ids = prompt, []
        self.sampling_params = SimpleNamespace(
            custom_params={POLICY_KEY: policy.to_wire()},
            max_new_tokens=tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=[END],
            temperature=1.0,
            top_k=1,
            sampling_seed=None,
            min_new_tokens=0,
            frequency_penalty=0,
            presence_penalty=0,
            repetition_penalty=1,
        )
        self.eos_token_ids = self.tokenizer = self.grammar = self.beam_group = self.logprob = None
        self.custom_logit_processor = None
        self.return_hidden_states = self.return_sampling_mask = self.return_logprob = False
        self.kv = SimpleNamespace(req_pool_idx=0, kv_allocated_len=0, kv_committed_len=0)
        self.chunks, self.triggers, self.stretch = [], None, None

    @property
    def tokens(self):
        return self.origin_input_ids + self.output_ids


@dataclass
class Model:
    """A draft whose KV can be looked at; the query of a token is a number made of all tokens up to it."""

    agreement: int
    kv: dict = field(default_factory=dict)
    passes: list = field(default_factory=list)
    vocabulary: int = VOCABULARY

    def step_cost(self):
        return 0.4

    def read(self, lists, reads, capture=None, every=False):
        rows, queries = [], []
        for read in reads:
            slots = lists.parts[read.which][: read.length].tolist()
            begin = read.length - len(read.tokens)
            assert len(read.tokens) > 0 and len(slots) == read.length
            known = self.kv.get(slots[begin - 1], ()) if begin else ()
            assert len(known) == begin, "KV of the token before is there"
            assert [self.kv[slot] for slot in slots[:begin]] == [known[: i + 1] for i in range(begin)]
            for slot, token in zip(slots[begin:], read.tokens, strict=True):
                known = (*known, token)
                self.kv[slot] = known
                rows.append(draft_says(known, self.agreement))
            self.passes.append((known, len(read.tokens)))
            rows = rows if every else [*rows[: len(rows) - len(read.tokens)], rows[-1]]
            queries.append(query_of(known))
        if capture is not None:
            capture.queries = {layer: [torch.tensor(queries) + layer] for layer in range(2)}
        return rows_of(rows)

    def copy(self, source, target):
        for here, there in zip(source.tolist(), target.tolist(), strict=True):
            self.kv[there] = self.kv[here]

    def scratch_slots(self, place, count):
        assert (place + 1) * count <= SCRATCH
        return torch.arange(place * count, (place + 1) * count, dtype=torch.int32) - 1000

    def scores(self, queries, rows, prompts, scale):
        """Rows of chance made from the queries; what lies behind a prompt's end is higher than all of them."""
        out = torch.full((sum(rows), max(map(len, prompts))), 1e9)
        lengths = np.repeat([len(slots) for slots in prompts], rows)
        for row, length in enumerate(lengths):
            out[row, :length] = scores_of([queries[0][row]], length)
        assert torch.equal(queries[1], queries[0] + 1)
        return out


def query_of(tokens) -> float:
    return float(hash(tuple(tokens)) % (1 << 20))


def scores_of(queries, length) -> torch.Tensor:
    made = [torch.rand(length, generator=torch.Generator().manual_seed(int(query))) for query in queries]
    return torch.stack(made)


class Room:
    """Stands for the tails: room in a row, sometimes for fewer tokens than are wanted."""

    def __init__(self, engine):
        self.engine = engine

    def take(self, wanted):
        return [self._one(request, count) for request, count in wanted]

    def _one(self, request, count):
        assert count > 0 or request.output_ids == []
        count = self.engine.chance.choice([count, count, count, count // 2, 0])
        begin = request.kv.kv_allocated_len
        assert begin + count - len(request.tokens) <= self.engine.left(request)
        slots = self.engine.fresh(request, begin, begin + count)
        return Tail(request, begin, count, np.array(slots, np.int64))

    def shrink(self, tails, kept):
        assert all(0 <= count <= tail.count for tail, count in zip(tails, kept, strict=True))
        for tail, count in zip(tails, kept, strict=True):
            self.engine.free(tail.request, tail.begin + count, tail.begin + tail.count)
        return [
            Tail(tail.request, tail.begin, count, tail.slots[:count])
            for tail, count in zip(tails, kept, strict=True)
        ]

    def settle(self, tails, kept):
        for tail in self.shrink(tails, kept):
            tail.request.kv.kv_allocated_len += tail.count
            tail.request.kv.kv_committed_len += tail.count


class Engine:
    """Runs requests as SGLang does, with a draft beside the target."""

    def __init__(self, seed, agreement):
        self.chance = random.Random(seed)
        self.rows = torch.zeros(8, ROW, dtype=torch.int32)
        self.model, self.slots, self.empty_rows = Model(agreement), 1, list(range(8))
        self.side = DraftSide(self.model, self.rows)
        self.tails, self.running, self.cached, self.done = Room(self), [], [], []
        self.drafted = self.stood = self.read = self.bursts = 0
        self.learned = []

    def fresh(self, request, begin, end):
        slots = list(range(self.slots, self.slots + end - begin))
        self.slots += end - begin
        self.rows[request.kv.req_pool_idx, begin:end] = torch.tensor(slots, dtype=torch.int32)
        return slots

    def free(self, request, begin, end):
        """What was there is somebody else's."""
        for slot in self.rows[request.kv.req_pool_idx, begin:end].tolist():
            self.model.kv.pop(slot, None)
        self.rows[request.kv.req_pool_idx, begin:end] = 0

    def left(self, request):
        return request.sampling_params.max_new_tokens - len(request.output_ids)

    def admit(self, request):
        """A prefix of a request that has ended may be found in the cache."""
        request.kv.req_pool_idx, begin = self.empty_rows.pop(), 0
        for tokens, slots in self.cached:
            if tuple(request.tokens[: len(tokens)]) == tokens and begin < len(tokens) < len(request.tokens):
                begin = len(tokens)
                self.rows[request.kv.req_pool_idx, :begin] = torch.tensor(slots, dtype=torch.int32)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = begin
        while begin < len(request.tokens):
            end = min(begin + self.chance.choice([30, 200]), len(request.tokens))
            request.chunks.append((begin, end))
            begin = end

    def prefill(self, arriving, mixed=()):
        decoding, parts = list(mixed), [request.chunks.pop(0) for request in arriving]
        for request, (begin, end) in zip(arriving, parts, strict=True):
            self.fresh(request, begin, end)
            request.kv.kv_allocated_len = request.kv.kv_committed_len = end
        for request in decoding:
            self.one_more(request)
        batch = self.batch([*arriving, *decoding])
        batch.decoding_reqs = decoding or None
        batch.prefix_lens = [begin for begin, _ in parts] + [len(r.tokens) - 1 for r in decoding]
        batch.extend_lens = [end - begin for begin, end in parts] + [1] * len(decoding)
        before = len(self.model.passes)
        new = [(r, end - begin) for r, (begin, end) in zip(arriving, parts, strict=True) if uses_draft(r)]
        assert self.side.read_prefill(batch) == bool(new)
        self.read += sum(count for _, count in new)
        assert [count for _, count in self.model.passes[before:]][: len(new)] == [count for _, count in new]
        for request, (_, end) in zip(arriving, parts, strict=True):
            if requests.is_judged(request):
                selection = self.side.state(request).selection
                complete = end >= len(request.origin_input_ids) or len(request.output_ids) > 0
                assert (selection is not None) == complete
                if selection is not None:
                    assert selection.tokens.tolist() == self.kept(request)
        proposals = speculation.propose_ahead(batch, self.side, self.tails)
        self.bursts += len(proposals)
        assert not any(requests.alternates(batch.reqs[proposal.index]) for proposal in proposals)
        assert all(self.side.state(request).ahead is None for request in batch.reqs)
        self.settle(batch, proposals, [r for r in batch.reqs if not r.chunks])

    def kept(self, request):
        """What a selection keeps, from the queries of the last prompt token and of what the draft says then."""
        prompt, policy = request.origin_input_ids, requests.policy_of(request)
        config = requests.specprefill_of(request)
        if policy["prefill_selection"] == "random":
            return select_prompt(random_scores(prompt, config.chunk), (), config).tokens.tolist()
        tokens, queries = list(prompt), [query_of(prompt)]
        for _ in range(config.lookahead - 1):
            tokens.append(draft_says(tokens, self.model.agreement))
            if tokens[-1] == END and not request.sampling_params.ignore_eos:
                break
            queries.append(query_of(tokens))
        return select_prompt(scores_of(queries, len(prompt)), (), config).tokens.tolist()

    def one_more(self, request):
        self.fresh(request, len(request.tokens) - 1, len(request.tokens))
        assert request.kv.kv_allocated_len == len(request.tokens) - 1
        request.kv.kv_allocated_len += 1
        request.kv.kv_committed_len += 1

    def batch(self, running):
        lengths = torch.tensor([request.kv.kv_allocated_len for request in running])
        info = SimpleNamespace(logit_bias=None, sampling_seed=None)
        return SimpleNamespace(
            reqs=list(running),
            seq_lens_cpu=lengths,
            seq_lens=lengths.clone(),
            orig_seq_lens=lengths.int(),
            seq_lens_sum=int(lengths.sum()),
            sampling_info=info,
            return_logprob=False,
        )

    def decode(self):
        for request in self.running:
            self.one_more(request)
        batch = self.batch(self.running)
        stretches = {r: r.stretch for r in self.running if r.stretch is not None}
        proposals = speculation.propose(batch, self.side, self.tails, stretches)
        assert [proposal.index for proposal in proposals] == sorted(p.index for p in proposals)
        # Where steps overlap, the last token of a request that does not draft may be unknown yet.
        overlapping = [r for r in batch.reqs if not requests.speculates(r) and self.chance.random() < 0.5]
        late = {request: request.output_ids.pop() for request in overlapping}
        ends = {request: len(request.tokens) for request in batch.reqs}
        before = {request: self.side.state(request).read for request in batch.reqs}
        due = {r for r in batch.reqs if uses_draft(r) and ends[r] - before[r] >= self.patience(r)}
        self.side.catch_up(batch)
        for request in batch.reqs:
            assert self.side.state(request).read == (ends if request in due else before)[request]
        for request, token in late.items():
            request.output_ids.append(token)
        self.settle(batch, proposals, batch.reqs)

    def patience(self, request):
        drafting = requests.policy_of(request)["speculative"]
        return (self.side.state(request).pace.patience if drafting else None) or draft_side.CATCH_UP

    def settle(self, batch, proposals, putting_out):
        known = {p.index: batch.reqs[p.index].tokens + p.tokens for p in proposals}
        for proposal in proposals:
            request = batch.reqs[proposal.index]
            assert proposal.tokens and requests.policy_of(request)["speculative"]
            assert END not in proposal.tokens[:-1] or request.sampling_params.ignore_eos
            assert proposal.stretch is None or proposal.stretch.ends(proposal.tokens) is None
            self.learned.append((self.side.state(request).pace, None, None))
        logits = {
            p.index: rows_of(
                [
                    target_says(known[p.index][: len(known[p.index]) - back])
                    for back in range(len(p.tokens), -1, -1)
                ]
            )
            for p in proposals
        }
        before = [request.kv.kv_allocated_len for request in batch.reqs]
        runs = speculation.settle(batch, proposals, logits, self.side, self.tails) if proposals else {}
        assert runs.keys() == known.keys()
        for index, request in enumerate(batch.reqs):
            if request not in putting_out:
                continue
            tokens = runs[index].tokens if index in runs else [target_says(request.tokens)]
            assert (
                request.kv.kv_allocated_len == request.kv.kv_committed_len == before[index] + len(tokens) - 1
            )
            lengths = [x[index].item() for x in (batch.seq_lens_cpu, batch.seq_lens, batch.orig_seq_lens)]
            assert lengths == [request.kv.kv_allocated_len] * 3
            assert not proposals or batch.seq_lens_sum is None
            self.put_out(request, tokens)
        self.drafted += sum(len(p.tokens) for p in proposals)
        self.stood += sum(len(run.tokens) - 1 for run in runs.values())
        totals = self.side.totals
        assert (totals.proposed, totals.accepted) == (self.drafted, self.stood)
        self.check()

    def put_out(self, request, tokens):
        for place, token in enumerate(tokens):
            assert token == target_says(request.tokens)
            assert len(request.output_ids) < request.sampling_params.max_new_tokens
            request.output_ids.append(token)
            ends = token == END and not request.sampling_params.ignore_eos
            if ends or self.left(request) == 0:
                self.finish(request)
                return
            if request.stretch is not None:
                request.stretch = after(request.stretch, token)
                assert request.stretch is not None or place == len(tokens) - 1, (
                    "a pass goes on behind a slow step"
                )
        if request.triggers is not None and request.stretch is None:
            request.stretch = Stretch(
                self.chance.randint(1, 6), self.chance.randint(0, 3), False, request.triggers
            )
        if request not in self.running:
            self.running.append(request)

    def finish(self, request):
        """The cache keeps what both models have read."""
        count = min(request.kv.kv_committed_len, len(request.tokens))
        if uses_draft(request):
            count = min(count, self.side.state(request).read)
            slots = self.rows[request.kv.req_pool_idx, :count].tolist()
            assert [self.model.kv[slot] for slot in slots] == [
                tuple(request.tokens[: i + 1]) for i in range(count)
            ]
            self.cached.append((tuple(request.tokens[:count]), slots))
        self.let_go(request)
        self.done.append(request)

    def let_go(self, request):
        self.rows[request.kv.req_pool_idx] = 0
        self.empty_rows.append(request.kv.req_pool_idx)
        if request in self.running:
            self.running.remove(request)

    def take_back(self, request):
        """It starts again later, with what it has put out."""
        self.let_go(request)
        self.learned.append((self.side.state(request).pace, None, None))
        self.admit(request)

    def check(self):
        states, totals = self.side.states, self.side.totals
        for request in self.running:
            if uses_draft(request):
                state = states[request]
                slots = self.rows[request.kv.req_pool_idx, : state.read].tolist()
                kv = [self.model.kv[slot] for slot in slots]
                assert kv == [tuple(request.tokens[: i + 1]) for i in range(state.read)]
                assert state.pace.shared is self.side.evidence
                if state.guess is not None:
                    assert state.guess.token == draft_says(request.tokens[: state.read], self.model.agreement)
        chosen = [r for r in states if states[r].selection is not None]
        assert totals.prompts_judged == len(chosen)
        assert totals.prompt_tokens_judged == sum(len(r.origin_input_ids) for r in chosen)
        assert totals.prompt_tokens_kept == sum(len(self.kept(r)) for r in chosen)
        assert totals.read == sum(state.read_in_all for state in states.values())


def after(stretch, token):
    """What is left of fast steps when one has put out a token."""
    boundary = stretch.boundary or bool(stretch.trigger[token])
    left, gap = stretch.left - 1, max(stretch.gap - 1, 0)
    return None if left == 0 or (boundary and gap == 0) else Stretch(left, gap, boundary, stretch.trigger)


def uses_draft(request):
    return requests.policy_of(request)["speculative"] or requests.is_judged(request)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(lookahead, "SCRATCH_SLOTS", SCRATCH)
    monkeypatch.setattr(draft_side, "CATCH_UP", 3)


@pytest.mark.parametrize("agreement", [20, 70, 95])
@pytest.mark.parametrize("seed", range(3))
def test_the_draft_reads_what_is_there_and_changes_no_answer(seed, agreement, monkeypatch):
    engine = Engine(seed, agreement)

    def learn(pace, guesses, tokens):
        assert pace.patience is None or len(tokens) >= pace.patience - 1, "not before its patience is over"
        engine.learned.append((pace, [guess.token for guess in guesses], list(tokens)))
        real(pace, guesses, tokens)
        if pace.patience is None:
            engine.learned.append((pace, None, None))

    real = draft_side._learn
    monkeypatch.setattr(draft_side, "_learn", learn)
    chance, arriving, waiting = engine.chance, [], 30
    everyone = []
    while waiting or arriving or engine.running:
        while waiting and len(engine.empty_rows) > 2 and chance.random() < 0.7:
            waiting -= 1
            policy = POLICIES[chance.choice([*POLICIES, "both", "both", "longer"])]
            base = list(chance.choice(engine.cached)[0]) if engine.cached and chance.random() < 0.4 else []
            prompt = base[:200] + [
                chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 40, 99, 150]))
            ]
            request = Request(policy, prompt, chance.choice([1, 2, 30, 90]), chance.random() < 0.8)
            if policy.speculative and not requests.is_judged(request) and chance.random() < 0.3:
                request.triggers = np.array([chance.random() < 0.2 for _ in range(VOCABULARY)])
            engine.admit(request)
            arriving.append(request)
            everyone.append(request)
        taken = arriving[: chance.randint(0, 4)]
        if taken:
            engine.prefill(taken, [r for r in engine.running if chance.random() < 0.2])
            arriving = [request for request in arriving if request.chunks]
        elif engine.running:
            engine.decode()
        if engine.running and chance.random() < 0.02:
            engine.take_back(back := chance.choice(engine.running))
            arriving.append(back)
    assert len(engine.done) == len(everyone) == 30
    for request in everyone:
        tokens, output = list(request.origin_input_ids), []
        while len(output) < request.sampling_params.max_new_tokens:
            output.append(target_says(tokens + output))
            if output[-1] == END and not request.sampling_params.ignore_eos:
                break
        assert request.output_ids == output
    assert engine.stood >= agreement // 30 and engine.bursts and engine.cached
    check_evidence(engine, everyone)


def check_evidence(engine, everyone):
    """Each token that was not drafted is foreseen or not, once, and none is left out while the draft rests."""
    by_pace = {id(engine.side.states[r].pace): r for r in everyone if r in engine.side.states}
    ends: dict[Request, int | None] = {}
    assert any(tokens for _, _, tokens in engine.learned)
    for pace, guesses, tokens in engine.learned:
        request = by_pace[id(pace)]
        begin = ends.get(request, len(request.origin_input_ids))
        if tokens is None:
            ends[request] = None
            continue
        assert requests.policy_of(request)["speculative"]
        places = [
            place
            for place in (range(len(request.tokens)) if begin is None else (begin,))
            if request.tokens[place : place + len(tokens)] == tokens
            and guesses
            == [draft_says(request.tokens[: place + i], engine.model.agreement) for i in range(len(tokens))]
        ]
        assert places
        ends[request] = places[0] + len(tokens)
