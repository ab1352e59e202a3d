"""The numbers of SpecPrefill."""

from dataclasses import dataclass

AUTO = "auto"

PROTECTABLE = SYSTEM, TOOLS, TOOL_RESULTS, USER = "system", "tools", "tool_results", "user"
"""What of a conversation a request may keep whole: system text, the definitions of tools, their results, and what
users say."""
PROTECTED = (SYSTEM, TOOLS, TOOL_RESULTS)
"""What stays unless a request says otherwise."""


@dataclass(frozen=True)
class SpecPrefillConfig:
    """How prompt chunks are judged and kept.

    Attributes:
        keep_rate: fraction of chunks that enter the target, in (0, 1], or "auto" (section 3.2.3).
        lookahead: query rows: the last prompt token and the first ``lookahead - 1`` drafted ones (section 3.2.1;
            8 in section 4.3).
        chunk: tokens per chunk (section 3.2.3; 32 in the authors' implementation).
        pool: odd width of the average pooling along the prompt, tokens (section 3.2.3; 13 in the authors'
            implementation).
        min_prompt_tokens: shorter prompts stay whole, tokens (not in the paper; section 4.6 shows the loss on short
            ones).
        auto_share: with "auto", the share of the score mass that the kept chunks must hold, in (0, 1] (not in the
            paper, which leaves adaptive rates to others, section 4.2).
        auto_min_rate: with "auto", the lowest rate, fraction of chunks in (0, 1] (not in the paper).
    """

    keep_rate: float | str = 1.0
    lookahead: int = 8
    chunk: int = 32
    pool: int = 13
    min_prompt_tokens: int = 4096
    auto_share: float = 0.95
    auto_min_rate: float = 0.05

    def __post_init__(self) -> None:
        for name in ("keep_rate", "auto_share", "auto_min_rate"):
            value = getattr(self, name)
            if name == "keep_rate" and value == AUTO:
                continue
            if isinstance(value, str) or not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value!r}")
        if self.lookahead < 1 or self.chunk < 1 or self.min_prompt_tokens < 0:
            raise ValueError("lookahead and chunk must be at least 1, min_prompt_tokens at least 0")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool must be odd, got {self.pool}")

    def applies_to(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length is judged at all; otherwise the draft need not look at it."""
        return self.keep_rate != 1 and prompt_tokens >= self.min_prompt_tokens
