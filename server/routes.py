"""The generation routes that carry a policy, and each one's error format."""

import os
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/generate"

GENERATION_ROUTES = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE)
OLLAMA = (
    os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat"),
    os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate"),
)
OLLAMA_API = "/api/"
OLLAMA_SHOW = os.environ.get("SGLANG_OLLAMA_SHOW_ROUTE", "/api/show")
VERTEX = os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate")
GENERATES = (*GENERATION_ROUTES, *OLLAMA, "/invocations", VERTEX)
"""All routes that generate; those beside the first ones run under the server's default policy."""

TEXT_ROUTES = (
    *(CHAT, COMPLETIONS, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens", *OLLAMA, "/invocations"),
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/rerank"),
)
"""SGLang's routes that have to read a text or to write one."""

PROBES = ("/health", "/health_generate", "/ready", "/ping")

WEIGHT_ROUTES = (
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/get_weights_by_name",
    "/weights_checker",
)
"""SGLang's routes that change the weights or read them."""

CORPUS_ROUTES = ("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora")
"""SGLang's routes for a way of drafting that there is not here."""

OTHER = "other"  # label of a generation that came in by a route outside this list

FAILED = "internal error; the server's log has the details"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def path_of(scope: MutableMapping[str, Any]) -> str:
    """The request's path without the application's mount point and without a trailing slash."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


def error_body(path: str, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error in the format that clients of ``path`` parse.

    Args:
        path: the request's path.
        status: HTTP status.
        message: what was wrong, safe to show.
        param: name of the offending field, if there is one.
    """
    server_fault = status >= 500
    if path.startswith(MESSAGES):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if server_fault else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if path.startswith(RESPONSES) or path == GENERATE:
        kind = "server_error" if server_fault else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "param": param, "code": status}}
    if path in (*OLLAMA, OLLAMA_SHOW) or path.startswith(OLLAMA_API):
        return {"error": message}
    kind = HTTPStatus(status).phrase.title().replace(" ", "").removesuffix("Error") + "Error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return {"object": "error", **error, "error": error}
