"""What a server had in its prefix cache before a turn: what was asked for, and nothing else."""

from types import SimpleNamespace

import pytest

from fathom.benchmarks import args, fidelity, liveness, prompts
from fathom.benchmarks.client import BenchError, Reply
from fathom.benchmarks.prompts import TAIL, Cell, Settings
from fathom.demo import corpus


def reply(prompt, cached):
    return Reply(prompt, 8, 1.0, 2.0, 8, "", {"cached_tokens": cached})


def test_no_two_cells_ask_the_same_questions(monkeypatch):
    asked = []

    def samples(task, tokens, n, seed, tokenizer):
        asked.extend((seed, i) for i in range(n))
        return [SimpleNamespace(messages=[seed, i]) for i in range(n)]

    monkeypatch.setattr(fidelity, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(corpus, "eval_samples", samples)
    monkeypatch.setattr(corpus, "prompt_ids", lambda tokenizer, messages: messages)
    source = prompts.question_prompts("m", Settings(task="list"))
    cells = [Cell(prompt, batch) for prompt in (512, 1024) for batch in (1, 2)]
    for cell in cells:
        for number in (-1, 0, 1):
            assert source(cell, number) == source(cell, number)
    once = asked[: len(asked) // 2]
    assert len(set(asked)) == 2 * 3 * (1 + 2) == len(once)


def test_a_number_that_is_given_twice_is_measured_once():
    found = args.parser().parse_args(["--prompts", "1k,512,1024", "--batches", "2,2"])
    assert (found.prompts, found.batches) == ([1024, 512], [2])


@pytest.mark.parametrize(
    ("settings", "prompt", "most"),
    [
        (Settings(), 64, 4),
        (Settings(shared_prefix=0.75), 64, 48 + 1),
        (Settings(shared_prefix=0.5), 512, 256 + 16),
        (Settings(documents=2), 64, 64 - TAIL + 1),
        (Settings(task="list"), 499, prompts.CHAT + 29),
    ],
)
def test_more_than_what_the_settings_ask_for_ends_the_run(settings, prompt, most):
    server = SimpleNamespace(variant=SimpleNamespace(name="x"))
    liveness.check_fresh(server, reply(prompt, most), settings.known(prompt))
    with pytest.raises(BenchError, match=f"x: {most + 1} of {prompt} tokens were in the prefix cache"):
        liveness.check_fresh(server, reply(prompt, most + 1), settings.known(prompt))
