"""Slow-fast decoding through the server against Algorithms 1 and 2: same tokens, log-probabilities to 1e-4.

One server with small numbers, chunks of 64, prefill and decode rows in one batch and a draft model, so that
requests meet each other in every phase and under every policy. What an answer says of its steps is held against the
oracle's.
"""

import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from greedy import TOLERANCE, ask
from noisy import draft_flags, noisy_copy
from oracles import combined, drafted
from oracles import sfi as oracle
from transformers import LlamaForCausalLM

SLOW_FAST = {"decode": "slow_fast"}
DRAFT = {"speculative": True}
FASTKV = {"tsp_rate": 0.4, "kv_retention_rate": 0.3}
SPEC = {"prefill_keep_rate": 0.6, "min_prompt_tokens": 64}
TSP = 2
SETTINGS = oracle.Settings(sink=4, recent=16, k=20, t_max=9, radius=3, lambda_clip=0.2)
BUFFERS = 8
BUFFER_BYTES = (
    (4 + 20) * 4 * 2 * 2 * 32 * 4
)  # tokens x layers x (keys, values) x KV heads x head_dim x float32
FLAGS = (
    *("--sfi-sink", "4", "--sfi-recent", "16", "--sfi-selected", "20", "--sfi-refresh-budget", "9"),
    *("--sfi-nms-radius", "3", "--sfi-prior-clip", "0.2"),
    *("--sfi-buffer-mib", str(BUFFERS * BUFFER_BYTES / 2**20)),
    *("--dtype", "float32", "--max-total-tokens", "20000"),
    *("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
)


@pytest.fixture(scope="module")
def model(tiny_model, triggers):
    """The tiny model, made to say trigger tokens now and then."""
    found = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        found.lm_head.weight[triggers] *= 1.6
    return found


@pytest.fixture(scope="module")
def folder(tiny_model, model, tmp_path_factory):
    """The folder of the model."""
    found = tmp_path_factory.mktemp("triggering")
    shutil.copytree(tiny_model, found, dirs_exist_ok=True)
    model.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def draft(folder, tmp_path_factory):
    return noisy_copy(folder, tmp_path_factory.mktemp("noisy"), 0.001)


@pytest.fixture(scope="module")
def alternating_server(start_server, folder, draft):
    return start_server(folder, *FLAGS, *draft_flags(draft))


@pytest.fixture(scope="module")
def expected(model, triggers, draft):
    """The oracle's answer to a prompt under a policy: a function."""
    judge = drafted.Draft(draft)

    def generate(prompt, policy, tokens):
        told = combined.of_policy(
            policy, prompt, TSP, lambda rate: judge.kept(prompt, rate), SETTINGS, triggers
        )
        return combined.generate(model, prompt, tokens, *told)

    return generate


def prompts(lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(6, 2000) for _ in range(n)] for n in lengths]


def check(expected, prompt, policy, answer):
    """The answer and its account against the oracle."""
    tokens, meta = answer["output_ids"], answer["meta_info"]
    report, policy = meta["fathom"], policy or {}
    alternates = policy.get("decode") == "slow_fast" and not report["dense_fallbacks"]
    want = expected(prompt, policy if alternates else policy | {"decode": "full"}, len(tokens))
    assert tokens == want.tokens, (len(prompt), policy)
    for row, entries in zip(want.logits, meta["output_top_logprobs"], strict=True):
        row = row.log_softmax(-1)
        got = [value for value, _, _ in entries]
        assert got == pytest.approx(row[[token for _, token, _ in entries]].tolist(), abs=TOLERANCE)
    # Whatever is drafted and accepted, each slow step has a pass of its own.
    passes = report["slow_steps"] + report["fast_steps"]
    assert passes == report["decode_steps"] and passes + report["accepted_tokens"] == len(tokens) - 1
    if alternates:
        assert report["slow_steps"] == sum(want.slow)
    else:
        assert report["fast_steps"] == 0
    assert report["compact_bytes"] == (BUFFER_BYTES if alternates else 0)
    for cause in ("trigger", "timeout"):
        assert report[f"{cause}_refreshes"] == want.causes.count(cause)
    assert (report["refresh_seconds"] > 0) == alternates
    if "tsp_rate" in policy or "kv_retention_rate" in policy:
        assert report["retained_tokens"] == round(sum(len(heads[0]) for heads in want.kept) / 4)
    return report


