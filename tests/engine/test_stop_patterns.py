"""A regular expression that ends an answer has a time limit, which is that of its own request alone."""

import multiprocessing
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import distributed
from transformers import AutoTokenizer

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.managers import schedule_batch  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from fathom.runtime.sglang_host.machine import devices  # noqa: E402
from fathom.runtime.sglang_host.sampling import stop_patterns  # noqa: E402

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
    begun = time.process_time()
    assert request._check_str_based_finish()
    assert time.process_time() - begun < 20 * stop_patterns.LIMIT_SECONDS
    reason = request.finished_reason.to_json()
    assert (reason["type"], reason["status_code"]) == ("abort", 400)
    assert "stop_regex was not decided within 0.1 s" in reason["message"]


def test_other_patterns_end_answers_as_ever():
    request = Request(["x+", "k[a-f]y"], "the key of")
    assert request._check_str_based_finish()
    assert request.finished_reason.to_json()["matched"] == "k[a-f]y"
    assert not Request(["x+"], "the key of")._check_str_based_finish()


def looked_for(rank, store, late):
    """How answers end in one of two processes; whose searches after the first take too long is asked."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    devices._group = lambda: SimpleNamespace(cpu_group=distributed.group.WORLD)
    searches = iter(range(99))

    def search(pattern, text):
        if rank == late and next(searches):
            raise TimeoutError
        return re.search(pattern, text)

    schedule_batch.re.search = search
    told = []
    for patterns in (["o"], ["o"], ["x+"], ["x+", "k[a-f]y"]):
        request = Request(patterns, "the key of")
        ends = request._check_str_based_finish()
        told.append((ends, request.finished_len, ends and request.finished_reason.to_json()))
    return told


@pytest.mark.parametrize("late", [0, 1])
def test_processes_that_share_a_model_end_the_same_answers(tmp_path, late):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        asked = [pool.apply_async(looked_for, (rank, tmp_path / "store", late)) for rank in range(2)]
        one, other = (answer.get(60) for answer in asked)
    assert one == other
    assert one[0][2]["matched"] == "o"
    assert all((ends, length, reason["type"]) == (True, None, "abort") for ends, length, reason in one[1:])
