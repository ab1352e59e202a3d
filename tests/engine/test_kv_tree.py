"""The prefix cache counts what it could give back, by depth, and seldom asks the device for a slot."""

import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from fathom.runtime.sglang_host.memory import kv_tree
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.kv_tree import DepthRadixCache

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


@pytest.mark.parametrize("leaned", [0, 1000])
def test_a_full_cache_of_many_leaves_is_not_ranked_for_every_token(leaned, monkeypatch):
    """Each token of a decode step asks for room; the oldest leaves go first, and hardly more than are asked for and
    those on which drafts lean, whose slots stay."""
    leaves, ranked, freed = 2000, [], []
    pool = SimpleNamespace(in_use=np.zeros(SPANS, np.int64))
    memory = SimpleNamespace(spans=SPANS, shared=SimpleNamespace(depth=lambda page: SPANS), pool=pool)
    allocator = SimpleNamespace(
        device="cpu",
        memory=memory,
        seeks_slots=True,
        virtual_size=lambda: 2 * max(len(freed) - leaned, 0),
        free_segment=lambda slots, start_pos: freed.append(int(slots[0]) // 2),
    )
    tree = DepthRadixCache(CacheInitParams(False, None, allocator, 1))
    for leaf in range(leaves):
        key = RadixKey(array("q", [leaf, leaf]), "dense")
        tree.insert(InsertParams(key=key, value=torch.tensor([2 * leaf, 2 * leaf + 1])))
    rank = tree.eviction_strategy.get_priority
    monkeypatch.setattr(
        tree.eviction_strategy, "get_priority", lambda node: (ranked.append(node), rank(node))[1]
    )
    while tree.evictable_size_:
        most = max(1, tree.evictable_size_ // 100) + 1 + 2 * max(leaned - len(freed), 0)
        assert 1 <= tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted <= most
    assert freed == list(range(leaves))
    assert len(ranked) < 200 * leaves


def trees(size):
    memory = SimpleNamespace(spans=SPANS, shared=SimpleNamespace(depth=lambda page: SPANS))
    allocator = SimpleNamespace(device="cpu", memory=memory)
    return [kind(CacheInitParams(False, None, allocator, size)) for kind in (DepthRadixCache, RadixCache)]


def shape(node):
    return (
        (node.key.token_ids.tolist(), node.value.tolist()) if node.parent else None,
        (node.priority, node.hit_count, node.lock_ref),
        sorted(map(shape, node.children.values()), key=repr),
    )


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_prompts_are_put_in_and_found_as_in_sglangs_tree(seed, size):
    draw, fresh = random.Random(seed), iter(range(1, 10_000))
    both = trees(size)
    for _ in range(150):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(0, 9))]
        raw = array("q", np.repeat(tokens, size).tolist() + [9] * draw.randrange(size))
        policy, limit = draw.choice([None, "a"]), draw.choice([None, len(raw) - len(raw) // 3])
        keys = [RadixKey(raw[:], policy, limit=limit) for _ in both]
        if draw.random() < 0.5:
            slots = torch.tensor([next(fresh) * size + i for _ in tokens for i in range(size)])
            options = {"priority": draw.randrange(3), "chunked": draw.random() < 0.3}
            found = [
                tree.insert(InsertParams(key=key, value=slots[: len(key)], **options)).prefix_len
                for tree, key in zip(both, keys, strict=True)
            ]
        else:
            found = [
                tree.match_prefix(MatchPrefixParams(key=key)).device_indices.tolist()
                for tree, key in zip(both, keys, strict=True)
            ]
        assert found[0] == found[1]
        assert shape(both[0].root_node) == shape(both[1].root_node)
        used = [sorted(leaves, key=lambda node: node.last_access_time) for leaves in map(leaves_of, both)]
        assert [shape(node) for node in used[0]] == [shape(node) for node in used[1]]


def leaves_of(tree):
    nodes, leaves = [tree.root_node], []
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        if node.parent and not node.children:
            leaves.append(node)
    return leaves


def test_a_prompt_of_many_chunks_is_not_copied_at_each_of_them(monkeypatch):
    tree, chunk, chunks, copied = trees(1)[0], 64, 100, []
    get = RadixKey.__getitem__
    monkeypatch.setattr(
        RadixKey, "__getitem__", lambda key, part: (found := get(key, part), copied.append(len(found)))[0]
    )
    prompt = array("q", range(chunk * chunks))
    for end in range(chunk, len(prompt) + 1, chunk):
        key = RadixKey(prompt[:end])
        assert tree.insert(InsertParams(key=key, value=torch.arange(end))).prefix_len == end - chunk
        assert len(tree.match_prefix(MatchPrefixParams(key=key)).device_indices) == end
    assert sum(copied) <= 2 * len(prompt)


class Request:
    """What the cache asks of a request that has ended, dense, after a step that was launched too far."""

    def __init__(self, prompt, answer):
        self.origin_input_ids, self.output_ids = array("q", prompt), array("q", answer)
        self.extra_key = self.cache_salt = self.last_node = None
        self.priority = 0
        self.sampling_params = SimpleNamespace(custom_params=None)
        self.kv = SimpleNamespace(req_pool_idx=0, cache_protected_len=0)


@pytest.mark.parametrize(
    ("size", "prompt", "answer"), [(1, 9, 1), (4, 9, 1), (4, 8, 1), (4, 7, 3), (1, 5, 4)]
)
def test_the_last_token_of_an_answer_is_cached_for_nobody(size, prompt, answer):
    """Its KV may be computed after the request has ended, or never."""
    freed, length = [], prompt + answer
    memory = SimpleNamespace(
        spans=SPANS, shared=SimpleNamespace(depth=lambda page: SPANS), settled=lambda row: False
    )
    allocator = SimpleNamespace(
        device="cpu",
        memory=memory,
        free=lambda slots: freed.append(slots.tolist()),
        free_segment=lambda slots, start_pos: freed.append(slots.tolist()),
        free_segments=lambda segments: freed.extend(slots.tolist() for slots, _ in segments),
    )
    rows = torch.arange(4 * size, 4 * size + 100)[None]
    tree = DepthRadixCache(CacheInitParams(False, SimpleNamespace(req_to_token=rows), allocator, size))
    request = Request(range(prompt), range(prompt, length))
    request.last_node = tree.root_node
    tree.inc_lock_ref(tree.root_node)
    tree.cache_finished_req(request, True, kv_len_to_handle=length)
    found = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", range(length)), None)))
    cached = (length - 1) // size * size
    assert found.device_indices.tolist() == rows[0, :cached].tolist()
    gone = [slot for slots in freed for slot in slots]
    assert len(gone) == len(set(gone))
    assert {slot // size for slot in gone} == {slot // size for slot in rows[0, cached:length].tolist()}


COPIES_BY_SLOT = (
    *("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv"),
    "enable_unified_cache_external_linker",
)


def test_which_cache_is_built(monkeypatch):
    """Ours over depth pages, where there is to be one, and without what copies KV by slot; else SGLang's."""
    monkeypatch.setattr(kv_tree, "_default_factory", lambda context: "SGLang's")
    memory, spans = dict.fromkeys(COPIES_BY_SLOT, False), SimpleNamespace(spans=SPANS)
    monkeypatch.setattr(kv_tree, "get_memory", lambda: SimpleNamespace(**memory))
    depth_pages = DepthAllocator.__new__(DepthAllocator)
    depth_pages.memory, depth_pages.device = spans, "cpu"
    for allocator, disabled in ((depth_pages, True), (SimpleNamespace(device="cpu"), False)):
        params = CacheInitParams(disabled, None, allocator, 1)
        context = SimpleNamespace(params=params, disable_radix_cache=disabled)
        assert kv_tree.factory(context) == "SGLang's"
    context.params = CacheInitParams(False, None, depth_pages, 1)
    tree = kv_tree.factory(context)
    assert isinstance(tree, DepthRadixCache)
    for cache, found in ((tree, tree), (SimpleNamespace(inner=tree), tree), (SimpleNamespace(), None)):
        assert kv_tree.tree_of(cache) is found  # sessions wrap it
    for name in COPIES_BY_SLOT:
        memory[name] = True
        with pytest.raises(ValueError, match="copies KV by slot"):
            kv_tree.factory(context)
        memory[name] = False