def settle(server):
    """The engine's account once nothing runs: no buffer in use, no page held."""
    deadline = time.monotonic() + 10
    while (state := server.engine())["kv_pool"]["depth_pages"]["open_rows"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert state["slow_fast"]["buffers_in_use"] == 0
    assert state["kv_pool"]["depth_pages"]["held"] == 0
    return state["slow_fast"]


@pytest.mark.parametrize("lengths", [[150], [150, 37, 5]], ids=str)
def test_one_and_three(alternating_server, expected, lengths):
    asked = prompts(lengths)
    answers = ask(alternating_server, asked, SLOW_FAST, 40)
    reports = [check(expected, p, SLOW_FAST, a) for p, a in zip(asked, answers, strict=True)]
    assert all(report["fast_steps"] > 20 for report in reports)
    assert settle(alternating_server)["buffer_bytes"] == BUFFER_BYTES


def together(server, cases):
    """Answers to (prompt, policy, new tokens), all at once."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: ask(server, *case), cases))


def test_drafting_changes_no_token(alternating_server, expected):
    """Passes over drafted tokens end where a slow step is due; other requests are drafted for beside them."""
    policies = [SLOW_FAST | DRAFT, SLOW_FAST, DRAFT, SLOW_FAST | DRAFT | {"depth_cutoff": 2}, {}]
    policies += [SLOW_FAST | DRAFT | {"draft_tokens": 12}, SLOW_FAST | DRAFT]
    asked = prompts([150, 37, 60, 80, 33, 120, 5], seed=11)
    cases = list(zip(asked, policies, [60, 40, 50, 45, 30, 70, 50], strict=True))
    # Where fast steps see everything, the target says what the draft expects.
    cases += [(asked[0][:140], SLOW_FAST | DRAFT | {"sfi_window": 400}, 60)]
    for batch in (cases[-1:], cases):
        reports = [
            check(expected, prompt, policy, answer)
            for (prompt, policy, _), answer in zip(batch, together(alternating_server, batch), strict=True)
        ]
        drafted_for = [report for report in reports if report["policy"]["speculative"]]
        counts = [(report["accepted_tokens"], report["draft_tokens"]) for report in drafted_for]
        assert sum(accepted for accepted, _ in counts) > 5 * len(counts), counts
    assert any(accepted < proposed for accepted, proposed in counts), counts
    settle(alternating_server)


COMBINATIONS = [SPEC, FASTKV, SPEC | FASTKV, SPEC | {"depth_cutoff": 3}, FASTKV | {"depth_cutoff": 3}]
COMBINATIONS += [SPEC | FASTKV | {"depth_cutoff": 3, "anchors": "none"}, {"kv_retention_rate": 0.2}]
# The target sees nearly what the draft sees, and says what it says.
COMBINATIONS += [{"kv_retention_rate": 0.9, "sfi_window": 400}]


@pytest.mark.parametrize("drafting", [{}, DRAFT], ids=["plain", "drafted"])
def test_over_what_prefill_has_left(alternating_server, expected, drafting):
    """Per-head entries, kept tokens and short upper tables are what is ranked, and what a fast step reads."""
    asked = prompts([200, 330, 130, 240, 150, 270, 180, 140], seed=12)
    cases = [
        (prompt, policy | SLOW_FAST | drafting, 40)
        for prompt, policy in zip(asked, COMBINATIONS, strict=True)
    ]
    answers, accepted = together(alternating_server, cases), []
    for (prompt, policy, _), answer in zip(cases, answers, strict=True):
        report = check(expected, prompt, policy, answer)
        assert report["fast_steps"] + report["accepted_tokens"] > 10 and report["slow_steps"] > 2
        accepted.append(report["accepted_tokens"])
        assert (report["draft_tokens"] > 0) == bool(drafting)
    assert (accepted[-1] > 0) == bool(drafting), accepted
    settle(alternating_server)


CONTROLS = [
    {"sfi_selection": rule} | numbers
    for rule in ("fused", "frozen", "random", "none")
    for numbers in ({"sfi_budget": 9}, {"sfi_window": 25})
]


def test_controls(alternating_server, expected):
    """Same schedule, another selection, or a smaller one."""
    (prompt,) = prompts([250], seed=13)
    cases = [(prompt, SLOW_FAST | control, 40) for control in CONTROLS]
    answers = together(alternating_server, cases)
    for (prompt, policy, _), answer in zip(cases, answers, strict=True):
        report = check(expected, prompt, policy, answer)
        refreshes = report["trigger_refreshes"] + report["timeout_refreshes"]
        assert (refreshes == 0) == (policy["sfi_selection"] == "frozen")
        assert report["slow_steps"] > 2
    assert len({tuple(answer["output_ids"]) for answer in answers}) > len(CONTROLS) / 2
    refused = alternating_server.client.post(
        "/generate", json={"input_ids": prompt, "fathom": SLOW_FAST | {"sfi_budget": 21}}
    )
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message == 'fathom.sfi_budget must be an integer in [1, 20] or "server", got 21'


def test_the_next_turn_does_not_depend_on_the_cache(alternating_server, expected):
    """What was generated under fast steps is computed again as prompt; the prompt before it is found."""
    (prompt,) = prompts([90], seed=17)
    for policy in (SLOW_FAST, SLOW_FAST | DRAFT):
        first = ask(alternating_server, prompt, policy, 30)
        prompt = prompt + first["output_ids"] + prompts([6], seed=18)[0]
        answer = ask(alternating_server, prompt, policy, 30)
        check(expected, prompt, policy, answer)
        assert 80 < answer["meta_info"]["cached_tokens"] <= len(prompt) - 36


def test_prompts_are_shared_with_requests_that_decode_otherwise(alternating_server, expected):
    """Whoever comes first, dense or not, leaves the prompt to the others, and only the prompt."""
    for first, others in ((None, SLOW_FAST), (SLOW_FAST | {"sfi_window": 9}, None)):
        (prompt,) = prompts([150], seed=19 if first is None else 20)
        alternating_server.flush()
        alone = [ask(alternating_server, prompt, policy, 30) for policy in (first, others)]
        check(expected, prompt, others, alone[1])
        cached = [answer["meta_info"]["cached_tokens"] for answer in alone]
        assert cached == [0, len(prompt) - 1]


def test_eight_in_all_phases_under_several_policies(alternating_server, expected):
    """Fewer tokens above a cutoff, dense requests in between, prompts in chunks, one that is dropped."""
    before = settle(alternating_server)
    policies = [SLOW_FAST, None, SLOW_FAST | {"depth_cutoff": 2}, SLOW_FAST]
    policies += [
        SLOW_FAST | {"depth_cutoff": 1, "anchors": "none"},
        {"depth_cutoff": 3},
        SLOW_FAST,
        SLOW_FAST,
    ]
    asked = prompts([300, 90, 120, 1, 60, 33, 200, 77], seed=3)

    def dropped():
        client = alternating_server.client
        body = {"input_ids": prompts([50], 4)[0], "fathom": SLOW_FAST, "stream": True}
        body["sampling_params"] = {"max_new_tokens": 2000, "ignore_eos": True}
        with client.stream("POST", "/generate", json=body) as stream:
            next(stream.iter_lines())

    with ThreadPoolExecutor(9) as pool:
        gone = pool.submit(dropped)
        news = [50, 40, 60, 45, 50, 40, 30, 55]
        answers = list(
            pool.map(lambda case: ask(alternating_server, *case), zip(asked, policies, news, strict=True))
        )
        gone.result()
    reports = [check(expected, *case) for case in zip(asked, policies, answers, strict=True)]
    assert sum(report["trigger_refreshes"] for report in reports) > 5
    assert sum(report["timeout_refreshes"] for report in reports) > 0
    assert settle(alternating_server)["mixed_steps"] > before["mixed_steps"] + 10


@pytest.mark.parametrize("drafting", [{}, DRAFT], ids=["plain", "drafted"])
def test_more_requests_than_buffers(alternating_server, expected, drafting):
    before = settle(alternating_server)["dense_fallbacks"]
    asked = prompts([20] * (BUFFERS + 3), seed=5)
    answers = ask(alternating_server, asked, SLOW_FAST | drafting, 30)
    reports = [check(expected, p, SLOW_FAST, a) for p, a in zip(asked, answers, strict=True)]
    assert sum(report["dense_fallbacks"] for report in reports) == 3
    assert (sum(report["accepted_tokens"] for report in reports) > 50) == bool(drafting)
    assert settle(alternating_server)["dense_fallbacks"] == before + 3


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_a_context_within_sink_and_recent_tokens_is_dense(alternating_server, length):
    """All there is lies in what every step reads, so a fast step gives what a dense one gives."""
    (prompt,) = prompts([length], seed=7)
    new = SETTINGS.sink + SETTINGS.recent - length
    dense = ask(alternating_server, prompt, None, new)
    got = ask(alternating_server, prompt, SLOW_FAST, new)
    assert got["meta_info"]["fathom"]["fast_steps"] > 0
    assert got["output_ids"] == dense["output_ids"]
    both = [a["meta_info"]["output_token_logprobs"] for a in (got, dense)]
    for (a, *_), (b, *_) in zip(*both, strict=True):
        assert a == pytest.approx(b, abs=TOLERANCE)


def test_faces(alternating_server):
    text = alternating_server.client.get("/metrics").text
    counted = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in text.splitlines()
        if line.startswith("fathom:")
    }
    fast = [
        v for k, v in counted.items() if k.startswith("fathom:decode_steps_total") and 'phase="fast"' in k
    ]
    assert sum(fast) > 100
    for name in ("refreshes_total", "refresh_seconds_total", "dense_fallbacks_total"):
        assert any(k.startswith(f"fathom:{name}") and v > 0 for k, v in counted.items()), name
    info = alternating_server.client.get("/fathom/info").json()
    assert "SFI" in info["mechanisms"] and info["fields"]["decode"]["available"]
    state = info["engine"][0]["slow_fast"]
    assert state["buffers"] == BUFFERS and state["total_bytes"] == BUFFERS * BUFFER_BYTES


def test_requests_that_are_taken_back(retracting_server):
    """They start again, slow; nothing of them stays."""
    asked = prompts([700, 500, 400, 300], seed=9)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(retracting_server, prompt, SLOW_FAST, 16), asked))
    metas = [answer["meta_info"] for answer in answers]
    assert sum(meta["num_retractions"] for meta in metas) > 3
    assert sum(meta["fathom"]["fast_steps"] for meta in metas) > 3
    assert all(meta["completion_tokens"] == 16 for meta in metas)
    settle(retracting_server)
