"""Layers a few at a time, out of a model's own forward."""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.models.llama import LlamaModel
from sglang.srt.utils.offloader import OffloaderV1

from fathom.runtime.sglang_host.models import split_prefill
from fathom.runtime.sglang_host.models.split_prefill import SplitPrefill

LAYERS = 5


class Layer(torch.nn.Module):
    """One that tells when it is run; with a residual if asked."""

    def __init__(self, number, ran):
        super().__init__()
        self.number, self.ran = number, ran

    def through(self, hidden_states, positions):
        self.ran.append(self.number)
        return hidden_states * 1.5 + positions + self.number


class Plain(Layer):
    def forward(self, positions, hidden_states, forward_batch):
        return self.through(hidden_states, positions)


class WithResidual(Layer):
    def forward(self, positions, hidden_states, forward_batch, residual):
        residual = hidden_states if residual is None else residual + hidden_states
        return self.through(residual, positions), residual


class WithMore(WithResidual):
    def forward(self, positions, hidden_states, forward_batch, residual, kv_states=None):
        return *super().forward(positions, hidden_states, forward_batch, residual), "unused"


class Rotated(Layer):
    """Given what its model makes of the positions, and neither all by place nor in the order of others."""

    def forward(self, positions, hidden_states, position_embeddings, forward_batch, residual=None, **kwargs):
        assert positions.dim() == 2 and kwargs == {"more": "unused"}
        residual = hidden_states if residual is None else residual + hidden_states
        return self.through(residual, position_embeddings), residual


KINDS = [Plain, WithResidual, WithMore, Rotated]


class Model(torch.nn.Module):
    """As SGLang's are made: a forward around a body with layers."""

    def __init__(self, kind, ran):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(kind(number, ran) for number in range(LAYERS))
        self.kind = kind

    def forward(self, input_ids, positions, forward_batch):
        hidden, residual = input_ids.float(), None
        for layer in self.model.layers:
            if self.kind is WithMore:
                hidden, residual, _ = layer(positions, hidden, forward_batch, residual, None)
            elif self.kind is WithResidual:
                hidden, residual = layer(positions, hidden, forward_batch, residual)
            elif self.kind is Rotated:
                hidden, residual = layer(
                    positions=positions[None],
                    position_embeddings=positions.cos(),
                    hidden_states=hidden,
                    forward_batch=forward_batch,
                    residual=residual,
                    more="unused",
                )
            else:
                hidden = layer(positions=positions, hidden_states=hidden, forward_batch=forward_batch)
        return hidden * 2 if residual is None else hidden * 2 + residual


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edges", [(0, 5), (0, 1, 5), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5)])
def test_intervals_give_what_all_layers_give(kind, edges):
    ran = []
    model, ids, positions = Model(kind, ran), torch.arange(3), torch.tensor([4.0, 5.0, 6.0])
    want = model(ids, positions, None)
    split, batch = SplitPrefill(model), SimpleNamespace(hidden_states=None, residual=None)
    for start, end in itertools.pairwise(edges):
        ran.clear()
        found = split(ids, positions, batch, (start, end))
        assert ran == list(range(start, end))
        assert (found is None) == (end < LAYERS)
    assert torch.equal(found, want)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_dropped_in_between(kind):
    model, ids, positions = Model(kind, []), torch.arange(3), torch.tensor([4.0, 5.0, 6.0])
    want, kept = model(ids, positions, None), torch.tensor([0, 2])
    split, batch = SplitPrefill(model), SimpleNamespace(hidden_states=None, residual=None)
    split(ids, positions, batch, (0, 2))
    batch.hidden_states = batch.hidden_states[kept]
    batch.residual = None if batch.residual is None else batch.residual[kept]
    assert torch.equal(split(ids[kept], positions[kept], batch, (2, LAYERS)), want[kept])
    assert torch.equal(model(ids, positions, None), want)  # untouched by what was run before


class Elsewhere(torch.nn.Parameter):
    """A weight of another device than the host, as SGLang's offloading asks for it."""

    device = torch.device("cuda")


def test_layers_whose_weights_are_offloaded_are_left_alone(monkeypatch):
    """SGLang puts its own function back at the end of each call, so that ours would be gone after the first."""
    monkeypatch.setattr("sglang.srt.utils.offloader.is_pin_memory_available", lambda: False)
    models = [type("ArceeForCausalLM", (Model,), {})(WithResidual, []) for _ in range(2)]
    layer = models[1].model.layers[2]
    layer.weight = Elsewhere(torch.zeros(1))
    OffloaderV1(1).maybe_offload_to_cpu(layer)
    for model in models:
        split_prefill.install(model)
    assert [hasattr(model, "forward_split_prefill") for model in models] == [True, False]


@pytest.mark.parametrize(
    ("module", "name", "inner", "kept"),
    [
        ("llama", "LlamaForCausalLM", "LlamaModel", True),
        ("llama", "Phi3ForCausalLM", "LlamaModel", True),
        ("mistral", "MistralForCausalLM", "LlamaModel", True),
        ("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeModel", True),
        (
            "teleflm",
            "TeleFLMForCausalLM",
            "TeleFLMModel",
            False,
        ),  # inherited; its own forward scales embeddings
        ("nanbeige", "NanbeigeForCausalLM", "NanbeigeModel", False),  # an assertion
        ("exaone4", "Exaone4ForCausalLM", "Exaone4Model", False),
        ("gemma3_causal", "Gemma3ForCausalLM", "Gemma3TextModel", False),
        ("commandr", "Cohere2ForCausalLM", "CohereModel", None),
        ("olmo2", "Olmo2ForCausalLM", "Olmo2Model", None),
    ],
)
def test_only_what_was_checked_is_trusted(module, name, inner, kept):
    """SGLang's own means of running a few layers; None where there are none."""
    found = importlib.import_module(f"sglang.srt.models.{module}")
    model = bare(getattr(found, name))
    model.model = bare(vars(found).get(inner, LlamaModel))
    split_prefill.distrust(model)
    assert hasattr(model, "forward_split_prefill") == (kept is not None)
    assert split_prefill.possible(model) == bool(kept)


def bare(kind):
    """An object of SGLang's class without its weights."""
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    return model
