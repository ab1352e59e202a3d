"""What a request may hold, checked before SGLang's engine sees it.

SGLang trusts some values that come from the network as they are: a wrong type, or a number beyond what a tensor or
the vocabulary holds, would end the scheduler or the detokenizer, and with it everybody's requests.
"""

from collections.abc import Iterable
from typing import Any, get_type_hints

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from fathom.server.middleware import MAX_GENERATIONS

MAX_TOP_LOGPROBS = 1024

INT64 = (-(1 << 63), (1 << 63) - 1)
INT32 = (-(1 << 31), (1 << 31) - 1)

UNTYPED = frozenset({"custom_params", "sampling_seed", "beam_width", "n"})
"""Sampling parameters with a check of their own, here or in SGLang."""

TYPES: dict[str, Any] = get_type_hints(SamplingParams)


def check(obj: GenerateReqInput, vocabulary: int) -> None:
    """Refuse what the engine could not survive or would not understand.

    Args:
        obj: a request as it came from its route.
        vocabulary: token ids of the model.

    Raises:
        ValueError: naming the field and what is legal.
    """
    sampling = obj.sampling_params
    for params in sampling if isinstance(sampling, list) else [sampling]:
        check_sampling(params or {}, vocabulary)
    _check_ids("input_ids", obj.input_ids, vocabulary)
    _check_ids("token_ids_logprob", obj.token_ids_logprob, vocabulary)
    _check_range("top_logprobs_num", obj.top_logprobs_num, 0, min(MAX_TOP_LOGPROBS, vocabulary))
    _check_range("logprob_start_len", obj.logprob_start_len, -1, INT32[1])
    _check_range("priority", obj.priority, *INT32)
    _check_range("max_thinking_tokens", obj.max_thinking_tokens, 0, INT32[1])


def check_sampling(given: dict[str, Any], vocabulary: int) -> None:
    """One set of sampling parameters; a null is SGLang's default.

    Raises:
        ValueError: for a wrong type, an integer beyond 32 bits (a seed: 64), or too many answers.
    """
    params = {name: value for name, value in given.items() if value is not None}
    for name in params.keys() & TYPES.keys() - UNTYPED:
        try:
            msgspec.convert(params[name], TYPES[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params.{name}: {str(error).partition(' - at')[0]}") from None
        if type(params[name]) is int:
            _check_range(name, params[name], *INT32)
    for name in ("n", "beam_width"):
        _check_range(name, params.get(name), 1, MAX_GENERATIONS)
    _check_range("sampling_seed", params.get("sampling_seed"), *INT64)
    _check_range("stop_token_ids", list(params.get("stop_token_ids") or ()), *INT32)
    _check_range("stream_interval", params.get("stream_interval"), 1, INT32[1])
    _check_bias(params.get("logit_bias"), vocabulary)


def _check_bias(bias: dict[str, float] | None, vocabulary: int) -> None:
    for token in bias or ():
        if not (token.isdecimal() and int(token) < vocabulary):
            raise ValueError(
                f"logit_bias must have token ids in [0, {vocabulary - 1}] as keys, got {token[:40]!r}"
            )


def _check_ids(name: str, ids: Any, vocabulary: int) -> None:
    """Token ids, or one list of them per prompt."""
    for entry in ids or () if isinstance(ids, list) else ():
        if isinstance(entry, list):
            _check_ids(name, entry, vocabulary)
        elif type(entry) is not int or not 0 <= entry < vocabulary:
            raise ValueError(f"{name} must be token ids in [0, {vocabulary - 1}], got {str(entry)[:40]}")


def _check_range(name: str, value: Any, low: int, high: int) -> None:
    """An integer, or one per prompt; None is the default."""
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    for entry in values:
        if entry is not None and (type(entry) is not int or not low <= entry <= high):
            raise ValueError(f"{name} must be an integer in [{low}, {high}], got {str(entry)[:40]}")
