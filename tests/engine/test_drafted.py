"""SpecPrefill and speculative decoding with one draft, against Transformers with explicit masks, in float32.

Kept sets are the oracle's, greedy tokens the same, log-probabilities within 1e-4. Three servers: whole prompts,
chunks of 64 with prefill and decode rows in one batch, and chunks of 256 on pages of 4 tokens where requests are
taken back and started again. The draft is the target with noise on its weights: often right, but not always.
"""

import itertools
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import greedy
import pytest
import torch
from greedy import TOLERANCE, TOP
from noisy import draft_flags
from oracles import drafted, narrowed_model

from fathom.runtime.sglang_host.sampling import unsound

NEW_TOKENS = 14
RATE = 0.3
KEEP = {"prefill_keep_rate": RATE, "min_prompt_tokens": 64}
MOST = KEEP | {"prefill_keep_rate": 0.9}
DRAFT = {"speculative": True}
LENGTHS = [64, 65, 100, 127, 129, 200, 333, 350]
FLAGS = ("--dtype", "float32", "--max-total-tokens", "12000")
SERVERS = {
    "whole": ("--chunked-prefill-size", "-1"),
    "mixed": ("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
    # Who comes after others, whose drafts did not stand, would rest: drafting costs nothing there.
    "retracting": ("--chunked-prefill-size", "64", "--page-size", "4", "--draft-cost", "0"),
}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}


@pytest.fixture(scope="module")
def noisy_draft(draft_of):
    return draft_of(0.004)


@pytest.fixture(scope="module")
def servers(start_server, tiny_model, noisy_draft):
    """The servers by name, each started at first use."""
    started = {}

    def get(name):
        if name not in started:
            env = RETRACT if name == "retracting" else None
            flags = (*draft_flags(noisy_draft), *FLAGS, *SERVERS[name])
            started[name] = start_server(tiny_model, *flags, env=env)
        return started[name]

    return get


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request, servers):
    return servers(request.param)


@pytest.fixture(scope="module")
def target(tiny_model):
    return narrowed_model.NarrowedModel(tiny_model)


@pytest.fixture(scope="module")
def kept_by(noisy_draft):
    """What the oracle keeps of a prompt, computed once per prompt."""
    draft, known = drafted.Draft(noisy_draft), {}

    def kept(prompt, rate=RATE):
        if (rate, *prompt) not in known:
            known[(rate, *prompt)] = draft.kept(prompt, rate)
        return known[(rate, *prompt)]

    return kept


def make_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(6, 1600) for _ in range(length)]


def ask(server, prompts, policy, tokens=NEW_TOKENS, **sampling):
    return greedy.ask(server, prompts, policy, tokens, **sampling)


def check(target, prompt, answer, entered, cutoff="full"):
    """Tokens, log-probabilities and counts of one answer."""
    tokens, meta = answer["output_ids"], answer["meta_info"]
    want = target.log_probs(prompt, tokens[:-1], drafted.sets(entered, cutoff))
    assert tokens == want.argmax(-1).tolist(), len(prompt)
    got = [entry[0] for entry in meta["output_token_logprobs"]]
    assert len(got) == len(tokens)
    assert got == pytest.approx(want.max(-1).values.tolist(), abs=TOLERANCE)
    for row, top in zip(want, meta["output_top_logprobs"], strict=True):
        ids = torch.tensor([entry[1] for entry in top])
        assert len(ids) == TOP
        assert torch.allclose(row[ids], torch.tensor([entry[0] for entry in top]), atol=TOLERANCE)
    report = meta["fathom"]
    if cutoff == "full":
        assert report["kept_tokens"] == len(entered)
    return report


def everything(prompt):
    return range(len(prompt))


def idle(server) -> dict:
    """The engine's account when nothing runs; every page is free or cached."""
    for _ in range(100):
        engine = server.engine()
        if engine["kv_pool"]["held"] == 0 and engine["open_accounts"] == 0:
            break
        threading.Event().wait(0.1)
    pages = engine["kv_pool"]["depth_pages"]
    assert pages["held"] == 0 and pages["open_rows"] == 0, pages
    assert pages["free"] + pages["cached"] == pages["total"], pages
    return engine


