"""Every combination of the five mechanisms, against one oracle with explicit masks, in float32: same greedy tokens,
log-probabilities to 1e-4, counters that show each mechanism ran, and nothing left behind.

All 32 combinations are requests of one server, so they meet in its batches. Chunks of 64 on pages of 4 tokens with
prefill and decode rows in one batch; whole prompts on pages of 1; and some combinations with half of the heads on
each of two devices.
"""

import dataclasses
import itertools
import json
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import greedy
import pytest
import torch
from greedy import TOLERANCE, TOP
from noisy import draft_flags
from oracles import combined, drafted, sfi
from transformers import LlamaForCausalLM
from waiting import slowed, wait_until

from fathom.server import cli

NEW_TOKENS = 16
LAYERS, TSP, CUTOFF = 4, 2, 3
TOKEN_BYTES = 2 * 2 * 32 * 4  # (keys, values) x KV heads x head_dim x float32, per layer
MECHANISMS = {
    "SpecPrefill": {"prefill_keep_rate": 0.5, "min_prompt_tokens": 64},
    "SPEED": {"depth_cutoff": CUTOFF},
    "FastKV": {"tsp_rate": 0.4, "kv_retention_rate": 0.3},
    "SFI": {"decode": "slow_fast"},
    "drafting": {"speculative": True},
}
COMBINATIONS = [combination for n in range(6) for combination in itertools.combinations(MECHANISMS, n)]
SETTINGS = sfi.Settings(sink=2, recent=8, k=12, t_max=4, radius=3, lambda_clip=0.2)
SFI_FLAGS = (
    *("--sfi-sink", "2", "--sfi-recent", "8", "--sfi-selected", "12", "--sfi-refresh-budget", "4"),
    *("--sfi-nms-radius", "3", "--sfi-prior-clip", "0.2"),
)
FLAGS = ("--dtype", "float32", "--max-total-tokens", "16000", *SFI_FLAGS)
CHUNKED = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--page-size", "4")


def policy_of(combination):
    return {name: value for mechanism in combination for name, value in MECHANISMS[mechanism].items()}


@pytest.fixture(scope="module")
def expected(ending_pair, triggers):
    """The oracle's answer to a prompt under a policy, computed once: a function."""
    model = LlamaForCausalLM.from_pretrained(ending_pair[0], dtype=torch.float32).eval()
    draft, known = drafted.Draft(ending_pair[1]), {}

    def generate(prompt, combination, settings=SETTINGS):
        # Drafting changes no greedy token.
        key = (tuple(prompt), tuple(name for name in combination if name != "drafting"), settings)
        if key not in known:
            told = combined.of_policy(
                policy_of(key[1]), prompt, TSP, lambda rate: draft.kept(prompt, rate), settings, triggers
            )
            known[key] = combined.generate(model, prompt, NEW_TOKENS, *told)
        return known[key]

    return generate


def make_prompt(seed, length):
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(6, 2000) for _ in range(length)]


def documents():
    """One prompt per combination: of one chunk, of two and of three, none a multiple of the pages or chunks."""
    return [make_prompt(number, 66 + 19 * (number % 6)) for number in range(len(COMBINATIONS))]


def ask(server, prompt, combination):
    return greedy.ask(server, prompt, policy_of(combination), NEW_TOKENS)


def drop(server, prompt, combination, events):
    """Stream an answer and leave after some events: during the prompt's chunks, or while it is decoded."""
    body = greedy.body_of(prompt, policy_of(combination), 500) | {"stream": True}
    with server.client.stream("POST", "/generate", json=body) as stream:
        for count, _ in enumerate(stream.iter_lines()):
            if count >= events:
                return


