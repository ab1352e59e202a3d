"""What a request's policy and length come to: its place in the prefix cache, and the pool that it fits into."""

import contextlib
import itertools
import re
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_policy import AddReqResult

from fathom.runtime import cost
from fathom.runtime.cache_key import cache_key
from fathom.runtime.config import POLICY_KEY, PROTECTED_KEY, Limits, Policy, PolicyError, choose
from fathom.runtime.kv.memory import pages_held
from fathom.runtime.sglang_host import requests
from fathom.runtime.sglang_host.scheduling import kv_schedule

LAYERS, SPAN, TSP, BUFFER = 8, 2, 4, 200
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "prefill_keep_rate": st.sampled_from([0.1, 0.5, 0.97, "auto"]),
        "min_prompt_tokens": st.sampled_from([0, 100]),
        "depth_cutoff": st.sampled_from([2, 6]),
        "anchors": st.just("none"),
        "tsp_rate": st.sampled_from([0.1, 0.5, 0.99]),
        "kv_retention_rate": st.sampled_from([0.1, 0.9]),
    },
)
LENGTHS = st.sampled_from([1, 8, 9, 9, 10, 17, 64, 99, 100, 150, BUFFER, BUFFER + 1, 260])
"""A window is 8 tokens; an anchor above makes it 9."""
CLIENT_KEYS = st.sampled_from(["", "a", requests.WHOLE_KEY, requests.UNPROPAGATED_KEY])
WHOLE_AND_JUDGED = {"prefill_keep_rate": 0.5, "min_prompt_tokens": 100}


class Request:
    lora_id = beam_group = None

    def __init__(self, policy, prompt, protected, client_key=""):
        custom = {POLICY_KEY: policy.to_wire(), PROTECTED_KEY: protected}
        self.sampling_params = SimpleNamespace(custom_params=custom)
        self.origin_input_ids = [7] * prompt
        self.extra_key = cache_key(client_key, policy)


@pytest.fixture(autouse=True, scope="module")
def layout():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.LAYOUT, "tsp_layer", TSP)
        patch.setattr(requests.LAYOUT, "propagation_buffer", BUFFER)
        requests._plan.cache_clear()
        yield
    requests._plan.cache_clear()


def policy_of(fields):
    try:
        return choose(fields, limits=Limits(LAYERS, SPAN, {}, TSP)).policy
    except PolicyError:
        assume(False)


@given(FIELDS, st.lists(st.tuples(LENGTHS, st.booleans(), CLIENT_KEYS), min_size=2, max_size=5))
@example(WHOLE_AND_JUDGED, [(64, False, ""), (150, False, requests.WHOLE_KEY)])
@example({"tsp_rate": 0.5}, [(8, False, ""), (150, False, requests.UNPROPAGATED_KEY)])
@settings(max_examples=120)
def test_prompts_under_one_key_have_shared_kv_at_the_same_spans(fields, prompts):
    """A hit is read at all spans that its reader shares: whoever left it there must have had as many. What is
    protected may lie behind the end of a prompt that was truncated. Clients may give any key."""
    policy, depths = policy_of(fields), {}
    for length, protected, client_key in prompts:
        spans = [[0, length + 9], [length + 1, length + 5]] if protected else []
        request = Request(policy, length, spans, client_key)
        requests.separate_cache_key(request)
        plan, key = requests.plan_of(request, LAYERS, SPAN), request.extra_key
        assert depths.setdefault(key, plan.shared_spans) == plan.shared_spans
        assert requests.is_judged(request) == (plan.shared_spans == 0)
        unpropagated = policy.tsp_rate == 1 or requests.UNPROPAGATED_KEY in key.removesuffix(client_key)
        assert unpropagated == (plan.propagation is None)
        too_long = length > BUFFER
        assert requests.propagation_skipped(request) == (too_long and policy.tsp_rate != 1)
        assert not too_long or unpropagated
        assert too_long or length < 17 or policy.tsp_rate > 0.5 or not unpropagated
        requests.separate_cache_key(request)  # after the request was taken back
        assert request.extra_key == key
    if not policy.drops_tokens:
        assert depths.keys() == {cache_key(client_key, policy) for _, _, client_key in prompts}


