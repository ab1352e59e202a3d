"""Which adapter a request's model names, and how long one is in use."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.lora.lora_registry import LoRARef

from fathom.server.adapters import Adapters, adapter_of


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
        with pytest.raises(ValueError, match="not loaded: legal"):
            await adapters.acquire("legal")
        assert await adapters.acquire(["tone", None]) == [tone.lora_id, None]

    asyncio.run(scenario())
