"""The engine on a GPU in name only (``nominal_gpu.py``), its kernels run by Triton's interpreter, or on a real one.

Every mechanism alone and all together, in common batches, in captured steps and others, against one oracle.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import interpreted
import pytest
import torch
from greedy import TOLERANCE, ask
from interpreted import MECHANISMS, NEW_TOKENS, POLICIES, Oracle, ask_all, prompt_of
from noisy import draft_flags
from oracles.drafted import Draft

FLAGS = (
    *interpreted.FLAGS,
    *("--cuda-graph-bs-decode", "1", "4", "--num-continuous-decode-steps", "3", "--sfi-evidence-mib", "8"),
)
"""Steps follow each other for requests without log-probabilities: one test has such."""
counts_waits = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a real GPU does not count who waits for it"
)


@pytest.fixture(scope="module")
def server(request, ending_pair):
    if torch.cuda.is_available():
        target, draft = ending_pair
        return request.getfixturevalue("start_server")(target, *FLAGS, *draft_flags(draft))
    return request.getfixturevalue("start_nominal")(*ending_pair, *FLAGS)


@pytest.fixture(scope="module")
def expected(ending_pair, triggers):
    return Oracle(*ending_pair, triggers)


@pytest.fixture(scope="module")
def answers(server):
    """First the requests whose decode steps are plain; a slow-fast or drafting one changes those of its batch."""
    special = [name for name, policy in POLICIES.items() if {"decode", "speculative"} & set(policy)]
    plain = [name for name in POLICIES if name not in special]
    return ask_all(server, plain) | ask_all(server, special)


def test_what_runs(server):
    engine = server.engine()
    assert engine["attention_backend"].endswith("attention.triton_attention.TritonAttentionBackend")
    assert engine["platform"].endswith("FathomCudaPlatform") and not engine["lacking"]


@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_the_oracles(answers, expected, name):
    report = expected.check(name, answers[name])
    asked = POLICIES[name]
    assert (report["kept_tokens"] < 69) == bool(
        {"depth_cutoff", "prefill_keep_rate", "tsp_rate"} & set(asked)
    )
    assert (report["retained_tokens"] < report["kept_tokens"]) == ("kv_retention_rate" in asked)
    assert (report["fast_steps"] > 0) == ("decode" in asked)
    assert (report["draft_tokens"] > 0) == ("speculative" in asked)


def test_rows_leave_their_last_layer_with_keys_and_values(server, answers):
    """The target's and the draft's, of prompts of 69 tokens in chunks of 64 that they share."""
    engine = server.engine()
    assert engine["ended_rows"] > 100 and engine["draft"]["ended_rows"] > 100


def test_steps_overlap_are_replayed_and_the_device_writes_their_page_tables(server, answers):
    before = server.engine()
    for policy in ({}, *(MECHANISMS[name] for name in ("FastKV", "SPEED", "SpecPrefill", "SFI"))):
        ask(server, prompt_of("overlapping"), policy, 8)
    engine = server.engine()
    grown = {name: engine[name] - before[name] for name in ("overlapped_steps", "looked_up_steps")}
    assert grown["overlapped_steps"] >= 5 * 6  # of 7 decode steps each
    assert grown["looked_up_steps"] >= 5 * 7
    replayed = Counter(engine["replayed_steps"]) - Counter(before["replayed_steps"])
    assert replayed["dense"] >= 4 * 7 and replayed["renewing"] >= 7


def test_captured_steps_serve_batches_of_other_sizes(server, answers, expected):
    """Two and three requests in steps that were captured with four: what fills them up changes nobody's KV."""
    tokens = {"dense": 3, "SPEED": 6, "FastKV": 9}
    before = server.engine()["replayed_steps"]["dense"]
    with ThreadPoolExecutor(len(tokens)) as pool:
        asked = {
            name: pool.submit(ask, server, prompt_of(name), POLICIES[name], count)
            for name, count in tokens.items()
        }
    assert server.engine()["replayed_steps"]["dense"] - before >= max(tokens.values()) - 1
    for name, answer in asked.items():
        expected.check(name, answer.result(), tokens[name])


def replayed_steps(server):
    return Counter(server.engine()["replayed_steps"])


def test_slow_and_fast_steps_are_replayed(server, answers, expected):
    """Those of one request, and beside others that read everything; two requests out of step, too.

    Steps overlap, and what is captured serves either phase; the last one is launched before its end is seen.
    """
    before, tokens = replayed_steps(server), 7
    alone = ask(server, prompt_of("SFI"), POLICIES["SFI"], tokens)
    account = expected.check("SFI", alone, tokens)
    replayed = replayed_steps(server) - before
    assert set(replayed) == {"renewing"} and 0 <= replayed["renewing"] - account["decode_steps"] <= 1
    assert account["fast_steps"] > 2 and account["slow_steps"] > 1
    before, tokens = replayed_steps(server), 6
    asked = [(prompt_of("another"), "SFI"), *((prompt_of(name), name) for name in ("SFI", "dense", "SPEED"))]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(ask, server, prompt, POLICIES[name], tokens) for prompt, name in asked]
    for (prompt, name), answer in zip(asked, answers, strict=True):
        expected.compare(prompt, POLICIES[name], answer.result(), tokens)
    assert (replayed_steps(server) - before)["renewing"] >= tokens - 1


