"""Whole runs of the command against fake servers of known speed: what they measure, prove and leave."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from fathom.benchmarks import (
    args,
    calibrate,
    cli,
    client,
    fidelity,
    fidelity_args,
    measure,
    paper_tables,
    prompts,
    report,
    servers,
    sfi_kernels,
    soak,
    variants,
)
from fathom.benchmarks.client import BenchError
from fathom.runtime import config
from fathom.server.command.checks import FAILURE, StartError

FAKE = str(Path(__file__).with_name("fake_server.py"))
STOCK_FIRST, FATHOM_FIRST = 0.20, 0.10
STOCK_EACH, FATHOM_EACH = 0.04, 0.02
HASTE = 0.02
"""Of these times, where none is looked at."""


def fake(variant, first, each, *flags):
    speed = ("--first", str(first), "--each", str(each))
    command = (sys.executable, FAKE, variant.engine, "--port", "{port}", *speed, *flags)
    return replace(variant, command=command)


def use_fakes(monkeypatch, *fathom_flags, pace=HASTE):
    stock = fake(variants.SGLANG, STOCK_FIRST * pace, STOCK_EACH * pace)
    fathom = fake(variants.FATHOM, FATHOM_FIRST * pace, FATHOM_EACH * pace, *fathom_flags)
    if pace == HASTE:
        monkeypatch.setattr(measure, "wait_quiet", lambda _: None)
    monkeypatch.setattr(variants, "FATHOM", fathom)
    monkeypatch.setattr(cli, "KNOWN", {"sglang": stock, "fathom": fathom})


def leftovers():
    """Servers that this process has started; others may be running tests beside it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if FAKE in process.cmdline():
                found.append(process)
    return found


def bench(tmp_path, *flags):
    out = tmp_path / "out.json"
    code = cli.main(["--quick", "--cache", str(tmp_path / "cache"), "--out", str(out), *flags])
    return code, json.loads(out.read_text()) if out.exists() else None


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_fakes(monkeypatch, pace=1)
        code, result = bench(tmp_path_factory.mktemp("run"), "--seed", "3")
    assert code == 0
    return result


def test_ratios_and_times_are_those_of_the_servers(dense_run):
    for cell in dense_run["cells"]:
        times, ratios = cell["summary"], cell["ratios"]["sglang/fathom"]
        assert STOCK_FIRST <= times["sglang"]["ttft"]["median"] < STOCK_FIRST + 0.15
        assert FATHOM_EACH * 0.9 <= times["fathom"]["tpot"]["median"] < FATHOM_EACH + 0.02
        for metric in measure.METRICS:
            taken = {(turn["variant"], turn["round"]): turn[metric] for turn in cell["turns"]}
            by_round = [taken["sglang", i] / taken["fathom", i] for i in (0, 1)]
            assert ratios[metric]["median"] == pytest.approx(sum(by_round) / 2)
            assert 1 < ratios[metric]["median"] < 3
        same = cell["same_text"]["sglang/fathom"]
        assert same["equal"] == same["requests"] == 2 * cell["batch"]


def test_every_round_alternates_and_every_sample_is_kept(dense_run):
    assert [(cell["prompt_tokens"], cell["batch"]) for cell in dense_run["cells"]] == [(64, 1), (64, 2)]
    for cell in dense_run["cells"]:
        taken = [(turn["round"], turn["variant"]) for turn in cell["turns"]]
        assert taken == [(0, "sglang"), (0, "fathom"), (1, "fathom"), (1, "sglang")]
        for turn in cell["turns"]:
            assert len(turn["requests"]) == cell["batch"]
            assert turn["pss_peak"] > 10 << 20
            assert {r["output_tokens"] for r in turn["requests"]} == {cell["output_tokens"]} == {8}


