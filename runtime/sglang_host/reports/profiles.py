"""Profiles of the engine's steps: one that cannot be made or written is given up, and the engine lives on.

SGLang looks at the folder when the trace is written, in the midst of a step: what fails there ends the scheduler,
and where it is asked for, the profile can be neither ended nor begun again.

It also ends a profile and begins the next within `Scheduler.run_batch`, which is a span of the first: PyTorch then
writes the span's end into memory that went with it, and later the process dies. Here profiles change between the
steps, so that a trace holds whole steps, and those that are asked for at once do so in spans of their own.
"""

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import ProfileReq, ProfileReqOutput, ProfileReqType
from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager

logger = logging.getLogger(__name__)

UNDER_WAY = "Profiling is already in progress. Call /stop_profile first."


def one_by_one(requests: list[Any]) -> list[list[Any]]:
    """The requests of a step, in their order, each apart where more than one may end or begin a profile."""
    if sum(isinstance(request, ProfileReq) for request in requests) > 1:
        return [[request] for request in requests]
    return [requests]


class FathomProfiles(SchedulerProfilerManager):
    """SGLang's, of one scheduler process."""

    get_forward_ct: Callable[[], int]

    def _profile(self, recv_req: ProfileReq) -> ProfileReqOutput:
        starts = recv_req.req_type == ProfileReqType.START_PROFILE
        if not envs.SGLANG_PROFILE_V2.get() and starts and self.profile_in_progress:
            return ProfileReqOutput(success=False, message=UNDER_WAY)
        try:
            return super()._profile(recv_req)
        except Exception as error:
            self._give_up()
            return ProfileReqOutput(success=False, message=f"the profile was given up: {error}")

    def _profile_batch_predicate(self, batch: Any) -> None:
        """SGLang's place in a step, within its span: `before_step` has been."""

    def before_step(self, batch: Any) -> None:
        """Begin and end what this step of the scheduler begins and ends."""
        counted = self.get_forward_ct
        self.get_forward_ct = lambda: counted() + 1  # SGLang asks when the step has been counted
        try:
            super()._profile_batch_predicate(batch)
        except Exception as error:
            logger.error("the profile was given up: %r", error)
            self._give_up()
        finally:
            self.get_forward_ct = counted

    def _give_up(self) -> None:
        """Be as before the profile, whatever it had come to."""
        if not envs.SGLANG_PROFILE_V2.get() and self.torch_profiler is not None:
            try:
                self.torch_profiler.stop()
            except Exception as error:  # stopped already, or never begun
                logger.debug("the profiler could not be stopped: %r", error)
        self._apply_detailed_annotations(False)
        self.__post_init__()
