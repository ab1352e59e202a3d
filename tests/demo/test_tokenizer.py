"""Tokenizer: round trip, ids of their own for sentence ends, one token per word, the chat template."""

import random

from fathom.demo import corpus, words
from fathom.demo.export import MODELS
from fathom.demo.rows import RowBuilder, tokenizer_texts
from fathom.demo.tokenizer import TRIGGERS, encode, load_tokenizer, train_tokenizer, trigger_ids


def test_round_trip(tokenizer):
    for text in ("The code of Alice is 4821.", "Grüße, 東京! \t x\n\n12345;", "  two  spaces "):
        assert tokenizer.decode(encode(tokenizer, text)) == text


def test_sentence_ends_have_their_own_ids(tokenizer):
    ids = trigger_ids(tokenizer)
    assert len(set(ids)) == len(TRIGGERS)
    for mark, i in zip(TRIGGERS, ids, strict=True):
        assert encode(tokenizer, mark) == [i]
        assert encode(tokenizer, f"falcon{mark}The")[-2] == i or i in encode(tokenizer, f"falcon{mark}The")


def test_words_are_single_tokens(tokenizer):
    lists = (words.NAMES, words.CITIES, words.ROLL_WORDS, words.SHAPES, words.TASTES, corpus.ATTRIBUTES)
    assert [w for group in lists for w in group if len(encode(tokenizer, " " + w)) != 1] == []
    assert len(encode(tokenizer, " 4821")) == 2
    assert len(tokenizer) <= 2048


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "S."},
        {"role": "user", "content": "Q?"},
        {"role": "assistant", "content": "A."},
        {"role": "tool", "content": "T."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    want = "<s><|system|>S.<|end|><|user|>Q?<|end|><|assistant|>A.<|end|><|tool|>T.<|end|><|assistant|>"
    assert text == want
    assert tokenizer.eos_token == "<|end|>"


def test_rows_encode_like_the_tokenizer(tokenizer):
    builder, rng = RowBuilder(tokenizer), random.Random(0)
    for length in (256, 700):
        row = builder.chat_row(rng, length)
        n = row.spans[-1][1]
        assert encode(tokenizer, tokenizer.decode(row.ids[:n])) == row.ids[:n]


def test_guides_point_at_the_value_tokens(tokenizer):
    row = RowBuilder(tokenizer).chat_row(random.Random(1), 256)
    for begin, end, task in row.spans:
        hits = 0
        for t in range(begin - 1, end - 2):
            best = max((g for g in row.copy if g[0] == t), key=lambda g: g[2], default=None)
            hits += best is not None and row.ids[best[1]] == row.ids[t + 1]
        assert hits >= (1 if task == "single" else 2)


def test_training_reproduces_the_shipped_tokenizer():
    shipped = load_tokenizer(MODELS / "target")
    assert train_tokenizer(tokenizer_texts()).get_vocab() == shipped.get_vocab()
