"""What leaves the HTTP process with a request, and what is kept of what comes back."""

import asyncio
import copy
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime import config
from fathom.runtime.cache_key import cache_key
from fathom.runtime.config import Policy
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.server.requests.context import Face, RequestContext
from fathom.server.telemetry.metrics import Account, outcome_of

torchvision_ops.declare()

from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402

from fathom.server import tokenizer_manager as ours  # noqa: E402
from fathom.server.requests.applied_policy import apply_policy, refuse_prompt_outputs  # noqa: E402
from fathom.server.tokenizer_manager import FathomTokenizerManager  # noqa: E402

EXACT = Policy()
DEEP = Policy(preset=config.CUSTOM, depth_cutoff=4)
SELECTIVE = Policy(preset=config.CUSTOM, prefill_keep_rate=0.2)

keys = st.none() | st.text(max_size=6) | st.just("fathom") | st.just("a/fathom/")


@given(keys, keys, st.sampled_from([EXACT, DEEP, SELECTIVE]), st.sampled_from([EXACT, DEEP, SELECTIVE]))
def test_policies_never_share_a_cache_key(one, other, policy, another):
    first, second = cache_key(one, policy), cache_key(other, another)
    same = policy == another and (one or "") == (other or "")
    assert ((first or "") == (second or "")) == same
    assert cache_key(first, policy) == first


def test_a_server_that_embeds_generates_nothing():
    manager = FathomTokenizerManager.__new__(FathomTokenizerManager)
    manager.allow_auto_truncate, manager.is_generation = False, False
    with pytest.raises(ValueError, match="this server embeds texts and generates none"):
        manager._validate_one_request(GenerateReqInput(text="a"), [7])


def test_exact_leaves_the_cache_key_alone():
    assert cache_key(None, EXACT) is None
    assert cache_key("tenant", EXACT) == "tenant"


@pytest.mark.parametrize("policy", [EXACT, SELECTIVE])
def test_another_policys_name_space_is_refused(policy):
    with pytest.raises(ValueError, match="reserved"):
        cache_key(cache_key("x", DEEP), policy)


@pytest.mark.parametrize(
    ("sampling", "texts"),
    [
        (None, "a"),
        ({"temperature": 0}, "a"),
        ({"custom_params": {"mine": 1}}, "a"),
        ([{}, {"n": 1}], ["a", "b"]),
    ],
)
def test_every_sampling_parameter_set_carries_the_policy(sampling, texts):
    request = GenerateReqInput(text=texts, sampling_params=sampling, extra_key="t")
    before = copy.deepcopy(sampling)
    apply_policy(request, DEEP)
    found = (
        request.sampling_params if isinstance(request.sampling_params, list) else [request.sampling_params]
    )
    for item in found:
        assert Policy(**item["custom_params"]["fathom"]) == DEEP
    if isinstance(before, dict) and "custom_params" in before:
        assert found[0]["custom_params"]["mine"] == 1
    assert sampling == before, "the caller's own object must not change"
    assert request.extra_key == f"fathom/{DEEP.fingerprint()}/t"
    request.normalize_batch_and_arguments()


def test_a_list_of_cache_keys():
    request = GenerateReqInput(text=["a", "b"], extra_key=["x", "y"])
    apply_policy(request, DEEP)
    assert request.extra_key == [f"fathom/{DEEP.fingerprint()}/{key}" for key in "xy"]


def test_a_smuggled_policy_is_overwritten():
    request = GenerateReqInput(text="a", sampling_params={"custom_params": {"fathom": DEEP.to_wire()}})
    apply_policy(request, EXACT)
    assert request.sampling_params["custom_params"]["fathom"] == EXACT.to_wire()
    with pytest.raises(ValueError, match="custom_params must be an object"):
        apply_policy(GenerateReqInput(text="a", sampling_params={"custom_params": [1]}), EXACT)


def test_n_generations_are_counted_with_the_batch():
    request = GenerateReqInput(text=["a", "b"], sampling_params={"n": 3})
    request.normalize_batch_and_arguments()
    assert ours.generations_of(request) == 6
    single = GenerateReqInput(text="a")
    single.normalize_batch_and_arguments()
    assert ours.generations_of(single) == 1


