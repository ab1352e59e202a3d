"""Attention over page tables: Triton's kernels in its interpreter, the references against PyTorch, splits."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fathom.kernels.extend_attention import merge_segments
from fathom.kernels.key_shares import pick_pieces
from fathom.kernels.paged_decode import paged_decode_reference
from fathom.kernels.paged_extend import MAX_SPLITS, paged_extend_reference, pick_splits


def test_triton_kernels_in_the_interpreter(interpret):
    assert interpret("interpret_paged_attention.py") == "7 decode and 5 extend cases\n"


def test_references_are_pytorchs_attention():
    """Eight requests' tokens in one page of the table, and as new tokens over a prefix."""
    torch.manual_seed(0)
    keys, values = torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    slots = torch.randperm(40)[:30]
    table, rows = slots.int().unsqueeze(0), torch.tensor([0])
    query = torch.randn(7, 6, 16)
    k, v = keys[slots].transpose(0, 1), values[slots].transpose(0, 1)

    def attend(q, visible):
        mask = torch.arange(30) < visible
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)

    one = query[:1]
    got, lse = paged_decode_reference(one, keys, values, table, rows, torch.tensor([30]), 0.3)
    torch.testing.assert_close(got, attend(one.transpose(0, 1), torch.tensor(30)).transpose(0, 1))
    scores = torch.einsum("hd,hnd->hn", one[0], k.repeat_interleave(3, 0)) * 0.3
    torch.testing.assert_close(lse[0], scores.exp().sum(-1).log())

    own = slots[23:]
    arguments = keys[own], values[own], keys, values, table, rows, torch.tensor([23]), torch.tensor([0, 7])
    got, lse = paged_extend_reference(query, *arguments, 0.3)
    want = attend(query.transpose(0, 1), torch.arange(24, 31).unsqueeze(1)).transpose(0, 1)
    torch.testing.assert_close(got, want)

    # Their log-sum-exps merge: the last token's prefix and its own part are its attention over everything.
    prefix = paged_decode_reference(query[6:], keys, values, table, rows, torch.tensor([23]), 0.3)
    rest = table[:, 23:]
    suffix = paged_decode_reference(query[6:], keys, values, rest, rows, torch.tensor([7]), 0.3)
    merged, merged_lse = merge_segments(*prefix, *suffix)
    torch.testing.assert_close(merged, got[6:])
    torch.testing.assert_close(merged_lse, lse[6:])


def test_a_request_without_keys_merges_as_nothing():
    keys = torch.randn(4, 1, 8)
    query, table = torch.randn(1, 1, 8), torch.zeros(1, 4, dtype=torch.int32)
    empty = paged_decode_reference(query, keys, keys, table, torch.tensor([0]), torch.tensor([0]), 1.0)
    assert empty[0].eq(0).all() and empty[1].isneginf().all()
    full = paged_decode_reference(query, keys, keys, table, torch.tensor([0]), torch.tensor([4]), 1.0)
    merged = merge_segments(*full, *empty)
    assert torch.equal(merged[0], full[0]) and torch.equal(merged[1], full[1])


@pytest.mark.parametrize(
    ("programs", "length", "processors", "splits"),
    [
        (8, 131072, 132, 33),  # one request of Llama-3.1-8B on an H100: two programs per processor
        (8 * 64, 131072, 132, 1),
        (8, 300, 132, 2),  # no split below 256 keys
        (1, 131072, 132, MAX_SPLITS),
        (8, 0, 132, 1),
    ],
)
def test_splits(programs, length, processors, splits):
    assert pick_splits(programs, length, processors) == splits


@pytest.mark.parametrize(
    ("kv_heads", "each", "pieces"),
    [
        (8, None, 66),  # of Llama-3.1-8B on an H100: four programs per processor
        (1, None, 528),
        (8, 3, 49),  # 392 programs of 396, not 400
        (5, 2, 52),
        (600, 4, 1),
    ],
)
def test_a_decode_launch_is_cut_by_its_shape(kv_heads, each, pieces):
    assert pick_pieces(kv_heads, 132, each) == pieces
