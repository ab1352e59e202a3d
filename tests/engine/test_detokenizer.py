"""Texts whose characters span tokens, streamed token by token and several at a time as under drafting."""

import random
from types import SimpleNamespace

import pytest
from conftest import DEMO_TARGET
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathom.runtime.sglang_host import detokenizer, torchvision_ops

torchvision_ops.declare()

from sglang.srt.managers import detokenizer_manager  # noqa: E402

WRITING = (
    *(
        "今天天气很好。我们去公园散步，好吗？",
        "東京は日本の首都です｡",
        "한국어 문장입니다.",
        "ไทยภาษา",
        "𠀋𡈽𝔘𝕟",
    ),
    *(
        "مرحبا بالعالم كيف حالك؟",
        "नमस्ते क्षत्रिय।",
        "👨‍👩‍👧‍👦🏳️‍🌈👍🏽🇯🇵",
        "e\u0301n\u0303a\u030a\u0328",
        " One, two.\n\n",
    ),
)
MOST_AT_ONCE = 9


def bytes_of_characters():
    """As SentencePiece's models have it: what is no token of its own is one token for each byte."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aeio.,今日"]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def streamed(tokenizer, ids, sizes):
    """The texts that SGLang's detokenizer sends for tokens that come so many at a time."""
    manager = detokenizer_manager.DetokenizerManager.__new__(detokenizer_manager.DetokenizerManager)
    manager.tokenizer, manager.vocab_size, manager.decode_status = tokenizer, len(tokenizer), {}
    manager.disable_tokenizer_batch_decode = manager.is_tool_call_parser_gpt_oss = False
    sent, begin = [], 0
    while begin < len(ids):
        end = begin + next(sizes)
        output = SimpleNamespace(
            rids=["r"],
            decoded_texts=[""],
            decode_ids=[ids[begin:end]],
            read_offsets=[0],
            finished_reasons=[{"type": "length"} if end >= len(ids) else None],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        sent += manager._decode_batch_token_id_output(output)
        begin = end
    return sent


@pytest.mark.parametrize("most", [1, MOST_AT_ONCE])
@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_a_stream_is_the_whole_text_once(monkeypatch, kind, most):
    monkeypatch.setattr(detokenizer_manager, "find_printable_text", None)
    detokenizer.install()
    tokenizer = (
        PreTrainedTokenizerFast.from_pretrained(DEMO_TARGET)
        if kind == "byte-level"
        else bytes_of_characters()
    )
    rng = random.Random(5)
    for _ in range(200):
        text = "".join(rng.choice(rng.choice(WRITING)) for _ in range(rng.randint(1, 12)))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        sent = streamed(tokenizer, ids, iter(lambda: rng.randint(1, most), 0))
        assert "".join(sent) == tokenizer.decode(ids)
        assert not any("\ufffd" in part for part in sent)


def test_an_answer_that_ends_within_a_character(monkeypatch):
    """The part of it is shown at the end, and only there."""
    monkeypatch.setattr(detokenizer_manager, "find_printable_text", None)
    detokenizer.install()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_TARGET)
    ids = tokenizer("好あ好あ好", add_special_tokens=False)["input_ids"][:-1]
    for most in range(1, len(ids) + 1):
        sent = streamed(tokenizer, ids, iter([*[most] * len(ids)]))
        assert "".join(sent) == tokenizer.decode(ids) == "好あ好あ\ufffd"
        assert not any("\ufffd" in part for part in sent[:-1])
