"""LoRA adapters in the forms that PEFT saves, brought to the one that SGLang's layers take, or refused.

SGLang multiplies by q, k and v as one matrix and by gate and up as another, all of one rank and with one scale, and
takes for granted that an adapter changes q and v, or gate. Of anything else it leaves out what it does not know, or
ends when the first request comes. Here all matrices get the adapter's highest rank and one scale, missing ones are
zeros, and what still cannot be computed is a ValueError while the adapter is loaded, when nobody waits for it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.utils.common import get_layer_id
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.mem_pool import LoRAMemoryPool
from sglang.srt.lora.utils import (
    auto_detect_lora_target_modules,
    get_hidden_dim,
    get_normalized_target_modules,
    get_stacked_multiply,
    get_target_module_name,
)

Weights = dict[str, torch.Tensor]
Modules = Mapping[tuple[int | None, str], torch.nn.Module]
"""The model's, by layer and last name."""

FACTOR = re.compile(r"(?P<owner>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(\.weight)?")
WRAPPED = "base_model.model."
"""Before the model's own names in PEFT's files."""
GATED = ("gate_proj", "up_proj")
BASE = ".base_layer."
"""In the name of the model's own embedding, which PEFT saves beside its change."""

REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bias": (lambda value: value == "none", "'none': biases that were trained are not applied"),
    "lora_bias": (lambda value: not value, "false: biases that were trained are not applied"),
    "modules_to_save": (lambda value: not value, "empty: modules that were trained whole are not applied"),
    "trainable_token_indices": (lambda value: not value, "empty: trained tokens are not applied"),
    "layer_replication": (lambda value: not value, "empty: the model has the layers it was loaded with"),
    "target_parameters": (lambda value: not value, "empty: only modules are changed"),
    "alora_invocation_tokens": (lambda value: not value, "empty: an adapter holds for the whole prompt"),
    "init_lora_weights": (
        lambda value: not str(value).startswith(("pissa", "olora", "corda", "loftq", "lora_ga")),
        "a way to begin that leaves the model's own weights as they are (PEFT saves such an adapter converted "
        "where save_pretrained gets path_initial_model_for_weight_conversion)",
    ),
}
"""By field of ``adapter_config.json``: which values can be served, and in words."""

_config_init = LoRAConfig.__init__
_normalize_weights = LoRAAdapter._normalize_weights
_process_weight = LoRAAdapter._process_weight
_load_to_buffer = LoRAMemoryPool.load_lora_weight_to_buffer


@dataclass(frozen=True)
class Scales:
    """Ranks and scales that an adapter's config tells.

    Attributes:
        rank: the highest; scale: of matrices that nothing else is said of.
        alphas: by regular expression for the end of a module's name.
        root: a scale is alpha over the root of the rank (Kalajdzievski 2023, "A Rank Stabilization Scaling Factor
            for Fine-Tuning with LoRA"), not over the rank.
    """

    rank: int
    scale: float
    alpha: float
    alphas: Mapping[str, float]
    root: bool

    @staticmethod
    def told(config: Mapping[str, Any]) -> "Scales":
        """Of ``adapter_config.json``."""
        rank, alpha, root = config["r"], config["lora_alpha"], bool(config.get("use_rslora"))
        highest = max([rank, *(config.get("rank_pattern") or {}).values()])
        return Scales(highest, _scale(alpha, rank, root), alpha, config.get("alpha_pattern") or {}, root)

    def of(self, module: str, rank: int) -> float:
        """The scale of a module's product of two matrices of a rank."""
        found = (alpha for end, alpha in self.alphas.items() if re.match(rf"(.*\.)?({end})$", module))
        return _scale(next(found, self.alpha), rank, self.root)


def _scale(alpha: float, rank: int, root: bool) -> float:
    return alpha / (rank**0.5 if root else rank)


