"""A request to abort ends the request that it names, wherever that is, and no other."""

from types import SimpleNamespace

import pytest

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.constrained.grammar_manager import GrammarManager  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput  # noqa: E402

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


@pytest.mark.parametrize("rid", ["d10", "d1"])
def test_a_pause_forgets_no_abort(monkeypatch, scheduler, rid):
    """Of a prompt that is between two chunks, while others took a step."""
    for name in ("prepare_abort", "release_kv_cache", "_make_abort_req"):
        monkeypatch.setattr(f"sglang.srt.managers.scheduler.{name}", lambda *_, **__: None)
    taken_back, queued = [], []
    monkeypatch.setattr(
        "sglang.srt.managers.scheduler.retract_all", lambda reqs, **_: taken_back.extend(reqs)
    )
    scheduler.chunked_req.time_stats = SimpleNamespace(trace_ctx=SimpleNamespace(abort=lambda **_: None))
    scheduler.enable_overlap = False
    scheduler.req_to_token_pool = scheduler.token_to_kv_pool_allocator = scheduler.tree_cache = None
    scheduler.hisparse_coordinator = None
    scheduler._add_request_to_queue = queued.append
    scheduler.metrics_reporter = SimpleNamespace(current_scheduler_metrics_enabled=False)
    scheduler.kv_events_publisher = SimpleNamespace(publish_kv_events=lambda: None)
    scheduler.abort_request(AbortReq(rid=rid))
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    assert scheduler.chunked_req is None and scheduler._pending_chunked_abort_req is None
    lives = [] if rid == "d10" else ["d10"]
    assert [request.rid for request in taken_back] == ["c1", "c10", "c", *lives]
    assert queued == taken_back and scheduler.told == (["d10"] if rid == "d10" else [])
