"""The seams of SGLang's routes beside those of a generation's account: requests that control the engine."""

import inspect

from fathom.runtime.sglang_host.seam import SCHEDULER, SERVER, Seam, reads_attributes, relies_on

HTTP_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_request_dispatcher",
        "override",
        "a control request that fails is answered and does not end the scheduler",
        "",
        reads_attributes("_request_dispatcher"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.process_input_requests",
        "read",
        "hands each request to the dispatcher and sends what it returns",
        "recv_reqs",
        lambda f: reads_attributes("_request_dispatcher send_output")(inspect.unwrap(f)),
    ),
    relies_on(
        "server scheduler",
        "managers.io_struct:BaseReq",
        "read",
        "the failure of a control request travels in its answer's id",
        check=lambda c: "rid" in c.__struct_fields__,
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_control_mixin:TokenizerControlMixin.init_communicators",
        "override",
        "creates what asks the engine, which becomes ours",
        "",
        reads_attributes("_dispatch_to_scheduler"),
    ),
    relies_on(
        SERVER,
        "managers.communicator:FanOutCommunicator.__call__",
        "override",
        "sees every answer to a control request",
        "obj",
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_control_mixin:TokenizerControlMixin._execute_profile",
        "override",
        "why a profile could not be started or stopped is for the client",
        "req",
    ),
)
