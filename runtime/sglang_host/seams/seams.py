"""The seam ledger: every place of SGLang that Fathom relies on, checked in the processes that do, at start.

SGLang logs and ignores a hook whose target is gone, and would then serve alone in our name. So each thing we
subclass, override, call or replace is a row here with the parameters it must still have; :func:`verify` raises at
the first difference, and the caller ends the process.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fathom.runtime.sglang_host.seams.admission_seams import ADMISSION_SEAMS
from fathom.runtime.sglang_host.seams.answer_seams import ANSWER_SEAMS
from fathom.runtime.sglang_host.seams.cpu_seams import CPU_SEAMS
from fathom.runtime.sglang_host.seams.draft_seams import DRAFT_SEAMS
from fathom.runtime.sglang_host.seams.engine_seams import ENGINE_SEAMS
from fathom.runtime.sglang_host.seams.gpu_seams import GPU_SEAMS
from fathom.runtime.sglang_host.seams.http_seams import HTTP_SEAMS
from fathom.runtime.sglang_host.seams.kv_seams import KV_SEAMS
from fathom.runtime.sglang_host.seams.lora_seams import LORA_SEAMS
from fathom.runtime.sglang_host.seams.rotation_seams import ROTATION_SEAMS
from fathom.runtime.sglang_host.seams.sampling_seams import SAMPLING_SEAMS
from fathom.runtime.sglang_host.seams.seam import (
    DETOKENIZER,
    SCHEDULER,
    SERVER,
    Seam,
    SeamError,
    reads_attributes,
    reads_global,
    relies_on,
)
from fathom.runtime.sglang_host.seams.session_seams import SESSION_SEAMS
from fathom.runtime.sglang_host.seams.split_seams import SPLIT_SEAMS
from fathom.runtime.sglang_host.seams.tool_seams import TOOL_SEAMS
from fathom.runtime.sglang_host.seams.value_seams import VALUE_SEAMS
from fathom.runtime.sglang_host.seams.watch_seams import WATCH_SEAMS
from fathom.runtime.sglang_host.seams.weight_seams import WEIGHT_SEAMS

SGLANG_VERSION = "0.5.20"

ROLES = (SERVER, SCHEDULER, DETOKENIZER)


LEDGER: tuple[Seam, ...] = (
    # --- the HTTP process ---
    relies_on(
        SERVER,
        "entrypoints.http_server:launch_server",
        "call",
        "starts SGLang's HTTP server and engine with our functions in its processes",
        "server_args init_tokenizer_manager_func run_scheduler_process_func run_detokenizer_process_func "
        "execute_warmup_func launch_callback",
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:app",
        "register",
        "our middleware and routes are added to SGLang's FastAPI application, and its lifespan is wrapped",
        check=lambda app: (
            isinstance(app.user_middleware, list)
            and hasattr(app, "add_exception_handler")
            and callable(app.router.lifespan_context)
        ),
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:_setup_and_run_http_server",
        "read",
        "serves the module's application object and publishes the scheduler's own report",
        check=lambda f: {"app", "set_global_state"} <= set(f.__code__.co_names),
    ),
    *(
        relies_on(SERVER, f"entrypoints.engine:{function}", "replace", why, check=reads_global("mp"))
        for function, why in (
            ("_set_envs_and_config", "asks the module's `mp`, ours, for a start method"),
            ("Engine._launch_scheduler_processes", "its processes and pipes are those of `mp`"),
        )
    ),
    relies_on(
        SERVER,
        "entrypoints.engine:init_tokenizer_manager",
        "call",
        "builds our tokenizer manager",
        "server_args port_args TokenizerManagerClass",
    ),
    relies_on(SERVER, "server_args:prepare_server_args", "call", "parses SGLang's own flags", "argv"),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.generate_request",
        "override",
        "carries the policy into the request and the report out",
        "obj request",
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.update_request_meta_info",
        "override",
        "receives the scheduler's report",
        "meta_info state customized_info index finish_reason",
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.collect_metrics",
        "override",
        "observes TTFT and TPOT; few priorities are labels",
        "state recv_obj i",
        reads_attributes("priority custom_labels"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.convert_logprob_style",
        "override",
        "a refused request that asked for log-probabilities has none",
        "meta_info state top_logprobs_num token_ids_logprob return_text_in_logprobs recv_obj recv_obj_index",
        reads_attributes("add_logprob_to_meta_info"),
    ),
    *(
        relies_on(
            SERVER, f"managers.tokenizer_manager:TokenizerManager.{method}", "override", why, parameters
        )
        for method, why, parameters in (
            ("init_metric_collector_watchdog", "creates our metrics once SGLang's are set up", ""),
            ("_init_req_state", "opens the account of each generation", "obj request"),
            ("_validate_one_request", "refuses prompts without tokens, cuts too long ones", "obj input_ids"),
            ("_send_one_request", "tells SGLang's own prefix request from a client's", "tokenized_obj"),
            ("_handle_abort_req", "counts aborted generations", "recv_obj"),
            ("_release_req_states_on_failure", "counts generations that never reached the engine", "rids"),
            ("configure_logging", "an illegal level is refused before anything is changed", "obj"),
            ("sigterm_watchdog", "bounds the time that running requests have after SIGTERM", ""),
        )
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:SignalHandler.running_phase_sigquit_handler",
        "override",
        "a dead engine ends the process with a reason and an exit code",
        "signum frame",
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.auto_create_handle_loop",
        "read",
        "installs our signal handler and starts our drain",
        check=reads_attributes("signal_handler_class sigterm_handler sigterm_watchdog"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:ReqState",
        "read",
        "what a generation was asked for and when its tokens came",
        check=lambda c: {"obj", "finished", "time_stats", "dispatched"} <= set(c.__dataclass_fields__),
    ),
    *ENGINE_SEAMS,
    *ROTATION_SEAMS,
    *SAMPLING_SEAMS,
    *CPU_SEAMS,
    *KV_SEAMS,
    *ADMISSION_SEAMS,
    *LORA_SEAMS,
    *DRAFT_SEAMS,
    *GPU_SEAMS,
    *HTTP_SEAMS,
    *SESSION_SEAMS,
    *SPLIT_SEAMS,
    *TOOL_SEAMS,
    *VALUE_SEAMS,
    *ANSWER_SEAMS,
    *WATCH_SEAMS,
    *WEIGHT_SEAMS,
    # --- the detokenizer ---
    relies_on(
        DETOKENIZER,
        "managers.detokenizer_manager:run_detokenizer_process",
        "call",
        "the detokenizer's process",
        "server_args port_args detokenizer_manager_class",
    ),
    relies_on(
        DETOKENIZER,
        "managers.detokenizer_manager:find_printable_text",
        "replace",
        "no stream repeats what it has sent, also where several tokens come at a time",
        "text",
    ),
    relies_on(
        DETOKENIZER,
        "managers.detokenizer_manager:DetokenizerManager._decode_batch_token_id_output",
        "read",
        "asks it by its name in the module what to send of a text that ends within a character",
        "recv_obj",
        reads_attributes("find_printable_text sent_offset"),
    ),
)


def rows(role: str | None = None) -> list[Seam]:
    """The ledger, or the rows one process relies on."""
    return [seam for seam in LEDGER if role is None or role in seam.roles]


def resolve(target: str) -> Any:
    """The object a target names.

    Raises:
        SeamError: the module or an attribute on the way does not exist.
    """
    module_name, _, path = target.partition(":")
    try:
        found = importlib.import_module(f"sglang.srt.{module_name}")
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise SeamError(f"SGLang has no {target} ({error})") from error
    return found


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Parameter names in order, without ``self``."""
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def check(seam: Seam) -> None:
    """Raise SeamError unless SGLang still has this seam as it was."""
    found = resolve(seam.target)
    if seam.parameters is not None and parameters_of(found) != seam.parameters:
        raise SeamError(
            f"{seam.target} takes ({', '.join(parameters_of(found))}), expected ({', '.join(seam.parameters)})"
        )
    if seam.check is not None and not seam.check(found):
        raise SeamError(f"{seam.target} is no longer what we rely on: {seam.why}")


def verify(role: str, ledger: Iterable[Seam] | None = None) -> None:
    """Check SGLang's version and every seam of one process.

    Args:
        role: ``server``, ``scheduler`` or ``detokenizer``.
        ledger: rows to check instead of the role's own.

    Raises:
        SeamError: naming the first seam that is missing or changed.
    """
    import sglang

    if sglang.__version__ != SGLANG_VERSION:
        raise SeamError(f"needs sglang=={SGLANG_VERSION}, found {sglang.__version__}")
    for seam in rows(role) if ledger is None else ledger:
        check(seam)


def verify_scheduler_report(report: Any) -> None:
    """Check the report that the engine process sent at start.

    Raises:
        SeamError: the engine process runs something other than Fathom's scheduler and worker.
    """
    if not isinstance(report, dict):
        raise SeamError("the engine process runs stock SGLang: it sent no report of Fathom's scheduler")
    for part, expected in (("scheduler", "FathomScheduler"), ("worker", "FathomWorker")):
        if not str(report.get(part, "")).endswith(f".{expected}"):
            raise SeamError(f"the engine process runs {report.get(part)!r} as {part}, expected {expected}")
