"""The layers as SGLang's models really call them reach our kernels, not the native fallback."""

import os
import subprocess
import sys
import types

import pytest
import torch
from noisy import draft_flags
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.rms_norm import rms_norm_reference
from fathom.runtime.sglang_host.layers import cpu_linear
from fathom.runtime.sglang_host.layers.cpu_ops import forward_rms_norm


def layer(weight, **changes):
    def forward_native(*_):
        raise AssertionError("fell back to the native form")

    options = {
        "variance_size_override": None,
        "cast_x_before_out_mul": False,
        "fp32_residual": False,
        "override_orig_dtype": None,
        "hidden_size": len(weight),
        "variance_epsilon": 1e-5,
        "weight": weight,
        "forward_native": forward_native,
    }
    return types.SimpleNamespace(**options | changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_is_told_its_reader_takes_the_kernel(dtype):
    """SGLang's Llama names the linear layer that reads the norm in every call."""
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(n, 256).to(dtype) for n in (640, 640, 1))
    weight = weight[0]
    reader = torch.nn.Linear(256, 8)
    normed, total = forward_rms_norm(layer(weight), x, residual, quant_linear=reader)
    want, want_total = rms_norm_reference(x, weight, 1e-5, residual)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(normed, want, rtol=tolerance, atol=tolerance)
    assert torch.equal(total, want_total)


def test_an_option_that_the_kernel_lacks_takes_the_native_form():
    x, weight = torch.randn(4, 64), torch.ones(64)
    with pytest.raises(AssertionError, match="native"):
        forward_rms_norm(layer(weight, cast_x_before_out_mul=True), x)


def test_pytorch_and_parallel_kernels_share_one_pool_of_threads():
    """In a process of its own: whichever runs first starts the threads."""
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # NumPy and SciPy bring threads of their own
    done = subprocess.run(
        [sys.executable, "-c", ONE_POOL], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr


ONE_POOL = """
import ctypes, os
import torch
torch.set_num_threads(2)
from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.rms_norm import rms_norm, warm_up

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
torch.randn(2048, 2048) @ torch.randn(2048, 2048)
own = threads()
assert own > before
warm_up(torch.float32)
rms_norm(torch.randn(4096, 512), torch.ones(512), 1e-5)
assert threads() == own, f"{threads()} threads; PyTorch's are {own}"
assert torch.get_num_threads() == 2
assert ctypes.CDLL(None).omp_get_max_active_levels() == 1, "regions within regions are off, as PyTorch wants it"
"""


packs = pytest.mark.skipif(
    not cpu_linear.multiplies_bfloat16(), reason="oneDNN has no bfloat16 products here"
)


@pytest.mark.parametrize(
    ("avx512", "products", "taken"),
    [
        (True, True, True),
        (True, False, False),  # Intel from Skylake to Ice Lake
        (False, False, True),  # AVX-NE-CONVERT; with AVX2 alone oneDNN says no by itself
    ],
)
def test_products_that_onednn_would_make_up_are_not_taken(monkeypatch, avx512, products, taken):
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(cpu_linear, "has_bfloat16_products", lambda: products)
    for has in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda has=has: has)
        assert cpu_linear.multiplies_bfloat16() == (taken and has)


@packs
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_give_what_plain_ones_gave(bias):
    torch.manual_seed(1)
    module = linear(48, 80, torch.bfloat16, bias)
    x = torch.randn(37, 96).to(torch.bfloat16)[:, ::2]
    inputs = [x.contiguous(), x[:1].contiguous(), x[:0].contiguous()]
    want = [module(each)[0] for each in inputs]
    assert cpu_linear.pack(module) == 1
    assert module.weight.numel() == 0, "the plain weight takes no memory any more"
    for each, expected in zip(inputs, want, strict=True):
        torch.testing.assert_close(module(each)[0], expected, rtol=2e-2, atol=2e-2)
    assert cpu_linear.pack(module) == 0


def test_float32_weights_stay_as_they_are():
    module = linear(16, 16, torch.float32, bias=False)
    assert cpu_linear.pack(module) == 0
    assert module.weight.shape == (16, 16)


class Model(torch.nn.Module):
    """An embedding, an output matrix, and what SGLang computes logits with.

    Args:
        tied: "" for a matrix of its own, "weight" for one that shares the embedding's weight, "module" for one that
            is the embedding, as in SGLang's Llama and Qwen.
        wide: whether logits are asked for in float32.
    """

    def __init__(self, tied: str, wide: bool, width: int = 48) -> None:
        super().__init__()
        options = {"params_dtype": torch.bfloat16, "enable_tp": False, "use_attn_tp_group": False}
        self.embedding = VocabParallelEmbedding(100, width, **options)
        self.lm_head = self.embedding if tied == "module" else ParallelLMHead(100, width, **options)
        for part in (self.embedding, self.lm_head):
            torch.nn.init.normal_(part.weight)
        if tied == "weight":
            self.lm_head.weight = self.embedding.weight
        self.logits_processor = torch.nn.Module()
        self.logits_processor.use_fp32_lm_head = wide
        self.logits_processor.rl_on_policy_target = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return LogitsProcessor._compute_lm_head(self.logits_processor, hidden, self.lm_head)


