"""Labels of SGLang's counters of HTTP requests: none that a client can make up.

SGLang counts a request under its path and method, whatever they are; each new one is a series that stays, in memory
and in every scrape.
"""

from http import HTTPMethod
from typing import Any

from starlette.routing import Match

OTHER = "other"
"""Label of a path that is no route's, and of a method that is none of HTTP's."""


def install() -> None:
    """Put our function in the place of SGLang's."""
    from sglang.srt.utils import common

    common._get_fastapi_request_path = endpoint_of


def endpoint_of(request: Any) -> tuple[str, bool]:
    """The path that a request's route was declared with, and whether the route takes the request's method."""
    if request.method not in HTTPMethod.__members__:
        request.scope = {**request.scope, "method": OTHER}  # SGLang reads it next, as a label
    known = OTHER
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match == Match.FULL:
            return getattr(route, "path", OTHER), True
        if match == Match.PARTIAL and known == OTHER:
            known = getattr(route, "path", OTHER)
    return known, False