@pytest.mark.parametrize("size", [1, 3, 8])
def test_kept_tokens_and_what_follows_are_the_oracles(server, target, kept_by, size):
    prompts = [make_prompt(size, n) for n in LENGTHS[-size:]]
    for policy in (KEEP, KEEP | DRAFT):
        answers = ask(server, prompts, policy)
        for prompt, answer in zip(prompts, answers, strict=True):
            report = check(target, prompt, answer, kept_by(prompt))
            assert (report["draft_tokens"] > 0) == ("speculative" in policy)


def test_drafting_changes_nothing_but_the_number_of_steps(server, target):
    prompts = [make_prompt(2, n) for n in (5, 33, 180)]
    reports = [
        check(target, prompt, answer, everything(prompt))
        for prompt, answer in zip(prompts, ask(server, prompts, DRAFT, 24), strict=True)
    ]
    assert sum(report["accepted_tokens"] for report in reports) > 10
    assert any(report["accepted_tokens"] < report["draft_tokens"] for report in reports)
    assert all(report["decode_steps"] < 24 for report in reports)


@pytest.mark.parametrize("policy", [KEEP, DRAFT, KEEP | DRAFT], ids=["keep", "draft", "both"])
def test_with_a_cutoff_above(server, target, kept_by, policy):
    for length in (100, 300):
        prompt = make_prompt(3, length)
        entered = kept_by(prompt) if "prefill_keep_rate" in policy else everything(prompt)
        answer = ask(server, [prompt], policy | {"depth_cutoff": 2})[0]
        check(target, prompt, answer, entered, cutoff=2)


def test_a_single_token_is_its_own_anchor(server, target):
    policy = KEEP | {"prefill_keep_rate": "auto", "min_prompt_tokens": 0, "depth_cutoff": 2}
    report = check(target, [77], ask(server, [[77]], policy)[0], [0], cutoff=2)
    assert report["kept_tokens"] == report["deep_tokens"] == report["retained_tokens"] == 1
    assert report["kv_bytes"] == report["kv_bytes_dense"]


def test_a_prefix_is_read_once_and_generated_tokens_too(server, target, kept_by):
    """The same document with other questions, and then a conversation that goes on."""
    document = make_prompt(4, 300)
    for question in range(3):
        prompt = document + make_prompt(50 + question, 40)
        answer = ask(server, [prompt], KEEP | DRAFT)[0]
        check(target, prompt, answer, kept_by(prompt))
        if question:
            assert answer["meta_info"]["cached_tokens"] >= 296
    for policy in (KEEP, KEEP | DRAFT):
        first = ask(server, [document], policy, 70)[0]
        prompt = document + first["output_ids"] + make_prompt(60, 10)
        answer = ask(server, [prompt], policy)[0]
        check(target, prompt, answer, kept_by(prompt))
        assert answer["meta_info"]["cached_tokens"] > 300 + 16


def test_short_prompts_stay_whole_beside_judged_ones(server, target, kept_by):
    long = make_prompt(5, 150)
    for policy in (KEEP, KEEP | DRAFT):
        for prompt in (long, long[:50], long[:63], long):
            entered = kept_by(prompt) if len(prompt) >= 64 else everything(prompt)
            check(target, prompt, ask(server, [prompt], policy)[0], entered)


def test_any_mix_of_policies_gives_each_its_own_answer(server, target, kept_by):
    prompts = [make_prompt(6, n) for n in (90, 160, 333)]
    policies = [{}, KEEP, DRAFT, KEEP | DRAFT, {"depth_cutoff": 2}, KEEP | DRAFT | {"depth_cutoff": 2}]
    jobs = [(prompt, policy) for policy in policies for prompt in prompts] * 2
    random.Random(1).shuffle(jobs)
    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda job: ask(server, [job[0]], job[1], 8)[0], jobs))
    for (prompt, policy), answer in zip(jobs, answers, strict=True):
        entered = kept_by(prompt) if "prefill_keep_rate" in policy else everything(prompt)
        check(target, prompt, answer, entered, policy.get("depth_cutoff", "full"))
    idle(server)


def test_the_first_output_may_be_a_burst(servers, target, kept_by):
    """What comes with the prompt is verified like any other token, and ends where the answer ends."""
    server, prompt = servers("whole"), make_prompt(71, 700)
    for tokens in (12, 2):
        answer = ask(server, [prompt], KEEP | DRAFT | {"prefill_keep_rate": 0.95}, tokens)[0]
        report = check(target, prompt, answer, kept_by(prompt, rate=0.95))
        assert len(answer["output_ids"]) == tokens
    assert (report["decode_steps"], report["longest_burst"]) == (0, 2)


