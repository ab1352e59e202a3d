"""What needs FlashInfer among the GPU's benchmarks, with PyTorch in its place."""

import pytest
import torch
from flashinfer_wrapper import Ragged, Wrapper

from fathom.benchmarks import gpu_attention
from fathom.benchmarks.gpu_inputs import Setting
from fathom.runtime.sglang_host.attention import flashinfer_prefill


@pytest.mark.parametrize("gathered", [False, True])
def test_prefill_with_and_without_copies(gathered, monkeypatch):
    used = []

    class Made(flashinfer_prefill.FlashInferPrefill):
        def __init__(self, *shape, **options):
            super().__init__(*shape, **options, make=Wrapper, make_ragged=Ragged)
            used.append(self)

    monkeypatch.setattr(flashinfer_prefill, "why_not", lambda *_: "")
    monkeypatch.setattr(flashinfer_prefill, "FlashInferPrefill", Made)
    s = Setting(4, 2, 64, 64, (40, 7), torch.float16, torch.device("cpu"), 0)
    problem = gpu_attention.flashinfer_extend(s, chunk=20, gathered=gathered)
    problem.poison()
    found = problem.call()
    for _, output, expected, tolerance in problem.pairs(found, False):
        torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)
    assert [each.gathered_plans for each in used] == [int(gathered)]
