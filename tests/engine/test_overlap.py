"""Overlap scheduling, on a CPU: a step is launched before the result of the one before it is processed, unless it
follows from that, and no answer or account shows it. Slow and fast steps are launched before it is known whether
the token that they read ends a sentence."""

import contextlib
import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import interpreted
import pytest
from conftest import OVERLAPPING
from greedy import TOLERANCE, ask
from interpreted import MECHANISMS
from noisy import draft_flags
from waiting import held, wait_until

NEW_TOKENS = 12
SPEC, FASTKV, SFI = (MECHANISMS[name] for name in ("SpecPrefill", "FastKV", "SFI"))
PLAIN = {
    "dense": {},
    "SPEED": {"depth_cutoff": 3},
    "FastKV": FASTKV,
    "SPEED and FastKV": {"depth_cutoff": 3} | FASTKV,
    "SpecPrefill": SPEC,
    "SFI": SFI,
    "SFI, once chosen": SFI | {"sfi_selection": "frozen"},
    "all but drafting": SPEC | FASTKV | SFI | {"depth_cutoff": 3},
}
DECIDING = {
    "SFI at random": SFI | {"sfi_selection": "random"},
    "drafting": {"speculative": True},
    "drafting with SFI": SFI | {"speculative": True},
    "everything": SPEC | FASTKV | SFI | {"depth_cutoff": 3, "speculative": True},
}
FLAGS = ("--dtype", "float32", "--max-total-tokens", "40000", "--chunked-prefill-size", "64")
FLAGS += ("--sfi-recent", "16", "--sfi-selected", "20", "--sfi-refresh-budget", "4")
MIXED = ("--enable-mixed-chunk",)
SAME = ("prompt_tokens", "kept_tokens", "deep_tokens", "retained_tokens", "propagated_tokens", "kv_bytes")
ALTERNATED = ("fast_steps", "trigger_refreshes", "timeout_refreshes")


@pytest.fixture(scope="module")
def start(start_server, ending_pair):
    """Start a server with a draft: a function of whether steps overlap, flags and environment."""
    target, draft = ending_pair

    def run(overlaps, *flags, **more):
        script = OVERLAPPING if overlaps else None
        return start_server(target, *FLAGS, *flags, *draft_flags(draft), script=script, **more)

    return run


@pytest.fixture(scope="module")
def server(start):
    return start(True, *MIXED)


@pytest.fixture(scope="module")
def waiting(start):
    """The same, where each result is processed before the next batch is composed."""
    return start(False, *MIXED)


def prompt_of(name, length=150):
    return interpreted.prompt_of(name, length)


