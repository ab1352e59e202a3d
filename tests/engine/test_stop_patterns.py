"""A regular expression that ends an answer has a time limit, which is that of its own request alone."""

import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fathom.runtime.sglang_host import torchvision_ops

torchvision_ops.declare()

from sglang.srt.managers import schedule_batch  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from fathom.runtime.sglang_host import stop_patterns  # noqa: E402

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "demo/models/target")
FOR_EVER = "(.|..)+[\x00\x01]$"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(schedule_batch, "re", schedule_batch.re)
    monkeypatch.setattr(Req, "_check_str_based_finish", Req._check_str_based_finish)
    stop_patterns.install()


class Request(Req):
    """SGLang's, with what its look for an end asks for."""

    def __init__(self, patterns, text):
        self.sampling_params = SamplingParams(stop_regex=patterns)
        self.sampling_params.normalize(TOKENIZER)
        self.tokenizer, self.rid, self.decoded_text = TOKENIZER, "one", ""
        self.output_ids = TOKENIZER.encode(text, add_special_tokens=False)
        self.finished_reason = self.finished_len = None


def test_a_pattern_without_an_end_ends_its_request():
    request = Request([FOR_EVER] * 32, "the key of " * 20)
    begun = time.monotonic()
    assert request._check_str_based_finish()
    assert time.monotonic() - begun < 20 * stop_patterns.LIMIT_SECONDS
    reason = request.finished_reason.to_json()
    assert (reason["type"], reason["status_code"]) == ("abort", 400)
    assert "stop_regex was not decided within 0.1 s" in reason["message"]


def test_other_patterns_end_answers_as_ever():
    request = Request(["x+", "k[a-f]y"], "the key of")
    assert request._check_str_based_finish()
    assert request.finished_reason.to_json()["matched"] == "k[a-f]y"
    assert not Request(["x+"], "the key of")._check_str_based_finish()
