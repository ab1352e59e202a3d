"""Regular expressions that end an answer are looked for within a time limit.

The scheduler looks for them after each token, for everybody's answers in turn, and Python's ``re`` has no limit:
some short patterns take longer than anybody waits. Where several processes share a model, each looks by a clock of
its own, and they have to end the same requests: too slow for one of them is too slow.
"""

import re
import time
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import regex
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from fathom.runtime.sglang_host.machine import devices

LIMIT_SECONDS = 0.1
"""For all patterns of a request after one token."""

TOO_SLOW = f"stop_regex was not decided within {LIMIT_SECONDS:g} s after a token"

_check_str_based_finish = Req._check_str_based_finish
_deadline = 0.0


def search(pattern: str, text: str) -> Any:
    """As ``re.search``.

    Raises:
        TimeoutError: when the time of the request's patterns is over.
    """
    return regex.search(pattern, text, timeout=max(_deadline - time.monotonic(), 1e-3))


def check_str_based_finish(self: Req, new_accepted_len: int = 1) -> bool:
    """SGLang's look for what ends an answer; a pattern that takes too long ends its own request."""
    global _deadline
    if not self.sampling_params.stop_regex_strs:
        return _check_str_based_finish(self, new_accepted_len)
    _deadline = time.monotonic() + LIMIT_SECONDS
    in_time, ended = True, True
    try:
        ended = _check_str_based_finish(self, new_accepted_len)
    except TimeoutError:
        in_time = False
    in_time = bool(devices.least(in_time))
    if not in_time:
        self.finished_reason = FINISH_ABORT(TOO_SLOW, HTTPStatus.BAD_REQUEST, "BadRequestError")
        self.finished_len = None  # of a match that another process had no time to find
    return ended or not in_time


def install() -> None:
    """Put the limit around SGLang's look."""
    schedule_batch.re = SimpleNamespace(search=search, error=re.error)
    Req._check_str_based_finish = check_str_based_finish
