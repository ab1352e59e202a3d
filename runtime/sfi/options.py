"""The operator's numbers for slow-fast decoding: flags generated from the frozen configurations."""

import argparse
from dataclasses import Field, dataclass, field, fields
from typing import Any

from fathom.runtime.sfi.config import SelectorConfig, SfiConfig

PREFIX = "--sfi-"
MEMORY_FIELDS = ("buffer_mib", "evidence_mib")
WORDS = {
    "sink": "first tokens that every fast step reads",
    "recent": "last tokens that every fast step reads, its own included",
    "selected": "entries that a slow step chooses for the fast steps after it",
    "refresh_budget": "fast steps after which a slow one comes, whatever the tokens are",
    "minimum_gap": "fast steps before a trigger, such as the end of a sentence, counts again",
    "power": "how the attention of a KV head's queries is averaged: 1 is the mean, less dampens large entries",
    "norm_decay": "how strongly the Selector's prior favours keys of small norm",
    "position_decay": "how strongly the prior favours early tokens over late ones",
    "position_curve": "how late among the tokens that sets in: the higher, the later",
    "tail_brake": "how strongly the prior lowers the very last of the tokens to choose from",
    "prior_clip": "largest share of the prior in a token's score; the rest is attention",
    "nms_strength": "how strongly a token's score is lowered by a better one nearby",
    "nms_radius": "how near such a better one is looked for",
    "cross_head": "how strongly a KV head's score is lowered where other heads want the same position",
    "temperature": "how alike heads that want the same position are treated: the higher, the more",
    "epsilon": "keeps logarithms and quotients finite",
}
"""What each number is, for people."""


@dataclass(frozen=True)
class SfiOptions:
    """How this server decodes requests that ask for ``slow_fast``.

    Attributes:
        buffer_mib: memory of all compact buffers together, in MiB; None for :data:`DEFAULT_BUFFERS` of them, within
            :data:`DEFAULT_BUFFER_MIB` or a part of a GPU, 1 / :data:`GPU_SHARE`, whichever is more.
        evidence_mib: memory for attention logits and key norms of the requests that are refreshed in one step, in
            MiB; None for :data:`DEFAULT_EVIDENCE_MIB` or a part of a GPU, 1 / :data:`EVIDENCE_SHARE`, whichever is
            more. The longest request always fits; what does not fit waits for a later step.
    """

    config: SfiConfig = field(default_factory=SfiConfig)
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    buffer_mib: float | None = None
    evidence_mib: float | None = None


DEFAULT_BUFFERS = 16
DEFAULT_BUFFER_MIB = 1024.0
GPU_SHARE = 10
DEFAULT_EVIDENCE_MIB = 256.0
EVIDENCE_SHARE = 50
"""So that 16 requests of 128K tokens have room on an H100 with heads as those of Llama-3.1-8B: only where all
requests of a step have may it be launched before its tokens are known."""


def _numbers() -> list[Field[Any]]:
    return [*fields(SfiConfig), *fields(SelectorConfig)]


NAMES = tuple(f"sfi_{name}" for name in (*(item.name for item in _numbers()), *MEMORY_FIELDS))
"""Of the flags, as a parser's results have them."""


def _flag(name: str) -> str:
    return PREFIX + name.replace("_", "-")


def _legal(item: Field[Any]) -> str:
    low, high = item.metadata["low"], item.metadata["high"]
    return f">= {low:g}" if high is None else f"in [{low:g}, {high:g}]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per number of the two configurations, and the bounds on memory."""
    group = parser.add_argument_group(
        "slow-fast decoding (Slow-Fast Inference), for requests with decode slow_fast"
    )
    for item in _numbers():
        unit, source = item.metadata["unit"], item.metadata["source"]
        text = f"{WORDS[item.name]}; {unit}, {_legal(item)} (default: {item.default}; {source})"
        group.add_argument(_flag(item.name), type=item.type, metavar="N", help=text)
    group.add_argument(
        _flag("buffer_mib"),
        type=float,
        metavar="MIB",
        help="memory of all compact buffers; a request that finds none free decodes dense, and its answer says so "
        f"(default: {DEFAULT_BUFFERS} buffers, at most {DEFAULT_BUFFER_MIB:g} MiB or 1/{GPU_SHARE} of a GPU, at "
        "least one buffer)",
    )
    group.add_argument(
        _flag("evidence_mib"),
        type=float,
        metavar="MIB",
        help="memory for the logits of the requests that choose anew in one step; at least that of the longest "
        f"request (default: {DEFAULT_EVIDENCE_MIB:g} MiB or 1/{EVIDENCE_SHARE} of a GPU)",
    )


def from_arguments(arguments: argparse.Namespace) -> SfiOptions:
    """What the flags of :func:`add_arguments` ask for.

    Raises:
        ValueError: for an illegal number, with the flag's name.
    """
    given = {
        name: value
        for name in [*(item.name for item in _numbers()), *MEMORY_FIELDS]
        if (value := getattr(arguments, f"sfi_{name}")) is not None
    }
    for name in MEMORY_FIELDS:
        if not 0 < given.get(name, 1) < float("inf"):
            raise ValueError(f"{_flag(name)} must be a finite number > 0, in MiB, got {given[name]:g}")
    own = {name: given[name] for name in MEMORY_FIELDS if name in given}
    try:
        config, selector = SfiConfig(**_of(SfiConfig, given)), SelectorConfig(**_of(SelectorConfig, given))
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"{_flag(name)} {rest}") from None
    return SfiOptions(config, selector, **own)


def _of(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {item.name: given[item.name] for item in fields(kind) if item.name in given}
