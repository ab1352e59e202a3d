"""``/parse_function_call`` and ``/separate_reasoning`` tell who names no parser which there are."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from fathom.server.answers.errors import ControlError


def install() -> None:
    """Let SGLang's routes make their parsers by ours."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    calls, reasoning = FunctionCallParser.ToolCallParserEnum, ReasoningParser.DetectorMap
    http_server.FunctionCallParser = partial(make, FunctionCallParser, "tool_call_parser", calls)
    http_server.ReasoningParser = partial(make, ReasoningParser, "reasoning_parser", reasoning)


def make(kind: Callable[..., Any], field: str, known: Collection[str], **given: Any) -> Any:
    """A parser of a kind, which a request names in a field.

    Raises:
        ControlError: for a name that is not known.
    """
    try:
        return kind(**given)
    except ValueError as error:
        raise ControlError(f"{field}: {error}; legal: {', '.join(sorted(known))}") from None
