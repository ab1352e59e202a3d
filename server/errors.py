"""Error answers that name what is wrong and nothing else: no traceback, no file path."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from fathom.server.routes import FAILED, error_body, path_of

SHOWN_ERRORS = 3
SHOWN_CHARACTERS = 500


def describe(errors: list[dict[str, Any]]) -> str:
    """Validation errors as ``field: what is wrong``, the first few of them.

    Args:
        errors: as pydantic lists them, with ``loc`` and ``msg``.
    """
    texts = []
    for error in errors:
        # Alternatives of a union appear in the place under the names of their types: not a field's name.
        names = [str(part) for part in error.get("loc", ()) if part != "body"]
        place = ".".join(name for name in names if name.replace("-", "_").isidentifier() or name.isdigit())
        message = str(error.get("msg", "illegal value")).removeprefix("Value error, ")
        texts.append(f"{place}: {message}" if place else message)
    unique = list(dict.fromkeys(texts))
    text = "; ".join(unique[:SHOWN_ERRORS]) or "illegal request"
    if len(text) > SHOWN_CHARACTERS:
        text = text[: SHOWN_CHARACTERS - 3] + "..."
    more = len(unique) - SHOWN_ERRORS
    return f"{text} (and {more} more)" if more > 0 else text


async def on_invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
    """A request that a route's schema refuses: 400 in the route's format."""
    body = error_body(path_of(request.scope), 400, describe(list(error.errors())))
    return JSONResponse(body, status_code=400)


async def on_failure(request: Request, error: Exception) -> JSONResponse:
    """An exception that no route caught. The server logs it; the client learns only that it happened."""
    return JSONResponse(error_body(path_of(request.scope), 500, FAILED), status_code=500)


def install(app: FastAPI) -> None:
    """Replace SGLang's handlers of these errors."""
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(Exception, on_failure)
