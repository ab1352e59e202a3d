"""Sessions: how many stay open, which one goes, and what its client and others are told."""

import asyncio
import functools
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
from sglang.srt.managers import io_struct
from sglang.srt.session import session_controller
from waiting import held, slowed, wait_until

from fathom.runtime.sglang_host.scheduler import FathomScheduler
from fathom.runtime.sglang_host.scheduling import sessions as fathom_sessions
from fathom.runtime.sglang_host.scheduling.control import failure_of
from fathom.runtime.sglang_host.scheduling.sessions import MOST_SESSIONS, FathomSessions
from fathom.server.answers.errors import ControlError
from fathom.server.tokenizer_manager import FathomTokenizerManager

FLAGS = ("--dtype", "float32", "--max-total-tokens", "20000")
OPEN = {"capacity_of_str_len": 100_000}


def opening(name):
    return io_struct.OpenSessionReqInput(session_id=name, **OPEN)


@pytest.fixture
def sessions(monkeypatch):
    monkeypatch.setattr(session_controller, "log_info_on_rank0", lambda *told: None)
    tree = SimpleNamespace(release_radix_session=lambda name: None, release_session=lambda name: None)
    controller = FathomSessions(tree)
    for index in range(MOST_SESSIONS):
        assert controller.open(opening(f"s{index}")).success
    return controller


def run_turn(session, finished):
    request = SimpleNamespace(finished=lambda: finished, multimodal_inputs=None)
    session.req_nodes["turn"] = session_controller.SessionReqNode(request)


def test_the_session_that_waits_longest_makes_room(sessions):
    run_turn(sessions.get("s0"), finished=True)  # used after all others
    run_turn(sessions.sessions["s1"], finished=False)
    sessions.sessions["s2"]._inflight = True
    assert not sessions.open(opening("s3")).success  # is there, and closes none
    assert len(sessions.sessions) == MOST_SESSIONS
    assert sessions.open(opening("new")).success
    assert set(sessions.sessions) == {f"s{i}" for i in range(MOST_SESSIONS) if i != 3} | {"new"}
    assert list(sessions.sessions)[-2:] == ["s0", "new"]
    assert sessions.get("s3") is None


def test_sessions_whose_turns_run_are_never_closed_for_another(sessions):
    for session in sessions.sessions.values():
        run_turn(session, finished=False)
    with pytest.raises(RuntimeError, match=f"{MOST_SESSIONS} sessions are open"):
        sessions.open(opening("new"))
    assert len(sessions.sessions) == MOST_SESSIONS and "new" not in sessions


def test_one_process_says_whose_time_is_over(sessions, monkeypatch):
    """Of two whose clocks are a second apart: sessions are the same in both, whichever looks first."""
    clock = SimpleNamespace(now=time.monotonic())
    for module in (session_controller, fathom_sessions):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    other = FathomSessions(sessions.tree_cache)
    sessions.sessions.clear()
    for name, seconds in (("short", 5.0), ("long", 50.0), ("left", None), ("running", None)):
        for each in (sessions, other):
            opened = io_struct.OpenSessionReqInput(
                session_id=name, **OPEN, streaming=seconds is None, timeout=seconds
            )
            assert each.open(opened).success
    for each in (sessions, other):
        for name in ("left", "running"):
            run_turn(each.sessions[name], finished=name == "left")
            each.sessions[name].close_on_finish = True
    closed = []
    for _ in range(60):
        clock.now += 1.01
        other.maybe_reap(clock.now + 1)
        assert set(other.sessions) == set(sessions.sessions)
        sessions.maybe_reap(clock.now)
        told = sessions.over()
        closed += [each.session_id for each in told]
        assert sessions.over() == []  # looked a moment ago
        for request in told:
            sessions.close(request)
            other.close(request)
    assert closed == ["left", "short", "long"] and set(other.sessions) == {"running"}


def test_a_turn_that_never_runs_is_none_of_its_session(sessions):
    """Others may go on from the one before it."""
    turn = SimpleNamespace(rid="turn", session=sessions.sessions["s0"])
    before = session_controller.SessionReqNode(SimpleNamespace(finished=lambda: True))
    turn.session.req_nodes = {"before": before, "turn": session_controller.SessionReqNode(turn, before)}
    sessions.forget(turn)
    assert turn.session.req_nodes == {"before": before} and before.children == []
    turn.session.req_nodes = {"turn": session_controller.SessionReqNode(turn)}  # the first of them all
    sessions.forget(turn)
    assert turn.session.req_nodes == {}
    turn.session = sessions.sessions["s1"]
    turn.session.streaming, turn.session._inflight = True, True
    sessions.forget(turn)
    assert not turn.session._inflight
    turn.session = None
    sessions.forget(turn)


