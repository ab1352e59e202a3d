"""The engine with FlashInfer for prefill, on a GPU in name only (``nominal_flashinfer.py``), in float32.

Chunks, prefixes, narrowed spans, drafted tokens and rows that Triton keeps, against the oracle with explicit masks.
"""

import sys
from pathlib import Path

import interpreted
import pytest
from greedy import ask
from interpreted import NEW_TOKENS, Oracle, ask_all, prompt_of
from noisy import draft_flags, noisy_copy
from transformers import AutoTokenizer

from fathom.runtime.sfi.trigger import trigger_ids

SPANS = 4
NAMES = ("dense", "FastKV", "everything")


@pytest.fixture(scope="module")
def draft(tiny_model, tmp_path_factory):
    return noisy_copy(tiny_model, tmp_path_factory.mktemp("draft"), 0.0008)


@pytest.fixture(scope="module")
def server(start_process, tiny_model, draft):
    script = Path(__file__).with_name("nominal_flashinfer.py")
    flags = *interpreted.FLAGS, "--cuda-graph-backend-decode", "disabled"
    command = [sys.executable, str(script), "serve", str(tiny_model), *flags, *draft_flags(draft)]
    return start_process(command, {"TRITON_INTERPRET": "1"})


def test_answers_are_the_oracles_also_from_the_prefix_cache(server, tiny_model, draft):
    oracle = Oracle(
        tiny_model, draft, trigger_ids(AutoTokenizer.from_pretrained(tiny_model).backend_tokenizer)
    )
    for cached in (0, 64):
        answers = ask_all(server, NAMES)
        for name, answer in answers.items():
            oracle.check(name, answer)
        assert answers["dense"]["meta_info"]["cached_tokens"] >= cached
    assert server.engine()["replayed_steps"] == {}


def test_a_prompt_is_planned_once_per_span_and_step(server):
    before = server.engine()
    answer = ask(server, [9, *prompt_of("alone")], {}, NEW_TOKENS)
    engine = server.engine()
    assert engine["prefill_attention"] == "FlashInfer" and answer["meta_info"]["cached_tokens"] == 0
    assert engine["flashinfer_plans"] - before["flashinfer_plans"] == 2 * SPANS  # of two chunks
