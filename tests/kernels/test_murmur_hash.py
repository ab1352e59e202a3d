"""The vectorised hash against MurmurHash3 as it is defined, byte by byte."""

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from fathom.kernels.murmur_hash import murmur_hash32

MASK = 0xFFFFFFFF


def murmur3_32(data: bytes, state: int = 0) -> int:
    """MurmurHash3_x86_32 of whole 4-byte blocks (Appleby, public domain definition)."""

    def rotate(x, r):
        return ((x << r) | (x >> (32 - r))) & MASK

    for (block,) in struct.iter_unpack("<I", data):
        state ^= rotate(block * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        state = (rotate(state, 13) * 5 + 0xE6546B64) & MASK
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def test_the_definition_gives_published_values():
    assert murmur3_32(b"test") == 0xBA6BD213
    assert murmur3_32(b"") == 0


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31 - 1), column=st.integers(0, 2**31 - 1))
def test_hash_equals_the_definition(seed, position, column):
    got = murmur_hash32(torch.tensor([seed]), torch.tensor([position]), torch.tensor([column]))
    assert got.tolist() == [[murmur3_32(struct.pack("<QII", seed, position, column))]]


def test_rows_and_columns_are_independent():
    seeds, positions, columns = torch.tensor([1, 2]), torch.tensor([5, 9]), torch.arange(7)
    got = murmur_hash32(seeds.to(torch.uint64), positions, columns)
    assert got.shape == (2, 7)
    assert got[1, 3] == murmur_hash32(seeds[1:], positions[1:], columns[3:4])[0, 0]
    assert len(set(got.flatten().tolist())) == 14
