"""When a decode step is slow: trigger ids from a tokenizer, and the phase of every request.

Slow-Fast Inference, section 3.1: the step after a trigger token is slow (Eq. 5), and so is a step that would be one
fast step too many in a row (T_max).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fathom.runtime.sfi.config import SfiConfig

TERMINATORS = ".?!;" + "。．｡？！；" + "।॥" + "؟۔؛"
"""Of sentences: the paper's, their full-width forms, those of Devanagari, and of Arabic and Urdu."""
CLOSERS = "\"')]}" + "”’»›）］｝】〉》」』〕＂＇"

CAUSES = ("start", "trigger", "timeout")
"""Why a step is slow: there is no selection yet; a sentence or line has ended; T_max fast steps have passed."""

_NEWLINES = "\n\r\v\f\x85\u2028\u2029"


def ends_segment(text: str, terminators: str = TERMINATORS) -> bool:
    """Whether ``text`` ends a sentence or a line.

    It ends a sentence with a terminator, after which only closing quotes and brackets and white space may follow.
    It ends a line with a newline, after which only white space may follow.
    """
    sentence = f"[{re.escape(terminators)}][{re.escape(CLOSERS)}]*\\s*\\Z"
    line = f"[{_NEWLINES}]\\s*\\Z"
    return re.search(f"{sentence}|{line}", text) is not None


def trigger_ids(tokenizer: Any, terminators: str = TERMINATORS) -> list[int]:
    """Ids whose text ends a sentence or a line, ascending.

    A mark that the tokenizer splits into several byte tokens has no id of its own and cannot trigger.

    Args:
        tokenizer: a Transformers tokenizer, or a ``tokenizers.Tokenizer``.
    """
    if hasattr(tokenizer, "get_vocab_size"):
        ids = [[i] for i in range(tokenizer.get_vocab_size())]
        texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
    else:
        ids = [[i] for i in range(len(tokenizer))]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return [i for (i,), text in zip(ids, texts, strict=True) if text and ends_segment(text, terminators)]


def trigger_mask(ids: list[int], vocabulary: int) -> np.ndarray:
    """[vocabulary] bool, true at the trigger ids.

    Args:
        vocabulary: width of the model's output, which may exceed the tokenizer's.
    """
    mask = np.zeros(vocabulary, bool)
    mask[np.array(ids, np.int64)] = True
    return mask


@dataclass(frozen=True)
class Stretch:
    """How far a request goes on with fast steps from here.

    Attributes:
        left: fast steps until T_max; 0 when the next step is slow.
        gap: fast steps until a boundary counts.
        boundary: whether a boundary is waiting for that.
        trigger: [vocabulary] bool.
    """

    left: int
    gap: int
    boundary: bool
    trigger: np.ndarray

    def ends(self, tokens: Sequence[int]) -> int | None:
        """After how many of the tokens that fast steps put out the next step is slow; None while it is not.

        Args:
            tokens: ids, one per step.
        """
        boundary = self.boundary
        for steps, token in enumerate(tokens, start=1):
            boundary = boundary or bool(self.trigger[token])
            if steps >= self.left or (boundary and steps >= self.gap):
                return steps
        return None


