"""Models of the Llama 2 kind have a SentencePiece file for a tokenizer, and often nothing else."""

import json

import sentencepiece
from transformers import AutoTokenizer

from fathom.server.command import checks

TEXTS = [
    "The code of Lena is 1574.",
    "The key of Omar is in the drawer; ask him!",
    "今天天气很好。我们去公园，好吗？",
]
OTHERS = ["Is the key in the code?", "天气 👍🏽 नमस्ते"]


def test_a_sentencepiece_file_is_a_tokenizer(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 320}))
    pieces = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    known = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    assert checks._vocabulary(str(tmp_path), None, False) == known
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS + OTHERS:
        assert tokenizer.encode(text, add_special_tokens=False) == pieces.encode(text)
