"""The kernel that keeps evidence of bfloat16 keys: what it takes, and its values in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch

from fathom.kernels import segments_by_warp

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "value_dim", "taken"),
    [
        (BF16, 4, 128, 128, True),
        (BF16, 1, 64, 128, True),
        (BF16, 7, 128, 64, True),
        (BF16, 8, 128, 128, True),
        (BF16, 9, 128, 128, False),
        (BF16, 4, 256, 256, False),
        (BF16, 4, 128, 80, False),
        (BF16, 4, 32, 64, False),
        (torch.float16, 4, 128, 128, False),
        (torch.float32, 4, 128, 128, False),
    ],
)
def test_what_it_takes(dtype, group, head_dim, value_dim, taken):
    assert segments_by_warp.takes(torch.device("cpu"), dtype, group, head_dim, value_dim) == taken


@pytest.mark.parametrize(
    ("kib", "taken"),
    [(228, True), (194, False), (164, False), (100, False)],  # 9.0 and 10.0; none; 8.0; 8.9 and 12.0
)
def test_three_programs_must_fit(kib, taken, monkeypatch):
    found = SimpleNamespace(shared_memory_per_multiprocessor=kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert segments_by_warp.takes(torch.device("cuda"), BF16, 4, 128, 128) == taken


def test_in_the_interpreter(interpret):
    assert "9 comparisons" in interpret("interpret_segments_by_warp.py")