def config_init(self: LoRAConfig, *args: Any, **kwargs: Any) -> None:
    """SGLang's; then ``r`` is the highest rank, and ``lora_alpha`` over it the scale. ValueError by field."""
    _config_init(self, *args, **kwargs)
    told = self.hf_config
    if str(told.get("peft_type", "LORA")).upper() != "LORA":
        raise ValueError(f"adapter_config.json: peft_type is {told['peft_type']!r}, it has to be 'LORA'")
    for field, (served, legal) in REFUSED.items():
        if field in told and told[field] is not None and not served(told[field]):
            raise ValueError(f"adapter_config.json: {field} is {told[field]!r}, it has to be {legal}")
    scales = Scales.told(told)
    if scales.rank != self.r or scales.root:
        self.r, self.lora_alpha = scales.rank, scales.scale * scales.rank


def process_weight(self: LoRAAdapter, name: str, loaded_weight: torch.Tensor) -> None:
    """SGLang's, of factors for layers that the model has, and of ends that ``target_modules`` names."""
    if FACTOR.fullmatch(name) is None:
        if BASE in name:
            return
        raise ValueError(f"the adapter has {name}, which is no factor (lora_A, lora_B) of a matrix's change")
    layer = get_layer_id(name)
    if layer is not None and layer >= len(self.layers):
        raise ValueError(f"the adapter has {name}, the model has {len(self.layers)} layers")
    of_ends = len(self.embedding_layers)
    _process_weight(self, name, loaded_weight)
    if layer is None and len(self.embedding_layers) == of_ends:
        raise ValueError(f"the adapter has {name}, its target_modules are {self.config.target_modules!r}")


def normalize_weights(self: LoRAAdapter) -> None:
    """SGLang's, of weights in one form, whose shapes are the model's afterwards."""
    scales, modules = Scales.told(self.config.hf_config), _modules(self)
    for number, layer in enumerate(self.layers):
        layer.weights = _even(layer.weights, scales)
        _complete(self, number, layer.weights, modules)
    self.embedding_layers = _even(self.embedding_layers, scales)
    _normalize_weights(self)
    _check(self, modules)


def _even(weights: Weights, scales: Scales) -> Weights:
    """The same products with one rank and one scale: zeros behind each matrix's own rank, its own scale within."""
    pairs: dict[tuple[str, bool], dict[str, str]] = defaultdict(dict)
    for name, found in _factors(weights):
        pairs[found["owner"], bool(found["embedding"])][found["factor"]] = name
    evened: Weights = {}
    for (owner, _), names in pairs.items():
        if len(names) < 2:
            raise ValueError(f"the adapter has only one factor of {owner}'s change")
        down, up = weights[names["A"]], weights[names["B"]]
        rank = down.shape[-2]
        if up.shape[-1] != rank or rank > scales.rank:
            raise ValueError(
                f"the adapter's factors of {owner}'s change have shapes {tuple(down.shape)} and {tuple(up.shape)}, "
                f"adapter_config.json tells rank {scales.rank}"
            )
        if (scale := scales.of(owner.removeprefix(WRAPPED), rank)) != scales.scale:
            up = (up.float() * (scale / scales.scale)).to(up.dtype)
        if more := scales.rank - rank:
            down = torch.nn.functional.pad(down, (0, 0, 0, more))
            up = torch.nn.functional.pad(up, (0, more))
        evened[names["A"]], evened[names["B"]] = down, up
    return evened


def _factors(weights: Weights) -> Iterator[tuple[str, re.Match[str]]]:
    for name in weights:
        found = FACTOR.fullmatch(name)
        assert found is not None
        yield name, found


def _complete(adapter: LoRAAdapter, number: int, weights: Weights, modules: Modules) -> None:
    """Add zeros for the matrices that SGLang expects beside those of a layer."""
    own: dict[tuple[str, str], dict[str, Weights]] = defaultdict(lambda: defaultdict(dict))
    for name, found in _factors(weights):
        place, _, last = found["owner"].rpartition(".")
        own[place, name[found.end("factor") :]][last][found["factor"]] = weights[name]
    for (place, end), present in own.items():
        for outputs in (_attention(number, place, present, modules), _mlp(adapter, place, present)):
            factors = [present[last] for last in outputs if last in present]
            for last in outputs.keys() - present.keys() if factors else ():
                down, up = factors[0]["A"], factors[0]["B"]
                shape = (*up.shape[:-2], outputs[last], up.shape[-1])
                weights[f"{place}.{last}.lora_A{end}"] = torch.zeros_like(down)
                weights[f"{place}.{last}.lora_B{end}"] = up.new_zeros(shape)


