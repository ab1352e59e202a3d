"""Requests on their way into SGLang's tokenizer manager and their outputs on the way back, with it scripted."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from fathom.runtime.config import POLICY_KEY, PROTECTED_KEY, Policy
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.server.requests.context import CURRENT, RequestContext
from fathom.server.routes import GENERATE, MESSAGES

torchvision_ops.declare()

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX  # noqa: E402
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402

from fathom.server import tokenizer_manager as ours  # noqa: E402

REPORT = {"prompt_tokens": 3, "kept_tokens": 2}


class Engine:
    """What stands for SGLang's manager: it normalizes a request, and puts out what it is told to."""

    def __init__(self, monkeypatch):
        self.outputs, self.error, self.asked, self.closed = [], None, [], 0
        engine = self

        async def generate(self, obj, request=None):
            obj.normalize_batch_and_arguments()
            engine.asked.append(obj)
            try:
                for output in engine.outputs:
                    yield output
                if engine.error is not None:
                    raise engine.error
            finally:
                engine.closed += 1

        async def state():
            return "the engine's state"

        monkeypatch.setattr(ours.TokenizerManager, "generate_request", generate)
        made = ours.FathomTokenizerManager.__new__(ours.FathomTokenizerManager)
        made.is_pause = made.enable_lora = False
        made.model_config, made.get_internal_state = SimpleNamespace(vocab_size=100), state
        self.manager = made

    def put_out(self, obj, context=None, request=None, most=None):
        async def all_of_them():
            found, stream = [], self.manager.generate_request(obj, request)
            async for output in stream:
                found.append(output)
                if len(found) == most:
                    break
            await stream.aclose()
            self.closed_with_it = self.closed
            return found

        token = CURRENT.set(context)
        try:
            return asyncio.run(all_of_them())
        finally:
            CURRENT.reset(token)


@pytest.fixture
def engine(monkeypatch):
    return Engine(monkeypatch)


def on(route, **known):
    return RequestContext(route, Policy(), 0.0, **known)


def meta(rid, reason=None, **more):
    return {"meta_info": {"id": rid, "finish_reason": reason and {"type": reason}} | more}


def test_a_stream_is_complete_when_each_of_its_generations_has_ended(engine):
    """Of two prompts with two answers each; however many outputs come, they are expected once."""
    context, seen = on(GENERATE), []
    engine.outputs = [
        meta("a"),
        meta("b"),
        meta("a", "stop", fathom=REPORT),
        meta("c", "length", fathom=REPORT | {"kept_tokens": 5}),
        meta("b", "abort"),
        meta("d"),
        meta("d", "stop", fathom=REPORT),
    ]
    request = GenerateReqInput(text=["x", "y"], stream=True, sampling_params={"n": 2})
    collect = context.collect
    context.collect = lambda output: (collect(output), seen.append((context.expected, context.complete)))
    assert engine.put_out(request, context) == engine.outputs
    assert seen == [(4, False)] * 6 + [(4, True)] and engine.closed == 1
    account = context.answer()
    assert (account["generations"], account["prompt_tokens"], account["kept_tokens"]) == (3, 9, 9)


def test_a_batch_that_comes_at_once(engine):
    context = on(GENERATE)
    engine.outputs = [[meta("a", "stop", fathom=REPORT), meta("b", "stop", fathom=REPORT)]]
    engine.put_out(GenerateReqInput(text=["x", "y"]), context)
    assert context.complete and context.answer()["generations"] == 2


def test_what_is_left_is_closed_with_the_stream(engine):
    engine.outputs = [meta("a")] * 5
    engine.put_out(GenerateReqInput(text="x", stream=True), on(GENERATE), most=2)
    assert engine.closed_with_it == 1


def test_a_request_gets_its_policy_its_spans_and_its_schema(engine):
    spans = ((0, 3), (7, 9))
    policy = Policy(preset="custom", prefill_keep_rate=0.5)
    schema = json.dumps({"type": "null"})
    context = RequestContext(MESSAGES, policy, 0.0, json_schema=schema, protected=spans)
    engine.put_out(GenerateReqInput(text="x", sampling_params={}), context)
    engine.put_out(GenerateReqInput(text="x", sampling_params={}))
    mine, other = (request.sampling_params for request in engine.asked)
    assert json.loads(mine["json_schema"]) == {"type": "null"} and "json_schema" not in other
    assert mine["custom_params"] == {POLICY_KEY: policy.to_wire(), PROTECTED_KEY: [[0, 3], [7, 9]]}
    assert other["custom_params"] == {POLICY_KEY: Policy().to_wire()}


FROM_A_ROUTE = SimpleNamespace(scope={"path": GENERATE, "type": "http"})
FROM_ANOTHER = SimpleNamespace(scope={"path": "/v1/score", "type": "http"})


