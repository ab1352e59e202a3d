"""The engine with FlashInfer for prefill, on a GPU in name only (``nominal_flashinfer.py``), in float32.

Chunks, prefixes, narrowed spans, drafted tokens and rows that Triton keeps, against the oracle with explicit masks.
"""

import interpreted
import pytest
from greedy import ask
from interpreted import NEW_TOKENS, ask_all, prompt_of

SPANS = 4
NAMES = ("dense", "FastKV", "everything")


@pytest.fixture(scope="module", params=["auto", "gathered"])
def prefill(request):
    return request.param


@pytest.fixture(scope="module")
def server(start_nominal, tiny_model, close_draft, prefill):
    flags = *interpreted.FLAGS, "--cuda-graph-backend-decode", "disabled", "--gpu-prefill-attention", prefill
    return start_nominal(tiny_model, close_draft, *flags, script="nominal_flashinfer.py")


def test_answers_are_the_oracles_also_from_the_prefix_cache(server, oracle):
    for cached in (0, 64):
        answers = ask_all(server, NAMES)
        for name, answer in answers.items():
            oracle.check(name, answer)
        assert answers["dense"]["meta_info"]["cached_tokens"] >= cached
    assert server.engine()["replayed_steps"] == {}


def test_a_prompt_is_planned_once_per_span_and_step(server, prefill):
    before = server.engine()
    answer = ask(server, [9, *prompt_of("alone")], {}, NEW_TOKENS)
    engine = server.engine()
    assert engine["prefill_attention"] == "FlashInfer" and answer["meta_info"]["cached_tokens"] == 0
    assert engine["flashinfer_plans"] - before["flashinfer_plans"] == 2 * SPANS  # of two chunks
    # The second chunk has fewer rows than pay for a copy, and so has the last layer.
    assert engine["gathered_plans"] - before["gathered_plans"] == (SPANS - 1 if prefill == "gathered" else 0)