def test_the_report_says_what_was_measured_and_where(dense_run):
    assert dense_run["schema"] == report.SCHEMA
    assert dense_run["command"].startswith("fathom bench --quick --cache ")
    assert set(dense_run["hardware"]) == {"cpu", "cores", "memory", "system", "load_average"}
    assert {"fathom", "sglang", "torch"} <= {
        name for name, version in dense_run["versions"].items() if version
    }
    assert dense_run["model"]["layers"] == 2 and dense_run["model"]["seed"] == 3
    assert dense_run["settings"]["rounds"] == 2
    stock, fathom = dense_run["variants"]
    assert stock["identity"] == {"version": "0.5.20", "attention_backend": "torch_native"}
    assert fathom["identity"]["engine"][0]["scheduler"] == "fathom.runtime.host.FathomScheduler"
    assert stock["startup_seconds"] > 0
    assert Path(FAKE).name in {Path(part).name for part in stock["command"]}
    assert 0 <= dense_run["foreign_cpu"]["median"] <= 1


def test_the_table_shows_each_server_and_each_pair(dense_run):
    lines = report.table(dense_run).splitlines()
    cells = [[item.strip() for item in line.strip("|").split("|")] for line in lines]
    assert [row[:3] for row in cells if row[0] == "64"] == [
        ["64", "1", "sglang"],
        ["64", "1", "fathom"],
        ["64", "2", "sglang"],
        ["64", "2", "fathom"],
        ["64", "1", "sglang/fathom"],
        ["64", "2", "sglang/fathom"],
    ]
    quiet = {**dense_run, "foreign_cpu": {"median": 0.01, "max": 0.02}}
    busy = {**dense_run, "foreign_cpu": {"median": 0.5, "max": 0.9}}
    assert len(report.notes(quiet)) == 1
    assert "50%" in report.notes(busy)[1] and "Do not quote" in report.notes(busy)[1]


@pytest.fixture
def speed_is_built(monkeypatch):
    """A build that can run SPEED, whatever this one can."""
    monkeypatch.setattr(config, "MECHANISMS", config.MECHANISMS | {"SPEED"})


def test_a_policy_is_a_further_server(tmp_path, monkeypatch, speed_is_built):
    use_fakes(monkeypatch)
    code, result = bench(tmp_path, "--policy", 'half={"depth_cutoff": 1}', "--variants", "fathom")
    assert code == 0
    assert [variant["name"] for variant in result["variants"]] == ["fathom", "half"]
    kept = {
        turn["variant"]: turn["requests"][0]["fathom"]["kept_tokens"] for turn in result["cells"][0]["turns"]
    }
    assert kept == {"fathom": 64, "half": 32}
    expected = result["cells"][0]["predictions"]
    assert list(expected) == ["fathom/half"]
    assert expected["fathom/half"]["kv_reported"] == 2
    # 64 + 7 tokens at two layers (the last has no KV); above the first only token 0, the prompt's last and those 7.
    assert expected["fathom/half"]["kv"] == pytest.approx(2 * 71 / (71 + 9))
    last = report.table(result).splitlines()[-1]
    assert last.startswith("| 64 | 2 | fathom/half | ")
    assert last.endswith(" | 2.00 | 1.77 | – | – | – | – | – |")


def test_variants_share_a_server_that_forgets_before_each_turn(tmp_path, monkeypatch, speed_is_built):
    use_fakes(monkeypatch)
    flags = ["--policy", 'half={"depth_cutoff": 1}', "--variants", "fathom,sglang", "--one-server"]
    code, result = bench(tmp_path, *flags, "--warmup-prompt", "40")
    assert code == 0
    ports = {v["name"]: v["command"][v["command"].index("--port") + 1] for v in result["variants"]}
    assert ports["fathom"] != ports["sglang"]
    info = {v["name"]: v["identity"] for v in result["variants"]}
    assert info["half"]["engine"][0]["pid"] == info["fathom"]["engine"][0]["pid"]
    turns = [turn for cell in result["cells"] for turn in cell["turns"] if turn["variant"] != "sglang"]
    log = (tmp_path / "cache" / "logs" / "fathom.log").read_text()
    warm = 2 * len(result["cells"])
    assert log.count("forgot") == len(turns) + warm
    assert log.count("asked 40") == 2 * (1 + 2)  # two variants, one request and two
    assert log.count("asked 64") == sum(len(turn["requests"]) for turn in turns)


