"""The command line: every mistake is one line and an exit code, and nothing heavy is loaded to say so."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fathom.benchmarks.servers import free_port
from fathom.runtime.config import Limits, PolicyError, without_draft
from fathom.runtime.sglang_host import engine_args
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.server import cli, serve
from fathom.server.command import checks, command_line, depth_pages
from fathom.server.command.checks import StartError


def fathom(*arguments, start=("-m", "fathom.server.cli"), **environment):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | environment,
    )


@pytest.fixture
def model(tmp_path):
    """A folder that passes for a model until it is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def write_tokenizer(folder, words):
    """A model folder with a word-level tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    Tokenizer(WordLevel(dict(words), unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    )
    return folder


MISTAKES = [
    (["serve"], 2, "give a model"),
    (["serve", "--port", "31000", "x"], 2, "give a model: MODEL as the first word"),
    (["serve", "x", "--sfi-buffer-mib", "inf"], 2, "--sfi-buffer-mib must be a finite number > 0"),
    (["serve", "/no/such/model"], 2, "/no/such/model: no such folder or file"),
    (["serve", "no-such-model"], 2, "no-such-model: no such folder or file"),
    (["serve", "--demo", "--model-path", "x"], 2, "give only one model"),
    (["serve", "x", "--port", "http"], 2, "--port: invalid int value: 'http'"),
    (["serve", "x", "--port", "0"], 2, "--port must be in [1, 65535], got 0"),
    (["serve", "x", "--max-body-mib", "0"], 2, "--max-body-mib must be at least 1, got 0"),
    (["serve", "x", "--max-in-flight", "0"], 2, "--max-in-flight must be at least 1, got 0"),
    (["serve", "x", "--drain-seconds", "-1"], 2, "--drain-seconds must be at least 0, got -1"),
    (["serve", "x", "--drain-seconds", "nan"], 2, "--drain-seconds must be at least 0, got nan"),
    (["serve", "x", "--client-timeout", "0"], 2, "--client-timeout must be above 0, got 0"),
    (
        ["serve", "x", "--preset", "fast"],
        2,
        '--preset must be one of "exact", "conversation", "balanced", "turbo", got "fast"',
    ),
    (["serve", "x", "--decode", "slow"], 2, '--decode must be one of "slow_fast", "full", got "slow"'),
    (["serve", "x", "--propagation-buffer", "-1"], 2, "--propagation-buffer must be at least 0, got -1"),
    (["serve", "x", "--shallow-factor", "0"], 2, "--shallow-factor must be at least 1, got 0"),
    (["serve", "x", "--short-prompt-share", "1"], 2, "--short-prompt-share must be in [0, 0.9], got 1"),
    (["serve", "x", "--draft-cost", "1.5"], 2, "--draft-cost must be in [0, 1], got 1.5"),
    (["serve", "x", "--gpu-prefill-attention", "fa3"], 2, "--gpu-prefill-attention: invalid choice: 'fa3'"),
    (["serve", "x", "--tokenizer-worker-num", "2"], 2, "--tokenizer-worker-num 2 is not supported: "),
    (["serve", "x", "--tokenizer-worker-num=2"], 2, "--tokenizer-worker-num 2 is not supported: "),
    (["serve", "x", "--detokenizer-worker-num", "2"], 2, "--detokenizer-worker-num 2 is not supported: "),
    (
        ["serve", "x", "--json-model-override-args", "{bad"],
        2,
        "--json-model-override-args: '{bad' is not JSON",
    ),
    (
        ["serve", "x", "--model-loader-extra-config=[1]"],
        2,
        "--model-loader-extra-config: '[1]' is not a JSON obj",
    ),
    (["serve", "x", "--log-level", "loud"], 2, "--log-level: invalid choice: 'loud'"),
    (["serve", "x", "--log-level-http", "INFO"], 2, "--log-level-http: invalid choice: 'INFO'"),
    (["serve", "x", "--grpc-mode"], 2, "--grpc-mode is not supported: "),
    (["serve", "x", "--smg-grpc-mode"], 2, "--smg-grpc-mode is not supported: "),
    (["serve", "x", "--grpc-port", "5"], 2, "--grpc-port 5 is not supported: "),
    (["serve", "x", "--enable-http2"], 2, "--enable-http2 is not supported: "),
    (["serve", "x", "--enable-pdmux"], 2, "--enable-pdmux is not supported: SGLang then runs prompts"),
    (
        ["serve", "x", "--disaggregation-mode", "prefill"],
        2,
        "--disaggregation-mode prefill is not supported: ",
    ),
    (
        ["serve", "x", "--speculative-algorithm", "EAGLE"],
        2,
        "--speculative-algorithm EAGLE is not supported: ",
    ),
    (
        ["servr"],
        2,
        "unknown command 'servr'; commands: serve, explain, bench, fidelity, soak, calibrate, version",
    ),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line(arguments, code, message, capsys):
    try:
        result = cli.main(arguments)
    except SystemExit as stop:
        result = stop.code
    shown = capsys.readouterr()
    assert result == code
    assert message in shown.err and shown.err.count("\n") == 1
    assert not shown.out


LIGHT = "import sys; from fathom.server import cli; code = cli.main(sys.argv[1:]); "
LIGHT += "assert not {'torch', 'sglang', 'transformers', 'fastapi'} & sys.modules.keys(); sys.exit(code)"


def test_a_mistake_costs_no_import_of_the_engine():
    done = fathom("serve", "/no/such", start=("-c", LIGHT))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert cli.main(["version"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert [line.split()[0] for line in lines if line] == ["fathom", "sglang", "torch", "python"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--prefill-keep-rate" in shown and "1073741824" in shown


@pytest.mark.parametrize("arguments", [["explain", "--prompt-tokens", "8k"], ["version"], []], ids=" ".join)
def test_a_reader_that_goes_away_ends_it_quietly(arguments):
    command = [sys.executable, "-m", "fathom.server.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


def test_the_environment_must_not_bypass_us(capsys, monkeypatch):
    for name in checks.REFUSED_ENVIRONMENT:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert cli.main(["serve", "x"]) == 2
            assert f"the environment variable {name} is not supported" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        assert cli.main(["serve", "x"]) == 2
        assert "SGLANG_USE_CPU_ENGINE asks for SGLang's own kernels" in capsys.readouterr().err
    monkeypatch.setenv("SGLANG_RUST_SERVER", "false")
    assert cli.main(["serve", "/no/such"]) == 2
    assert "no such folder" in capsys.readouterr().err


CLOSED = """
import os, sys
from fathom.server import cli
assert cli.main(["version"]) == 0
told = os.open(sys.argv[1], os.O_WRONLY)
os.write(told, f"{told} {os.path.realpath('/proc/self/fd/1')} {sys.stdout.isatty()}".encode())
"""


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_without_an_output_it_runs_and_no_other_file_takes_its_place(tmp_path, closed):
    result = tmp_path / "result"
    result.touch()
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", CLOSED, str(result)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0
    number, output, terminal = result.read_text().split()
    assert int(number) > 2 and (output, terminal) == ("/dev/null", "False")


def test_a_home_that_cannot_be_written_to_is_one_line():
    """PyTorch makes a folder there while it is imported, or where this process's PyTorch has named another."""
    nowhere = dict.fromkeys(("HOME", "TORCHINDUCTOR_CACHE_DIR"), "/dev/null/none")
    done = fathom("serve", "--demo", "--port", free_port(), **nowhere, XDG_CACHE_HOME="")
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("fathom serve: error: "))
    assert "/dev/null" in line and line.endswith("(HOME) and temporary files (TMPDIR) must be writable")
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_found_before_anything_is_loaded(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = fathom("serve", model, "--port", port, start=("-c", LIGHT))
    assert done.returncode == 1
    assert done.stderr == (
        f"fathom serve: error: port {port} on 127.0.0.1 is already in use; choose another one with --port\n"
    )


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_of_another_machine(host):
    with pytest.raises(StartError, match=r"is not an address of this machine|cannot listen on"):
        checks.check_port(host, 31234)


def test_a_folder_that_is_no_model(tmp_path, model):
    with pytest.raises(StartError, match=r"the folder has no config\.json"):
        checks.check_model(str(tmp_path))
    (model / "config.json").write_text("{")
    with pytest.raises(StartError, match=r"its config\.json is not valid JSON"):
        checks.check_model(str(model))
    (model / "config.json").write_text("[]")
    with pytest.raises(StartError, match=r"its config\.json is not a JSON object"):
        checks.check_model(str(model))


def test_a_reason_that_comes_as_a_list_is_told_whole():
    assert checks.one_line(OSError("No tokenizer, neither of:\n (1) a file\n (2) another\n")) == (
        "No tokenizer, neither of: (1) a file (2) another"
    )
    assert checks.one_line(ValueError("first\nsecond")) == "first"
    assert checks.one_line(ValueError()) == "ValueError"


def test_a_repository_is_looked_up(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartError, match=r"no such folder, and "):
        checks.check_model("fathom-no-such-owner/no-such-model")


SGLANGS_DRAFT = ("--speculative-draft-model-path", "--speculative-draft-model")
CODE = """
from transformers import PreTrainedTokenizerFast
class Ours(PreTrainedTokenizerFast):
    pass
"""
WORDS = {"<unk>": 0, "a": 1, "b": 2}


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"<unk>": 0, "a": 1}, "the target has 3 tokens, the draft 2"),
        ({"<unk>": 0, "a": 2, "b": 1}, "token 'a' is id 1 in the target and id 2 in the draft"),
        ({"<unk>": 0, "a": 1, "c": 2}, "token 'b' is id 2 in the target and absent in the draft"),
    ],
)
def test_a_draft_model_is_refused_for_what_is_wrong_with_it(draft, message, tmp_path):
    torchvision_ops.declare()
    target = write_tokenizer(tmp_path / "target", WORDS)
    other = write_tokenizer(tmp_path / "draft", draft)
    with pytest.raises(StartError, match=message) as caught:
        checks.check_draft(str(target), str(other))
    assert "share the target's vocabulary" in str(caught.value)
    assert caught.value.code == 2


