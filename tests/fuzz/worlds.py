"""Worlds: a target, a draft and a server's flags, drawn from a seed. Nothing is on disk yet."""

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from adapters import ATTENTION, ENDS, MLP
from oracles import sfi

from fathom.runtime.plan import choose_span, choose_tsp_layer

FLOAT_BYTES = 4
HEADS = ((4, 2), (4, 4), (4, 1), (6, 2), (8, 2), (2, 1), (3, 3), (6, 3))
"""Query heads and KV heads."""
CHUNKS = (-1, 1, 4, 7, 8, 16, 32, 48, 64, 64, 100, 256)
"""Prompt tokens of one step; -1 for whole prompts."""


@dataclass(frozen=True)
class Target:
    """A random model's configuration.

    Attributes:
        family: prefix of its classes in Transformers.
        kv_heads: and dim, the numbers from which a token's KV bytes follow.
        whole: layers without a sliding window.
        config: what differs from the configuration of tests' random models.
        ending: factor on the output weights of tokens that end a sentence or line, which trigger slow steps.
    """

    family: str
    layers: int
    kv_heads: int
    dim: int
    whole: int
    config: dict[str, Any]
    ending: float

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values at one layer, in float32."""
        return 2 * self.kv_heads * self.dim * FLOAT_BYTES


@dataclass(frozen=True)
class Draft:
    """A draft model: the target with noise on its weights, or where ``noise`` is None a model of its own."""

    noise: float | None
    family: str
    config: dict[str, Any]
    cost: float


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter with random weights, drawn from its seed; the rest is as of ``adapters.save_adapter``."""

    name: str
    rank: int
    modules: tuple[str, ...]
    rooted: bool
    seed: int


@dataclass(frozen=True)
class World:
    """One server and its models.

    Attributes:
        flags: of ``fathom serve``, those of models, adapters' folders and devices aside.
        page: tokens of a KV page; pool: tokens that fit at all depths; context: longest prompt and answer.
        chunk: prompt tokens of one step, -1 for all.
        span: layers that share a page table; tsp_layer: layers below FastKV's selection, 0 where there are none.
        buffer: longest prompt that FastKV selects from.
        settings: SFI's numbers.
        retract_every: steps after which running requests are taken back; 0 for SGLang's own judgement.
        overlap: steps begin before the last one's result is known.
        tight: the pool is too small for a wave.
        prioritized: requests have a priority.
        scarce_evidence: SFI's logits may not fit: which selections are renewed depends on the batch.
        incremental: events of a stream have only their own tokens.
        adapters: loaded at the start; a batch may have fewer.
        own_default: requests that say nothing have another policy than ``exact``; drafted_default: and draft.
    """

    seed: int
    target: Target
    draft: Draft | None
    flags: tuple[str, ...]
    page: int
    pool: int
    context: int
    chunk: int
    span: int
    tsp_layer: int
    buffer: int
    settings: sfi.Settings
    retract_every: int
    overlap: bool
    tight: bool
    prioritized: bool
    scarce_evidence: bool
    incremental: bool
    adapters: tuple[Adapter, ...]
    own_default: bool
    drafted_default: bool

    @property
    def devices(self) -> int:
        return self.settings.devices

    @property
    def compact_bytes(self) -> int:
        """Of a request's compact buffers."""
        return (self.settings.sink + self.settings.k) * self.target.whole * self.target.token_bytes

    @property
    def env(self) -> dict[str, str]:
        """What the server's environment has to say."""
        env = {}
        if self.retract_every:
            env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(self.retract_every)}
        if self.devices > 1:
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
        return env

    def __str__(self) -> str:
        """One line: the models, what is unusual about the server, the flags that are not SFI's."""
        flags = " ".join(self.flags)
        shown = flags.partition(" --sfi-")[0].removeprefix("--dtype float32 ")
        odd = [
            "overlap" if self.overlap else "",
            f"retract every {self.retract_every}" if self.retract_every else "",
            f"{self.devices} devices" if self.devices > 1 else "",
            "draft" if self.draft else "no draft",
            f"{len(self.adapters)} adapters" if self.adapters else "",
        ]
        return f"{self.target.family} of {self.target.layers} layers, {', '.join(filter(None, odd))}, {shown}"


