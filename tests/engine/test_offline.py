"""The engine without HTTP: what it asks the manager for, which stands in for an engine here."""

import asyncio
from types import SimpleNamespace

import pytest

from fathom.runtime.cache_key import cache_key
from fathom.runtime.config import POLICY_KEY, Policy
from fathom.runtime.sglang_host import offline
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.runtime.sglang_host.offline import OfflineEngine, Timed

torchvision_ops.declare()

DEEP, PRUNED = Policy(depth_cutoff=4), Policy(tsp_rate=0.2)


class Manager:
    def __init__(self, flushes=True):
        self.asked, self.flushes = [], flushes

    async def generate_request(self, asked, request):
        self.asked.append(asked)
        for tokens in (1, 2):
            meta = {"completion_tokens": tokens, POLICY_KEY: [{"kept_tokens": tokens}]}
            yield {"meta_info": meta if tokens == 2 else {"completion_tokens": tokens}}

    async def flush_cache(self, timeout_s):
        assert timeout_s > 0  # the scheduler lets go of a request after its last output
        return SimpleNamespace(success=self.flushes)


@pytest.fixture
def start():
    loop = asyncio.new_event_loop()

    def start(manager):
        engine = OfflineEngine.__new__(OfflineEngine)
        engine._engine = SimpleNamespace(tokenizer_manager=manager, loop=loop)
        return engine

    yield start
    loop.close()


def test_policies_have_prefixes_of_their_own(start):
    """As behind HTTP: what one leaves in the prefix cache is not deep enough for another, or too deep."""
    manager = Manager()
    engine = start(manager)
    for policy in (None, Policy(), DEEP, PRUNED):
        timed = engine.run([[5, 6], [7]], 2, policy)
        assert [(one.tokens, one.account) for one in timed] == [(2, {"kept_tokens": 2})] * 2
        assert all(0 < one.first <= one.last for one in timed)
        assert [[tokens for _, tokens in one.outputs] for one in timed] == [[1, 2]] * 2
    keys = [asked.extra_key for asked in manager.asked[::2]]
    assert keys == [None, None, cache_key(None, DEEP), cache_key(None, PRUNED)]
    assert keys[2] and keys[3] and keys[2] != keys[3]
    assert [asked.input_ids for asked in manager.asked[:2]] == [[5, 6], [7]]
    for asked in manager.asked:
        wanted = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0.0}
        assert {name: asked.sampling_params[name] for name in wanted} == wanted
    told = [asked.sampling_params.get("custom_params") for asked in manager.asked[::2]]
    assert told == [None, *({POLICY_KEY: policy.to_wire()} for policy in (Policy(), DEEP, PRUNED))]


def test_a_cache_that_is_not_emptied_is_an_error(start):
    start(Manager()).forget()
    with pytest.raises(RuntimeError, match="could not be emptied within 30"):
        start(Manager(flushes=False)).forget()


def test_times_are_those_of_the_first_and_the_last_output(start, monkeypatch):
    """On a clock that goes on by one with each look: when the batch is handed over, and when an output is there."""
    ticks = iter(range(100, 200))
    monkeypatch.setattr(offline, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    (timed,) = start(Manager()).run([[5]], 2)
    assert timed.outputs == [(1, 1), (2, 2)]
    assert (timed.first, timed.last, timed.tokens) == (1, 2, 2)


def test_time_per_token_is_of_the_tokens_after_the_first():
    assert Timed([(2.0, 1), (5.0, 3), (8.0, 4)]).tpot == 2.0
    assert Timed([(2.0, 1), (2.5, 1)]).tpot == 0.5


@pytest.mark.parametrize(("moment", "tokens"), [(1.0, 4), (2.0, 3), (4.9, 3), (5.0, 1), (8.0, 0), (9.0, 0)])
def test_tokens_after_a_moment_were_not_there_at_it(moment, tokens):
    assert Timed([(2.0, 1), (5.0, 3), (8.0, 4)]).tokens_after(moment) == tokens