@packs
@pytest.mark.parametrize(("tied", "wide"), [("", False), ("weight", False), ("", True)])
def test_the_output_matrix_is_packed_where_nothing_else_reads_it(tied, wide):
    torch.manual_seed(2)
    model = Model(tied, wide)
    hidden = torch.randn(5, 48).to(torch.bfloat16)
    want = model(hidden)
    plain = not tied and not wide
    assert cpu_linear.pack(model) == plain
    assert model.lm_head.weight.numel() == (0 if plain else 128 * 48)
    got = model(hidden)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert model.embedding.weight.shape == (128, 48)


@pytest.mark.skipif(not has_bfloat16_products(), reason="the processor has no AVX512-BF16")
@pytest.mark.parametrize(("width", "wide", "packed"), [(64, False, 1), (48, False, 0), (64, True, 0)])
def test_an_output_matrix_that_is_the_embedding_serves_both(width, wide, packed):
    """Only a layout that can be read row by row is packed: 48 inputs are not whole runs of pairs."""
    torch.manual_seed(3)
    model = Model("module", wide, width)
    hidden = [torch.randn(rows, width).to(torch.bfloat16) for rows in (1, 5, 70)]
    ids = torch.tensor([[0, 99, 63], [64, 0, 1]])
    want, rows = [model(x) for x in hidden], model.embedding.weight[ids]
    assert cpu_linear.pack(model) == packed
    assert model.embedding.weight.numel() == (0 if packed else 128 * width)
    for x, expected in zip(hidden, want, strict=True):
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
    method = model.embedding.quant_method
    assert torch.equal(method.embedding(model.embedding, ids), rows)
    with pytest.raises(IndexError):
        method.embedding(model.embedding, torch.tensor([128]))


@pytest.mark.parametrize("rows", [0, 1, cpu_linear.FEWEST_WIDE, 37])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_products_are_exact_but_for_one_rounding(monkeypatch, rows, bias, dtype):
    """In pieces of 32 outputs and one of 16; of rows that are not contiguous, and with a dimension more."""
    monkeypatch.setattr(cpu_linear, "WIDE_AT_ONCE", 32 * 48)
    module = linear(48, 80, dtype, bias)
    assert cpu_linear.widen(module) == 1 and module.weight.shape == (80, 48)
    x = torch.randn(rows, 96).to(dtype)[:, ::2]
    want = x.double() @ module.weight.double().T + (module.bias.double() if bias else 0)
    if rows >= cpu_linear.FEWEST_WIDE:
        got = module(x)[0]
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)
        assert torch.equal(module(x.unsqueeze(0))[0], got.unsqueeze(0))
    else:
        torch.testing.assert_close(module(x)[0].double(), want, rtol=2e-2, atol=5e-2)
    assert cpu_linear.widen(linear(48, 80, torch.float32, bias)) == 0


@pytest.mark.parametrize(("tied", "wide"), [("", False), ("weight", False), ("module", False), ("", True)])
def test_the_output_matrix_is_multiplied_in_float32(tied, wide):
    model = Model(tied, wide)
    hidden, ids = torch.randn(7, 48).to(torch.bfloat16), torch.tensor([[0, 99], [64, 1]])
    want, rows = model(hidden), model.embedding.weight[ids]
    assert cpu_linear.widen(model) == (not wide)
    torch.testing.assert_close(model(hidden), want, rtol=2e-2, atol=2e-2)
    assert torch.equal(model.embedding.quant_method.embedding(model.embedding, ids), rows)


def linear(inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> ReplicatedLinear:
    module = ReplicatedLinear(inputs, outputs, bias=bias, params_dtype=dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def test_thoughts_end_where_the_client_wants_it_drafted_or_not(start_server, tiny_model, close_draft):
    """SGLang's backend masks logits on GPUs alone where a request has no grammar beside its thoughts."""
    thinking = ("--reasoning-parser", "qwen3", "--enable-strict-thinking")
    flags = ("--dtype", "float32", "--max-total-tokens", "20000", *thinking, *draft_flags(close_draft))
    server = start_server(tiny_model, *flags)

    def text(length, **more):
        sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        body = {"text": "Where is it? <think>\n", "sampling_params": sampling, "require_reasoning": True}
        reply = server.client.post("/generate", json=body | more)
        assert reply.status_code == 200, reply.text
        return reply.json()["text"]

    free, cut = text(24), text(24, max_thinking_tokens=6)
    assert cut.startswith(text(6) + "</think>") and "</think>" not in free
    assert cut == text(24, max_thinking_tokens=6, fathom={"speculative": True})
