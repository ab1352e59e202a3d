"""What is made of the times of a batch, and when the prefix cache is emptied: an engine that stands in for ours."""

import gzip
import json
from contextlib import contextmanager

import pytest

from fathom.benchmarks import paper_engine
from fathom.benchmarks.client import BenchError
from fathom.benchmarks.paper_engine import Variant, Work
from fathom.runtime.cache_key import cache_key
from fathom.runtime.config import Policy
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.runtime.sglang_host.offline import Timed

torchvision_ops.declare()

DENSE, FAST, DEEP = Policy(), Policy(decode="slow_fast"), Policy(depth_cutoff=4)


def batch(*firsts, step=0.5, tokens=4):
    """Prompts whose first outputs come at these times, and from the last of them on a token a step for each."""
    steps = [(max(firsts) + step * i, 1 + i) for i in range(1, tokens)]
    return [Timed([(first, 1), *steps]) for first in firsts]


def test_prefills_of_others_are_no_decoding():
    """Four prompts computed one after the other, ten seconds each; then half a second a token."""
    cell = paper_engine.cell_of(batch(10.0, 20.0, 30.0, 40.0))
    assert cell.ttft == 25.0
    assert cell.tpot == pytest.approx(0.5)
    assert cell.rate == pytest.approx(4 / 0.5)


def test_tokens_between_prefills_do_not_count():
    """The first request has three of its tokens when the last prompt is computed, and then two at once."""
    early = Timed([(10.0, 1), (19.0, 2), (20.0, 3), (20.5, 5), (21.0, 6)])
    cell = paper_engine.cell_of([early, Timed([(20.0, 1), (21.0, 3)])])
    assert cell.tpot == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert cell.rate == pytest.approx(3 + 2)


def test_who_is_done_before_all_decode_is_left_out():
    cell = paper_engine.cell_of([Timed([(1.0, 1), (2.0, 2)]), *batch(4.0, 5.0)])
    assert cell.tpot == pytest.approx(0.5)
    assert cell.rate == pytest.approx(2 / 0.5)


def test_a_batch_of_one_counts_from_its_first_token():
    """One token, whatever the first output held."""
    for outputs in ([(2.0, 1), (5.0, 3), (8.0, 4)], [(2.0, 2), (8.0, 4)]):
        cell = paper_engine.cell_of([Timed(outputs, {"kept_tokens": 3})])
        assert (cell.ttft, cell.tpot, cell.rate) == (2.0, 2.0, 0.5)
        assert cell.account == {"kept_tokens": 3}


def test_requests_that_never_decode_together_count_from_their_own_first_token():
    cell = paper_engine.cell_of([Timed([(1.0, 1), (4.0, 4)]), Timed([(5.0, 1)])])
    assert cell.tpot == pytest.approx((1.0 + 0.0) / 2)
    assert cell.rate == pytest.approx(3 / 4)
    assert paper_engine.cell_of([Timed([(1.0, 1)])] * 2).rate == 0


class Engine:
    """Finds of a prompt the whole pages before its last token, where a request with the same key has left them."""

    def __init__(self, page=1, lost=0, page_size=None):
        """
        Args:
            page: tokens; page_size: what its report says, if not that.
            lost: tokens of each prompt that are not found again.
        """
        self.report = {"kv_pool": {"page_size": page_size or page}}
        self.page, self.lost = page, lost
        self.calls, self.known = [], set()

    def forget(self):
        self.calls.append("forget")
        self.known.clear()

    def run(self, prompts, output, policy):
        names = [(cache_key(None, policy or Policy()), tuple(prompt)) for prompt in prompts]
        self.calls.append((policy, output, len(set(names) - self.known)))
        timed = [Timed([(1.0, 1), (2.0, output)], self.account(name) if policy else {}) for name in names]
        self.known.update(names)
        return timed

    def account(self, name):
        length = len(name[1])
        whole = (length - 1) // self.page * self.page - self.lost
        return {"prompt_tokens": length, "cached_tokens": whole if name in self.known else 0}


def ways(*policies):
    return [Variant(f"way {at}", policy, bool) for at, policy in enumerate(policies)]


def work(cached, rounds=1, **others):
    return Work([9], batch=3, output=5, rounds=rounds, vocab=512, seed=0, cached=cached, **others)


def decoded(policy, computed):
    """What a cached run asks for: so many prompts are computed, and none once it is timed."""
    return [(policy, 1, computed), (policy, 5, 0)]


