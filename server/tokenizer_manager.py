"""SGLang's tokenizer manager, carrying the policy to the scheduler and its account back."""

import asyncio
import contextlib
import re
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import BackgroundTasks, HTTPException
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, UnloadLoRAAdapterReqInput
from sglang.srt.managers.tokenizer_manager import ReqState, ServerStatus, TokenizerManager
from sglang.srt.runtime_context import get_disagg, get_lora, get_model, get_serving
from sglang.srt.sampling.sampling_params import SamplingParams

from fathom.runtime.config import POLICY_KEY, Policy
from fathom.runtime.sglang_host.reports.detokenizer import known_ids
from fathom.runtime.sglang_host.scheduling.control import reason_of
from fathom.runtime.sglang_host.scheduling.priorities import FirstValues, PriorityLabels
from fathom.server.answers.errors import ControlError
from fathom.server.api.control import ControlCommunicator, check_logging, check_profile
from fathom.server.command.files import adapter_problem
from fathom.server.requests import bounds, templates
from fathom.server.requests.adapters import Adapters, Unloaded, adapter_of, each, of_tensors
from fathom.server.requests.applied_policy import apply_policy, constrain, refuse_prompt_outputs
from fathom.server.requests.context import CURRENT, Face, RequestContext, public
from fathom.server.routes import GENERATES, OTHER, path_of
from fathom.server.telemetry.history import Finished
from fathom.server.telemetry.metrics import UNFINISHED, Account, RequestMetrics, outcome_of

MOST_VALUES = 256
"""Of a label that the operator lets clients fill in: each value is a set of series that stays."""

ABORT_SECONDS = 2.0
"""After a stream, until what may be left of its work is ended."""
LOADS = 10
"""Times that a request's adapters are loaded again because they were unloaded before it could use them."""

SPARE_TOKENS = 2
"""Of a context, that SGLang's scheduler gives neither to the prompt nor to the answer."""

_UNKNOWN_PARAMETER = re.compile(r"[Uu]nexpected keyword argument '(.*)'", re.DOTALL)


