"""Error answers that name what is wrong and nothing else: no traceback, no file path."""

import re
import traceback
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from fathom.server.routes import COMPLETIONS, FAILED, GENERATE, OLLAMA, RESPONSES, error_body, path_of

SHOWN_ERRORS = 3
SHOWN_CHARACTERS = 500
MALFORMED = "the request body does not have the form of this route"


_OLLAMAS = {"max_new_tokens": "num_predict", "sampling_params": "options", "sampling_seed": "seed"}
OTHER_NAMES = {
    COMPLETIONS: {"top_logprobs_num": "logprobs"},
    RESPONSES: {"max_new_tokens": "max_output_tokens"},
} | dict.fromkeys(OLLAMA, _OLLAMAS)


class ControlError(RuntimeError):
    """The engine could not do what a request to control it asked for."""


# What libraries put into their messages for their own developers.
_SOURCE_PLACE = re.compile(
    r"(\[\d\d:\d\d:\d\d\] )?(File )?\"?/?[\w./-]*/[\w.-]+\.(py|cc|cpp|cu|h|rs)\"?(:|, line )\d+:? ?"
)
_PYDANTIC_DETAIL = re.compile(
    r" \[type=[^\n]*\]$|^ *For further information visit \S+( None)?$", re.MULTILINE
)


def clean(message: str) -> str:
    """An error message on one line, of bounded length, without places in source files."""
    text = _PYDANTIC_DETAIL.sub("", _SOURCE_PLACE.sub("", message))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _bounded("; ".join(dict.fromkeys(lines)))


def _bounded(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def in_names_of(path: str, message: str) -> str:
    """A message of the engine, with the names that clients of ``path`` have for sampling parameters."""
    if path == GENERATE:
        return message
    names = {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "top_logprobs_num": "top_logprobs",
    }
    names |= OTHER_NAMES.get(path, {})
    return re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], message)


def rewrite(path: str, status: int, body: bytes) -> bytes:
    """An error answer of SGLang in the one format of its route. Anything else than an error is left alone.

    SGLang puts the text of an unexpected exception into answers with status 500: it is replaced.
    """
    if status == 500:
        return orjson.dumps(error_body(path, status, FAILED))
    content = orjson.loads(body)
    error = content.get("error", content) if isinstance(content, dict) else None
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return body
    message = in_names_of(path, clean(error["message"]))
    return orjson.dumps(error_body(path, status, message, error.get("param")))


def describe(errors: list[dict[str, Any]]) -> str:
    """Validation errors as ``field: what is wrong``, the first few of them.

    Args:
        errors: as pydantic lists them, with ``loc`` and ``msg``.
    """
    texts = []
    for error in errors:
        place = ".".join(name for name in map(str, error.get("loc", ())) if _is_field(name))
        message = str(error.get("msg", "illegal value")).removeprefix("Value error, ")
        texts.append(f"{place}: {message}" if place else message)
    unique = list(dict.fromkeys(texts))
    text = _bounded("; ".join(unique[:SHOWN_ERRORS]) or "illegal request")
    more = len(unique) - SHOWN_ERRORS
    return f"{text} (and {more} more)" if more > 0 else text


def _is_field(name: str) -> bool:
    # Alternatives of a union appear in the place under the names of their types.
    known = name in ("body", "str", "int", "float", "bool", "dict")
    return not known and (name.replace("-", "_").isidentifier() or name.isdigit())


def raised_by_body(error: BaseException) -> bool:
    """Whether an exception came from reading a request into its route's form, before the route itself began.

    Some of SGLang's validators take for granted what they are there to check.
    """
    frames = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    return "request_body_to_args" in frames and "run_endpoint_function" not in frames


async def on_invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
    """A request that a route's schema refuses: 400 in the route's format."""
    body = error_body(path_of(request.scope), 400, describe(list(error.errors())))
    return JSONResponse(body, status_code=400)


async def on_no_route(request: Request, error: HTTPException) -> JSONResponse:
    """A path that no route has, or a method that its route does not take: the answer in the path's format."""
    body = error_body(path_of(request.scope), error.status_code, str(error.detail))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def on_control_error(request: Request, error: Exception) -> JSONResponse:
    """A request to control the engine that failed there: 400 with the engine's reason."""
    return JSONResponse(error_body(path_of(request.scope), 400, clean(str(error))), status_code=400)


async def on_failure(request: Request, error: Exception) -> JSONResponse:
    """An exception that no route caught. The server logs it; the client learns only that it happened."""
    return JSONResponse(error_body(path_of(request.scope), 500, FAILED), status_code=500)


def install(app: FastAPI) -> None:
    """Replace SGLang's handlers of these errors."""
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(HTTPException, on_no_route)
    app.add_exception_handler(ControlError, on_control_error)
    app.add_exception_handler(Exception, on_failure)
