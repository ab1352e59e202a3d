"""Views over lists of slots that lie where the pool is, with room for tokens to come.

A draft decodes several tokens in a row. The lists of its requests are written once for all of them; each further
token changes the few numbers of a view, not the lists.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from fathom.runtime.kv.view import SpanView


class SlotLists:
    """Slots of a group of requests, one list each. They do not change while views read them.

    Attributes:
        parts: of each request [tokens, and tokens to come] int32 slots, on the pool's device.
        first: [requests] int64, where each begins if they lie one after the other; total: entries of all.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = parts
        lengths = np.array([len(part) for part in parts], np.int64)
        self.first, self.total = np.cumsum(lengths) - lengths, int(lengths.sum())

    @cached_property
    def host(self) -> list[np.ndarray]:
        """:attr:`parts` on the host; backends for a device do not ask."""
        return [part.cpu().numpy() for part in self.parts]


class ListView(SpanView):
    """Each segment reads the beginning of a list. On a device nobody asks for the slots themselves."""

    def __init__(
        self, lists: SlotLists, which: Sequence[int], lengths: Sequence[int], new: Sequence[int]
    ) -> None:
        """
        Args:
            which: [segments] lists; lengths: [segments] entries that are read of each.
            new: [segments] query rows of each, its last entries.
        """
        self.lists, self.which, self.cache = lists, np.array(which, np.int64), {}
        self.entry, self.query = (
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64) for counts in (lengths, new)
        )
        self.look_up = lambda run: self._all[run]

    @property
    def begin(self) -> np.ndarray:
        return self.lists.first[self.which]

    @property
    def written(self) -> np.ndarray:
        """[query rows] int64 entries of the lists, one after the other, that take the rows' keys and values."""
        after = self.begin + np.diff(self.entry) - self.query[1:]
        return np.repeat(after, np.diff(self.query)) + np.arange(self.query[-1])

    @cached_property
    def write(self) -> np.ndarray:  # type: ignore[override]
        return self._read(np.diff(self.entry) - np.diff(self.query)).astype(np.int64)

    @cached_property
    def _all(self) -> np.ndarray:
        """[entries] int32 slots."""
        return self._read(np.zeros(len(self.which), np.int64))

    def _read(self, begin: np.ndarray) -> np.ndarray:
        """Slots of all segments from an entry of each on; backends for a device do not ask."""
        ends = np.diff(self.entry).tolist()
        own = zip(self.which.tolist(), begin.tolist(), ends, strict=True)
        return np.concatenate([self.lists.host[i][first:end] for i, first, end in own])
