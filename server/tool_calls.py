"""Calls that ``tool_choice`` demands are told as calls, whether or not the server parses those that a model makes,
and the arguments of a call that a grammar makes are an object.

SGLang's grammar makes demanded calls JSON of one form, and its chats read that form without a parser; but only
where there is one (``--tool-call-parser``) do they look. With one it makes them in the model's own form, where the
arguments of a tool that is not ``strict`` may be any JSON: a number too, which no client can read. A chat in which
an earlier call was cut off is refused for what is left of its arguments, as long as the client tells of it.
"""

from typing import Any

ANY_OBJECT = {"type": "object", "additionalProperties": True}
"""The schema of arguments that only have to be some."""


def install() -> None:
    """Put our functions around SGLang's."""
    from sglang.srt.entrypoints.openai import serving_chat
    from sglang.srt.entrypoints.openai.protocol import ToolChoice
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parsing_active = OpenAIServingChat._tool_call_parsing_active
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

    serving_chat.normalize_assistant_tool_call_arguments = or_none
    OpenAIServingChat._tool_call_parsing_active = or_demanded
    FunctionCallParser.get_structure_constraint = of_objects


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
