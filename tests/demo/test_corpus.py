"""Corpus: determinism, disjoint entities, lengths, and that every answer is stated in its document."""

import random

import pytest

from fathom.demo import corpus, words
from fathom.demo.rows import make_world

CONTEXT = 512


@pytest.mark.parametrize("task", corpus.TASKS)
def test_samples_are_deterministic_and_fit(task, tokenizer):
    a = corpus.eval_samples(task, CONTEXT, 3, seed=5, tokenizer=tokenizer)
    assert a == corpus.eval_samples(task, CONTEXT, 3, seed=5, tokenizer=tokenizer)
    assert a != corpus.eval_samples(task, CONTEXT, 3, seed=6, tokenizer=tokenizer)
    for sample in a:
        assert CONTEXT - 40 <= sample.prompt_tokens <= CONTEXT
        assert sample.prompt_tokens == len(corpus.prompt_ids(tokenizer, sample.messages))
        assert sample.messages[-1]["role"] == "user"


@pytest.mark.parametrize("task", corpus.TASKS)
def test_evidence_is_in_the_document_once(task, tokenizer):
    for sample in corpus.eval_samples(task, CONTEXT, 3, seed=1, tokenizer=tokenizer):
        for sentence in sample.evidence:
            assert sample.messages[0]["content"].count(sentence) == 1


def test_followup_is_a_second_turn(tokenizer):
    sample = corpus.eval_samples("followup", CONTEXT, 1, seed=0, tokenizer=tokenizer)[0]
    assert [m["role"] for m in sample.messages] == ["user", "assistant", "user"]


def test_names_are_disjoint():
    assert not set(words.TRAIN_NAMES) & set(words.EVAL_NAMES)
    assert set(words.TRAIN_NAMES) | set(words.EVAL_NAMES) == set(words.NAMES)


def test_training_stores_no_attribute_under_an_evaluation_name():
    for seed in range(50):
        world = make_world(random.Random(seed), n_facts=40, roll_words=0)
        owners = {f.name for f in world.facts if f.attribute in corpus.ATTRIBUTES}
        assert not owners & set(words.EVAL_NAMES)


def test_evaluation_asks_only_about_evaluation_names(tokenizer):
    for task in ("single", "multikey", "twohop", "list", "followup"):
        for sample in corpus.eval_samples(task, CONTEXT, 5, seed=3, tokenizer=tokenizer):
            name = sample.messages[-1]["content"].rstrip("?.").split()[-1]
            assert name in words.EVAL_NAMES


def test_unknown_task_is_named(tokenizer):
    with pytest.raises(ValueError, match="unknown task 'sum'"):
        corpus.eval_samples("sum", CONTEXT, 1, 0, tokenizer)
