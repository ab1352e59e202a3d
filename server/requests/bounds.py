"""What a request may hold, checked before SGLang's engine sees it.

SGLang trusts some values that come from the network as they are: a wrong type, or a number beyond what a tensor or
the vocabulary holds, would end the scheduler or the detokenizer, and with it everybody's requests.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec
import regex
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    GenerateReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from fathom.server.requests.refusals import INTERNAL_FIELDS, INTERNAL_SAMPLING_FIELDS, MAX_GENERATIONS

MAX_TOP_LOGPROBS = 1024

LONGEST_RID = 512
"""Characters of an id that a client gives its request."""

MAX_BATCH = 4096
"""Most generations of one request. Each is made ready before any of them begins, and all others wait meanwhile."""

INT64 = (-(1 << 63), (1 << 63) - 1)
INT32 = (-(1 << 31), (1 << 31) - 1)

MOST_BIAS = 1e30
LOGITS = {"temperature": (0.0, 1e6), "repetition_penalty": (1e-6, 2.0)}
"""What logits are scaled by. Together with biases up to :data:`MOST_BIAS` they stay numbers in float32."""

UNTYPED = frozenset({"custom_params", "sampling_seed", "beam_width", "n"})
"""Sampling parameters with a check of their own, here or in SGLang."""

TYPES: dict[str, Any] = get_type_hints(SamplingParams)

SESSION: dict[str, Any] = get_type_hints(SessionParams)
"""Members of ``session_params``."""

NOT_PLAIN = frozenset({"input_ids", "input_embeds", "sampling_params", "session_params", *INTERNAL_FIELDS})
"""Members that reach the engine in another form than they came in, or that no client may have."""

PLAIN: dict[str, Any] = {"lora_path": str | None} | {
    name: hint
    for name, hint in get_type_hints(TokenizedGenerateReqInput).items()
    if name in {item.name for item in fields(GenerateReqInput)} - NOT_PLAIN
}
"""What the engine's form of one request has in each member; in a batch of prompts it may be a list of these."""


def check(obj: GenerateReqInput, vocabulary: int, labels: Collection[str] = ()) -> None:
    """Refuse what the engine could not survive or would not understand.

    Args:
        obj: a request as it came from its route.
        vocabulary: token ids of the model.
        labels: names that a request's own metric labels may have.

    Raises:
        ValueError: naming the field and what is legal.
    """
    if obj.input_embeds is not None:
        # Vectors of another width than the model's, a model that is not in bfloat16, or a prompt of token ids in
        # the same batch: each of them ends SGLang's engine.
        raise ValueError("input_embeds is not supported; give the prompt as text or input_ids")
    _refuse_overrides(obj)
    sampling = obj.sampling_params
    for params in sampling if isinstance(sampling, list) else [sampling]:
        check_sampling(params or {}, vocabulary)
    _check_batch(obj)
    _check_members(obj)
    _check_session(obj.session_params)
    _check_ids("input_ids", obj.input_ids, vocabulary)
    _check_ids("token_ids_logprob", obj.token_ids_logprob, vocabulary)
    _check_range("top_logprobs_num", obj.top_logprobs_num, 0, min(MAX_TOP_LOGPROBS, vocabulary))
    _check_range("logprob_start_len", obj.logprob_start_len, -1, INT32[1])
    _check_range("priority", obj.priority, *INT32)
    _check_range("max_thinking_tokens", obj.max_thinking_tokens, 0, INT32[1])
    _check_labels(obj.custom_labels, labels)
    _check_host(obj.bootstrap_host)


def check_prompt(ids: Sequence[int], vocabulary: int) -> None:
    """What a text came to: a tokenizer may have tokens that its model has not.

    Raises:
        ValueError: naming the first token id that the model does not know.
    """
    if ids and max(ids) >= vocabulary:
        beyond = next(token for token in ids if token >= vocabulary)
        raise ValueError(
            f"the prompt must have token ids in [0, {vocabulary - 1}], the model's; the tokenizer made {beyond}"
        )


def check_least(sampling: dict[str, Any], ends: Iterable[int | None], vocabulary: int) -> None:
    """A minimal length, which holds off the tokens that end every answer: SGLang's engine ends where one of them is
    not the model's.

    Raises:
        ValueError: naming that token.
    """
    beyond = [token for token in ends if token is not None and token >= vocabulary]
    if beyond and sampling.get("min_new_tokens"):
        raise ValueError(
            f"min_new_tokens must be 0 with this tokenizer: its token {beyond[0]} ends answers, "
            f"and the model's are in [0, {vocabulary - 1}]"
        )