class Recorder:
    def __init__(self):
        self.outcomes, self.times, self.tokens = [], [], []

    def count(self, account, outcome):
        self.outcomes.append((account.route, outcome))

    def observe_times(self, account, first_token, end, output_tokens):
        self.times.append((first_token, end, output_tokens))

    def observe_tokens(self, account, prompt_tokens, output_tokens):
        self.tokens.append((prompt_tokens, output_tokens))

    def observe_in_flight(self, generations):
        self.in_flight = generations


@pytest.fixture
def manager(monkeypatch):
    """The manager without its sockets and model."""
    made = FathomTokenizerManager.__new__(FathomTokenizerManager)
    made.request_metrics = Recorder()
    made.face = Face()
    made.rid_to_state = {}
    made.is_pause = False
    monkeypatch.setattr(ours.TokenizerManager, "collect_metrics", lambda *_: None)
    monkeypatch.setattr(ours.TokenizerManager, "_release_req_states_on_failure", lambda *_: None)
    return made


def state_of(stream=False, log_metrics=True, dispatched=False):
    return SimpleNamespace(
        obj=SimpleNamespace(stream=stream, log_metrics=log_metrics),
        fathom_account=Account("/generate", "exact", 10.0),
        finished=True,
        dispatched=dispatched,
        customized_info_accumulated={},
        time_stats=SimpleNamespace(first_token_time=15.0, finished_time=16.0),
    )


REPORT = {"kept_tokens": 4, "first_token_time": 11.0}


def test_the_report_is_taken_when_the_generation_ends(manager):
    state, meta = state_of(), {}
    info = {"fathom": [[], [REPORT]], "other": [[1], [2]]}
    manager.update_request_meta_info(meta, state, info, 0, None)
    assert meta == {"other": [1]}
    manager.update_request_meta_info(meta, state, info, 1, {"type": "stop"})
    assert meta == {"other": [1, 2], "fathom": {"kept_tokens": 4}}
    assert state.fathom_account.first_token == state.time_stats.first_token_time == 11.0


def test_a_streams_first_token_is_when_it_was_sent(manager):
    state = state_of(stream=True)
    manager.update_request_meta_info({}, state, {"fathom": [[REPORT]]}, 0, {"type": "stop"})
    assert state.time_stats.first_token_time == 15.0


def output(reason, tokens=6):
    return SimpleNamespace(finished_reasons=[reason], completion_tokens=[tokens], prompt_tokens=[3])


@pytest.mark.parametrize(("stream", "first"), [(False, 11.0), (True, 15.0)])
def test_the_first_token_is_the_schedulers_without_streaming(manager, stream, first):
    state = state_of(stream)
    state.fathom_account.first_token = 11.0
    manager.collect_metrics(state, output({"type": "length"}), 0)
    assert manager.request_metrics.times == [(first, 16.0, 6)]
    assert manager.request_metrics.tokens == [(3, 6)]
    (ended,) = manager.face.history.finished
    assert (ended.ttft, ended.latency, ended.tpot) == (first - 10, 6.0, (16 - first) / 5)
    assert (ended.route, ended.preset, ended.outcome) == ("/generate", "exact", "length")
    assert manager.request_metrics.outcomes == [("/generate", "length")]


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ({"type": "abort"}, "abort"),
        ({"type": "abort", "status_code": 500}, "error"),
        ({"type": "abort", "status_code": 503}, "unavailable"),
        ({"type": "abort", "status_code": 400}, "refused"),
        ({"type": "stop", "matched": 1}, "stop"),
        ({"type": "length"}, "length"),
    ],
)
def test_only_what_ran_to_its_end_is_timed(manager, reason, outcome):
    assert outcome_of(reason) == outcome
    manager.collect_metrics(state_of(), output(reason), 0)
    assert manager.request_metrics.outcomes == [("/generate", outcome)]
    assert bool(manager.request_metrics.times) == (outcome in ("stop", "length"))
    assert bool(manager.request_metrics.tokens) == (outcome in ("stop", "length"))
    assert [(g.outcome, g.ttft is None) for g in manager.face.history.finished] == [
        (outcome, outcome not in ("stop", "length"))
    ]


def test_a_generation_of_no_tokens_is_counted_and_not_timed(manager):
    manager.collect_metrics(state_of(), output({"type": "length"}, tokens=0), 0)
    assert manager.request_metrics.outcomes == [("/generate", "length")]
    assert manager.request_metrics.tokens == [(3, 0)]
    assert manager.request_metrics.times == []
    assert [generation.ttft for generation in manager.face.history.finished] == [None]