class PhaseState:
    """Whether each request's next decode step is slow: one row per request slot, on the host.

    All methods take ``rows``, [batch] distinct request slots. Batches are arrays of NumPy, whose operators on a few
    numbers take a fraction of PyTorch's time.
    """

    def __init__(self, max_rows: int, trigger: np.ndarray, config: SfiConfig) -> None:
        """
        Args:
            trigger: [vocabulary] bool, see :func:`trigger_mask`.
        """
        self.config = config
        self._trigger = trigger
        # Fast steps (tokens) since the last slow one; whether a boundary was met that no slow step has followed.
        self._since = np.zeros(max_rows, np.int64)
        self._boundary = np.ones(max_rows, bool)
        self._stale = np.ones(max_rows, bool)

    def admit(self, rows: np.ndarray, first_tokens: np.ndarray) -> None:
        """Start requests whose prefill gave their first token; their first decode step is slow.

        Args:
            first_tokens: [batch] ids.
        """
        self._since[rows] = 0
        self._boundary[rows] = self._trigger[first_tokens]
        self._stale[rows] = True

    def slow(self, rows: np.ndarray) -> np.ndarray:
        """[batch] bool: is the next decode step of each request slow?"""
        since = self._since[rows]
        boundary = self._boundary[rows] & (since >= self.config.minimum_gap)
        return self._stale[rows] | boundary | (since >= self.config.refresh_budget)

    def ahead(
        self, rows: np.ndarray, refreshed: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """The same of one step later, whose token is not known yet.

        Args:
            refreshed: [batch] bool, as :meth:`advance` will be told.

        Returns:
            What :meth:`slow` will say where the token is no trigger and where it is one, and :meth:`stale`. Who is
            slow in the first case is in the second.
        """
        since = np.where(refreshed, 0, self._since[rows] + 1)
        stale = self._stale[rows] & ~refreshed
        rested = since >= self.config.minimum_gap
        always = stale | (since >= self.config.refresh_budget)
        return (always | (self._boundary[rows] & ~refreshed & rested), always | rested), stale

    def saved(self, rows: np.ndarray) -> list[np.ndarray]:
        """What is known of these rows, for :meth:`put_back`."""
        return [column[rows] for column in (self._since, self._boundary, self._stale)]

    def put_back(self, rows: np.ndarray, saved: Sequence[np.ndarray]) -> None:
        """Make what was :meth:`saved` of these rows true again."""
        for column, values in zip((self._since, self._boundary, self._stale), saved, strict=True):
            column[rows] = values

    def triggers(self, ids: np.ndarray) -> np.ndarray:
        """[...] bool, which of these tokens are triggers."""
        return self._trigger[ids]

    def stale(self, rows: np.ndarray) -> np.ndarray:
        """[batch] bool: has nothing been chosen yet for a request?"""
        return self._stale[rows]

    def cause(self, rows: np.ndarray) -> np.ndarray:
        """[batch] int64: why the next decode step of each request would be slow: an index into :data:`CAUSES`."""
        met = np.where(self._boundary[rows], CAUSES.index("trigger"), CAUSES.index("timeout"))
        return np.where(self._stale[rows], CAUSES.index("start"), met)

    def stretch(self, row: int) -> Stretch:
        """What is left of the request's fast steps."""
        since = int(self._since[row])
        left = 0 if self.slow(np.array([row]))[0] else self.config.refresh_budget - since
        gap = max(self.config.minimum_gap - since, 0)
        return Stretch(left, gap, bool(self._boundary[row]), self._trigger)

    def advance(
        self,
        rows: np.ndarray,
        refreshed: np.ndarray,
        tokens: np.ndarray,
        accepted: np.ndarray | None = None,
    ) -> None:
        """Account for one decode pass.

        Args:
            refreshed: [batch] bool, whether this pass renewed the request's selection. A slow pass that could not
                (no evidence kept) leaves its request slow.
            tokens: [batch] ids, or [batch, width] where several tokens may be accepted in one pass.
            accepted: [batch] how many leading ids of ``tokens`` were accepted; None for all.
        """
        ids = tokens[:, None] if tokens.ndim == 1 else tokens
        counts = ids.shape[1] if accepted is None else accepted
        if accepted is None:
            crossed = self._trigger[ids].any(-1)
        else:
            valid = np.arange(ids.shape[1]) < accepted[:, None]
            crossed = (self._trigger[np.where(valid, ids, 0)] & valid).any(-1)
        self._since[rows] = np.where(refreshed, 0, self._since[rows] + counts)
        self._boundary[rows] = crossed | (self._boundary[rows] & ~refreshed)
        self._stale[rows] &= ~refreshed