def test_a_turn_ends_with_all_behind_it():
    """Also where there are more of them than Python may call, or two had one id."""

    def node(rid, parent=None):
        request = SimpleNamespace(rid=rid, finished_reason=None, to_finish=None)
        return session_controller.SessionReqNode(request, parent)

    chain = [first := node("0")]
    for place in range(1, 3000):
        chain.append(node(str(place), chain[-1]))
    again, other, later = node("2999", first), node("other"), node("7")
    known = {each.req.rid: each for each in (*chain, again, other, later)}
    fathom_sessions.clear(first, known)
    assert known == {"other": other, "7": later}
    assert other.req.to_finish is later.req.to_finish is None
    assert all(each.req.to_finish for each in (*chain, again))


def test_who_opens_one_too_many_is_told_why():
    manager = FathomTokenizerManager.__new__(FathomTokenizerManager)
    told = []
    manager._dispatch_to_scheduler = lambda request: manager._handle_open_session_req_output(
        failure_of(request, "why") if told else io_struct.OpenSessionReqOutput(session_id="a", success=True)
    )
    manager.auto_create_handle_loop = lambda: None
    manager.session_futures = {}

    async def both():
        told.append(await manager.open_session(opening("a")))
        await manager.open_session(opening("b"))

    with pytest.raises(ControlError, match="why"):
        asyncio.run(both())
    assert told == ["a"] and manager.session_futures == {}


def test_a_server_with_many_sessions_goes_on(server):
    def turn(session, previous=None):
        sampling = {"max_new_tokens": 2, "temperature": 0}
        params = {"id": session} | ({"rid": previous} if previous else {})
        body = {"text": "Where?", "sampling_params": sampling, "session_params": params}
        reply = server.client.post("/generate", json=body)
        return reply.status_code, reply.json()

    used, left = (server.client.post("/open_session", json=OPEN).json() for _ in range(2))
    status, first = turn(used)
    assert status == 200
    others = [server.client.post("/open_session", json=OPEN) for _ in range(MOST_SESSIONS - 1)]
    assert {reply.status_code for reply in others} == {200}
    status, second = turn(used, first["meta_info"]["id"])
    assert status == 200
    assert second["meta_info"]["prompt_tokens"] > first["meta_info"]["prompt_tokens"]
    status, refused = turn(left)
    assert status == 400 and "does not exist" in refused["error"]["message"]
    for name in (used, *(reply.json() for reply in others)):
        assert server.client.post("/close_session", json={"session_id": name}).status_code == 200


@pytest.fixture(scope="module")
def server(start_server, tiny_model):
    return start_server(tiny_model, *FLAGS, "--enable-streaming-session", "--page-size", "16")


def test_a_streaming_session_answers_as_a_request_with_the_whole_prompt(server):
    """Its turns hold their pages while they wait, and none when it is closed."""

    def answer(prompt, **session):
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, **session}
        reply = server.client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def pages():
        return server.engine()["kv_pool"]["depth_pages"]

    opened = server.client.post("/open_session", json=OPEN | {"session_id": "turns", "streaming": True})
    assert opened.json() == "turns"
    said, params = [], {"id": "turns"}
    for turn in range(3):
        new = [5 + (7 * turn + 3 * place) % 900 for place in range(60 + 13 * turn)]
        found = answer(new, session_params=params)
        assert (found["meta_info"]["cached_tokens"] > 0) == (turn > 0)
        assert found["output_ids"] == answer([*said, *new])["output_ids"]
        said += new + found["output_ids"]
        params = {"id": "turns", "rid": found["meta_info"]["id"]}
    assert pages()["held"] > 0
    assert server.client.post("/close_session", json={"session_id": "turns"}).status_code == 200
    server.flush()
    assert pages()["free"] == pages()["total"]


def generate(server, tokens=2, **more):
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return server.client.post("/generate", json={"input_ids": [6, 7, 8], "sampling_params": sampling} | more)