def _attention(number: int, place: str, present: Mapping[str, Weights], modules: Modules) -> dict[str, int]:
    """Outputs of q, k and v where SGLang multiplies by them as one."""
    layer = modules.get((number, "qkv_proj"))
    if not isinstance(layer, QKVParallelLinear):
        return {}
    heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
    outputs = {
        "q_proj": heads * layer.head_size,
        "k_proj": kv_heads * layer.head_size,
        "v_proj": kv_heads * layer.v_head_size,
    }
    for last in outputs.keys() & present.keys():
        if (rows := present[last]["B"].shape[-2]) != outputs[last]:
            raise ValueError(f"the adapter's {place}.{last} has {rows} outputs, the model's {outputs[last]}")
    return outputs


def _mlp(adapter: LoRAAdapter, place: str, present: Mapping[str, Weights]) -> dict[str, int]:
    """Outputs of gate and up where SGLang multiplies by them as one; where there is only one, not at all."""
    apart = "up_proj" in getattr(adapter.base_model, "supported_lora_modules", ())
    if apart or adapter._is_non_gated_moe_weight(f"{place}."):
        return {}
    rows = [present[last]["B"].shape[-2] for last in GATED if last in present]
    return dict.fromkeys(GATED, rows[0]) if rows else {}


def _check(adapter: LoRAAdapter, modules: Modules) -> None:
    """ValueError where a matrix is not the model's, or has another shape."""
    targets = get_normalized_target_modules(adapter.config.target_modules)
    if "all" in targets:
        targets = auto_detect_lora_target_modules(adapter.base_model)
    for number, name, weight in _all(adapter):
        try:
            target = get_target_module_name(name, targets)
        except ValueError:
            raise ValueError(f"the adapter has {name}, its target_modules are {sorted(targets)}") from None
        if ".experts." in name or "shared_expert" in name:
            continue
        if number is not None and (number, target.rpartition(".")[2]) not in modules:
            raise ValueError(f"the adapter has {name}, the model has no {target} in layer {number}")
        inputs, outputs = get_hidden_dim(target, adapter.base_hf_config, adapter.base_model, number or 0)
        rank = adapter.config.r
        down = (rank * get_stacked_multiply(target, adapter.base_model), inputs)
        wanted = down if "_A" in name else (outputs, rank)
        if tuple(weight.shape) != wanted:
            raise ValueError(
                f"the adapter's {name} is {tuple(weight.shape)}, of this model it would be {wanted}"
            )


def _modules(adapter: LoRAAdapter) -> Modules:
    return {
        (get_layer_id(name), name.rpartition(".")[2]): getattr(module, "base_layer", module)
        for name, module in adapter.base_model.named_modules()
    }


def _all(adapter: LoRAAdapter) -> Iterator[tuple[int | None, str, torch.Tensor]]:
    """Each matrix with its layer and name."""
    for number, layer in enumerate(adapter.layers):
        for name, weight in layer.weights.items():
            yield number, name, weight
    for name, weight in adapter.embedding_layers.items():
        yield None, name, weight


def load_to_buffer(self: LoRAMemoryPool, uid: str | None, buffer_id: int, *args: Any, **kwargs: Any) -> None:
    """SGLang's, which of an adapter of only one end of the model leaves the other end as it was in that place."""
    if uid is not None:
        self._clear_buffer_slot_for_base(buffer_id)
    _load_to_buffer(self, uid, buffer_id, *args, **kwargs)


def install() -> None:
    """Put the functions in SGLang's places."""
    LoRAConfig.__init__ = config_init
    LoRAAdapter._process_weight = process_weight
    LoRAAdapter._normalize_weights = normalize_weights
    LoRAMemoryPool.load_lora_weight_to_buffer = load_to_buffer
