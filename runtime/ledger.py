"""What was done for each request: the source of the answer's ``fathom`` object.

The account of a request lives exactly as long as the engine's own request object (weak keys), so an abort or a
crash in any stage cannot leak one.
"""

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fathom.runtime.decode_step import Later, Outcome


@dataclass
class Account:
    """Counters of one request; tokens unless said otherwise."""

    policy: Mapping[str, Any] = field(default_factory=dict)
    prefill_steps: int = 0  # engine steps (chunks) that carried prompt tokens
    prefill_seconds: float = 0.0  # of these steps, whatever else was in them
    draft_prefill_seconds: float = 0.0  # of these, what the draft took to read prompts and to judge them
    decode_steps: int = 0
    decode_seconds: float = 0.0  # of the engine's steps that only decoded, whatever the batch
    fast_seconds: float = 0.0  # of these, in its fast steps
    kv_bytes: int = 0  # KV held when last seen
    kv_bytes_dense: int = 0  # what the same tokens would have held at all depths
    kv_bytes_peak: int = 0  # most KV held at once, while what stays of a prompt was beside all of it
    retained_tokens: int | None = (
        None  # prompt entries kept per KV head, averaged over the layers; None for all
    )
    propagated_tokens: int | None = (
        None  # prompt tokens that FastKV let go on above its layer; None for no selection
    )
    propagation_skipped: bool = (
        False  # asked for, and the prompt was too long for the buffer of hidden states
    )
    scoring_seconds: float = 0.0  # FastKV: the window's attention and the choices made from it
    kept_tokens: int | None = None  # prompt tokens computed per layer, averaged over the layers; None for all
    deep_tokens: int | None = None  # prompt tokens computed at the last layer; None for all
    staircase: list[tuple[int, int]] | None = (
        None  # per span, prompt tokens computed and entries kept per KV head; None for all
    )
    draft_read_tokens: int = 0  # tokens of the request that the draft model has read
    draft_tokens: int = 0  # proposed by the draft model
    accepted_tokens: int = 0  # of these, the ones that stood
    longest_burst: int = 0  # most tokens put out by one step
    fast_steps: int = 0  # decode steps that read a selection only
    trigger_refreshes: int = 0  # selections renewed because a sentence or line had ended
    timeout_refreshes: int = 0  # selections renewed after T_max fast steps
    refresh_seconds: float = 0.0  # share of the time that choosing and packing took
    dense_fallbacks: int = 0  # 1 when it asked for fast steps and no compact buffer was free
    compact_bytes: int = 0  # compact buffers when last seen
    first_token_time: float | None = None  # time.perf_counter() in seconds
    reported: bool = False

    def hold(self, held: "Held") -> None:
        """What the request holds now."""
        self.kv_bytes, self.kv_bytes_dense = held.bytes, held.dense
        self.kv_bytes_peak = max(self.kv_bytes_peak, held.bytes)

    def climbed(self, computed: Sequence[int], kept: Sequence[int]) -> None:
        """How many prompt tokens each span computed, and how many entries each of its KV heads keeps."""
        self.staircase = [(int(c), int(k)) for c, k in zip(computed, kept, strict=True)]
        self.kept_tokens, self.deep_tokens = round(sum(computed) / len(computed)), computed[-1]
        self.retained_tokens = round(sum(kept) / len(kept))


class Held(NamedTuple):
    """KV of one request in bytes, on all devices: what it holds, and what its tokens would hold at all depths."""

    bytes: int
    dense: int


class Part(NamedTuple):
    """What one step is for one request, if the request still stands when the step's result is there.

    Attributes:
        prompt_tokens: that it computed; None where it computed one generated token.
        outcome: of a request that decodes slow and fast; when the part is settled it is known.
        timed: whether every request of the step decoded; share: of the engine step's time, where it has several
            parts for the request, one after the other.
    """

    request: Any
    account: Account
    held: Held
    prompt_tokens: int | None = None
    outcome: Outcome | Later | None = None
    timed: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class Launched:
    """One engine step whose result is not there yet.

    The next one may be launched before it is (overlap scheduling); a request that turns out to have ended is in
    that one too, and what was computed for it then counts for nothing.

    Attributes:
        began: time.perf_counter() in seconds.
        draft_seconds: what the draft took of a step with prompt tokens; None for any other step.
    """

    began: float
    draft_seconds: float | None
    parts: list[Part] = field(default_factory=list)


