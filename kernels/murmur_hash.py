"""MurmurHash3 (x86, 32 bit) of (seed, position, column): the noise behind seeded sampling, in plain PyTorch.

SGLang's own version is a Triton kernel, and on a CPU an operator of ``sgl_kernel``, which no package index has for
plain CPUs. Same hash, so a seed gives the same sample.
"""

import torch

_MASK = 0xFFFFFFFF


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate_left((block * 0xCC9E2D51) & _MASK, 15)
    state = _rotate_left(state ^ ((block * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash of the 16 bytes (seed, position, column), little-endian, with hash seed 0.

    Args:
        seed: [rows] 64-bit integers; positions: [rows] integers; columns: [cols] integers.

    Returns:
        [rows, cols] int64 with values in [0, 2**32). Products wrap around in int64, which leaves their low 32 bits.
    """
    seed = seed.to(torch.int64).unsqueeze(1)
    state = _mix(torch.zeros_like(seed), seed & _MASK)
    state = _mix(state, (seed >> 32) & _MASK)
    state = _mix(state, positions.to(torch.int64).unsqueeze(1) & _MASK)
    state = _mix(state, columns.to(torch.int64).unsqueeze(0) & _MASK)
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)