def test_steps_that_follow_each_other_are_replayed(server, answers, expected):
    """The same tokens and accounts as one step at a time, in the phases that the host has planned."""
    names, tokens = ["SFI", "SPEED", "FastKV"], 7
    wanted = {name: ask(server, prompt_of(name), POLICIES[name], tokens) for name in names}
    for name, answer in wanted.items():
        expected.check(name, answer, tokens)
    before, counted = server.engine(), replayed_steps(server)

    def check(name, length):
        sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt_of(name), "sampling_params": sampling, "fathom": POLICIES[name]}
        answer = server.client.post("/generate", json=body).json()
        assert answer["output_ids"] == wanted[name]["output_ids"][:length]
        if length == tokens:
            report, usual = (each["meta_info"]["fathom"] for each in (answer, wanted[name]))
            for count in ("decode_steps", "fast_steps", "trigger_refreshes", "timeout_refreshes", "kv_bytes"):
                assert report[count] == usual[count]

    for name in names[:2]:
        check(name, tokens)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(check, names, (tokens, tokens - 1, tokens)))
    engine = server.engine()
    followed, moved = (engine[name] - before[name] for name in ("steps_that_followed", "moved_steps"))
    # None of them was composed anew.
    assert followed == moved >= 9
    replayed = replayed_steps(server) - counted
    assert replayed["alternating"] > 1 and replayed["renewing"] > 1 and replayed["dense"] >= 6


def test_choices_at_random_are_not_replayed(server):
    before = replayed_steps(server)
    answer = ask(server, prompt_of("SFI"), {"decode": "slow_fast", "sfi_selection": "random"}, 6)
    account, replayed = answer["meta_info"]["fathom"], replayed_steps(server) - before
    assert replayed == {"alternating": account["fast_steps"]} and account["slow_steps"] > 1


def prompts_that(hold, count, length):
    """The first prompts of which something holds."""
    named = (prompt_of(f"draft {number}", length) for number in range(1000))
    return list(islice(filter(hold, named), count))


def ask_together(server, *given):
    """The answers to several prompts at once, and by how much the draft's counts grew."""
    before = server.engine()["draft"]
    answers = ask(server, *given)
    after = server.engine()["draft"]
    replayed = {
        kind: steps - before["replayed_steps"][kind] for kind, steps in after["replayed_steps"].items()
    }
    return answers, replayed, after["placed_lists"] - before["placed_lists"]


def test_the_drafts_steps_are_replayed(server, ending_pair, expected):
    """Three requests in steps that were captured with four. The draft would give the target's answers: whatever it
    says stands, unless it reads anything but its requests' own KV."""
    said, drafts = (
        partial(draft.look_ahead, steps=7, ends=set()) for draft in (Draft(ending_pair[0]), expected.draft)
    )
    prompts = prompts_that(lambda prompt: said(prompt) == drafts(prompt), 3, 20)
    drafted, replayed, placed = ask_together(server, prompts, {"speculative": True}, 7)
    for answer, prompt in zip(drafted, prompts, strict=True):
        report = answer["meta_info"]["fathom"]
        assert answer["output_ids"] == said(prompt)
        assert report["draft_tokens"] == report["accepted_tokens"] > 3
    # The lists are written for all tokens of a round, and for the prompts.
    assert replayed["plain"] >= 4 and placed < replayed["plain"]
    # Where all that was drafted stands, the next round begins with two tokens that the draft has not read.
    prompts = prompts_that(
        lambda prompt: len(set(said(prompt))) > 3 and said(prompt) == drafts(prompt), 1, 20
    )
    drafted, replayed, _ = ask_together(server, prompts, {"speculative": True, "draft_tokens": 2}, 7)
    assert [answer["output_ids"] for answer in drafted] == list(map(said, prompts))
    assert drafted[0]["meta_info"]["fathom"]["accepted_tokens"] > 3 and replayed["several"] >= 1


@counts_waits
def test_the_host_waits_once_for_the_drafted_tokens_of_all_requests(server):
    ask_together(server, list(map(prompt_of, "abc")), {"speculative": True, "draft_tokens": 2}, 7)
    waits = server.engine()["draft"]["waits"]
    judged = waits.pop("_judged")
    assert "3" in judged and not any(judged.values())
    assert not any(waits.pop("shrink").values())  # what is given back is known from when it was taken
    assert waits.pop("with_runs") == {"1": 0}
    for most in (waits["take"], waits["_choose"]):
        assert max(map(int, most)) == 3 and max(most.values()) <= 1
    assert waits["settle"]["3"] == 2  # for what stands, and for its log-probabilities


