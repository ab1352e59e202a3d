"""Whole runs against a server that knows the answers, and one against the demo model."""

import asyncio
import csv
import json

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from fathom.benchmarks import fidelity, fidelity_args
from fathom.benchmarks.fidelity_grids import GRIDS, SFI_CONTEXT, NamedGrid, Point
from fathom.benchmarks.variants import with_body, with_flags
from fathom.runtime.config import Policy
from fathom.server import cli
from fathom.server.page.picture import can_draw_png

REFUSAL = "fathom.depth_cutoff: SPEED is not available in this build"


class Fake:
    """Answers every exact question rightly; under a cutoff of 4 every second one wrongly; 3 is refused."""

    def __init__(self):
        self.lie, self.url = "", ""
        self.requests, self.in_flight, self.most_in_flight = 0, 0, 0
        self.bodies: list[dict] = []
        self.known: dict[str, tuple[int, str, int]] = {}

    def learn(self, path):
        """Take prompts and answers from an exported file."""
        for i, line in enumerate(path.read_text().splitlines()):
            sample = json.loads(line)
            self.known[json.dumps(sample["messages"])] = i, sample["answer"], sample["prompt_tokens"]

    def account(self, asked, prompt):
        kept = "depth_cutoff" not in asked or self.lie == "silent fallback"
        report = {"prompt_tokens": prompt, "kept_tokens": prompt, "kv_bytes_dense": 800, "decode_steps": 9}
        names = ("cached_tokens", "fast_steps", "draft_read_tokens", "draft_tokens", "accepted_tokens")
        zero = dict.fromkeys(names, 0)
        held = {"kv_bytes": 800 if kept else 400, "prefill_steps": 1, "slow_steps": 9}
        return {"policy": {**Policy().to_wire(), **asked}, **report, **zero, **held}

    async def chat(self, request):
        body = await request.json()
        asked = body["fathom"]
        if asked.get("depth_cutoff") == 3:
            return JSONResponse({"object": "error", "message": REFUSAL, "code": 400}, status_code=400)
        self.bodies.append(body)
        self.requests += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.02)
        self.in_flight -= 1
        i, text, prompt = self.known[json.dumps(body["messages"])]
        if "depth_cutoff" in asked and i % 2:
            text = text.replace(" is ", " was ", 1)
        finish = "length" if self.lie == "cut off" else "stop"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
        usage = {"prompt_tokens": prompt + (self.lie == "other tokenizer"), "completion_tokens": 10}
        account = {} if self.lie == "no account" else {"fathom": self.account(asked, prompt)}
        return JSONResponse({"choices": [choice], "usage": usage, **account})

    async def info(self, request):
        ours = "stock.Scheduler" if self.lie == "stock" else "fathom.runtime.host.S"
        seen = 0 if self.lie == "idle worker" else self.requests
        engine = {"scheduler": ours, "worker": "fathom.runtime.host.W", "steps": {"requests": seen}}
        return JSONResponse({"engine": [engine], "policy": {}, "versions": {}})

    def app(self):
        async def models(request):
            return JSONResponse({"data": [{"id": "fake"}]})

        async def server_info(request):
            return JSONResponse({"version": "0.5.20"})

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/fathom/info", self.info),
                Route("/v1/models", models),
                Route("/server_info", server_info),
            ]
        )


@pytest.fixture(scope="module")
def running(run_app):
    fake = Fake()
    fake.url = run_app(fake.app())
    return fake


GRID = ["--tasks", "single,followup", "--contexts", "256", "--samples", "6", "--in-flight", "2"]
HALF = ["--policy", 'half={"depth_cutoff": 4}']


@pytest.fixture
def fake(running, tmp_path):
    running.lie, running.bodies, running.most_in_flight = "", [], 0
    path = tmp_path / "questions.jsonl"
    assert fidelity.main([*GRID, "--export", str(path)]) == 0
    running.learn(path)
    return running


def ask(fake, tmp_path, *flags):
    out = tmp_path / "out.json"
    code = fidelity.main([*GRID, "--url", fake.url, "--out", str(out), *flags])
    return code, json.loads(out.read_text()) if out.exists() else None


