"""Hidden states at FastKV's selection layer, waiting for the rest of their prompt."""

from dataclasses import dataclass

import numpy as np
import torch

from fathom.runtime.staging import send


@dataclass
class _Waiting:
    positions: np.ndarray
    slots: np.ndarray


class HiddenBuffer:
    """Room for a fixed number of tokens, made once.

    Attributes:
        tokens: capacity.
        used, peak: tokens that wait now, and at most so far.
    """

    def __init__(self, tokens: int, hidden_size: int, dtype: torch.dtype, device: str) -> None:
        self.tokens = tokens
        self._states = torch.empty(2, tokens, hidden_size, dtype=dtype, device=device)
        self._free = np.arange(tokens - 1, -1, -1)
        self._count = tokens
        self._waiting: dict[int, _Waiting] = {}
        self._residual = True
        self.peak = 0

    @property
    def used(self) -> int:
        """Tokens that wait."""
        return self.tokens - self._count

    @property
    def nbytes(self) -> int:
        """Memory it takes, in bytes."""
        return self._states.nbytes

    def put(
        self, row: int, positions: np.ndarray, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """Keep the states of some tokens of a request.

        Args:
            row: the engine's request row.
            positions: [tokens] ascending, after those that wait already.
            hidden, residual: [tokens, hidden_size]; the next layer takes their sum.

        Raises:
            RuntimeError: when there is no room; admission (``DepthPrefillAdder``) lets in no more than fits.
        """
        count = len(positions)
        if count > self._count:
            raise RuntimeError(f"{count} hidden states do not fit: {self.used} of {self.tokens} tokens wait")
        slots = self._free[self._count - count : self._count].copy()
        self._count -= count
        self.peak = max(self.peak, self.used)
        at = send(slots, hidden.device)
        self._states[0, at] = hidden
        self._residual = residual is not None
        if residual is not None:
            self._states[1, at] = residual
        held = self._waiting.get(row, _Waiting(np.zeros(0, np.int64), np.zeros(0, np.int64)))
        self._waiting[row] = _Waiting(
            np.concatenate([held.positions, positions]), np.concatenate([held.slots, slots])
        )

    def get(self, row: int, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states of tokens that wait, in the order asked for."""
        held = self._waiting[row]
        found = np.searchsorted(held.positions, positions)
        assert (held.positions[found] == positions).all(), "a hidden state was asked for that nobody kept"
        at = send(held.slots[found], self._states.device)
        return self._states[0, at], self._states[1, at] if self._residual else None

    def drop(self, row: int) -> None:
        """Forget a request's states; nothing for a request without any."""
        held = self._waiting.pop(row, None)
        if held is not None:
            self._free[self._count : self._count + len(held.slots)] = held.slots
            self._count += len(held.slots)