def draw(seed: int, devices: int | None = None) -> World:
    """The world of a seed.

    Args:
        devices: that share the model; None for one, now and then two.
    """
    rng = random.Random(f"{seed}/world")
    target = _with_windows(random.Random(f"{seed}/windows"), _target(rng, devices or 1))
    memory, memory_flags = _memory(rng)
    depth, depth_flags = _depth(rng, target.layers, memory["context"])
    settings, sfi_flags = _sfi(rng, target, devices)
    selector, selector_flags = _selector(random.Random(f"{seed}/selector"))
    draft = _draft(rng, target, settings.devices) if rng.random() < 0.85 else None
    scarce, prioritized, incremental = rng.random() < 0.08, rng.random() < 0.2, rng.random() < 0.15
    own_default, default_flags = _default_policy(rng, draft is not None)
    adapters, adapter_flags = _adapters(random.Random(f"{seed}/adapters"))
    if adapters and settings.devices > 1:  # SGLang widens 96 to 128, which the adapters' files would not fit
        target = replace(target, config=target.config | {"intermediate_size": 128})
    flags = [
        *("--dtype", "float32", *memory_flags, *depth_flags, *_scheduling(rng, prioritized)),
        *("--incremental-streaming-output",) * incremental,
        *(("--grammar-backend", "outlines") if rng.random() < 0.25 else ()),
        *default_flags,
        *adapter_flags,
        *sfi_flags,
        *selector_flags,
        *("--short-prompt-share", random.Random(f"{seed}/share").choice([0, 0.25, 0.5, 0.9])),
        *("--prefill-decode-interval", random.Random(f"{seed}/interval").choice([0, 1, 1, 3])),
        *(("--sfi-evidence-mib", rng.choice([0.001, 0.02])) if scarce else ()),
    ]
    return World(
        seed=seed,
        target=target,
        draft=draft,
        flags=tuple(map(str, flags)),
        **memory,
        **depth,
        settings=replace(settings, **selector),
        retract_every=rng.choice([2, 5, 11]) if rng.random() < 0.25 else 0,
        overlap=rng.random() < 0.4,
        prioritized=prioritized,
        scarce_evidence=scarce,
        incremental=incremental,
        adapters=adapters,
        own_default=own_default,
        drafted_default="--preset" in default_flags and draft is not None,
    )


def _target(rng: random.Random, devices: int) -> Target:
    """Each device has KV heads of its own."""
    family = rng.choice(["Llama", "Llama", "Qwen3", "Qwen3", "Qwen2", "Mistral"])
    layers, dim = rng.randint(3, 7), rng.choice([16, 32, 64])
    heads, kv_heads = rng.choice([pair for pair in HEADS if pair[1] % devices == 0])
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "tie_word_embeddings": rng.random() < 0.3,
        "intermediate_size": rng.choice([96, 128]),
    }
    if family == "Qwen2":  # its heads share the hidden size
        config["hidden_size"] = heads * dim
    elif heads % 3 == 0:
        config["hidden_size"] = 96
    if family == "Mistral":
        config["sliding_window"] = None
    return Target(family, layers, kv_heads, dim, layers, config, rng.choice([1.0, 1.3, 1.5, 1.6]))


def _with_windows(rng: random.Random, target: Target) -> Target:
    """Some targets with sliding windows, of OLMo 3, whose heads share the hidden size; the first layer has none."""
    if target.family == "Qwen2" or rng.random() >= 0.25:
        return target
    kinds = ["full_attention", *rng.choices(["full_attention", "sliding_attention"], k=target.layers - 1)]
    config = target.config | {
        "hidden_size": target.config["num_attention_heads"] * target.dim,
        "layer_types": kinds,
        "sliding_window": rng.choice([2, 3, 9, 32, 64, 200]),
    }
    return replace(target, family="Olmo3", whole=kinds.count("full_attention"), config=config)


