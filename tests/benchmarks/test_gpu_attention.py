"""What of the GPU's cases can be looked at without one, and without Triton's interpreter."""

import sys
from types import SimpleNamespace

import numpy as np
import torch

from fathom.benchmarks import gpu_attention
from fathom.benchmarks.gpu_inputs import Inputs, Pool, Setting
from fathom.kernels.extend_attention import extend_attention_reference


class Wrapper:
    """FlashInfer's over requests whose keys lie in one piece, with the reference for its kernels."""

    def __init__(self, workspace, layout, backend):
        assert (workspace.dtype, layout, backend) == (torch.uint8, "NHD", "auto")

    def plan(self, queries, entries, heads, kv_heads, head_dim, **options):
        assert queries.dtype == entries.dtype == torch.int32 and options["causal"]
        self.bounds, self.scale = (
            list(zip(queries, queries[1:], entries, entries[1:], strict=False)),
            options["sm_scale"],
        )

    def run(self, query, keys, values, out):
        for first, last, begin, end in self.bounds:
            own = keys[begin:end].float(), values[begin:end].float()
            out[first:last] = extend_attention_reference(query[first:last], *own, self.scale)[0]


def test_keys_that_were_brought_together(monkeypatch):
    module = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(prefill=module))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", module)
    s = Setting(4, 2, 16, 16, (40, 7), torch.float32, torch.device("cpu"), 0)
    inputs = Inputs(s)
    pool = Pool(inputs)
    slots = pool.table[1:48, 0].numpy()
    entry, bounds = np.array([0, 40, 47]), np.array([0, 10, 13])
    query, output = inputs.normal(13, 4, 16), torch.full((13, 4, 16), float("nan"))
    gpu_attention._gathered(s, pool, slots, entry, bounds, query, output)()
    for i in range(2):
        own, rows = slice(entry[i], entry[i + 1]), slice(bounds[i], bounds[i + 1])
        keys, values = (held[torch.from_numpy(slots[own]).long()] for held in pool.pair)
        torch.testing.assert_close(
            output[rows], extend_attention_reference(query[rows], keys, values, 16**-0.5)[0]
        )
