"""Texts whose characters span tokens, streamed and stopped: token by token, and in bursts as under drafting."""

import random
from types import SimpleNamespace

import pytest
from conftest import DEMO_TARGET
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.runtime.sglang_host.reports import detokenizer

torchvision_ops.declare()

from sglang.srt.managers import detokenizer_manager  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from fathom.runtime.sglang_host.sampling import stop_strings  # noqa: E402
from fathom.runtime.sglang_host.step import bursts  # noqa: E402

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


@pytest.fixture(scope="module", params=["byte-level", "byte fallback"])
def tokenizer(request):
    fallback = request.param == "byte fallback"
    made = bytes_of_characters() if fallback else PreTrainedTokenizerFast.from_pretrained(DEMO_TARGET)
    made.additional_stop_token_ids = None
    return made


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(detokenizer_manager, "find_printable_text", None)
    for name in ("_stop_match_tail_len", "tail_str", "check_match_stop_str_prefix"):
        monkeypatch.setattr(Req, name, None)
    detokenizer.install()
    stop_strings.install()


class Stream:
    """SGLang's detokenizer, for one request."""

    def __init__(self, tokenizer):
        self.manager = detokenizer_manager.DetokenizerManager.__new__(detokenizer_manager.DetokenizerManager)
        self.manager.tokenizer, self.manager.vocab_size = tokenizer, len(tokenizer)
        self.manager.disable_tokenizer_batch_decode = self.manager.is_tool_call_parser_gpt_oss = False
        self.manager.decode_status, self.sent = {}, []

    def send(self, ids, reason):
        output = SimpleNamespace(
            rids=["r"],
            decoded_texts=[""],
            decode_ids=[ids],
            read_offsets=[0],
            finished_reasons=[reason],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        self.sent += self.manager._decode_batch_token_id_output(output)


class Request(Req):
    """SGLang's, with what its look for an end asks for."""

    def __init__(self, tokenizer, stops):
        self.sampling_params = SamplingParams(stop=stops, max_new_tokens=1000)
        self.sampling_params.normalize(tokenizer)
        self.tokenizer, self.output_ids, self.decoded_text = tokenizer, [], ""
        self.finished_reason = self.to_finish = self.finished_len = self.vocab_size = None
        self.eos_token_ids = self.grammar = None


def written(rng):
    return "".join(
        rng.choice(rng.choice(WRITING)) if rng.random() < 0.6 else rng.choice(WRITING)
        for _ in range(rng.randint(1, 9))
    )


def parts(ids, rng, most):
    """Up to so many of the ids at a time."""
    ids = list(ids)
    while ids:
        count = rng.randint(1, most)
        yield ids[:count]
        del ids[:count]


@pytest.mark.parametrize("most", [1, MOST_AT_ONCE])
def test_a_stream_is_the_whole_text_once(tokenizer, most):
    rng = random.Random(5)
    for _ in range(200):
        ids = tokenizer(written(rng), add_special_tokens=False)["input_ids"]
        stream = Stream(tokenizer)
        for part in parts(ids, rng, most):
            stream.send(part, None)
        stream.send([], {"type": "length"})
        assert "".join(stream.sent) == tokenizer.decode(ids)
        assert not any("\ufffd" in text for text in stream.sent)


@pytest.mark.parametrize("most", [1, MOST_AT_ONCE])
def test_a_stop_ends_the_answer_and_is_not_streamed(tokenizer, most):
    """With the token that completes it, however the tokenizer cuts it, and whatever is around it."""
    rng, looked_for = random.Random(6), 0
    for _ in range(300):
        ids = tokenizer(written(rng), add_special_tokens=False)["input_ids"]
        text = tokenizer.decode(ids)
        begin = rng.randrange(len(text))
        stop = text[begin : begin + rng.randint(1, 5)]
        if not stop.strip():
            continue
        looked_for += 1
        ends = next(count for count in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:count]))
        request, stream, told = Request(tokenizer, [stop, "none"]), Stream(tokenizer), 0
        for part in parts(ids, rng, most):
            request.output_ids.extend(part)
            bursts.update_finish_state(request, len(part))
            if request.finished():
                break
            if not request.check_match_stop_str_prefix():
                stream.send(request.output_ids[told:], None)
                told = len(request.output_ids)
        assert request.finished() and request.finished_len == ends, (stop, text)
        stream.send(request.output_ids[told : request.finished_len], request.finished_reason.to_json())
        assert "".join(stream.sent) == text[: text.index(stop)], (stop, text)
    assert looked_for > 250


def test_an_answer_that_ends_within_a_character():
    """The part of it is shown at the end, and only there."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_TARGET)
    ids = tokenizer("好あ好あ好", add_special_tokens=False)["input_ids"][:-1]
    for most in range(1, len(ids) + 1):
        stream = Stream(tokenizer)
        for begin in range(0, len(ids), most):
            last = begin + most >= len(ids)
            stream.send(ids[begin : begin + most], {"type": "length"} if last else None)
        assert "".join(stream.sent) == tokenizer.decode(ids) == "好あ好あ\ufffd"
        assert not any("\ufffd" in text for text in stream.sent[:-1])


@pytest.mark.parametrize("most", [1, MOST_AT_ONCE])
def test_bytes_that_are_no_characters(most):
    """They hold back nothing behind them, and none is lost: only what may become a character waits."""
    tokenizer, rng = PreTrainedTokenizerFast.from_pretrained(DEMO_TARGET), random.Random(7)
    words = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    halves = [token for token in words if "\ufffd" in tokenizer.decode([token])]
    for _ in range(200):
        ids = [rng.choice(rng.choice([words, halves])) for _ in range(rng.randint(1, 14))]
        stream, told = Stream(tokenizer), 0
        for part in parts(ids, rng, most):
            stream.send(part, None)
            told += len(part)
            assert "".join(stream.sent) == tokenizer.decode(ids[:told]).rstrip("\ufffd")
        stream.send([], {"type": "length"})
        assert "".join(stream.sent) == tokenizer.decode(ids)


def test_tokens_that_a_tokenizer_in_python_does_not_know():
    """A model whose table is padded puts them out, and such a tokenizer raises."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.additional_stop_token_ids = None
    unknown = len(tokenizer) + 50
    with pytest.raises(ValueError, match="bytes must be in range"):
        tokenizer.decode([unknown])
    request = Request(tokenizer, ["now"])
    for token in [unknown, *tokenizer.encode("no", add_special_tokens=False), unknown]:
        request.output_ids.append(token)
        bursts.update_finish_state(request)
        assert not request.finished()
    for token in tokenizer.encode("now", add_special_tokens=False):
        assert not request.finished()
        request.output_ids.append(token)
        bursts.update_finish_state(request)
    assert request.finished()
