"""Slow-fast decoding on SGLang's batches: which rows alternate, and whose rows they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_serving

from fathom.runtime.decode import Entry, Outcome, Shape, SlowFast, Step
from fathom.runtime.sfi.options import SfiOptions
from fathom.runtime.sfi.trigger import trigger_ids, trigger_mask
from fathom.runtime.sglang_host.requests import policy_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class Settings:
    """What the operator asked for; set once per process, before the engine is made."""

    options: SfiOptions = field(default_factory=SfiOptions)


SETTINGS = Settings()


def alternates(request: "Req") -> bool:
    """Whether the request decodes slow and fast."""
    return policy_of(request).get("decode", "full") == "slow_fast"


def decoding(batch: "ScheduleBatch") -> list["Req"]:
    """The requests of a batch that decode one token; they are its last ones."""
    if batch.forward_mode.is_decode():
        return batch.reqs
    return batch.decoding_reqs or [] if batch.forward_mode.is_mixed() else []


def concerns(batch: "ScheduleBatch") -> bool:
    """Whether some decoding request of the batch alternates.

    Nothing is drafted for the others in such a step: a pass over drafted tokens reads everything.
    """
    return any(map(alternates, decoding(batch)))


def why_not(runner: "ModelRunner", tokenizer: Any, depth_pages: bool, ps: Any) -> str:
    """Why this model or machine cannot decode slow and fast; "" where it can."""
    reasons = {
        "KV is not in depth pages on this machine": not depth_pages,
        "the model has sliding-window layers": bool(runner.sliding_window_size),
        "no tokenizer is loaded": tokenizer is None,
        "streaming sessions are on": get_serving().enable_streaming_session,
        "the model is spread over several processes": ps.tp_size > 1 or ps.pp_size > 1,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def build(runner: "ModelRunner", tokenizer: Any) -> SlowFast:
    """The state for the served model: buffers and phases. Attention is compiled by the backend's own warm-up.

    Raises:
        ValueError: when the operator's budget does not hold one compact buffer.
    """
    config, pool = runner.model_config, runner.token_to_kv_pool
    keys, values = pool.get_key_buffer(0), pool.get_value_buffer(0)
    rows = runner.req_to_token_pool.req_to_token
    shape = Shape(
        layers=pool.layer_num,
        span=pool.span,
        heads=config.num_attention_heads,
        kv_heads=keys.shape[1],
        head_dim=keys.shape[2],
        value_dim=values.shape[2],
        dtype=keys.dtype,
        longest=rows.shape[1],
        rows=rows.shape[0],
    )
    vocabulary = config.vocab_size
    ids = trigger_ids(getattr(tokenizer, "backend_tokenizer", tokenizer))
    mask = trigger_mask([token for token in ids if token < vocabulary], vocabulary)
    try:
        return SlowFast(shape, SETTINGS.options, mask)
    except ValueError as error:
        raise ValueError(f"--sfi-buffer-mib: {error}") from None


@contextmanager
def phases(
    state: SlowFast | None, batch: "ScheduleBatch", runner: "ModelRunner"
) -> Iterator[dict["Req", Outcome]]:
    """Within it, the rows of a batch that decode read what their phases say; at its end it yields what they did.

    Nothing happens for a batch without a request that alternates.
    """
    found: dict[Req, Outcome] = {}
    if state is None or not concerns(batch):
        yield found
        return
    step = begin(state, batch)
    runner.attn_backend.alternating = step
    try:
        with state.executor.step():
            yield found
    finally:
        runner.attn_backend.alternating = None
    found.update(outcomes(step, batch))


def begin(state: SlowFast, batch: "ScheduleBatch") -> Step:
    """Plan the step of a batch in which some request alternates."""
    requests = {request.kv.req_pool_idx: request for request in decoding(batch)}
    rows, lengths = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
    prefilling = 0 if batch.forward_mode.is_decode() else len(batch.reqs) - len(requests)
    entries = []
    for row, length in zip(rows[prefilling:], lengths[prefilling:], strict=True):
        request = requests.get(row)  # other beams of a request have rows of their own
        tokens = request.output_ids if request is not None and alternates(request) else None
        entries.append(Entry(row, length, tokens))
    return state.begin(entries)


def outcomes(step: Step, batch: "ScheduleBatch") -> dict["Req", Outcome]:
    """End a step; what it was for the requests that alternate."""
    requests = {request.kv.req_pool_idx: request for request in decoding(batch)}
    found = zip(step.rows.tolist(), step.finish(), strict=True)
    return {requests[row]: outcome for row, outcome in found if outcome is not None}
