"""What goes along with a request's output: the time of its first token, and its account at its end."""

import pytest

from fathom.runtime.ledger import KvShape, RequestLedger
from fathom.runtime.sglang_host import streamer
from fathom.runtime.sglang_host.streamer import REPORT_KEY, FathomOutputStreamer


class Request:
    """Stands for the engine's request."""

    def __init__(self, prompt, cached, output=(), ended=False):
        self.origin_input_ids, self.cached_tokens = [7] * prompt, cached
        self.output_ids, self.ended = list(output), ended

    def finished(self):
        return self.ended


@pytest.fixture
def made():
    made = FathomOutputStreamer.__new__(FathomOutputStreamer)
    made.ledger = RequestLedger(KvShape(1, 1))
    return made


def test_the_account_comes_with_the_last_tokens(made):
    running, ended = Request(30, 10, [1]), Request(40, 20, [1, 2], ended=True)
    for request in (running, ended):
        made.ledger.open(request, {"preset": str(request.cached_tokens)})
    info = made.build_additional_customized_info([running, ended])
    assert info.keys() == {REPORT_KEY}
    none, (report,) = info[REPORT_KEY]
    assert none == []
    assert (report["prompt_tokens"], report["cached_tokens"]) == (40, 20)
    assert report["policy"] == {"preset": "20"}
    assert len(made.ledger) == 1, "the account of the one that runs is open"


def test_the_first_token_is_stamped_before_it_is_sent(made, monkeypatch):
    """Of whoever has put out any, also where SGLang sends nothing for it in this step."""
    silent, speaking = Request(3, 0), Request(3, 0, [1])
    accounts = [made.ledger.open(request, {}) for request in (silent, speaking)]
    sent = []

    def stream(self, requests, logprobs, skipped):
        sent.append((requests, logprobs, skipped, [account.first_token_time for account in accounts]))

    monkeypatch.setattr(streamer.SchedulerOutputStreamer, "stream_output", stream)
    made.stream_output([silent, speaking], True, silent)
    ((requests, logprobs, skipped, times),) = sent
    assert (requests, logprobs, skipped) == ([silent, speaking], True, silent)
    assert times[0] is None and times[1] is not None
