"""The LoRA backend for CPUs: which rows an adapter has, and what it adds to them."""

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

from fathom.runtime.sglang_host.layers.cpu_lora import CpuLoRABackend, Unpinned, adapter_rows

SLOTS, MOST = 4, 5
RANKS, SCALES = [0, 3, 5, 1], [0.0, 0.5, 2.0, 1.5]
RUNS = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 3)), min_size=1, max_size=8)


def owners_of(runs):
    return [slot for slot, count in runs for _ in range(count)]


def backend_of(runs):
    backend = CpuLoRABackend(SLOTS, torch.device("cpu"), server_args=None)
    backend.batch_info = adapter_rows(*zip(*runs, strict=True), RANKS, SCALES)
    return backend


@given(RUNS)
def test_each_row_has_one_adapter(runs):
    """Or none; those of an adapter come together, however they lie."""
    found, owners = adapter_rows(*zip(*runs, strict=True), RANKS, SCALES), owners_of(runs)
    assert found.expected_tokens == len(owners)
    got = [0] * len(owners)
    for adapter in found.adapters:
        assert (adapter.rank, adapter.scale) == (RANKS[adapter.slot], SCALES[adapter.slot])
        for row in torch.arange(len(owners))[adapter.rows].tolist():
            assert got[row] == 0
            got[row] = adapter.slot
    assert got == owners
    assert len({adapter.slot for adapter in found.adapters}) == len(found.adapters)


@given(RUNS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_products_are_those_of_each_row(runs, dtype):
    """Three projections of different widths in one matrix, two, one, and a look-up."""
    owners, backend = owners_of(runs), backend_of(runs)
    edges, width = torch.tensor([0, 4, 6, 9]), 7
    x, base = (torch.randn(len(owners), n).to(dtype) for n in (width, 9))
    a, b = torch.randn(SLOTS, 3 * MOST, width).to(dtype), torch.randn(SLOTS, 9, MOST).to(dtype)

    def expected(parts):
        want = base[:, : parts[-1]].double().clone()
        for row, slot in enumerate(owners):
            rank = RANKS[slot]
            for i, (begin, end) in enumerate(pairwise(parts)):
                low = a[slot, i * rank : (i + 1) * rank].double() @ x[row].double()
                want[row, begin:end] += SCALES[slot] * b[slot, begin:end, :rank].double() @ low
        return want

    atol, rtol = (1e-4, 1e-4) if dtype == torch.float32 else (0.3, 0.03)

    def check(got, parts):
        torch.testing.assert_close(got.double(), expected(parts), atol=atol, rtol=rtol)

    check(backend.run_qkv_lora(x, a, b, output_offset_cpu=edges, base_output=base.clone()), [0, 4, 6, 9])
    two = torch.tensor([0, 4, 8])
    output = base[:, :8].clone()
    check(backend.run_gate_up_lora(x, a, b, output_offset_cpu=two, base_output=output), [0, 4, 8])
    low = backend.run_lora_a_sgemm(x, a[:, :MOST])
    assert all(not low[row, RANKS[slot] :].any() for row, slot in enumerate(owners))
    check(backend.run_lora_b_sgemm(low, b, base_output=base.clone()), [0, 9])
    ids = torch.randint(width, (len(owners),))
    looked_up = backend.run_lora_a_embedding(ids, a[:, :MOST], width)
    for row, slot in enumerate(owners):
        assert torch.equal(looked_up[row, : RANKS[slot]], a[slot, : RANKS[slot], ids[row]])
        assert not looked_up[row, RANKS[slot] :].any()


def test_the_output_matrix_has_rows_of_its_own():
    """Of prompts those whose logits are wanted; in a decode step, all."""
    backend = CpuLoRABackend(SLOTS, torch.device("cpu"))
    modes = SimpleNamespace(
        is_decode=lambda: False,
        is_extend=lambda: True,
        is_target_verify=lambda: False,
        is_draft_extend_v2=lambda: False,
    )
    batch = SimpleNamespace(
        forward_mode=modes,
        extend_seq_lens_cpu=[3, 2, 4],
        extend_logprob_start_lens_cpu=[1, 2, 0],
        return_logprob=True,
        batch_size=3,
    )
    backend.prepare_lora_batch(batch, [1, 0, 1], RANKS, SCALES)
    (rows,), (wanted,) = backend.batch_info.adapters, backend.lm_head_batch_info.adapters
    assert rows.rows.tolist() == [0, 1, 2, 5, 6, 7, 8] and backend.batch_info.expected_tokens == 9
    assert wanted.rows.tolist() == [0, 1, 3, 4, 5, 6] and backend.lm_head_batch_info.expected_tokens == 7
    batch.return_logprob = False
    backend.prepare_lora_batch(batch, [1, 0, 1], RANKS, SCALES)
    assert backend.lm_head_batch_info.adapters[0].rows.tolist() == [0, 2]
    modes.is_decode, modes.is_extend = lambda: True, lambda: False
    backend.prepare_lora_batch(batch, [1, 1, 0], RANKS, SCALES)
    assert backend.batch_info.adapters[0].rows == slice(0, 2) and backend.lm_head_batch_info is None


def test_nothing_is_pinned_within():
    with Unpinned():
        made = torch.tensor([1, 2], pin_memory=True), torch.zeros(2).pin_memory()
    assert [tensor.is_pinned() for tensor in made] == [False, False]
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError):
            torch.zeros(2).pin_memory()


@pytest.mark.parametrize(
    ("targets", "refused"),
    [({"gate_up_proj", "down_proj"}, True), ({"qkv_proj", "o_proj"}, False), ({"gate_up_proj"}, False)],
)
def test_experts_are_refused(targets, refused):
    """As SGLang decides which layers hold adapters: of experts only where both matrices change."""
    backend = CpuLoRABackend(SLOTS, torch.device("cpu"))
    experts = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(experts)
    for model, has in (
        (torch.nn.Sequential(experts), True),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), False),
    ):
        with pytest.raises(ValueError, match=r"experts .* need a GPU") if refused and has else nullcontext():
            backend.validate_lora_targets(model, targets)