def prefill_seconds(server) -> tuple[float, float]:
    """From /metrics: seconds of prefill by the draft and by the target, which are those of the engine's account."""
    for _ in range(100):
        found = server.series("fathom:prefill_seconds_total")
        draft, target = (
            found[f'fathom:prefill_seconds_total{{model="{name}"}}'] for name in ("draft", "target")
        )
        steps = idle(server)["steps"]
        if (draft, target) == pytest.approx((steps["draft_prefill_seconds"], steps["prefill_seconds"])):
            return draft, target
        time.sleep(0.05)  # they are written a moment after the engine has come to rest
    raise AssertionError((found, steps))


def test_time_of_prefill_is_counted_for_each_model(servers):
    """The draft reads the whole prompt and looks ahead; without it all the time is the target's."""
    server, prompt = servers("whole"), make_prompt(21, 1500)
    before = prefill_seconds(server)
    ask(server, [make_prompt(22, 1500)], {}, 1)
    dense = prefill_seconds(server)
    assert dense[0] == before[0] and dense[1] - before[1] > 0.001
    began = time.perf_counter()
    (answer,) = ask(server, [prompt], KEEP, 1)
    elapsed, drafted = time.perf_counter() - began, prefill_seconds(server)
    draft, target = drafted[0] - dense[0], drafted[1] - dense[1]
    assert draft > 0.001 and target > 0.001 and draft + target < elapsed
    account = answer["meta_info"]["fathom"]
    assert account["draft_prefill_seconds"] == pytest.approx(draft)
    assert account["prefill_seconds"] == pytest.approx(draft + target)


def test_ends_are_found_inside_a_burst(servers, target):
    server = servers("whole")
    for policy in (DRAFT, MOST | DRAFT):
        prompt = make_prompt(8, 350)
        said = ask(server, [prompt], policy, 12)[0]["output_ids"]
        for stop in range(12):
            if said[stop] in said[:stop]:
                continue
            answer = ask(server, [prompt], policy, 12, stop_token_ids=[said[stop]], ignore_eos=False)[0]
            assert answer["output_ids"] == said[: stop + 1]
            assert answer["meta_info"]["completion_tokens"] == stop + 1
            assert len(answer["meta_info"]["output_token_logprobs"]) == stop + 1
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        for count in range(1, 7):
            answer = ask(server, [prompt], policy, count)[0]
            assert answer["output_ids"] == said[:count]
            assert len(answer["meta_info"]["output_token_logprobs"]) == count


@pytest.mark.parametrize("policy", [{}, MOST], ids=["whole", "kept"])
def test_the_first_of_several_strings_ends_the_answer(servers, policy):
    """Whichever of them was named first, and however many come in one burst."""
    server, prompt, inside = servers("whole"), make_prompt(8, 350), 0
    said = [""] + [ask(server, [prompt], policy, count)[0]["text"] for count in range(1, 11)]
    parts = [text.removeprefix(before) for before, text in itertools.pairwise(said)]
    for first, later in itertools.combinations(range(10), 2):
        stop = [parts[later], parts[first]]
        plain, sped = (ask(server, [prompt], p, 10, stop=stop)[0] for p in (policy, policy | DRAFT))
        assert sped["text"] == plain["text"] and sped["output_ids"] == plain["output_ids"]
        for name in ("completion_tokens", "finish_reason"):
            assert sped["meta_info"][name] == plain["meta_info"][name]
        assert len(sped["meta_info"]["output_token_logprobs"]) == len(sped["output_ids"])
        inside += sped["meta_info"]["fathom"]["longest_burst"] > later - first
    assert inside > 2


def test_a_sessions_next_turn_goes_on_from_what_its_client_has(servers):
    """Not from what a burst had put out behind the end of the answer."""
    server, prompt, more = servers("whole"), make_prompt(8, 350), make_prompt(15, 20)
    said = ask(server, [prompt], {}, 12)[0]["output_ids"]
    for stop in range(2, 10):
        if said[stop] in said[:stop]:
            continue
        session = server.client.post("/open_session", json={"capacity_of_str_len": 100_000}).json()
        ends = {"stop_token_ids": [said[stop]], "ignore_eos": False}
        body = greedy.body_of(prompt, DRAFT, 12, **ends) | {"session_params": {"id": session}}
        first = server.client.post("/generate", json=body).json()
        assert first["output_ids"] == said[: stop + 1]
        params = {"id": session, "rid": first["meta_info"]["id"]}
        body = greedy.body_of(more, DRAFT, 4) | {"session_params": params}
        second = server.client.post("/generate", json=body).json()
        assert second["meta_info"]["prompt_tokens"] == len(prompt) + stop + 1 + len(more)
        assert (
            second["output_ids"] == ask(server, [prompt + said[: stop + 1] + more], DRAFT, 4)[0]["output_ids"]
        )
        server.client.post("/close_session", json={"session_id": session})


