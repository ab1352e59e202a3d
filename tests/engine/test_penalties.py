"""Penalties and minimal lengths count all that a request has said, also before it was taken out of the batch."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from greedy import TOLERANCE, body_of
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.penaltylib import (
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedRepetitionPenalizer,
    repetition_penalty,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from transformers import AutoModelForCausalLM

from fathom.runtime.sglang_host.sampling import penalties

VOCABULARY = 50
NEW_TOKENS = 300
PROMPTS = 4
BEFORE = 4
"""Events of a stream before the request is taken out."""
TRIES = 5
"""A request may be done before it can be taken out: the client has to hear of it first."""
STOPS = list(range(2, 1000))
SAMPLING = (
    {"frequency_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 200, "stop_token_ids": STOPS, "ignore_eos": False},
)


@pytest.fixture(scope="module")
def server(start_server, tiny_model):
    return start_server(tiny_model, "--dtype", "float32", "--max-total-tokens", "4000")


@torch.no_grad()
def is_greedy(model, prompt, said, sampling):
    """Whether each token is the most likely one behind those before it, each penalty written out."""
    rows = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
    for number, (logits, token) in enumerate(zip(rows, said, strict=True)):
        counts = torch.bincount(torch.tensor(said[:number], dtype=torch.long), minlength=len(logits))
        logits = logits - sampling.get("frequency_penalty", 0) * counts
        logits = logits - sampling.get("presence_penalty", 0) * (counts > 0)
        factor = sampling.get("repetition_penalty", 1)
        logits = torch.where(counts > 0, torch.where(logits > 0, logits / factor, logits * factor), logits)
        if number < sampling.get("min_new_tokens", 0):
            logits[STOPS] = -torch.inf
        if logits.max() - logits[token] > TOLERANCE:
            return False
    return True


def is_whole(said, sampling):
    """Whether it ends with the first stop token that may stand, or at its full length."""
    stops = [] if sampling.get("ignore_eos", True) else STOPS
    ends = [i for i, token in enumerate(said) if token in stops]
    return ends == [len(said) - 1] if ends else len(said) == NEW_TOKENS


def answer_of(server, body):
    """The answer of a request that is taken out of the batch after some tokens, and let in again, once."""
    answers = (tried(server, body) for _ in range(TRIES))
    return next(answer for answer in answers if answer["meta_info"]["num_retractions"] == 1)


def tried(server, body):
    with server.client.stream("POST", "/generate", json=body | {"stream": True}) as stream:
        events = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {"))
        for _ in range(BEFORE):
            next(events)
        for route, told in (("/pause_generation", {"mode": "retract"}), ("/continue_generation", {})):
            assert server.client.post(route, json=told).status_code == 200
        return json.loads(list(events)[-1])


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda sampling: next(iter(sampling)))
def test_a_request_that_is_taken_out_gets_the_same_answer(server, tiny_model, sampling):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompts = torch.randint(6, 2000, (PROMPTS, 20), generator=torch.Generator().manual_seed(4)).tolist()
    bodies = [body_of(prompt, None, NEW_TOKENS, **sampling) | {"return_logprob": False} for prompt in prompts]
    answers = [answer_of(server, body) for body in bodies]
    for prompt, answer in zip(prompts, answers, strict=True):
        said = answer["output_ids"]
        assert is_greedy(model, prompt, said, sampling) and is_whole(said, sampling)
        assert not is_greedy(model, prompt, said, {})


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["greedy", "top_p"])
def test_a_grammar_that_ends_before_the_least_length_ends_the_answer(server, more):
    """SGLang leaves no token that may be said: an aborted answer, or with top-p the end of the server."""
    sampling = {"regex": "[a-z]{3}", "min_new_tokens": 20, "ignore_eos": False, **more}
    body = body_of([7, 8, 9], None, 30, **sampling)
    for _ in range(3):
        answer = server.client.post("/generate", json=body).json()
        meta = answer["meta_info"]
        assert len(answer["text"]) == 3 and meta["finish_reason"]["type"] == "stop"
        assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])


class Batch:
    device = "cpu"

    def __init__(self, reqs):
        self.reqs = reqs


def request(said, **sampling):
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    params = SimpleNamespace(**neutral | {"min_new_tokens": 0, "stop_token_ids": {3, 4}} | sampling)
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
    return SimpleNamespace(sampling_params=params, output_ids=said, eos_token_ids=None, tokenizer=tokenizer)


@torch._dynamo.config.patch(disable=True)
@pytest.mark.parametrize("penalizer", penalties.COUNTS, ids=lambda kind: kind.__name__)
def test_what_was_said_counts_as_if_it_had_been_counted_one_by_one(penalizer, monkeypatch):
    monkeypatch.setattr(penalizer, "_prepare", penalties.prepare)
    several = [
        {"frequency_penalty": 0.5, "presence_penalty": -0.25, "repetition_penalty": 1.5, "min_new_tokens": 7},
        {"frequency_penalty": -0.5, "repetition_penalty": 0.5, "min_new_tokens": 2},
        {"presence_penalty": 1.0, "min_new_tokens": 1},
    ]
    said = [[7, 9, 7, 3, 7], [11], []]
    batch = Batch([request(tokens, **sampling) for tokens, sampling in zip(said, several, strict=True)])
    together = BatchedPenalizerOrchestrator(VOCABULARY, batch, {penalizer})
    got = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits = got.clone()
    together.apply(got)
    for row, (tokens, sampling) in enumerate(zip(said, several, strict=True)):
        alone = Batch([request([], **sampling)])
        one_by_one = BatchedPenalizerOrchestrator(VOCABULARY, alone, {penalizer})
        for token in tokens:
            one_by_one.cumulate_output_tokens(torch.tensor([token]))
        want = logits[row : row + 1].clone()
        one_by_one.apply(want)
        assert torch.equal(got[row], want[0])
    assert not torch.equal(got, logits)


@pytest.mark.parametrize("temperature", [1e-6, 1, 1e6])
@pytest.mark.parametrize("factor", [1e-6, 2])
def test_what_ends_an_answer_is_said_early_only_if_nothing_else_may_be(monkeypatch, temperature, factor):
    kinds = {BatchedMinNewTokensPenalizer, BatchedRepetitionPenalizer}
    for kind in kinds:
        monkeypatch.setattr(kind, "_prepare", penalties.prepare)
    ends = [2, 3, 4]
    others = [i for i in range(VOCABULARY) if i not in ends]
    batch = Batch([request(ends, min_new_tokens=9, repetition_penalty=factor) for _ in range(2)])
    logits = 10 * torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[0, ends] = 100
    with torch._dynamo.config.patch(disable=True):
        BatchedPenalizerOrchestrator(VOCABULARY, batch, kinds).apply(logits)
    logits[1, others] = -torch.inf  # by a grammar
    probs = torch.softmax(logits / temperature, -1)
    assert (probs[:, ends].sum(-1) - torch.tensor([0.0, 1.0])).abs().max() < 1e-6


def test_penalties_do_not_depend_on_an_order_of_classes(monkeypatch):
    """Those that are added come first in every process, as where steps overlap."""
    monkeypatch.setattr(BatchedPenalizerOrchestrator, "__init__", penalties.begin)
    for kind in penalties.COUNTS:
        monkeypatch.setattr(kind, "_prepare", penalties.prepare)
    sampling = {"frequency_penalty": 1.0, "presence_penalty": 2.0, "repetition_penalty": 2.0}
    logits = 3 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    want = logits.clone()
    for token, count in ((7, 2), (9, 1)):
        added = logits[0, token] - count * 1.0 - 2.0
        want[0, token] = added * 2 if added < 0 else added / 2
    for order in itertools.permutations(penalties.COUNTS):
        batch, got = Batch([request([7, 9, 7], **sampling)]), logits.clone()
        with torch._dynamo.config.patch(disable=True):
            BatchedPenalizerOrchestrator(vocab_size=VOCABULARY, batch=batch, penalizers=order).apply(got)
        assert torch.allclose(got, want, atol=1e-6), order


@pytest.fixture
def installed(monkeypatch):
    """Our functions in SGLang's places, for one test."""
    monkeypatch.setattr(BatchedPenalizerOrchestrator, "__init__", BatchedPenalizerOrchestrator.__init__)
    for penalizer in penalties.COUNTS:
        monkeypatch.setattr(penalizer, "_prepare", penalizer._prepare)
    for module in (repetition_penalty, sampling_batch_info):
        monkeypatch.setattr(module, "apply_scaling_penalties", module.apply_scaling_penalties)
    penalties.install(native=True)


@torch._dynamo.config.patch(disable=False)
def test_a_repetition_penalty_compiles_nothing(installed):
    """On a GPU, too, where PyTorch's compiler is on: nobody waits for it when the first such request comes."""
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(2))
    batch = Batch([request([7], repetition_penalty=1.5), request([9, 11], repetition_penalty=0.5)])
    penalizers = BatchedPenalizerOrchestrator(VOCABULARY, batch, {BatchedRepetitionPenalizer})
    torch._dynamo.utils.counters.clear()
    at_once, ahead = logits.clone(), logits.clone()
    penalizers.apply(at_once)
    info = SimpleNamespace(
        acc_additive_penalties=None,
        acc_scaling_penalties=penalizers.accumulate_scaling_penalties(),
        penalizer_orchestrator=None,
    )
    SamplingBatchInfo._apply_pre_grammar_logits_transforms(info, ahead)
    changed = (at_once != logits).nonzero().tolist()
    assert changed == [[0, 7], [1, 9], [1, 11]] and torch.equal(at_once, ahead)
    assert not torch._dynamo.utils.counters["frames"]
