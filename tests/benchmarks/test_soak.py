"""What counts as which outcome, against a server that misbehaves as told; and a small soak of the demo pair."""

import asyncio
import json
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from fathom.benchmarks import servers, soak
from fathom.benchmarks.client import BenchError, open_client
from fathom.benchmarks.fidelity import load_tokenizer
from fathom.benchmarks.soak_client import STAGES, Case, Outcome, body, run_case
from fathom.benchmarks.variants import FATHOM as FATHOM_SERVER
from fathom.server.command.checks import demo_model

FATHOM = {
    "prompt_tokens": 10,
    "kept_tokens": 10,
    "deep_tokens": 10,
    "retained_tokens": 10,
    "propagated_tokens": None,
    "draft_tokens": 0,
    "accepted_tokens": 0,
    "fast_steps": 0,
}
CASE = Case(1, "dense", {}, [{"role": "user", "content": "fine"}], 4)


def event(data) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


async def words(say):
    if say == "silent":
        await asyncio.sleep(60)
    for word in ("one", " two", " three"):
        yield event({"choices": [{"index": 0, "delta": {"content": word}}]})
    if say == "stalls":
        await asyncio.sleep(60)
    if say == "error":
        yield event({"error": {"message": "out of memory"}})
        return
    account = {} if say == "no account" else {"fathom": FATHOM}
    yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **account})
    if say != "no end":
        yield b"data: [DONE]\n\n"


async def chat(request):
    say = (await request.json())["messages"][0]["content"]
    if say.startswith("status"):
        _, status, message = say.split(" ", 2)
        return JSONResponse({"message": message}, status_code=int(status))
    return StreamingResponse(words(say), media_type="text/event-stream")


@pytest.fixture(scope="module")
def url(run_app):
    return run_app(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])]))


def run(url, say, limit=30.0, **members):
    async def go():
        case = replace(CASE, messages=[{"role": "user", "content": say}], **members)
        async with open_client(url) as client:
            return await run_case(client, "any", case, limit)

    return asyncio.run(go())


def test_a_whole_answer(url):
    outcome = run(url, "fine")
    assert (outcome.kind, outcome.text, outcome.fathom) == ("finished", "one two three", FATHOM)
    assert 0 < outcome.ttft <= outcome.seconds


@pytest.mark.parametrize(
    ("say", "members", "detail"),
    [
        ("silent", {"patience": 0.3}, STAGES[0]),
        ("stalls", {"patience": 2.0}, STAGES[1]),
        ("stalls", {"leave_after": 1}, STAGES[1]),
    ],
)
def test_a_client_that_leaves(url, say, members, detail):
    outcome = run(url, say, **members)
    assert (outcome.kind, outcome.detail) == ("aborted", detail)


@pytest.mark.parametrize(
    ("say", "detail"),
    [
        ("silent", "no whole answer in 0.3 s"),
        ("error", "failed in mid-stream"),
        ("no account", "without the fathom object"),
        ("no end", r"without \[DONE\]"),
        ("status 500 internal error", "status 500: internal error"),
        ("status 400 longer than the context", "status 400"),
    ],
)
def test_failures(url, say, detail):
    outcome = run(url, say, limit=0.3 if say == "silent" else 30.0)
    assert outcome.kind == "failed"
    assert re.search(detail, outcome.detail)


def test_a_prompt_over_the_context_is_to_be_refused(url):
    assert run(url, "status 400 longer than the context", too_long=True).kind == "refused"
    assert run(url, "status 500 longer than the context", too_long=True).kind == "failed"
    assert run(url, "fine", too_long=True).kind == "failed"


def answered(asked, **counts):
    case = replace(CASE, fathom=asked)
    return case, Outcome("finished", fathom=FATHOM | counts)


def test_a_mechanism_that_never_ran_is_an_error():
    speed, drafted = answered({"depth_cutoff": 2}, deep_tokens=2), answered({"speculative": True})
    assert soak.proofs(SimpleNamespace(outcomes=[speed]))["depth_cutoff"] == 1
    with pytest.raises(BenchError, match=r"^speculative: asked for"):
        soak.proofs(SimpleNamespace(outcomes=[speed, drafted]))


@pytest.mark.parametrize("end", [("aborted", STAGES[0]), ("refused", "status 400: longer than the context")])
def test_a_mechanism_without_a_finished_answer_is_an_error(end):
    given_up = replace(CASE, fathom={"speculative": True}), Outcome(*end)
    with pytest.raises(BenchError, match=r"^speculative: asked for, but no answer .* \(0 ended\)"):
        soak.proofs(SimpleNamespace(outcomes=[given_up, answered({})]))


def test_values_that_ask_for_nothing_need_no_proof():
    neutral = {"decode": "full", "speculative": False, "depth_cutoff": "full", "tsp_rate": 1}
    assert soak.asked_for(neutral) == soak.asked_for({"preset": "exact"}) == set()
    soak.proofs(SimpleNamespace(outcomes=[answered(neutral)]))