def _draft(rng: random.Random, target: Target, devices: int) -> Draft:
    """Each device has KV heads of the draft's own: SGLang loads no others on a CPU."""
    heads, kv_heads = rng.choice([(4, 2), (2, 2)] if devices > 1 else [(2, 1), (4, 2), (2, 2)])
    layers, dim = rng.choice([1, 2, 4]), rng.choice([16, 32])
    noise = None if rng.random() < 0.3 else rng.choice([0.0, 0.0005, 0.0008, 0.002, 0.005])
    # Transformers gives Qwen2 a tokenizer of its own, with one id more; a draft has to share the target's.
    family = rng.choice(["Qwen2"] if target.family == "Qwen2" else ["Llama", "Qwen3"])
    config = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
    }
    if family == "Qwen2":
        config["hidden_size"] = heads * dim
    return Draft(noise, family, config, rng.choice([0, 0, 0.05, 0.5]))


def _adapters(rng: random.Random) -> tuple[tuple[Adapter, ...], list[Any]]:
    if rng.random() >= 0.35:
        return (), []
    most = (ATTENTION, MLP, ATTENTION + MLP, ENDS, ATTENTION + MLP + ENDS)
    choices = (*most, ("k_proj", "v_proj"), ("q_proj", "down_proj"), ("up_proj",), ("lm_head",))
    adapters = tuple(
        Adapter(name, rng.choice([1, 4, 6]), rng.choice(choices), rng.random() < 0.3, rng.randrange(2**30))
        for name in ("a", "b", "c")[: rng.randint(1, 3)]
    )
    flags: list[Any] = ["--max-loras-per-batch", rng.randint(1, len(adapters) + 1)]
    if rng.random() < 0.3:
        flags += ["--lora-eviction-policy", "fifo"]
    return adapters, flags


