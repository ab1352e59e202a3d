"""Trigger ids from tokenizers, and the phases of a batch against a scalar state machine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fathom.runtime.sfi.config import SfiConfig
from fathom.runtime.sfi.trigger import PhaseState, ends_segment, trigger_ids, trigger_mask

ENDS = [
    *".?!;", "\n", "。", "．", "？", "！", "；", *"।॥؟۔؛", '."', ".)", ".\n\n", "?”", "!' ", " word.", "...",
    ").\n", "\n    ", "\r\n", ";\n", "！」", ".\")", "?!", "\u2028", "3.",
]  # fmt: skip
GOES_ON = [
    "",
    " ",
    "word",
    ".5",
    "\n}",
    "?x",
    ", ",
    ":",
    "”",
    ")",
    ".com",
    "\n\tx",
    "、",
    "<|end|>",
    "a.b",
    "-",
]


@pytest.mark.parametrize("text", ENDS)
def test_ends(text):
    assert ends_segment(text)


@pytest.mark.parametrize("text", GOES_ON)
def test_goes_on(text):
    assert not ends_segment(text)


def byte_level() -> Tokenizer:
    """A byte-level tokenizer that has each test text as one token, as merges would make it."""
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ByteLevel.alphabet()
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in [*ENDS, *GOES_ON]:
        if text:
            pieces.append("".join(piece for piece, _ in level.pre_tokenize_str(text)))
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_every_token_that_ends_a_segment_triggers():
    tokenizer = byte_level()
    ids = trigger_ids(tokenizer)
    texts = {tokenizer.decode([i], skip_special_tokens=False) for i in ids}
    assert set(ENDS) <= texts and not set(GOES_ON) & texts
    assert trigger_ids(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) == ids == sorted(ids)


def test_mask_is_as_wide_as_the_model():
    mask = trigger_mask([1, 3], 6)
    assert mask.tolist() == [False, True, False, True, False, False]


class OneRequest:
    """Section 3.1 for one request, one token at a time."""

    def __init__(self, config, triggers, first):
        self.config, self.triggers = config, triggers
        self.stale, self.fast_run, self.boundary = True, 0, first in triggers

    def slow(self):
        due = self.fast_run >= self.config.refresh_budget
        return self.stale or due or (self.boundary and self.fast_run >= self.config.minimum_gap)

    def step(self, refreshed, tokens):
        if refreshed:
            self.stale, self.boundary, self.fast_run = False, False, 0
        else:
            self.fast_run += len(tokens)
        self.boundary |= any(token in self.triggers for token in tokens)


@given(data=st.data(), budget=st.integers(1, 6), gap=st.integers(0, 4), width=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_phases_of_a_batch(data, budget, gap, width):
    """Rows admitted at different times, stepped in changing subsets, several tokens a pass, refreshes put off."""
    config = SfiConfig(recent=16, refresh_budget=budget, minimum_gap=min(gap, budget))
    triggers = [2, 5]
    state = PhaseState(5, trigger_mask(triggers, 8), config)
    token, flag = st.integers(0, 7), st.booleans()
    live = {}
    for _ in range(data.draw(st.integers(1, 12))):
        for row in sorted(set(range(5)) - set(live)):
            if data.draw(flag):
                first = data.draw(token)
                state.admit(np.array([row]), np.array([first]))
                live[row] = OneRequest(config, triggers, first)
        rows = data.draw(st.permutations(sorted(live)))
        if not rows:
            continue
        slow = state.slow(np.array(rows))
        assert slow.tolist() == [live[row].slow() for row in rows]
        refreshed = slow & np.array(data.draw(st.lists(flag, min_size=len(rows), max_size=len(rows))))
        tokens = np.array(data.draw(st.lists(token, min_size=len(rows) * width, max_size=len(rows) * width)))
        tokens = tokens.reshape(len(rows), width)
        count = st.integers(1, width)
        accepted = np.array(data.draw(st.lists(count, min_size=len(rows), max_size=len(rows))))
        # What lies beyond the accepted tokens is not looked at.
        tokens[np.arange(width) >= accepted[:, None]] = -1
        if width == 1:
            state.advance(np.array(rows), refreshed, tokens[:, 0])
        else:
            state.advance(np.array(rows), refreshed, tokens, accepted)
        for i, row in enumerate(rows):
            live[row].step(bool(refreshed[i]), tokens[i][: accepted[i]].tolist())
            if data.draw(st.integers(0, 5)) == 0:
                del live[row]


def run(tokens: list[int], **config) -> list[bool]:
    """Phases of the steps that make tokens[1:]."""
    state = PhaseState(1, trigger_mask([1], 4), SfiConfig(recent=16, **config))
    row, slow = np.array([0]), []
    state.admit(row, np.array(tokens[:1]))
    for token in tokens[1:]:
        phase = state.slow(row)
        slow.append(bool(phase))
        state.advance(row, phase, np.array([token]))
    return slow


def test_the_step_after_a_trigger_is_slow():
    assert run([0, 0, 1, 0, 0, 1, 1, 0]) == [True, False, True, False, False, True, True]


def test_the_first_step_is_slow():
    assert run([0, 0, 0]) == [True, False]
    assert run([1, 0, 0]) == [True, False]


def test_no_more_than_the_budget_of_fast_steps_in_a_row():
    assert run([0] * 9, refresh_budget=3) == [True, False, False, False] * 2


def test_a_trigger_within_the_gap_is_put_off_not_lost():
    assert run([0, 1, 1, 0, 0, 0, 0], minimum_gap=2) == [True, False, False, True, False, False]


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    budget=st.integers(1, 12),
    gap=st.integers(0, 12),
    start=st.integers(0, 50),
)
@settings(deadline=None)
def test_a_stretch_ends_where_the_next_step_is_slow(tokens, budget, gap, start):
    """From any point of a request's life, one token at a time."""
    config = SfiConfig(refresh_budget=budget, minimum_gap=min(gap, budget))
    state = PhaseState(1, trigger_mask([3, 7], 10), config)
    row, one = np.array([0]), np.ones(1, bool)
    state.admit(row, np.array([1]))
    for token in tokens[:start]:
        state.advance(row, state.slow(row), np.array([token]))
    stretch, rest = state.stretch(0), tokens[start:]
    if bool(state.slow(row)):
        assert stretch.left == 0
        return
    want = None
    for steps, token in enumerate(rest, start=1):
        state.advance(row, ~one, np.array([token]))
        if bool(state.slow(row)):
            want = steps
            break
    assert stretch.ends(rest) == want
    assert want is None or want <= stretch.left
