"""Which adapter a request's model names, and how long one is in use."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from fathom.server.requests.adapters import Adapters, Unloaded, adapter_of
from fathom.server.tokenizer_manager import FathomTokenizerManager


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("", None),
        ("served", None),
        ("org/served:free", None),  # the served model's own name
        ("anything", None),
        ("legal", "legal"),
        ("served:legal", "legal"),
        ("anything: legal ", "legal"),
        ("served:", None),
        ("served:unknown", "unknown"),  # which is then refused
        ("a:b", "a:b"),  # an adapter's own name before its parts
    ],
)
def test_names(model, adapter):
    served = "org/served:free" if model.startswith("org") else "served"
    known = {"legal": 1, "a:b": 2}
    assert adapter_of(None, model, served, known) == adapter
    for path in ("other", ["other", None]):
        assert adapter_of(path, model, served, known) == (model if model in known else path)


def test_an_adapter_is_in_use_until_its_last_request_has_ended():
    """Whether it is one of a batch or alone; a count that was lost holds nothing."""
    legal, tone = (LoRARef(lora_name=name, lora_path=name) for name in ("legal", "tone"))
    alone, batch = (SimpleNamespace(lora_id=x) for x in (legal.lora_id, [None, legal.lora_id, tone.lora_id]))
    running = [alone, batch, SimpleNamespace()]
    adapters = Adapters([legal, tone], lambda: running)

    async def scenario():
        await adapters.acquire("legal")  # by a request that was refused
        assert await adapters.unregister("legal") == legal.lora_id
        waiting = asyncio.create_task(adapters.wait_for_unload(legal.lora_id))
        for ended in (alone, batch):
            await asyncio.sleep(0.1)
            assert not waiting.done()
            running.remove(ended)
            await adapters.release(legal.lora_id)
        await asyncio.wait_for(waiting, 5)
        await adapters.release(legal.lora_id)  # later than all
        with pytest.raises(Unloaded, match="legal"):
            await adapters.acquire("legal")
        assert legal.lora_id not in adapters._counters and tone.lora_id in adapters._counters
        assert await adapters.acquire(["tone", None]) == [tone.lora_id, None]
        assert await adapters.acquire(["tone"]) == [tone.lora_id]
        with pytest.raises(Unloaded, match="tone") as gone:
            await adapters.unregister("tone")
            await adapters.acquire([None, "tone", "legal"])
        assert "['legal', 'tone']" in str(gone.value)

    asyncio.run(scenario())


def test_no_adapter_is_unloaded_between_its_look_up_and_its_use():
    legal, tone = (LoRARef(lora_name=name, lora_path=name) for name in ("legal", "tone"))
    request = SimpleNamespace(lora_path=["legal", None, "tone"], lora_id=None)
    running = [request]
    adapters = Adapters([legal, tone], lambda: running)

    async def ask():
        request.lora_id = await adapters.acquire(request.lora_path)

    async def unload():
        await adapters.wait_for_unload(await adapters.unregister("tone"))

    async def scenario():
        asking, unloading = asyncio.create_task(ask()), asyncio.create_task(unload())
        await asking
        await asyncio.sleep(0.1)
        assert request.lora_id == [legal.lora_id, None, tone.lora_id] and not unloading.done()
        running.remove(request)
        await asyncio.wait_for(unloading, 5)

    asyncio.run(scenario())


def test_a_request_whose_adapter_goes_before_its_use_has_it_loaded_again(monkeypatch):
    """Also where all of its adapters were there when it came."""
    times = []

    async def resolve(self, obj):
        times.append(self._loads_adapters.locked())
        if len(times) < 3:
            raise Unloaded("legal")

    monkeypatch.setattr(TokenizerManager, "_resolve_lora_path", resolve)
    manager = FathomTokenizerManager.__new__(FathomTokenizerManager)
    manager._loads_adapters, manager.lora_ref_cache = asyncio.Lock(), {}
    manager.lora_registry = Adapters([LoRARef(lora_name="legal", lora_path="legal")], list)
    asyncio.run(manager._resolve_lora_path(SimpleNamespace(lora_path="legal")))
    assert times == [False, True, True]


def test_room_is_made_by_an_adapter_that_nobody_asks_for():
    """Where there is one that may go; else by the least recently used."""
    refs = [
        LoRARef(lora_name=name, lora_path=name, pinned=name == "pinned") for name in ("old", "pinned", "new")
    ]
    running = [SimpleNamespace(lora_path=["old", None]), SimpleNamespace(lora_path=None), SimpleNamespace()]
    adapters = Adapters(refs, lambda: running)

    async def scenario():
        assert await adapters.lru_lora_name(exclude_pinned=True) == "new"
        assert await adapters.lru_lora_name() == "pinned"
        running.append(SimpleNamespace(lora_path="new"))
        assert await adapters.lru_lora_name(exclude_pinned=True) == "old"
        await adapters.unregister("old")
        await adapters.unregister("new")
        running.append(SimpleNamespace(lora_path="pinned"))
        assert await adapters.lru_lora_name() == "pinned"
        assert await adapters.lru_lora_name(exclude_pinned=True) is None

    asyncio.run(scenario())


def test_what_is_loaded_already_waits_for_no_loading(monkeypatch):
    """Nor do prompts of a batch that want no adapter."""
    waited = []

    async def resolve(self, obj):
        waited.append(self._loads_adapters.locked())

    monkeypatch.setattr(TokenizerManager, "_resolve_lora_path", resolve)
    manager = FathomTokenizerManager.__new__(FathomTokenizerManager)
    manager._loads_adapters, manager.lora_ref_cache = asyncio.Lock(), {}
    manager.lora_registry = Adapters([LoRARef(lora_name="legal", lora_path="legal")], list)
    for path in (None, "legal", [None, "legal"], [None, None], ["legal", "tone"]):
        asyncio.run(manager._resolve_lora_path(SimpleNamespace(lora_path=path)))
    assert waited == [False, False, False, False, True]
