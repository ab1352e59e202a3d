"""Several tokens put out at once are what they would be one after the other: where the answer ends, and why."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.managers.utils import GenerationBatchResult  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from fathom.runtime.sglang_host.step import bursts  # noqa: E402
from fathom.runtime.sglang_host.step.bursts import BurstResultProcessor, with_runs  # noqa: E402
from fathom.runtime.sglang_host.step.rows import Run  # noqa: E402

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "demo/models/target")
TOKENIZER.additional_stop_token_ids = None
PIECES = [TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("a", "b", "1", ".", " the")]
STOPS = ["a", "ab", "b1", "1.", "a the", ". the", "bb"]


class Request(Req):
    """SGLang's, with what its look for an end asks for."""

    def __init__(self, sampling):
        sampling.normalize(TOKENIZER)
        self.sampling_params, self.tokenizer, self.output_ids = sampling, TOKENIZER, []
        self.finished_reason = self.to_finish = self.finished_len = self.vocab_size = None
        self.eos_token_ids, self.grammar, self.decoded_text = None, None, ""
        self.return_logprob, self.is_retracted, self.rid = True, False, "one"
        names = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
        self.logprob = SimpleNamespace(**{f"{name}_{part}": [] for name in names for part in ("val", "idx")})


def sampling(stops, patterns, ends, most):
    return SamplingParams(stop=stops, stop_regex=patterns, stop_token_ids=ends, max_new_tokens=most)


def answer(request):
    """What the client sees."""
    reason = request.finished_reason and request.finished_reason.to_json()
    end = len(request.output_ids) if request.finished_len is None else request.finished_len
    return request.output_ids[:end], reason


@given(
    st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.sampled_from(STOPS), max_size=3),
    st.sampled_from([[], ["[ab]1"], ["b+ the", "1[.]"]]),
    st.sampled_from([[], PIECES[3:4]]),
    st.integers(1, 12),
)
@settings(max_examples=200)
def test_an_answer_ends_where_it_would_token_by_token(runs, stops, patterns, ends, most):
    plain = Request(sampling(stops, patterns, ends, most))
    for token in (token for run in runs for token in run):
        if not plain.finished():
            plain.output_ids.append(token)
            bursts._update_finish_state(plain)
    sped, told = (Request(sampling(stops, patterns, ends, most)) for _ in range(2))
    for run in runs:
        if not sped.finished():
            sped.output_ids.extend(run)
            bursts.update_finish_state(sped, len(run))
            # A prompt's first tokens: how many they are is known before SGLang looks at the last one.
            told.output_ids.extend(run)
            bursts._NEW_TOKENS[told] = len(run)
            bursts.update_finish_state(told)
            assert told not in bursts._NEW_TOKENS
            assert sped.output_ids[-len(run) :] == run, "what was put out stays in its place"
    assert answer(sped) == answer(told) == answer(plain)


RUN = Run(
    [5, 6, 7],
    [-0.5, -1.5, -2.5],
    [([-0.1 * i, -0.2 * i], [10 + i, 20 + i]) for i in range(3)],
    [([-3.0 * i], [30]) for i in range(3)],
)


def out_of(request):
    known = request.logprob
    return (
        list(zip(known.output_token_logprobs_val, known.output_token_logprobs_idx, strict=True)),
        list(zip(known.output_top_logprobs_val, known.output_top_logprobs_idx, strict=True)),
        list(zip(known.output_token_ids_logprobs_val, known.output_token_ids_logprobs_idx, strict=True)),
    )


ALL = list(zip(RUN.logprobs, RUN.tokens, strict=True)), RUN.top, RUN.chosen


def plain_result(size):
    return GenerationBatchResult(
        logits_output=SimpleNamespace(
            next_token_logprobs=torch.arange(size) - 9.0,
            next_token_top_logprobs_val=[torch.zeros(2) for _ in range(size)],
            next_token_top_logprobs_idx=[torch.zeros(2, dtype=torch.long) for _ in range(size)],
            next_token_token_ids_logprobs_val=[torch.zeros(1) for _ in range(size)],
            next_token_token_ids_logprobs_idx=[[30] for _ in range(size)],
        ),
        next_token_ids=torch.tensor([90 + i for i in range(size)]),
    )