def check(expected, page, prompt, combination, answer):
    """One answer and its account."""
    tokens, meta = answer["output_ids"], answer["meta_info"]
    want, report = expected(prompt, combination), meta["fathom"]
    assert tokens == want.tokens, combination
    for row, entries in zip(want.logits, meta["output_top_logprobs"], strict=True):
        row = row.log_softmax(-1)
        got = [value for value, _, _ in entries]
        assert len(got) == TOP
        assert got == pytest.approx(row[[token for _, token, _ in entries]].tolist(), abs=TOLERANCE)
    computed, kept = [len(seen) for seen in want.sets], [len(heads[0]) for heads in want.kept]
    assert report["kept_tokens"] == round(sum(computed) / LAYERS) and report["deep_tokens"] == computed[-1]
    assert report["retained_tokens"] == round(sum(kept) / LAYERS)
    check_liveness(combination, report, len(prompt))
    check_steps(want, combination, report)
    # A draft's last tokens may be in their places when the answer ends.
    steps = {len(tokens) - 1, len(tokens) - 1 + ("drafting" in combination)}
    held = {sum(-(-(count + n) // page) for count in kept) * page * TOKEN_BYTES for n in steps}
    assert report["kv_bytes"] in held, combination
    assert report["kv_bytes_dense"] in {
        -(-(len(prompt) + n) // page) * page * TOKEN_BYTES * LAYERS for n in steps
    }
    return report


def check_liveness(combination, report, prompt):
    """Each mechanism that was asked for did something, and no other one did."""
    dropped = {"SpecPrefill", "SPEED", "FastKV"} & set(combination)
    assert (report["kept_tokens"] < prompt) == bool(dropped)
    assert (report["deep_tokens"] == 2) == ("SPEED" in combination)
    assert (report["propagated_tokens"] is not None) == ("FastKV" in combination)
    assert (report["fast_steps"] > 0) == ("SFI" in combination)
    assert (report["compact_bytes"] > 0) == ("SFI" in combination) and not report["dense_fallbacks"]
    assert (report["draft_tokens"] > 0) == ("drafting" in combination)
    assert (report["draft_read_tokens"] > 0) == bool({"SpecPrefill", "drafting"} & set(combination))


def check_steps(want, combination, report):
    """Whatever is drafted, a slow step has a pass of its own."""
    passes = report["slow_steps"] + report["fast_steps"]
    assert passes == report["decode_steps"]
    if "SFI" in combination:
        assert report["slow_steps"] == sum(want.slow)
        assert passes + report["accepted_tokens"] == NEW_TOKENS - 1
        for cause in ("trigger", "timeout"):
            assert report[f"{cause}_refreshes"] == want.causes.count(cause)


def settle(server):
    """The engine's own account once nothing runs: every page, buffer and account is given back."""
    deadline = time.monotonic() + 20
    while (state := server.engine())["open_accounts"] or state["kv_pool"]["depth_pages"]["open_rows"]:
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    pages = state["kv_pool"]["depth_pages"]
    assert pages["held"] == 0 and pages["free"] + pages["cached"] == pages["total"]
    assert pages["evictable"] == pages["cached"]
    assert state["slow_fast"]["buffers_in_use"] == 0 and state["fastkv"]["buffer_used"] == 0
    return state


def finish(server):
    settle(server)
    assert server.stop() == 0
    log = server.log.read_text()
    assert "Traceback" not in log and "leak" not in log.lower()


def explained(ending_pair, prompt, combination, page, capsys):
    """KV bytes that `fathom explain` foresees for a request."""
    options = {
        "--prompt-tokens": len(prompt),
        "--output-tokens": NEW_TOKENS,
        "--policy": json.dumps(policy_of(combination)),
        "--draft-model-path": ending_pair[1],
        "--page-size": page,
    }
    words = [str(word) for pair in options.items() for word in pair]
    assert cli.main(["explain", str(ending_pair[0]), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["costs"]["policy"]["kv_bytes"]


@pytest.fixture(scope="module")
def chunked(start_server, ending_pair):
    return start_server(ending_pair[0], *FLAGS, *CHUNKED, *draft_flags(ending_pair[1], 0))


def test_a_prompt_ends_in_several_chunks_beside_slow_and_fast_decoding(chunked, expected):
    """What the draft chose is more than a chunk, and the last step of the prompt has decode rows in it."""
    decoding = [(make_prompt(20 + n, 60), MECHANISMS["SFI"], 600) for n in range(2)]
    alone = [tokens_of(chunked, *case) for case in decoding]
    chunked.flush()
    cases = [(make_prompt(n, 300), c) for n, c in enumerate(COMBINATIONS) if "SpecPrefill" in c][:4]
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(tokens_of, chunked, *case) for case in decoding]
        with slowed(chunked, 0.03):
            wait_until(lambda: chunked.engine()["slow_fast"]["buffers_in_use"] == 2)
            told = [tokens_of(chunked, prompt, policy_of(combination)) for prompt, combination in cases]
            assert not any(answer.done() for answer in answers)
        assert [answer.result() for answer in answers] == alone
    assert told == [expected(*case).tokens for case in cases]
    settle(chunked)


def test_one_at_a_time(chunked, ending_pair, expected, capsys):
    for prompt, combination in zip(documents(), COMBINATIONS, strict=True):
        report = check(expected, 4, prompt, combination, ask(chunked, prompt, combination))
        if "drafting" not in combination:
            assert report["kv_bytes"] == explained(ending_pair, prompt, combination, 4, capsys), combination
    settle(chunked)


def test_what_needs_every_prompt_token_is_refused(chunked):
    """Prompt log-probabilities under each mechanism that drops tokens, alone, batched and streamed."""
    (short, long), sampling = (make_prompt(1, n) for n in (30, 90)), {"max_new_tokens": 1}
    asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
    for name, policy in MECHANISMS.items():
        drops = name in ("SpecPrefill", "SPEED", "FastKV")
        generate = {"input_ids": long, **asked, "fathom": policy}
        cases = [("/generate", generate), ("/generate", generate | {"input_ids": [short, long]})]
        text = {
            "model": "m",
            "prompt": "a b c",
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "fathom": policy,
        }
        cases += [("/v1/completions", text), ("/v1/completions", text | {"prompt": ["a b", "c d"]})]
        for route, body in cases:
            reply = chunked.client.post(route, json=body)
            assert reply.status_code == (400 if drops else 200), reply.text
            field = next(iter(policy))
            assert not drops or f"fathom.{field} {json.dumps(policy[field])}; legal with them" in reply.text
        streamed = chunked.client.post("/generate", json=generate | {"stream": True})
        assert ("legal with them" in streamed.text) == drops
    time.sleep(2.5)  # what SGLang does after a stream has ended must not fail either
    assert "Exception in ASGI" not in chunked.log.read_text()


def test_the_live_page_shows_what_was_done(chunked):
    """The last generations are those of the test before: all three steps of the staircase are in a picture."""
    before = chunked.client.get("/fathom", params={"refresh": 0})
    assert before.headers["content-type"].startswith("text/html")
    assert before.headers["content-security-policy"].startswith("default-src 'none'")
    combination = ("SpecPrefill", "SPEED", "FastKV", "SFI", "drafting")
    prompt = make_prompt(99, 161)
    report = ask(chunked, prompt, combination)["meta_info"]["fathom"]
    page = chunked.client.get("/fathom").text
    label = re.search(r'aria-label="(161 prompt tokens; [^"]*)"', page)[1]
    stairs = [tuple(map(int, stair)) for stair in re.findall(r"(\d+) computed, (\d+) kept", label)]
    computed, kept = zip(*stairs, strict=True)
    assert len(stairs) == LAYERS and 161 > computed[0] == computed[1] > computed[2] > computed[3] == 2
    assert round(sum(computed) / LAYERS) == report["kept_tokens"] and computed[0] > kept[0]
    assert round(sum(kept) / LAYERS) == report["retained_tokens"]
    assert "staircase" not in report
    for words in ("compact buffers in use", "of them fast", "stood", "layer 4", "held by requests"):
        assert words in page, words


def tokens_of(server, prompt, policy, new_tokens=NEW_TOKENS):
    """An answer without log-probabilities, with which SGLang has no prefill and decode rows in one batch."""
    body = greedy.body_of(prompt, policy, new_tokens)
    asked = {name: body[name] for name in ("input_ids", "sampling_params", "fathom")}
    return server.client.post("/generate", json=asked).json()["output_ids"]


def test_four_at_once_from_the_prefix_cache_beside_dropped_ones(chunked, expected):
    """Each prompt goes on where that of the test above ended; as many others are dropped at any moment."""
    before = chunked.engine()["slow_fast"]["mixed_steps"]
    cases = [
        (document + make_prompt(77, 13), combination)
        for document, combination in zip(documents(), COMBINATIONS, strict=True)
    ]
    jobs = [*cases, *((make_prompt(n, 150), c, n % 4) for n, c in enumerate(COMBINATIONS))]
    random.Random(3).shuffle(jobs)
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda job: (drop if len(job) == 3 else ask)(chunked, *job), jobs))
    reports, stood = [], {}
    for job, answer in zip(jobs, answers, strict=True):
        if len(job) == 3:
            continue
        prompt, combination = job
        reports.append(check(expected, 4, prompt, combination, answer))
        stood[combination] = reports[-1]["accepted_tokens"]
        # A propagation needs hidden states, which the cache has not; SpecPrefill computes what stays in one go.
        found = "FastKV" not in combination or "SpecPrefill" in combination
        cached = answer["meta_info"]["cached_tokens"]
        assert (cached >= 52) if found else (cached == 0), (combination, cached)
    # A draft that reads everything says what a target says that sees as much, and little else.
    assert stood["drafting",] > 8 and stood["SPEED", "drafting"] > 2, stood
    assert sum(report["trigger_refreshes"] for report in reports) > 5
    assert sum(report["timeout_refreshes"] for report in reports) > 5
    assert settle(chunked)["slow_fast"]["mixed_steps"] > before + 10
    finish(chunked)


def test_whole_prompts_four_at_once(start_server, ending_pair, expected):
    flags = ("--chunked-prefill-size", "-1", *draft_flags(ending_pair[1], 0))
    server = start_server(ending_pair[0], *FLAGS, *flags)
    check_four_at_once(server, expected, 1, seed=4)
    finish(server)


def test_without_a_prefix_cache(start_server, ending_pair, expected):
    """SGLang has another admission there, of requests that do not end by themselves."""
    flags = (*CHUNKED, "--disable-radix-cache", "--propagation-buffer", "200")
    server = start_server(ending_pair[0], *FLAGS, *flags, *draft_flags(ending_pair[1], 0))
    check_four_at_once(server, expected, 4, seed=6)
    check_one_in_chunks_at_a_time(server)
    finish(server)


def check_four_at_once(server, expected, page, seed):
    """All combinations, in an order at random."""
    jobs = list(zip(documents(), COMBINATIONS, strict=True))
    random.Random(seed).shuffle(jobs)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda job: ask(server, *job), jobs))
    for (prompt, combination), answer in zip(jobs, answers, strict=True):
        check(expected, page, prompt, combination, answer)


def check_one_in_chunks_at_a_time(server):
    """A token that is decoded beside a chunk leaves it the rest of a page, which the next prompt must not take."""
    prompts = [make_prompt(n, 150) for n in range(12)]
    sampling = [
        {"temperature": 0, "max_new_tokens": 4, "ignore_eos": n % 2 == 1} for n in range(len(prompts))
    ]

    def ask_for(which):
        body = {"input_ids": prompts[which], "sampling_params": sampling[which]}
        return server.client.post("/generate", json=body).json()

    alone = [
        answer["output_ids"] for which in range(len(prompts)) for answer in ask_for(slice(which, which + 1))
    ]
    with ThreadPoolExecutor(1) as pool, slowed(server, 0.02):
        running = pool.submit(tokens_of, server, make_prompt(30, 20), {}, 1200)
        wait_until(lambda: server.engine()["open_accounts"] == 1)
        together = [answer["output_ids"] for answer in ask_for(slice(None))]
        assert not running.done()
    assert together == alone


@pytest.fixture(scope="module")
def spread(start_server, ending_pair):
    """The model on two devices: two processes here, a core for each where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    flags = (*FLAGS, *CHUNKED, *draft_flags(ending_pair[1], 0), "--tp-size", "2")
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    return start_server(ending_pair[0], *flags, env=binding)


def test_two_devices_choose_the_same_tokens(spread, ending_pair, expected, capsys):
    """Beside requests that are dropped: a device that takes back, or computes, anything else would show."""
    there = partial(expected, settings=dataclasses.replace(SETTINGS, devices=2))
    cases = [*zip(documents(), COMBINATIONS, strict=True)][: 1 + len(MECHANISMS)]
    cases += [(make_prompt(7, 161), pair) for pair in (("SpecPrefill", "FastKV"), ("FastKV", "SFI"))]
    cases += [(make_prompt(8, 142), combination) for combination in (("SPEED", "drafting"), COMBINATIONS[-1])]
    jobs = [*cases, *((make_prompt(n, 150), COMBINATIONS[-1 - n], n) for n in range(4))]
    random.Random(5).shuffle(jobs)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda job: (drop if len(job) == 3 else ask)(spread, *job), jobs))
    for job, answer in zip(jobs, answers, strict=True):
        if len(job) == 2:
            prompt, combination = job
            report = check(there, 4, prompt, combination, answer)
            if "drafting" not in combination:
                assert report["kv_bytes"] == explained(ending_pair, prompt, combination, 4, capsys)
    settle(spread)


@pytest.mark.parametrize("combination", [(), ("drafting",)])
def test_two_devices_draw_the_same_tokens(spread, ending_pair, combination):
    """Tokens drawn at random are as probable as the model says, given those before: were they other ones on the
    other device, they would not be."""
    prompt, temperature, new_tokens = make_prompt(6, 90), 0.7, 24
    model = LlamaForCausalLM.from_pretrained(ending_pair[0], dtype=torch.float32).eval()
    body = greedy.body_of(prompt, policy_of(combination), new_tokens, temperature=temperature)
    reply = spread.client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    tokens, meta = answer["output_ids"], answer["meta_info"]
    assert len(tokens) == new_tokens and len(set(tokens)) > new_tokens / 2
    assert (meta["fathom"]["draft_tokens"] > 0) == ("drafting" in combination)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    want = (logits / temperature).log_softmax(-1)[range(new_tokens), tokens]
    got = [value for value, _, _ in meta["output_token_logprobs"]]
    assert got == pytest.approx(want.tolist(), abs=TOLERANCE)


def test_what_two_devices_cannot_do_is_refused(spread):
    for _ in range(2):
        reply = spread.client.post("/start_expert_distribution_record")
        assert reply.status_code == 400
        assert "expert_distribution_recorder_mode" in reply.json()["message"]


def test_two_devices_leave_nothing_behind(spread):
    settle(spread)
    assert spread.stop() == 0
    assert "Traceback" not in spread.log.read_text()