def test_policies_are_scored_side_by_side_on_the_same_questions(fake, tmp_path, capsys):
    code, result = ask(fake, tmp_path, *HALF)
    assert code == 0
    rows = {(row["task"], row["policy"]): row for row in result["rows"]}
    assert list(rows) == [(t, p) for t in ("single", "followup", "all") for p in ("exact", "half")]
    assert (rows["all", "exact"]["n"], rows["all", "exact"]["exact"]) == (12, 12)
    assert (rows["single", "half"]["n"], rows["single", "half"]["exact"]) == (6, 3)
    assert (rows["single", "half"]["better"], rows["single", "half"]["worse"]) == (0, 3)
    assert rows["single", "half"]["difference"] == -0.5
    assert rows["single", "half"]["p"] == 0.25
    assert (rows["single", "half"]["kv_share"], rows["single", "exact"]["kv_share"]) == (0.5, 1.0)
    assert "difference" not in rows["single", "exact"]
    assert result["columns"][0] == "exact" and result["columns"][-1] == "text"
    expected = {cell["task"]: cell["expected"] for cell in result["questions"]}
    wrong = [
        (dict(zip(result["columns"], answer, strict=False)), expected[cell["task"]][i])
        for cell in result["results"]
        for i, answer in enumerate(cell["answers"])
        if not answer[0]
    ]
    assert len(wrong) == 6
    assert all(answer["text"] == right.replace(" is ", " was ", 1) != right for answer, right in wrong)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["policies"]["half"]["difference"] == -0.5


def test_the_requests_are_greedy_bounded_and_carry_the_policy(fake, tmp_path):
    ask(fake, tmp_path, *HALF)
    assert {body["temperature"] for body in fake.bodies} == {0}
    assert {body["model"] for body in fake.bodies} == {"fake"}
    carried = {json.dumps(body["fathom"]) for body in fake.bodies}
    assert carried == {'{"preset": "exact"}', '{"depth_cutoff": 4}'}
    assert len(fake.bodies) == 2 * (1 + 12)  # one uncounted request per policy
    assert fake.most_in_flight == 2


def test_csv_and_picture_are_written_beside_the_json(fake, tmp_path):
    code, result = ask(fake, tmp_path, *HALF)
    assert code == 0
    with (tmp_path / "out.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["policy"] for line in lines] == [row["policy"] for row in result["rows"]]
    shares = [row["share"] for row in result["rows"]]
    assert [float(line["share"]) for line in lines] == pytest.approx(shares, abs=1e-4)
    assert lines[0]["p"] == "" and float(lines[1]["p"]) == 0.25
    if can_draw_png():
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lie", "flags", "message"),
    [
        ("silent fallback", HALF, "half: asked for"),
        ("no account", [], "without the fathom object"),
        ("other tokenizer", [], "is --model the checkpoint that is served"),
        ("stock", [], "does not run Fathom's own"),
        ("idle worker", [], "its worker saw 0 of"),
        ("", ["--policy", 'third={"depth_cutoff": 3}'], REFUSAL),
        ("", ["--minutes", "0.0000001"], "time was up before"),
    ],
)
def test_a_run_that_proves_nothing_writes_nothing(fake, tmp_path, capsys, lie, flags, message):
    fake.lie = lie
    assert ask(fake, tmp_path, *flags) == (1, None)
    assert message in capsys.readouterr().err
    assert list(tmp_path.glob("out.*")) == []


@pytest.mark.parametrize("picture", ["lines", "maps"])
def test_a_named_grid_is_asked_and_drawn(fake, tmp_path, monkeypatch, picture):
    points = [
        Point(f"{family}-{rate}", {"depth_cutoff": cutoff}, family, rate, y)
        for family, cutoff, y in (("right", 5, 0.5), ("wrong", 4, None))
        for rate in (0.1, 0.5)
    ]
    grid = NamedGrid(tuple(points), ("single", "followup"), (256,), 6, picture, ("rate (%)",))
    monkeypatch.setitem(GRIDS, "specprefill", grid)
    out = tmp_path / "out.json"
    flags = ["--grid", "specprefill", "--in-flight", "2", "--url", fake.url, "--out", str(out)]
    assert fidelity.main(flags) == 0
    result = json.loads(out.read_text())
    names = ["exact", *(point.name for point in points)]
    assert list(result["policies"]) == names and result["grid"] == "specprefill"
    assert {(row["task"], row["n"]) for row in result["rows"]} == {
        ("single", 6),
        ("followup", 6),
        ("all", 12),
    }
    per_answer = [line for line in out.read_text().splitlines() if line.startswith("   [")]
    assert len(per_answer) == 12 * len(names)
    if can_draw_png():
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_policies_of_one_server_stay_together_and_the_baseline_comes_first():
    points = tuple(
        Point(name, {"tsp_rate": 0.5}, "f", 0.5, flags=flags)
        for name, flags in (("a", ("--tsp-layer", "2")), ("b", ()), ("c", ("--tsp-layer", "2")))
    )
    todo = fidelity_args.grid(fidelity_args.parse(["--samples", "1"]))
    policies = [*todo.policies, *(with_flags(with_body(p.name, p.body), list(p.flags)) for p in points)]
    by_server = fidelity_args.Grid(todo.cells, policies, 1, 0).by_server
    assert [[policy.name for policy in group] for group in by_server] == [["exact", "b"], ["a", "c"]]


