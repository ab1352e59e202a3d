"""What lasts from step to step, and one step over several spans, in a plain loop against Algorithms 1 and 2.

No engine: scattered slots, a table of its own length per span, rows that alternate beside rows that never do.
"""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import attending, combined
from oracles import sfi as oracle

from fathom.runtime.decode import Shape, SlowFast
from fathom.runtime.decode_chain import Chain
from fathom.runtime.decode_step import AS_SERVED, Ahead, Entry, Later
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sfi.config import SelectorConfig, SfiConfig
from fathom.runtime.sfi.options import SfiOptions
from fathom.runtime.sfi.rules import Reading
from fathom.runtime.sfi.trigger import trigger_mask

VOCABULARY, LAYERS, SPAN, CUTOFF = 128, 4, 2, 2
TRIGGERS = set(range(0, VOCABULARY, 11))
SELECTOR = SelectorConfig(nms_radius=3, prior_clip=0.2)
CONFIG = SfiConfig(sink=4, recent=16, selected=20, refresh_budget=9)


def options(config=CONFIG, runs=4, evidence_mib=1.0):
    one = config.compact_tokens * LAYERS * 2 * 2 * 32 * 4
    return SfiOptions(config, SELECTOR, runs * one / 2**20, evidence_mib)


def settings(config=CONFIG):
    return oracle.settings_of(config, SELECTOR)


@pytest.fixture(scope="module")
def model(random_model):
    return random_model(LAYERS)


def exists(prompt, cutoff):
    return lambda layer: range(len(prompt)) if layer < cutoff else {0, len(prompt) - 1}


