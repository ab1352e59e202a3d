"""Several tokens per step and request, through SGLang's processing of results, which expects one."""

import dataclasses
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.session.session_controller import Session

from fathom.runtime.sglang_host.step.rows import Run
from fathom.runtime.staging import send


@dataclass
class BurstResult(GenerationBatchResult):
    """SGLang's result of a step in which some requests put out several tokens.

    Attributes:
        runs: by place in the batch. ``next_token_ids`` holds the last token of each.
    """

    runs: dict[int, Run] = field(default_factory=dict)


def with_runs(result: GenerationBatchResult, runs: dict[int, Run]) -> BurstResult:
    """The result with the runs in place of what SGLang sampled for those requests."""
    assert isinstance(result.next_token_ids, torch.Tensor), "SGLang sampled in this step"
    tokens = result.next_token_ids
    # A number that is put into a GPU's tensor by its place would be waited for.
    told = torch.tensor([list(runs), [run.tokens[-1] for run in runs.values()]], dtype=torch.int64)
    places, last = send(told, tokens.device)
    tokens.index_copy_(0, places, last.to(tokens.dtype))
    return burst(result, runs)


def burst(result: GenerationBatchResult, runs: dict[int, Run]) -> BurstResult:
    """The result with the runs, whose last tokens are its ``next_token_ids``."""
    known = {item.name: getattr(result, item.name) for item in dataclasses.fields(result)}
    known["num_correct_drafts"] = sum(len(run.tokens) - 1 for run in runs.values())
    return BurstResult(**known, runs=runs)


def lengthen(batch: ScheduleBatch, by: torch.Tensor) -> None:
    """Make each request longer by so many tokens where the device knows its length."""
    more = send(by, batch.seq_lens.device)
    batch.seq_lens = batch.seq_lens + more.to(batch.seq_lens.dtype)
    batch.orig_seq_lens = batch.orig_seq_lens + more.to(batch.orig_seq_lens.dtype)


_NEW_TOKENS: weakref.WeakKeyDictionary[Req, int] = weakref.WeakKeyDictionary()
_update_finish_state = Req.update_finish_state


def update_finish_state(self: Req, new_accepted_len: int = 1) -> None:
    """SGLang's look for an end of the answer, over all tokens of a burst.

    Strings that end the answer are looked for token by token: of several in one burst, SGLang would take the one
    that was named first, and not the one that comes first.
    """
    first = _NEW_TOKENS.pop(self, 1) if _NEW_TOKENS else 1
    count, sampling = max(new_accepted_len, first), self.sampling_params
    if count == 1 or not (sampling.stop_strs or sampling.stop_regex_strs):
        _update_finish_state(self, count)
        return
    later = self.output_ids[1 - count :]
    del self.output_ids[1 - count :]
    _update_finish_state(self)
    while later and not self.finished():
        self.output_ids.append(later.pop(0))
        _update_finish_state(self)
    self.output_ids.extend(later)


_concat_token_arrays = Session._concat_token_arrays


def concat_token_arrays(last_req: Req, req: Any, session_params: Any) -> Any:
    """SGLang's prompt of a session's next turn, with the answer before it as its client has it.

    What a burst put out behind the end is no part of it.
    """
    last_req.output_ids = last_req.output_ids_through_stop
    return _concat_token_arrays(last_req, req, session_params)


class BurstResultProcessor(SchedulerBatchResultProcessor):
    """SGLang's processor; a run stands where it would find one token, or one log-probability."""

    def _normalize_decode_outputs(
        self,
        *,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
        logits_output: Any,
        next_token_ids: Any,
    ) -> Any:
        tokens, logprobs = SchedulerBatchResultProcessor._normalize_decode_outputs(
            self, batch=batch, result=result, logits_output=logits_output, next_token_ids=next_token_ids
        )
        for index, run in result.runs.items() if isinstance(result, BurstResult) else ():
            tokens[index] = run.tokens
            if logprobs is not None:
                logprobs[index] = run
        return tokens, logprobs

    def process_batch_result_prefill(self, batch: ScheduleBatch, result: Any) -> None:
        for index, run in result.runs.items() if isinstance(result, BurstResult) else ():
            request = batch.reqs[index]
            if not request.finished() and not request.is_retracted:
                self._begin(index, request, run, batch, result.logits_output)
        SchedulerBatchResultProcessor.process_batch_result_prefill(self, batch, result)

    def _begin(self, index: int, request: Req, run: Run, batch: ScheduleBatch, output: Any) -> None:
        """Put out all of a prompt's first tokens but the last, which SGLang then finds as the one it sampled."""
        first = run.tokens[:-1]
        request.output_ids.extend(first)
        _NEW_TOKENS[request] = len(run.tokens)
        self._maybe_update_reasoning_tokens(request, first)
        if request.grammar is not None:
            self._accept_grammar_tokens(request, first)
        if batch.return_logprob and run.logprobs:
            append_logprobs(request, run, len(first))
            output.next_token_logprobs[index] = run.logprobs[-1]
            if run.top:
                values, ids = map(torch.tensor, run.top[-1])
                output.next_token_top_logprobs_val[index] = values
                output.next_token_top_logprobs_idx[index] = ids
            if run.chosen:
                values, ids = run.chosen[-1]
                output.next_token_token_ids_logprobs_val[index] = torch.tensor(values)
                output.next_token_token_ids_logprobs_idx[index] = ids

    def _apply_decode_logprobs(
        self, *, req: Req, i: int, next_token_logprobs: list[Any], **known: Any
    ) -> None:
        if isinstance(next_token_logprobs[i], Run):
            append_logprobs(req, next_token_logprobs[i], len(next_token_logprobs[i].tokens))
            return
        SchedulerBatchResultProcessor._apply_decode_logprobs(
            self, req=req, i=i, next_token_logprobs=next_token_logprobs, **known
        )


def append_logprobs(request: Req, run: Run, count: int) -> None:
    """Append the log-probabilities of a run's first ``count`` tokens to what the request puts out."""
    out = request.logprob
    out.output_token_logprobs_val.extend(run.logprobs[:count])
    out.output_token_logprobs_idx.extend(run.tokens[:count])
    for values, ids in run.top[:count]:
        out.output_top_logprobs_val.append(values)
        out.output_top_logprobs_idx.append(ids)
    for values, ids in run.chosen[:count]:
        out.output_token_ids_logprobs_val.append(values)
        out.output_token_ids_logprobs_idx.append(ids)


def install(stock: SchedulerBatchResultProcessor) -> BurstResultProcessor:
    """SGLang's processor with its parts, as ours."""
    Req.update_finish_state = update_finish_state
    Session._concat_token_arrays = staticmethod(concat_token_arrays)
    return BurstResultProcessor(
        **{item.name: getattr(stock, item.name) for item in dataclasses.fields(stock)}
    )
