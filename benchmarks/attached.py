"""Servers that somebody else has started and will stop: `--url`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fathom.benchmarks import liveness
from fathom.benchmarks.client import BenchError
from fathom.benchmarks.model import Shape, shape_from
from fathom.benchmarks.servers import Server
from fathom.benchmarks.variants import Variant, with_flags
from fathom.runtime.cost import EXPERTS, of_text

Found = TypeVar("Found")


def attach(variant: Variant, url: str, key: str | None = None) -> Server:
    """A server that runs, as the one of a variant.

    Args:
        key: the API key that it asks for.

    Raises:
        BenchError: when nobody answers, it asks for a key, or it is not the engine that the variant names.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    server = Server(variant, url.rstrip("/"), Path(), None, 0.0, headers=headers)
    if variant.engine == "fathom":
        server.variant = with_flags(variant, _ask(server, "/fathom/info", _told))
    server.model = _ask(server, "/v1/models", lambda answer: str(answer["data"][0]["id"]))
    return server


def _ask(server: Server, path: str, read: Callable[[Any], Found]) -> Found:
    """What `read` finds in the server's answer. BenchError where that is not what such a server says."""
    answer = liveness.get(server, path)
    other = f"is not a {server.variant.engine} server"
    if answer.status_code != 200:
        why = "asks for a key" if answer.status_code == 401 else other
        raise BenchError(f"{server.url} {why}: {path} is {answer.status_code}")
    try:
        return read(answer.json())
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise BenchError(f"{server.url} {other}: {path} says {answer.text[:80]!r}") from None


def _told(info: dict[str, Any]) -> list[str]:
    """What a server says of itself, as the flags that the cost model looks at."""
    engine: dict[str, Any] = next(iter(info["engine"] or []), {})
    draft, fastkv, slow_fast = (engine.get(part) or {} for part in ("draft", "fastkv", "slow_fast"))
    pages = (engine.get("kv_pool") or {}).get("depth_pages") or {}
    values = {
        "--draft-model-path": draft.get("model"),
        "--tsp-layer": fastkv.get("tsp_layer"),
        "--depth-span": pages.get("span"),
        **{f"--sfi-{size}": slow_fast.get(size) for size in ("sink", "recent", "selected")},
    }
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def shape_at(servers: list[Server]) -> tuple[Shape, bool]:
    """The shape of the model that the servers have, for prompts and the cost model; whether it has experts.

    Raises:
        BenchError: when none of them tells its model, or its configuration cannot be read here.
    """
    server = next((server for server in servers if server.variant.engine != "vllm"), None)
    if server is None:
        raise BenchError(
            f"{servers[0].url}: a vLLM server does not tell its model's configuration; name one of Fathom or "
            "SGLang with the same model beside it"
        )
    path = _ask(server, "/model_info", lambda answer: str(answer["model_path"]))
    config = _config(path)
    experts = any(config.get(name) for name in EXPERTS)
    try:
        return shape_from(config), experts
    except KeyError as error:
        raise BenchError(f"{server.url}: the configuration of {path} has no {error}") from None


def _config(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    try:
        if file.is_file():
            config = json.loads(file.read_text())
            return of_text(config)
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(path).get_text_config().to_dict()
    except (OSError, ValueError) as error:
        raise BenchError(
            f"the configuration of the server's model {path} cannot be read here: {error}"
        ) from None
