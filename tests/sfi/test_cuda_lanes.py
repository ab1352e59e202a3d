"""One slow step on two CUDA streams gives the selections and compact buffers of the CPU, in order."""

import numpy as np
import pytest
import torch

from fathom.kernels.two_segment_attention import two_segment_attention
from fathom.runtime.sfi.config import SelectorConfig, SfiConfig
from fathom.runtime.sfi.refresh import CudaLanes, EvidenceRing, InOrder, RefreshExecutor
from fathom.runtime.sfi.step import NOBODY, plan_step, refresh_layer

CONFIG, SELECTOR = SfiConfig(recent=64, selected=100), SelectorConfig()
LAYERS, HEADS, KV_HEADS, DIM = 9, 4, 2, 32
LENGTHS = [900, 70, 300]


def slow_step(device: str, lanes, captured: bool = False):
    """Two slow requests and a fast one; outputs, chosen indices and compact buffers of all layers, on the CPU.

    Args:
        captured: do it by replaying a graph that was captured with other requests' plans in the buffers.
    """
    torch.manual_seed(0)
    slots, width = sum(LENGTHS) + 9, max(LENGTHS)
    table = torch.stack([torch.randperm(slots)[:width] for _ in LENGTHS]).int().to(device)
    shape = (3 * CONFIG.compact_tokens, KV_HEADS, DIM)
    pool, compact, query = (
        [[torch.randn(size).to(device) for _ in range(count)] for _ in range(LAYERS)]
        for size, count in (((slots, KV_HEADS, DIM), 2), (shape, 2), ((3, HEADS, DIM), 1))
    )
    start, slow = np.arange(3) * CONFIG.compact_tokens, np.array([True, True, False])
    held = np.full(3, CONFIG.compact_tokens)
    step = plan_step(np.arange(3), np.array(LENGTHS), slow, start, held, 2, KV_HEADS, CONFIG).on(device)
    ring = EvidenceRing(4, HEADS, KV_HEADS, 4 * 4 * 3 * width * (HEADS + KV_HEADS), device)
    executor, outputs, chosen = RefreshExecutor(lanes), [], []

    def refresh(layer, evidence):
        buffers = tuple(pool[layer]), tuple(compact[layer])
        chosen.append(refresh_layer(evidence, *buffers, table, step.refresh, CONFIG, SELECTOR).indices)

    def layers(view):
        outputs.clear()
        chosen.clear()
        with executor.step():
            for layer in range(LAYERS):
                evidence = view(executor.acquire())
                buffers = tuple(pool[layer]), tuple(compact[layer])
                outputs.append(
                    two_segment_attention(query[layer][0], *buffers, table, step.plan, 0.125, evidence)[0]
                )
                executor.submit(lambda layer=layer, evidence=evidence: refresh(layer, evidence))

    if not captured:
        layers(lambda slot: ring.view(slot, 2, width))
    else:
        pitch = torch.full((1,), 16, dtype=torch.int32, device=device)
        fixed = step.plan.packed, step.refresh.packed
        told = [tensor.clone() for tensor in fixed]
        step.plan.packed[:] = torch.tensor([0, 0, 1, 0, 0, -1], device=device)
        step.refresh.packed[:] = torch.tensor(NOBODY, device=device).unsqueeze(1)
        layers(lambda slot: ring.captured(slot, 2, pitch))  # compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers(lambda slot: ring.captured(slot, 2, pitch))
        for tensor, value in zip((pitch, *fixed), (width, *told), strict=True):
            tensor.copy_(value) if isinstance(value, torch.Tensor) else tensor.fill_(value)
        graph.replay()
    return [
        torch.stack([x.clone() for x in tensors]).cpu()
        for tensors in (outputs, chosen, [x for pair in compact for x in pair])
    ]


NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@NEEDS_A_GPU
def test_two_streams_equal_the_cpu():
    outputs, chosen, compact = slow_step("cpu", InOrder())
    for _ in range(20):
        got = slow_step("cuda", CudaLanes())
        torch.testing.assert_close(got[0], outputs, atol=1e-4, rtol=1e-4)
        assert torch.equal(got[1], chosen)
        assert torch.equal(got[2], compact)


def test_the_step_selects_something():
    _, chosen, _ = slow_step("cpu", InOrder())
    assert chosen.shape == (LAYERS, 2, KV_HEADS, CONFIG.selected)
    assert (chosen[:, 0] >= 0).all() and int((chosen[:, 1, 0] >= 0).sum(-1).max()) == 70 - 64 - 4


@NEEDS_A_GPU
def test_a_captured_step_equals_the_cpu():
    outputs, chosen, compact = slow_step("cpu", InOrder())
    for _ in range(5):
        got = slow_step("cuda", CudaLanes(), captured=True)
        torch.testing.assert_close(got[0], outputs, atol=1e-4, rtol=1e-4)
        assert torch.equal(got[1], chosen)
        assert torch.equal(got[2], compact)