def test_a_draft_that_is_a_file_is_refused_as_one(tmp_path):
    """Its vocabulary was said to be unreadable, or its config no JSON."""
    (tmp_path / "draft.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartError, match=r"draft\.gguf is a file: a draft is a folder .* cannot be of GGUF"):
        checks.check_draft("anything", str(tmp_path / "draft.gguf"))


def test_a_draft_model_of_the_same_vocabulary_is_taken_by_either_name(tmp_path):
    torchvision_ops.declare()
    target = write_tokenizer(tmp_path / "target", WORDS)
    other = write_tokenizer(tmp_path / "draft", WORDS)
    checks.check_draft(str(target), str(other))
    ours = command_line.plan([str(target), "--draft-model-path", str(other)])
    assert ours.draft == str(other) and ours.of_pages == ("--draft-model-path",)
    for sglangs in SGLANGS_DRAFT:
        for words in ([str(target), sglangs, str(other)], ["--demo", f"{sglangs}={other}"]):
            work = command_line.plan(words)
            assert work.draft == str(other) and work.of_pages == ("--draft-model-path",)
    with pytest.raises(StartError, match="not both"):
        command_line.plan([str(target), "--draft-model-path", "a", "--speculative-draft-model-path", "b"])
    file = tmp_path / "options.yaml"
    for in_file in ("draft-model-path", *(flag.removeprefix("--") for flag in SGLANGS_DRAFT)):
        file.write_text(f"{in_file}: elsewhere")
        assert command_line.plan([str(target), "--config", str(file)]).draft == "elsewhere"
        for given in ("--draft-model-path", *SGLANGS_DRAFT):
            assert command_line.plan([str(target), "--config", str(file), given, "here"]).draft == "here"


def test_vocabularies_are_read_where_and_as_the_server_reads_them(tmp_path):
    torchvision_ops.declare()
    target = write_tokenizer(tmp_path / "target", WORDS)
    elsewhere = write_tokenizer(tmp_path / "elsewhere", WORDS)
    other = write_tokenizer(tmp_path / "draft", WORDS)
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match=r"the vocabulary of .*target cannot be read"):
        checks.check_draft(str(target), str(other))
    words = [str(target), "--draft-model-path", str(other), "--tokenizer-path", str(elsewhere)]
    checks.check_draft(str(target), str(other), command_line.plan(words).reading)
    (elsewhere / "ours.py").write_text(CODE)
    (elsewhere / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Ours", "auto_map": {"AutoTokenizer": [None, "ours.Ours"]}})
    )
    with pytest.raises(StartError, match="contains custom code"):
        checks.check_draft(str(target), str(other), command_line.plan(words).reading)
    checks.check_draft(str(target), str(other), command_line.plan([*words, "--trust-remote-code"]).reading)


