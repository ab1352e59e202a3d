"""The tester itself: a small world, errors planted in what its server said, servers that stand still or end."""

import contextlib
import copy
import dataclasses
import json
import random
import re
import socket
from collections import Counter
from types import SimpleNamespace

import pytest
from engine import compared
from fuzz import __main__ as fuzz
from fuzz import beams, trial, worlds
from fuzz.clients import Reply, Wrong, joined
from fuzz.reference import Reference
from fuzz.repeats import Repeats
from fuzz.report import Report
from fuzz.requests import REPEATED, Request

SEED = 196
"""Of a world that is small, has a draft, and whose server is a fork."""
SPREAD = 3
"""Of a small world on two devices, which takes waiting requests in an order of chance."""
WAVE = 9
"""Requests of a wave that are drawn, those that are sent twice counted once."""
ALWAYS = (
    {"prefill_keep_rate": 0.5, "min_prompt_tokens": 64},
    {"tsp_rate": 0.4},
    {"kv_retention_rate": 0.3, "depth_cutoff": 2},
    {"decode": "slow_fast"},
    {"speculative": True},
)
"""Policies of requests that are sent whatever is drawn."""
MOST_TOKENS = 40
"""Of an answer."""
MOST_PLANTED = 20
"""Answers in which an error is planted."""


def always(drawer):
    """A request of each of the policies, one that is illegal, a beam search, and one that is seeded, twice."""
    rng = random.Random(SEED)
    chosen = [Request(drawer.documents[0][:100], dict(policy), 16, logprobs=True) for policy in ALWAYS]
    illegal, seeded, several = (drawer.request(rng) for _ in range(3))
    drawer.illegal(rng, illegal)
    drawer.seeded(rng, seeded)
    drawer.beams(rng, several)
    several.sampling, several.new_tokens = {"beam_width": 4, "n": 3}, 5
    return [*chosen, illegal, several, seeded, drawer.twin(seeded)]


@pytest.fixture(scope="module")
def small(start_process, template, tmp_path_factory):
    """The small world after two waves, and the replies of both."""
    world, folder = worlds.draw(SEED), tmp_path_factory.mktemp("small")
    reference = Reference(world, folder / "models")
    server = trial.start(start_process, template, world, reference)
    asked, replies = trial.Trial(world, reference, server, Report(folder / "failures")), []
    for number in range(2):
        requests = [*asked.drawer.wave(number, WAVE), *always(asked.drawer)]
        for request in requests:
            request.new_tokens = min(request.new_tokens, MOST_TOKENS)
        assert asked.wave(requests)
        replies += asked.replies
    compared = [
        reply
        for reply in replies
        if reply.request.kind == "greedy" and reply.request.n == 1 and reply.answers
        if reply.request.policy.get("retention_policy") != "random"
    ]
    parts = {"world": world, "reference": reference, "server": server, "trial": asked}
    return SimpleNamespace(**parts, replies=replies, compared=compared)


def test_a_small_world(small):
    report = small.trial.report
    assert report.failures == [], [path.read_text() for path in report.failures]
    counts = report.counts
    assert counts["requests"] >= 2 * WAVE + 16 and counts["answers"] >= 20
    assert counts["greedy tokens compared"] > 200 and counts["accounts compared"] > 8
    assert counts["log-probabilities compared"] and counts["repeats compared"] and counts["refusals"]
    assert counts["draws compared"]
    assert counts["beam searches compared"] >= 2
    ran = {"SPEED", "SpecPrefill", "FastKV's selection", "KV retention", "SFI", "drafting"}
    assert not ran & set(report.idle())
    assert "NEVER RAN: retraction" in report.totals()


def planted(field):
    """A change to an answer's account; False where it has no such number."""

    def change(answer):
        account = answer["meta_info"]["fathom"]
        if not isinstance(account[field], int):
            return False
        account[field] -= 1
        return True

    return change


def another_token(answer):
    answer["output_ids"][-1] += 1


def a_token_less(answer):
    answer["output_ids"].pop()
    return len(answer["output_ids"]) > 0


def another_logprob(answer):
    entries = answer["meta_info"].get("output_top_logprobs")
    if not entries:
        return False
    entries[-1][0][0] += 0.01
    return True


def another_policy(answer):
    answer["meta_info"]["fathom"]["policy"] |= {"depth_cutoff": 99, "anchors": "all", "decode": "fast"}


def no_account(answer):
    del answer["meta_info"]["fathom"]


