"""What a request costs under a plan: FLOPs of prefill and decode, KV bytes held, bytes read per decode step.

Arithmetic on token counts; nothing here runs or imports the engine. Sources: SPEED, section 3 "Cost model"
(Eq. 1-4) and appendix D; SpecPrefill, appendix E (Table 5). FLOPs and bytes are scaling laws, not times: launches,
caches and kernels decide how much of a ratio is seen. Tuples over layers are in order, element 0 being layer 1.

Not modelled: latent attention, prompts with a cached prefix, drafting (it changes the number
of steps, not what one of them reads).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from fathom.runtime import quantization
from fathom.runtime.config import Policy
from fathom.runtime.windows import pairs, seen, windows_of

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element by the dtype's name in a model's config."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configs call the number of a layer's experts."""

TEXT_PARTS = ("text_config", "llm_config")
"""Where the config of a checkpoint that takes images or sound too may have that of its language model."""


def of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a ``config.json`` says of a checkpoint's language model, and of all of it where that says nothing."""
    return {**config, **next((part for name in TEXT_PARTS if (part := config.get(name))), {})}


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP. Widths in elements, itemsizes in bytes.

    Attributes:
        intermediate: width of the MLP; of all experts that one token uses together.
        kv_itemsize, weight_itemsize: of one KV element and of one weight.
        layer_bits: of one weight of the layers' matrices where those are quantized, or None.
        experts, experts_per_token: of each layer; 1 where the MLP is one for all tokens.
        windows: [layers] positions that a token sees at each layer, 0 for all; empty where all layers see all.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    kv_itemsize: int = 2
    weight_itemsize: int = 2
    experts: int = 1
    experts_per_token: int = 1
    layer_bits: float | None = None
    windows: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """The shape in a Hugging Face ``config.json``; itemsizes from its dtype, or its quantization.

        Raises:
            ValueError: for latent attention, for experts that are not the same in all layers, and for quantized
                weights whose size is not known.
        """
        config = of_text(config)
        if config.get("kv_lora_rank"):
            raise ValueError("latent attention (kv_lora_rank) has no KV heads to count")
        itemsize = ITEMSIZE[str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")]
        heads = config["num_attention_heads"]
        experts = next((config[name] for name in EXPERTS if config.get(name)), 1)
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=_intermediate(config),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            kv_itemsize=quantization.kv_bytes(config) or itemsize,
            weight_itemsize=itemsize,
            experts=experts,
            experts_per_token=config["num_experts_per_tok"] if experts > 1 else 1,
            layer_bits=quantization.layer_bits(config),
            windows=windows_of(config),
        )

    def window(self, layer: int) -> int:
        """Positions that a token sees at a layer (counted from 0); 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that a token is multiplied with: Q, K, V, O and the three of the MLP."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def qkv_weights(self) -> int:
        """Those of one layer that give a token's query, key and value."""
        return self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)

    @property
    def head_weights(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocab

    @property
    def kv_entry_bytes(self) -> int:
        """Bytes of one token's key and value at one layer (SPEED, Eq. 1)."""
        return 2 * self.kv_heads * self.head_dim * self.kv_itemsize

    def step_weight_bytes(self, batch: int = 1) -> float:
        """Bytes of the weights that one decode step of ``batch`` requests reads.

        Of experts, those that some request's token is sent to: their mean number if each goes to any with the same
        chance.
        """
        met = self.experts * (1 - (1 - self.experts_per_token / self.experts) ** batch)
        expert = 3 * self.hidden * self.intermediate / self.experts_per_token
        layer = self.layer_weights + expert * (met - self.experts_per_token)
        layer_bytes = self.weight_itemsize if self.layer_bits is None else self.layer_bits / 8
        return self.layers * layer * layer_bytes + self.head_weights * self.weight_itemsize


def _intermediate(config: Mapping[str, Any]) -> int:
    experts = config.get("num_experts_per_tok")
    if not experts:
        return config["intermediate_size"]
    uneven = (
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
        "mlp_only_layers",
    )
    if found := [name for name in uneven if config.get(name)]:
        raise ValueError(f"experts that differ by layer or are shared ({found[0]}) are not modelled")
    return experts * config.get("moe_intermediate_size", config["intermediate_size"])


@dataclass(frozen=True)
class CostPlan:
    """A staircase in numbers: what is computed, kept and read at each layer.

    Attributes:
        prompt: tokens of the prompt.
        computed: [layers] prompt tokens computed at each layer, the last one included.
        retained: [layers] prompt entries that each KV head keeps after prefill.
        budget: entries that a fast decode step reads at most, per KV head; None where every step is slow.
        packed: entries per layer and KV head of the copy that fast steps read; they are held beside the rest.
        slow_share: share of decode steps that read everything, in [0, 1].
        draft: model that reads the whole prompt first, if any: to judge it, or to propose tokens.
        scored: FastKV's T: which tokens go on follows from what it computes, so it computes all of them whole; None
            where nothing is chosen so.

    Raises:
        ValueError: when a deeper layer computes more, or one keeps more than it computed.
    """

    prompt: int
    computed: tuple[int, ...]
    retained: tuple[int, ...]
    budget: int | None = None
    packed: int = 0
    slow_share: float = 1.0
    draft: ModelShape | None = None
    scored: int | None = None

    def __post_init__(self) -> None:
        steps = (self.prompt, *self.computed)
        if not self.computed or self.computed[-1] < 1 or any(b > a for a, b in itertools.pairwise(steps)):
            raise ValueError(f"not a staircase below {self.prompt} tokens: {self.computed}")
        if len(self.retained) != len(self.computed):
            raise ValueError(f"{len(self.retained)} layers keep KV, {len(self.computed)} compute it")
        if any(not 0 <= r <= c for r, c in zip(self.retained, self.computed, strict=True)):
            raise ValueError(f"kept entries {self.retained} of computed {self.computed}")
        if not 0 <= self.slow_share <= 1:
            raise ValueError(f"slow_share {self.slow_share} is outside [0, 1]")

    def held(self, generated: int = 0) -> tuple[int, ...]:
        """[layers] entries per KV head once ``generated`` tokens have been decoded (SPEED, Eq. 3)."""
        return tuple(kept + generated for kept in self.retained)

    def read(self, generated: int, shape: ModelShape | None = None) -> tuple[float, ...]:
        """[layers] entries per KV head that a decode step reads on average, its own token among ``generated``.

        Args:
            shape: whose layers may have sliding windows.
        """
        read: list[float] = [*self.held(generated)]
        if (budget := self.budget) is not None:
            fast = 1 - self.slow_share
            read = [self.slow_share * n + fast * min(n, budget) for n in read]
        for layer in range(len(read)):
            if shape is not None and (window := shape.window(layer)):
                share = self.computed[layer] / self.prompt
                read[layer] = seen(window, share, self.retained[layer], generated)
        return tuple(read)


@dataclass(frozen=True)
class SpecPrefill:
    """Chunks of the prompt that enter the model (SpecPrefill, section 3.2.3); the first and the last always do.

    Attributes:
        keep_rate: share of the chunks, in (0, 1].
        draft: the model that chose them; None leaves its cost out.
        chunk: tokens per chunk.
        min_prompt_tokens: a shorter prompt is left whole, and no draft runs.
    """

    keep_rate: float
    draft: ModelShape | None = None
    chunk: int = 32
    min_prompt_tokens: int = 4096

    def kept(self, prompt: int) -> int:
        """Tokens of a prompt that enter the model."""
        chunks = -(-prompt // self.chunk)
        kept = max(_share(self.keep_rate, chunks), min(2, chunks))
        last = prompt - (chunks - 1) * self.chunk
        return (kept - 1) * self.chunk + last


@dataclass(frozen=True)
class FastKV:
    """Tokens that go on above a layer, and entries that stay after prefill (FastKV, sections 4.2 and 4.4).

    Attributes:
        layer: T, the last layer that sees every token.
        tsp_rate: share of tokens above it; 1 propagates all.
        retention_rate: share of entries that each KV head keeps; 1 keeps all.
        window: last tokens of the prompt, always in both sets and counted in them.
    """

    layer: int
    tsp_rate: float = 0.2
    retention_rate: float = 0.1
    window: int = 8

    def size(self, rate: float, tokens: int, forced: int = 0) -> int:
        """Tokens of a set of this rate, of which ``forced`` stay beside the window whatever the rate."""
        return max(_share(rate, tokens), min(self.window + forced, tokens))


@dataclass(frozen=True)
class Speed:
    """The layer above which prompt tokens do not exist (SPEED, section 3).

    Attributes:
        cutoff: K, the last layer that sees every token.
        anchors: prompt tokens beside the last one that exist at every layer (a in Eq. 3).
    """

    cutoff: int
    anchors: int = 1


@dataclass(frozen=True)
class SlowFast:
    """Decode steps that read a selection, between dense ones (SFI, section 3.1).

    Attributes:
        slow_share: share of dense steps. The default is the least there can be: one after every 64 fast ones.
        sink, recent, selected: entries that a fast step reads, per KV head.
    """

    slow_share: float = 1 / 65
    sink: int = 4
    recent: int = 256
    selected: int = 2048


def _share(rate: float, count: int) -> int:
    """⌈rate · count⌉ with the rate as written: 0.1 of 30 is 3, not 4."""
    return math.ceil(Fraction(str(rate)) * count)


def make_plan(
    layers: int,
    prompt: int,
    *,
    specprefill: SpecPrefill | None = None,
    fastkv: FastKV | None = None,
    speed: Speed | None = None,
    slow_fast: SlowFast | None = None,
) -> CostPlan:
    """The plan of these mechanisms together; of none of them, the dense plan.

    Raises:
        ValueError: for a layer outside the model or an empty prompt.
    """
    bounds = {"T": fastkv.layer if fastkv else 1, "K": speed.cutoff if speed else 1}
    for name, at in bounds.items():
        if not 1 <= at <= layers:
            raise ValueError(f"{name} = {at} is not a layer of a model with {layers}")
    entering, draft = prompt, None
    if specprefill and prompt >= specprefill.min_prompt_tokens and specprefill.kept(prompt) < prompt:
        entering, draft = specprefill.kept(prompt), specprefill.draft
    anchored = speed.anchors if speed and fastkv and fastkv.layer < speed.cutoff < layers else 0
    above_t = fastkv.size(fastkv.tsp_rate, entering, anchored) if fastkv else entering
    above_k = min(entering, speed.anchors + 1) if speed else entering
    stay = fastkv.size(fastkv.retention_rate, entering) if fastkv else entering
    computed, retained = [], []
    for layer in range(1, layers + 1):
        cut = speed is not None and layer > speed.cutoff
        seen = above_t if fastkv and layer > fastkv.layer else entering
        computed.append(min(seen, above_k) if cut else seen)
        retained.append(computed[-1] if cut else min(seen, stay))
    scored = fastkv.layer if fastkv else None
    plan = CostPlan(prompt, tuple(computed), tuple(retained), draft=draft, scored=scored)
    if slow_fast is None:
        return plan
    packed = slow_fast.sink + slow_fast.selected
    return replace(plan, budget=packed + slow_fast.recent, packed=packed, slow_share=slow_fast.slow_share)


def policy_plan(
    policy: Policy,
    layers: int,
    prompt: int,
    *,
    draft: ModelShape | None = None,
    tsp_layer: int | None = None,
    slow_fast: SlowFast = SlowFast(),
) -> CostPlan:
    """The plan of a request's policy, given what the operator set.

    Args:
        tsp_layer: FastKV's T; by default half of the layers, as in the paper.

    Raises:
        ValueError: where the policy leaves a size to the run (``prefill_keep_rate: "auto"``), or does not fit the
            model.
    """
    if isinstance(policy.prefill_keep_rate, str):
        raise ValueError(f"prefill_keep_rate {policy.prefill_keep_rate!r} is decided per prompt")
    keeps_less = policy.prefill_keep_rate < 1
    fastkv = policy.tsp_rate < 1 or policy.kv_retention_rate < 1
    at = tsp_layer or max(1, layers // 2)
    plan = make_plan(
        layers,
        prompt,
        specprefill=SpecPrefill(policy.prefill_keep_rate, draft, min_prompt_tokens=policy.min_prompt_tokens)
        if keeps_less
        else None,
        fastkv=FastKV(at, policy.tsp_rate, policy.kv_retention_rate) if fastkv else None,
        speed=Speed(policy.depth_cutoff, int(policy.anchors == "bos"))
        if isinstance(policy.depth_cutoff, int)
        else None,
        slow_fast=slow_fast if policy.decode == "slow_fast" else None,
    )
    # To propose tokens the draft reads the prompt too, whether it judges it or not.
    return replace(plan, draft=draft) if policy.speculative else plan


@dataclass(frozen=True)
class Counting:
    """What counts as a FLOP; a multiply-add is two. The papers differ, and so do their tables.

    Attributes:
        causal: whether a prompt token attends to itself and those before it, or to the whole prompt.
        score_flops: per attention score, beside its two dot products.
        gate_flops: per element of the MLP's intermediate layer.
        head_on_prompt: whether the LM head runs on every prompt token, or on the last.
        ends: whether a token of which nobody reads more than its key and value, at the last layer or below a
            narrowing, is only multiplied with the weights for query, key and value there.
    """

    causal: bool = True
    score_flops: int = 0
    gate_flops: int = 0
    head_on_prompt: bool = False
    ends: bool = False


CAUSAL = Counting()
SERVED = Counting(ends=True)
"""What this engine computes."""
SPEED_TABLE_18 = Counting(causal=False, score_flops=4, gate_flops=1)
"""The rules under which all of Table 18 comes out; found by fitting, the paper does not state them."""
SPECPREFILL_TABLE_5 = Counting(causal=False, head_on_prompt=True)
"""SpecPrefill's Table 5 counts multiply-adds: half of these FLOPs."""


def _layer_flops(shape: ModelShape, tokens: float, pairs: float, counting: Counting) -> float:
    """One layer: ``tokens`` through its matrices, ``pairs`` of a query and a key in each head."""
    matrices = 2 * shape.layer_weights + counting.gate_flops * shape.intermediate
    return tokens * matrices + pairs * shape.heads * (4 * shape.head_dim + counting.score_flops)


def prefill_flops(shape: ModelShape, plan: CostPlan, counting: Counting = CAUSAL) -> float:
    """FLOPs of the target's prefill up to the first token's logits."""
    layers = 0.0
    for layer, (tokens, above) in enumerate(itertools.pairwise((*plan.computed, 1)), 1):
        whole = above if counting.ends and layer != plan.scored else tokens
        # Those that are computed whole are the last ones.
        sight = shape.window(layer - 1) * tokens / plan.prompt or tokens
        met = pairs(sight, tokens, whole) if counting.causal else whole * min(sight, tokens)
        layers += _layer_flops(shape, whole, met, counting) + 2 * shape.qkv_weights * (tokens - whole)
    return layers + 2 * shape.head_weights * (plan.computed[0] if counting.head_on_prompt else 1)


def draft_flops(plan: CostPlan, counting: Counting = CAUSAL) -> float:
    """FLOPs of the draft's prefill of the whole prompt (SpecPrefill, appendix E); its few decode steps left out."""
    if plan.draft is None:
        return 0.0
    return prefill_flops(plan.draft, make_plan(plan.draft.layers, plan.prompt), counting)


def decode_flops(shape: ModelShape, plan: CostPlan, generated: int, counting: Counting = CAUSAL) -> float:
    """FLOPs of the decode step that computes the ``generated``-th token after the prompt."""
    layers = sum(_layer_flops(shape, 1, entries, counting) for entries in plan.read(generated, shape))
    return layers + 2 * shape.head_weights


def kv_bytes(shape: ModelShape, plan: CostPlan, generated: int = 0) -> int:
    """KV bytes held once ``generated`` tokens have been decoded (SPEED, Eq. 2 and 3)."""
    return shape.kv_entry_bytes * sum(plan.held(generated))


def packed_bytes(shape: ModelShape, plan: CostPlan) -> int:
    """Bytes of the copy that fast decode steps read, beside :func:`kv_bytes`."""
    copied = sum(not shape.window(layer) for layer in range(len(plan.computed)))
    return shape.kv_entry_bytes * copied * plan.packed


def depth_pages(entries: Sequence[int], span: int, page_size: int) -> tuple[int, ...]:
    """[spans] pages that a request needs for ``entries`` [layers] KV entries per head.

    The layers of a span share one table, so its longest layer counts. ``plan.computed`` gives what prefill holds at
    its end, before retention; ``plan.held(n)`` what is there after ``n`` decoded tokens.

    Raises:
        ValueError: when spans do not divide the layers.
    """
    if len(entries) % span:
        raise ValueError(f"spans of {span} do not divide {len(entries)} layers")
    return tuple(-(-max(entries[at : at + span]) // page_size) for at in range(0, len(entries), span))


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads: weights once, KV of every request."""

    weights: float
    kv: float

    @property
    def total(self) -> float:
        return self.weights + self.kv


def decode_bytes(shape: ModelShape, plan: CostPlan, generated: int, batch: int = 1) -> StepBytes:
    """Bytes read by the step that computes the ``generated``-th token of ``batch`` requests of this plan."""
    read = sum(plan.read(generated, shape))
    return StepBytes(shape.step_weight_bytes(batch), batch * shape.kv_entry_bytes * read)


@dataclass(frozen=True)
class Prediction:
    """Dense divided by plan, each: above 1, the plan is cheaper.

    Attributes:
        ttft: FLOPs until the first token as this engine computes it, the draft's included.
        tpot: bytes read by all decode steps, weights and KV.
        tpot_kv: the same, KV alone: the limit for long contexts and large batches.
        kv: KV bytes held at the end (the last token has none), the packed copy of fast steps left out.
    """

    ttft: float
    tpot: float
    tpot_kv: float
    kv: float


def predict(shape: ModelShape, plan: CostPlan, output: int, batch: int = 1) -> Prediction:
    """What a plan saves against the dense one, for ``batch`` equal requests of ``output`` >= 2 tokens each."""
    dense = make_plan(shape.layers, plan.prompt)
    steps = range(1, output)
    whole, part = ([decode_bytes(shape, p, at, batch) for at in steps] for p in (dense, plan))
    return Prediction(
        ttft=prefill_flops(shape, dense, SERVED)
        / (prefill_flops(shape, plan, SERVED) + draft_flops(plan, SERVED)),
        tpot=sum(step.total for step in whole) / sum(step.total for step in part),
        tpot_kv=sum(step.kv for step in whole) / sum(step.kv for step in part),
        kv=kv_bytes(shape, dense, output - 1) / kv_bytes(shape, plan, output - 1),
    )
