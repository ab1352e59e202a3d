"""Several decode steps between two looks of SGLang's scheduler: the same answers and accounts as one at a time."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import interpreted
import pytest
from conftest import OVERLAPPING
from greedy import TOLERANCE, ask
from interpreted import MECHANISMS
from noisy import draft_flags
from waiting import held, wait_until

NEW_TOKENS = 24
prompt_of = partial(interpreted.prompt_of, length=150)
SPEC, FASTKV, SFI = (MECHANISMS[name] for name in ("SpecPrefill", "FastKV", "SFI"))
POLICIES = {
    "dense": {},
    "SPEED": {"depth_cutoff": 3},
    "FastKV": FASTKV,
    "SpecPrefill": SPEC,
    "SFI": SFI,
    "SFI at random": SFI | {"sfi_selection": "random"},
    "SFI, once chosen": SFI | {"sfi_selection": "frozen"},
    "all but drafting": SPEC | FASTKV | SFI | {"depth_cutoff": 3},
    "drafting": {"speculative": True},
}
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "40000", "--chunked-prefill-size", "64"),
    *("--sfi-recent", "16", "--sfi-selected", "20", "--sfi-refresh-budget", "4"),
)
SAME = (
    *("prompt_tokens", "kept_tokens", "deep_tokens", "retained_tokens", "propagated_tokens", "kv_bytes"),
    *("decode_steps", "fast_steps", "slow_steps", "trigger_refreshes", "timeout_refreshes"),
)


@pytest.fixture(scope="module", params=["in order", "overlapping"])
def servers(request, start_server, ending_pair):
    """One that goes on for up to five steps, and one that does not."""
    target, draft = ending_pair
    overlaps = request.param == "overlapping"
    script = OVERLAPPING if overlaps else None
    gap = ("--sfi-minimum-gap", "3", "--page-size", "4") if overlaps else ()

    def start(*flags):
        return start_server(target, *FLAGS, *gap, *flags, *draft_flags(draft), script=script)

    return start("--num-continuous-decode-steps", "5"), start()


@pytest.fixture(scope="module")
def expected(servers):
    _, one = servers
    found = {name: ask(one, prompt_of(name), policy, NEW_TOKENS) for name, policy in POLICIES.items()}
    reports = [answer["meta_info"]["fathom"] for answer in found.values()]
    assert all(sum(report[name] for report in reports) > 2 for name in SAME[-2:])
    return found


def generate(server, name, **sampling):
    """Without log-probabilities: those are asked for one step at a time."""
    body = {
        "input_ids": prompt_of(name),
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True} | sampling,
        "fathom": POLICIES[name],
    }
    return server.client.post("/generate", json=body).json()


def followed(server):
    return server.engine()["steps_that_followed"]


def check(answer, want):
    report, usual = answer["meta_info"]["fathom"], want["meta_info"]["fathom"]
    assert answer["output_ids"] == want["output_ids"], report["policy"]
    if not usual["policy"]["speculative"]:
        assert {name: report[name] for name in SAME} == {name: usual[name] for name in SAME}


@pytest.mark.parametrize("name", POLICIES)
def test_answers_and_accounts_alone(servers, expected, name):
    several, _ = servers
    before = followed(several)
    check(generate(several, name), expected[name])
    assert (followed(several) - before > NEW_TOKENS / 3) == (name != "drafting")


def test_answers_and_accounts_in_common_batches(servers, expected):
    """Requests of all kinds that end at other times; those that draft stop the others from going on."""
    several, _ = servers
    several.flush()
    before = followed(several)
    for names in ([name for name in POLICIES if name != "drafting"] * 2, list(POLICIES)):
        with ThreadPoolExecutor(len(names)) as pool:
            counts = [NEW_TOKENS - 3 * (i % 4) for i in range(len(names))]
            asked = [
                pool.submit(generate, several, n, max_new_tokens=c)
                for n, c in zip(names, counts, strict=True)
            ]
        for name, count, answer in zip(names, counts, asked, strict=True):
            assert answer.result()["output_ids"] == expected[name]["output_ids"][:count], name
    assert followed(several) - before > 5
    wait_until(lambda: held(several) == 0)


def test_ends(servers, expected):
    """Of an answer whose last token is known when others were computed behind it already."""
    several, _ = servers
    for name, policy in POLICIES.items():
        tokens = expected[name]["output_ids"]
        end = next(i for i in range(4, NEW_TOKENS) if tokens[i] not in tokens[:i])
        answer = generate(several, name, stop_token_ids=[tokens[end]], ignore_eos=False)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", policy
        assert answer["output_ids"] == tokens[: end + 1]
    wait_until(lambda: held(several) == 0)
    several.flush()
    pages = several.engine()["kv_pool"]["depth_pages"]
    assert pages["free"] == pages["total"] and pages["held"] == pages["open_rows"] == 0


def test_stop_strings(servers, expected):
    """Looked for token by token, also in what one look of the scheduler brings."""
    for name in ("dense", "SFI"):
        text = expected[name]["text"]
        stop = text[len(text) // 2 :][:2]
        answers = [generate(server, name, stop=[stop]) for server in servers]
        assert answers[0]["text"] == answers[1]["text"] and stop not in answers[0]["text"]
        assert answers[0]["output_ids"] == answers[1]["output_ids"]


def test_what_takes_one_step_at_a_time(servers, expected):
    """Log-probabilities, penalties and grammars; beside them nobody goes on."""
    several, _ = servers
    before = followed(several)
    answer = ask(several, prompt_of("SFI"), SFI, NEW_TOKENS)
    check(answer, expected["SFI"])
    got, want = (each["meta_info"]["output_token_logprobs"] for each in (answer, expected["SFI"]))
    assert [entry[0] for entry in got] == pytest.approx([entry[0] for entry in want], abs=TOLERANCE)
    for sampling in ({"frequency_penalty": 0.5}, {"json_schema": '{"type": "boolean"}', "ignore_eos": False}):
        texts = [generate(server, "SFI", **sampling)["text"] for server in servers]
        assert texts[0] == texts[1]
    assert followed(several) == before


def test_seeds(servers):
    """Drawn tokens follow from the seed and the position, whatever the step."""
    answers = [generate(server, "SFI", temperature=0.8, sampling_seed=7) for server in servers]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
