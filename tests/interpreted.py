"""What engines whose kernels run in Triton's interpreter are asked, and the oracle's answers.

Short prompts, few tokens, every mechanism alone and all together, in float32: same greedy tokens, log-probabilities
to 1e-4.
"""

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from greedy import TOLERANCE, ask
from oracles import combined, drafted, sfi
from transformers import AutoModelForCausalLM

NEW_TOKENS, TSP, LOOKAHEAD = 4, 2, 2
MECHANISMS = {
    "dense": {},
    "SPEED": {"depth_cutoff": 3},
    "SpecPrefill": {"prefill_keep_rate": 0.5, "min_prompt_tokens": 64, "lookahead": LOOKAHEAD},
    "FastKV": {"tsp_rate": 0.4, "kv_retention_rate": 0.3},
    "SFI": {"decode": "slow_fast"},
    "drafting": {"speculative": True},
}
POLICIES = MECHANISMS | {
    "everything": {name: value for policy in MECHANISMS.values() for name, value in policy.items()},
}
SETTINGS = sfi.Settings(sink=2, recent=6, k=8, t_max=3, radius=3, lambda_clip=0.2)
SERVED = (
    *("--sfi-sink", "2", "--sfi-recent", "6", "--sfi-selected", "8", "--sfi-refresh-budget", "3"),
    *("--sfi-nms-radius", "3", "--sfi-prior-clip", "0.2"),
    *("--dtype", "float32", "--max-total-tokens", "4000", "--context-length", "512"),
    *("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--page-size", "4"),
)
FLAGS = (*SERVED, "--device", "cuda")


def prompt_of(name, length=69):
    rng = random.Random(name)
    return [rng.randrange(6, 2000) for _ in range(length)]


def ask_all(server, names):
    """All at once, so that they meet in the engine's batches."""
    with ThreadPoolExecutor(len(names)) as pool:
        answers = pool.map(lambda name: ask(server, prompt_of(name), POLICIES[name], NEW_TOKENS), names)
        return dict(zip(names, answers, strict=True))


class Oracle:
    """Answers of a target and its draft, with explicit masks; the target on several devices if asked."""

    def __init__(self, target, draft, triggers, devices=1, kv_dtype=None):
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.draft, self.triggers = drafted.Draft(draft), triggers
        self.model.config.kv_dtype = self.draft.model.config.kv_dtype = kv_dtype
        self.settings = dataclasses.replace(SETTINGS, devices=devices)

    def check(self, name, answer, tokens=NEW_TOKENS, tolerance=TOLERANCE):
        """An answer of ``tokens`` is as it has to be; the account that came with it."""
        return self.compare(prompt_of(name), POLICIES[name], answer, tokens, tolerance)

    def compare(self, prompt, policy, answer, tokens=NEW_TOKENS, tolerance=TOLERANCE):
        """The same of any prompt and policy."""
        meta, steps = answer["meta_info"], policy.get("lookahead", LOOKAHEAD)
        told = combined.of_policy(
            policy,
            prompt,
            TSP,
            lambda rate: self.draft.kept(prompt, rate, steps=steps),
            self.settings,
            self.triggers,
        )
        want = combined.generate(self.model, prompt, tokens, *told)
        assert answer["output_ids"] == want.tokens
        for row, entries in zip(want.logits, meta["output_top_logprobs"], strict=True):
            row = row.log_softmax(-1)
            got = [value for value, _, _ in entries]
            assert got == pytest.approx(row[[token for _, token, _ in entries]].tolist(), abs=tolerance)
        return meta["fathom"]


def check_all(server, target, draft, triggers, tolerance=TOLERANCE):
    """Every mechanism alone and all together, against explicit masks."""
    expected = Oracle(target, draft, triggers)
    for name, answer in ask_all(server, POLICIES).items():
        account = expected.check(name, answer, tolerance=tolerance)
        narrowed = name not in ("dense", "SFI", "drafting")
        assert (account["kept_tokens"] < account["prompt_tokens"]) == narrowed
    assert server.engine()["ended_rows"] > 0
