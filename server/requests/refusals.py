"""What the JSON object of a generation request may not ask for, whatever its policy."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from sglang.srt.managers.io_struct import GenerateReqInput

from fathom.server.answers.errors import describe
from fathom.server.routes import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES

INTERNAL_FIELDS = (
    *(
        "http_worker_ipc",
        "received_time",
        "need_wait_for_mm_inputs",
        "num_items_assigned",
        "external_trace_header",
    ),
    *("bootstrap_pair_key", "decode_tp_size", "lora_id", "positional_embed_overrides", "encoder_urls"),
)
INTERNAL_SAMPLING_FIELDS = (
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
    "ebnf_full_assistant",
)

MAX_GENERATIONS = 128
"""Most answers that one prompt may ask for (``n``), and most beams: OpenAI's limit for ``n``."""

THINKING = "max_thinking_tokens"

PASSED_OVER = {
    "guided_json": "response_format",
    "guided_regex": "regex",
    "guided_choice": "regex",
    "guided_grammar": "ebnf",
    "structured_outputs": "response_format, regex or ebnf",
    "prompt_logprobs": f"echo with logprobs on {COMPLETIONS}, or logprob_start_len on {GENERATE}",
    "prompt_embeds": None,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": "logit_bias or regex",
    "bad_words": "logit_bias",
    "use_beam_search": None,
    "include_stop_str_in_output": "no_stop_trim",
    "thinking_token_budget": f"{THINKING} on {GENERATE}",
    "documents": "messages",
    "chat_template": "--chat-template",
    "functions": "tools",
    "function_call": "tool_choice",
}
"""What other servers' clients ask for and SGLang's chat and completions do not read, which would change the answer;
and what there is in its place."""

NOT_HERE = {"conversation": "previous_response_id, or all items in input", "prompt": "input and instructions"}
"""What of OpenAI's own is asked for by an id that only OpenAI's servers know, and what there is in its place."""

_SGLANGS = ("json_schema", "regex", "ebnf", "structural_tag")
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
FORMS = ("response_format", "output_format", *_SGLANGS, *_GUIDED)
"""Members by which clients of some server ask for an answer of a form."""
READS = {
    CHAT: ("response_format", "regex", "ebnf"),
    COMPLETIONS: ("response_format", "regex", "ebnf", "json_schema"),
    RESPONSES: ("text.format",),
    MESSAGES: ("output_config.format",),
    GENERATE: tuple(f"sampling_params.{name}" for name in _SGLANGS),
}
"""Those that a route reads."""

_FORM = TypeAdapter(GenerateReqInput)
PROMPTS = ("text", "input_ids", "input_embeds")
"""What instances of Vertex AI's route are made of: the first of these that the first instance has."""

WITHOUT_EFFECT = ("tools", "images", "suffix", "template", "context", "logprobs")
"""Members of Ollama's requests."""


class RequestError(Exception):
    """A request that is refused before it reaches a route."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param


def refuse_illegal(path: str, content: dict[str, Any], middles: bool) -> None:
    """Refuse a request of a route.

    Args:
        path: the route; content: the request's JSON object.
        middles: whether a completion may have a suffix here.

    Raises:
        RequestError: 400, naming the field.
    """
    _refuse_private(content)
    if path == GENERATE:
        _refuse_internal(content)
    elif content.get(THINKING) is not None:
        raise RequestError(400, f"{THINKING} cannot be had on this route; it can on {GENERATE}", THINKING)
    if path == RESPONSES:
        _refuse_response(content)
    _refuse_count(content)
    if path in (CHAT, COMPLETIONS):
        _refuse_asked(content, PASSED_OVER)
        _refuse_two_schemas(content)
    _refuse_other_forms(path, content)
    if path == CHAT:
        _refuse_limit(content, "max_completion_tokens")
    if path == COMPLETIONS:
        _refuse_without_effect(content, middles)


def _sampling_sets(content: dict[str, Any]) -> list[dict[str, Any]]:
    """One set of sampling parameters, or those of each prompt; what is none is left for the route to refuse."""
    given = content.get("sampling_params")
    return [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, dict)]


def _refuse_private(content: dict[str, Any]) -> None:
    """Refuse a request that addresses the engine's private field directly."""
    for holder in [content, *_sampling_sets(content)]:
        custom = holder.get("custom_params")
        for name in custom if isinstance(custom, dict) else ():
            if name.startswith("fathom"):
                name = f"custom_params.{name}"
                message = f'{name} is reserved; put the policy in a top-level "fathom" object'
                raise RequestError(400, message, name)


def _refuse_internal(content: dict[str, Any]) -> None:
    """Refuse fields by which SGLang's own processes talk to each other; its native route takes them from anyone."""
    sets = (("sampling_params.", each, INTERNAL_SAMPLING_FIELDS) for each in _sampling_sets(content))
    for prefix, holder, names in (("", content, INTERNAL_FIELDS), *sets):
        for name in names:
            if holder.get(name) is not None:
                raise RequestError(400, f"{prefix}{name} is not for clients", prefix + name)


def _refuse_response(content: dict[str, Any]) -> None:
    """Refuse a response to nothing, without room for a token, or to less than was asked."""
    if content.get("input") == []:
        raise RequestError(400, "input must not be empty", "input")
    _refuse_limit(content, "max_output_tokens")
    if isinstance(content.get("prompt"), dict) or _asks(content.get("conversation")):
        _refuse_asked(content, NOT_HERE)
    choice = content.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        message = 'tool_choice of type "allowed_tools" is not supported; there is tools with those alone'
        raise RequestError(400, message, "tool_choice")


