"""``fathom explain``: what a policy does to a prompt of a model, and what that should cost. Needs no weights.

The staircase is the engine's own arithmetic on token counts; the ratios are those of ``runtime/cost.py``.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fathom.runtime import config, cost, quantization
from fathom.runtime.plan import PlanError
from fathom.runtime.sfi import options as sfi_options
from fathom.runtime.sfi.config import SfiConfig
from fathom.runtime.sglang_host.engine_args import NARROW
from fathom.server.command import checks
from fathom.server.command.checks import StartError
from fathom.server.command.command_line import DEMO_TUNINGS, Parser
from fathom.server.command.memory_flags import DEFAULT_PROPAGATION_BUFFER
from fathom.server.command.profile import limits_of
from fathom.server.page import picture
from fathom.server.page.picture import Staircase
from fathom.server.units import flops, json_object, size, token_count

KV_BYTES = {"bf16": 2, "bfloat16": 2} | dict.fromkeys(NARROW, 1)
"""Of a number in what ``--kv-cache-dtype`` names; with ``auto`` it is the model's."""
MODELOPT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt may say what others say in ``quantization_config``."""
SENSES = {"vision_config": "images", "audio_config": "sound"}
DESCRIPTION = """What a policy does to a prompt: how many tokens each span of layers computes and keeps, what KV
memory that takes, and what it should save, by counting FLOPs and bytes. Reads a model's config.json only.
"""


@dataclass(frozen=True)
class Case:
    """What is explained.

    Attributes:
        shape, draft: the target, and the draft model or None.
        limits: what a server of the model would allow.
        choice: the policy, and what its preset leaves out.
        plan: the staircase in numbers.
        output: tokens of the answer.
        batch: equal requests that decode together.
        page_size: tokens of a depth page.
        notes: what else the figures rest on, in sentences.
    """

    shape: cost.ModelShape
    draft: cost.ModelShape | None
    limits: config.Limits
    choice: config.Choice
    plan: cost.CostPlan
    output: int
    batch: int
    page_size: int
    notes: tuple[str, ...] = ()

    @property
    def spans(self) -> range:
        """First layers of the spans, from 0."""
        return range(0, self.shape.layers, self.limits.span)

    @property
    def staircase(self) -> Staircase:
        """For the picture."""
        plan, at = self.plan, self.spans
        counts = ([entries[i] for i in at] for entries in (plan.computed, plan.retained))
        return Staircase.of_spans(plan.prompt, self.limits.span, *counts)

    def span_bytes(self, plan: cost.CostPlan) -> list[int]:
        """[spans] bytes of KV held when the last token has been decoded (it has none yet), in whole pages."""
        pages = cost.depth_pages(plan.held(self.output - 1), self.limits.span, self.page_size)
        return [n * self.page_size * self.limits.span * self.shape.kv_entry_bytes for n in pages]

    @property
    def dense(self) -> cost.CostPlan:
        """The plan of the exact policy."""
        return cost.make_plan(self.shape.layers, self.plan.prompt)


def parser() -> Parser:
    """The command line."""
    result = Parser(prog="fathom explain", description=DESCRIPTION, allow_abbrev=False)
    add = result.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or config.json (default: the demo model)")
    add(
        "--prompt-tokens",
        type=token_count,
        required=True,
        metavar="N",
        help="length of the prompt: 8192 or 8k",
    )
    add(
        "--output-tokens",
        type=token_count,
        default=128,
        metavar="N",
        help="of the answer (default: %(default)s)",
    )
    add("--preset", help="a preset, which --policy refines")
    add("--policy", type=json_object, default={}, metavar="JSON", help="a request's fathom object")
    add("--draft-model-path", "--draft-model", metavar="MODEL", help="draft: folder or config.json")
    add(
        "--batch", type=token_count, default=1, metavar="N", help="requests that decode together (default: 1)"
    )
    add("--depth-span", type=int, metavar="LAYERS", help="as for fathom serve")
    add("--tsp-layer", type=int, metavar="LAYERS", help="as for fathom serve")
    add("--page-size", type=token_count, default=1, metavar="N", help="tokens per depth page (default: 1)")
    add(
        "--kv-cache-dtype",
        choices=["auto", *KV_BYTES],
        default="auto",
        help="as for fathom serve (default: the model's)",
    )
    add("--propagation-buffer", type=int, metavar="TOKENS", help="as for fathom serve")
    add("--profile", type=Path, metavar="FILE", help="as for fathom serve")
    add("--slow-share", type=float, metavar="SHARE", help="of decode steps under slow_fast that read everything "
        "(default: the least, one after --sfi-refresh-budget fast ones)")  # fmt: skip
    add("--png", type=Path, metavar="FILE", help="draw the staircase (needs matplotlib)")
    add("--json", action="store_true", help="print the figures as one JSON object")
    sfi_options.add_arguments(result)
    return result


def read_config(model: str) -> tuple[cost.ModelShape, dict[str, Any]]:
    """The shape of a model from its folder or its ``config.json``, and what that says of its text layers.

    Raises:
        StartError: when there is none, or one that cannot be counted.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text())
        beside = path.with_name(MODELOPT_CONFIG)
        if beside.exists() and not quantization.told(content):
            content["quantization_config"] = json.loads(beside.read_text())["quantization"]
        shape = cost.ModelShape.from_config(content)
        sizes = {
            name: value for name, value in asdict(shape).items() if name not in ("layer_bits", "windows")
        }
        if odd := [name for name, value in sizes.items() if type(value) is not int or value < 1]:
            raise ValueError(f"the model's {odd[0]} is no positive integer")
        if shape.layer_bits is not None and not 1 <= shape.layer_bits <= 32:
            raise ValueError(f"weights of {shape.layer_bits:g} bits")
        return shape, cost.of_text(content)
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from None
    except KeyError as error:
        raise StartError(
            f"{path}: {error} is missing or not known, so its layers cannot be counted"
        ) from None
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        no_json = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        reason = "not JSON" if no_json else str(error)
        raise StartError(f"{path}: {reason}") from None