@counts_waits
def test_the_host_waits_once_for_what_goes_on_above_the_selection(server, answers):
    """Above a cutoff's anchor too, which goes on whatever its score."""
    assert server.engine()["draft"]["waits"]["_select"] == {"1": 1}


# What the draft, which reads everything, foresees in part.
FORESEEN = {
    "dense": {},
    "SPEED": MECHANISMS["SPEED"],
    "FastKV": {"tsp_rate": 0.8, "kv_retention_rate": 0.8},
    "SFI": {"decode": "slow_fast", "sfi_window": 64},
}


@pytest.mark.parametrize("name", FORESEEN)
def test_drafted_tokens_are_verified_in_replayed_passes(server, expected, name):
    """Every step of one request; what is drafted behind a fast step is read as sparsely as the step itself."""
    policy, prompt = FORESEEN[name] | {"speculative": True}, prompt_of("verified 5")
    before, tokens = replayed_steps(server), 12
    account = expected.compare(prompt, policy, ask(server, prompt, policy, tokens), tokens)
    replayed = replayed_steps(server) - before
    assert account["draft_tokens"] > account["accepted_tokens"] > 2
    assert account["decode_steps"] == tokens - 1 - account["accepted_tokens"]
    if name == "SFI":
        assert replayed == {"alternating": account["fast_steps"], "renewing": account["slow_steps"]}
    else:
        assert replayed["dense"] + replayed["several"] == account["decode_steps"] and replayed["several"] > 2


@pytest.mark.parametrize(
    ("kind", "names"), [("several", ["dense", "FastKV", None]), ("alternating", ["SFI", None])]
)
def test_replayed_passes_verify_some_requests_tokens_beside_others(server, expected, kind, names):
    """Requests that bring at most eight rows, one of them no draft. Beside a request that alternates its row is
    one of the step's."""
    drafting = {"speculative": True, "draft_tokens": 2}
    asked = [
        (prompt_of("verified 5"), FORESEEN[name] | drafting) if name else (prompt_of("beside"), {})
        for name in names
    ]
    before, tokens = replayed_steps(server), 9
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: ask(server, *one, tokens), asked))
    for (prompt, policy), answer in zip(asked, answers, strict=True):
        account = expected.compare(prompt, policy, answer, tokens)
        assert (account["accepted_tokens"] > 0) == bool(policy)
    assert (replayed_steps(server) - before)[kind] > 2


def test_look_aheads_are_replayed(server, expected):
    """Alone, and from the prefix cache two at once in steps that were captured with four. What is kept follows from
    the queries of the tokens that the draft says: of one prompt not from the last prompt token's alone, of the
    other not from this one's and the last token's."""
    policy, prompts = {"prefill_keep_rate": 0.5, "min_prompt_tokens": 64, "lookahead": 4}, []
    kept = partial(expected.draft.kept, rate=0.5, steps=4)
    for asked in ([0], [0, 3, 3, 3]):
        prompts += prompts_that(lambda prompt, asked=asked: kept(prompt) != kept(prompt, asked=asked), 1, 133)
    for steps in (2 * 3, 1 + 3):  # from the cache the last prompt token is such a step too
        answers, replayed, _ = ask_together(server, prompts, policy, 1)
        assert replayed["looking"] >= steps
        for answer, prompt in zip(answers, prompts, strict=True):
            expected.compare(prompt, policy, answer, 1)


def test_again_from_the_prefix_cache(server, answers, expected):
    for name, answer in ask_all(server, ["dense", "everything"]).items():
        expected.check(name, answer)
        assert answer["meta_info"]["cached_tokens"] >= 64


def test_sampled_tokens_are_drafted_too(server):
    """With a seed: the same tokens and log-probabilities with drafting and without it. Without one: some answer."""
    prompt, chance = prompt_of("sampled"), {"temperature": 0.9, "top_k": 30, "top_p": 0.95}
    plain, drafting = (
        ask(server, prompt, policy, NEW_TOKENS, **chance, sampling_seed=3)
        for policy in ({}, {"speculative": True})
    )
    assert drafting["meta_info"]["fathom"]["draft_tokens"] > 0
    assert drafting["output_ids"] == plain["output_ids"]
    values = ([entry[0] for entry in a["meta_info"]["output_token_logprobs"]] for a in (plain, drafting))
    assert next(values) == pytest.approx(next(values), abs=TOLERANCE)
    unseeded = ask(server, prompt, {"speculative": True}, NEW_TOKENS, **chance)
    assert unseeded["meta_info"]["fathom"]["draft_tokens"] > 0 and len(unseeded["output_ids"]) == NEW_TOKENS


def test_nothing_is_left_behind(server):
    server.flush()
    pages = server.engine()["kv_pool"]["depth_pages"]
    assert pages["free"] == pages["total"] and pages["held"] == pages["open_rows"] == 0