def test_numbers_with_which_a_server_answers_nothing():
    options = {flag.removeprefix("--").replace("-", "_") for flag in checks.LEAST}
    nodes = {"nnodes": 2, "node_rank": 1}
    checks.refuse_numbers(SimpleNamespace(**dict.fromkeys(options), **nodes))
    with pytest.raises(StartError, match=r"--node-rank must be in \[0, 1\], got 2"):
        checks.refuse_numbers(SimpleNamespace(**dict.fromkeys(options), **nodes | {"node_rank": 2}))
    for name in options:
        given = dict.fromkeys(options, 1) | nodes
        checks.refuse_numbers(SimpleNamespace(**given))
        with pytest.raises(StartError, match=f"--{name.replace('_', '-')} must be at least 1, got 0"):
            checks.refuse_numbers(SimpleNamespace(**given | {name: 0}))
    assert {f"--{name.replace('_', '-')}" for name in options} <= engine_args.options()


def test_buckets_and_labels_with_which_there_are_no_metrics():
    labels = "tokenizer_metrics_allowed_custom_labels"
    options = {flag.removeprefix("--").replace("-", "_") for flag in checks.BUCKETS}
    given = dict.fromkeys([*options, labels])
    checks.refuse_metrics(SimpleNamespace(**given))
    checks.refuse_metrics(SimpleNamespace(**given | {name: [0.5, 2.0] for name in options}))
    for name in options:
        for wrong in ([], [2.0, 1.0], [1.0, 1.0], [0.0, 1.0], [-1.0], [1.0, math.inf], [math.nan]):
            with pytest.raises(StartError, match=f"--{name.replace('_', '-')} must be one or more ascending"):
                checks.refuse_metrics(SimpleNamespace(**given | {name: wrong}))
    checks.refuse_metrics(SimpleNamespace(**given | {labels: ["tenant", "_2", "Le"]}))
    for wrong in ("a-b", "1a", "__a", "é", "", "le", "model_name", "priority"):
        with pytest.raises(
            StartError, match="-custom-labels must be names of letters, digits and underscores"
        ):
            checks.refuse_metrics(SimpleNamespace(**given | {labels: ["tenant", wrong]}))
    assert {*checks.BUCKETS, "--" + labels.replace("_", "-")} <= engine_args.options()


