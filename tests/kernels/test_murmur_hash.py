"""The vectorised hash against MurmurHash3 as it is defined, block by block."""

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.drawing import murmur3_32

from fathom.kernels.murmur_hash import murmur_hash32


def test_the_definition_gives_published_values():
    assert murmur3_32(struct.unpack("<I", b"test")) == 0xBA6BD213
    assert murmur3_32(()) == 0


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31 - 1), column=st.integers(0, 2**31 - 1))
def test_hash_equals_the_definition(seed, position, column):
    got = murmur_hash32(torch.tensor([seed]), torch.tensor([position]), torch.tensor([column]))
    assert got.tolist() == [[murmur3_32((seed & 0xFFFFFFFF, seed >> 32, position, column))]]


def test_rows_and_columns_are_independent():
    seeds, positions, columns = torch.tensor([1, 2]), torch.tensor([5, 9]), torch.arange(7)
    got = murmur_hash32(seeds.to(torch.uint64), positions, columns)
    assert got.shape == (2, 7)
    assert got[1, 3] == murmur_hash32(seeds[1:], positions[1:], columns[3:4])[0, 0]
    assert len(set(got.flatten().tolist())) == 14
