"""Who owns which run of the compact buffers: bookkeeping only, the tensors belong to the engine.

Every layer has one buffer of ``runs * tokens`` tokens, and a request owns the same run in all of them.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from fathom.runtime.sfi.config import SfiConfig


@dataclass(frozen=True)
class RunShape:
    """Size of one request's run over all layers.

    Attributes:
        tokens: tokens per KV head: sink and selected.
        bytes_per_token: keys and values of all KV heads, summed over all layers.
    """

    tokens: int
    bytes_per_token: int

    @property
    def bytes(self) -> int:
        return self.tokens * self.bytes_per_token

    @classmethod
    def of(
        cls, config: SfiConfig, layers: int, kv_heads: int, head_dim: int, value_dim: int, itemsize: int
    ) -> "RunShape":
        """The shape for a model; ``itemsize`` in bytes."""
        return cls(config.compact_tokens, layers * kv_heads * (head_dim + value_dim) * itemsize)


class CompactRuns:
    """A bounded number of runs. A request that finds none free decodes dense."""

    def __init__(self, shape: RunShape, budget_bytes: int) -> None:
        """
        Raises:
            ValueError: when the budget does not hold a single run.
        """
        self.shape = shape
        self.count = budget_bytes // shape.bytes
        if self.count < 1:
            raise ValueError(
                f"{budget_bytes} bytes do not hold one compact buffer of {shape.bytes} bytes "
                f"({shape.tokens} tokens of {shape.bytes_per_token} bytes)"
            )
        self._free = list(range(self.count))[::-1]
        self._owned: dict[Hashable, int] = {}

    @property
    def tokens(self) -> int:
        """Tokens of each layer's buffer."""
        return self.count * self.shape.tokens

    @property
    def total_bytes(self) -> int:
        return self.count * self.shape.bytes

    def __len__(self) -> int:
        """Runs in use."""
        return len(self._owned)

    def acquire(self, request: Hashable) -> int | None:
        """First token of a run for this request; None when all are in use.

        Raises:
            ValueError: when the request already owns one.
        """
        if request in self._owned:
            raise ValueError(f"request {request!r} already owns a compact buffer")
        if not self._free:
            return None
        run = self._owned[request] = self._free.pop()
        return run * self.shape.tokens

    def release(self, request: Hashable) -> None:
        """Give the request's run back; nothing to do where it owns none."""
        run = self._owned.pop(request, None)
        if run is not None:
            self._free.append(run)