class FathomTokenizerManager(TokenizerManager):
    """One per server. Every generation, by whichever route it came, leaves here with a policy: by no route of
    generations, as for scores, with the exact one, since nothing in the answer could tell of another."""

    _custom_labels: frozenset[str] = frozenset()

    def __init__(self, server_args: Any, port_args: Any, face: Face):
        self.face = face
        self.request_metrics: RequestMetrics | None = None
        super().__init__(server_args, port_args)
        if get_disagg().language_model_only:
            templates.complete(self.tokenizer, get_serving().tokenizer_path, get_model().revision)
        self._custom_labels = frozenset(server_args.tokenizer_metrics_allowed_custom_labels or ())
        face.limits = replace(face.limits, layers=self.model_config.num_hidden_layers)

    def init_metric_collector_watchdog(self) -> None:
        super().init_metric_collector_watchdog()
        self._priorities = PriorityLabels()
        self._label_values: defaultdict[str, FirstValues] = defaultdict(lambda: FirstValues(MOST_VALUES))
        if self.enable_metrics:
            self.request_metrics = RequestMetrics()

    def init_communicators(self) -> None:
        super().init_communicators()
        for member in vars(self).values():
            if isinstance(member, FanOutCommunicator):
                member.__class__ = ControlCommunicator

    def _handle_open_session_req_output(self, recv_obj: Any) -> None:
        future = self.session_futures.get(recv_obj.session_id)
        if (reason := reason_of(recv_obj)) is not None and future is not None and not future.done():
            future.set_exception(ControlError(reason))
        else:
            super()._handle_open_session_req_output(recv_obj)

    def init_lora(self) -> None:
        super().init_lora()
        self.lora_registry = Adapters(
            get_lora().lora_paths, lambda: [s.obj for s in self.rid_to_state.values()]
        )
        self._loads_adapters = asyncio.Lock()
        self._unloaded: set[str] = set()  # by somebody who has loaded no other by that name since

    async def load_lora_adapter(self, obj: Any, request: Any = None) -> Any:
        """SGLang's, to its end also where the request is given up that needs the adapter: half way through, the
        engine would have it and the registry would not, or the other way round, for ever.

        Raises:
            ControlError: for a name that no adapter can have.
        """
        self._check_adapter(obj)
        load = super().load_lora_adapter
        # without a request of its own it is for one that asks for the adapter
        return await asyncio.shield(load(obj) if request is None else self._load_instead(load, obj, request))

    async def load_lora_adapter_from_tensors(self, obj: Any, request: Any = None) -> Any:
        """SGLang's.

        Raises:
            ControlError: for a name that no adapter can have.
        """
        self._check_adapter(obj)
        return await self._load_instead(super().load_lora_adapter_from_tensors, obj, request)

    async def unload_lora_adapter(self, obj: Any, request: Any = None) -> Any:
        """SGLang's."""
        result = await super().unload_lora_adapter(obj, request)
        if result.success or obj.lora_name in self.lora_ref_cache:  # or it had made room for another
            self._unloaded.add(obj.lora_name)
        return result

    async def _load_instead(self, load: Any, obj: Any, request: Any) -> Any:
        """Load an adapter instead of the one that requests brought back after it was unloaded."""
        async with self._loads_adapters:
            if obj.lora_name in self._unloaded:
                await super().unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=obj.lora_name))
            result = await load(obj, request)
            if result.success:
                self._unloaded.discard(obj.lora_name)
            return result

    def _check_adapter(self, obj: Any) -> None:
        if problem := adapter_problem(obj.lora_name, self.served_model_name):
            raise ControlError(f"lora_name: {problem}")

    async def _resolve_lora_path(self, obj: GenerateReqInput | EmbeddingReqInput) -> None:
        """SGLang's; requests whose adapters have to be loaded wait for each other: each could have those unloaded
        that the other has just loaded.

        Raises:
            ValueError: for an adapter that was never loaded, or that cannot be loaded again.
        """
        wanted = {name for name in each(obj, "lora_path") if name is not None}
        missing = await self.lora_registry.get_unregistered_loras(wanted)
        if gone := sorted(of_tensors(self.lora_ref_cache).intersection(missing)):
            raise ValueError(
                f"the adapters {gone} were loaded from tensors and then unloaded, by somebody or to make room for "
                "another (--max-loaded-loras): nothing is left of them to be loaded again"
            )
        if not missing:
            with contextlib.suppress(Unloaded):
                await super()._resolve_lora_path(obj)
                return
        async with self._loads_adapters:
            for _ in range(LOADS - 1):
                with contextlib.suppress(Unloaded):
                    await super()._resolve_lora_path(obj)
                    return
            await super()._resolve_lora_path(obj)

    async def _execute_profile(self, req: Any) -> Any:
        check_profile(req, on_gpu=self.server_args.device != "cpu")
        try:
            return await super()._execute_profile(req)
        except RuntimeError as error:
            raise ControlError(str(error)) from None

    def configure_logging(self, obj: Any) -> None:
        """SGLang's, with illegal values refused before anything is changed.

        Raises:
            ControlError: naming the field and what is legal.
        """
        check_logging(obj)
        super().configure_logging(obj)

    async def generate_request(
        self, obj: GenerateReqInput | EmbeddingReqInput, request: Any = None
    ) -> AsyncIterator[Any]:
        """SGLang's generator of outputs, with the policy put in and the reports collected.

        Raises:
            ValueError: for a value that the engine could not survive, and for a cache key in the name space that is
                reserved for policies.
        """
        context = CURRENT.get()
        clients = context is not None or (request is not None and path_of(request.scope) in GENERATES)
        if self.is_pause and not clients and str(obj.rid).startswith(HEALTH_CHECK_RID_PREFIX):
            yield await self.get_internal_state()  # generations wait: any other sign of the engine must do
            return
        if isinstance(obj, EmbeddingReqInput):
            bounds.check_embedding(obj, self.model_config.vocab_size)
        else:
            policy = context.policy if context else Policy()  # no generation route: as SGLang serves it
            try:
                if clients:
                    bounds.check_clients(obj)
                elif obj.token_ids_logprob == []:  # of /v1/score
                    raise ValueError("label_token_ids must not be empty")
                if context is not None and context.json_schema:
                    constrain(obj, context.json_schema)
                bounds.check(obj, self.model_config.vocab_size, self._custom_labels)
                refuse_prompt_outputs(obj, policy)
                apply_policy(obj, policy, context.protected if context else ())
                if self.enable_lora and context is not None:
                    names = context.model, self.served_model_name, self.lora_ref_cache
                    obj.lora_path = adapter_of(obj.lora_path, *names)
            except ValueError:
                # What SGLang does two seconds after the end of a stream needs a normalized request, which this one
                # may not become, or not in a short time.
                vars(obj).update(vars(GenerateReqInput(text="", stream=obj.stream)))
                obj.normalize_batch_and_arguments()
                raise
        stream = super().generate_request(obj, request)
        first = True
        try:
            async for output in stream:
                # All before the yield: a caller that does not stream takes one output and never returns.
                if first:
                    first = False
                    if context is not None:
                        context.expected += generations_of(obj)
                if context is not None:
                    context.collect(output)
                yield output
        except RecursionError:
            raise ValueError("the request is nested too deeply") from None
        except TypeError as error:
            # SGLang hands sampling parameters on as keywords, and answers an unknown one with status 500.
            if found := _UNKNOWN_PARAMETER.search(str(error)):
                raise ValueError(f"sampling_params.{found[1][:40]} is not a sampling parameter") from error
            raise
        finally:
            await stream.aclose()

    def _validate_one_request(self, obj: GenerateReqInput | EmbeddingReqInput, input_ids: Any) -> None:
        if self.allow_auto_truncate and isinstance(obj, GenerateReqInput) and input_ids is not None:
            self._cut(obj.sampling_params, input_ids)
        if isinstance(obj, GenerateReqInput) and not self.is_generation:
            raise ValueError("this server embeds texts and generates none (--is-embedding)")
        super()._validate_one_request(obj, input_ids)
        no_tokens = input_ids is not None and len(input_ids) == 0
        if no_tokens and isinstance(obj, GenerateReqInput) and obj.input_embeds is None:
            raise ValueError("the prompt must have at least one token")
        if input_ids is not None and not obj.contains_mm_input():
            bounds.check_prompt(input_ids, self.model_config.vocab_size)
        if isinstance(obj, GenerateReqInput) and self.tokenizer is not None:
            given = (self.preferred_sampling_params or {}) | obj.sampling_params
            more = getattr(self.tokenizer, "additional_stop_token_ids", None) or ()
            ends = {self.tokenizer.eos_token_id, *more, *(self.model_config.hf_eos_token_id or ())}
            bounds.check_least(given, ends, self.model_config.vocab_size)

    def _cut(self, sampling: dict[str, Any], input_ids: list[int]) -> None:
        """Cut a prompt to what fits into the context beside its answer, of which at most half is the answer's.

        The scheduler does so for the pool; SGLang would leave the answer nothing.
        """
        given = {"max_new_tokens": SamplingParams().max_new_tokens} | (self.preferred_sampling_params or {})
        wanted = max(1, (given | sampling)["max_new_tokens"] or 1)
        room = self.context_len - self.num_reserved_tokens - SPARE_TOKENS
        del input_ids[max(1, room - min(wanted, max(1, room // 2))) :]

    def _init_req_state(self, obj: GenerateReqInput | EmbeddingReqInput, request: Any = None) -> None:
        if isinstance(obj.rid, list) and (taken := [rid for rid in obj.rid if rid in self.rid_to_state]):
            # SGLang finds it too late: the states of the other prompts would stay for ever.
            raise ValueError(f"Duplicate request ID detected: {taken[0]}")
        super()._init_req_state(obj, request)
        if not isinstance(obj, GenerateReqInput) or self.server_status == ServerStatus.Starting:
            return  # an embedding, or the server warming itself up
        context = CURRENT.get() or RequestContext(OTHER, Policy(), 0.0)
        for rid in rids_of(obj):
            state = self.rid_to_state[rid]
            start = context.received_time or state.time_stats.created_time
            state.fathom_account = Account(context.route, context.policy.preset, start)
        if isinstance(obj.rid, list) and obj.parallel_sample_num > 1:
            for prompt in range(obj.batch_size):
                # SGLang copies this object for each request of the prompt; the copies share the member.
                obj[prompt].fathom_stand_ins = StandIns(obj.rid[prompt :: obj.batch_size])

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        state = self.rid_to_state.get(tokenized_obj.rid)
        stand_ins = getattr(state.obj, "fathom_stand_ins", None) if state is not None else None
        if stand_ins is not None and not stand_ins.cached:
            stand_ins.cached, state.fathom_account = True, None
        elif stand_ins is not None and stand_ins.rids:
            self._drop_stand_in(stand_ins)
        await super()._send_one_request(tokenized_obj)

    def _drop_stand_in(self, stand_ins: "StandIns") -> None:
        """One more generation has a state of its own: that of its stand-in counts for nothing from here on.

        SGLang deletes the first one of a prompt, at last, and leaves the others behind.
        """
        rid = stand_ins.rids.pop()
        if stand_ins.rids:
            self.rid_to_state.pop(rid, None)
        elif (first := self.rid_to_state.get(rid)) is not None:
            first.fathom_account = None

    def update_request_meta_info(
        self,
        meta_info: dict[str, Any],
        state: ReqState,
        customized_info: dict[str, Any],
        index: int,
        finish_reason: dict[str, Any] | None,
    ) -> None:
        others = {key: values for key, values in customized_info.items() if key != POLICY_KEY}
        super().update_request_meta_info(meta_info, state, others, index, finish_reason)
        reports = customized_info[POLICY_KEY][index] if POLICY_KEY in customized_info else []
        if not reports or finish_reason is None:
            return
        (report,) = reports
        if not state.obj.stream and (first := report.get("first_token_time")) is not None:
            # SGLang has it of the first group of tokens, often the only one; its decode_throughput goes by it.
            state.time_stats.first_token_time = first
        if adapter := getattr(state.obj, "lora_path", None):
            report = report | {"adapter": adapter}
        meta_info[POLICY_KEY] = public(report)
        if account := account_of(state):
            account.first_token = report.get("first_token_time")
            account.report = report

    def convert_logprob_style(
        self,
        meta_info: dict[str, Any],
        state: ReqState,
        top_logprobs_num: int,
        token_ids_logprob: list[int] | None,
        return_text_in_logprobs: bool,
        recv_obj: Any,
        recv_obj_index: int,
    ) -> None:
        """SGLang's, which fails, and ends the server, for a request that the engine refused: it has no
        log-probabilities although it asked.
        """
        if recv_obj.output_token_logprobs_val is None:
            self.add_logprob_to_meta_info(
                meta_info, state, top_logprobs_num, token_ids_logprob, return_text_in_logprobs
            )
            return
        super().convert_logprob_style(
            meta_info,
            state,
            top_logprobs_num,
            token_ids_logprob,
            return_text_in_logprobs,
            recv_obj,
            recv_obj_index,
        )

    def detokenize_logprob_tokens(
        self, token_logprobs_val: list[float], token_logprobs_idx: list[int], decode_to_text: bool
    ) -> Any:
        """SGLang's, which raises, and ends the server, for a token that a tokenizer in Python does not know."""
        found = super().detokenize_logprob_tokens
        known = known_ids(self.tokenizer) if decode_to_text else None
        if known is None:
            return found(token_logprobs_val, token_logprobs_idx, decode_to_text)
        told = found(token_logprobs_val, [min(token, known - 1) for token in token_logprobs_idx], True)
        return [
            (value, token, text if token < known else "")
            for (value, _, text), token in zip(told, token_logprobs_idx, strict=True)
        ]

    def collect_metrics(self, state: ReqState, recv_obj: Any, i: int) -> None:
        given = getattr(state.obj, "priority", None)
        if given is not None:  # SGLang labels its series with it
            state.obj.priority = self._priorities.label(given)
        if told := getattr(state.obj, "custom_labels", None):
            few = {name: self._label_values[name].label(value) for name, value in told.items()}
            state.obj.custom_labels = few
        super().collect_metrics(state, recv_obj, i)
        if given is not None:
            state.obj.priority = given
        account, metrics = account_of(state), self.request_metrics
        if account is None or metrics is None:
            return
        output_tokens = recv_obj.completion_tokens[i] if recv_obj.completion_tokens else 0
        self.face.history.put_out(time.perf_counter(), output_tokens - account.seen_tokens)
        account.seen_tokens = output_tokens
        if not state.finished:
            return
        outcome = outcome_of(recv_obj.finished_reasons[i])
        metrics.count(account, outcome)
        prompt_tokens = recv_obj.prompt_tokens[i]
        if done := outcome not in UNFINISHED:
            metrics.observe_tokens(account, prompt_tokens, output_tokens)
        if not done or output_tokens == 0:
            self.face.history.end(ended(account, outcome, prompt_tokens, output_tokens))
            return
        first_token = state.time_stats.first_token_time
        if not state.obj.stream and account.first_token is not None:
            # Without streaming, outputs come in groups: only the scheduler saw the first token.
            first_token = account.first_token
        end = state.time_stats.finished_time
        metrics.observe_times(account, first_token, end, output_tokens)
        self.face.history.end(ended(account, outcome, prompt_tokens, output_tokens, first_token, end))

    def observe_in_flight(self) -> None:
        """For the next scrape: an engine that hangs at its first step says nothing of what it was given."""
        if self.request_metrics is not None:
            states = self.rid_to_state.values()
            self.request_metrics.observe_in_flight(
                sum(account_of(s) is not None and not s.finished for s in states)
            )

    def create_abort_task(self, obj: GenerateReqInput) -> BackgroundTasks:
        """SGLang's end of a stream's generations, two seconds after the stream, and of no others.

        SGLang goes by the id alone, which another request may have: the one that made it a duplicate, or the next.
        """

        async def abort() -> None:
            await asyncio.sleep(ABORT_SECONDS)
            for place, rid in enumerate(rids_of(obj)):
                state = self.rid_to_state.get(rid)
                if state is not None and state.obj is (obj if obj.is_single else obj[place]):
                    self.abort_request(rid)

        tasks = BackgroundTasks()
        tasks.add_task(abort)
        return tasks

    def _handle_abort_req(self, recv_obj: Any) -> None:
        reason = recv_obj.finished_reason or {"type": "abort"}
        self._count_unfinished(self.rid_to_state.get(recv_obj.rid), outcome_of(reason))
        super()._handle_abort_req(recv_obj)

    def _release_req_states_on_failure(self, rids: Iterable[str]) -> None:
        outcome = outcome_of_failure(sys.exc_info()[1])
        for state in map(self.rid_to_state.get, rids):
            # Of what was sent to the scheduler, its answer to the abort is counted.
            if state is not None and not state.dispatched:
                self._count_unfinished(state, outcome)
        super()._release_req_states_on_failure(rids)

    def _count_unfinished(self, state: ReqState | None, outcome: str) -> None:
        account = account_of(state)
        if account is not None and self.request_metrics is not None:
            self.request_metrics.count(account, outcome)
            self.face.history.end(ended(account, outcome, 0, account.seen_tokens))


def ended(
    account: Account,
    outcome: str,
    prompt_tokens: int,
    output_tokens: int,
    first_token: float | None = None,
    end: float | None = None,
) -> Finished:
    """One generation for the live page; without times where it did not run to its end."""
    labels = account.route, account.preset, outcome, prompt_tokens, output_tokens
    if first_token is None or end is None:
        return Finished(time.perf_counter(), *labels, report=account.report)
    tpot = (end - first_token) / (output_tokens - 1) if output_tokens > 1 else None
    return Finished(end, *labels, first_token - account.start, tpot, end - account.start, account.report)


def outcome_of_failure(error: BaseException | None) -> str:
    """The outcome of a generation that ended in this process: routes answer a ``ValueError`` with status 400.

    Where the prompt that n > 1 share was refused or waited too long, its status is theirs.
    """
    if isinstance(error, HTTPException):
        return outcome_of({"type": "abort", "status_code": error.status_code})
    if isinstance(error, ValueError):
        return "refused"
    return "error" if isinstance(error, Exception) else "abort"


def rids_of(obj: GenerateReqInput) -> list[str]:
    """The ids of a request; one of the copies that SGLang makes of a batch knows only its own."""
    return obj.rid if isinstance(obj.rid, list) else [obj.rid]


def generations_of(obj: GenerateReqInput | EmbeddingReqInput) -> int:
    """How many generations a normalized request asks for."""
    return 1 if obj.is_single else obj.batch_size * getattr(obj, "parallel_sample_num", 1)


def account_of(state: ReqState | None) -> Account | None:
    """The account of a generation that metrics count; None for any other."""
    counted = state is not None and state.obj.log_metrics
    return getattr(state, "fathom_account", None) if counted else None


@dataclass
class StandIns:
    """States that SGLang has for the n > 1 generations of a prompt until each gets its own.

    Attributes:
        rids: their ids.
        cached: whether the request was sent that SGLang makes itself, to cache the prompt that the n share.
    """

    rids: list[str]
    cached: bool = False