ACCOUNT = ("prompt_tokens", "kept_tokens", "deep_tokens", "retained_tokens", "propagated_tokens")
ACCOUNT += ("decode_steps", "compact_bytes", "kv_bytes", "kv_bytes_dense")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (another_token, "differs"),
        (a_token_less, "tokens, not"),
        (another_logprob, "off by"),
        (another_policy, "was asked for|differs"),
        (no_account, "without an account"),
        *((planted(field), f"{field} ") for field in ACCOUNT),
    ],
)
def test_a_planted_error_is_found(small, change, words):
    """In one of the shortest answers, which cost the oracles least; not every field of each can be known."""
    tried = 0
    for reply in sorted(small.compared, key=lambda reply: len(reply.answers[0]["output_ids"])):
        reply = copy.deepcopy(reply)
        if change(reply.answers[0]) is False:
            continue
        tried += 1
        try:
            small.trial.checker.check(reply)
        except Wrong as wrong:
            assert re.search(words, str(wrong))
            return
        assert tried < MOST_PLANTED
    pytest.fail(f"none of {tried} found")


@pytest.mark.parametrize("change", [{"status": 200}, {"text": "fathom.other is not legal"}])
def test_an_illegal_value_that_is_not_refused_is_found(small, change):
    refused = [reply for reply in small.replies if reply.request.kind == "illegal"]
    assert refused
    for reply in refused:
        with pytest.raises(Wrong, match="is illegal"):
            small.trial.checker.check(dataclasses.replace(reply, **change))


def test_a_repeat_that_differs_is_found(small):
    repeated = [reply for reply in small.replies if reply.request.kind in REPEATED and reply.answers]
    assert repeated
    for reply in copy.deepcopy(repeated):
        small.trial.checker.check(reply)
        reply.answers[0]["output_ids"][0] += 1
        with pytest.raises(Wrong, match="when it was asked before"):
            small.trial.checker.check(reply)


def test_a_token_that_the_seed_does_not_draw_is_found(small, monkeypatch):
    monkeypatch.setattr(small.trial.checker, "repeats", Repeats(small.reference, Counter()))
    reply = copy.deepcopy(
        next(each for each in small.replies if each.request.kind == "seeded" and each.answers)
    )
    reply.answers[0]["output_ids"][0] += 1
    with pytest.raises(Wrong, match="none that the seed draws"):
        small.trial.checker.check(reply)


def other_beam(small, request, answer, found):
    found[-1]["output_ids"][-1] += 1
    return "sum up to"


def worse_beam(small, request, answer, found):
    """Which is what its score says, but not among the best."""
    tokens = found[-1]["output_ids"]
    tokens[-1] += 1
    (total,) = beams.sums_of(small.reference, request.prompt, [tokens])
    found[-1]["meta_info"]["sequence_score"] = total / len(tokens)
    return "does not find"


def other_score(small, request, answer, found):
    found[-1]["meta_info"]["sequence_score"] -= 0.01
    return "sum up to"


def a_beam_twice(small, request, answer, found):
    found[1:] = [found[0]] * len(found[1:])
    return "alike"


def the_worst_first(small, request, answer, found):
    found.reverse()
    answer["output_ids"] = found[0]["output_ids"]
    return "not in their order"


def a_beam_less(small, request, answer, found):
    found.pop()
    return "beams, not"


CHANGES = [other_beam, worse_beam, other_score, a_beam_twice, the_worst_first, a_beam_less]


@pytest.mark.parametrize("change", CHANGES)
def test_an_error_in_beams_is_found(small, change):
    """In the shortest: among many choices there may be one that rounding decides."""
    searches = [reply for reply in small.replies if reply.request.kind == "beams" and reply.answers]
    several = [reply for reply in searches if reply.request.sampling["n"] > 1]
    reply = copy.deepcopy(min(several, key=lambda reply: reply.request.new_tokens))
    small.trial.checker.check(reply)
    answer = reply.answers[0]
    words = change(small, reply.request, answer, answer["meta_info"]["beam_results"])
    with pytest.raises(Wrong, match=words):
        small.trial.checker.check(reply)


def test_a_short_prompt_that_is_refused_is_found(small):
    short = Request([17] * 20, {}, 1)
    with pytest.raises(Wrong, match="refused as too long"):
        small.trial.checker.check(Reply(short, 400, "needs 85 KV pages"))


