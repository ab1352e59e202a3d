"""LoRA adapters: which one a request asks for, and when nobody uses one any more."""

import asyncio
from collections.abc import Callable, Container, Iterable
from typing import Any

from sglang.srt.lora.lora_registry import LoRARegistry

LOOK_AGAIN_SECONDS = 0.02


def adapter_of(path: Any, model: str, served: str, adapters: Container[str]) -> Any:
    """The adapter that a request asks for, or one for each of its prompts; None for the served model alone.

    SGLang takes ``model:adapter``, on the chat and completions routes, and lists adapters by their own names, which
    are understood here too, on any route. What ``model`` says comes before ``lora_path``, as in SGLang.

    Args:
        path: its ``lora_path``; model: its ``model``.
        served: the served model's name; adapters: names of all that were ever loaded.
    """
    if model in adapters:
        return model
    if path is not None or model == served:
        return path
    return model.partition(":")[2].strip() or None


class Adapters(LoRARegistry):
    """SGLang's registry, which waits with unloading an adapter until the requests that use it have ended.

    SGLang counts them, and loses count of requests that fail before they reach the scheduler, or are ended while
    they wait there: the adapter is never unloaded then, and whoever asks for it later waits for ever.

    Args:
        paths: SGLang's references to adapters that are loaded at start, or None.
        requests: those that have not ended: objects with the ``lora_id`` that they use.
    """

    def __init__(self, paths: list[Any] | None, requests: Callable[[], Iterable[Any]]) -> None:
        super().__init__(paths)
        self._requests = requests

    async def release(self, lora_id: Any) -> None:
        """Nothing: a request that has ended is not among ``requests``."""

    async def wait_for_unload(self, lora_id: str) -> None:
        while any(lora_id in used_by(request) for request in self._requests()):
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        del self._counters[lora_id]


def used_by(request: Any) -> list[str | None]:
    """The ids of the adapters of a request, or of a batch of them."""
    found = getattr(request, "lora_id", None)
    return found if isinstance(found, list) else [found]
