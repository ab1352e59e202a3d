"""`fathom calibrate tsp`: where FastKV's selection should sit, for one model and some prompts of its use."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from fathom.benchmarks import plot_calibration
from fathom.benchmarks.args import result_file
from fathom.benchmarks.progress import progress
from fathom.runtime import quantization
from fathom.runtime.plan import PlanError, choose_span
from fathom.server.command.checks import FAILURE, StartError, check_model, demo_model, one_line
from fathom.server.command.profile import Profile
from fathom.server.page.picture import can_draw_png
from fathom.server.units import token_count

DEFAULT_MAX_SHARE = 0.5


@dataclass(frozen=True)
class Result:
    """Distance of the final hidden states by candidate layer (Eq. 3, normalised as in Figure 3), and the choice."""

    model: str
    layers: int
    prompts: int
    tokens: int
    tsp_rate: float
    max_layer: int
    distances: dict[int, float]
    tsp_layer: int


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="fathom calibrate", description=__doc__)
    tsp = result.add_subparsers(dest="what", required=True).add_parser(
        "tsp", help="the layer of FastKV's selection", description=__doc__
    )
    add = tsp.add_argument
    add("prompts", type=Path, help='JSON Lines: {"text": …}, {"prompt": …} or {"messages": [...]} per line')
    add("--model-path", metavar="MODEL", help="folder, or name on Hugging Face (default: the demo model)")
    add("--tsp-rate", type=float, default=0.2, help="share of tokens that go on (default: %(default)s)")
    add("--max-layer", type=int, help="L_max: the last layer to recommend (default: half of the layers)")
    add(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="DISTANCE",
        help="take the earliest layer whose distance is at most this much above the best one's "
        "(default: %(default)g)",
    )
    add("--depth-span", type=int, metavar="LAYERS", help="layers per depth page, as the server will have it")
    add(
        "--max-tokens",
        type=token_count,
        default=8192,
        metavar="N",
        help="longer prompts keep their end (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="that the model runs in (default: %(default)s)",
    )
    add(
        "--out", type=result_file, default=Path("tsp.json"), help="the profile to write; a PNG goes beside it"
    )
    return result


def _chat(messages: Any) -> list[dict[str, Any]]:
    """TypeError for what is no list of messages: a template may take it for one."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TypeError("not a list of messages")
    return messages


def read_prompts(path: Path, tokenizer: Any, longest: int) -> list[list[int]]:
    """Token ids of the prompts in a file.

    Raises:
        StartError: for a file that cannot be read, a line without a prompt, or no line at all.
    """
    try:
        lines = path.read_text().split("\n")  # a string of JSON may hold other line separators
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartError(f"{path}: not text in UTF-8") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            if messages := item.get("messages"):
                ids = tokenizer.apply_chat_template(
                    _chat(messages), add_generation_prompt=True, return_dict=False
                )
            else:
                ids = tokenizer(item.get("prompt") or item["text"])["input_ids"]
        except (ValueError, KeyError, AttributeError, TypeError, TemplateError) as error:
            raise StartError(f"{path}, line {number}: no prompt in it ({type(error).__name__})") from None
        prompts.append(list(ids)[-longest:])
    if not prompts:
        raise StartError(f"{path}: no prompts in it")
    return prompts


def measure(model: str, prompts: list[list[int]], options: argparse.Namespace) -> Result:
    """Run the prompts.

    Raises:
        StartError: for options that leave no layer to choose from, or prompts that are too short to select from.
    """
    import torch

    from fathom.runtime.fastkv.calibrate import hidden_distance, recommend_layer
    from fathom.runtime.fastkv.config import FastKVConfig
    from fathom.runtime.fastkv.probe import Probe, stack

    if not 0 < options.tsp_rate < 1:
        raise StartError(f"--tsp-rate must be in (0, 1), got {options.tsp_rate}")
    if not 0 <= options.tolerance < math.inf:
        raise StartError(f"--tolerance must be a finite distance >= 0, got {options.tolerance:g}")
    config = FastKVConfig(tsp_rate=options.tsp_rate)
    shortest = min(map(len, prompts))
    if shortest <= config.window / options.tsp_rate:
        raise StartError(
            f"a prompt of {shortest} tokens is too short to select from at rate {options.tsp_rate}"
        )
    try:
        probe = Probe.load(model, config, getattr(torch, options.dtype))
    except Exception as error:  # of several libraries
        raise StartError(f"{model} cannot be loaded: {one_line(error)}", FAILURE) from None
    try:
        span = choose_span(probe.layers, options.depth_span)
    except PlanError as error:
        raise StartError(str(error)) from None
    most = options.max_layer if options.max_layer is not None else round(DEFAULT_MAX_SHARE * probe.layers)
    candidates = range(span, probe.layers, span)
    if not any(layer <= most for layer in candidates):
        raise StartError(f"no boundary between spans of {span} layers at or below layer {most}")
    states = [probe.final_states(prompt, candidates) for prompt in progress(prompts, unit="prompt")]
    distances = {layer: hidden_distance(*stack(states, layer)) for layer in candidates}
    best = recommend_layer(distances, most, options.tolerance)
    total = sum(map(len, prompts))
    return Result(model, probe.layers, len(prompts), total, options.tsp_rate, most, distances, best)


def table(result: Result) -> str:
    """What was found, as text."""
    rows = [f"{'T':>4}  {'distance':>10}"]
    for layer, distance in result.distances.items():
        mark = "  above --max-layer" if layer > result.max_layer else ""
        mark = "  recommended" if layer == result.tsp_layer else mark
        rows.append(f"{layer:>4}  {distance:>10.3g}{mark}")
    return "\n".join(rows)


def main(argv: list[str]) -> int:
    """Measure, show, and write the profile.

    Raises:
        StartError: for what keeps it from running.
        SystemExit: from the parser.
    """
    options = parser().parse_args(argv)
    from fathom.runtime.sglang_host.machine import torchvision_ops

    torchvision_ops.declare()  # transformers imports torchvision too
    model = options.model_path or str(demo_model())
    check_model(model)
    from transformers import AutoTokenizer, PretrainedConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise StartError(f"no tokenizer at {model}: {one_line(error)}") from None
    if quantization.told(PretrainedConfig.get_config_dict(model)[0]):
        raise StartError(
            f"{model} has quantized weights, which Transformers does not multiply here: calibrate with the model "
            "that it was made from, and serve it with that profile"
        )
    prompts = read_prompts(options.prompts, tokenizer, options.max_tokens)
    result = measure(model, prompts, options)
    print(table(result))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    picture = options.out.with_suffix(".png")
    if can_draw_png():
        plot_calibration.plot(result.distances, result.tsp_layer, result.max_layer, picture)
        print(f"wrote {picture}")
    Profile(layers=result.layers, tsp_layer=result.tsp_layer, measured=asdict(result)).write(options.out)
    print(f"wrote {options.out}; serve with it: fathom serve {model} --profile {options.out}")
    return 0