TURBO = {
    "prefill_keep_rate": 0.5,
    "depth_cutoff": 6,
    "tsp_rate": 0.2,
    "kv_retention_rate": 0.2,
    "decode": "slow_fast",
    "speculative": True,
    "min_prompt_tokens": 0,
}


def test_what_a_preset_fills_in_is_to_be_shown():
    shown = {"kept_tokens": 5, "deep_tokens": 2, "propagated_tokens": 3, "retained_tokens": 4}
    case, idle = answered({"preset": "turbo"}, policy=TURBO, **shown, draft_tokens=4)
    with pytest.raises(BenchError, match=r"^decode: asked for, but no answer shows that it ran \(1 ended\)$"):
        soak.proofs(SimpleNamespace(outcomes=[(case, idle)]))
    ran = replace(idle, fathom=idle.fathom | {"fast_steps": 3})
    assert soak.proofs(SimpleNamespace(outcomes=[(case, idle), (case, ran)]))["decode"] == 1


def test_what_a_preset_could_not_fill_in_is_said_to_be_left_out():
    """Where a policy names the value itself, it is to be shown."""
    policy = TURBO | {"min_prompt_tokens": 4096, "decode": "full", "speculative": False}
    shown = {"deep_tokens": 2, "propagated_tokens": 3, "retained_tokens": 4}
    turbo = answered({"preset": "turbo"}, policy=policy, **shown)
    told = SimpleNamespace(outcomes=[turbo], memory=[(0, 1)], args=SimpleNamespace(policy=[]))
    assert soak.proofs(told)["tsp_rate"] == 1
    assert [line.split(" (")[0] for line in soak.not_judged(told)] == [
        *("decode", "prefill_keep_rate", "speculative", "growth of memory")
    ]
    with pytest.raises(BenchError, match=r"^decode: asked for"):
        soak.proofs(SimpleNamespace(outcomes=[turbo, answered({"decode": "slow_fast"}, policy=policy)]))


def test_what_was_not_judged_is_said():
    args = soak.checked(soak.parser().parse_args(["--policy", 'a={"depth_cutoff": 6}', "--policy", "b={}"]))
    few = SimpleNamespace(
        outcomes=[(replace(CASE, policy="b"), Outcome("aborted"))], memory=[(0, 1)], args=args
    )
    assert soak.not_judged(few) == ["a (no request drew it)", "growth of memory (1 samples; it takes 10)"]
    few.memory *= 10
    few.outcomes.append((replace(CASE, policy="a"), Outcome("aborted")))
    assert soak.not_judged(few) == []


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A soak whose server is somebody else's: ``small(url, code)``, its process has ended with ``code`` or not."""
    monkeypatch.setattr(soak, "CONTEXTS", (150,))
    log, started = tmp_path / "fathom.log", []
    log.write_text("the last words of the server\n")

    def make(url, code=None):
        process = subprocess.Popen(["sleep", "60"] if code is None else ["sh", "-c", f"exit {code}"])
        started.append(process)
        if code is not None:
            process.wait()
        server = servers.Server(FATHOM_SERVER, url, log, process, 0.0)

        def start(running, args):
            return server

        monkeypatch.setattr(soak, "_start", start)
        monkeypatch.setattr(soak.liveness, "identify", lambda _: {"engine": [{"pid": process.pid}]})
        return ["--requests", "100000", "--in-flight", "4", "--too-long", "0", "--aborted", "0"]

    yield make
    for process in started:
        process.kill()
        process.wait()


def test_a_server_that_has_ended_ends_the_soak(small, capsys):
    assert soak.main(small(f"http://127.0.0.1:{servers.free_port()}", code=7)) == 1
    told = capsys.readouterr().err
    assert "error: fathom ended in mid-run (7):\nthe last words of the server\n1 things went wrong:\n" in told
    assert "request -1 (dense): ConnectError" in told


def test_a_server_that_only_fails_ends_the_soak(small, capsys):
    assert soak.main(small(f"http://127.0.0.1:{servers.free_port()}")) == 1
    told = capsys.readouterr().err
    assert re.search(r"error: too much went wrong to go on\n10\d things went wrong:\n", told)
    assert told.count("ConnectError") == 20


def test_a_server_that_does_not_answer_at_the_end_is_one_error(small, monkeypatch, capsys):
    async def run(some):
        some.wrong.append("request 3 (dense): status 500")

    monkeypatch.setattr(soak.Soak, "run", run)
    assert soak.main(small(f"http://127.0.0.1:{servers.free_port()}")) == 1
    told = capsys.readouterr().err
    assert re.search(r"error: the server did not answer: .*\n1 things went wrong:\nrequest 3 ", told)


def soak_of(outcomes, counted):
    return SimpleNamespace(outcomes=outcomes, server_aborts=lambda: counted)


