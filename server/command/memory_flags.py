"""Options of ``fathom serve`` that say how KV is laid out, and how much is kept beside it."""

import argparse
from pathlib import Path

from fathom.runtime.sglang_host.options import AUTO, PREFILL_ATTENTION

DEFAULT_PROPAGATION_BUFFER = 32768
"""Tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group."""
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--depth-span",
        type=int,
        metavar="LAYERS",
        help="layers that share one page of KV; a cutoff must be a multiple of it (default: the largest that has "
        "3/4 and, if possible, 1/2 of the layers on a boundary)",
    )
    memory.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="what fathom calibrate found; options given here win over it",
    )
    memory.add_argument(
        "--tsp-layer",
        type=int,
        metavar="LAYERS",
        help="layers below FastKV's selection of tokens; a multiple of the depth span (default: the one nearest to "
        "half of the layers)",
    )
    memory.add_argument(
        "--propagation-buffer",
        type=int,
        metavar="TOKENS",
        help="hidden states that can wait for FastKV's selection while a prompt comes in chunks; a longer prompt "
        "is computed without it, and its answer says so; 0 for none (default: the context length, and at most "
        f"{DEFAULT_PROPAGATION_BUFFER})",
    )
    memory.add_argument(
        "--shallow-factor",
        type=int,
        metavar="N",
        help="how many tokens may be held for each one that fits at all depths: prompts that are kept at some "
        "depths only take less memory, so that more of them fit; a draft keeps its own KV of as many (default: as "
        "many as the model has spans; 2 on a GPU with a draft)",
    )
    memory.add_argument(
        "--gpu-depth-pages",
        action=argparse.BooleanOptionalAction,
        help="on a machine with an NVIDIA GPU: keep KV in depth pages, with every policy, on Fathom's Triton "
        "kernels and FlashInfer's; without, every request is served dense, by SGLang's own path (default: with, "
        "from compute capability 8.0 on)",
    )
    memory.add_argument(
        "--gpu-prefill-attention",
        choices=PREFILL_ATTENTION,
        default=AUTO,
        help="with depth pages on a GPU: by FlashInfer where that can be; the same, from copies in one piece "
        "where a step has many rows; or by Triton (default: %(default)s)",
    )


def problem(own: argparse.Namespace) -> str:
    """What is wrong with the values, with the name of the option and what is legal; "" where nothing is."""
    if own.propagation_buffer is not None and own.propagation_buffer < 0:
        return f"--propagation-buffer must be at least 0, got {own.propagation_buffer}"
    if own.shallow_factor is not None and own.shallow_factor < 1:
        return f"--shallow-factor must be at least 1, got {own.shallow_factor}"
    return ""