@pytest.mark.parametrize(
    ("context", "request_", "clients"),
    [
        (on(GENERATE), None, True),
        (on(GENERATE), FROM_A_ROUTE, True),
        (None, FROM_A_ROUTE, True),
        (None, FROM_ANOTHER, False),
        (None, None, False),
    ],
)
def test_whose_requests_are_held_to_what_clients_may(engine, context, request_, clients):
    """Health checks are the server's own; while generations are paused these go by another sign of the engine."""

    def ask(**given):
        return engine.put_out(GenerateReqInput(text="x", **given), context and on(GENERATE), request_)

    health = {"rid": f"{HEALTH_CHECK_RID_PREFIX}_1", "log_metrics": False}
    engine.outputs = [meta("a")]
    for paused in (False, True):
        engine.manager.is_pause = paused
        if clients:
            with pytest.raises(ValueError, match="log_metrics must be true"):
                ask(**health)
            with pytest.raises(ValueError, match="rid must not begin with"):
                ask(rid=health["rid"])
        else:
            assert ask(**health) == (["the engine's state"] if paused else engine.outputs)
        assert ask(rid="mine") == engine.outputs


def test_a_score_of_no_labels_is_refused(engine):
    with pytest.raises(ValueError, match="label_token_ids must not be empty"):
        engine.put_out(GenerateReqInput(text="x", token_ids_logprob=[]))
    engine.put_out(GenerateReqInput(text="x", token_ids_logprob=[]), on(GENERATE))


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_refused_is_cleaned_up_as_what_it_was(engine, stream):
    request = GenerateReqInput(text=["x"] * 5000, stream=stream)
    with pytest.raises(ValueError, match="at most 4096 generations"):
        engine.put_out(request, on(GENERATE))
    assert (request.stream, request.is_single, engine.asked) == (stream, True, [])


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (RecursionError("maximum depth"), ValueError, "the request is nested too deeply"),
        (
            TypeError("SamplingParams got an unexpected keyword argument 'tempo'"),
            ValueError,
            "sampling_params.tempo is not a sampling parameter",
        ),
        (TypeError("no len()"), TypeError, "no len()"),
        (RuntimeError("no"), RuntimeError, "no"),
    ],
)
def test_errors_that_are_the_clients(engine, error, kind, told):
    engine.error = error
    with pytest.raises(kind) as caught:
        engine.put_out(GenerateReqInput(text="x"), on(GENERATE))
    assert str(caught.value) == told
    assert engine.closed == 1


def test_the_report_comes_with_the_end_and_names_the_adapter():
    manager = ours.FathomTokenizerManager.__new__(ours.FathomTokenizerManager)
    account = ours.Account(GENERATE, "exact", 0.0)
    state = SimpleNamespace(
        obj=SimpleNamespace(stream=True, log_metrics=True, lora_path="tone"),
        fathom_account=account,
        customized_info_accumulated={},
    )
    found = {}
    report = REPORT | {"first_token_time": 4.0}
    manager.update_request_meta_info(found, state, {"fathom": [[report]]}, 0, None)
    assert found == {} and account.report == {}
    manager.update_request_meta_info(found, state, {"fathom": [[report]]}, 0, {"type": "stop"})
    assert found == {"fathom": REPORT | {"adapter": "tone"}}
    assert account.report == report | {"adapter": "tone"} and account.first_token == 4.0


def test_a_prompt_has_at_least_one_token():
    manager = ours.FathomTokenizerManager.__new__(ours.FathomTokenizerManager)
    manager.allow_auto_truncate, manager.is_generation, manager.tokenizer = False, True, None
    manager.model_config = SimpleNamespace(vocab_size=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.TokenizerManager, "_validate_one_request", lambda *_: None)
        manager._validate_one_request(GenerateReqInput(text="a"), [7])
        with pytest.raises(ValueError, match="the prompt must have at least one token"):
            manager._validate_one_request(GenerateReqInput(text=""), [])


def test_the_end_of_a_stream_ends_each_of_its_prompts(engine, monkeypatch):
    """Of three, the second of which has another request's state by now."""
    monkeypatch.setattr(ours, "ABORT_SECONDS", 0)
    ended, (request, other) = [], (GenerateReqInput(text=list("abc"), rid=list("xyz")) for _ in range(2))
    for each in (request, other):
        each.normalize_batch_and_arguments()
    owners = {"x": request[0], "y": other[1], "z": request[2]}
    engine.manager.rid_to_state = {rid: SimpleNamespace(obj=owner) for rid, owner in owners.items()}
    engine.manager.abort_request = ended.append
    asyncio.run(engine.manager.create_abort_task(request)())
    assert ended == ["x", "z"]
