"""Labels of the counters of HTTP requests: whatever is asked for, there are as many as routes and methods."""

from http import HTTPMethod

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from fathom.server.labels import OTHER, endpoint_of

APP = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@APP.get("/things/{name}")
@APP.post("/plain")
async def answer():
    return "here"


def labels_of(method, path):
    """What SGLang's middleware counts a request under."""
    request = Request({"type": "http", "method": method, "path": path, "headers": [], "app": APP})
    endpoint, handled = endpoint_of(request)
    return endpoint, request.method, handled


@given(
    st.text(max_size=12),
    st.one_of(st.sampled_from(["/", "/things/", "/plain"]), st.text(max_size=9)),
    st.text(),
)
def test_labels_are_those_of_routes_and_methods(method, start, rest):
    endpoint, method, handled = labels_of(method, start + rest)
    assert endpoint in {"/things/{name}", "/plain", OTHER}
    assert method in {*HTTPMethod.__members__, OTHER}
    assert handled <= (endpoint != OTHER)


@pytest.mark.parametrize(
    ("asked", "counted"),
    [
        (("GET", "/things/a"), ("/things/{name}", "GET", True)),
        (("POST", "/plain"), ("/plain", "POST", True)),
        (("GET", "/plain"), ("/plain", "GET", False)),
        (("DELETE", "/things/a"), ("/things/{name}", "DELETE", False)),
        (("GET", "/plain/2"), (OTHER, "GET", False)),
        (("FETCH", "/plain"), ("/plain", OTHER, False)),
    ],
)
def test_a_request_is_counted_under_its_route(asked, counted):
    assert labels_of(*asked) == counted
