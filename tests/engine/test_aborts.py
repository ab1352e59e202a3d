"""A request to abort ends the request that it names, wherever that is, and no other."""

from types import SimpleNamespace

import pytest

from fathom.runtime.sglang_host import torchvision_ops

torchvision_ops.declare()

from sglang.srt.constrained.grammar_manager import GrammarManager  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.managers.io_struct import AbortReq  # noqa: E402

from fathom.runtime.sglang_host.scheduler import FathomScheduler  # noqa: E402


class Request(SimpleNamespace):
    """One of the scheduler's."""

    __hash__ = object.__hash__

    def finished(self):
        return False

    def set_finish_with_abort(self, message):
        self.to_finish = message


def requests(*rids):
    kv = SimpleNamespace(holds_mamba=False)
    return [Request(rid=rid, to_finish=None, grammar=None, kv=kv) for rid in rids]


@pytest.fixture
def scheduler():
    scheduler, told = FathomScheduler.__new__(FathomScheduler), []
    scheduler.grammar_manager = GrammarManager.__new__(GrammarManager)
    scheduler.grammar_manager.grammar_queue = requests("a1", "a10")
    scheduler.waiting_queue = requests("b1", "b10", "b")
    scheduler.running_batch = SimpleNamespace(reqs=requests("c1", "c10", "c"))
    (scheduler.chunked_req,) = requests("d10")
    scheduler.last_batch = scheduler.mm_receiver = scheduler.dllm_config = (
        scheduler._pending_chunked_abort_req
    ) = None
    scheduler.disaggregation_mode = DisaggregationMode.NULL
    scheduler.ps = SimpleNamespace(pp_size=1)
    scheduler._release_aborted_request = lambda request: None
    scheduler.beam_coordinator = SimpleNamespace(retire_group=lambda request: None)
    output = SimpleNamespace(send_output=lambda output, request: told.append(request.rid))
    scheduler.ipc_channels, scheduler.told = SimpleNamespace(send_to_tokenizer=output), told
    return scheduler


def ended(scheduler):
    """Ids of what was aborted."""
    held = [*scheduler.grammar_manager.grammar_queue, *scheduler.running_batch.reqs]
    chunked = scheduler._pending_chunked_abort_req
    return {*scheduler.told, *(r.rid for r in held if r.to_finish), *([chunked.rid] if chunked else [])}


@pytest.mark.parametrize("rid", ["a1", "a10", "b", "b1", "b10", "c", "c1", "c10", "d10"])
def test_the_one_that_is_named(monkeypatch, scheduler, rid):
    monkeypatch.setattr("sglang.srt.managers.scheduler._make_abort_req", lambda request, **_: None)
    scheduler.abort_request(AbortReq(rid=rid))
    assert ended(scheduler) == {rid}
    ids = [request.rid for request in (*scheduler.waiting_queue, *scheduler.running_batch.reqs)]
    assert {*ids, rid} == {"b1", "b10", "b", "c1", "c10", "c", rid}


@pytest.mark.parametrize("rid", ["a", "d", "x", ""])
def test_the_beginning_of_an_id_names_none(scheduler, rid):
    scheduler.abort_request(AbortReq(rid=rid))
    assert ended(scheduler) == set()


def test_all(monkeypatch, scheduler):
    monkeypatch.setattr("sglang.srt.managers.scheduler._make_abort_req", lambda request, **_: None)
    scheduler.abort_request(AbortReq(abort_all=True))
    assert len(ended(scheduler)) == 9