def test_on_one_server_each_variant_finds_the_shared_prefix_and_no_more(tmp_path, monkeypatch):
    use_fakes(monkeypatch)
    flags = ["--policy", 'sfi={"decode": "slow_fast"}', "--variants", "fathom", "--one-server"]
    code, result = bench(tmp_path, *flags, "--shared-prefix", "0.5")
    assert code == 0
    turns = [turn for cell in result["cells"] for turn in cell["turns"]]
    assert {r["fathom"]["cached_tokens"] for turn in turns for r in turn["requests"]} <= {32, 33, 34}
    log = (tmp_path / "cache" / "logs" / "fathom.log").read_text()
    assert log.count("forgot") == log.count("asked 32") == len(turns) + 2 * len(result["cells"])


def test_requests_are_sampled_as_asked_for(tmp_path, monkeypatch):
    use_fakes(monkeypatch)
    sent, complete = [], client.request_body

    def request_body(*given):
        sent.append(json.loads(complete(*given)))
        return complete(*given)

    monkeypatch.setattr(client, "request_body", request_body)
    sampling = {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
    code, result = bench(tmp_path, "--sampling", json.dumps(sampling))
    assert code == 0 and result["settings"]["sampling"] == sampling and len(sent) > 8
    assert all(sampling.items() <= body.items() for body in sent)
    assert f"sampled with {json.dumps(sampling)}; " in report.notes(result)[0]


def test_documents_are_read_once_by_each_variant(tmp_path, monkeypatch, speed_is_built):
    use_fakes(monkeypatch)
    flags = ["--policy", 'half={"depth_cutoff": 1}', "--variants", "fathom", "--documents", "2"]
    code, result = bench(tmp_path, *flags, "--one-server")
    assert code == 0
    turns = [turn for cell in result["cells"] for turn in cell["turns"]]
    asked = sum(len(turn["requests"]) for turn in turns)
    log = (tmp_path / "cache" / "logs" / "fathom.log").read_text()
    assert "forgot" not in log and log.count("asked") == asked + 2 * (1 + 2) + 2 * 2
    cached = {request["fathom"]["cached_tokens"] for turn in turns for request in turn["requests"]}
    assert cached == {64 - prompts.TAIL}
    use_fakes(monkeypatch, "--lie", "no cache")
    assert bench(tmp_path / "again", *flags) == (1, None)


@pytest.mark.parametrize(
    ("lie", "flags", "message"),
    [
        ("stock scheduler", [], "does not run Fathom's own"),
        ("no report", [], "without the fathom object"),
        ("cached", [], "64 of 64 tokens were in the prefix cache"),
        ("silent fallback", ["--policy", 'half={"depth_cutoff": 1}'], "was served dense"),
        ("idle worker", [], "its worker saw 0 of"),
    ],
)
def test_a_run_that_proves_nothing_writes_nothing(
    tmp_path, monkeypatch, capsys, speed_is_built, lie, flags, message
):
    use_fakes(monkeypatch, "--lie", lie)
    code, result = bench(tmp_path, "--variants", "fathom", "--warmups", "0", *flags)
    assert (code, result) == (1, None)
    assert message in capsys.readouterr().err
    assert leftovers() == []


def test_a_server_that_does_not_start_is_named_with_its_last_words(tmp_path, monkeypatch, capsys):
    use_fakes(monkeypatch, "--no-such-flag")
    assert bench(tmp_path) == (1, None)
    error = capsys.readouterr().err
    assert "fathom ended at start (2)" in error and "--no-such-flag" in error
    assert leftovers() == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--variants", "nobody"], "unknown variant 'nobody'"),
        (["--output", "1"], "--output must be at least 2"),
        (["--prompts", "64k"], "more than the model's 65536 positions"),
        (["--server-flags", "vllm=--x"], "the servers of this run are"),
        (["--policy", 'deep={"depth_cutoff": 17}'], "fathom.depth_cutoff must be a multiple of 4 in [4, 16]"),
        (["--policy", 'typo={"depth_cutof": 8}'], "fathom.depth_cutof is not a policy field"),
        (["--study", "nothing"], "unknown study 'nothing'"),
        (["--model", "/nowhere"], "/nowhere: no config.json"),
        (["--model", "/nowhere", "--documents", "1"], "goes without"),
        (["--draft", "/nowhere"], "go with --model"),
        (["--policy", "x={}", "--policy", 'x={"depth_cutoff": 8}'], "two variants are called 'x'"),
        (["--policy", "x={}", "--poor-draft", "x={}"], "two variants are called 'x'"),
        (["--documents", "1", "--prompts", "32"], "more than 32 tokens"),
        (["--fidelity", "/nowhere"], "no file of fathom fidelity"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(capsys, flags, message):
    assert cli.main(flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "1k,x"], "--prompts: must be an integer >= 1, such as 8192 or 8k, got 'x'"),
        (
            ["--model-shape", "layers=-8"],
            "--model-shape: must be an integer >= 1, such as 8192 or 8k, got '-8'",
        ),
        (["--shared-prefix", "half"], "--shared-prefix: half: not in [0, 1)"),
        (["--sampling", "top_p=0.9"], "--sampling: 'top_p=0.9' is not JSON"),
        (["--sampling", '{"top_q": 1}'], "expected a JSON object of numbers, of temperature, top_p, top_k,"),
    ],
)
def test_a_word_that_is_no_number_is_told_what_is_legal(capsys, flags, message):
    with pytest.raises(SystemExit):
        args.parser().parse_args(flags)
    assert message in capsys.readouterr().err


