"""The seams of sessions: which are open, and what their turns go on from."""

from fathom.runtime.sglang_host.seams.seam import SCHEDULER, Seam, reads_attributes, relies_on

SESSION_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_running_status",
        "override",
        "makes the controller of sessions, which is ours",
        "",
        reads_attributes("SessionController session_controller tree_cache"),
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:SessionController.open",
        "override",
        "sessions are bounded",
        "recv_req",
        reads_attributes("sessions session_id"),
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:SessionController.get",
        "override",
        "a session that is used is the last to go",
        "session_id",
        reads_attributes("sessions"),
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:SessionController._close",
        "call",
        "lets a session and what it holds go",
        "session_id",
        reads_attributes("_inflight sessions"),
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:Session.abort_req",
        "call",
        "a streaming session has no turn that runs; one that never runs stays there",
        "",
        reads_attributes("_inflight"),
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:SessionController._all_requests_finished",
        "call",
        "says whether no turn of a session runs",
        "session",
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:SessionController.maybe_reap",
        "override",
        "no process closes sessions by its own clock",
        "now interval",
        reads_attributes("sessions _last_reap_time _close"),
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:Session.create_req",
        "override",
        "a turn that is refused as it comes is none of its session; all turns before one that replaces them end",
        None,
        reads_attributes("session_params replace streaming _inflight req_nodes clear set_finish_with_abort"),
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:SessionReqNode.clear",
        "replace",
        "a turn ends with those behind it, however many, and though another has its id by now",
        "req_dict",
        reads_attributes("children clear req finished_reason to_finish rid"),
    ),
)
