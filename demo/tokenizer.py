"""The tokenizer shared by target and draft: byte-level BPE, about 2K ids.

Each of `. ? ! ; , :` and the newline has its own id and never merges with a neighbour. Numbers are cut into
pairs of digits, so a four-digit code is two tokens. Every content word with its leading space is one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|tool|>"}
SPECIAL = [PAD, BOS, EOS, *ROLES.values()]
TRIGGERS = (".", "?", "!", ";", "\n")
VOCAB_LIMIT = 2048
MODEL_MAX_LENGTH = 16384

_SPLIT = r" ?\p{L}+| ?\d{1,2}|\n| ?[^\s\p{L}\d]|\s"
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Fit the BPE merges on `texts` and return a Transformers tokenizer with the chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_LIMIT,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES.values()),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = MODEL_MAX_LENGTH
    return fast


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer files that `export` or `train` wrote."""
    return PreTrainedTokenizerFast.from_pretrained(str(path))


def trigger_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of the sentence-ending tokens `. ? ! ;` and newline."""
    return [encode(tokenizer, t)[0] for t in TRIGGERS]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of `text` without added special tokens (special strings inside it are recognised)."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class WordEncoder:
    """Cached encoding of single words; exact because the pre-tokenizer always splits before a space."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        core = tokenizer.backend_tokenizer
        self.word = lru_cache(maxsize=None)(lambda w: tuple(core.encode(w, add_special_tokens=False).ids))

    def sentence(self, text: str, leading_space: bool) -> list[int]:
        """Ids of a sentence, with or without a space before its first word."""
        ids: list[int] = []
        for i, word in enumerate(text.split(" ")):
            ids += self.word(" " + word if i or leading_space else word)
        return ids
