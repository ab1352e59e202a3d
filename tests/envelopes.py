"""Errors as the clients of each route parse them."""

from fathom.server.routes import GENERATE, MESSAGES, RESPONSES


def message_of(path, body):
    """The message, after checking the envelope that the route's clients parse."""
    if path.startswith(MESSAGES):
        assert body["type"] == "error" and body["error"]["type"] in (
            "invalid_request_error",
            "request_too_large",
        )
        return body["error"]["message"]
    if path.startswith(RESPONSES) or path == GENERATE:
        assert body["error"]["type"] == "invalid_request_error" and body["error"]["code"] >= 400
        return body["error"]["message"]
    assert body["object"] == "error" and body["code"] >= 400 and body["type"].endswith("Error")
    return body["message"]