def _refuse_limit(content: dict[str, Any], name: str) -> None:
    """Refuse an answer without room for a token; SGLang takes a chat's 0 for no limit at all."""
    limit = content.get(name)
    if type(limit) is int and limit < 1:
        raise RequestError(400, f"{name} must be an integer >= 1, got {limit}", name)


def _refuse_asked(content: dict[str, Any], known: Mapping[str, str | None]) -> None:
    """Refuse what would be answered as if it had not been asked for."""
    for name, other in known.items():
        if _asks(content.get(name)):
            instead = f"; there is {other}" if other else ""
            raise RequestError(400, f"{name} is not supported{instead}", name)


def _asks(given: Any) -> bool:
    """Whether a member asks for something; 0 does: `prompt_logprobs` for those of the prompt's own tokens."""
    return given is not None and given is not False and given not in ("", [], {})


def _refuse_other_forms(path: str, content: dict[str, Any]) -> None:
    """Refuse a form of the answer that the route does not read: the answer would be of any."""
    for name in FORMS:
        given = content.get(name)
        if name not in READS[path] and _asks(given) and given != {"type": "text"}:
            there = ", ".join(READS[path])
            raise RequestError(400, f"{name} is not supported on this route; there is {there}", name)


def _refuse_two_schemas(content: dict[str, Any]) -> None:
    """Refuse a schema that SGLang leaves for another one, or for none."""
    given = content.get("response_format")
    wanted = given if isinstance(given, dict) else {}
    kind = wanted.get("type")
    if kind == "json_object" and any(_asks(wanted.get(name)) for name in ("schema", "json_schema")):
        message = 'response_format of type "json_object" has no schema; legal with one: type "json_schema"'
        raise RequestError(400, message, "response_format")
    if kind not in (None, "text") and _asks(content.get("json_schema")):
        raise RequestError(400, "json_schema cannot be had with response_format; legal: one", "json_schema")


def _refuse_without_effect(content: dict[str, Any], middles: bool) -> None:
    """Refuse what SGLang takes on its completions route and does not do."""
    if (best_of := content.get("best_of")) is not None and best_of != (content.get("n") or 1):
        raise RequestError(400, "best_of is not supported; legal: the value of n", "best_of")
    if content.get("suffix") and not middles:
        raise RequestError(400, "suffix needs a server with --completion-template", "suffix")


def _refuse_count(content: dict[str, Any]) -> None:
    """Refuse to make no generation at all, or more than one prompt may have."""
    found = [(name, content.get(name)) for name in ("n", "best_of") if isinstance(content.get(name), int)]
    # SGLang's native route compares this one before anything has looked at its type.
    found += [("sampling_params.n", each.get("n")) for each in _sampling_sets(content)]
    for name, count in found:
        if count is not None and not (type(count) is int and 1 <= count <= MAX_GENERATIONS):
            message = f"{name} must be an integer in [1, {MAX_GENERATIONS}], got {json.dumps(count)[:80]}"
            raise RequestError(400, message, name)


def refuse_encoded(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a body that must be decompressed first."""
    for name, value in headers:
        if name.lower() == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            given = value.decode("latin-1")[:40]
            raise RequestError(415, f"content-encoding {given!r} is not supported; send the body as it is")


def refuse_unanswerable(content: dict[str, Any]) -> None:
    """Refuse what SGLang takes on Ollama's routes, or passes over, and does not do."""
    messages = content.get("messages")
    holders = [content, *(messages if isinstance(messages, list) else [])]
    for name in WITHOUT_EFFECT:
        for holder in holders if name == "images" else [content]:
            if isinstance(holder, dict) and holder.get(name):
                raise RequestError(400, f"{name} cannot be had on this route; it may on {CHAT}", name)


def refuse_instances(content: dict[str, Any]) -> None:
    """Refuse what SGLang's route for Vertex AI fails on, parameters that its form lacks or of a wrong type.

    So is what is not for clients on :data:`GENERATE`, whose form it is.

    What are no instances or parameters at all, the route refuses itself.
    """
    instances, given = content.get("instances"), content.get("parameters") or {}
    if not isinstance(given, dict) or not isinstance(instances, list):
        return
    if not instances or not all(isinstance(instance, dict) for instance in instances):
        return
    legal = {field.name for field in dataclasses.fields(GenerateReqInput)} - {*PROMPTS, "image_data"}
    for name in given:
        if name not in legal:
            known = f"legal are {GENERATE}'s fields but those of instances, such as sampling_params"
            raise RequestError(400, f"parameters must not have {name[:40]!r}; {known}", "parameters")
    own = next((name for name in PROMPTS if instances[0].get(name)), None)
    prompts = {own: [each.get(own) for each in instances]} if own else {}
    try:
        _FORM.validate_json(orjson.dumps(given | prompts), strict=True)
    except ValidationError as error:
        raise RequestError(400, describe([*map(dict, error.errors())])) from error
    _refuse_internal(given)
    _refuse_private(given)


def schema_of_answer(content: dict[str, Any]) -> str:
    """The JSON schema in ``output_config.format`` of ``/v1/messages``, which SGLang does not read; "" for none.

    Raises:
        RequestError: 400 for another form than the one there is.
    """
    config = content.get("output_config")
    wanted = config.get("format") if isinstance(config, dict) else None
    if wanted is None:
        return ""
    name = "output_config.format"
    if not (isinstance(wanted, dict) and wanted.get("type") == "json_schema"):
        raise RequestError(400, f'{name} must be an object whose type is "json_schema"', name)
    if not isinstance(schema := wanted.get("schema"), dict):
        raise RequestError(400, f"{name}.schema must be a JSON schema", name)
    return orjson.dumps(schema).decode()
