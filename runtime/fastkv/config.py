"""The numbers of FastKV."""

from dataclasses import dataclass

from fathom.runtime.fastkv.policies import RETENTION_POLICIES


@dataclass(frozen=True)
class FastKVConfig:
    """What goes on above the selection layer, and what each KV head keeps.

    Attributes:
        tsp_layer: layers ``1 .. tsp_layer`` see all tokens that entered the model; None where all layers do
            (section 4.2; 16 of 32 in section 5.1, which counts from 0).
        tsp_rate: fraction of those tokens that go on above it, the window included, in (0, 1] (0.2 in section 5.1).
        retention_rate: fraction of those tokens that each KV head keeps after prefill, the window included, in
            (0, 1] (section 4.4; 0.1 in section 5.2).
        window: last prompt tokens whose queries judge the others and which always stay, tokens (8 in section 5.1).
        pool: odd width of the max-pooling, tokens (7 in section 5.1).
        retention_policy: name in ``RETENTION_POLICIES``.
    """

    tsp_layer: int | None = None
    tsp_rate: float = 0.2
    retention_rate: float = 1.0
    window: int = 8
    pool: int = 7
    retention_policy: str = "saliency"

    def __post_init__(self) -> None:
        for name in ("tsp_rate", "retention_rate"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if self.tsp_layer is not None and self.tsp_layer < 1:
            raise ValueError(f"tsp_layer must be at least 1, got {self.tsp_layer}")
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"window must be at least 1 and pool odd, got {self.window} and {self.pool}")
        if self.retention_policy not in RETENTION_POLICIES:
            legal = ", ".join(RETENTION_POLICIES)
            raise ValueError(f"retention_policy must be one of {legal}, got {self.retention_policy!r}")