def test_a_step_counts_the_tokens_of_its_runs():
    result = with_runs(plain_result(4), {1: RUN, 3: Run([8])})
    assert result.next_token_ids.tolist() == [90, 7, 92, 8]
    assert result.get_num_generated_tokens(4) == 1 + 3 + 1 + 1


class Processor(BurstResultProcessor):
    """Without SGLang's parts."""

    told: ClassVar[list] = []
    """What grammars, and the count of a reasoning model's thoughts, are told."""

    def __init__(self):
        self.told.clear()

    def _accept_grammar_tokens(self, request, tokens):
        self.told.append(("grammar", request, tokens))

    def _maybe_update_reasoning_tokens(self, request, tokens):
        self.told.append(("thoughts", request, tokens))


@pytest.mark.parametrize("asked", [True, False])
def test_a_decode_step_puts_out_runs_beside_single_tokens(asked):
    processor = Processor()
    result = with_runs(plain_result(2), {1: RUN})
    batch = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: True), return_logprob=asked)
    tokens, logprobs = processor._normalize_decode_outputs(
        batch=batch,
        result=result,
        logits_output=result.logits_output,
        next_token_ids=result.next_token_ids,
    )
    assert tokens == [[90], RUN.tokens]
    if not asked:
        assert logprobs is None
        return
    requests = [Request(SamplingParams()) for _ in range(2)]
    for index, request in enumerate(requests):
        request.logprob.top_logprobs_num, request.logprob.token_ids_logprob = 2, [30]
        processor._apply_decode_logprobs(
            req=request,
            i=index,
            batch=batch,
            next_token_id=tokens[index],
            next_token_logprobs=logprobs,
            logits_output=result.logits_output,
        )
    assert out_of(requests[0]) == ([(-9.0, 90)], [([0, 0], [0, 0])], [([0], [30])])
    assert out_of(requests[1]) == ALL


@pytest.mark.parametrize(("somebody", "asked"), [(True, True), (True, False), (False, False)])
def test_a_prompts_first_tokens_are_all_put_out(somebody, asked, monkeypatch):
    """All but the last before SGLang looks at the step, which finds the last where it sampled one."""
    processor, requests = Processor(), [Request(SamplingParams()) for _ in range(4)]
    requests[1].grammar, requests[2].is_retracted = object(), True
    requests[3].finished_reason = object()
    runs = {place: RUN if asked else Run(RUN.tokens) for place in (1, 2, 3)}
    result = with_runs(plain_result(4), runs)
    output, batch = result.logits_output, SimpleNamespace(reqs=requests, return_logprob=somebody)
    seen = []
    stock = bursts.SchedulerBatchResultProcessor
    monkeypatch.setattr(stock, "process_batch_result_prefill", lambda *given: seen.append(given))
    processor.process_batch_result_prefill(batch, result)
    assert seen == [(processor, batch, result)]
    assert [request.output_ids for request in requests] == [[], RUN.tokens[:-1], [], []]
    assert sorted(processor.told, key=lambda told: told[0]) == [
        (who, requests[1], RUN.tokens[:-1]) for who in ("grammar", "thoughts")
    ]
    assert bursts._NEW_TOKENS.pop(requests[1]) == 3 and not any(r in bursts._NEW_TOKENS for r in requests)
    if not asked:
        assert out_of(requests[1]) == ([], [], [])
        assert (
            output.next_token_logprobs.tolist() == plain_result(4).logits_output.next_token_logprobs.tolist()
        )
        return
    rows = [
        output.next_token_logprobs,
        output.next_token_top_logprobs_val,
        output.next_token_top_logprobs_idx,
    ]
    rows += [output.next_token_token_ids_logprobs_val, output.next_token_token_ids_logprobs_idx]
    value, high, best, own, ids = ([torch.as_tensor(x).tolist() for x in row] for row in rows)
    assert value[1] == RUN.logprobs[-1] and value[0] == -9
    assert (high[1], best[1], own[1], ids[1]) == (
        pytest.approx(RUN.top[-1][0]),
        RUN.top[-1][1],
        RUN.chosen[-1][0],
        [30],
    )
    assert out_of(requests[1]) == tuple(part[:-1] for part in ALL)
