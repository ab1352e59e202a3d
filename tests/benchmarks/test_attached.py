"""`fathom bench --url`: servers that somebody else has started."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from fathom.benchmarks import attached, cli, liveness, measure, model, report, servers, variants
from fathom.benchmarks.client import BenchError

FAKE = str(Path(__file__).with_name("fake_server.py"))
HALF = ["--policy", 'half={"depth_cutoff": 1}']
SMALL = ["--prompts", "64", "--batches", "1,2", "--output", "6", "--rounds", "2"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(model.config_json(model.TINY)))
    return folder


@pytest.fixture
def start(tmp_path, checkpoint):
    """Starts a fake server and gives its address and what it prints."""
    processes = []

    def begin(engine="fathom", *flags):
        port, log = servers.free_port(), tmp_path / f"{len(processes)}.log"
        command = [sys.executable, FAKE, engine, "--port", str(port), "--model", str(checkpoint), *flags]
        with log.open("w") as output:
            processes.append(subprocess.Popen(command, stdout=output))
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                httpx.get(url + "/health")
                return url, log
            except httpx.HTTPError:
                time.sleep(0.05)
        raise AssertionError("the fake server did not start")

    yield begin
    servers.stop(processes)


def bench(tmp_path, *flags):
    out = tmp_path / "out.json"
    code = cli.main([*SMALL, "--out", str(out), *flags])
    return code, json.loads(out.read_text()) if out.exists() else None


def test_policies_alternate_on_a_server_that_runs(tmp_path, start, capsys):
    url, log = start("fathom", "--each", "0.01")
    # Of some seeds two prompts begin with the same word, which the second then finds cached.
    code, result = bench(tmp_path, "--url", url, *HALF, "--seed", "1")
    assert code == 0
    assert httpx.get(f"{url}/health").status_code == 200  # it is somebody else's to stop
    for cell in result["cells"]:
        taken = [(turn["round"], turn["variant"]) for turn in cell["turns"]]
        assert taken == [(0, "fathom"), (0, "half"), (1, "half"), (1, "fathom")]
        assert {r["fathom"]["cached_tokens"] for turn in cell["turns"] for r in turn["requests"]} == {0}
        assert cell["predictions"]["fathom/half"]["kv_reported"] == 2
        assert cell["summary"]["half"]["tpot"]["median"] >= 0.009
    said = log.read_text()
    requests = sum(len(turn["requests"]) for cell in result["cells"] for turn in cell["turns"])
    assert said.count("of theirs") == requests + 2 * (
        1 + 2
    )  # those and the warm-up, under the name it is served by
    assert "forgot" not in said
    assert [(v["name"], v["url"], v["served_model"]) for v in result["variants"]] == [
        ("fathom", url, "theirs"),
        ("half", url, "theirs"),
    ]
    assert result["model"]["layers"] == model.TINY.layers
    assert report.notes(result)[0].startswith(f"{url} on NVIDIA H200; asked from ")
    assert all(line.endswith("| – |") for line in capsys.readouterr().out.splitlines() if "| half |" in line)


def test_what_a_server_tells_of_itself_is_what_is_predicted_with(start, checkpoint):
    url, _ = start()
    server = attached.attach(variants.FATHOM, url)
    told = {"--draft-model-path": str(checkpoint), "--tsp-layer": "1", "--depth-span": None}
    told |= {"--sfi-sink": "2", "--sfi-recent": "3", "--sfi-selected": "4"}
    assert {flag: server.variant.option(flag) for flag in told} == told
    shape, experts = attached.shape_at([server])
    assert (shape.layers, shape.vocab, experts) == (model.TINY.layers, model.TINY.vocab, False)


def test_the_shape_is_asked_of_a_server_that_tells_it(tmp_path, start, capsys):
    url, _ = start()
    theirs = attached.attach(variants.VLLM, url)
    shape, _ = attached.shape_at([theirs, attached.attach(variants.FATHOM, url)])
    assert shape.layers == model.TINY.layers
    assert bench(tmp_path, "--url", f"vllm={url}") == (1, None)
    assert f"{url}: a vLLM server does not tell its model's configuration" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--shared-prefix", "0.5"], ["--documents", "1"]])
def test_questions_share_nothing_that_could_be_set(tmp_path, start, checkpoint, capsys, flags):
    url, _ = start()
    assert cli.main(["--url", url, "--model", str(checkpoint), *flags]) == 2
    assert "--model goes without --model-shape, --shared-prefix" in capsys.readouterr().err


def test_another_run_has_other_prompts(tmp_path, start, capsys):
    url, _ = start()
    for _ in range(2):
        assert bench(tmp_path, "--url", url)[0] == 0
    assert bench(tmp_path, "--url", url, "--seed", "5")[0] == 0
    assert bench(tmp_path, "--url", url, "--seed", "5")[0] == 1
    assert "64 of 64 tokens were in the prefix cache" in capsys.readouterr().err
    assert bench(tmp_path, "--url", url, "--documents", "1")[0] == 0


SFI = ["--policy", 'sfi={"decode": "slow_fast"}']


def cached(result):
    return {r["fathom"]["cached_tokens"] for c in result["cells"] for t in c["turns"] for r in t["requests"]}


def test_policies_that_leave_the_same_kv_do_not_find_each_others_prompts(tmp_path, start):
    url, _ = start()
    code, result = bench(tmp_path, "--url", url, *SFI, "--seed", "1", "--warmup-prompt", "20")
    assert code == 0 and max(cached(result)) <= 4
    code, result = bench(tmp_path, "--url", url, *SFI, "--seed", "2", "--shared-prefix", "0.5")
    assert code == 0 and cached(result) <= {32, 33, 34}


def test_a_servers_own_preset_is_not_measured_as_dense(tmp_path, start):
    url, _ = start("fathom", "--preset", "balanced")
    code, result = bench(tmp_path, "--url", url, *HALF)
    assert code == 0
    assert [v["body"]["fathom"] for v in result["variants"]] == [{"preset": "exact"}, {"depth_cutoff": 1}]
    assert "fathom/half" in result["cells"][0]["ratios"]


def test_warm_ups_of_one_length_are_new_in_each_cell(tmp_path, start):
    url, _ = start()
    two = ["--prompts", "64,96", "--warmup-prompt", "40", "--warmups", "2"]
    seen = []

    def note(self, name, prompts, output, send=measure.Bench._send):
        seen.extend(tuple(prompt) for prompt in prompts)
        return send(self, name, prompts, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.Bench, "_send", note)
        assert bench(tmp_path, "--url", url, *two)[0] == 0
    warm = [prompt for prompt in seen if len(prompt) == 40]
    assert len(warm) == len(set(warm)) == 2 * 2 * (1 + 2)


def test_two_engines_that_run(tmp_path, start):
    (fathom, _), (stock, _) = start(), start("sglang", "--first", "0.1")
    code, result = bench(tmp_path, "--url", fathom, "--url", f"sglang={stock}", *HALF)
    assert code == 0 and [v["name"] for v in result["variants"]] == ["sglang", "fathom", "half"]
    assert result["cells"][0]["ratios"]["sglang/fathom"]["ttft"]["median"] > 1.2
    assert bench(tmp_path, "--url", f"sglang={stock}")[0] == 0


@pytest.mark.parametrize(
    ("lie", "flags", "message"),
    [
        ("a key", [], "asks for a key: /v1/models is 401"),
        ("stock scheduler", [], "does not run Fathom's own"),
        ("silent fallback", HALF, "was served dense"),
        ("one cache", HALF, "were in the prefix cache; two policies that are the same"),
        ("idle worker", [], "its worker saw 0 of"),
    ],
)
def test_a_run_that_proves_nothing_writes_nothing(tmp_path, start, capsys, lie, flags, message):
    url, _ = start("fathom", "--lie", lie)
    assert bench(tmp_path, "--url", url, *flags) == (1, None)
    assert message in capsys.readouterr().err


def test_a_key_is_sent(tmp_path, start):
    """And kept in no file."""
    url, _ = start("fathom", "--lie", "a key")
    for words, told in ((["--api-key", "secret"], "--api-key …"), (["--api-key=secret"], "--api-key=…")):
        code, result = bench(tmp_path, "--url", url, *words)
        assert code == 0 and "secret" not in json.dumps(result)
        assert told in result["command"].replace("'", "")


def test_who_is_not_there_or_is_somebody_else(tmp_path, start, capsys):
    nobody = f"http://127.0.0.1:{servers.free_port()}"
    assert bench(tmp_path, "--url", nobody) == (1, None)
    assert f"{nobody}: ConnectError" in capsys.readouterr().err
    stock, _ = start("sglang")
    assert bench(tmp_path, "--url", stock) == (1, None)
    assert "is not a fathom server: /fathom/info is 404" in capsys.readouterr().err


def answers(content):
    """A server that says the same to everything."""
    return Starlette(routes=[Route("/{path:path}", lambda request: Response(content))])


INFO = json.dumps({"engine": [], "policy": {}, "versions": {}, "data": []})


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ("<html>Welcome</html>", "/fathom/info"),
        ('{"status": "ok"}', "/fathom/info"),
        ("[]", "/fathom/info"),
        ('{"engine": ["x"], "policy": {}, "versions": {}}', "/fathom/info"),
        (INFO, "/v1/models"),
    ],
)
def test_something_else_that_answers_is_named(tmp_path, run_app, capsys, content, path):
    url = run_app(answers(content))
    assert bench(tmp_path, "--url", url) == (1, None)
    assert f"error: {url} is not a fathom server: {path} says {content[:80]!r}" in capsys.readouterr().err
    assert bench(tmp_path, "--url", f"sglang={url}") == (1, None)
    assert f"error: {url} is not a sglang server: /v1/models says" in capsys.readouterr().err


def test_who_is_no_vllm_is_named(start):
    url, _ = start()
    with pytest.raises(BenchError, match=f"{url} is not a vllm server: /version is 404"):
        liveness.identify(attached.attach(variants.VLLM, url))


def test_an_address_that_is_none_is_named(tmp_path, capsys):
    assert bench(tmp_path, "--url", "http://127.0.0.1:abc") == (1, None)
    assert "error: http://127.0.0.1:abc: InvalidURL Invalid port: 'abc'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--one-server"], "--one-server is for servers that the bench starts; it goes without --url"),
        (["--quick"], "--quick is for servers"),
        (["--dtype", "float32"], "--dtype is for servers"),
        (["--server-flags", "fathom=--x"], "--server-flags is for servers"),
        (["--variants", "sglang"], "--url names no sglang server; it names fathom"),
        (["--url", "http://b"], "give each name once"),
    ],
)
def test_what_is_said_to_servers_when_they_start(capsys, flags, message):
    assert cli.main(["--url", "http://127.0.0.1:1", *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_address_is_one(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--url", "localhost:30000"])
    assert "expected URL or NAME=URL, NAME of sglang, vllm, fathom" in capsys.readouterr().err


def test_experts_are_not_predicted(start, tmp_path):
    experts = tmp_path / "experts"
    experts.mkdir()
    config = model.config_json(model.TINY) | {"num_experts": 8, "torch_dtype": "float16"}
    (experts / "config.json").write_text(json.dumps(config))
    url, _ = start("fathom", "--model", str(experts))
    code, result = bench(tmp_path, "--url", url, *HALF)
    assert code == 0 and all(cell["predictions"] == {} for cell in result["cells"])


def test_a_model_that_cannot_be_read_here(start, tmp_path, capsys):
    url, _ = start("fathom", "--model", str(tmp_path / "elsewhere"))
    assert bench(tmp_path, "--url", url) == (1, None)
    assert "cannot be read here" in capsys.readouterr().err