def test_too_few_that_left_is_an_error(url):
    """An answer that ends before its client's moment is no abort, and a server must have seen those that are."""
    leaver = replace(CASE, patience=3.0)
    left = [(leaver, Outcome("aborted", STAGES[0], seconds)) for seconds in (0.1, 0.3, 0.2)]
    early = leaver, run(url, "fine", patience=30.0)
    assert early[1].kind == "finished"
    fine = soak.given_up(soak_of([*3 * left, early, *10 * [(CASE, Outcome("finished"))]], 9))
    assert (fine["meant"], fine["share"], fine["counted_by_server"]) == (10, 0.45, 9)
    assert fine["seconds"][STAGES[0]]["median"] == 0.2
    with pytest.raises(BenchError, match="10 requests were to be given up, 8 were"):
        soak.given_up(soak_of([*left, *left, *left[:2], early, early], 8))
    with pytest.raises(BenchError, match="9 requests were given up, the server counted 8"):
        soak.given_up(soak_of(3 * left, 8))


def test_who_leaves_asks_for_an_answer_without_end():
    assert "ignore_eos" not in body("any", CASE)
    for leaver in (replace(CASE, patience=0.1), replace(CASE, leave_after=3)):
        assert body("any", leaver)["ignore_eos"] and not body("any", leaver)["skip_special_tokens"]


def test_as_many_leave_as_were_asked_for(monkeypatch):
    """At moments of the usual wait that are spread over all of it, or in the middle of an answer."""
    monkeypatch.setattr(soak, "CONTEXTS", (150,))
    args = soak.checked(soak.parser().parse_args(["--aborted", "0.3", "--too-long", "0.2"]))
    some = soak.Soak(None, "any", load_tokenizer(str(demo_model())), args)
    some.waits.extend([1.0, 2.0, 8.0])
    cases = [some.case(number) for number in range(4000)]
    assert sum(case.too_long for case in cases) / 4000 == pytest.approx(0.2, abs=0.02)
    leaving = [case for case in cases if case.leaves]
    assert len(leaving) / 4000 == pytest.approx(0.3, abs=0.02)
    assert not any(case.too_long or case.probe is not None for case in leaving)
    moments = sorted(case.patience for case in leaving if case.patience is not None)
    assert len(moments) / len(leaving) == pytest.approx(0.75, abs=0.05)
    quarters = [moments[len(moments) * i // 4] for i in range(1, 4)]
    assert moments[-1] < 2.0 and quarters == pytest.approx([0.5, 1.0, 1.5], abs=0.15)


def test_times_of_the_table_are_those_of_whole_answers():
    """Of the policy in the row; the first token also of who leaves later."""
    dense, speed, kept = (Case(0, name, {}, [], 8) for name in ("dense", "speed", "kept"))
    outcomes = [
        (dense, Outcome("finished", seconds=2.0, ttft=0.5)),
        (speed, Outcome("finished", seconds=9.0, ttft=3.0)),
        (dense, Outcome("finished", seconds=4.5, ttft=1.0)),
        (dense, Outcome("aborted", STAGES[1], seconds=8.0, ttft=0.75)),
        (dense, Outcome("finished", seconds=2.5, ttft=1.5)),
        (dense, Outcome("refused", seconds=30.0)),
        (kept, Outcome("failed", "no whole answer", seconds=120.0)),
    ]
    assert soak.table(SimpleNamespace(outcomes=outcomes)).splitlines()[2:] == [
        "| dense | 5 | 3 | 1 | 1 | 0 | 0.88 | 2.50 | 4.50 |",
        "| speed | 1 | 1 | 0 | 0 | 0 | 3.00 | 9.00 | 9.00 |",
        "| kept | 1 | 0 | 0 | 0 | 1 | – | – | – |",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests must be above 0, got 0"),
        (["--aborted", "1.5"], r"--aborted must be in \[0, 1\], got 1.5"),
        (["--aborted", "0.7", "--too-long", "0.5"], "at most 1 together, got 1.2"),
        (["--in-flight", "-1"], "--in-flight must be above 0, got -1"),
    ],
)
def test_illegal_numbers_are_named(arguments, message, capsys):
    assert soak.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_small_soak_of_the_demo_pair(tmp_path, monkeypatch, capsys):
    """Every eighth case is a probe at least: 40 cases hold each policy several times."""
    monkeypatch.setattr(soak, "CONTEXTS", (150,))
    out = tmp_path / "soak.json"
    flags = ["--requests", "40", "--in-flight", "6", "--memory-mib", "400", "--cache", str(tmp_path)]
    assert soak.main([*flags, "--out", str(out)]) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    assert sum(result["outcomes"].values()) == result["requests"] == 40
    assert {"finished", "aborted", "refused"} == set(result["outcomes"])
    assert result["given_up"]["meant"] * soak.LEAST_GIVEN_UP <= result["outcomes"]["aborted"]
    assert result["dense_answers_compared"] > 0
    assert all(
        result["proofs"][name] > 0 for name in ("prefill_keep_rate", "speculative", "decode", "depth_cutoff")
    )
