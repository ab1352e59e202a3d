"""The whole engine on the attention backend for GPUs, its Triton kernels run by Triton's interpreter, in float32:
every mechanism alone and all at once, against one oracle with explicit masks, to 1e-4."""

import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from greedy import TOLERANCE, ask
from noisy import draft_flags, noisy_copy
from oracles import combined, drafted, sfi
from transformers import AutoTokenizer, LlamaForCausalLM

from fathom.runtime.sfi.trigger import trigger_ids

NEW_TOKENS, TSP = 7, 2
MECHANISMS = {
    "dense": {},
    "SPEED": {"depth_cutoff": 3},
    "SpecPrefill": {"prefill_keep_rate": 0.5, "min_prompt_tokens": 64},
    "FastKV": {"tsp_rate": 0.4, "kv_retention_rate": 0.3},
    "SFI": {"decode": "slow_fast"},
    "drafting": {"speculative": True},
}
EVERYTHING = {name: value for policy in MECHANISMS.values() for name, value in policy.items()}
SETTINGS = sfi.Settings(sink=2, recent=6, k=8, t_max=3, seed_from_prefill=False, radius=3, lambda_clip=0.2)
FLAGS = (
    *("--sfi-sink", "2", "--sfi-recent", "6", "--sfi-selected", "8", "--sfi-refresh-budget", "3"),
    *("--sfi-nms-radius", "3", "--sfi-prior-clip", "0.2"),
    *("--dtype", "float32", "--max-total-tokens", "4000", "--context-length", "512"),
    *("--gpu-depth-pages", "--device", "hostgpu"),
    *("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--page-size", "4"),
)


@pytest.fixture(scope="module")
def triggers(tiny_model):
    return trigger_ids(AutoTokenizer.from_pretrained(tiny_model).backend_tokenizer)


@pytest.fixture(scope="module")
def models(tiny_model, triggers, tmp_path_factory):
    """Folders of a target that ends sentences now and then, and of a draft: the same with noise on its weights."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[triggers] *= 1.5
    folder = tmp_path_factory.mktemp("interpreted")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    model.save_pretrained(folder)
    return folder, noisy_copy(folder, tmp_path_factory.mktemp("draft"), 0.0008)


@pytest.fixture(scope="module")
def server(start_process, models):
    script = Path(__file__).with_name("nominal_gpu.py")
    command = [sys.executable, str(script), "serve", str(models[0]), *FLAGS, *draft_flags(models[1])]
    return start_process(command, {"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="module")
def expected(models, triggers):
    """The oracle's answer to a prompt under a policy: a function."""
    model = LlamaForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    draft = drafted.Draft(models[1])

    def generate(prompt, policy):
        told = combined.of_policy(
            policy, prompt, TSP, lambda rate: draft.kept(prompt, rate), SETTINGS, triggers
        )
        return combined.generate(model, prompt, NEW_TOKENS, *told)

    return generate


def prompt_of(length):
    rng = random.Random(length)
    return [rng.randrange(6, 2000) for _ in range(length)]


def check(expected, prompt, policy, answer):
    want, meta = expected(prompt, policy), answer["meta_info"]
    assert answer["output_ids"] == want.tokens, policy
    for row, entries in zip(want.logits, meta["output_top_logprobs"], strict=True):
        row = row.log_softmax(-1)
        got = [value for value, _, _ in entries]
        assert got == pytest.approx(row[[token for _, token, _ in entries]].tolist(), abs=TOLERANCE)
    return meta["fathom"]


def test_it_is_the_backend_for_gpus(server):
    engine = server.engine()
    assert engine["attention_backend"].endswith("triton_attention.TritonAttentionBackend")


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_alone(server, expected, name):
    prompt = prompt_of(70)
    report = check(expected, prompt, MECHANISMS[name], ask(server, prompt, MECHANISMS[name], NEW_TOKENS))
    assert (report["kept_tokens"] < 70) == (name in ("SPEED", "SpecPrefill", "FastKV"))
    assert (report["fast_steps"] > 0) == (name == "SFI")
    assert (report["draft_tokens"] > 0) == (name == "drafting")
