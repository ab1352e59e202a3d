"""``--config FILE``: Fathom's options and SGLang's, over defaults and under the command line."""

import argparse
import json

import pytest

from fathom.runtime.sglang_host import engine_args
from fathom.server import cli
from fathom.server.command import checks, command_line, config_file

MODEL = str(checks.demo_model())


@pytest.fixture
def write(tmp_path):
    """A function that writes the file; its path."""

    def to_file(content: str) -> str:
        (tmp_path / "server.yaml").write_text(content)
        return str(tmp_path / "server.yaml")

    return to_file


def arguments(*words):
    """SGLang's arguments of a command line."""
    return engine_args.build(command_line.plan(list(words)).engine_flags)


def test_the_file_counts_where_the_command_line_says_nothing(write):
    file = write(f"model-path: {MODEL}\nport: 31777\nlog_level: info\n")
    work = command_line.plan(["--config", file])
    assert (work.model, work.host, work.port) == (MODEL, "127.0.0.1", 31777)
    assert "warning" not in work.engine_flags
    assert command_line.plan(["--config", file, "--port", "31778"]).port == 31778
    assert command_line.plan(["--demo", "--config", file]).name == command_line.DEMO_NAME
    assert command_line.plan(["other", "--config", file]).model == "other"
    assert command_line.plan(["--config", write("demo: true")]).name == command_line.DEMO_NAME


@pytest.mark.parametrize("given", [("--config", "{}"), ("--config={}",)], ids=" ".join)
def test_keys_in_the_file_close_the_server(write, given):
    file = write("api-key: secret\nadmin-api-key: other\n")
    built = arguments(MODEL, *(word.format(file) for word in given))
    assert (built.api_key, built.admin_api_key) == ("secret", "other")


def test_the_file_wins_over_the_defaults_of_a_cpu(write):
    file = write(
        "max-total-tokens: 5000\nchunked_prefill_size: 128\nenable-cache-report: true\ndisable-radix-cache: false\n"
        "prompt-tokens-buckets: [custom, 10, 20]\ncontext-length: null\n"
    )
    built = arguments(MODEL, "--config", file)
    assert (built.max_total_tokens, built.chunked_prefill_size) == (5000, 128)
    assert built.enable_cache_report and not built.disable_radix_cache
    assert built.prompt_tokens_buckets == ["custom", "10", "20"]
    assert arguments(MODEL, "--config", file, "--max-total-tokens", "6000").max_total_tokens == 6000


def test_switches_of_sglangs_that_may_be_on_by_themselves_can_be_off(write):
    parser = engine_args._parser()
    switches = {
        action.option_strings[0]
        for action in parser._actions
        if isinstance(action, argparse.BooleanOptionalAction)
    }
    assert set(config_file.ON_OR_OFF) == switches
    for flag in switches:
        built = arguments(MODEL, "--config", write(f"{flag.removeprefix('--')}: false"))
        assert getattr(built, flag.removeprefix("--").replace("-", "_")) is False


def test_adapters_with_members_in_the_file(write):
    adapter = {"lora_name": "a", "lora_path": "/a", "pinned": True}
    file = write(
        f"lora-paths:\n- {json.dumps(adapter)}\n- b=/b\nmax-lora-rank: 8\nlora-target-modules: [q_proj]"
    )
    first, second = arguments(MODEL, "--config", file).lora_paths
    assert first == adapter
    assert second == "b=/b"


def test_the_file_is_seen_by_the_rules_of_a_gpu(write):
    flags = command_line.plan([MODEL, "--config", write("attention-backend: triton")]).engine_flags
    assert "fathom_triton" not in engine_args.with_gpu_rules(flags)


def test_fathoms_options_in_the_file(write):
    file = write("preset: turbo\nspeculative: false\nmax-in-flight: 7\ngpu-depth-pages: true\n")
    work = command_line.plan([MODEL, "--config", file])
    assert work.face.asked == {"preset": "turbo", "speculative": False}
    assert work.gate.max_in_flight == 7 and work.gpu_depth_pages
    overridden = command_line.plan([MODEL, "--config", file, "--preset", "balanced", "--speculative"])
    assert overridden.face.asked == {"preset": "balanced", "speculative": True}
    for kinds in ([], ["user", "tools"]):
        listed = command_line.plan([MODEL, "--config", write(f"prefill-protect: {kinds}")])
        assert listed.face.tunings["prefill_protect"] == kinds
        words = command_line.plan([MODEL, "--prefill-protect", *kinds, "--config", file])
        assert words.face.tunings["prefill_protect"] == kinds and words.model == MODEL
    off = write("gpu-depth-pages: false")
    assert command_line.plan([MODEL, "--config", off]).gpu_depth_pages is False
    assert command_line.plan([MODEL, "--config", off, "--gpu-depth-pages"]).gpu_depth_pages is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("grpc-mode: true", "--grpc-mode is not supported"),
        ("tokenizer-worker-num: 2", "--tokenizer-worker-num 2 is not supported"),
        ("preset: fast", "--preset must be one of"),
        (
            "prefill-protect: [rules]",
            'list of none to all of "system", "tools", "tool_results", "user", got ["rules"]',
        ),
        ("preset: exact\n  bad: 1\n", "server.yaml: line 2: mapping values are not allowed here"),
        ("revision: 2024-13-45\n", "server.yaml: month must be in 1..12"),
        ("- a", "must hold a mapping"),
        ("config: other.yaml", "must not name another file"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(write, capsys, content, message):
    assert cli.main(["serve", MODEL, "--config", write(content)]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


def test_one_file_that_exists(write, tmp_path, capsys):
    assert cli.main(["serve", MODEL, "--config", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.endswith("none.yaml: No such file or directory\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert cli.main(["serve", MODEL, "--config", str(tmp_path / "binary")]) == 2
    assert capsys.readouterr().err.endswith("binary: not text in UTF-8\n")
    file = write("preset: exact")
    assert cli.main(["serve", MODEL, "--config", file, f"--config={file}"]) == 2
    assert "give only one --config" in capsys.readouterr().err
