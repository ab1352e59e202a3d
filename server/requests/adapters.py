"""LoRA adapters: which one a request asks for, and when nobody uses one any more."""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from sglang.srt.lora.lora_registry import LoRARegistry

LOOK_AGAIN_SECONDS = 0.02
OF_TENSORS = "__tensor__"
"""SGLang's path of an adapter that was loaded from tensors."""


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


def of_tensors(adapters: Mapping[str, Any]) -> set[str]:
    """Which adapters came over HTTP: SGLang would look for a folder, or a repository, that their path names.

    Args:
        adapters: SGLang's references to all that were ever loaded, by name.
    """
    return {name for name, adapter in adapters.items() if adapter.lora_path == OF_TENSORS}


class Unloaded(ValueError):
    """Adapters were unloaded between their loading and their use."""


class Adapters(LoRARegistry):
    """SGLang's registry, which waits with unloading an adapter until the requests that use it have ended.

    SGLang counts them, and loses count of requests that fail before they reach the scheduler, or are ended while
    they wait there: the adapter is never unloaded then, and whoever asks for it later waits for ever.

    Args:
        paths: SGLang's references to adapters that are loaded at start, or None.
        requests: those that have not ended: objects with the ``lora_path`` that they ask for, and the ``lora_id``
            that they use as soon as it is known.
    """

    def __init__(self, paths: list[Any] | None, requests: Callable[[], Iterable[Any]]) -> None:
        super().__init__(paths)
        self._requests = requests

    async def acquire(self, lora_name: Any) -> Any:
        """The id of an adapter, or those of a list with None for the model alone.

        Nothing else runs between the look-up and the return: an adapter that is unloaded meanwhile would not find
        the request among those that use it.

        Raises:
            Unloaded: naming those that are not loaded.
        """
        names = lora_name if isinstance(lora_name, list) else [lora_name]
        if missing := await self.get_unregistered_loras({name for name in names if name is not None}):
            raise Unloaded(
                f"the adapters {sorted(missing)} were unloaded before the request could use them; ask again"
            )
        ids = [None if name is None else self._registry[name].lora_id for name in names]
        return ids if isinstance(lora_name, list) else ids[0]

    async def lru_lora_name(self, exclude_pinned: bool = False) -> str | None:
        """The least recently used adapter of those that nobody asks for, if there are any: it need not be waited
        for."""
        wanted = {name for request in self._requests() for name in each(request, "lora_path")}
        for name, adapter in self._registry.items():
            if name not in wanted and not (exclude_pinned and adapter.pinned):
                return name
        return await super().lru_lora_name(exclude_pinned)

    async def release(self, lora_id: Any) -> None:
        """Nothing: a request that has ended is not among ``requests``."""

    async def wait_for_unload(self, lora_id: str) -> None:
        while any(lora_id in each(request, "lora_id") for request in self._requests()):
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        del self._counters[lora_id]


def each(request: Any, member: str) -> list[str | None]:
    """What a request says of its adapter, or one that is a batch of them of each."""
    found = getattr(request, member, None)
    return found if isinstance(found, list) else [found]
