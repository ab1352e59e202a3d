"""Options that name files: a slip in one is one line that names it, told before anything is loaded."""

import json

import pytest
from conftest import DEMO_TARGET

from fathom.server import cli
from fathom.server.command.files import CHAT_MEMBERS, COMPLETION_MEMBERS, Files

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBbzCCARWgAwIBAgIUWjR7VLX7dfzbkCvhJIXstOKNF5gwCgYIKoZIzj0EAwIw
DDEKMAgGA1UEAwwBeDAgFw0yNjExMjgyMzA4MTBaGA8yMTI2MTEwNDIzMDgxMFow
DDEKMAgGA1UEAwwBeDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABAR1AcbIuEZH
yX3fOnw8JcDZa82VMafonjLxXw4H3ArdRxzPvXLIvoGnI+OW0jBwCTXBt9Qxp0q3
TBCOG0u6HhmjUzBRMB0GA1UdDgQWBBSfItqle8oTulzjH0mqY8/0yMccRTAfBgNV
HSMEGDAWgBSfItqle8oTulzjH0mqY8/0yMccRTAPBgNVHRMBAf8EBTADAQH/MAoG
CCqGSM49BAMCA0gAMEUCIDLkgyuS7GNPxGc+saZZroVagzL2usyDslVeKld+imUj
AiEA28Y+wW+5HqZmQX5a379NCHTXAxwLnR9fCkQoY6Rus5Q=
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgftQPa2187dnvQAbx
0B5zSnQsPkfA42qF092m/MCIU/mhRANCAAQEdQHGyLhGR8l93zp8PCXA2WvNlTGn
6J4y8V8OB9wK3Uccz71yyL6BpyPjltIwcAk1wbfUMadKt0wQjhtLuh4Z
-----END PRIVATE KEY-----
"""
LOCKED = """\
-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,E89277C923473C50DED2A64CC9AB0A34

v+NLFHxaW/9Zwd8i2Z2JLl1VOt/8uG84qPHJV/RwVGuzt0zD70ziFzlMN+5A8lOm
S6F0O7I80FY3UvNqVb2lhoMNdKywzn11TXPavjAChBmVECdhFnVq8fJMI4VDYQGP
blf4/b8m4rP3lrFNC77+vveFqxIrwCxUf7bPu6eEnnE=
-----END EC PRIVATE KEY-----
"""
"""The same key with the password ``word``."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the options below name."""
    place = tmp_path_factory.mktemp("files")
    (place / "empty").mkdir()
    for name, config in (("adapter", {"r": 4}), ("list", [])):
        (place / name).mkdir()
        (place / name / "adapter_config.json").write_text(json.dumps(config))
    (place / "bad.json").write_text("{bad")
    (place / "half.json").write_text(json.dumps({"name": "x"}))
    (place / "bad.jinja").write_text("\n{% for x in %}{% endfor %}")
    (place / "other.jinja").write_bytes(b"\xff\xfe")
    (place / "template.txt").write_text("x")
    for name, members in (("chat", CHAT_MEMBERS), ("completion", COMPLETION_MEMBERS)):
        (place / f"{name}.json").write_text(json.dumps(dict.fromkeys(members, "x")))
    (place / "marked.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}{% endfor %}"
    )
    for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"):
        (place / "named" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "named" / name).write_text("{}")
    listed = {"chat_template": [{"name": "plain", "template": ""}]}
    (place / "named" / "tokenizer_config.json").write_text(json.dumps(listed))
    for name, content in (("cert", CERTIFICATE), ("key", KEY), ("locked", LOCKED)):
        (place / f"{name}.pem").write_text(content)
    return place