def _window(text: Mapping[str, Any]) -> int:
    """The sliding window of some of a model's layers, in tokens; 0 where its config asks for none."""
    kinds = text.get("layer_types")
    used = text.get("use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    return (text.get("sliding_window") or 0) if used else 0


def case_of(options: argparse.Namespace) -> Case:
    """What the command line asks about.

    Raises:
        StartError: for a model, a policy or a number that a server would refuse, and for a size that only a run
            decides.
    """
    demo, prompt = options.model is None, options.prompt_tokens
    shape, content = read_config(options.model or str(checks.demo_model()))
    context = content.get("max_position_embeddings")
    drafted = options.draft_model_path or (str(checks.demo_model("draft")) if demo else None)
    draft = read_config(drafted)[0] if drafted else None
    if options.kv_cache_dtype in KV_BYTES:
        itemsize = KV_BYTES[options.kv_cache_dtype]
        shape = replace(shape, kv_itemsize=itemsize)
        draft = draft and replace(draft, kv_itemsize=itemsize)
    if options.preset and "preset" in options.policy:
        raise StartError("give the preset by --preset or in --policy, not both")
    asked = options.policy | ({"preset": options.preset} if options.preset else {})
    buffer = options.propagation_buffer
    if buffer is not None and buffer < 0:
        raise StartError(f"--propagation-buffer must be at least 0, got {buffer}")
    if buffer is None:
        buffer = min(DEFAULT_PROPAGATION_BUFFER, context or DEFAULT_PROPAGATION_BUFFER)
    try:
        sfi = sfi_options.from_arguments(options).config
        given = options.depth_span, options.tsp_layer, options.profile
        limits = limits_of(shape.layers, *given, draft is not None, sfi.selected)
        choice = config.choose(asked, None, limits, DEMO_TUNINGS if demo else None)
        slow_fast = _slow_fast(sfi, choice.policy, options.slow_share)
        run = replace(choice.policy, tsp_rate=1.0) if prompt > buffer else choice.policy
        plan = cost.policy_plan(
            run, shape.layers, prompt, draft=draft, tsp_layer=limits.tsp_layer, slow_fast=slow_fast
        )
        plan = replace(plan, packed=sfi.sink + sfi.selected if plan.packed else 0)  # a buffer has one size
    except (PlanError, ValueError) as error:  # a PolicyError too
        raise StartError(str(error)) from None
    notes = _notes_on(choice.policy, prompt, buffer, slow_fast)
    if context and prompt + options.output_tokens > context:
        notes.append(
            f"The model's context is {context:,} tokens: a server would refuse this prompt and answer."
        )
    if (window := _window(content)) and not shape.windows:
        notes.append(
            f"Layers with a sliding window of {window:,} tokens are counted as if they saw every token."
        )
    elif any(shape.windows):
        notes.append(
            f"Layers with a sliding window ({sum(map(bool, shape.windows))} of {shape.layers}): a token sees the "
            f"last {max(shape.windows):,} positions. KV that no window reaches any more is held all the same."
        )
    if seen := [name for part, name in SENSES.items() if content.get(part)]:
        notes.append(
            f"The checkpoint takes {' and '.join(seen)} too, which is not counted; a server takes no policy but "
            "decode: slow_fast, unless --language-model-only serves its texts alone."
        )
    if kept := quantization.kept_layers(content):
        notes.append(
            f"Layers that were left as they were ({', '.join(kept[:3])}) are counted as quantized ones."
        )
    if shape.experts > 1 and options.batch > 1:
        notes.append(
            f"Weights read: the experts that {options.batch} tokens meet, each going to any "
            f"{shape.experts_per_token} of {shape.experts} with the same chance."
        )
    sizes = options.output_tokens, options.batch, options.page_size
    return Case(shape, draft, limits, choice, plan, *sizes, tuple(notes))


def _slow_fast(sfi: SfiConfig, policy: config.Policy, slow_share: float | None) -> cost.SlowFast:
    """What fast steps read: the server's numbers, or those of the request."""
    selected, recent = (
        own if isinstance(own, int) else numbers
        for own, numbers in ((policy.sfi_budget, sfi.selected), (policy.sfi_window, sfi.recent))
    )
    share = 1 / (sfi.refresh_budget + 1) if slow_share is None else slow_share
    return cost.SlowFast(share, sfi.sink, recent, selected)


def _notes_on(policy: config.Policy, prompt: int, buffer: int, slow_fast: cost.SlowFast) -> list[str]:
    notes = []
    if policy.tsp_rate < 1 and prompt > buffer:
        notes.append(
            f"Longer than the propagation buffer of {buffer:,} tokens: no tokens are selected by FastKV."
        )
    if policy.prefill_keep_rate != 1 and prompt < policy.min_prompt_tokens:
        notes.append(
            f"Shorter than min_prompt_tokens, {policy.min_prompt_tokens:,}: the prompt enters whole."
        )
    if policy.prefill_keep_rate != 1 and prompt >= policy.min_prompt_tokens and policy.prefill_protect:
        kinds = ", ".join(policy.prefill_protect)
        notes.append(
            f"What prefill_protect names ({kinds}) stays and counts in SpecPrefill's budget; only where it alone "
            "exceeds it is more kept than shown."
        )
    if policy.decode == "slow_fast":
        notes.append(
            f"{slow_fast.slow_share:.1%} of decode steps read everything; a text's sentences make it more."
        )
    if policy.speculative:
        notes.append(
            "TPOT is per step of the target; drafting makes fewer steps, and takes time, which no shape tells."
        )
        if policy.prefill_keep_rate == 1 and policy.kv_retention_rate < 1:
            notes.append(
                "With drafting the whole prompt's KV below the first narrowing stays until the answer's end."
            )
    return notes


def figures(case: Case) -> dict[str, Any]:
    """Everything that is shown, as JSON: tokens, FLOPs, bytes, and ratios (dense / policy).

    A figure that the model cannot give is None: reads of an answer of one token, which no decode step follows.
    """
    costs = {"dense": _costs(case, case.dense), "policy": _costs(case, case.plan)}
    ratios: dict[str, float | None] = {"kv": costs["dense"]["kv_bytes"] / costs["policy"]["kv_bytes"]}
    if case.output > 1:
        found = cost.predict(case.shape, case.plan, case.output, case.batch)
        ratios |= {"ttft": found.ttft, "tpot": found.tpot, "tpot_kv": found.tpot_kv}
    else:
        ttft = [c["target_flops"] + c["draft_flops"] for c in costs.values()]
        ratios |= {"ttft": ttft[0] / ttft[1], "tpot": None, "tpot_kv": None}
    return {
        "policy": case.choice.policy.to_wire(),
        "left_out": case.choice.left_out,
        "prompt_tokens": case.plan.prompt,
        "output_tokens": case.output,
        "batch": case.batch,
        "spans": [asdict(stair) for stair in case.staircase.stairs],
        "costs": costs,
        "ratios": ratios,
        "notes": case.notes,
    }


def _costs(case: Case, plan: cost.CostPlan) -> dict[str, Any]:
    reads = [cost.decode_bytes(case.shape, plan, at, case.batch) for at in range(1, case.output)]
    held = case.span_bytes(plan)
    return {
        "target_flops": cost.prefill_flops(case.shape, plan, cost.SERVED),
        "draft_flops": cost.draft_flops(plan, cost.SERVED),
        "step_weight_bytes": case.shape.step_weight_bytes(case.batch),
        "step_kv_bytes": sum(step.kv for step in reads) / len(reads) if reads else None,
        "span_kv_bytes": held,
        "kv_bytes": sum(held),
        "compact_bytes": cost.packed_bytes(case.shape, plan),
    }


def report(case: Case, found: dict[str, Any]) -> str:
    """The figures as text."""
    return "\n".join(["", *_head(case), "", *_stairs(case, found), "", *_sums(found), "", *_notes(case)])


def _head(case: Case) -> list[str]:
    shape, policy = case.shape, case.choice.policy
    set_values = policy.differences()
    shown = (
        ", ".join(f"{name} {json.dumps(value)}" for name, value in set_values.items()) or "nothing is dropped"
    )
    lines = [
        f"target   {_shape(shape)}, in spans of {case.limits.span}; FastKV selects above layer "
        f"{case.limits.tsp_layer or 'none'}",
        f"draft    {_shape(case.draft) if case.draft else 'none'}",
        f"policy   {policy.preset}: {shown}",
    ]
    return lines + [f"left out {name}: {reason}" for name, reason in case.choice.left_out.items()]


def _shape(shape: cost.ModelShape) -> str:
    heads = f"{shape.heads} heads and {shape.kv_heads} KV heads of {shape.head_dim}"
    return f"{shape.layers} layers of {shape.hidden:,}, {heads}, vocabulary {shape.vocab:,}"


def _stairs(case: Case, found: dict[str, Any]) -> list[str]:
    plan, batch = case.plan, f", {case.batch} at once" if case.batch > 1 else ""
    rows = [
        f"{plan.prompt:,} prompt tokens, {case.output:,} output tokens{batch}; KV when the answer is complete",
        "",
    ]
    rows.append(f"{'layers':>8}  {'computed':>10}  {'kept':>10}  {'KV held':>12}  {'dense':>12}  staircase")
    held, dense = (found["costs"][name]["span_kv_bytes"] for name in ("policy", "dense"))
    for stair, ours, whole in reversed(list(zip(case.staircase.stairs, held, dense, strict=True))):
        rows.append(
            f"{stair.layers:>8}  {stair.computed:>10,}  {stair.kept:>10,}  {size(ours):>12}  {size(whole):>12}  "
            + _bar(stair, plan.prompt)
        )
    totals = [found["costs"][name]["kv_bytes"] for name in ("policy", "dense")]
    rows.append(f"{'all':>8}  {'':>10}  {'':>10}  {size(totals[0]):>12}  {size(totals[1]):>12}")
    return rows


def _bar(stair: picture.Stair, prompt: int, width: int = 32) -> str:
    kept, computed = (-(-tokens * width // prompt) for tokens in (stair.kept, stair.computed))
    return "█" * kept + "▒" * (computed - kept) + "·" * (width - computed)


def _sums(found: dict[str, Any]) -> list[str]:
    dense, policy, ratios = found["costs"]["dense"], found["costs"]["policy"], found["ratios"]
    per_step = f"decode step of {found['batch']}" if found["batch"] > 1 else "decode step"

    def row(name: str, key: str, unit: Any, ratio: float | None = None) -> str:
        values = ("-" if costs[key] is None else unit(costs[key]) for costs in (dense, policy))
        cells = "  ".join(f"{value:>14}" for value in values)
        return f"{name:<34}{cells}  {f'{ratio:.2f}' if ratio else '':>14}".rstrip()

    def predicted(name: str, ratio: float | None) -> str:
        return f"{name:<34}{'':>30}  {'-' if ratio is None else f'{ratio:.2f}':>14}"

    lines = [f"{'':<34}{'dense':>14}  {'policy':>14}  {'dense / policy':>14}"]
    lines += [row("prefill, target", "target_flops", flops), row("prefill, draft", "draft_flops", flops)]
    lines += [predicted("predicted TTFT, by FLOPs", ratios["ttft"])]
    lines += [row(f"{per_step}, weights read", "step_weight_bytes", size)]
    lines += [row(f"{per_step}, KV read (mean)", "step_kv_bytes", size, ratios["tpot_kv"])]
    lines += [predicted("predicted TPOT, by bytes read", ratios["tpot"])]
    lines += [row("KV held", "kv_bytes", size, ratios["kv"])]
    return [*lines, row("compact buffer of fast steps", "compact_bytes", size)]


def _notes(case: Case) -> list[str]:
    general = "FLOPs and bytes, not times: kernels, caches and launches decide how much of a ratio is seen."
    return [f"- {note}" for note in (*case.notes, general)]


def main(argv: list[str]) -> int:
    """Explain, and draw.

    Raises:
        StartError: for what keeps it from doing so.
        SystemExit: from the parser.
    """
    options = parser().parse_args(argv)
    if options.png is not None and not picture.can_draw_png():
        raise StartError("--png needs matplotlib, which is not installed: pip install matplotlib")
    case = case_of(options)
    found = figures(case)
    print(json.dumps(found, indent=2) if options.json else report(case, found))
    if options.png is not None:
        title = f"{case.choice.policy.preset}: {case.plan.prompt:,} prompt tokens"
        try:
            picture.png(case.staircase, title, options.png)
        except (OSError, ValueError) as error:  # matplotlib names an unknown ending by a ValueError
            raise StartError(f"--png {options.png}: {getattr(error, 'strerror', None) or error}") from None
        print(f"wrote {options.png}", file=sys.stderr)
    return 0
