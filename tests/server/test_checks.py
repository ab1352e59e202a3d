"""Checks before a start, each by itself: what they let pass, and where exactly they begin to refuse."""

import json
import socket
from types import SimpleNamespace

import pytest

from fathom.server.command import checks
from fathom.server.command.checks import StartError

ENVIRONMENT = [*checks.REFUSED_ENVIRONMENT, checks.CPU_ENGINE]


@pytest.mark.parametrize("name", ENVIRONMENT)
@pytest.mark.parametrize(
    ("value", "refused"), [("1", True), *((value, False) for value in ("", "0", "false", "False", "NO", "n"))]
)
def test_a_variable_that_says_no_is_as_good_as_none(name, value, refused):
    if not refused:
        checks.refuse_bypass(SimpleNamespace(), {name: value})
        return
    with pytest.raises(StartError, match=name):
        checks.refuse_bypass(SimpleNamespace(), {name: value})


@pytest.mark.parametrize(
    ("option", "legal", "refused"),
    [
        ("tokenizer_worker_num", 1, 2),
        ("detokenizer_worker_num", 1, 2),
        ("disaggregation_mode", "null", "prefill"),
        ("grpc_port", None, 5000),
        ("grpc_mode", False, True),
        ("speculative_algorithm", None, "EAGLE"),
        ("tool_server", "demo", None),
    ],
)
def test_what_is_refused_of_an_option(option, legal, refused):
    checks.refuse_bypass(SimpleNamespace(**{option: legal}), {})
    if refused is not None:
        flag = f"--{option.replace('_', '-')}"
        shown = flag if refused is True else f"{flag} {refused}"
        with pytest.raises(StartError, match=f"^{shown} is not supported: "):
            checks.refuse_bypass(SimpleNamespace(**{option: refused}), {})


def test_a_port_is_free_though_its_last_connections_linger():
    """As after a server that was started again; one that is listened on is taken."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is already in use") as caught:
            checks.check_port("127.0.0.1", port)
        assert caught.value.code == checks.FAILURE
        with socket.create_connection(("127.0.0.1", port)) as client:
            listening.accept()[0].close()
            assert client.recv(1) == b""
    checks.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", ""),
        ('{"quantization_config": null}', ""),
        ('{"quantization_config": {"bits": 4}}', ""),
        ('{"quantization_config": "int4"}', "quantization_config must be an object"),
        ("[]", "is not a JSON object"),
        ("{", "is not valid JSON"),
        (None, "the folder has no config.json"),
    ],
)
def test_a_models_folder(tmp_path, content, told):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    if told:
        with pytest.raises(StartError, match=told):
            checks.check_model(str(tmp_path))
    else:
        checks.check_model(str(tmp_path))
    checks.check_model(str(tmp_path), config=None)


def test_where_a_model_may_be(tmp_path, monkeypatch):
    """Only two names with a slash between them are looked for on Hugging Face."""
    asked = []
    monkeypatch.setattr(checks, "_check_repository", lambda *told: asked.append(told))
    (tmp_path / "model.gguf").touch()
    for found in (str(tmp_path / "model.gguf"), "s3://bucket/model"):
        checks.check_model(found)
    for nowhere in ("model", "./a", "/a", "~/a", "a/b/c", "../a"):
        with pytest.raises(StartError, match="no such folder or file"):
            checks.check_model(nowhere)
    checks.check_model("org/model", "--draft-model-path")
    assert asked == [("org/model", "--draft-model-path", "config.json")]


def test_a_name_that_no_repository_can_have():
    with pytest.raises(StartError, match="no such folder, and no such model on Hugging Face"):
        checks.check_model("org/a--b")


@pytest.mark.parametrize(
    ("draft", "difference"),
    [
        ({"a": 0, "b": 1}, ""),
        ({"a": 0}, "the target has 2 tokens, the draft 1"),
        ({"a": 0, "b": 1, "c": 2}, "the target has 2 tokens, the draft 3"),
        ({"a": 1, "b": 0}, "token 'a' is id 0 in the target and id 1 in the draft"),
        ({"a": 0, "c": 1}, "token 'b' is id 1 in the target and absent in the draft"),
    ],
)
def test_a_vocabulary_is_the_same_token_for_token(draft, difference):
    assert checks.vocabulary_difference({"b": 1, "a": 0}, draft) == difference


def test_each_vocabulary_is_read_as_its_model_is(tmp_path, monkeypatch):
    """A tokenizer elsewhere is the target's; each has a revision of its own."""
    (tmp_path / "config.json").write_text(json.dumps({}))
    read = []
    monkeypatch.setattr(checks, "_vocabulary", lambda *how: read.append(how) or {"a": 0})
    draft = str(tmp_path)
    checks.check_draft("target", draft)
    checks.check_draft("target", draft, checks.Reading("tokenizer", "main", "other", True))
    assert read == [
        ("target", None, False),
        (draft, None, False),
        ("tokenizer", "main", True),
        (draft, "other", True),
    ]


@pytest.fixture
def contexts(monkeypatch):
    """Lengths by model, and what was asked of them."""
    from sglang.srt.configs.model_config import ModelConfig

    lengths, asked = {}, []

    def from_server_args(server_args, path, is_draft_model):
        asked.append((path, is_draft_model))
        return SimpleNamespace(context_len=lengths[path])

    monkeypatch.setattr(ModelConfig, "from_server_args", from_server_args)
    return lengths, asked


def test_a_draft_has_the_context_of_its_model(contexts, monkeypatch):
    lengths, asked = contexts
    args = SimpleNamespace(model_path="model", speculative_draft_model_path="draft")
    for length in (100, 101):
        lengths |= {"model": 100, "draft": length}
        assert [each.context_len for each in checks.described(args, True)] == [100, length]
    assert asked == [("model", False), ("draft", True)] * 2
    lengths["draft"] = 99
    assert [each.context_len for each in checks.described(args, False)] == [100]
    with pytest.raises(
        StartError, match=r"its context has 99 tokens, the model's 100; .*--context-length 99"
    ):
        checks.described(args, True)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    assert len(checks.described(args, True)) == 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n these:\n a\n\n b\n"), "these: a b"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_error_is_one_line(error, told):
    assert checks.one_line(error) == told