def test_what_fails_is_written_down(small, tmp_path, monkeypatch, capsys):
    """A server that lies: the failure has all that reproduces it, and the request's answer when it is alone."""
    report = Report(tmp_path / "failures")
    other = trial.Trial(small.world, small.reference, small.server, report)
    send = other.client.send

    def lie(request):
        replies = send(request)
        another_token(replies[0].answers[0])
        return replies

    monkeypatch.setattr(other.client, "send", lie)
    request = Request([*range(20, 60)], {"depth_cutoff": small.world.span}, 8)
    assert other.wave([request])
    (path,) = report.failures
    told = json.loads(path.read_text())
    assert "token 7 of 8 differs" in told["why"] and told["expected"] == told["alone"]["output_ids"]
    assert told["answer"]["answers"][0]["output_ids"] != told["expected"]
    assert told["request"]["prompt"] == request.prompt and told["flags"] == list(small.world.flags)
    said = capsys.readouterr().out
    assert (
        told["command"] in said
        and str(path) in said
        and "1 FAILED" in report.world_line(small.world, Counter())
    )


def test_a_small_world_on_two_devices(start_process, template, tmp_path):
    """The two processes compare what they do and hold."""
    world = worlds.draw(SPREAD, devices=2)
    reference, report = Reference(world, tmp_path / "models"), Report(tmp_path / "failures")
    server = trial.start(start_process, template, world, reference)
    asked = trial.Trial(world, reference, server, report)
    requests = [*asked.drawer.wave(0, WAVE // 2), *always(asked.drawer)]
    for request in requests:
        request.new_tokens = min(request.new_tokens, MOST_TOKENS // 2)
    assert asked.wave(requests)
    asked.end()
    assert report.failures == [], [path.read_text() for path in report.failures]
    assert report.counts["greedy tokens compared"] > 50


def test_processes_that_differ_are_found(monkeypatch):
    told = [{"done": 1, "rows": 3, "last": [("DECODE", i) for i in same]} for same in ((1, 2, 3), (1, 2, 4))]
    told[1]["done"] = 2
    gathering = {"all_gather_object": lambda found, mine, group: found.__setitem__(slice(None), told)}
    gathering["get_world_size"] = lambda group: 2
    monkeypatch.setattr(compared, "distributed", SimpleNamespace(**gathering))
    monkeypatch.setattr(compared, "held", lambda scheduler: told[0])
    with pytest.raises(AssertionError, match=r"process 1 differs .*'done', 'last'\], since .*3.*4"):
        compared.Compared.get_internal_state(SimpleNamespace(tp_cpu_group=None), None)


@pytest.fixture
def silent(monkeypatch, tmp_path):
    """A trial whose server takes connections and says nothing; its process's exit code is to be set."""
    log = tmp_path / "log"
    log.write_text("what the server said last")
    monkeypatch.setattr(trial, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(trial, "STILL_SECONDS", 0.2)
    monkeypatch.setattr(trial.Trial, "_engine", lambda self: None)
    monkeypatch.setattr(trial.Trial, "_kill", lambda self: listener.close())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = SimpleNamespace(poll=lambda: process.code, code=None)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = SimpleNamespace(process=process, url=url, log=log)
        yield trial.Trial(worlds.draw(SEED), None, server, Report(tmp_path))


@pytest.mark.parametrize(("code", "words"), [(None, "no step in"), (-9, "ended with -9")])
def test_a_server_that_stands_still_or_ends_is_a_failure(silent, code, words):
    silent.server.process.code = code
    assert not silent.wave([Request([17], {}, 1)])
    (path,) = silent.report.failures
    told = json.loads(path.read_text())
    assert words in told["why"] and told["log"] == "what the server said last" and len(told["wave"]) == 1
    assert told["unanswered"] == [0]


@pytest.mark.parametrize("fails", [False, True])
def test_the_exit_code(fails, tmp_path, monkeypatch, capsys):
    def run_world(seed, asked, template, report):
        if fails:
            report.failed(worlds.draw(seed, asked.devices), "a lie")

    monkeypatch.setattr(fuzz, "Template", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(fuzz, "run_world", run_world)
    assert fuzz.main(["--seed", "5", "--worlds", "2", "--out", str(tmp_path)]) == fails
    said = capsys.readouterr().out
    assert f"failures: {2 * fails}" in said and "NEVER RAN: SPEED" in said
    assert ('--seed 6 --worlds 1"' in said) == fails


def test_what_a_stream_says():
    """Events that have only their own tokens are put together; those that repeat may take nothing back."""
    events = [
        {
            "text": text,
            "output_ids": ids,
            "meta_info": {"output_token_logprobs": [[-1.0, i, None] for i in ids]},
        }
        for text, ids in (("a b", [1, 2]), (" c", [3]))
    ]
    whole = joined(joined(None, events[0], True), events[1], True)
    assert whole["text"] == "a b c" and whole["output_ids"] == [1, 2, 3]
    assert len(whole["meta_info"]["output_token_logprobs"]) == 3
    with pytest.raises(Wrong, match="took tokens back"):
        joined(events[0], events[1], False)