SLIPS = [
    ("--lora-paths a=/nowhere", "--lora-paths /nowhere: no such folder"),
    ("--lora-paths /nowhere", "--lora-paths /nowhere: no such folder"),
    ('--lora-paths {"lora_name":"a","lora_path":"/nowhere"}', "--lora-paths /nowhere: no such folder"),
    ("--lora-paths a={}/adapter b={}/empty", "/empty: the folder has no adapter_config.json"),
    ("--lora-paths a={}/list", "its adapter_config.json is not a JSON object"),
    ("--lora-paths a={}/bad.json", "bad.json: an adapter is a folder"),
    (
        "--lora-paths a={}/adapter a={}/adapter",
        "--lora-paths a={}/adapter: there is an adapter 'a' before it",
    ),
    ("--lora-paths fathom-demo={}/adapter", "'fathom-demo' is the served model's name"),
    ("--lora-paths a=", "--lora-paths a=: an adapter must be given as PATH, NAME=PATH or {"),
    ("--lora-paths ={}/adapter", "an adapter must be given as"),
    ('--lora-paths {"lora_name":"a"}', "an adapter must be given as"),
    ('--lora-paths {"lora_name":"a","lora_path":"b","pinned":1}', "an adapter must be given as"),
    ("--lora-paths {bad}", "--lora-paths {bad}: an adapter must be given as"),
    ("--chat-template /nowhere.jinja", "--chat-template /nowhere.jinja: No such file"),
    ("--chat-template {}/empty", "Is a directory"),
    ("--chat-template {}/template.txt", "must end with .jinja or .json"),
    ("--chat-template {}/bad.jinja", "bad.jinja: line 2: Expected an expression"),
    ("--chat-template {}/other.jinja", "not text in UTF-8"),
    ("--chat-template {}/bad.json", "it is not valid JSON"),
    ("--chat-template {}/half.json", "it has no system, user, assistant, sep_style, stop_str"),
    ("--completion-template {}/half.json", "it has no fim_begin_token"),
    ("--completion-template {}/bad.jinja", "must end with .json"),
    ("--tokenizer-path /nowhere", "--tokenizer-path /nowhere: no such folder"),
    ("--tokenizer-path {}/empty", "--tokenizer-path {}/empty: the folder has no tokenizer"),
    ("--ssl-certfile /nowhere", "--ssl-certfile /nowhere: No such file"),
    ("--ssl-keyfile /nowhere --ssl-certfile /nowhere", "--ssl-keyfile /nowhere: No such file"),
    ("--ssl-ca-certs {}/empty", "--ssl-ca-certs {}/empty: Is a directory"),
    (
        "--ssl-certfile {}/bad.json --ssl-keyfile {}/bad.json",
        "--ssl-keyfile {}/bad.json must be a certificate",
    ),
    ("--ssl-certfile {}/cert.pem --ssl-keyfile {}/locked.pem", "or with --ssl-keyfile-password"),
    (
        "--ssl-certfile {}/cert.pem --ssl-keyfile {}/key.pem --ssl-ca-certs {}/bad.json",
        "--ssl-ca-certs {}/bad.json: no certificates",
    ),
    ("--init-expert-location /nowhere", "--init-expert-location /nowhere: must be trivial, a file"),
    ("--init-expert-location {}/bad.json", "--init-expert-location {}/bad.json: it is not valid JSON"),
    ("--init-expert-location /nowhere.pt", "--init-expert-location /nowhere.pt: No such file"),
    ("--model-checksum /nowhere", "--model-checksum /nowhere: no such folder or file"),
    (
        "--log-requests-target stdout {}/bad.json/x",
        "--log-requests-target {}/bad.json/x: {}/bad.json is no folder",
    ),
    ("--export-metrics-to-file-dir {}/bad.json", "--export-metrics-to-file-dir {}/bad.json: "),
    ("--crash-dump-folder {}/bad.json", "--crash-dump-folder {}/bad.json: {}/bad.json is no folder"),
    ("--file-storage-path /dev/null/x", "--file-storage-path /dev/null/x: /dev/null is no folder"),
    ("--quantization-param-path /nowhere", "--quantization-param-path /nowhere: it: No such file"),
    ("--quantization-param-path {}/bad.json", "--quantization-param-path {}/bad.json: it is not valid JSON"),
    ("--decrypted-config-file /nowhere", "--decrypted-config-file /nowhere: it: No such file"),
    ("--decrypted-config-file nowhere", "--decrypted-config-file nowhere: it: No such file"),
    ("--decrypted-draft-config-file {}/bad.json", "bad.json: it is not valid JSON"),
    ("--hf-chat-template-name nope", "has no chat template of this name; its templates have no names"),
    ("--hf-chat-template-name x --tokenizer-path {}/named", "of this name; it has default, plain, tools"),
    ("--custom-weight-loader x.y", "--custom-weight-loader x.y: must be MODULE.FUNCTION, of a module"),
    ("--custom-weight-loader os.path.join load", "--custom-weight-loader load: must be MODULE.FUNCTION"),
    ("--tool-server x", "--tool-server x is not supported: tools of other servers need the package mcp"),
    ("--speculative-token-map /nowhere", "--speculative-token-map /nowhere is not supported: SGLang's own"),
    ("--enable-trace", "--enable-trace is not supported: it needs the packages opentelemetry-sdk"),
]


@pytest.mark.parametrize(("given", "told"), SLIPS, ids=[given for given, _ in SLIPS])
def test_a_slip_is_one_line_that_names_the_option(given, told, folder, capsys):
    given, told = (text.replace("{}", str(folder)) for text in (given, told))
    assert cli.main(["serve", "--demo", *given.split()]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"lora_paths": []},
        {
            "lora_paths": [
                "{}/adapter",
                "a={}/adapter",
                '{"lora_name":"b","lora_path":"{}/adapter","pinned":true}',
            ]
        },
        {"chat_template": "llama-2"},
        {"chat_template": "{}/marked.jinja"},
        {"chat_template": str(DEMO_TARGET / "chat_template.jinja")},
        {"chat_template": "{}/chat.json", "completion_template": "{}/completion.json"},
        {"tokenizer_path": str(DEMO_TARGET)},
        {"ssl_certfile": "{}/cert.pem", "ssl_keyfile": "{}/key.pem", "ssl_ca_certs": "{}/cert.pem"},
        {"ssl_certfile": "{}/cert.pem", "ssl_keyfile": "{}/locked.pem", "ssl_keyfile_password": "word"},
        {"init_expert_location": "trivial"},
        {"init_expert_location": '{"logical_count": [[1]]}'},
        {"model_checksum": ""},
        {"log_requests_target": ["stdout", "{}/new/logs"], "export_metrics_to_file_dir": "{}"},
        {"hf_chat_template_name": "tools", "tokenizer_path": "{}/named"},
        {"hf_chat_template_name": "plain", "tokenizer_path": "{}/named"},
        {"custom_weight_loader": ["os.path.join"], "file_storage_path": "{}/new"},
        {"decrypted_config_file": str(DEMO_TARGET / "config.json")},
    ],
    ids=str,
)
def test_what_is_right_is_taken(right, folder):
    def at(value):
        return [at(item) for item in value] if isinstance(value, list) else value.replace("{}", str(folder))

    Files(**{name: at(value) for name, value in right.items()}).check()
    assert not (folder / "new").exists()
