"""What goes along with a request's output: the time of its first token, and its account at its end."""

from types import SimpleNamespace

import pytest

from fathom.runtime.config import POLICY_KEY
from fathom.runtime.ledger import RequestLedger
from fathom.runtime.sglang_host.reports import streamer
from fathom.runtime.sglang_host.reports.streamer import FathomOutputStreamer


class Request:
    """Stands for the engine's request."""

    def __init__(self, prompt, cached, output=(), ended=False):
        self.origin_input_ids, self.cached_tokens = [7] * prompt, cached
        self.output_ids, self.ended = list(output), ended
        self.stream, self.send_token_offset, self.stops = False, 0, False
        self.sampling_params = SimpleNamespace(stream_interval=None)
        self.waited = 0.25
        self.time_stats = SimpleNamespace(get_queueing_time=lambda: self.waited)

    def finished(self):
        return self.ended

    def check_match_stop_str_prefix(self):
        return self.stops


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(streamer, "get_serving", lambda: SimpleNamespace(stream_interval=4))
    made = FathomOutputStreamer.__new__(FathomOutputStreamer)
    made.ledger = RequestLedger()
    return made


def test_the_account_comes_with_the_last_tokens(made):
    running, ended = Request(30, 10, [1]), Request(40, 20, [1, 2], ended=True)
    for request in (running, ended):
        made.ledger.open(request, {"preset": str(request.cached_tokens)})
    info = made.build_additional_customized_info([running, ended])
    assert info.keys() == {POLICY_KEY}
    none, (report,) = info[POLICY_KEY]
    assert none == []
    assert (report["prompt_tokens"], report["cached_tokens"]) == (40, 20)
    assert (report["policy"], report["queue_seconds"]) == ({"preset": "20"}, 0.25)
    assert len(made.ledger) == 1, "the account of the one that runs is open"


def test_a_request_that_never_ran_has_no_time_in_the_queue(made):
    """It entered no step: SGLang takes its arrival from nothing."""
    request = Request(3, 0, ended=True)
    request.waited = -40.0
    ((report,),) = made.build_additional_customized_info([request])[POLICY_KEY]
    assert report["queue_seconds"] == 0


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


def test_a_stream_is_sent_when_it_has_its_interval(made, monkeypatch):
    """The first token at once; and SGLang, which counts in multiples, is asked to send what is due as it is."""
    sent = []

    def stream(self, requests, *_):
        for request in requests:
            assert request.ended or not request.stream or request.sampling_params.stream_interval == 1
            sent.append((request.cached_tokens, len(request.output_ids)))
            request.send_token_offset = len(request.output_ids)

    monkeypatch.setattr(streamer.SchedulerOutputStreamer, "stream_output", stream)
    server, own, whole = Request(3, 1), Request(3, 2), Request(3, 3)
    own.sampling_params.stream_interval = 2
    server.stream = own.stream = True
    counts = [0, 1, 3, 4, 7, 8, 9, 10]
    for tokens in counts:
        for request in (server, own, whole):
            request.output_ids = [5] * tokens
            request.ended = tokens == 10
            made.stream_output([request], False)
    assert [tokens for name, tokens in sent if name == 1] == [1, 7, 10]
    assert [tokens for name, tokens in sent if name == 2] == [1, 3, 7, 9, 10]
    assert [tokens for name, tokens in sent if name == 3] == counts  # SGLang's own business
    assert (server.sampling_params.stream_interval, own.sampling_params.stream_interval) == (None, 2)


def test_no_answer_is_given_the_beginning_of_a_stop(made, monkeypatch):
    """Also without a stream SGLang sends what there is, every so many tokens, and it stays in the answer."""
    sent = []
    monkeypatch.setattr(
        streamer.SchedulerOutputStreamer, "stream_output", lambda _, due, *__: sent.extend(due)
    )
    often = streamer.DEFAULT_FORCE_STREAM_INTERVAL
    for tokens in range(1, 3 * often):
        for stops in (False, True):
            request = Request(3, 0, [5] * tokens)
            request.stops = stops
            made.stream_output([request], False)
            held = sent == []
            assert held == (stops and tokens % often == 0)
            sent.clear()
            request.ended = True
            made.stream_output([request], False)
            assert sent == [request]
            sent.clear()