class Loop:
    """Greedy decoding of requests by row; prompts are computed by the oracle's model, with every key it has.

    Args:
        late: how often a request's step is launched before the host knows the token that it reads, 0 to 1.
    """

    def __init__(self, model, state, width=400, reading=AS_SERVED, late=0.0):
        self.reading, self.late, self.rng = reading, late, random.Random(3)
        self.model, self.state = model, state
        slots, self.layers = 12 * width, len(model.model.layers)
        self.free = torch.randperm(slots, generator=torch.Generator().manual_seed(1)).tolist()
        self.pool = [(torch.randn(slots, 2, 32), torch.randn(slots, 2, 32)) for _ in range(self.layers)]
        self.slots = {}  # by row: per span the slots of its entries
        self.tokens, self.length, self.alternates, self.outcomes, self.logits = {}, {}, {}, {}, {}

    @torch.inference_mode()
    def prefill(self, row, prompt, cutoff=LAYERS, alternates=True):
        cached = oracle.CachedModel(self.model, len(prompt))
        kept = exists(prompt, cutoff)
        there = torch.zeros(self.layers, len(prompt), dtype=torch.bool)
        for i, line in enumerate(there):
            line[sorted(kept(i))] = True
        eye = torch.eye(len(prompt), dtype=torch.bool)
        causal = torch.ones_like(eye).tril()
        logits, _ = cached.forward(prompt, lambda i: (causal & (there[i] | eye)).unsqueeze(0))
        self.slots[row] = []
        for span in range(self.layers // SPAN):
            own = [self.free.pop() for _ in range(int(there[span * SPAN].sum()))]
            self.slots[row].append(own)
            for i in range(span * SPAN, (span + 1) * SPAN):
                self.pool[i][0][own] = cached.keys[i][:, there[i]].transpose(0, 1)
                self.pool[i][1][own] = cached.values[i][:, there[i]].transpose(0, 1)
        self.tokens[row], self.length[row], self.outcomes[row] = [int(logits.argmax())], len(prompt), []
        self.alternates[row], self.logits[row] = alternates, [logits]

    def entry(self, row, drafted=0, late=False):
        tokens = self.tokens[row][: -1 if late else None] if self.alternates[row] else None
        return Entry(row, self.length[row], tokens, drafted, self.reading, late and tokens is not None)

    def seen(self, row):
        """What the steps of a request were, all its tokens known."""
        self.state.take_in([self.entry(row)])
        return [each.outcome if isinstance(each, Later) else each for each in self.outcomes[row]]

    def proposed(self, row, drafts):
        """As many of the drafted tokens as may be verified in one pass."""
        stretch = self.state.stretch(row)
        if stretch is None:
            return drafts
        drafts = drafts[: max(stretch.left - 1, 0)]
        end = stretch.ends(drafts)
        return drafts if end is None else drafts[: end - 1]

    @torch.inference_mode()
    def step(self, rows, drafts=None):
        """One pass; ``drafts``: by row, tokens to verify in it."""
        for row in rows:
            self.length[row] += 1
        late = {row: self.rng.random() < self.late for row in rows}
        if drafts:
            self.state.take_in([self.entry(row) for row in rows])
        asked = {row: self.proposed(row, guess) for row, guess in (drafts or {}).items()}
        asked = {row: asked.get(row, []) for row in rows}
        for row in rows:
            for own in self.slots[row]:
                own.extend(self.free.pop() for _ in range(1 + len(asked[row])))
        step = self.state.begin([self.entry(row, len(asked[row]), late[row]) for row in rows])
        assert isinstance(step, Ahead) == any(late[row] and self.alternates[row] for row in rows)
        if isinstance(step, Ahead):
            step.look(torch.tensor([self.tokens[row][-1] for row in rows]))
        logits = self.compute(step, rows, asked)
        for row, found, lines in zip(rows, step.finish(), logits, strict=True):
            self.outcomes[row].append(found)
            self.accept(row, lines, asked[row])

    def compute(self, step, rows, asked):
        """Logits of each row's own token, and of those that are ``asked`` behind it."""
        counts = [1 + len(asked[row]) for row in rows]
        ids = [token for row in rows for token in (self.tokens[row][-1], *asked[row])]
        positions = torch.cat(
            [torch.arange(n) + self.length[r] - 1 for r, n in zip(rows, counts, strict=True)]
        )

        def attend(i, q, k, v, scale):
            tables = [self.slots[r][i // SPAN] for r in rows]
            last = [slot for own, n in zip(tables, counts, strict=True) for slot in own[-n:]]
            self.pool[i][0][last], self.pool[i][1][last] = k.transpose(0, 1), v.transpose(0, 1)
            slots = np.concatenate([[7, 7], *tables]).astype(np.int32)  # a segment before the step's own
            entry = np.cumsum([0, 2, *map(len, tables)])
            view = SpanView(slots.__getitem__, entry, np.arange(len(entry)), np.zeros(0, np.int64))
            return step.attend(i, q.transpose(0, 1), self.pool[i], view, scale).transpose(0, 1)

        with self.state.executor.step():
            return attending.forward(self.model, ids, attend, positions, len(ids)).split(counts)

    @torch.inference_mode()
    def follow(self, rows, count):
        """``count`` steps, of whose tokens the state learns at the end; those that do not stand are taken back."""
        chain, known = Chain(self.state), {row: list(self.tokens[row]) for row in rows}
        put_out, nothing = [], dict.fromkeys(rows, ())
        for _ in range(count):
            for row in rows:
                self.length[row] += 1
                for own in self.slots[row]:
                    own.append(self.free.pop())
            tokens = {row: chain.tokens(known[row]) if self.alternates[row] else None for row in rows}
            step = self.state.begin(
                [Entry(row, self.length[row], tokens[row], 0, self.reading) for row in rows]
            )
            logits = self.compute(step, rows, nothing)
            chain.add(step)
            put_out.append([int(lines[-1].argmax()) for lines in logits])
            for row, lines, token in zip(rows, logits, put_out[-1], strict=True):
                self.tokens[row].append(token)
                self.logits[row].append(lines[-1])
        stand, outcomes = chain.settle(np.array(put_out), np.full(len(rows), count))
        for row, stands, own in zip(rows, stand.tolist(), outcomes, strict=True):
            self.outcomes[row] += own
            if gone := count - stands:
                self.length[row] -= gone
                del self.tokens[row][-gone:], self.logits[row][-gone:]
                for slots in self.slots[row]:
                    self.free[:0] = slots[-gone:]
                    del slots[-gone:]

    def accept(self, row, lines, drafted):
        """Greedy: what stands of a pass, up to where a slow step is due; the rest is given back."""
        chosen = lines.argmax(-1).tolist()
        right = [a == b for a, b in zip(drafted, chosen, strict=False)]
        count = 1 + ([*right, False].index(False))
        stretch = self.state.stretch(row) if self.alternates[row] and len(chosen) > 1 else None
        tokens = chosen[:count]
        tokens = tokens if stretch is None else tokens[: stretch.ends(tokens)]
        self.tokens[row] += tokens
        self.logits[row] += list(lines[: len(tokens)])
        self.length[row] += len(tokens) - 1
        for own in self.slots[row] if len(tokens) < len(chosen) else ():
            self.free[:0] = own[len(tokens) - len(chosen) :]
            del own[len(tokens) - len(chosen) :]


def new_state(config=CONFIG, layers=LAYERS, longest=400, **limits):
    shape = Shape(layers, SPAN, 4, 2, 32, 32, torch.float32, longest, rows=16)
    return SlowFast(shape, options(config, **limits), trigger_mask(sorted(TRIGGERS), VOCABULARY))


def prompts(lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def agree(loop, row, model, prompt, cutoff=LAYERS, config=CONFIG, always_slow=False):
    triggers = range(VOCABULARY) if always_slow else TRIGGERS
    want = oracle.generate(
        model, prompt, len(loop.tokens[row]), triggers, settings(config), exists(prompt, cutoff)
    )
    assert loop.tokens[row] == want.tokens
    torch.testing.assert_close(torch.stack(loop.logits[row]), torch.stack(want.logits), atol=1e-4, rtol=1e-4)
    if not always_slow:
        assert [not outcome.fast for outcome in loop.seen(row)] == want.slow
    return want


LATE = pytest.mark.parametrize("late", [0.0, 0.5, 1.0], ids=["known", "some late", "all late"])


@LATE
def test_rows_of_all_kinds_in_changing_batches(model, late):
    """Six requests, three of them with a short upper span, one always dense; the batch is another one each step."""
    state = new_state(runs=5)
    loop = Loop(model, state, late=late)
    cases = list(
        zip(prompts([120, 37, 5, 90, 60, 2]), [LAYERS, CUTOFF, LAYERS, CUTOFF, LAYERS, CUTOFF], strict=True)
    )
    for row, (prompt, cutoff) in enumerate(cases, start=3):
        loop.prefill(row, prompt, cutoff, alternates=row != 7)
    order = itertools.cycle([[8, 3, 5, 4, 7, 6], [3, 4], [6, 5, 8], [7, 8, 4, 3]])
    for rows in itertools.islice(order, 60):
        loop.step(rows)
    for row, (prompt, cutoff) in enumerate(cases, start=3):
        want = agree(loop, row, model, prompt, cutoff, always_slow=row == 7)
        if row != 7:
            assert 1 < sum(want.slow) < len(want.slow)
            causes = [outcome.cause for outcome in loop.seen(row) if outcome.cause]
            assert causes[0] == "start" and {"trigger", "timeout"} >= set(causes[1:])
        else:
            assert set(loop.outcomes[row]) == {None}
    assert state.totals["trigger_refreshes"] > 5 and state.totals["timeout_refreshes"] > 5
    assert state.totals["mixed_steps"] > 20 and state.refresh_seconds > 0
    assert len(state.runs) == 5 and not state.pending


def test_a_budget_that_holds_everything_is_dense(model):
    """Selection and recent window as long as the context: every fast step reads all there is."""
    config = SfiConfig(sink=2, recent=100, selected=100, refresh_budget=7)
    loop = Loop(model, new_state(config))
    (prompt,) = prompts([40])
    loop.prefill(0, prompt)
    for _ in range(40):
        loop.step([0])
    assert sum(outcome.fast for outcome in loop.outcomes[0]) > 20
    agree(loop, 0, model, prompt, config=config, always_slow=True)


@pytest.mark.parametrize("rule", ["fused", "frozen", "random", "none"])
@pytest.mark.parametrize("gap", [0, 3])
def test_steps_that_follow_each_other_are_the_steps_one_by_one(model, gap, rule):
    """Batches that change between chains of any length; what is computed behind a sentence's end is taken back."""
    config = SfiConfig(**{**vars(CONFIG), "minimum_gap": gap, "refresh_budget": 5})
    reading = Reading(rule, selected=9, recent=16, seed=1 << 40)
    loop, asked = Loop(model, new_state(config, runs=2), reading=reading), prompts([120, 90, 37, 60])
    for row, prompt in enumerate(asked):  # the third finds no buffer
        loop.prefill(row, prompt, alternates=row != 3)
    rng, taken_back = random.Random(2), 0
    for _ in range(24):
        rows = [0, *(row for row in (1, 2, 3) if rng.random() < 0.7)]
        count, before = rng.randrange(1, 9), len(loop.tokens[0])
        loop.follow(rows, count)
        taken_back += count - (len(loop.tokens[0]) - before)
    assert taken_back > 2 and loop.state.refresh_seconds > 0
    assert sorted(loop.state.seen) == [0, 1, 2]  # nothing to let go of the one that always reads everything
    numbers = replace(settings(config), k=9, gap=gap)
    for row, prompt in enumerate(asked):
        how = combined.Decode(numbers, TRIGGERS, rule, 1 << 40) if row < 2 else combined.Decode()
        want = combined.generate(model, prompt, len(loop.tokens[row]), decode=how)
        assert loop.tokens[row] == want.tokens
        got = torch.stack(loop.logits[row])
        torch.testing.assert_close(got, torch.stack(want.logits), atol=1e-4, rtol=1e-4)
        if row < 2:
            assert [outcome.cause for outcome in loop.outcomes[row]] == want.causes
            assert [not outcome.fast for outcome in loop.outcomes[row]] == want.slow


@LATE
def test_a_row_without_a_buffer_is_dense_and_one_that_is_dropped_starts_slow(model, late):
    state = new_state(runs=1)
    loop = Loop(model, state, late=late)
    first, second = prompts([50, 70])
    loop.prefill(1, first)
    loop.prefill(2, second)
    for _ in range(12):
        loop.step([1, 2])
    assert [loop.seen(row)[0].compact_bytes > 0 for row in (1, 2)] == [True, False]
    assert state.totals["dense_fallbacks"] == 1
    agree(loop, 1, model, first)
    agree(loop, 2, model, second, always_slow=True)
    loop.step([1])
    state.drop(1)
    assert len(state.runs) == 0 and not state.pending
    loop.prefill(1, second)  # the same row, another request
    for _ in range(12):
        loop.step([1])
    assert loop.seen(1)[0].cause == "start"
    agree(loop, 1, model, second)
    state.clear()
    assert len(state.runs) == 0 and not state.seen and not state.pending


def test_rows_that_find_no_room_for_evidence_wait(model):
    """They stay slow, and read everything, until their turn."""
    state = new_state(evidence_mib=1e-9)  # one request of the greatest length
    state.ring._memory = state.ring._memory[:, : 6 * 90]
    loop = Loop(model, state)
    for row, prompt in enumerate(prompts([70, 70, 70])):
        loop.prefill(row, prompt)
    for _ in range(3):
        loop.step([0, 1, 2])
    starts = [[outcome.cause for outcome in loop.outcomes[row]].index("start") for row in range(3)]
    assert starts == [0, 1, 2]
    assert [outcome.fast for outcome in loop.outcomes[2]] == [False, False, False]


@pytest.mark.parametrize("gap", [0, 3])
def test_passes_over_drafted_tokens_are_the_steps_they_stand_for(model, gap):
    """Guesses of which some are wrong; each request's tokens, logits and slow steps are those of single steps."""
    config = SfiConfig(**{**vars(CONFIG), "minimum_gap": gap})
    loop, cutoffs = Loop(model, new_state(config, runs=3)), [LAYERS, CUTOFF, LAYERS, LAYERS]
    asked, new = prompts([120, 37, 5, 90]), 70
    told = [(TRIGGERS, replace(settings(config), gap=gap))] * 3
    told += [(range(VOCABULARY), settings())]  # the last one finds no compact buffer
    want = [
        oracle.generate(model, p, new + 12, *how, exists(p, cutoff))
        for p, cutoff, how in zip(asked, cutoffs, told, strict=True)
    ]
    for row, (prompt, cutoff) in enumerate(zip(asked, cutoffs, strict=True)):
        loop.prefill(row, prompt, cutoff)
    rng = random.Random(1)
    while unfinished := [row for row in range(4) if len(loop.tokens[row]) < new]:
        guesses = {}
        for row in unfinished:
            at = len(loop.tokens[row])
            guesses[row] = want[row].tokens[at : at + rng.randrange(9)]
            if guesses[row] and rng.random() < 0.4:
                guesses[row][rng.randrange(len(guesses[row]))] = rng.randrange(VOCABULARY)
        loop.step(unfinished, guesses)
    for row in range(4):
        count = len(loop.tokens[row])
        assert loop.tokens[row] == want[row].tokens[:count]
        for got, line in zip(loop.logits[row], want[row].logits, strict=False):
            torch.testing.assert_close(got, line, atol=1e-4, rtol=1e-4)
        slow = sum(not outcome.fast for outcome in loop.outcomes[row])
        assert slow == (sum(want[row].slow[: count - 1]) if row < 3 else len(loop.outcomes[row]))
        assert len(loop.outcomes[row]) < 0.75 * (count - 1)


@LATE
@pytest.mark.parametrize("rule", ["fused", "frozen", "random", "none"])
def test_controls(model, rule, late):
    (prompt,) = prompts([140])
    loop = Loop(model, new_state(), reading=Reading(rule, selected=9, recent=25, seed=1 << 40), late=late)
    loop.prefill(2, prompt)
    for _ in range(45):
        loop.step([2])
    how = combined.Decode(replace(settings(), k=9, recent=25), TRIGGERS, rule, 1 << 40)
    want = combined.generate(model, prompt, 46, decode=how)
    assert loop.tokens[2] == want.tokens
    torch.testing.assert_close(torch.stack(loop.logits[2]), torch.stack(want.logits), atol=1e-4, rtol=1e-4)
    assert [not outcome.fast for outcome in loop.seen(2)] == want.slow
    assert [outcome.cause for outcome in loop.seen(2)] == want.causes
    assert sum(want.slow) > 2 and (want.causes.count(None) == 44) == (rule == "frozen")


def test_thousands_of_tokens(random_model):
    """The recent window moves past itself 130 times; two layers, half of the tokens in passes over guesses."""
    model, new, (prompt,) = random_model(2), 2100, prompts([30])
    want = oracle.generate(model, prompt, new + 8, TRIGGERS, settings())
    loop = Loop(model, new_state(layers=2, longest=2300), width=400)
    loop.prefill(0, prompt)
    while (at := len(loop.tokens[0])) < new:
        loop.step([0], {0: want.tokens[at : at + 8]} if at // 50 % 2 else None)
    assert loop.tokens[0] == want.tokens[: len(loop.tokens[0])]
    got = torch.stack(loop.logits[0])
    torch.testing.assert_close(got, torch.stack(want.logits[: len(got)]), atol=1e-3, rtol=1e-3)
    slow = sum(not outcome.fast for outcome in loop.outcomes[0])
    assert slow == sum(want.slow[: len(got) - 1])
    assert 100 < sum(want.slow) < new / 4
    assert len(set(want.tokens[-200:])) > 20  # it does not say one thing for ever