def test_tokens_of_a_stream_are_counted_as_they_come(manager):
    state, counted = state_of(stream=True), []
    manager.face.history.put_out = lambda now, tokens: counted.append(tokens)
    for tokens in (2, 2, 6):
        state.finished = tokens == 6
        manager.collect_metrics(state, output({"type": "length"}, tokens), 0)
    assert counted == [2, 0, 4]


def test_health_checks_and_running_requests_are_not_counted(manager):
    manager.collect_metrics(state_of(log_metrics=False), output({"type": "stop"}), 0)
    running = state_of()
    running.finished = False
    manager.collect_metrics(running, output(None), 0)
    assert not manager.request_metrics.outcomes and not manager.face.history.finished


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("too long"), "refused"),
        (RuntimeError("no"), "error"),
        *((HTTPException(status), outcome) for status, outcome in ((503, "unavailable"), (400, "refused"))),
    ],
)
def test_a_request_that_never_reached_the_scheduler(manager, error, outcome):
    """What its client did wrong is no error of the server, which an alert would ring for."""
    manager.rid_to_state = {"a": state_of()}
    try:
        raise error
    except Exception:
        manager._release_req_states_on_failure(["a", "gone"])
    assert manager.request_metrics.outcomes == [("/generate", outcome)]


def test_a_client_that_left_is_an_abort_and_counted_once(manager):
    manager.rid_to_state = {"a": state_of()}
    try:
        raise GeneratorExit
    except GeneratorExit:
        manager._release_req_states_on_failure(["a"])
    manager.rid_to_state = {"a": state_of(dispatched=True)}
    manager._release_req_states_on_failure(["a", "b"])
    assert manager.request_metrics.outcomes == [("/generate", "abort")]


def test_each_prompt_of_a_batch_that_failed_is_counted(manager):
    """Of a prompt that was sent before another one was refused, the scheduler says how it ended."""
    manager.rid_to_state = {"sent": state_of(dispatched=True), "refused": state_of(), "after": state_of()}
    try:
        raise ValueError("too long")
    except ValueError:
        manager._release_req_states_on_failure(manager.rid_to_state)
    assert manager.request_metrics.outcomes == [("/generate", "refused")] * 2


def test_a_client_that_leaves_while_a_common_prompt_is_computed(manager):
    """What SGLang sent to cache the prompt is no generation; the three that were to follow are."""
    manager.rid_to_state = {name: state_of() for name in "abc"} | {"prefix": state_of(dispatched=True)}
    manager.rid_to_state["prefix"].fathom_account = None
    try:
        raise GeneratorExit
    except GeneratorExit:
        manager._release_req_states_on_failure(["a", "b", "c", "prefix"])
    assert manager.request_metrics.outcomes == [("/generate", "abort")] * 3


def test_what_has_not_ended_is_in_flight(manager):
    states = [state_of(), state_of(log_metrics=False), state_of(), state_of()]
    for state, finished in zip(states, (False, False, True, False), strict=True):
        state.finished = finished
    manager.rid_to_state = dict(enumerate(states))
    manager.observe_in_flight()
    assert manager.request_metrics.in_flight == 2
    manager.request_metrics = None
    manager.observe_in_flight()  # a server without metrics


@pytest.fixture
def sending(manager, monkeypatch):
    """A function that sends a batch as SGLang does, and what is known of it after each request that was sent."""
    manager.enable_trace, manager.disaggregation_mode, manager._server_status = False, None, None
    seen = []

    async def tokenize(obj):
        sampling = SimpleNamespace(max_new_tokens=obj.sampling_params["max_new_tokens"])
        return SimpleNamespace(rid=obj.rid, sampling_params=sampling)

    async def send(self, sent):
        manager.rid_to_state[sent.rid].dispatched = True
        manager.observe_in_flight()
        seen.append((manager.request_metrics.in_flight, len(manager.rid_to_state)))

    async def wait(obj, request=None):
        if manager.rid_to_state[obj.rid].fathom_account is None:
            del manager.rid_to_state[obj.rid]  # the prompt is cached
        yield {"meta_info": {"id": obj.rid}}

    async def send_all(request):
        request.received_time = 1.0
        request.normalize_batch_and_arguments()
        manager._init_req_state(request)
        await anext(manager._handle_batch_request(request))

    manager._tokenize_one_request, manager._wait_one_response = tokenize, wait
    manager._should_use_batch_tokenization = lambda *_: False
    monkeypatch.setattr(ours.TokenizerManager, "_send_one_request", send)
    return lambda request: (asyncio.run(send_all(request)), seen)[1]