def test_the_help_lists_every_flag():
    shown = args.parser().format_help()
    assert all(flag in shown for flag in ("--study {prefill,decode,drafting,all}", "--all", "--kernels"))


@pytest.mark.parametrize("command", [cli, fidelity, soak])
def test_a_folder_that_cannot_be_written_is_one_line(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    words = ["--requests", "1"] if command is soak else ["--quick"]
    assert command.main([*words, "--cache", str(tmp_path / "file" / "cache")]) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(told) == 1 and "Not a directory" in told[0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StartError("no such model"), 2),
        (StartError("it has no tokenizer", FAILURE), FAILURE),
        (ValueError("no such cell"), 2),
        (BenchError("nothing was dropped"), 1),
        (OSError("no room"), 1),
    ],
)
@pytest.mark.parametrize(("command", "first"), [(cli, "run"), (fidelity, "grid"), (soak, "run")])
def test_all_tools_end_alike(command, first, error, code, monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.setattr(command, first, fails)
    assert command.main([]) == code
    assert capsys.readouterr().err.endswith(f": error: {error}\n")


@pytest.mark.parametrize("command", [args, calibrate, fidelity_args, paper_tables, sfi_kernels, soak])
def test_results_that_could_not_be_written_are_refused_before_anything_starts(command, tmp_path, capsys):
    words = ["tsp", "prompts.jsonl"] if command is calibrate else []
    (tmp_path / "file").touch()
    for place, message in [
        (tmp_path, f"{tmp_path} is a folder; give a file"),
        (tmp_path / "file" / "out.json", f"{tmp_path}/file/out.json cannot be written"),
        *((tmp_path / f"x{end}", f"{tmp_path}/x{end} is to hold JSON") for end in (".csv", ".PNG", ".md")),
    ]:
        with pytest.raises(SystemExit) as stop:
            command.parser().parse_args([*words, "--out", str(place)])
        assert stop.value.code == 2
        assert f"argument --out: {message}" in capsys.readouterr().err
    new = str(tmp_path / "new" / "out.json")
    assert str(command.parser().parse_args([*words, "--out", new]).out) == new


def test_what_was_measured_is_shown_though_it_cannot_be_written(tmp_path, monkeypatch, dense_run, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(cli, "run", lambda args, argv: dense_run)
    monkeypatch.setattr(cli, "default_out", lambda result, name: tmp_path / "file" / "out.json")
    assert cli.main([]) == 1
    told = capsys.readouterr()
    assert "sglang/fathom" in told.out and "Written" not in told.out
    assert told.err.startswith("fathom bench: error: the results could not be written: ")


def test_a_server_that_is_killed_leaves_its_last_words(tmp_path, monkeypatch, capsys):
    use_fakes(monkeypatch, "--lie", "killed")
    assert bench(tmp_path, "--variants", "fathom") == (1, None)
    told = capsys.readouterr().err
    assert "fathom ended in mid-run (-9):" in told and "asked 64" in told


SCRIPT = """
import sys
from dataclasses import replace
from fathom.benchmarks import cli, variants
slow = (sys.executable, {fake!r}, "sglang", "--port", "{{port}}", "--first", "60")
cli.KNOWN = {{"sglang": replace(variants.SGLANG, command=slow)}}
flags = ["--quick", "--variants", "sglang", "--cache", {cache!r}, "--out", {cache!r} + "/out.json"]
sys.exit(cli.main(flags))
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_server_outlives_the_bench(tmp_path, number, code):
    script = SCRIPT.format(fake=FAKE, cache=str(tmp_path))
    run = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    try:
        log = tmp_path / "logs" / "sglang.log"
        while not (log.exists() and "asked" in log.read_text()):
            assert run.poll() is None
            time.sleep(0.1)
        started = leftovers()
        assert started
        run.send_signal(number)
        assert run.wait(30) == code
        wait_until(lambda: all(map(servers._has_ended, started)), 10)
        assert not (tmp_path / "out.json").exists()
    finally:
        run.kill()


def test_nobody_waits_for_a_zombie():
    """A killed server's children are that until who inherits them looks, some seconds later in some containers."""
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        assert not servers._has_ended(process)
        process.kill()
        wait_until(lambda: servers._has_ended(process), 10)
        assert process.status() == psutil.STATUS_ZOMBIE
    assert servers._has_ended(process)


def test_prompts_are_new_each_round_and_the_same_for_each_server():
    settings = prompts.Settings(shared_prefix=0.75, seed=1)
    cell = prompts.Cell(prompt=100, batch=2)
    (prefix,), drawn = prompts.random_prompts(cell, settings, 512, 0)
    assert ([prefix], drawn) == prompts.random_prompts(cell, settings, 512, 0)
    assert len(prefix) == 75 and [prompt[:75] for prompt in drawn] == [prefix, prefix]
    assert {len(prompt) for prompt in drawn} == {100} and drawn[0] != drawn[1]
    assert all(3 <= token < 512 for prompt in drawn for token in prompt)
    (other_prefix,), others = prompts.random_prompts(cell, settings, 512, 1)
    assert other_prefix != prefix and not any(prompt in others for prompt in drawn)
    assert prompts.random_prompts(cell, prompts.Settings(), 512, 0)[0] == []


@pytest.mark.parametrize("documents", [1, 2])
def test_with_documents_prompts_begin_alike_in_turns_and_none_ends_alike(documents):
    settings = prompts.Settings(documents=documents, seed=1)
    longest, _ = prompts.random_prompts(prompts.Cell(400, 1), settings, 512, 0)
    seen = []
    for cell in (prompts.Cell(100, 3), prompts.Cell(400, 2)):
        for number in (-1, 0, 1):
            prefixes, drawn = prompts.random_prompts(cell, settings, 512, number)
            assert prefixes == [text[: cell.prompt - prompts.TAIL] for text in longest]
            for place, prompt in enumerate(drawn):
                assert prompt[: -prompts.TAIL] == prefixes[place % documents] and len(prompt) == cell.prompt
            seen += [tuple(prompt[-prompts.TAIL :]) for prompt in drawn]
    assert len(set(seen)) == len(seen) == 15
