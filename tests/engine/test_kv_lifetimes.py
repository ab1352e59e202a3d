"""Requests of all kinds in one small pool, from their first chunk to their end: whose each page is, and its KV."""

import random

import pytest
from kv_walk import ALL, Engine
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fathom.runtime.sglang_host import requests


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_every_page_is_somebodys_and_holds_what_its_key_says(seed, size, monkeypatch):
    engine = Engine(random.Random(f"{seed} {size}"), size, monkeypatch)
    for _ in range(150):
        engine.step()
        engine.look()
    for req in list(engine.running):
        engine.release(req, True)
    engine.look()
    if seed % 2:
        engine.tree.evict(EvictParams(num_tokens=ALL))
    else:
        for part in (engine.tree.reset, engine.table.clear, engine.allocator.clear):
            part()
    engine.look()
    assert engine.memory.pool.free == engine.memory.pool.total
    assert engine.allocator.virtual_size() == engine.allocator.virtual_tokens
    requests._plan.cache_clear()