def check_embedding(obj: EmbeddingReqInput, vocabulary: int) -> None:
    """The same for what is embedded, classified or ranked.

    Raises:
        ValueError: naming the field and what is legal.
    """
    _refuse_overrides(obj)
    texts, ids, sampling = obj.text, obj.input_ids, obj.sampling_params
    pairs = isinstance(texts, list) and any(isinstance(text, list) for text in texts)
    if pairs and not obj.is_cross_encoder_request:
        raise ValueError("text must be a text or a list of texts")
    if isinstance(ids, list) and (not ids or any(entry == [] for entry in ids)):
        raise ValueError("input_ids must have at least one token for each prompt")
    if isinstance(ids, list) and len({isinstance(entry, list) for entry in ids}) > 1:
        raise ValueError("input_ids must be a list of token ids, or a list of one such list for each prompt")
    _check_ids("input_ids", ids, vocabulary)
    prompts = prompts_of(obj)
    if isinstance(sampling, list) and len(sampling) != prompts:
        raise ValueError("sampling_params must be an object, or a list of one for each prompt of several")
    if obj.rid is not None and isinstance(obj.rid, list) != (prompts is not None):
        raise ValueError("rid must be a text for one prompt, and a list of them for a list of prompts")
    if isinstance(obj.rid, list) and len(obj.rid) != prompts:
        raise ValueError(f"rid must have one value for each of {prompts} prompts, got {len(obj.rid)}")
    _check_range("priority", obj.priority, *INT32)


def _refuse_overrides(obj: GenerateReqInput | EmbeddingReqInput) -> None:
    """Vectors in the place of tokens: of another width than the model's they end SGLang's engine, and a prompt that
    comes as embeddings cannot be narrowed.
    """
    if obj.positional_embed_overrides is not None or getattr(obj, "embed_overrides", None) is not None:
        raise ValueError("vectors in the place of tokens (embed_overrides) are not supported")


def check_clients(obj: GenerateReqInput) -> None:
    """Refuse to be in no metric, an id by which a request cannot be aborted when its client goes, one that the
    scheduler would take for a health check's, and not answer while busy, and one that no line of a log can hold.

    Raises:
        ValueError: naming the field.
    """
    if not obj.log_metrics:
        raise ValueError("log_metrics must be true: every generation is counted")
    for each in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
        if each == "":
            raise ValueError("rid must not be empty")
        if isinstance(each, str) and not (len(each) <= LONGEST_RID and each.isprintable()):
            raise ValueError(f"rid must be of at most {LONGEST_RID} characters that can be printed")
        if isinstance(each, str) and each.startswith(HEALTH_CHECK_RID_PREFIX):
            raise ValueError(f"rid must not begin with {HEALTH_CHECK_RID_PREFIX}, which is for health checks")