def test_flags_beside_a_grid_go_before_it():
    args = fidelity_args.parse(["--grid", "sfi", "--samples", "3"])
    assert (args.samples, args.tasks, args.contexts) == (3, ["list"], [SFI_CONTEXT])
    assert fidelity_args.parse([]).contexts == [512, 1024, 2048, 4096]


def test_an_answer_that_was_cut_off_is_not_exact(fake, tmp_path):
    fake.lie = "cut off"
    code, result = ask(fake, tmp_path)
    assert code == 0 and result["rows"][-1]["exact"] == 0


def test_when_time_is_up_all_policies_keep_the_same_questions():
    cell = fidelity_args.Cell("single", 256)
    kept = fidelity.complete({(cell, "exact"): [1, 2, 3], (cell, "half"): [1, 2]})
    assert kept == {(cell, "exact"): [1, 2], (cell, "half"): [1, 2]}


def test_a_rate_that_the_server_chooses_must_drop_something_somewhere(fake, tmp_path, capsys):
    assert ask(fake, tmp_path, "--policy", 'auto={"prefill_keep_rate": "auto"}') == (1, None)
    assert "kept every token of every prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "poetry"], "unknown task 'poetry'"),
        (["--contexts", "64"], "at least 128"),
        (["--samples", "0"], "at least 1"),
        (["--policy", "a={}", "--policy", "a={}"], "a name of its own"),
        (["--model", "/nowhere/at/all"], "no tokenizer at"),
        (["--grid", "fastkv", "--url", "http://127.0.0.1:1"], "it goes without --url"),
        (["--url", "http://127.0.0.1:1", "--dtype", "float32"], "--dtype is for the server that is started"),
        (["--url", "http://127.0.0.1:1", "--server-flags=--x"], "--server-flags is for the server"),
        (["--url", "http://127.0.0.1:1", "--draft-model", "d"], "--draft-model is for the server"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_starts(capsys, flags, message):
    assert fidelity.main(flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["exact={}", "x=1", "x={", "x"])
def test_a_policy_is_a_new_name_and_an_object(capsys, value):
    with pytest.raises(SystemExit):
        fidelity.main(["--policy", value])


def test_exported_questions_are_complete_conversations(fake, tmp_path):
    path = tmp_path / "all.jsonl"
    flags = ["--tasks", "single,followup", "--contexts", "256", "--samples", "2", "--system", "Be brief."]
    assert fidelity.main([*flags, "--export", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [
        "single-256-0",
        "single-256-1",
        "followup-256-0",
        "followup-256-1",
    ]
    assert all(line["messages"][0] == {"role": "system", "content": "Be brief."} for line in lines)
    assert all(line["messages"][-1]["role"] == "user" and line["answer"] for line in lines)
    plain = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert [line.get("prompt") for line in plain[:2]] == [
        line["messages"][0]["content"] for line in plain[:2]
    ]
    assert not any("prompt" in line for line in plain if line["task"] == "followup")
    assert plain[0]["prompt_tokens"] < lines[0]["prompt_tokens"]


def test_the_demo_model_is_asked_through_its_own_server(tmp_path, capsys):
    out = tmp_path / "demo.json"
    flags = ["fidelity", "--quick", "--out", str(out), "--cache", str(tmp_path)]
    assert cli.main(flags) == 0
    result = json.loads(out.read_text())
    assert [(row["task"], row["n"]) for row in result["rows"]] == [("single", 4), ("list", 4), ("all", 8)]
    assert (
        {row["kept_share"] for row in result["rows"]} == {row["kv_share"] for row in result["rows"]} == {1.0}
    )
    assert result["servers"][0]["identity"]["engine"][0]["scheduler"].startswith("fathom.runtime.")
    assert "| single | 256 | exact | 4 |" in capsys.readouterr().out