def test_a_stream_is_the_answer_in_order(servers):
    server, prompt = servers("whole"), make_prompt(9, 90)
    want = ask(server, [prompt], {}, 20)[0]["output_ids"]
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, "fathom": DRAFT}
    sizes = [0]
    with server.client.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                got = json.loads(line[6:])["output_ids"]
                assert got == want[: len(got)]
                sizes.append(len(got))
    assert got == want
    assert max(b - a for a, b in itertools.pairwise(sizes)) > 1


def test_a_seed_gives_the_same_answer_with_and_without_drafting(servers):
    server, prompt = servers("whole"), make_prompt(10, 40)
    for seed, more in ((1, {}), (2, {}), (3, {}), (4, {"min_p": 0.2}), (5, {"min_p": 0.5})):
        options = {"temperature": 1.0, "top_p": 0.9, "sampling_seed": seed, **more}
        plain, sped = (ask(server, [prompt], policy, 16, **options)[0] for policy in ({}, DRAFT))
        assert plain["output_ids"] == sped["output_ids"]
        assert sped["meta_info"]["fathom"]["draft_tokens"] > 0


def test_sampling_follows_the_target(servers, target):
    """Frequencies of the second token, over many answers, against the target's distribution given the first."""
    server, prompt, samples = servers("whole"), make_prompt(11, 20), 1500
    options = {"temperature": 0.8, "top_k": 4}
    body = {
        "input_ids": [prompt] * samples,
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, **options},
        "fathom": DRAFT,
    }
    answers = server.client.post("/generate", json=body).json()
    assert sum(answer["meta_info"]["fathom"]["draft_tokens"] for answer in answers) >= samples
    firsts = [answer["output_ids"][0] for answer in answers]
    first = max(set(firsts), key=firsts.count)
    seconds = [answer["output_ids"][1] for answer in answers if answer["output_ids"][0] == first]
    row = target.log_probs(prompt, [first], drafted.sets(everything(prompt)))[-1] / options["temperature"]
    best = row.topk(4)
    want = best.values.softmax(-1)
    got = torch.tensor([seconds.count(int(token)) for token in best.indices]) / len(seconds)
    assert float(got.sum()) == pytest.approx(1)
    assert float((got - want).abs().sum() / 2) < 2.5 * (4 / (2 * torch.pi * len(seconds))) ** 0.5


def test_structured_output_with_drafting(servers):
    server = servers("whole")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for seed in range(3):
        prompt = make_prompt(20 + seed, 350)
        options = {"json_schema": json.dumps(schema), "ignore_eos": False}
        plain = ask(server, [prompt], {}, 24, **options)[0]
        sped = ask(server, [prompt], DRAFT, 24, **options)[0]
        burst = ask(server, [prompt], MOST | DRAFT, 24, **options)[0]
        assert sped["output_ids"] == plain["output_ids"]
        assert sped["meta_info"]["fathom"]["draft_tokens"] > 0
        if burst["meta_info"]["finish_reason"]["type"] == "stop":
            assert isinstance(json.loads(burst["text"])["a"], int)


def test_a_grammar_ends_an_answer_that_ignores_the_ids_that_end_others(servers):
    server = servers("whole")
    for seed in range(3):
        options = {"regex": "[0-9]{3}", "ignore_eos": True}
        answers = [ask(server, [make_prompt(30 + seed, 40)], p, 24, **options)[0] for p in ({}, DRAFT)]
        plain, sped = ((a["output_ids"], a["meta_info"]["finish_reason"]) for a in answers)
        assert sped == plain and sped[1]["type"] == "stop"


