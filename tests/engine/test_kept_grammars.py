"""What the engine keeps of compiled grammars: no more than it should, those used last, and each as it was."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.managers import scheduler as sglang_scheduler
from transformers import AutoTokenizer

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend  # noqa: E402
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend  # noqa: E402

from fathom.runtime.sglang_host.sampling import grammars  # noqa: E402
from fathom.runtime.sglang_host.scheduler import FathomScheduler  # noqa: E402
from fathom.runtime.sglang_host.step.rows import allows, grammar_mask  # noqa: E402

MOST = 100_000


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "demo/models/target")


@pytest.fixture
def backend(tokenizer):
    return XGrammarGrammarBackend(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def regex(index):
    return ("regex", f"(w{index:03}|[a-z]{{5}})")


def use(backend, key):
    """As the scheduler does; whether it was there, and the grammar."""
    value, was_there = backend.get_cached_or_future_value(key, False)
    if not was_there:
        value = value.result()
        backend.set_cache(key, value.copy())
    return was_there, value


def size(backend):
    return sum(grammars._bytes_of(key, grammar) for key, grammar in backend.cache.items())


def test_any_number_of_grammars_takes_no_more_than_it_should(backend):
    grammars.install(SimpleNamespace(grammar_backend=backend), MOST)
    for index in range(1, 101):
        assert not use(backend, regex(index))[0]
        assert backend.cache._bytes == size(backend) <= MOST
        assert use(backend, regex(index))[0]
    assert 1 < len(backend.cache) < 20
    assert list(backend.cache) == [regex(index) for index in range(101 - len(backend.cache), 101)]
    assert 0 < backend.grammar_compiler.get_cache_size_bytes() <= 2 * MOST
    backend.reset()
    assert backend.cache._bytes == len(backend.cache) == backend.grammar_compiler.get_cache_size_bytes() == 0


def test_those_used_last_stay_and_one_that_went_is_compiled_again(backend, tokenizer):
    grammars.install(SimpleNamespace(grammar_backend=backend), MOST)
    first = grammar_mask(use(backend, regex(1))[1], len(tokenizer))
    for index in range(2, 30):
        use(backend, regex(index))
        assert use(backend, regex(2))[0]
    assert regex(1) not in backend.cache and regex(2) in backend.cache
    was_there, again = use(backend, regex(1))
    assert not was_there and (grammar_mask(again, len(tokenizer)) == first).all()


def test_one_that_is_larger_than_all_may_be_stays_until_the_next(backend):
    grammars.install(SimpleNamespace(grammar_backend=backend), 1)
    for index in (1, 2, 3):
        use(backend, regex(index))
        assert list(backend.cache) == [regex(index)]
    use(backend, regex(3))
    backend.set_cache(regex(3), backend.cache[regex(3)])
    assert backend.cache._bytes == size(backend)


@pytest.mark.parametrize("key", [None, regex(1)])
def test_thoughts_are_bounded_where_they_may_hold_any_token(backend, tokenizer, key):
    """As those of DeepSeek-R1 may. ``key``: of the grammar of what follows them, if there is one."""
    parser = SimpleNamespace(detector=SimpleNamespace(think_end_token=" the", think_excluded_tokens=None))
    thinking = ReasonerGrammarBackend(backend, parser, tokenizer, enable_strict_thinking=True)
    grammars.install(SimpleNamespace(grammar_backend=thinking), MOST)
    grammar = thinking.init_strict_reasoning_grammar(True) if key is None else use(thinking, key)[1]
    grammar.maybe_init_reasoning(True)
    grammar.max_think_tokens = 2
    (end,) = thinking.think_end_ids
    other = tokenizer.eos_token_id + 1
    for allowed in (True, True, False):
        mask = grammar_mask(grammar, len(tokenizer))
        assert allows(mask, end) and allows(mask, other) == allowed
        grammar.accept_token(other if allowed else end)
    behind = grammar_mask(grammar, len(tokenizer))
    assert key is None or not allows(behind, other)


def test_grammars_behind_thoughts_count_with_what_they_compiled(backend, tokenizer):
    parser = SimpleNamespace(
        detector=SimpleNamespace(think_end_token=" the", think_excluded_tokens=None, think_start_token=" a")
    )
    thinking = ReasonerGrammarBackend(backend, parser, tokenizer)
    grammars.install(SimpleNamespace(grammar_backend=thinking), MOST)
    for index in range(1, 41):
        use(thinking, regex(index))
    plain = size(thinking)
    assert plain <= MOST and len(thinking.cache) < 10
    assert min(grammars._bytes_of(*entry) for entry in thinking.cache.items()) > grammars.LEAST_BYTES + 200
    assert backend.grammar_compiler.cache_limit_bytes == MOST


def test_the_scheduler_bounds_what_it_keeps(backend, monkeypatch):
    monkeypatch.setattr(
        sglang_scheduler, "GrammarManager", lambda scheduler: SimpleNamespace(grammar_backend=backend)
    )
    scheduler = FathomScheduler.__new__(FathomScheduler)
    scheduler.init_grammar_manager()
    assert backend.cache._most == grammars.MOST_BYTES == backend.grammar_compiler.cache_limit_bytes


def test_a_server_without_grammars_starts():
    grammars.install(SimpleNamespace(grammar_backend=None))
