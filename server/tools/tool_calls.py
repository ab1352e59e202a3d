"""Calls that ``tool_choice`` demands are told as calls, whether or not the server parses those that a model makes,
and the arguments of a call that a grammar makes are an object.

SGLang's grammar makes demanded calls JSON of one form, and its chats read that form without a parser; but only
where there is one (``--tool-call-parser``) do they look. With one it makes them in the model's own form, where the
arguments of a tool that is not ``strict`` may be any JSON: a number too, which no client can read. A chat in which
an earlier call was cut off is refused for what is left of its arguments, as long as the client tells of it.

Of demanded calls that an answer ends within, one that is not streamed would tell all of the JSON as text.
"""

import json
from typing import Any

ANY_OBJECT = {"type": "object", "additionalProperties": True}
"""The schema of arguments that only have to be some."""


def install() -> None:
    """Put our functions around SGLang's."""
    from sglang.srt.entrypoints.openai import serving_chat
    from sglang.srt.entrypoints.openai.protocol import ToolChoice
    from sglang.srt.entrypoints.openai.responses_adapters import custom_tool_names
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parsing_active = OpenAIServingChat._tool_call_parsing_active
    process, make_items = (
        OpenAIServingChat._process_tool_calls,
        OpenAIServingResponses._make_response_output_items,
    )
    get_constraint = FunctionCallParser.get_structure_constraint
    read_arguments = serving_chat.normalize_assistant_tool_call_arguments

    def or_demanded(self: Any, request: Any) -> bool:
        demanded = request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoice)
        return parsing_active(self, request) or (demanded and bool(self._effective_tools(request)))

    def of_objects(self: Any, *choice: Any, **known: Any) -> Any:
        constraint = get_constraint(self, *choice, **known)
        if constraint is None or constraint[0] != "structural_tag":
            return constraint
        kind, value = constraint
        tag = value.model_dump(by_alias=True)
        make_objects(tag)
        return kind, type(value).model_validate(tag)

    def or_none(message: dict[str, Any], *, strict: bool = True) -> None:
        read_arguments(message, strict=False)
        if strict:
            without_halves(message)

    def without_rest(self: Any, text: str, tools: Any, reason: Any, choice: Any = None, *more: Any) -> Any:
        result = process(self, text, tools, reason, choice, *more)
        demanded = choice == "required" or isinstance(choice, ToolChoice)
        calls = whole_calls(result.remaining_text or "") if demanded and result.tool_calls is None else None
        if calls:
            return process(self, json.dumps(calls), tools, reason, choice, *more)
        return result if calls is None else result._replace(remaining_text="")

    def items_without_rest(self: Any, request: Any, *args: Any, **kwargs: Any) -> list[Any]:
        items: list[Any] = make_items(self, request, *args, **kwargs)
        choice = request.effective_tool_choice()
        demanded = choice == "required" or isinstance(choice, dict)
        if not (demanded and items and items[-1].type == "message"):
            return items
        calls = whole_calls(items[-1].content[0].text)
        if calls is None:
            return items
        custom = custom_tool_names(request.tools)
        return items[:-1] + [
            self._make_tool_call_item(
                call.get("name", ""), json.dumps(call.get("parameters", {}), ensure_ascii=False), custom
            )
            for call in calls
        ]

    serving_chat.normalize_assistant_tool_call_arguments = or_none
    OpenAIServingChat._process_tool_calls = without_rest
    OpenAIServingResponses._make_response_output_items = items_without_rest
    OpenAIServingChat._tool_call_parsing_active = or_demanded
    FunctionCallParser.get_structure_constraint = of_objects


def whole_calls(text: str) -> list[Any] | None:
    """Of demanded calls the whole ones; None of a text that is no beginning of a list of calls.

    Args:
        text: what a grammar made, or its beginning.
    """
    rest = text.strip()
    if not rest.startswith("["):
        return None
    decoder, found, rest = json.JSONDecoder(), [], rest[1:].lstrip()
    while rest.startswith("{"):
        try:
            call, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        found.append(call)
        rest = rest[end:].lstrip(", \t\r\n")
    return found if not rest or rest.startswith("{") else None


def without_halves(message: dict[str, Any]) -> None:
    """Of the calls of a chat's message: arguments that could not be read are none, as on ``/v1/responses``.

    Args:
        message: what an assistant said, or anybody; it changes.
    """
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = {}


def make_objects(tag: Any) -> None:
    """Of a structural tag of calls, as a JSON value that changes: any JSON becomes any object.

    Formats in XML are left as they are: with any names of arguments, they are objects.
    """
    if isinstance(tag, list):
        for each in tag:
            make_objects(each)
    elif isinstance(tag, dict):
        if "begin" in tag and "schema" in tag:  # the older form
            tag["schema"] = tag["schema"] or ANY_OBJECT
        elif tag.get("type") == "json_schema":
            if tag.get("style") == "json" and tag["json_schema"] in (True, {}):
                tag["json_schema"] = ANY_OBJECT
        else:
            make_objects(list(tag.values()))
