"""``/v1/messages``: what the client did wrong is status 400, and a full queue 503.

SGLang answers both with status 500 where they are noticed after the request was read.
"""

import sys
from typing import Any

from starlette.exceptions import HTTPException


def install() -> None:
    """Put our function around SGLang's."""
    from sglang.srt.entrypoints.anthropic.serving import ERROR_TYPE_MAP, AnthropicServing

    error_response = AnthropicServing._error_response

    def with_cause(self: Any, status_code: int, error_type: str, message: str, **known: Any) -> Any:
        error = sys.exc_info()[1]
        if isinstance(error, HTTPException):
            status_code, message = error.status_code, str(error.detail)
        elif isinstance(error, ValueError):
            status_code, message = 400, str(error)
        else:
            return error_response(
                self, status_code=status_code, error_type=error_type, message=message, **known
            )
        kind = ERROR_TYPE_MAP.get(status_code, "api_error")
        return error_response(self, status_code=status_code, error_type=kind, message=message)

    AnthropicServing._error_response = with_cause