def ask_all(server, cases):
    """All at once, so that they meet in the engine's batches."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: ask(server, *case[:2], NEW_TOKENS, **case[2]), cases))


def overlapped(server):
    return server.engine()["overlapped_steps"]


@pytest.fixture(scope="module")
def expected(waiting):
    policies = PLAIN | DECIDING
    found = {name: ask(waiting, prompt_of(name), policy, NEW_TOKENS) for name, policy in policies.items()}
    reports = [answer["meta_info"]["fathom"] for answer in found.values()]
    assert all(sum(report[cause] for report in reports) > 1 for cause in ALTERNATED)
    return found


def check(answer, want, count=NEW_TOKENS):
    """The same first tokens, log-probabilities and account."""
    assert answer["output_ids"] == want["output_ids"][:count]
    got, wanted = (a["meta_info"]["output_token_logprobs"] for a in (answer, want))
    assert [entry[0] for entry in got] == pytest.approx([entry[0] for entry in wanted[:count]], abs=TOLERANCE)
    report, usual = answer["meta_info"]["fathom"], want["meta_info"]["fathom"]
    if count == NEW_TOKENS and not usual["policy"]["speculative"]:
        assert {name: report[name] for name in SAME} == {name: usual[name] for name in SAME}
    if not usual["policy"]["speculative"]:
        assert report["decode_steps"] == len(answer["output_ids"]) - 1
        if count == NEW_TOKENS:
            assert {name: report[name] for name in ALTERNATED} == {name: usual[name] for name in ALTERNATED}
        assert (report["fast_steps"] > 0) == (report["policy"]["decode"] == "slow_fast")


@pytest.mark.parametrize("policies", [PLAIN, DECIDING, PLAIN | DECIDING], ids=["plain", "deciding", "both"])
def test_answers_and_accounts_are_the_same(server, expected, policies):
    server.flush()
    names = sorted(policies) * 2
    for name, answer in zip(
        names, ask_all(server, [(prompt_of(n), policies[n], {}) for n in names]), strict=True
    ):
        check(answer, expected[name])


def test_an_answer_that_ends_is_in_one_more_step_that_counts_for_nothing(server, expected):
    """Ends that only the token itself tells: the next step runs already when it is seen."""
    before = overlapped(server)
    cases, ends = [], []
    for name, policy in (PLAIN | DECIDING).items():
        tokens = expected[name]["output_ids"]
        end = next(i for i in range(3, NEW_TOKENS) if tokens[i] not in tokens[:i])
        ends.append((name, end + 1))
        cases.append((prompt_of(name), policy, {"stop_token_ids": [tokens[end]], "ignore_eos": False}))
    for (name, count), answer in zip(ends, ask_all(server, cases), strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        check(answer, expected[name], count)
    assert overlapped(server) > before
    wait_until(lambda: held(server) == 0)


@pytest.mark.parametrize(("policies", "overlap"), [(PLAIN, True), (DECIDING, False)])
def test_which_steps_overlap(server, policies, overlap):
    """Alone in the server: 12 tokens of an answer are 11 decode steps. Two of a prompt's chunks follow one without
    a token."""
    for name, policy in policies.items():
        before = overlapped(server)
        ask(server, prompt_of(f"{name} by itself"), policy, NEW_TOKENS)
        wait_until(lambda: held(server) == 0)
        seen = overlapped(server) - before
        assert seen >= NEW_TOKENS if overlap else seen == 2, name


def test_grammars_with_and_without_drafting_in_common_batches(server, waiting):
    schema = {"type": "object", "properties": {"a": {"enum": ["xy", "zz"]}, "b": {"type": "boolean"}}}
    sampling = {"json_schema": json.dumps(schema | {"required": ["a", "b"]}), "ignore_eos": False}
    cases = [
        (prompt_of(f"grammar {i}", 20 + 31 * i), policy, sampling if i % 3 else {})
        for i, policy in enumerate([*PLAIN.values(), *DECIDING.values(), {"speculative": True}, {}])
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        got, want = (
            list(pool.map(lambda case: ask(each, *case[:2], 40, **case[2]), cases))  # noqa: B023
            for each in (server, waiting)
        )
    for i, (answer, other) in enumerate(zip(got, want, strict=True)):
        assert answer["output_ids"] == other["output_ids"], cases[i][1]
        if i % 3 and answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert set(json.loads(answer["text"])) == {"a", "b"}


def test_penalties_count_each_token_once_and_in_time(server, waiting):
    """Whoever else is in the batch. SGLang counts the last token that the host knows; here answers are of 8 ids."""
    likely = {str(token): 60 for token in range(100, 108)}
    penalties = [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.02}]
    cases = [
        (prompt_of(f"penalty {i}", 40), policy, {"logit_bias": likely} | penalties[i % 3])
        for i, policy in enumerate([{}, {}, {}, SFI, {"depth_cutoff": 3}, {"speculative": True}])
    ]
    want, alone = ([ask(each, *case[:2], 40, **case[2]) for case in cases] for each in (waiting, server))
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(lambda case: ask(server, *case[:2], 40, **case[2]), cases))
    for case, *answers in zip(cases, want, alone, together, strict=True):
        first, *others = (answer["output_ids"] for answer in answers)
        assert others == [first] * 2, case[1:]


def test_beams(server, waiting):
    body = {
        "input_ids": prompt_of("beams"),
        "sampling_params": {"max_new_tokens": 9, "beam_width": 3, "n": 3},
    }
    answers = [each.client.post("/generate", json=body).json()["meta_info"] for each in (server, waiting)]
    got, want = ([beam["output_ids"] for beam in answer["beam_results"]] for answer in answers)
    assert got == want and len(got) == 3
    wait_until(lambda: held(server) == 0)


def test_retractions_aborts_and_pages(start):
    """Nothing is lost or kept, whenever a request ends, is taken back or is given up."""
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    server = start(True, *MIXED, "--page-size", "16", env=env)
    rng, policies = random.Random(2), list((PLAIN | DECIDING).values())
    alone = [ask(server, prompt_of(i, 20 + 97 * i), policy, NEW_TOKENS) for i, policy in enumerate(policies)]

    def run(case):
        place, gives_up = case
        prompt = prompt_of(place, 20 + 97 * place)
        if not gives_up:
            return place, ask(server, prompt, policies[place], NEW_TOKENS)
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 300}, "fathom": policies[place]}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(
                f"{server.url}/generate", json=body, timeout=rng.choice([0.05, 0.2, 0.6]), verify=False
            )
        return None

    with ThreadPoolExecutor(10) as pool:
        cases = [(rng.randrange(len(policies)), rng.random() < 0.4) for _ in range(60)]
        answers = [answer for answer in pool.map(run, cases) if answer is not None]
    for place, answer in answers:
        assert len(answer["output_ids"]) == NEW_TOKENS
        if policies[place].get("decode") != "slow_fast":  # taken back, it starts again with dense steps
            assert answer["output_ids"] == alone[place]["output_ids"], policies[place]
    assert sum(answer["meta_info"]["num_retractions"] for _, answer in answers) > 0
    wait_until(lambda: held(server) == 0)
    server.flush()
    pages = server.engine()["kv_pool"]["depth_pages"]
    assert pages["free"] == pages["total"] and pages["held"] == pages["open_rows"] == 0
    assert server.stop() == 0
