"""What prompts of ever new lengths leave in memory: as many ready-made matrix products as the server asks for."""

import os
import subprocess
import sys

import pytest

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from fathom.runtime.sglang_host.layers.cpu_linear import multiplies_bfloat16  # noqa: E402
from fathom.server.serve import ONEDNN_CACHES, PRODUCTS_KEPT  # noqa: E402

# As the server does it: PyTorch is there before the variables are.
GROWTH = """
import os, sys, torch
os.environ.update(dict.fromkeys(sys.argv[2:], sys.argv[1]))
torch.set_num_threads(1)
packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(512, 512, dtype=torch.bfloat16), 1024)

def resident_after(lengths):
    for rows in lengths:
        x = torch.zeros(rows, 512, dtype=torch.bfloat16)
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident_after(range(33, 183))
print((resident_after(range(183, 483)) - before) >> 20)
"""


def growth(*names):
    """MiB that products of 300 lengths leave after 150 others."""
    environment = {name: value for name, value in os.environ.items() if name not in ONEDNN_CACHES}
    command = [sys.executable, "-c", GROWTH, PRODUCTS_KEPT, *names]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="oneDNN has no bfloat16 products for this processor")
def test_new_lengths_take_memory_only_until_the_caches_are_full():
    without = growth()
    assert without > 100
    assert growth(*ONEDNN_CACHES) < without / 3  # memory in pieces; with AMX each product takes more
