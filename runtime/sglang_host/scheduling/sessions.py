"""Sessions of clients, of which the engine keeps no more than it should.

SGLang keeps every turn of a session until its client closes it, and any number of sessions: those of clients that
went without a word stay as long as the server. And it lets each of a model's processes close those whose time is
over by its own clock: where one has closed a session and another has not, the next turn runs in one of them only,
and the engine ends or hangs.
"""

import time
from typing import Any

from sglang.srt.managers.io_struct import CloseSessionReqInput, OpenSessionReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.session.session_controller import Session, SessionController, SessionReqNode

MOST_SESSIONS = 1024
"""Most sessions that are open at a time."""
LOOK_SECONDS = 1.0
"""Between two looks for sessions whose time is over."""


class FathomSession(Session):
    """SGLang's session. A turn that is refused as it comes is none of its, and leaves those that run alone."""

    def create_req(self, req: Any, *args: Any, **kwargs: Any) -> Req:
        """SGLang's request for a turn."""
        params = req.session_params
        if params.replace and params.rid is None and not self.streaming:
            for node in list(self.req_nodes.values()):  # SGLang walks over what it empties
                node.clear(self.req_nodes)
        turn = super().create_req(req, *args, **kwargs)
        if turn.to_finish is not None:
            turn.session = None
        return turn


def clear(self: SessionReqNode, req_dict: dict[str, SessionReqNode]) -> None:
    """SGLang's end of a turn and of all behind it: of a session as long as clients like, whose ids they may use
    again.
    """
    waiting = [self]
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children)
        request = node.req
        if request.finished_reason is None:
            request.to_finish = FINISH_ABORT()
        if req_dict.get(request.rid) is node:
            del req_dict[request.rid]


class FathomSessions(SessionController):
    """SGLang's sessions; where there would be too many, the one that waits longest for its next turn is closed.

    Turns come to all of a model's processes in one order, so all of them close the same one. Whose time is over one
    process decides for all.
    """

    _looked = 0.0  # time.monotonic() in seconds

    def open(self, recv_req: OpenSessionReqInput) -> Any:
        """As SGLang's.

        Raises:
            RuntimeError: when there are too many, and each has a turn that runs.
        """
        if recv_req.session_id not in self.sessions and len(self.sessions) >= MOST_SESSIONS:
            waiting = (name for name, session in self.sessions.items() if self._waits(session))
            if (longest := next(waiting, None)) is None:
                raise RuntimeError(f"{MOST_SESSIONS} sessions are open, and each has a turn that runs")
            self._close(longest)
        told = super().open(recv_req)
        if (session := self.sessions.get(recv_req.session_id)) is not None:
            session.__class__ = FathomSession
        return told

    def get(self, session_id: str) -> Session | None:
        """The session of a turn that came in."""
        if (session := self.sessions.pop(session_id, None)) is not None:
            self.sessions[session_id] = session
        return session

    def maybe_reap(self, now: float, interval: float = LOOK_SECONDS) -> None:
        """Nothing: see :meth:`over`."""

    def over(self) -> list[CloseSessionReqInput]:
        """To close those whose time is over, as their clients would; all processes are to be told."""
        now = time.monotonic()
        if not self.sessions or now - self._looked <= LOOK_SECONDS:
            return []
        self._looked = now
        return [
            CloseSessionReqInput(session_id=name)
            for name, session in self.sessions.items()
            if session.is_timed_out() or (session.close_on_finish and self._all_requests_finished(session))
        ]

    def forget(self, turn: Req) -> None:
        """A turn that has left the queue and never ends: for SGLang it would run for as long as the session.

        Args:
            turn: any request; those that are no turns of a session are left as they are.
        """
        if (session := turn.session) is None:
            return
        if session.streaming:
            session.abort_req()
        elif (node := session.req_nodes.pop(turn.rid, None)) is not None and node.parent is not None:
            node.parent.children.remove(node)

    def _waits(self, session: Session) -> bool:
        return not session._inflight and self._all_requests_finished(session)


def install() -> None:
    """Put our end of turns in SGLang's place."""
    SessionReqNode.clear = clear  # type: ignore[method-assign]
