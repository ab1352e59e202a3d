"""Control requests that fail in the engine: the answers to them."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.tokenizer_control_mixin import _COMMUNICATOR_SPECS

from fathom.runtime.sglang_host.scheduling.control import GuardedDispatcher, failure_of, reason_of


def fail(request):
    raise ValueError("why")


@pytest.fixture
def ranks(monkeypatch):
    """Let the model run in so many processes, of which so many others fail."""

    def build(size=1, others_failed=0):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, group: count.add_(others_failed))
        return SimpleNamespace(tp_cpu_group=None, unload_lora_adapter=unload)

    def unload(request):
        unloaded.append((request.lora_name, request.lora_id))
        return io_struct.LoRAUpdateOutput(success=True, loaded_adapters={"other": "path"})

    unloaded = build.unloaded = []

    return build


@pytest.mark.parametrize("kind", [spec[1] for spec in _COMMUNICATOR_SPECS], ids=lambda kind: kind.__name__)
def test_every_kind_of_answer_can_say_that_its_request_failed(kind):
    """And arrives as what the HTTP process waits for."""
    if kind is io_struct.LoRAUpdateOutput:
        request = io_struct.UnloadLoRAAdapterReqInput(lora_name="x")
    else:
        stem = kind.__name__.removesuffix("Output")
        request = type(stem if hasattr(io_struct, stem) else stem + "Input", (), {})()
    answer = io_struct.msgpack_decode(io_struct.msgpack_encode(failure_of(request, "why")))
    assert type(answer) is kind
    assert reason_of(answer) == "why"
    assert getattr(answer, "success", False) is False


def test_a_session_that_could_not_be_opened_is_told_to_who_waits_for_it():
    request = io_struct.OpenSessionReqInput(capacity_of_str_len=1, session_id="s")
    assert failure_of(request, "why").session_id == "s"


def test_what_is_not_answered_fails_in_silence(ranks):
    request = io_struct.ConfigureLoggingReq()
    assert GuardedDispatcher(fail, ranks())(request) is None


def test_generations_and_aborts_are_not_guarded(ranks):
    with pytest.raises(ValueError, match="why"):
        GuardedDispatcher(fail, ranks())(io_struct.AbortReq())


@pytest.mark.parametrize("handler", [fail, lambda request: "done"])
def test_processes_that_differ_end(ranks, handler):
    dispatcher = GuardedDispatcher(handler, ranks(3, others_failed=1))
    with pytest.raises(RuntimeError, match="in some processes only"):
        dispatcher(io_struct.GetInternalStateReq())


def test_a_request_that_fails_everywhere_is_answered(ranks):
    answer = GuardedDispatcher(fail, ranks(3, others_failed=2))(io_struct.GetInternalStateReq())
    assert reason_of(answer) == "why (ValueError)"
    answered = io_struct.GetInternalStateReqOutput(internal_state={"a": 1})
    assert GuardedDispatcher(lambda request: answered, ranks(3))(io_struct.GetInternalStateReq()) is answered
    assert reason_of(answered) is None


ADAPTER = io_struct.LoadLoRAAdapterReqInput(lora_name="x", lora_path="path", lora_id="7")
WEIGHTS = io_struct.UpdateWeightFromDiskReqInput(model_path="path")


def test_an_adapter_that_others_could_not_load_is_let_go(ranks):
    loaded = io_struct.LoRAUpdateOutput(success=True, loaded_adapters={"other": "path", "x": "path"})
    answer = GuardedDispatcher(lambda request: loaded, ranks(2, others_failed=1))(ADAPTER)
    assert not answer.success and "not all processes" in answer.error_message
    assert answer.loaded_adapters == {"other": "path"} and ranks.unloaded == [("x", "7")]


def test_an_adapter_that_only_others_could_load_is_not_let_go_twice(ranks):
    failed = io_struct.LoRAUpdateOutput(success=False, error_message="no file")
    assert GuardedDispatcher(lambda request: failed, ranks(2))(ADAPTER) is failed
    assert ranks.unloaded == []


@pytest.mark.parametrize(("success", "others_failed"), [(True, 0), (False, 1)])
def test_an_adapter_is_loaded_by_all_or_by_none(ranks, success, others_failed):
    answer = io_struct.LoRAUpdateOutput(success=success)
    assert GuardedDispatcher(lambda request: answer, ranks(2, others_failed))(ADAPTER) is answer
    assert ranks.unloaded == []


@pytest.mark.parametrize(("success", "others_failed"), [(True, 1), (False, 0)])
def test_processes_with_different_weights_end(ranks, success, others_failed):
    answer = io_struct.UpdateWeightFromDiskReqOutput(success=success, message="no file")
    dispatcher = GuardedDispatcher(lambda request: answer, ranks(2, others_failed))
    with pytest.raises(RuntimeError, match="in some processes only"):
        dispatcher(WEIGHTS)


def test_an_adapter_that_a_process_fails_at_is_refused_by_it(ranks):
    assert reason_of(GuardedDispatcher(fail, ranks(2))(ADAPTER)) == "why (ValueError)"


@pytest.mark.parametrize(
    "kind", [io_struct.UpdateWeightsFromTensorReqInput, io_struct.LoadLoRAAdapterFromTensorsReqInput]
)
def test_a_part_too_few_is_refused_by_all(ranks, monkeypatch, kind):
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    given = (
        {"lora_name": "x", "config_dict": {}} if kind is io_struct.LoadLoRAAdapterFromTensorsReqInput else {}
    )
    request = kind(serialized_named_tensors=[b"one"], **given)
    handled = GuardedDispatcher(lambda request: pytest.fail("was asked"), ranks(2, others_failed=1))(request)
    assert "has 1 parts, each of 2 devices needs one" in reason_of(handled)


def met(rank, store, failing):
    """How one of two processes fares with weights that some of them fail at; the others wait for all."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD

    def handle(request):
        if rank in failing:
            fail(request)
        torch.distributed.barrier(group=group)
        return io_struct.UpdateWeightsFromTensorReqOutput(success=True, message="")

    request = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[b"", b""])
    try:
        return reason_of(GuardedDispatcher(handle, SimpleNamespace(tp_cpu_group=group))(request))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ((), None),
        ((0, 1), "why (ValueError)"),
        ((1,), "UpdateWeightsFromTensorReqInput failed in some processes only"),
        ((0,), "UpdateWeightsFromTensorReqInput failed in some processes only"),
    ],
)
def test_nobody_waits_for_a_process_that_failed(tmp_path, failing, told):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        asked = [pool.apply_async(met, (rank, tmp_path / "store", failing)) for rank in range(2)]
        assert [answer.get(30) for answer in asked] == [told] * 2