class RequestLedger:
    """Accounts of the requests that are alive in this engine process.

    Attributes:
        totals: of this process since its start; ``prefill_seconds`` are the target's.
        holding: by the engine's request row, what a request held after its last step, until the row is freed.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {
            "prefill_tokens": 0,
            "prefill_steps": 0,
            "decode_steps": 0,
            "requests": 0,
        } | {
            "draft_tokens": 0,
            "accepted_tokens": 0,
            "fast_steps": 0,
            "scoring_seconds": 0.0,
            "prefill_seconds": 0.0,
            "draft_prefill_seconds": 0.0,
        }
        self.holding: dict[int, Held] = {}
        self._accounts: weakref.WeakKeyDictionary[Any, Account] = weakref.WeakKeyDictionary()
        self._settled_at = 0.0

    def __len__(self) -> int:
        """Accounts still to be reported."""
        open_accounts = (request for request, account in self._accounts.items() if not account.reported)
        return sum(not request.finished() for request in open_accounts)

    def open(self, request: Any, policy: Mapping[str, Any]) -> Account:
        """The request's account, opened at first sight."""
        account = self._accounts.get(request)
        if account is None:
            account = self._accounts[request] = Account(policy=policy)
            self.totals["requests"] += 1
        return account

    def settle(self, step: Launched, now: float) -> None:
        """The result of a step is there, at ``now``.

        Where steps overlap, a step's time begins when the result of the one before it was there.
        """
        seconds, self._settled_at = now - max(step.began, self._settled_at), now
        if step.draft_seconds is not None:
            self.totals["draft_prefill_seconds"] += step.draft_seconds
            self.totals["prefill_seconds"] += max(seconds - step.draft_seconds, 0.0)
        for part in step.parts:
            account = part.account
            account.hold(part.held)
            if part.prompt_tokens is not None:
                account.prefill_steps += 1
                account.prefill_seconds += seconds
                account.draft_prefill_seconds += step.draft_seconds or 0.0
                self.totals["prefill_tokens"] += part.prompt_tokens
                self.totals["prefill_steps"] += 1
                continue
            account.decode_steps += 1
            self.totals["decode_steps"] += 1
            assert not isinstance(part.outcome, Later)
            if part.outcome is not None:
                self._alternated(account, part.outcome)
            if part.timed:
                account.decode_seconds += part.share * seconds
                fast = part.outcome is not None and part.outcome.fast
                account.fast_seconds += part.share * seconds * fast

    def drop(self, request: Any) -> None:
        """The request was aborted while it waited, taken back before perhaps: nobody will ask for its account."""
        self._accounts.pop(request, None)

    def let_go(self, row: int) -> None:
        """The engine freed a request row."""
        self.holding.pop(row, None)

    def scored(self, account: Account, seconds: float) -> None:
        """FastKV has chosen from the request's complete prompt."""
        account.scoring_seconds += seconds
        self.totals["scoring_seconds"] += seconds

    def drafted(self, account: Account, proposed: int, accepted: int) -> None:
        """One engine step verified ``proposed`` drafted tokens of the request; ``accepted`` of them stood."""
        account.draft_tokens += proposed
        account.accepted_tokens += accepted
        account.longest_burst = max(account.longest_burst, accepted + 1)
        self.totals["draft_tokens"] += proposed
        self.totals["accepted_tokens"] += accepted

    def _alternated(self, account: Account, outcome: Outcome) -> None:
        """A decode step was one of a request that decodes slow and fast."""
        account.fast_steps += outcome.fast
        account.trigger_refreshes += outcome.cause == "trigger"
        account.timeout_refreshes += outcome.cause == "timeout"
        account.refresh_seconds += outcome.seconds
        account.compact_bytes = outcome.compact_bytes
        account.dense_fallbacks = max(account.dense_fallbacks, int(outcome.compact_bytes == 0))
        self.totals["fast_steps"] += outcome.fast

    def first_token(self, request: Any) -> None:
        """Stamp the time of the request's first output token, once."""
        account = self._accounts.get(request)
        if account is not None and account.first_token_time is None:
            account.first_token_time = time.perf_counter()

    def report(
        self, request: Any, prompt_tokens: int, cached_tokens: int, queue_seconds: float = 0.0
    ) -> dict[str, Any]:
        """The finished request's ``fathom`` object (JSON-safe).

        Args:
            queue_seconds: that it waited for its first step.
        """
        account = self._accounts.get(request)
        if account is None:  # aborted before its first step
            account = Account()
        account.reported = True
        return {
            "policy": account.policy,
            "prompt_tokens": prompt_tokens,
            "kept_tokens": prompt_tokens if account.kept_tokens is None else account.kept_tokens,
            "deep_tokens": prompt_tokens if account.deep_tokens is None else account.deep_tokens,
            "cached_tokens": cached_tokens,
            "queue_seconds": queue_seconds,
            "prefill_steps": account.prefill_steps,
            "prefill_seconds": account.prefill_seconds,
            "draft_prefill_seconds": account.draft_prefill_seconds,
            "decode_steps": account.decode_steps,
            "slow_steps": account.decode_steps - account.fast_steps,
            "fast_steps": account.fast_steps,
            "decode_seconds": account.decode_seconds,
            "fast_seconds": account.fast_seconds,
            "trigger_refreshes": account.trigger_refreshes,
            "timeout_refreshes": account.timeout_refreshes,
            "refresh_seconds": account.refresh_seconds,
            "dense_fallbacks": account.dense_fallbacks,
            "compact_bytes": account.compact_bytes,
            "draft_read_tokens": account.draft_read_tokens,
            "draft_tokens": account.draft_tokens,
            "accepted_tokens": account.accepted_tokens,
            "longest_burst": account.longest_burst,
            "kv_bytes": account.kv_bytes,
            "kv_bytes_peak": account.kv_bytes_peak,
            "retained_tokens": prompt_tokens if account.retained_tokens is None else account.retained_tokens,
            "propagated_tokens": account.propagated_tokens,
            "propagation_skipped": account.propagation_skipped,
            "scoring_seconds": account.scoring_seconds,
            "kv_bytes_dense": account.kv_bytes_dense,
            "staircase": account.staircase,
            "first_token_time": account.first_token_time,
        }