@pytest.mark.parametrize("most", [0, 9])
def test_n_generations_are_counted_as_n(manager, sending, most):
    """Neither the states that SGLang makes first, nor its request that caches a prompt, whatever is asked for."""
    seen = sending(GenerateReqInput(text=["a", "b"], sampling_params={"n": 3, "max_new_tokens": most}))
    assert [in_flight for in_flight, _ in seen] == [6] * (2 + 6)
    assert len(manager.rid_to_state) == 6 and all(map(ours.account_of, manager.rid_to_state.values()))


@pytest.mark.parametrize(("n", "rid"), [(1, None), (1, ["x", "y"]), (2, ["x", "y"]), (2, "x")])
def test_prompts_of_a_batch_are_counted_once_each(manager, sending, n, rid):
    sending(GenerateReqInput(text=["a", "b"], rid=rid, sampling_params={"n": n, "max_new_tokens": 9}))
    manager.observe_in_flight()
    assert manager.request_metrics.in_flight == len(manager.rid_to_state) == 2 * n


def test_a_batch_with_an_id_that_is_taken_leaves_nothing_behind(manager, sending):
    """The ids of its other prompts stay free, and the end of the server does not wait for them."""
    sending(GenerateReqInput(text=["a"], rid=["taken"], sampling_params={"max_new_tokens": 9}))
    with pytest.raises(ValueError, match="Duplicate request ID detected: taken"):
        sending(GenerateReqInput(text=["b", "c"], rid=["free", "taken"]))
    assert manager.rid_to_state.keys() == {"taken"}


def test_the_end_of_a_stream_ends_no_other_request_with_its_id(manager, monkeypatch):
    """Neither one that was there before and made it a duplicate, nor one that has the id since."""
    ended = []
    monkeypatch.setattr(ours, "ABORT_SECONDS", 0)
    manager.abort_request = ended.append
    request, other = (GenerateReqInput(text=["a", "b"], rid=["x", "y"]) for _ in range(2))
    single = GenerateReqInput(text="a", rid="y")
    for each in (request, other, single):
        each.normalize_batch_and_arguments()
    manager.rid_to_state = {"x": SimpleNamespace(obj=request[0]), "y": SimpleNamespace(obj=single)}
    for each, own in ((other, []), (request, ["x"]), (single, ["y"])):
        ended.clear()
        asyncio.run(manager.create_abort_task(each)())
        assert ended == own


CONTEXT = 1002
"""Of which SGLang's scheduler gives 1,000 tokens to a prompt and its answer."""


@pytest.fixture
def cutting(manager, monkeypatch):
    """The manager with what decides how long a prompt may be."""
    manager.allow_auto_truncate, manager.context_len, manager.is_generation = True, CONTEXT, True
    manager.num_reserved_tokens, manager.preferred_sampling_params = 0, None
    manager.model_config = SimpleNamespace(vocab_size=10_000)
    manager.tokenizer = None
    monkeypatch.setattr(ours.TokenizerManager, "_validate_one_request", lambda *_: None)
    return manager


def length_left(manager, prompt, **sampling):
    ids = list(range(prompt))
    manager._validate_one_request(GenerateReqInput(input_ids=ids, sampling_params=sampling), ids)
    assert ids == list(range(len(ids))), "it loses its end"
    return len(ids)


@pytest.mark.parametrize(
    ("prompt", "answer", "left"),
    [
        (5000, 10, 990),
        (995, 10, 990),
        (990, 10, 990),
        (5000, 500, 500),
        (5000, 900, 500),
        (400, 900, 400),
        (5000, None, 999),
        (5000, 0, 999),
    ],
)
def test_a_prompt_is_cut_so_that_the_context_holds_its_answer(cutting, prompt, answer, left):
    assert length_left(cutting, prompt, max_new_tokens=answer) == left


