"""Slow-fast decoding on SGLang's batches: which rows alternate, and whose rows they are."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_serving

from fathom.runtime.decode import Shape, SlowFast
from fathom.runtime.decode_chain import Chain
from fathom.runtime.decode_step import AS_SERVED, Ahead, Entry, Later, Outcome, Step
from fathom.runtime.sfi.options import SfiOptions
from fathom.runtime.sfi.rules import RANDOM, Reading
from fathom.runtime.sfi.trigger import Stretch, trigger_ids, trigger_mask
from fathom.runtime.sglang_host.attention import attention_layers
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.requests import alternates, policy_of
from fathom.runtime.sglang_host.step.rows import drafts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class Settings:
    """What the operator asked for; set once per process, before the engine is made."""

    options: SfiOptions = field(default_factory=SfiOptions)


SETTINGS = Settings()


def decoding(batch: "ScheduleBatch") -> list["Req"]:
    """The requests of a batch that decode one token; they are its last ones."""
    if batch.forward_mode.is_decode():
        return batch.reqs
    return batch.decoding_reqs or [] if batch.forward_mode.is_mixed() else []


def concerns(batch: "ScheduleBatch") -> bool:
    """Whether some decoding request of the batch alternates."""
    return any(map(alternates, decoding(batch)))


def reading_of(request: "Req") -> Reading:
    """What the request's policy says of its fast steps.

    A choice at random follows from the prompt and the sampling seed, so that the same request gets the same one.
    """
    policy = policy_of(request)
    rule = policy.get("sfi_selection", "fused")
    budget, window = (
        value if isinstance(value := policy.get(name, "server"), int) else None
        for name in ("sfi_budget", "sfi_window")
    )
    seed = 0
    if rule == RANDOM:
        told = repr([request.sampling_params.sampling_seed, *request.origin_input_ids]).encode()
        seed = int.from_bytes(hashlib.blake2s(told, digest_size=7).digest(), "big")
    return Reading(rule, budget, window, seed)


def why_not(runner: "ModelRunner", tokenizer: Any, depth_pages: bool, ps: Any) -> str:
    """Why this model or machine cannot decode slow and fast; "" where it can."""
    reasons = {
        "KV is not in depth pages on this machine": not depth_pages,
        "the model has sliding windows in all its layers": not attention_layers.has_whole_layer(runner.model),
        "the model reads a layer's KV more than once": attention_layers.shares_kv(runner.model)
        or getattr(runner.model_config.hf_text_config, "loop_num", 1) > 1,
        "no tokenizer is loaded": tokenizer is None,
        "streaming sessions are on": get_serving().enable_streaming_session,
        "the model is spread over pipeline stages": ps.pp_size > 1,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return "; ".join(filter(None, [*found, devices.why_not(runner.model_config, ps.tp_size)]))


def gpu_bytes(runner: "ModelRunner") -> int:
    """Memory of the model's GPU, of the smallest if there are several; 0 on a CPU.

    Requests have compact buffers on all of them or on none: it decides how far they go with one step.
    """
    on_cpu = torch.device(runner.device).type == "cpu"
    return 0 if on_cpu else devices.least(current_platform.get_device_total_memory(runner.gpu_id))


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
        heads=devices.heads_of(config, runner.ps.tp_size)[0],
        kv_heads=keys.shape[1],
        head_dim=keys.shape[2],
        value_dim=values.shape[2],
        dtype=keys.dtype,
        longest=rows.shape[1],
        rows=rows.shape[0],
        device=keys.device,
        memory=gpu_bytes(runner),
        devices=runner.ps.tp_size,
        query_dtype=config.dtype,
        windowed=attention_layers.windowed(runner.model),
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
    state: SlowFast | None,
    batch: "ScheduleBatch",
    runner: "ModelRunner",
    drafted: Mapping[int, int] | None = None,
    chain: Chain | None = None,
) -> Iterator[dict["Req", Outcome | Later]]:
    """Within it, the rows of a batch that decode read what their phases say; at its end it yields what they did.

    Nothing happens for a batch without a request that alternates.

    Args:
        drafted: in a decode batch that verifies drafted tokens, how many by place in the batch.
        chain: takes the step, where others of the batch follow before its tokens are known; nothing is yielded
            then.
    """
    found: dict[Req, Outcome | Later] = {}
    if state is None or not concerns(batch):
        yield found
        return
    step = begin(state, batch, drafted or {}, chain)
    runner.attn_backend.alternating = step
    try:
        with state.executor.step():
            yield found
    finally:
        runner.attn_backend.alternating = None
    if chain is None:
        found.update(outcomes(step, batch))
    else:
        chain.add(step)


def entry_of(
    state: SlowFast, request: "Req", length: int, drafted: int = 0, chain: Chain | None = None
) -> Entry:
    """A request that alternates; ``length`` is its tokens, the one that this step reads included."""
    row, tokens = request.kv.req_pool_idx, request.output_ids
    tokens = tokens if chain is None else chain.tokens(tokens)
    reading = AS_SERVED if row in state.seen else reading_of(request)
    ahead = length > len(request.origin_input_ids) + len(tokens)
    return Entry(row, length, tokens, drafted, reading, ahead)


def stretches(state: SlowFast | None, batch: "ScheduleBatch") -> dict["Req", Stretch]:
    """How far the drafting requests of a decode batch go on with fast steps; only those with a compact buffer."""
    if state is None:
        return {}
    own = [request for request in batch.reqs if alternates(request) and drafts(request)]
    state.take_in([entry_of(state, request, 0) for request in own])
    found = {request: state.stretch(request.kv.req_pool_idx) for request in own}
    return {request: stretch for request, stretch in found.items() if stretch is not None}


def begin(
    state: SlowFast, batch: "ScheduleBatch", drafted: Mapping[int, int], chain: Chain | None = None
) -> Step:
    """Plan the step of a batch in which some request alternates.

    Where tokens were drafted for a request that reads everything, only the requests that alternate belong to the
    step: such a pass over several tokens is one of prefill's kind.
    """
    requests = {request.kv.req_pool_idx: request for request in decoding(batch)}
    rows, lengths = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
    apart = not all(alternates(batch.reqs[place]) for place in drafted)
    first = 0 if batch.forward_mode.is_decode() else len(batch.reqs) - len(requests)
    entries, places = [], []
    for place in range(first, len(rows)):
        row, length = rows[place], lengths[place]
        request = requests.get(row)  # other beams of a request have rows of their own
        if request is not None and alternates(request):
            entries.append(entry_of(state, request, length, drafted.get(place, 0), chain))
        elif apart:
            continue
        else:
            entries.append(Entry(row, length, None))
        places.append(place - len(rows))
    step = state.begin(entries, np.array(places))
    if isinstance(step, Ahead):
        assert not drafted and batch.input_ids is not None
        step.look(batch.input_ids[-len(step) :])
    return step


def foresees(state: SlowFast | None, requests: Collection["Req"]) -> bool:
    """Whether the next decode step of these requests may be launched before its last tokens are known.

    Whoever may have to choose anew needs room for evidence then, and whoever drafts needs the tokens. Steps in
    which somebody may choose at random are not replayed: their fast ones are, if they are told apart before.
    """
    own = [request for request in requests if alternates(request)]
    at_random = any(policy_of(request).get("sfi_selection") == RANDOM for request in own)
    if state is None or at_random or any(map(drafts, requests)):
        return False
    longest = max((len(each.origin_input_ids) + len(each.output_ids) for each in own), default=0)
    return state.holds_evidence(len(own), longest + 2)


def known(state: SlowFast, request: "Req", later: Later) -> Outcome | None:
    """What a step was for a request, now that the token which it read is known."""
    if later.outcome is None and request.kv.req_pool_idx in state.pending:
        state.take_in([entry_of(state, request, 0)])
    return later.outcome


def outcomes(step: Step, batch: "ScheduleBatch") -> dict["Req", Outcome | Later]:
    """End a step; what it was for the requests that alternate."""
    requests = {request.kv.req_pool_idx: request for request in decoding(batch)}
    found = zip(step.rows.tolist(), step.finish(), strict=True)
    return {requests[row]: outcome for row, outcome in found if outcome is not None}
