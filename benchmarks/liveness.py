"""Proof that the servers under test are what the table calls them, from what they say of themselves."""

from __future__ import annotations

from collections.abc import Collection

import httpx

from fathom.benchmarks import vllm_env
from fathom.benchmarks.client import BenchError, Reply
from fathom.benchmarks.servers import Server

_OURS = "fathom.runtime."
CHANCE_SHARE = 1 / 16
"""Of a prompt's own tokens that may be in the prefix cache: another one may begin like it by chance."""
_SGLANG_FACTS = (
    *("version", "attention_backend", "chunked_prefill_size", "max_total_num_tokens", "page_size"),
    *("disable_overlap_schedule", "disable_radix_cache", "sampling_backend"),
)


def get(server: Server, path: str) -> httpx.Response:
    """What a server answers. BenchError when it does not, or its address is none."""
    try:
        return httpx.get(server.url + path, headers=server.headers, timeout=30, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"{server.url}: {type(error).__name__} {error}") from error


def _fathom(server: Server) -> dict:
    info = get(server, "/fathom/info").json()
    engines = info["engine"]
    for engine in engines or [None]:
        for part in ("scheduler", "worker"):
            if engine is None or not str(engine[part]).startswith(_OURS):
                raise BenchError(
                    f"{server.variant.name}: the {part} process does not run Fathom's own: {engine}"
                )
    facts = _sglang_facts(server)
    return {**facts, "engine": engines, "policy": info["policy"], "versions": info["versions"]}


def _sglang_facts(server: Server) -> dict:
    info = get(server, "/server_info").json()
    return {key: info[key] for key in _SGLANG_FACTS if key in info}


def _sglang(server: Server) -> dict:
    if get(server, "/fathom/info").status_code != 404:
        raise BenchError(f"{server.variant.name}: this is a Fathom server, not stock SGLang")
    return _sglang_facts(server)


def _vllm(server: Server) -> dict:
    answer = get(server, "/version")
    try:
        version = str(answer.json()["version"])
    except (ValueError, KeyError, TypeError):
        raise BenchError(
            f"{server.url} is not a vllm server: /version is {answer.status_code}, {answer.text[:80]!r}"
        ) from None
    if not version.startswith(vllm_env.VERSION):
        raise BenchError(f"{server.variant.name}: vLLM {version}, expected {vllm_env.VERSION}")
    return {"version": version}


_PROOFS = {"fathom": _fathom, "sglang": _sglang, "vllm": _vllm}


def identify(server: Server) -> dict:
    """What the server reports of itself. BenchError when it is not the engine that its variant names."""
    return _PROOFS[server.variant.engine](server)


def requests_of(identity: dict) -> int:
    """Requests that Fathom's own worker has seen."""
    return sum(engine["steps"]["requests"] for engine in identity["engine"])


def check_served(server: Server, sent: int) -> None:
    """BenchError if Fathom's own worker has seen fewer requests than the `sent` that it is credited with."""
    if server.variant.engine == "fathom":
        seen = requests_of(identify(server))
        if seen < sent:
            raise BenchError(f"{server.variant.name}: its worker saw {seen} of {sent} requests")


def check_room(server: Server, identity: dict, tokens: int) -> None:
    """BenchError where a dense server's KV pool, which its memory bounds, is smaller than the documents need."""
    pool = identity.get("max_total_num_tokens")
    if server.variant.dense and pool is not None and pool < tokens:
        raise BenchError(
            f"{server.variant.name}: its KV pool holds {pool} tokens, the documents and what is asked about them "
            f"take {tokens}, so they would be read again all the time; fewer --documents or shorter --prompts"
        )


def check_cached(server: Server, reply: Reply, tokens: int) -> None:
    """BenchError unless a Fathom answer found that many tokens of its prompt in the prefix cache."""
    if reply.fathom is not None and reply.fathom["cached_tokens"] < tokens:
        raise BenchError(
            f"{server.variant.name}: {reply.fathom['cached_tokens']} tokens of the document were cached, "
            f"expected {tokens} of {reply.prompt_tokens}: this policy cannot be measured with --documents"
        )


def check_fresh(server: Server, reply: Reply, known: int) -> None:
    """BenchError for a prompt of which the server had more than the `known` tokens: its times mean nothing."""
    if reply.fathom is None:
        return
    cached, own = reply.fathom["cached_tokens"], reply.prompt_tokens - known
    if cached > known + max(1, own * CHANCE_SHARE):
        raise BenchError(
            f"{server.variant.name}: {cached} of {reply.prompt_tokens} tokens were in the prefix cache; two "
            "policies that are the same, or the --seed of an earlier run"
            + (f" (expected at most {known})" if known else "")
        )


def check_reply(server: Server, reply: Reply) -> None:
    """BenchError unless a Fathom answer reports exactly what its variant asks for."""
    if server.variant.engine != "fathom":
        return
    name, report = server.variant.name, reply.fathom
    if report is None:
        raise BenchError(f"{name}: an answer came without the fathom object that says what was done")
    reduced = (
        report["kept_tokens"] < report["prompt_tokens"]
        or report["kv_bytes"] < report["kv_bytes_dense"]
        or report["fast_steps"] > 0
        or report["draft_read_tokens"] > 0
    )
    if server.variant.dense and reduced:
        raise BenchError(f"{name}: a dense request was not served dense: {report}")
    if not server.variant.dense and not reduced:
        raise BenchError(
            f"{name}: asked for {server.variant.policy}, but the request was served dense: {report}"
        )
    if missing := _left_out(report, server.variant.members):
        raise BenchError(f"{name}: asked for {server.variant.policy}, but {missing}: {report}")


def _left_out(report: dict, asked: Collection[str]) -> str | None:
    """A mechanism of the policy that the scheduler ran under, but of which the account shows nothing.

    Args:
        asked: members of the policy that the variant names; what the server's operator adds is had where it is.
    """
    policy = report.get("policy", {})
    if report.get("propagation_skipped"):
        return "the prompt was too long for the buffer of hidden states"
    if report.get("dense_fallbacks"):
        return "no compact buffer was free"
    if missing := _whole({name: value for name, value in policy.items() if name in asked}, policy, report):
        return missing
    # Whether it pays to propose anything is decided by request; that takes a draft that reads along.
    if policy.get("speculative") and not report["draft_read_tokens"]:
        return "the draft has read nothing"
    if policy.get("decode") == "slow_fast" and not policy["speculative"] and not report["fast_steps"]:
        return "no step was fast"
    return None


def _whole(asked: dict, policy: dict, report: dict) -> str | None:
    """What was asked to keep less of a prompt, and kept all of this one."""
    prompt, rate = report["prompt_tokens"], asked.get("prefill_keep_rate", 1)
    if rate != 1:
        if prompt < policy.get("min_prompt_tokens", 0):
            return f"SpecPrefill leaves prompts below min_prompt_tokens {policy['min_prompt_tokens']} whole"
        if not report["draft_read_tokens"]:
            return "the draft has read nothing"
        if rate != "auto" and report["kept_tokens"] == prompt:
            return "SpecPrefill kept the whole prompt"
    if asked.get("tsp_rate", 1) != 1 and report.get("propagated_tokens", 0) is None:
        return "FastKV let the whole prompt go on"
    if asked.get("kv_retention_rate", 1) != 1 and report.get("retained_tokens", 0) == prompt:
        return "all KV was retained"
    if asked.get("depth_cutoff", "full") != "full" and report.get("deep_tokens", 0) == prompt:
        return "the whole prompt was computed at the last layer"
    return None
