"""The prefix cache counts what it could give back, by depth, and seldom asks the device for a slot."""

import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from fathom.runtime.sglang_host.kv_tree import DepthRadixCache

SPANS, PAGES = 3, 600
DEPTHS = {"dense": SPANS, "two spans": 2, "nothing": 0}


def evictable(tree, size):
    """[spans] pages behind the nodes that nobody locks: the oracle."""
    found, nodes = np.zeros(SPANS, np.int64), list(tree.root_node.children.values())
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        if node.lock_ref == 0:
            found[: DEPTHS[node.key.extra_key]] += len(node.key) // size
    return found


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_the_nodes(seed, size):
    draw, depth_of, asked = random.Random(seed), {}, []

    def depth(page):
        asked.append(page)
        return depth_of[page]

    memory = SimpleNamespace(spans=SPANS, shared=SimpleNamespace(depth=depth))
    allocator = SimpleNamespace(device="cpu", memory=memory)
    tree = DepthRadixCache(CacheInitParams(False, None, allocator, size))
    locked, fresh = [], iter(range(1, PAGES))
    for _ in range(60):
        policy = draw.choice(list(DEPTHS))
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 5))]
        key = RadixKey(array("q", np.repeat(tokens, size).tolist()), policy)
        if draw.random() < 0.6:
            pages = [next(fresh) for _ in tokens]
            depth_of |= dict.fromkeys(pages, DEPTHS[policy])
            slots = torch.tensor([page * size + i for page in pages for i in range(size)])
            tree.insert(InsertParams(key=key, value=slots))
        elif locked and draw.random() < 0.5:
            tree.dec_lock_ref(locked.pop(draw.randrange(len(locked))))
        else:
            node = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
            tree.inc_lock_ref(node)
            locked.append(node)
        assert tree.evictable_per_span.tolist() == evictable(tree, size).tolist()
    assert 0 < len(asked) <= len(tree.root_node.children)