def test_the_beginning_of_an_option_is_none():
    """SGLang would take it for the whole, and Fathom's own checks would not see it."""
    options = engine_args.options()
    for word, meant in (
        ("--hos", "--host"),
        ("--served-model=x", "--served-model-name"),
        ("--model-p", "--model-path"),
        ("--por", "--port"),
        ("--speculative-draft-model-pa", "--speculative-draft-model-path"),
    ):
        with pytest.raises(StartError, match=f"{word.partition('=')[0]} is no option; did you mean {meant}"):
            checks.refuse_abbreviations(["--tp-size", "2", word], options)
    checks.refuse_abbreviations(["--host", "x", "--tp-size=2", "--no-such-option", "--", "-h"], options)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "::1"),
        ({"no_proxy": "a,b"}, "a,b,::1"),
        ({"NO_PROXY": "a"}, "a,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_the_server_is_not_asked_through_a_proxy(monkeypatch, given, found):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, given.get(name, ""))
    serve._reach_itself("http://[::1]:30000")
    assert os.environ["no_proxy"] == found
    assert os.environ["NO_PROXY"] == (found if found != "*" else "")


def test_a_key_that_no_request_can_bring():
    keys = {"api_key": None, "admin_api_key": None}
    checks.refuse_odd_keys(SimpleNamespace(**keys))
    for name, flag in (("api_key", "--api-key"), ("admin_api_key", "--admin-api-key")):
        with pytest.raises(StartError, match=f"{flag} must be of ASCII characters"):
            checks.refuse_odd_keys(SimpleNamespace(**keys | {name: "geheïm"}))


def test_the_demo_brings_its_draft():
    work = command_line.plan(["--demo"])
    assert work.draft == str(checks.demo_model("draft")) and not work.of_pages
    assert serve._with_fitting_draft(work) is work


def test_without_depth_pages_the_demo_leaves_its_draft_out(monkeypatch, capsys):
    monkeypatch.setattr(depth_pages, "used", lambda: False)
    assert serve._with_fitting_draft(command_line.plan(["--demo"])).draft is None
    assert capsys.readouterr().out == "Fathom leaves out the demo's draft model\n"
    assert depth_pages.why_not(None) == f"KV in depth pages needs {depth_pages.NEED}"
    assert depth_pages.why_not(False) == "--no-gpu-depth-pages was given"


def test_the_draft_is_refused_by_the_command(tmp_path):
    target = write_tokenizer(tmp_path / "target", WORDS)
    other = write_tokenizer(tmp_path / "draft", {"<unk>": 0, "x": 1})
    done = fathom("serve", target, "--port", free_port(), "--draft-model-path", other)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the target has 3 tokens, the draft 2" in done.stderr


def test_an_unknown_option_is_named_without_pages_of_usage(model, template, tmp_path):
    (log := tmp_path / "log").touch()
    words = ["serve", str(model), "--port", str(free_port()), "--no-such-option"]
    with template.start(words, log, dict(os.environ)) as process:
        assert process.wait(60) == 2
    told = "fathom serve: error: unrecognized arguments: --no-such-option"
    assert log.read_text().splitlines() == [f"Fathom is loading {model} ...", told]


def test_a_model_that_cannot_be_loaded(model, template, tmp_path):
    (log := tmp_path / "log").touch()
    with template.start(["serve", str(model), "--port", str(free_port())], log, dict(os.environ)) as process:
        assert process.wait(60) in (1, 2)
    told = log.read_text()
    assert told.splitlines()[-1].startswith("fathom serve: error: ")
    assert "Traceback" not in told


def test_options_are_split_between_us_and_the_engine(model):
    work = command_line.plan(
        [str(model), "--tp-size", "2", "--prefill-keep-rate", "1", "--port", "31000", "--max-body-mib", "2"]
    )
    assert work.engine_flags[:6] == ["--model-path", str(model), "--host", "127.0.0.1", "--port", "31000"]
    assert "--tp-size" in work.engine_flags and "--prefill-keep-rate" not in work.engine_flags
    assert "--enable-metrics" in work.engine_flags
    assert work.gate.max_body_bytes == 2 << 20
    assert work.name == str(model)
    named = command_line.plan(
        [str(model), "--served-model-name", "m", "--log-level=info", "--enable-metrics"]
    )
    assert named.name == "m"
    assert "warning" not in named.engine_flags and named.engine_flags.count("--served-model-name") == 1


def test_what_computes_prefill_on_a_gpu(model):
    assert command_line.plan([str(model)]).engine.gpu_prefill == "auto"
    for asked in ("gathered", "triton"):
        assert command_line.plan([str(model), "--gpu-prefill-attention", asked]).engine.gpu_prefill == asked


def test_the_operators_preset_waits_for_the_model(model):
    """Shares of the layers, and what cannot be had, are known when the model is."""
    face = command_line.plan([str(model), "--preset", "turbo", "--tsp-rate", "0.5"]).face
    assert face.asked == {"preset": "turbo", "tsp_rate": 0.5}
    face.learn(Limits(16, 4, without_draft(), 8, 2048))
    assert (face.default.depth_cutoff, face.default.tsp_rate, face.default.decode) == (12, 0.5, "slow_fast")
    assert serve._of_policy(face.choice) == "custom; its preset without prefill_keep_rate, speculative"
    face = command_line.plan([str(model), "--depth-cutoff", "6"]).face
    with pytest.raises(PolicyError, match="must be a multiple of 4 layers, got 6; nearest: 4, 8"):
        face.learn(Limits(16, 4))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_being_stopped_while_loading_is_no_error(model, number):
    command = [
        sys.executable,
        "-u",
        "-m",
        "fathom.server.cli",
        "serve",
        str(model),
        "--port",
        str(free_port()),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == f"Fathom is loading {model} ...\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