def test_a_turn_that_is_refused_leaves_the_one_that_runs_alone(server):
    """However many are sent: only one at a time goes on from what a streaming session holds."""
    name = server.client.post("/open_session", json=OPEN | {"streaming": True}).json()
    params = {"session_params": {"id": name}}
    first = generate(server, **params).json()["output_ids"]
    whole = [6, 7, 8, *first, 6, 7, 8]
    alone = generate(server, 40, input_ids=whole).json()["output_ids"]
    with ThreadPoolExecutor(1) as pool, slowed(server, 0.1):
        running = pool.submit(generate, server, 40, **params)
        wait_until(lambda: server.engine()["open_accounts"])
        for _ in range(3):
            reply = generate(server, **params)
            assert reply.status_code == 400 and "already has an active request" in reply.text
        assert not running.done()
    assert running.result().json()["output_ids"] == alone
    reply = generate(server, **params)
    assert reply.json()["meta_info"]["prompt_tokens"] == len(whole) + 40 + 3
    assert server.client.post("/close_session", json={"session_id": name}).status_code == 200


def test_turns_that_take_the_place_of_others(server):
    """They end all that went on from those, and go on from where they began; ids may be used again."""
    name = server.client.post("/open_session", json=OPEN).json()

    def turn(**params):
        mine = {"rid": params.pop("mine", None), "session_params": {"id": name} | params}
        reply = generate(server, **mine)
        return reply.json()["meta_info"]["prompt_tokens"] if reply.status_code == 200 else reply.text

    assert turn(mine="a") == 3
    assert [turn(mine="b", rid="a") for _ in range(2)] == [8, 8]
    assert turn(mine="c", rid="b") == 13
    assert turn(mine="d", rid="a", replace=True) == 8
    for gone in "bc":
        assert "Invalid request session id" in turn(rid=gone)
    assert turn(mine="e", replace=True) == 3
    for gone in "ad":
        assert "Invalid request session id" in turn(rid=gone)
    assert turn(rid="e") == 8
    assert server.client.post("/close_session", json={"session_id": name}).status_code == 200


def test_a_turn_for_which_the_queue_is_full_can_be_sent_again(start_server, tiny_model):
    limits = ("--max-running-requests", "1", "--max-queued-requests", "1")
    server = start_server(tiny_model, *FLAGS, *limits, "--enable-streaming-session")
    ask = functools.partial(generate, server)

    for streaming in (True, False):
        name = server.client.post("/open_session", json=OPEN | {"streaming": streaming}).json()
        refused = {"session_params": {"id": name}, "rid": f"refused {streaming}"}
        with ThreadPoolExecutor(3) as pool, slowed(server, 0.1):
            busy = [pool.submit(ask, 40)]
            wait_until(lambda: server.engine()["open_accounts"])
            busy += [pool.submit(ask, 40) for _ in range(2)]
            wait(busy, return_when=FIRST_COMPLETED)  # one of two waits, and the other is refused
            reply = ask(**refused)
            assert reply.status_code == 503 and "queue is full" in reply.text
            assert sorted(each.result().status_code for each in busy) == [200, 200, 503]
        if not streaming:
            reply = ask(session_params={"id": name, "rid": refused["rid"]})
            assert reply.status_code == 400 and "Invalid request session id" in reply.text
        reply = ask(session_params={"id": name})
        assert reply.status_code == 200, reply.text
        assert server.client.post("/close_session", json={"session_id": name}).status_code == 200
        wait_until(lambda: held(server) == 0)


def test_a_beam_search_for_which_the_queue_is_full_is_over(monkeypatch):
    """SGLang looks after it in each step of others for as long as the engine runs."""
    monkeypatch.setattr("sglang.srt.managers.scheduler._make_abort_req", lambda *request, **why: None)
    scheduler, over = FathomScheduler.__new__(FathomScheduler), []
    scheduler.max_queued_requests, scheduler.waiting_queue = 0, []
    scheduler.enable_priority_scheduling = False
    scheduler.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(send_output=lambda *told: None)
    )
    scheduler.tree_cache = SimpleNamespace(finish=lambda *told: None)
    scheduler.tp_worker = SimpleNamespace(ledger=SimpleNamespace(drop=lambda request: None))
    scheduler.session_controller = FathomSessions(scheduler.tree_cache)
    scheduler.beam_coordinator = SimpleNamespace(retire_group=over.append)
    stats = SimpleNamespace(
        wait_queue_entry_time=0.0, trace_ctx=SimpleNamespace(abort=lambda abort_info: None)
    )
    search = SimpleNamespace(rid="search", time_stats=stats, session=None, cache_request_handle=None)
    assert scheduler._abort_on_queued_limit(search) and over == [search]
