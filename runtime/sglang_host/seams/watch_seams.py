"""The seams of what operators look at: dumps of requests, logged requests, profiles."""

from types import CodeType
from typing import Any

from fathom.runtime.sglang_host.seams.seam import (
    SCHEDULER,
    SERVER,
    Seam,
    reads_attributes,
    reads_global,
    relies_on,
)


def _reads_within(names: str) -> Any:
    """Whether a function, or one inside it, reads these names, in the code or in quotes."""

    def read(code: CodeType) -> set[Any]:
        inner = [read(const) for const in code.co_consts if isinstance(const, CodeType)]
        return {*code.co_names, *code.co_consts}.union(*inner)

    return lambda function: set(names.split()) <= read(function.__code__)


WATCH_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SERVER,
        "managers.tokenizer_manager:pickle",
        "replace",
        "keys are not written into dumps of requests",
        check=lambda module: hasattr(module, "dump"),
    ),
    relies_on(
        SERVER,
        "server_args:ServerArgs.__reduce__",
        "call",
        "as above: its fields, and dicts of them",
        "",
        reads_attributes("asdict __dict__ _rebuild_server_args"),
    ),
    *(
        relies_on(
            SERVER,
            f"managers.tokenizer_manager:TokenizerManager.{method}",
            "read",
            "writes its dump by `pickle` of its module",
            parameters,
            _reads_within("pickle dump server_args"),
        )
        for method, parameters in (
            ("_dump_data_to_file", "data_list filename log_message"),
            ("dump_requests_before_crash", "hostname"),
        )
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:RequestLogger",
        "replace",
        "logs of requests are ours",
        check=lambda cls: hasattr(cls, "configure"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.init_request_logging_and_dumping",
        "read",
        "creates the log of requests, and files of metrics by what the log leaves out",
        "",
        reads_attributes("RequestLogger metadata RequestMetricsExporterManager"),
    ),
    relies_on(
        SERVER,
        "utils.request_logger:RequestLogger._compute_metadata",
        "override",
        "prompts and answers are in no log that is to be without them",
        "",
        reads_attributes("log_requests log_requests_level"),
    ),
    relies_on(
        SERVER,
        "utils.request_logger:RequestLogger._setup_targets",
        "override",
        "a line of JSON begins with no time",
        "",
        reads_attributes("create_log_targets log_requests_target"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter._init_metrics",
        "read",
        "as above: creates the log of who runs and who waits",
        "tp_rank pp_rank dp_rank",
        reads_attributes("scheduler_status_logger"),
    ),
    relies_on(
        SCHEDULER,
        "utils.scheduler_status_logger:SchedulerStatusLogger.maybe_dump",
        "read",
        "as above: writes to these loggers",
        "running_batch waiting_queue",
        reads_attributes("loggers"),
    ),
    relies_on(
        SERVER,
        "utils.request_logger:RequestLogger.configure",
        "read",
        "sets the targets up again for another format",
        "log_requests log_requests_level log_requests_format log_requests_target",
        reads_attributes("_setup_targets log_requests_format"),
    ),
    relies_on(
        SERVER,
        "utils.request_logger:WHITELISTED_HEADERS",
        "register",
        "X-Request-Id is in the log of requests",
        check=lambda names: isinstance(names, list),
    ),
    relies_on(
        SERVER,
        "utils.request_logger:_extract_whitelisted_headers",
        "read",
        "as above: looks the list up for each line",
        "request",
        reads_global("WHITELISTED_HEADERS"),
    ),
    relies_on(
        SERVER,
        "utils.request_logger:RequestLogger.log_finished_request",
        "override",
        "as above: what meta_info has of their tokens",
        "obj out request",
        reads_attributes("metadata meta_info"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_profiler",
        "override",
        "creates what profiles steps, which becomes ours",
        "",
        reads_attributes("profiler_manager"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.process_input_requests",
        "override",
        "profiles that are asked for at once end and begin in spans of their own",
        "recv_reqs",
    ),
    *(
        relies_on(
            SCHEDULER,
            f"managers.scheduler_components.profiler_manager:SchedulerProfilerManager.{method}",
            "override",
            "a profile that fails ends no engine, and none ends within a span of its own",
            parameters,
            reads_attributes(read),
        )
        for method, parameters, read in (
            ("__post_init__", "", "torch_profiler profile_in_progress profile_by_stage"),
            ("_profile", "recv_req", "req_type _init_profile _start_profile _stop_profile"),
            (
                "_profile_batch_predicate",
                "batch",
                "profile_by_stage get_forward_ct _start_profile _stop_profile",
            ),
        )
    ),
)