def test_what_a_selection_must_keep_is_gone_through_once_per_length():
    """A conversation with tools may have thousands of such spans, and each engine step asks."""

    class Spans(list):
        looks = 0

        def __iter__(self):
            self.looks += 1
            return super().__iter__()

    spans = Spans([[40 * i, 40 * i + 32] for i in range(1000)])
    policy = policy_of({"prefill_keep_rate": 0.5, "min_prompt_tokens": 0})
    request = Request(policy, 100_000, spans)
    for _ in range(3):
        assert requests.is_judged(request)
        requests.plan_of(request, LAYERS, SPAN)
    assert spans.looks == 1
    del request.origin_input_ids[40_000:]
    assert not requests.is_judged(request)


@pytest.mark.parametrize("fields", [{}, {"depth_cutoff": 6}, WHOLE_AND_JUDGED])
def test_an_adapters_key_is_no_clients(fields):
    policy, keys = policy_of(fields), set()
    for adapter, client_key in itertools.product((None, "b", "c"), ("", "a", "b", "ab", "adapter/b/")):
        request = Request(policy, 64, [], client_key)
        if adapter:  # as SGLang makes it
            request.lora_id, request.extra_key = adapter, (request.extra_key or "") + adapter
        requests.separate_cache_key(request)
        keys.add(key := request.extra_key)
        requests.separate_cache_key(request)
        assert request.extra_key == key
    assert len(keys) == 15


