"""What is asked: random token ids for speed alone, documents with questions for a trained model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fathom.benchmarks.model import FIRST_WORD

TAIL = 16
"""Tokens at the end of a prompt that are its own where it begins like a document that others have too."""

CHAT = 32
"""Tokens at the beginning of a question that all conversations may begin with."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid: tokens per prompt, requests at once."""

    prompt: int
    batch: int


@dataclass(frozen=True)
class Settings:
    """How every cell is measured.

    Attributes:
        output: tokens generated per request; at most, where answers end by themselves.
        rounds: counted turns per variant and cell.
        warmups: uncounted turns per variant and cell.
        warmup_prompt: tokens per prompt of these turns at most; 0 for those of the cell.
        shared_prefix: share of each prompt that the server has seen before the turn, 0 <= share < 1.
        documents: which all prompts of a run begin like, in turns, and each server reads once; 0 for none.
        task: of the questions that a trained model is asked; "" for random tokens.
        sampling: parameters of the requests, such as ``top_p``; none for the most likely tokens.
        seed: of the prompts.
        limit: seconds that a request may take.
    """

    output: int = 32
    rounds: int = 4
    warmups: int = 1
    warmup_prompt: int = 0
    shared_prefix: float = 0.0
    documents: int = 0
    task: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    limit: float = 600.0

    @property
    def cached(self) -> bool:
        """Whether a server has seen a part of each prompt before its turn."""
        return self.documents > 0 or self.shared_prefix > 0

    def known(self, prompt: int) -> int:
        """Tokens of a prompt that a server may have seen before its turn."""
        if self.documents:
            return prompt - TAIL
        return CHAT if self.task else int(prompt * self.shared_prefix)


Prompts = Callable[[Cell, int], tuple[list[list[int]], list[list[int]]]]
"""Shared prefixes and prompts of one round of a cell: the same for each variant, prompts new in each round."""


def random_prompts(
    cell: Cell, settings: Settings, vocab: int, round_index: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Random words; those of a round begin like the prefixes that the settings ask for, in turns."""
    source = random.Random(f"{settings.seed}/{cell.prompt}/{cell.batch}/{round_index}")
    if settings.documents:
        prefixes = documents(cell.prompt - TAIL, settings, vocab)
    else:
        prefixes = [_words(source, int(cell.prompt * settings.shared_prefix), vocab)]
    starts = [prefixes[i % len(prefixes)] for i in range(cell.batch)]
    prompts = [start + _words(source, cell.prompt - len(start), vocab) for start in starts]
    return [prefix for prefix in prefixes if prefix], prompts


def documents(tokens: int, settings: Settings, vocab: int) -> list[list[int]]:
    """The beginnings of the run's documents."""
    sources = [random.Random(f"{settings.seed}/document/{i}") for i in range(settings.documents)]
    return [_words(source, tokens, vocab) for source in sources]


def _words(source: random.Random, count: int, vocab: int) -> list[int]:
    return [source.randrange(FIRST_WORD, vocab) for _ in range(count)]


def question_prompts(model: str, settings: Settings) -> Prompts:
    """Questions of one task about generated documents, each a little shorter than the cell says."""
    from fathom.benchmarks.fidelity import load_tokenizer
    from fathom.demo.corpus import eval_samples, prompt_ids

    tokenizer = load_tokenizer(model)

    def prompts(cell: Cell, round_index: int) -> tuple[list[list[int]], list[list[int]]]:
        source = random.Random(f"{settings.seed}/{cell.prompt}/{cell.batch}/{round_index}")
        samples = eval_samples(settings.task, cell.prompt, cell.batch, source.getrandbits(63), tokenizer)
        return [], [prompt_ids(tokenizer, sample.messages) for sample in samples]

    return prompts