def test_how_long_an_answer_is_that_no_length_was_asked_for(cutting):
    assert length_left(cutting, 5000) == 1000 - 128, "SGLang's default"
    cutting.preferred_sampling_params = {"max_new_tokens": 50}
    assert length_left(cutting, 5000) == 950
    assert length_left(cutting, 5000, max_new_tokens=10) == 990
    cutting.num_reserved_tokens = 20
    assert length_left(cutting, 5000) == 930


def test_no_prompt_is_cut_unless_the_operator_wants_it(cutting):
    cutting.allow_auto_truncate = False
    assert length_left(cutting, 5000, max_new_tokens=10) == 5000


LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (LOGPROBS, "cannot be had under a policy that drops prompt tokens"),
        ({"sampling_params": {"beam_width": {"x": 1}}}, "beam_width must be an integer in"),
        ({"sampling_params": {"n": {"x": 1}}}, "n must be an integer in"),
        ({"custom_labels": {"tenant": "a"}}, "custom_labels are not configured on this server"),
    ],
)
def test_a_refused_stream_can_be_cleaned_up(manager, asked, message):
    """SGLang's task after a stream asks whether the request was single; if that fails, the connection is closed
    under whatever request is on it by then."""
    manager.model_config = SimpleNamespace(vocab_size=100)
    obj = GenerateReqInput(text="a", stream=True, **asked)
    token = ours.CURRENT.set(RequestContext("/generate", DEEP, 0.0))
    try:
        with pytest.raises(ValueError, match=message):
            asyncio.run(anext(manager.generate_request(obj)))
    finally:
        ours.CURRENT.reset(token)
    assert obj.is_single and obj.rid


PROMPT_OUTPUTS = [
    {"return_logprob": True, "logprob_start_len": 0},
    {"return_logprob": [False, True], "logprob_start_len": [-1, 0]},
    {"return_hidden_states": True},
]
BEAMS = [{"sampling_params": {"beam_width": 2}}, {"sampling_params": [{}, {"beam_width": 2}]}]
HARMLESS = [
    {"return_logprob": True, "logprob_start_len": -1},
    {"return_logprob": False, "logprob_start_len": 0},
    {"sampling_params": {"beam_width": 1}},
]


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        (Policy(), []),
        (Policy(speculative=True), []),
        (Policy(kv_retention_rate=0.5), BEAMS),
        (Policy(decode="slow_fast"), BEAMS),
        *((Policy(**{name: 0.5}), BEAMS + PROMPT_OUTPUTS) for name in ("prefill_keep_rate", "tsp_rate")),
        (Policy(depth_cutoff=2), BEAMS + PROMPT_OUTPUTS),
    ],
)
def test_what_a_policy_does_not_compute_cannot_be_had(policy, refused):
    for asked in PROMPT_OUTPUTS + BEAMS + HARMLESS:
        request = GenerateReqInput(text=["a", "b"], **asked)
        if asked in refused:
            with pytest.raises(ValueError, match="cannot be had"):
                refuse_prompt_outputs(request, policy)
        else:
            refuse_prompt_outputs(request, policy)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [(None, "abort"), ({"type": "abort", "status_code": 503}, "unavailable"), ({"type": "abort"}, "abort")],
)
def test_what_the_scheduler_aborts_is_counted(manager, monkeypatch, reason, outcome):
    monkeypatch.setattr(ours.TokenizerManager, "_handle_abort_req", lambda *_: None)
    manager.rid_to_state["one"] = state_of()
    for rid in ("one", "unknown"):
        manager._handle_abort_req(SimpleNamespace(rid=rid, finished_reason=reason))
    assert manager.request_metrics.outcomes == [("/generate", outcome)]


def test_time_begins_when_the_request_was_received(manager, monkeypatch):
    """And not when the engine was called, after its body was read and its prompt made."""
    monkeypatch.setattr(ours.TokenizerManager, "_init_req_state", lambda *_: None)
    manager._server_status = None
    request = GenerateReqInput(text="a", rid="one")
    for context, start in ((None, 5.0), (RequestContext("/generate", EXACT, 3.0), 3.0)):
        manager.rid_to_state["one"] = SimpleNamespace(time_stats=SimpleNamespace(created_time=5.0))
        token = ours.CURRENT.set(context)
        manager._init_req_state(request)
        ours.CURRENT.reset(token)
        assert manager.rid_to_state["one"].fathom_account.start == start
