"""SpecPrefill's step of a plan: what is known of a prompt before it is judged."""

import numpy as np
import pytest
import torch
from oracles import specprefill as oracle

from fathom.runtime.kv.memory import Growth, KvMemory, pages_held, pages_taken
from fathom.runtime.plan import PrefillPlan, Step
from fathom.runtime.specprefill.config import AUTO, SpecPrefillConfig
from fathom.runtime.specprefill.select import select_prompt
from fathom.runtime.specprefill.step import MECHANISM, config_of, most_kept, random_scores, step
from fathom.runtime.staircase import Work, first_rows

SPANS = ((40, 45), (200, 230))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("tokens", [64, 65, 95, 96, 320, 333])
@pytest.mark.parametrize("spans", [(), SPANS])
def test_the_number_of_kept_tokens_is_known_before_the_scores(rate, tokens, spans):
    spans = [span for span in spans if span[1] <= tokens]
    config = SpecPrefillConfig(rate, min_prompt_tokens=0)
    for seed in range(5):
        scores = torch.rand(3, tokens, generator=torch.Generator().manual_seed(seed))
        kept = len(oracle.kept_tokens(scores, spans, rate))
        assert most_kept(config, tokens, spans) == kept
        assert len(select_prompt(scores, spans, config).tokens) == kept


def test_a_prompt_that_stays_whole_has_no_step():
    assert step(SpecPrefillConfig(0.2, min_prompt_tokens=100), 99, ()) is None
    assert step(SpecPrefillConfig(1.0, min_prompt_tokens=0), 999, ()) is None
    assert step(SpecPrefillConfig(0.2, min_prompt_tokens=0), 64, ()) is None  # the first and the last chunk
    assert step(SpecPrefillConfig(0.2, min_prompt_tokens=0), 320, ((0, 320),)) is None
    found = step(SpecPrefillConfig(0.2, min_prompt_tokens=0), 320, ())
    assert found == Step(0, MECHANISM, "scored", anchor=False, kept=64)
    assert step(SpecPrefillConfig(AUTO, min_prompt_tokens=0), 320, ()).kept == 320


def test_the_engines_own_requests_ask_for_nothing():
    assert config_of({}).keep_rate == 1


def test_a_policys_numbers_are_the_selections():
    policy = {"prefill_keep_rate": 0.3, "lookahead": 5, "min_prompt_tokens": 77}
    assert config_of(policy) == SpecPrefillConfig(keep_rate=0.3, lookahead=5, min_prompt_tokens=77)


@pytest.mark.parametrize("rate", [0.3, AUTO])
def test_a_span_outside_the_prompt_is_refused_before_there_are_scores(rate):
    with pytest.raises(ValueError, match=r"300\.\.321"):
        step(SpecPrefillConfig(rate, min_prompt_tokens=0), 320, ((300, 321),))


def test_random_scores_belong_to_the_prompt():
    one, other = random_scores(range(100), 32), random_scores(range(1, 101), 32)
    assert one.shape == (1, 100)
    assert torch.equal(one, random_scores(range(100), 32))
    assert not torch.equal(one, other) and not torch.equal(one, random_scores(range(99, -1, -1), 32))
    assert len(set(one[0, :32].tolist())) == 1


def plan(cutoff: int | None = None) -> PrefillPlan:
    steps = [Step(0, MECHANISM, "scored", anchor=False, kept=96)]
    return PrefillPlan(4, 2, (*steps, *([Step(cutoff, "SPEED")] if cutoff else [])))


@pytest.mark.parametrize("size", [1, 4])
def test_room_for_the_kept_tokens_is_taken_with_the_first_chunk(size):
    """Whether the prompt begins with a hit in the prefix cache or not, and never twice."""
    for begin in (0, 50):
        taken = pages_taken(plan(), begin, 100, 320, size, opened=False)
        assert taken == 2 * 96 // size == pages_held(plan(), 100, 320, size)
        assert pages_taken(plan(), 100, 320, 320, size, opened=True) == 0
        assert pages_taken(plan(), 320, 324, 320, size, opened=True) == 2 * 4 // size


def test_tables_grow_by_what_admission_counted():
    memory = KvMemory(pages=600, page_size=1, spans=2, virtual_pages=600)
    memory.open(0, plan(2), 320)
    counts = []
    for begin, end in ((50, 200), (200, 320), (320, 321), (321, 325)):
        before = memory.pool.free
        memory.grow([Growth(0, begin, end, np.arange(begin, end))])
        counts.append(before - memory.pool.free)
        expected = pages_taken(plan(2), begin, end, 320, 1, opened=begin > 50)
        assert counts[-1] == expected
    assert counts == [96, 2, 2, 8]
    assert memory.tables.lengths(0) == {0: 101, 1: 7}


def test_rows_that_enter_are_the_chosen_ones():
    work = Work(plan(2), 256, 320, 320)
    chosen = np.array([32, 33, 300, 319])
    rows = first_rows([Work(PrefillPlan(4, 2), 0, 3, 9), work], {1: chosen})
    assert rows.request.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert rows.position.tolist() == [0, 1, 2, 0, 32, 33, 300, 319]
    assert rows.again.tolist() == [False] * 3 + [True] + [False] * 4
    assert not rows.ghost.any()


def test_a_prompt_that_is_still_arriving_has_one_row_that_nobody_reads():
    rows = first_rows([Work(plan(), 0, 64, 320)], {0: np.zeros(0, np.int64)})
    assert rows.position.tolist() == [63]
    assert rows.ghost.all() and not rows.again.any()