def check_sampling(given: dict[str, Any], vocabulary: int) -> None:
    """One set of sampling parameters; a null is SGLang's default.

    Raises:
        ValueError: for a wrong type, an integer beyond 32 bits (a seed: 64), too many answers, an empty stop, or a
            number by which logits overflow.
    """
    params = {name: value for name, value in given.items() if value is not None}
    for name in params.keys() & TYPES.keys() - UNTYPED:
        try:
            msgspec.convert(params[name], TYPES[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params.{name}: {str(error).partition(' - at')[0]}") from None
        if type(params[name]) is int:
            _check_range(name, params[name], *INT32)
    for name, legal in (
        ("n", (1, MAX_GENERATIONS)),
        ("beam_width", (1, MAX_GENERATIONS)),
        ("sampling_seed", INT64),
    ):
        _check_number(name, params.get(name), *legal)
    _check_ids("stop_token_ids", list(params.get("stop_token_ids") or ()), vocabulary)
    _check_number("stream_interval", params.get("stream_interval"), 1, INT32[1])
    _check_bias(params.get("logit_bias"), vocabulary)
    for name, (least, most) in LOGITS.items():
        if not least <= params.get(name, most) <= most:
            raise ValueError(f"{name} must be in [{least:g}, {most:g}], got {params[name]}")
    for name in ("stop", "stop_regex"):
        texts = params.get(name)
        if "" in ([texts] if isinstance(texts, str) else texts or ()):
            raise ValueError(
                f"{name} must not have an empty text, which ends every answer at its first token"
            )
    _check_patterns(params.get("stop_regex"))


def check_preferred(given: Any, vocabulary: int) -> None:
    """The sampling parameters of requests that say nothing else, which SGLang puts in behind all checks.

    Raises:
        ValueError: as for those of a request, and for what none could have.
    """
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object")
    check_sampling(given, vocabulary)
    if unknown := sorted(given.keys() - TYPES.keys()):
        raise ValueError(f"{unknown[0]} is not a sampling parameter")
    if alone := sorted(given.keys() & {"n", "beam_width", *INTERNAL_SAMPLING_FIELDS}):
        # SGLang has counted a request's generations by then.
        raise ValueError(f"{alone[0]} is not for requests that do not say it")
    SamplingParams(**given).verify(vocabulary)


def prompts_of(obj: GenerateReqInput | EmbeddingReqInput) -> int | None:
    """How many prompts a batch has; None for a prompt that is by itself."""
    if obj.text is not None:
        return len(obj.text) if isinstance(obj.text, list) else None
    given, nested = obj.input_ids, 1
    if given is None:
        given, nested = obj.input_embeds, 2
    inner = given
    for _ in range(nested):
        inner = inner[0] if inner else None
    return len(given) if isinstance(inner, list) else None


def _check_batch(obj: GenerateReqInput) -> None:
    sampling = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    each = max(((params or {}).get("n") or 1 for params in sampling), default=1)
    if (asked := (prompts_of(obj) or 1) * each) > MAX_BATCH:
        raise ValueError(
            f"a request must be for at most {MAX_BATCH} generations (prompts times n), got {asked}"
        )


def _why_not(value: Any, kind: Any) -> str:
    """Why a value is neither of this kind nor None; "" where it is."""
    try:
        msgspec.convert(value, kind | None)
    except msgspec.ValidationError as error:
        return str(error).partition(" - at")[0]
    return ""


def _check_members(obj: GenerateReqInput) -> None:
    """A member with one value per prompt is a list only where there are several prompts."""
    prompts = prompts_of(obj)
    if isinstance(obj.sampling_params, list) and len(obj.sampling_params) != prompts:
        raise ValueError("sampling_params must be an object, or a list of one for each prompt of several")
    for name, kind in PLAIN.items():
        value = getattr(obj, name)
        each = prompts is not None and isinstance(value, list) and _why_not(value, kind) != ""
        if each and len(value) != prompts:
            raise ValueError(f"{name} must have one value for each of {prompts} prompts, got {len(value)}")
        for entry in value if each else [value]:
            if wrong := _why_not(entry, kind):
                raise ValueError(f"{name}: {wrong}")
            if type(entry) is int:
                _check_number(name, entry, *INT64)


def _check_session(given: Any) -> None:
    """Which turn of which session a prompt goes on from."""
    if given is not None and not isinstance(given, dict):
        raise ValueError("session_params must be an object")
    for name, value in (given or {}).items():
        if name not in SESSION:
            raise ValueError(f"session_params must have no other members than {', '.join(SESSION)}")
        if wrong := _why_not(value, SESSION[name]):
            raise ValueError(f"session_params.{name}: {wrong}")
    _check_number("session_params.offset", (given or {}).get("offset"), *INT32)


def _check_bias(bias: dict[str, float] | None, vocabulary: int) -> None:
    for token, value in (bias or {}).items():
        if not (token.isdecimal() and int(token) < vocabulary):
            raise ValueError(
                f"logit_bias must have token ids in [0, {vocabulary - 1}] as keys, got {token[:40]!r}"
            )
        if not abs(value) <= MOST_BIAS:
            raise ValueError(f"logit_bias must be in [-{MOST_BIAS:g}, {MOST_BIAS:g}], got {value}")


def _check_patterns(patterns: str | list[str] | None) -> None:
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        try:
            re.compile(pattern)  # SGLang's measure of it
            regex.compile(pattern)  # looks for it
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex {pattern[:40]!r} is not a regular expression: {error}") from None


def _check_labels(given: dict[str, str] | None, legal: Collection[str]) -> None:
    for name in given or ():
        if name not in legal:
            known = (
                f"must be among {', '.join(sorted(legal))}" if legal else "are not configured on this server"
            )
            raise ValueError(f"custom_labels {known}, got {name[:40]!r}")


def _check_host(given: str | list[str | None] | None) -> None:
    """SGLang ignores prefill servers where there are none, save one name that keeps a prompt's KV to itself."""
    if FAKE_BOOTSTRAP_HOST in (given if isinstance(given, list) else [given]):
        raise ValueError(
            f"bootstrap_host must not be {FAKE_BOOTSTRAP_HOST!r}, a prefill server that is not there"
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
        _check_number(name, entry, low, high)


def _check_number(name: str, value: Any, low: int, high: int) -> None:
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {str(value)[:40]}")
