"""The engine with FlashInfer for prefill, on a GPU in name only (``nominal_flashinfer.py``), in float32.

Chunks, prefixes, narrowed spans, drafted tokens and rows that Triton keeps, against the oracle with explicit masks.
"""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from greedy import TOLERANCE, ask
from noisy import draft_flags, noisy_copy
from oracles import combined, drafted, sfi
from transformers import AutoTokenizer, LlamaForCausalLM

from fathom.runtime.sfi.trigger import trigger_ids

TSP, SPANS, LOOKAHEAD, NEW_TOKENS = 2, 4, 2, 4
POLICIES = {
    "dense": {},
    "SPEED": {"depth_cutoff": 3},
    "SpecPrefill": {"prefill_keep_rate": 0.5, "min_prompt_tokens": 64, "lookahead": LOOKAHEAD},
    "FastKV": {"tsp_rate": 0.4, "kv_retention_rate": 0.3},
    "SFI": {"decode": "slow_fast"},
    "drafting": {"speculative": True},
}
POLICIES["everything"] = {name: value for policy in POLICIES.values() for name, value in policy.items()}
SETTINGS = sfi.Settings(sink=2, recent=6, k=8, t_max=3, seed_from_prefill=False, radius=3, lambda_clip=0.2)
FLAGS = (
    *("--sfi-sink", "2", "--sfi-recent", "6", "--sfi-selected", "8", "--sfi-refresh-budget", "3"),
    *("--sfi-nms-radius", "3", "--sfi-prior-clip", "0.2"),
    *("--dtype", "float32", "--max-total-tokens", "4000", "--context-length", "512"),
    *("--gpu-depth-pages", "--device", "hostgpu"),
    *("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--page-size", "4"),
)


@pytest.fixture(scope="module")
def draft(tiny_model, tmp_path_factory):
    return noisy_copy(tiny_model, tmp_path_factory.mktemp("draft"), 0.0008)


@pytest.fixture(scope="module")
def server(start_process, tiny_model, draft):
    script = Path(__file__).with_name("nominal_flashinfer.py")
    command = [sys.executable, str(script), "serve", str(tiny_model), *FLAGS, *draft_flags(draft)]
    return start_process(command, {"TRITON_INTERPRET": "1"})


def prompt_of(name):
    rng = random.Random(name)
    return [rng.randrange(6, 2000) for _ in range(69)]


@pytest.fixture(scope="module")
def expected(tiny_model, draft):
    """The oracle's answer under each policy."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    triggers = trigger_ids(AutoTokenizer.from_pretrained(tiny_model).backend_tokenizer)
    proposer, found = drafted.Draft(draft), {}
    for name, policy in POLICIES.items():
        prompt = prompt_of(name)

        def kept(rate, prompt=prompt):
            return proposer.kept(prompt, rate, steps=LOOKAHEAD)

        told = combined.of_policy(policy, prompt, TSP, kept, SETTINGS, triggers)
        found[name] = combined.generate(model, prompt, NEW_TOKENS, *told)
    return found


def ask_all(server):
    """All at once, so that they meet in the engine's batches."""
    with ThreadPoolExecutor(len(POLICIES)) as pool:
        answers = pool.map(lambda name: ask(server, prompt_of(name), POLICIES[name], NEW_TOKENS), POLICIES)
        return dict(zip(POLICIES, answers, strict=True))


def check(answer, want):
    assert answer["output_ids"] == want.tokens
    for row, entries in zip(want.logits, answer["meta_info"]["output_top_logprobs"], strict=True):
        got = [value for value, _, _ in entries]
        tokens = [token for _, token, _ in entries]
        assert got == pytest.approx(row.log_softmax(-1)[tokens].tolist(), abs=TOLERANCE)


def test_answers_are_the_oracles_also_from_the_prefix_cache(server, expected):
    for cached in (0, 64):
        answers = ask_all(server)
        for name, answer in answers.items():
            check(answer, expected[name])
        assert answers["dense"]["meta_info"]["cached_tokens"] >= cached


def test_a_prompt_is_planned_once_per_span_and_step(server):
    before = server.engine()
    answer = ask(server, [9, *prompt_of("alone")], {}, NEW_TOKENS)
    engine = server.engine()
    assert engine["prefill_attention"] == "FlashInfer" and answer["meta_info"]["cached_tokens"] == 0
    assert engine["flashinfer_plans"] - before["flashinfer_plans"] == 2 * SPANS  # of two chunks