@pytest.mark.parametrize("policy", [{}, DRAFT, MOST | DRAFT], ids=json.dumps)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "top_p": 0.9}, {"max_new_tokens": 1}], ids=json.dumps
)
def test_a_grammar_that_allows_nothing_ends_its_request_alone(servers, policy, sampling):
    """After some tokens, or at once."""
    server, prompt = servers("whole"), make_prompt(33, 200)
    for said in ("", "12345678") if "max_new_tokens" not in sampling else ("",):
        rule = {"temperature": 0, "max_new_tokens": 24, "ebnf": f'root ::= "{said}" more\nmore ::= more "4"'}
        body = {"input_ids": prompt, "sampling_params": rule | sampling, "fathom": policy}
        reply = server.client.post("/generate", json=body)
        assert reply.status_code == 400 and unsound.NO_TOKEN in reply.text, reply.text
        stream = server.client.post("/generate", json=body | {"stream": True}).text
        assert unsound.NO_TOKEN in stream and '"type":"stop"' not in stream
    idle(server)


def test_several_answers_of_one_prompt(servers, target, kept_by):
    server, prompt = servers("mixed"), make_prompt(12, 200)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": 3},
        "return_logprob": True,
        "top_logprobs_num": TOP,
        "fathom": KEEP | DRAFT,
    }
    answers = server.client.post("/generate", json=body).json()
    assert len(answers) == 3
    for answer in answers:
        check(target, prompt, answer, kept_by(prompt))


def test_random_chunks_are_a_control_of_the_same_size(servers, kept_by):
    server, prompt = servers("whole"), make_prompt(13, 350)
    answers = [
        ask(server, [prompt], KEEP | {"prefill_selection": rule})[0]
        for rule in ("random", "random", "attention")
    ]
    counts = {answer["meta_info"]["fathom"]["kept_tokens"] for answer in answers}
    assert counts == {len(kept_by(prompt))}
    assert answers[0]["output_ids"] == answers[1]["output_ids"] != answers[2]["output_ids"]


def test_prompt_log_probabilities_are_refused_with_dropped_tokens(servers):
    body = {"input_ids": make_prompt(14, 80), "return_logprob": True, "logprob_start_len": 0, "fathom": KEEP}
    response = servers("whole").client.post("/generate", json=body)
    assert response.status_code == 400
    assert "prompt" in response.text


def test_a_storm_of_aborts_leaves_both_pools_balanced(servers):
    server, rng = servers("mixed"), random.Random(3)
    policies = [KEEP, DRAFT, KEEP | DRAFT, KEEP | DRAFT | {"depth_cutoff": 2}]

    def one(index: int) -> None:
        prompt = make_prompt(100 + index % 7, rng.choice([30, 90, 300]))
        sampling = {"temperature": 0, "max_new_tokens": rng.choice([4, 60]), "ignore_eos": True}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "stream": True,
            "fathom": policies[index % 4],
        }
        with server.client.stream("POST", "/generate", json=body) as response:
            for count, _ in enumerate(response.iter_lines()):
                if index % 3 == 0 and count >= index % 5:
                    return

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(90)))
    engine = idle(server)
    assert engine["draft"]["accepted"] > 0 and engine["draft"]["prompts_judged"] > 0


def test_system_text_of_a_chat_is_kept(servers):
    client, words = servers("whole").openai, ["red", "box", "key", "code", "of", "the", "wooden"]
    rng = random.Random(5)

    def text(count):
        return " ".join(rng.choice(words) for _ in range(count))

    system, document = text(150), text(400)
    reports = []
    for role in ("system", "user"):
        answer = client.chat.completions.create(
            model="any",
            messages=[{"role": role, "content": system}, {"role": "user", "content": document}],
            max_tokens=4,
            extra_body={"fathom": KEEP | {"prefill_keep_rate": 0.1}},
        )
        reports.append(answer.fathom)
    protected, plain = (report["kept_tokens"] for report in reports)
    assert reports[0]["prompt_tokens"] == reports[1]["prompt_tokens"]
    assert plain < 0.2 * reports[1]["prompt_tokens"]
    assert plain + 100 < protected < reports[0]["prompt_tokens"]


def test_what_stays_is_counted_once(servers):
    """Prompts that end within a chunk, and answers that begin the next one each time a request starts again."""
    prompts, policy = [make_prompt(n, 100) for n in range(3)], KEEP | {"kv_retention_rate": 0.3}
    once, again = (
        [answer["meta_info"]["fathom"] for answer in ask(servers(name), prompts, policy, 90)]
        for name in ("whole", "retracting")
    )
    assert max(report["prefill_steps"] for report in again) > 1
    for name in ("kept_tokens", "retained_tokens", "deep_tokens"):
        assert [report[name] for report in again] == [report[name] for report in once]
    assert all(report["retained_tokens"] < report["kept_tokens"] < 100 for report in once)
