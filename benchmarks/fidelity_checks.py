"""Did the server do what the policy asked for? An answer that did not is an error, never a score."""

from __future__ import annotations

from fathom.benchmarks.client import BenchError

COUNTERS = (
    *("prompt_tokens", "kept_tokens", "cached_tokens", "prefill_steps", "decode_steps", "slow_steps"),
    *("fast_steps", "draft_read_tokens", "draft_tokens", "accepted_tokens", "kv_bytes", "kv_bytes_dense"),
)
"""What every account holds besides the policy."""

SLACK = 64
"""Prompt tokens that a selection may keep beyond its rate: forced chunks, windows, rounding to blocks."""

LONG_ANSWER = 6
"""Output tokens from which an answer must show fast steps when they were asked for."""


def _echo_problem(asked: dict, policy: dict) -> str | None:
    """Each value asked for must be the one that the scheduler ran under."""
    only_preset = set(asked) == {"preset"}
    for name, value in asked.items():
        if (name != "preset" or only_preset) and policy.get(name) != value:
            return f"{name} was {value!r} in the request and {policy.get(name)!r} in the scheduler"
    return None


def _drops(policy: dict) -> bool:
    """Whether the policy asks to hold fewer KV entries than a dense run."""
    rates = ("prefill_keep_rate", "tsp_rate", "kv_retention_rate")
    return policy.get("depth_cutoff", "full") != "full" or any(policy.get(rate, 1.0) != 1.0 for rate in rates)


def _allowed(rate: float, prompt: float) -> float:
    """At least half of what was asked to go must be gone, and at least something."""
    return min(prompt - 1, (1 + rate) / 2 * prompt + SLACK)


def _kept_problem(policy: dict, report: dict) -> str | None:
    prompt, kept = report["prompt_tokens"], report["kept_tokens"]
    rate = policy.get("prefill_keep_rate", 1.0)
    if rate == "auto":
        return None if kept <= prompt else f"{kept} of {prompt} prompt tokens kept"
    if rate != 1.0 and kept > _allowed(rate, prompt):
        return f"{kept} of {prompt} prompt tokens kept at prefill_keep_rate {rate}"
    rate, deep = policy.get("tsp_rate", 1.0), report.get("deep_tokens", 0)
    if rate != 1.0 and deep > _allowed(rate, prompt):
        return f"{deep} of {prompt} prompt tokens at the last layer at tsp_rate {rate}"
    if not _drops(policy) and kept != prompt:
        return f"{kept} of {prompt} prompt tokens kept, but nothing was asked to go"
    return None


def _kv_problem(policy: dict, report: dict, output: int) -> str | None:
    held, dense, prompt = report["kv_bytes"], report["kv_bytes_dense"], report["prompt_tokens"]
    shown = f"{held} of {dense} KV bytes held"
    if not _drops(policy):
        return None if held == dense else f"{shown}, but nothing was asked to go"
    if policy.get("prefill_keep_rate") != "auto" and held >= dense:
        return f"{shown}: nothing was dropped"
    rate = policy.get("kv_retention_rate", 1.0)
    dropped = (1 - held / dense) * (prompt + output) if dense else prompt
    if rate != 1.0 and prompt - dropped > _allowed(rate, prompt):
        return f"{shown} at kv_retention_rate {rate}"
    return None


def _steps_problem(policy: dict, report: dict, output: int) -> str | None:
    fast, drafted = report["fast_steps"], report["draft_tokens"]
    if policy.get("decode", "full") == "slow_fast":
        # Tokens that were drafted and stood need no steps of their own.
        if output >= LONG_ANSWER and report["decode_steps"] >= LONG_ANSWER - 2 and not fast:
            return "no fast step, with decode slow_fast"
    elif fast:
        return f"{fast} fast steps, but none were asked for"
    if policy.get("speculative", False):
        if not report["draft_read_tokens"]:
            return "the draft has read nothing, with speculative true"
        if report["accepted_tokens"] > drafted:
            return f"{report['accepted_tokens']} of {drafted} drafted tokens accepted"
    elif report["accepted_tokens"] or (drafted and policy.get("prefill_keep_rate", 1.0) == 1.0):
        return f"{drafted} tokens drafted, but none were asked for"
    return None


def check(name: str, asked: dict, report: dict | None, output: int) -> dict:
    """The account of one answer of `output` tokens. BenchError unless it shows what `asked` asks for.

    What to expect follows from the policy that the scheduler reports, which must hold every value asked for.
    """
    if not isinstance(report, dict):
        raise BenchError(f"{name}: an answer came without the fathom object that says what was done")
    if missing := [key for key in ("policy", *COUNTERS) if key not in report]:
        raise BenchError(f"{name}: the fathom object of an answer lacks {', '.join(missing)}")
    policy = report["policy"]
    problem = (
        _echo_problem(asked, policy)
        or _kept_problem(policy, report)
        or _kv_problem(policy, report, output)
        or _steps_problem(policy, report, output)
    )
    if problem:
        raise BenchError(f"{name}: asked for {asked}, but the answer's account says otherwise: {problem}")
    return {key: report[key] for key in COUNTERS}
