"""Sends each finished request's account along with its last tokens."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.output_streamer import (
    DEFAULT_FORCE_STREAM_INTERVAL,
    SchedulerOutputStreamer,
)
from sglang.srt.runtime_context import get_serving

from fathom.runtime.config import POLICY_KEY
from fathom.runtime.ledger import RequestLedger


@dataclass(kw_only=True, slots=True)
class FathomOutputStreamer(SchedulerOutputStreamer):
    """SGLang's streamer that stamps first tokens and appends one report per finished request."""

    has_additional_customized_info: ClassVar[bool] = True
    ledger: RequestLedger = field(default_factory=RequestLedger)

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        for request in reqs:
            if request.output_ids:
                self.ledger.first_token(request)
        usual, due, spaced = get_serving().stream_interval, [], []
        for request in reqs:
            asked = request.sampling_params.stream_interval
            if request.stream and (interval := asked or usual) > 1 and not request.finished():
                # SGLang counts in multiples of the interval, which steps of several tokens jump over.
                sent, tokens = request.send_token_offset, len(request.output_ids)
                if tokens == 0 or (sent > 0 and tokens - sent < interval):
                    continue
                spaced.append((request.sampling_params, asked))
                request.sampling_params.stream_interval = 1
            if not may_become_a_stop(request):
                due.append(request)
        try:
            # SGLang's dataclass(slots=True) replaces the class object, which breaks zero-argument super().
            SchedulerOutputStreamer.stream_output(self, due, return_logprob, skip_req)
        finally:
            for params, asked in spaced:
                params.stream_interval = asked

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[dict[str, Any]]]]:
        """Per emitted request what is new to say: its report at its end, nothing while it is still running."""
        return {POLICY_KEY: [[self._report(request)] if request.finished() else [] for request in reqs]}

    def _report(self, request: Req) -> dict[str, Any]:
        waited = max(request.time_stats.get_queueing_time(), 0.0)  # one that never ran entered no step
        return self.ledger.report(request, len(request.origin_input_ids), request.cached_tokens, waited)


def may_become_a_stop(request: Req) -> bool:
    """Whether it is a request without a stream whose text so far would be sent with the beginning of a stop.

    SGLang sends that every so many tokens too, and what is sent stays in the answer; it holds back streams only.
    """
    waits = not request.stream and not request.finished()
    return (
        waits
        and len(request.output_ids) % DEFAULT_FORCE_STREAM_INTERVAL == 0
        and request.check_match_stop_str_prefix()
    )
