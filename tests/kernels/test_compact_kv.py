"""Compaction against its reference; its Triton kernel is run by test_window_scores.py's interpreter process."""

import pytest
import torch

from fathom.kernels.compact_kv import compact_kv, compact_kv_reference


def pool(dtype=torch.float32, slots=60, kv_heads=3):
    torch.manual_seed(1)
    return torch.randn(slots, kv_heads, 16).to(dtype), torch.randn(slots, kv_heads, 8).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kept", [0, 1, 29])
def test_equals_reference(dtype, index, kept):
    keys, values = pool(dtype)
    want = keys.clone(), values.clone()
    source = torch.stack([torch.randperm(30)[:kept] for _ in range(3)]).to(index)
    destination = (torch.randperm(30)[:kept] + 30).to(index)
    compact_kv_reference(*want, source, destination)
    compact_kv(keys, values, source, destination)
    assert torch.equal(keys, want[0]) and torch.equal(values, want[1])


def test_layer_views_of_a_wider_buffer():
    """A layer's buffer may be a strided view: tokens of several layers interleaved in one page."""
    wide = torch.randn(40, 2, 3, 16)
    before, keys, values = wide.clone(), wide[:, 0], wide[:, 1]
    source, destination = torch.tensor([[1, 2], [3, 4], [1, 9]]), torch.tensor([30, 31])
    compact_kv(keys, values, source, destination)
    for head, slots in enumerate(source.tolist()):
        assert torch.equal(wide[30:32, :, head], before[slots, :, head])
    assert torch.equal(wide[:30], before[:30]) and torch.equal(wide[32:], before[32:])


def test_what_could_overwrite_itself_is_refused():
    keys, values = pool()
    source = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for destination, message in (([6, 50], "overlap"), ([50, 50], "same destination")):
        with pytest.raises(ValueError, match=message):
            compact_kv(keys, values, source, torch.tensor(destination))
    with pytest.raises(ValueError, match="do not fit"):
        compact_kv(keys, values, source[:2], torch.tensor([50, 51]))


def test_a_slot_outside_the_pool_is_refused():
    keys, values = pool()
    before = keys.clone(), values.clone()
    inside, outside = torch.tensor([[1], [2], [3]]), torch.tensor([[1], [60], [3]])
    for source, destination in ((outside, torch.tensor([50])), (inside, torch.tensor([-1]))):
        with pytest.raises(IndexError, match=r"0 \.\. 59"):
            compact_kv(keys, values, source, destination, disjoint=True)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


@pytest.mark.parametrize("kept", [31, 32, 33, 200])
def test_many_entries_and_heads(kept):
    keys, values = pool(torch.bfloat16, slots=500, kv_heads=8)
    want = keys.clone(), values.clone()
    source = torch.stack([torch.randperm(250)[:kept].sort().values for _ in range(8)])
    destination = torch.randperm(250)[:kept] + 250
    compact_kv_reference(*want, source, destination)
    compact_kv(keys, values, source, destination, disjoint=True)
    assert torch.equal(keys, want[0]) and torch.equal(values, want[1])


def test_heads_that_are_no_whole_lines_apart_are_refused():
    keys, values = (torch.zeros(60, 3, 24)[..., :16] for _ in range(2))
    with pytest.raises(ValueError, match="whole lines"):
        compact_kv(keys, values, torch.tensor([[1], [2], [3]]), torch.tensor([50]))
