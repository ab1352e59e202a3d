"""Options of SGLang that name files and folders: each is looked at before anything is loaded.

SGLang looks at them where they are used, some in a process of the engine: of a wrong name a traceback is told, or a
reason that does not say which option is meant.
"""

import argparse
import json
import os
import ssl
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fathom.server.command.checks import StartError, check_model, installed, read_object
from fathom.server.units import json_object

ADAPTER_FORMS = 'PATH, NAME=PATH or {"lora_name": NAME, "lora_path": PATH, "pinned": true or false}'
CHAT_MEMBERS = ("name", "system", "user", "assistant", "sep_style", "stop_str")
COMPLETION_MEMBERS = ("name", "fim_begin_token", "fim_middle_token", "fim_end_token", "fim_position")


@dataclass(frozen=True)
class Files:
    """What SGLang's options of these names are given; None where they are not."""

    chat_template: str | None = None
    completion_template: str | None = None
    tokenizer_path: str | None = None
    lora_paths: list[str] | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_keyfile_password: str | None = None
    init_expert_location: str | None = None
    model_checksum: str | None = None
    log_requests_target: list[str] | None = None
    export_metrics_to_file_dir: str | None = None
    crash_dump_folder: str | None = None
    file_storage_path: str | None = None
    quantization_param_path: str | None = None
    decrypted_config_file: str | None = None
    decrypted_draft_config_file: str | None = None
    hf_chat_template_name: str | None = None
    custom_weight_loader: list[str] | None = None

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Let ``parser`` recognise these options, but for those that it knows."""
        several = {"nargs": "*"}
        how: dict[str, dict[str, Any]] = {
            "lora_paths": several,
            "log_requests_target": several,
            "model_checksum": {"nargs": "?", "const": ""},
            "custom_weight_loader": several,
        }
        for item in fields(cls):
            flag = "--" + item.name.replace("_", "-")
            if flag not in parser._option_string_actions:
                parser.add_argument(flag, **how.get(item.name, {}))

    @classmethod
    def given(cls, arguments: object) -> "Files":
        """As parsed flags have it."""
        return cls(**{item.name: getattr(arguments, item.name) for item in fields(cls)})

    def check(self, model: str = "", draft: str | None = None, served: str = "") -> None:
        """See that all of it is there and can be read, or written to.

        Args:
            model, draft: folders, files or repositories, whose files some of the options name.
            served: the model's name.

        Raises:
            StartError: naming the option and what is wrong.
        """
        if self.chat_template is not None:
            _check_template("--chat-template", self.chat_template, CHAT_MEMBERS, (".jinja", ".json"))
        if self.completion_template is not None:
            _check_template("--completion-template", self.completion_template, COMPLETION_MEMBERS, (".json",))
        if self.tokenizer_path is not None:
            _check_tokenizer(self.tokenizer_path)
        _check_adapters(self.lora_paths or (), served)
        self._check_certificate()
        if self.init_expert_location is not None:
            _check_experts(self.init_expert_location)
        if self.model_checksum and not Path(self.model_checksum).is_file():
            check_model(self.model_checksum, "--model-checksum", None)
        for folder in self.log_requests_target or ():
            if folder.lower() != "stdout":
                check_folder("--log-requests-target", folder)
        for flag, place in (
            ("--export-metrics-to-file-dir", self.export_metrics_to_file_dir),
            ("--crash-dump-folder", self.crash_dump_folder),
            ("--file-storage-path", self.file_storage_path),
        ):
            if place:
                check_folder(flag, place)
        if (scales := self.quantization_param_path) is not None:
            read_object(Path(scales), f"--quantization-param-path {scales}: it")
        _check_config("--decrypted-config-file", self.decrypted_config_file, model)
        _check_config("--decrypted-draft-config-file", self.decrypted_draft_config_file, draft or "")
        if self.hf_chat_template_name is not None:
            _check_template_name(self.hf_chat_template_name, self.tokenizer_path or model)
        for name in self.custom_weight_loader or ():
            _check_function("--custom-weight-loader", name)

    def _check_certificate(self) -> None:
        for flag, path in (
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
        ):
            if path is not None:
                _check_file(flag, path)
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return  # which SGLang refuses by their names
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without a password OpenSSL would ask for one on the terminal.
        password = self.ssl_keyfile_password or ""
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: password)
        except ssl.SSLError as error:
            given = f"--ssl-certfile {self.ssl_certfile} and --ssl-keyfile {self.ssl_keyfile}"
            asked = (
                "a certificate and its key in PEM, the key without a password or with --ssl-keyfile-password"
            )
            raise StartError(f"{given} must be {asked} ({error.reason or error})") from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except ssl.SSLError:
                raise StartError(f"--ssl-ca-certs {self.ssl_ca_certs}: no certificates in PEM") from None


def _check_file(option: str, path: str) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise StartError(f"{option} {path}: {error.strerror}") from None


def check_folder(option: str, path: str) -> None:
    """See that a folder can be written to, or be made.

    Raises:
        StartError: naming the option and what is wrong.
    """
    folder = Path(path).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise StartError(f"{option} {path}: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartError(f"{option} {path}: {folder} cannot be written to")


def _check_template(option: str, path: str, members: Collection[str], ends: tuple[str, ...]) -> None:
    """See that it is the name of a template of SGLang's, which SGLang knows, or a file with one."""
    if not os.path.exists(path) and os.sep not in path and not path.endswith(ends):
        return
    _check_file(option, path)
    if not path.endswith(ends):
        raise StartError(f"{option} {path}: the name of a file must end with {' or '.join(ends)}")
    if path.endswith(".json"):
        content = read_object(Path(path), f"{option} {path}: it")
        if missing := [member for member in members if member not in content]:
            raise StartError(f"{option} {path}: it has no {', '.join(missing)}")
    else:
        _check_jinja(option, path)