def _memory(rng: random.Random) -> tuple[dict[str, Any], list[Any]]:
    page = rng.choice([1, 1, 2, 4, 8, 16])
    chunk = rng.choice([c for c in CHUNKS if c == -1 or c % page == 0])
    context, tight = rng.choice([400, 512, 700, 1000]), rng.random() < 0.45
    tokens = rng.choice([420, 600, 800, 1200, 1600]) if tight else rng.choice([4000, 16000])
    pool = -(-tokens // page) * page
    flags: list[Any] = ["--page-size", page, "--chunked-prefill-size", chunk]
    flags += ["--max-total-tokens", pool, "--context-length", context]
    if rng.random() < 0.15:
        flags += ["--shallow-factor", rng.choice([1, 2])]
    return {"page": page, "chunk": chunk, "context": context, "tight": tight, "pool": pool}, flags


def _depth(rng: random.Random, layers: int, context: int) -> tuple[dict[str, Any], list[Any]]:
    divisors = [d for d in range(1, layers) if layers % d == 0]
    asked_span = rng.choice([None, *divisors, *divisors])
    span = choose_span(layers, asked_span)
    asked_layer = rng.choice([None, *range(span, layers, span)])
    buffer = rng.choice([1, 50, 100, 200]) if rng.random() < 0.25 else None
    flags = {"--depth-span": asked_span, "--tsp-layer": asked_layer, "--propagation-buffer": buffer}
    drawn = {
        "span": span,
        "tsp_layer": choose_tsp_layer(layers, span, asked_layer) or 0,
        "buffer": context if buffer is None else buffer,
    }
    return drawn, _given(flags)


def _scheduling(rng: random.Random, prioritized: bool) -> list[Any]:
    flags: list[Any] = ["--enable-mixed-chunk"] if rng.random() < 0.5 else []
    if rng.random() < 0.5:
        flags += ["--max-running-requests", rng.choice([1, 2, 3, 5, 8])]
    if (steps := rng.choice([1, 1, 2, 3, 8])) > 1:
        flags += ["--num-continuous-decode-steps", steps]
    cached = rng.random() < 0.8
    if not cached:
        flags += ["--disable-radix-cache"]
    if rng.random() < 0.5:
        flags += ["--schedule-conservativeness", rng.choice([0.01, 0.1, 0.3, 1.5])]
    if prioritized:
        flags += ["--enable-priority-scheduling"]
        if rng.random() < 0.7:
            flags += ["--priority-scheduling-preemption-threshold", rng.choice([0, 1])]
        if rng.random() < 0.3:
            flags += ["--schedule-low-priority-values-first"]
    elif cached and rng.random() < 0.4:
        flags += ["--schedule-policy", rng.choice(["lpm", "dfs-weight", "lof", "random", "fcfs"])]
    if rng.random() < 0.3:
        flags += ["--stream-interval", rng.choice([2, 5, 16])]
    if rng.random() < 0.2:
        flags += ["--max-prefill-tokens", rng.choice([64, 200, 1000])]
    if rng.random() < 0.2:
        flags += ["--radix-eviction-policy", "lfu"]
    return flags


SELECTOR = {
    "alpha": ("--sfi-power", [0.3, 0.5, 1.0]),
    "gamma": ("--sfi-norm-decay", [0.0, 0.5, 2.0]),
    "beta": ("--sfi-position-decay", [0.0, 0.568, 3.0]),
    "p": ("--sfi-position-curve", [1.0, 1.8]),
    "eta": ("--sfi-tail-brake", [0.0, 0.4]),
    "alpha_soft": ("--sfi-nms-strength", [0.0, 0.5, 1.5]),
    "alpha_cross": ("--sfi-cross-head", [0.0, 0.35, 1.0]),
    "temperature": ("--sfi-temperature", [0.5, 2.0]),
}
"""The Selector's numbers under the paper's names: flag, and what is drawn."""


def _selector(rng: random.Random) -> tuple[dict[str, float], list[Any]]:
    if rng.random() < 0.5:
        return {}, []
    numbers = {name: rng.choice(values) for name, (_, values) in SELECTOR.items()}
    return numbers, _given({SELECTOR[name][0]: value for name, value in numbers.items()})


def _sfi(rng: random.Random, target: Target, devices: int | None) -> tuple[sfi.Settings, list[Any]]:
    t_max = rng.choice([1, 2, 4, 9, 64])
    settings = sfi.Settings(
        sink=rng.choice([0, 1, 2, 4]),
        recent=rng.choice([1, 4, 8, 16, 64]),
        k=rng.choice([1, 4, 12, 20, 64]),
        t_max=t_max,
        gap=min(rng.choice([0, 0, 1, 3]), t_max),
        radius=rng.choice([0, 3, 16]),
        lambda_clip=rng.choice([0.02, 0.2, 1.0]),
        devices=2 if target.kv_heads % 2 == 0 and rng.random() < 0.1 else 1,
    )
    settings = replace(settings, devices=devices or settings.devices)
    flags = {
        "--sfi-sink": settings.sink,
        "--sfi-recent": settings.recent,
        "--sfi-selected": settings.k,
        "--sfi-refresh-budget": settings.t_max,
        "--sfi-minimum-gap": settings.gap,
        "--sfi-nms-radius": settings.radius,
        "--sfi-prior-clip": settings.lambda_clip,
    }
    if rng.random() < 0.4:  # so few compact buffers that some requests decode densely
        size = (settings.sink + settings.k) * target.whole * target.token_bytes
        flags["--sfi-buffer-mib"] = rng.choice([1, 2, 4]) * size / 2**20 * 1.0001
    return settings, _given(flags)


def _default_policy(rng: random.Random, drafted: bool) -> tuple[bool, list[Any]]:
    if rng.random() >= 0.3:
        return False, []
    tunings: list[Any] = ["--min-prompt-tokens", rng.choice([0, 40]), "--lookahead", rng.choice([2, 5])]
    flags = [*tunings, "--draft-tokens", rng.choice([2, 6])] if drafted else []
    named = rng.random()
    if named < 0.5:
        return True, [*flags, "--preset", rng.choice(["turbo", "balanced"])]
    if named < 0.75:
        return True, [*flags, "--kv-retention-rate", 0.4, "--decode", "slow_fast"]
    return False, flags


def _given(flags: dict[str, Any]) -> Iterable[Any]:
    """Those that have a value, with it."""
    return [word for name, value in flags.items() if value is not None for word in (name, value)]