class EmptyPool:
    """Of depth pages, all of them free, as admission asks it."""

    def __init__(self, plan, size, pages, virtual_pages):
        self.page_size, self.virtual_pages, self.plan_of = size, virtual_pages, lambda _: plan
        self.memory = SimpleNamespace(pool=SimpleNamespace(total=pages, free=pages), spans=LAYERS // SPAN)

    def virtual_size(self):
        return self.virtual_pages * self.page_size

    def dense_size(self, pages):
        return pages // self.memory.spans * self.page_size

    def available_size(self):
        return min(self.virtual_size(), self.dense_size(self.memory.pool.free))


class NoCache:
    """The tree of a server without a prefix cache; ``disable`` is what SGLang asks before it counts by itself."""

    def __init__(self, disable):
        self.disable = disable
        self.req_to_token_pool = SimpleNamespace(available_size=lambda: 1)

    def __getattr__(self, name):
        return lambda *_: name == "is_chunk_cache" and 1


def is_let_in(pool, request, out, new, counts, cached=0):
    """Whether SGLang's admission has room for a request that has so many of its new tokens already.

    ``cached``: tokens of its prompt that were found. ``counts``: by what they still may get, as it does of requests
    which ignore their end, without a prefix cache.
    """
    full = len(request.origin_input_ids) + out
    request.sampling_params.max_new_tokens, request.sampling_params.ignore_eos = new, counts
    request.output_ids, request.full_untruncated_fill_ids, request.prefix_indices = (
        [7] * out,
        [7] * full,
        [0] * cached,
    )
    request.kv, request.last_node = SimpleNamespace(holds_kv=False), None
    request.host_hit_length = request.swa_host_hit_length = 0
    adder = kv_schedule.DepthPrefillAdder(
        pool.page_size, NoCache(counts), pool, None, 0.5, 1 << 30, 1 << 30, max_running_requests=9
    )
    found = []
    adder._lock_node = lambda _: contextlib.nullcontext()
    for name in ("_check_prefill_tile_budget", "_select_prefill_admission", "_update_prefill_budget"):
        setattr(adder, name, lambda *_, **__: found.append(True))
    with contextlib.suppress(AttributeError):  # behind the question whether there is room
        return adder.add_one_req(request, False, truncation_align_size=None) != AddReqResult.NO_TOKEN
    return bool(found)


@given(FIELDS, LENGTHS, st.sampled_from([1, 4, 16]), st.integers(1, 600), st.integers(2, 80))
@settings(max_examples=150)
def test_the_longest_that_fits_is_the_longest_that_is_let_in(fields, prompt, size, pages, virtual):
    """Whenever it comes, and comes back."""
    request = Request(policy_of(fields), prompt, [])
    plan = requests.plan_of(request, LAYERS, SPAN)

    def pool_of(total, virtual_pages):
        return EmptyPool(plan, size, total, virtual_pages)

    pool = pool_of(pages, virtual)
    longest = kv_schedule.most_tokens(pool, plan, prompt)
    assert pages_held(plan, longest, prompt, size) <= pages and longest < virtual * size
    for out in range(longest - prompt):
        for counts in (False, True):
            assert is_let_in(pool, request, out, longest - prompt, counts), (out, longest, counts)
    # It is told to within a page, of whatever is cached of the prompt.
    cached_tokens = range(0, min(plan.reusable_tokens(prompt), plan.spans * size) + 1, size)
    pools = [
        (cached, pool_of(pages - plan.shared_spans * cached // size, virtual - cached // size))
        for cached in cached_tokens
    ]
    longer = longest + size
    if longer > prompt and -(-longer // size) + 1 < virtual:
        held = pages_held(plan, longer, prompt, size) + plan.spans >= pages
        new, ways = longer - prompt, (False, True)
        let_in = (
            is_let_in(rest, request, out, new, counts and not cached, cached)
            for cached, rest in pools
            for out in range(new)
            for counts in ways
        )
        assert held or not all(let_in)
    refused = kv_schedule.refuse_what_never_fits(pool, request)
    assert (refused is None) == (longest > prompt)
    if refused is not None:
        needed, names = re.search(r"needs (\d+) (virtual )?KV pages", refused).groups()
        for count, enough in ((int(needed), True), (int(needed) - 1, False)):
            other = pool_of(1 << 20, count) if names else pool_of(count, 1 << 20)
            assert (kv_schedule.refuse_what_never_fits(other, request) is None) == enough


@given(
    FIELDS,
    LENGTHS,
    LENGTHS,
    st.sampled_from([None, 1, 2, 30, 400]),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 600),
    st.integers(2, 80),
)
@settings(max_examples=150)
def test_a_prompt_is_cut_to_what_fits_beside_its_answer(
    fields, prompt, longest, answer, size, pages, virtual
):
    """Of which as much counts as half of the pool. A token more would not fit."""
    policy, answer_tokens = policy_of(fields), answer or 1

    def fits(length):
        plan = requests.plan_of(Request(policy, length, []), LAYERS, SPAN)
        most = kv_schedule.most_tokens(EmptyPool(plan, size, pages, virtual), plan, length)
        return length + 1 <= most and length + min(answer_tokens, most // 2) <= most

    request = Request(policy, 0, [])
    request.sampling_params.max_new_tokens = answer
    request.origin_input_ids = list(range(prompt))
    pool = EmptyPool(None, size, pages, virtual)
    pool.plan_of = lambda asked: requests.plan_of(asked, LAYERS, SPAN)
    kv_schedule.truncate(pool, request, longest)
    kept, bound = len(request.origin_input_ids), min(prompt, longest)
    assert request.origin_input_ids == list(range(kept))
    if any(map(fits, range(1, bound + 1))):
        assert kept <= bound and fits(kept) and (kept == bound or not fits(kept + 1))
    else:
        assert kept == prompt


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_retention_rate": 0.5},
        {"depth_cutoff": 2},
        {"depth_cutoff": 6},
        {"depth_cutoff": 4, "anchors": "none"},
    ],
    ids=str,
)
def test_the_longest_that_fits_is_let_in_whatever_of_its_prompt_is_cached(fields, size):
    """What is cached of its own prompt it cannot push out: where it was not let in, it would wait for ever."""
    asked = 0
    for prompt, pages in itertools.product((9, 61, 150), range(20, 600, 29)):
        request = Request(policy_of(fields), prompt, [])
        plan, virtual = requests.plan_of(request, LAYERS, SPAN), 200
        new = kv_schedule.most_tokens(EmptyPool(plan, size, pages, virtual), plan, prompt) - prompt
        for cached in range(size, min(plan.reusable_tokens(prompt), prompt - 1) + 1, size) if new > 0 else ():
            rest = EmptyPool(plan, size, pages - plan.shared_spans * cached // size, virtual - cached // size)
            for out in {0, new - 1}:
                assert is_let_in(rest, request, out, new, False, cached), (prompt, pages, cached, out)
            asked += 1
    assert asked > 50


def test_what_is_explained_is_what_the_plan_does():
    """The cost model counts for itself, from the policy alone, what the engine's plan computes and keeps."""
    per_layer = [layer // SPAN for layer in range(LAYERS)]
    rates, tsp_rates, retained = (1.0, 0.1, 0.5), (1.0, 0.1, 0.5, 0.99), (1.0, 0.1, 0.9)
    cases = itertools.product(
        rates, (0, 100), ("full", 2, 6), ("bos", "none"), tsp_rates, retained, (1, 8, 9, 10, 96, 150)
    )
    for keep, shortest, cutoff, anchors, tsp, kept, prompt in cases:
        if tsp != 1 and cutoff == 2:
            continue  # refused
        fields = {"prefill_keep_rate": keep, "min_prompt_tokens": shortest, "depth_cutoff": cutoff}
        fields |= {"anchors": anchors, "tsp_rate": tsp, "kv_retention_rate": kept}
        policy = Policy(**fields).canonical()
        plan = requests.plan_of(Request(policy, prompt, []), LAYERS, SPAN)
        told = cost.policy_plan(policy, LAYERS, prompt, tsp_layer=TSP)
        assert list(told.computed) == [plan.present_tokens(span, prompt) for span in per_layer], fields
        assert list(told.retained) == [plan.retained_tokens(span, prompt) for span in per_layer], fields


def asked(**said):
    """A request that says no more than this."""
    plain = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    plain |= {"ignore_eos": False, "stop_token_ids": None}
    made = Request(policy_of(said.pop("policy", {})), 9, [])
    for name, value in plain.items():
        setattr(made.sampling_params, name, value)
    made.inflight_middle_chunks, made.eos_token_ids, made.tokenizer = 0, None, None
    for name, value in said.items():
        setattr(made.sampling_params if name in plain else made, name, value)
    return made


PENALTIES = [
    {name: value}
    for name, values in {
        "frequency_penalty": (-0.5, 0.5),
        "presence_penalty": (-0.5, 0.5),
        "repetition_penalty": (0.5, 1.5),
    }.items()
    for value in values
]


@pytest.mark.parametrize("said", [{}, {"beam_group": "some"}, {"policy": {"speculative": True}}, *PENALTIES])
def test_who_waits_for_the_last_token(said):
    """Beams, drafts and each penalty, whatever its sign, once the prompt is complete; nobody else."""
    request = asked(**said)
    assert requests.penalised(request) == (said in PENALTIES)
    assert requests.decides_its_next_step(request) == bool(said)
    request.inflight_middle_chunks = 1
    assert not requests.decides_its_next_step(request)


def test_a_draft_reads_what_it_judges_and_what_it_drafts_for():
    for policy, reads in (({}, False), ({"speculative": True}, True), (WHOLE_AND_JUDGED, False)):
        assert requests.uses_draft(asked(policy=policy)) == reads
    judged = Request(policy_of(WHOLE_AND_JUDGED), 150, [])
    assert requests.uses_draft(judged) and not requests.speculates(judged)


def test_an_answer_ends_at_the_models_the_tokenizers_and_the_clients_tokens():
    request = asked(stop_token_ids=[5], eos_token_ids={2, 3})
    assert requests.ends_of(request) == {2, 3, 5}
    request.tokenizer = SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)
    assert requests.ends_of(request) == {2, 3, 5}
    request.tokenizer = SimpleNamespace(eos_token_id=7, additional_stop_token_ids=[8])
    assert requests.ends_of(request) == {2, 3, 5, 7, 8}
    request.sampling_params.ignore_eos = True
    assert requests.ends_of(request) == set()