def test_prompts_of_a_round_are_computed_once_for_policies_that_leave_the_same_kv():
    engine = Engine()
    cells = paper_engine.measure(engine, ways(DENSE, FAST, DEEP), 9, work(cached=True, rounds=2))
    forwards = ["forget", *decoded(DENSE, 3), *decoded(FAST, 0), *decoded(DEEP, 3)]
    backwards = ["forget", *decoded(DEEP, 3), *decoded(FAST, 3), *decoded(DENSE, 0)]
    assert engine.calls == [*backwards, *forwards, *backwards]
    assert all(cell.account["cached_tokens"] == 8 for cell in cells.values())


def test_prompts_that_are_timed_are_computed_by_each_variant():
    engine = Engine()
    paper_engine.measure(engine, ways(DENSE, FAST), 9, work(cached=False, warm_up=4))
    expected = [call for policy in (DENSE, FAST) for call in ("forget", (policy, 5, 3))]
    assert engine.calls[4:] == expected


def test_requests_with_the_same_document_share_it():
    engine = Engine()
    paper_engine.measure(engine, ways(DENSE, FAST), 9, work(cached=True, documents=2))
    assert engine.calls[5:] == ["forget", *decoded(DENSE, 2), *decoded(FAST, 0)]


@pytest.mark.parametrize("page", [1, 4, 8, 16])
def test_all_but_the_last_page_is_found(page):
    """A page of 16 tokens is never full: a prompt of 9 tokens leaves nothing that is found."""
    engine = Engine(page)
    cells = paper_engine.measure(engine, ways(DENSE), 9, work(cached=True))
    assert cells["way 0"].account["cached_tokens"] == {16: 0}.get(page, 8)


@pytest.mark.parametrize("engine", [Engine(lost=1), Engine(page=4, lost=4), Engine(page=16, page_size=1)])
def test_a_prompt_that_is_not_cached_ends_the_run(engine):
    with pytest.raises(BenchError, match=r"way 0: \d of 9 tokens of a timed prompt were cached"):
        paper_engine.measure(engine, ways(DENSE), 9, work(cached=True))
    paper_engine.measure(engine, ways(DENSE), 9, work(cached=False))


def test_stock_sglang_says_nothing_of_its_cache():
    engine = Engine(lost=1)
    engine.report = {}
    paper_engine.measure(engine, ways(None), 9, work(cached=True))
    assert engine.calls == ["forget", *decoded(None, 3)] * 2


class Profiled(Engine):
    """Leaves a trace of one kernel, or fails; what it finds of a prompt while it is profiled may be less."""

    def __init__(self, event="kernel", lost=0):
        super().__init__()
        self.event, self.lost_then = event, lost

    @contextmanager
    def profiled(self, folder):
        self.calls.append("profile")
        self.lost = self.lost_then
        if self.event is None:
            raise RuntimeError("no profiler")
        yield
        events = [{"ph": "X", "cat": self.event, "name": "attention", "ts": 5.0, "dur": 2.0}]
        with gzip.open(folder / "1.trace.json.gz", "wt") as written:
            json.dump({"traceEvents": events}, written)


def test_each_variant_is_profiled_behind_the_rounds():
    """On prompts of its own; where they are cached on those of the last round, which are not computed again."""
    for cached in (True, False):
        engine = Profiled()
        cells = paper_engine.measure(engine, ways(DENSE, FAST), 9, work(cached=cached, profile=4))
        if cached:
            expected = [
                *((DENSE, 1, 0), "profile", (DENSE, 4, 0)),
                *((FAST, 1, 0), "profile", (FAST, 4, 0)),
            ]
        else:
            expected = ["forget", "profile", (DENSE, 4, 3), "forget", "profile", (FAST, 4, 3)]
        assert engine.calls[-len(expected) :] == expected
        for cell in cells.values():
            assert cell.profile["device"] and cell.profile["kernels"][0]["name"] == "attention"
            assert cell.profile["account"]["prompt_tokens"] == 9


@pytest.mark.parametrize(("event", "why"), [("mark", "no events"), (None, "no profiler")])
def test_without_a_trace_the_measurement_stays(event, why):
    (cell,) = paper_engine.measure(Profiled(event), ways(DENSE), 9, work(cached=True, profile=4)).values()
    assert why in cell.profile["error"] and cell.tpot > 0


def test_a_profile_of_prompts_that_were_not_cached_ends_the_run():
    with pytest.raises(BenchError, match="7 of 9 tokens of a timed prompt were cached"):
        paper_engine.measure(Profiled(lost=1), ways(DENSE), 9, work(cached=True, profile=4))