def _check_jinja(option: str, path: str) -> None:
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """What the assistant wrote, as Transformers lets templates mark it."""

        tags = {"generation"}  # noqa: RUF012 - as in the base class

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(Path(path).read_text())
    except TemplateSyntaxError as error:
        raise StartError(f"{option} {path}: line {error.lineno}: {error.message}") from None
    except UnicodeDecodeError:
        raise StartError(f"{option} {path}: not text in UTF-8") from None


def _check_tokenizer(path: str) -> None:
    option, names = "--tokenizer-path", ("*token*", "vocab*", "*.model", "tekken*")
    check_model(path, option, None)
    if os.path.isdir(path) and not any(any(Path(path).glob(name)) for name in names):
        raise StartError(f"{option} {path}: the folder has no tokenizer")


def _check_config(option: str, path: str | None, model: str) -> None:
    """See that there is such a file, absolute or in the model's folder, with a config in it."""
    if path and (os.path.isabs(path) or os.path.isdir(model)):
        read_object(Path(model, path), f"{option} {path}: it")


def _check_template_name(name: str, tokenizer: str) -> None:
    """See that a tokenizer in a folder has several chat templates, and one of this name."""
    option, folder = "--hf-chat-template-name", Path(tokenizer)
    if not folder.is_dir():
        return
    known = {path.stem for path in folder.glob("additional_chat_templates/*.jinja")}
    if (file := folder / "tokenizer_config.json").is_file():
        told = read_object(file, f"{option} {name}: {file}").get("chat_template")
        known |= {str(each.get("name")) for each in told} if isinstance(told, list) else set()
    if known and (folder / "chat_template.jinja").is_file():
        known.add("default")
    if name not in known:
        legal = f"it has {', '.join(sorted(known))}" if known else "its templates have no names"
        raise StartError(f"{option} {name}: {tokenizer} has no chat template of this name; {legal}")


def _check_function(option: str, name: str) -> None:
    """See that a function is given by its module and name, and that there is such a module."""
    module, _, function = name.rpartition(".")
    if not (module and function and installed(module)):
        raise StartError(f"{option} {name}: must be MODULE.FUNCTION, of a module that can be imported")


def _check_experts(given: str) -> None:
    option = "--init-expert-location"
    if given.endswith(".json"):
        read_object(Path(given), f"{option} {given}: it")
    elif given.endswith(".pt"):
        _check_file(option, given)
    elif given != "trivial":
        try:
            json_object(given)
        except argparse.ArgumentTypeError:
            raise StartError(
                f"{option} {given}: must be trivial, a file that ends with .pt or .json, or a JSON object"
            ) from None


def adapter_problem(name: str, served: str) -> str:
    """Why no adapter can have this name, "" where one can.

    Who asks for the served model by its name would get an adapter of that name instead.

    Args:
        name: that it is to be loaded under; served: the served model's.
    """
    if name == served:
        return f"{name!r} is the served model's name, under which the model alone is asked for"
    if not name or name != name.strip() or not name.isprintable():
        return f"an adapter's name must be printable, without blanks at its ends, and not empty, got {name[:40]!r}"
    return ""


def _check_adapters(entries: Collection[str], served: str) -> None:
    """See that adapters of ``--lora-paths`` are there, each with a name of its own."""
    named: set[str] = set()
    for entry in entries:
        name, path = _adapter(entry.strip())
        if name in named:
            raise StartError(f"--lora-paths {entry}: there is an adapter {name!r} before it")
        if problem := adapter_problem(name, served):
            raise StartError(f"--lora-paths {entry}: {problem}")
        named.add(name)
        if "://" in path or Path(path).is_file():
            raise StartError(f"--lora-paths {path}: an adapter is a folder, or a repository on Hugging Face")
        check_model(path, "--lora-paths", "adapter_config.json")


def _adapter(entry: str) -> tuple[str, str]:
    """An entry's name and path, as SGLang takes it apart."""
    before, mark, behind = entry.partition("=")
    told: dict[str, Any] = {"lora_name": before, "lora_path": behind if mark else before}
    if entry.startswith("{") and entry.endswith("}"):
        try:
            told = json.loads(entry)
        except ValueError:
            told = {}
    name, path = told.get("lora_name"), told.get("lora_path")
    if not (name and path and isinstance(name, str) and isinstance(path, str)) or (
        not isinstance(told.get("pinned", False), bool)
    ):
        raise StartError(f"--lora-paths {entry}: an adapter must be given as {ADAPTER_FORMS}")
    return name, path
