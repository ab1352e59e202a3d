"""Keys and values of 8 bits, on a GPU in name only: every mechanism against an oracle that rounds them too.

The last bits of the oracle's float32 are not the engine's, so that a number half way between two of 8 bits may be
rounded the other way. That moves log-probabilities by up to a hundredth here; rounding altogether, by tenths.
"""

import interpreted
import pytest
import torch
from adapters import ATTENTION, MLP, save_adapter
from greedy import ask, body_of
from interpreted import NEW_TOKENS, POLICIES, Oracle, ask_all, prompt_of
from oracles import attending

from fathom.runtime.sglang_host.memory.kv_pool import DepthKvPool

E4M3, E5M2 = {"fp8_e4m3": torch.float8_e4m3fn}, {"fp8_e5m2": torch.float8_e5m2}
TOLERANCE = 0.02


def oracle_of(pair, triggers, name):
    return Oracle(*pair, triggers, kv_dtype=(E4M3 | E5M2)[name])


@pytest.fixture(scope="module")
def adapted(ending_pair, tmp_path_factory):
    """Folder of an adapter, and of the model that has taken it in."""
    return save_adapter(tmp_path_factory.mktemp("adapter"), ending_pair[0], 4, ATTENTION + MLP, 1)


@pytest.fixture(scope="module")
def server(start_nominal, ending_pair, adapted):
    """With captured steps; prefill by Triton's kernels."""
    more = "--cuda-graph-bs-decode", "1", "4", "--sfi-evidence-mib", "8", "--kv-cache-dtype", *E4M3
    more += "--lora-paths", f"a={adapted[0]}", "--lora-backend", "triton", "--max-loras-per-batch", "2"
    return start_nominal(*ending_pair, *interpreted.FLAGS, *more)


@pytest.fixture(scope="module")
def answers(server):
    return ask_all(server, POLICIES)


@pytest.fixture(scope="module")
def expected(ending_pair, triggers):
    return oracle_of(ending_pair, triggers, *E4M3)


@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_the_oracles(answers, expected, name):
    report, asked = expected.check(name, answers[name], tolerance=TOLERANCE), POLICIES[name]
    assert (report["fast_steps"] > 0) == ("decode" in asked)
    assert (report["draft_tokens"] > 0) == ("speculative" in asked)
    assert (report["kept_tokens"] < 69) == bool(
        {"depth_cutoff", "prefill_keep_rate", "tsp_rate"} & set(asked)
    )


def test_they_are_not_those_of_float32(answers, ending_pair, triggers):
    exact = Oracle(*ending_pair, triggers)
    with pytest.raises(AssertionError):
        exact.check("dense", answers["dense"], tolerance=10 * TOLERANCE)


def numbers(model):
    """Of one token's keys and values."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def test_a_number_takes_a_byte(server, answers, expected):
    """The draft's too."""
    report, engine = answers["dense"]["meta_info"]["fathom"], server.engine()
    assert report["kv_bytes"] == 72 * numbers(expected.model)  # pages of 4 tokens
    assert 1 < engine["draft"]["kv_bytes"] / engine["draft"]["slots"] / numbers(expected.draft.model) < 1.5
    assert engine["replayed_steps"]["dense"] > 0
    told = {"dtype": "float32", "quantization": None, "kv_dtype": "float8_e4m3fn"}
    assert engine.items() >= told.items() and engine["draft"].items() >= told.items()


@pytest.mark.parametrize("name", ["dense", "SFI", "everything"])
def test_adapters(server, adapted, ending_pair, triggers, name):
    body = body_of(prompt_of(name), POLICIES[name], NEW_TOKENS) | {"lora_path": "a"}
    answer = server.client.post("/generate", json=body).json()
    oracle = oracle_of((adapted[1], ending_pair[1]), triggers, *E4M3)
    assert oracle.check(name, answer, tolerance=TOLERANCE)["adapter"] == "a"


def test_other_weights(server, ending_pair, triggers):
    """The pool has nothing of the former model's."""
    names = ("dense", "SFI", "everything")
    for target in (ending_pair[1], ending_pair[0]):
        reply = server.client.post("/update_weights_from_disk", json={"model_path": str(target)}, timeout=120)
        assert reply.status_code == 200 and reply.json()["success"], reply.text
        oracle = oracle_of((target, ending_pair[1]), triggers, *E4M3)
        for name, answer in ask_all(server, names).items():
            oracle.check(name, answer, tolerance=TOLERANCE)


def test_a_view_of_a_buffer_is_made_once():
    shape = {"page_size": 4, "head_num": 1, "head_dim": 4, "layer_num": 2}
    pool = DepthKvPool(
        8, dtype=torch.float8_e4m3fn, device="cpu", enable_memory_saver=False, kv_cache_layout="nhd", **shape
    )
    for read, buffers in ((pool.get_key_buffer, pool.k_buffer), (pool.get_value_buffer, pool.v_buffer)):
        assert read(1) is read(1) and read(1).dtype == torch.float8_e4m3fn
        buffers[1][3] = 0x38
        assert (read(1)[3] == 1).all()


@pytest.fixture(scope="module")
def flashinfer(start_nominal, ending_pair):
    """Its prefill; pages of one token, as beams want them."""
    more = "--kv-cache-dtype", *E5M2, "--cuda-graph-backend-decode", "disabled", "--page-size", "1"
    return start_nominal(*ending_pair, *interpreted.FLAGS, *more, script="nominal_flashinfer.py")


def test_flashinfer_reads_copies_and_prompts_the_prefix_cache(flashinfer, ending_pair, triggers):
    expected = oracle_of(ending_pair, triggers, *E5M2)
    for cached in (0, 64):
        answers = ask_all(flashinfer, ("dense", "FastKV", "everything"))
        for name, answer in answers.items():
            expected.check(name, answer, tolerance=TOLERANCE)
        assert answers["dense"]["meta_info"]["cached_tokens"] >= cached
    before = flashinfer.engine()
    ask(flashinfer, [9, *prompt_of("alone")], {}, NEW_TOKENS)
    engine = flashinfer.engine()
    plans = engine["gathered_plans"] - before["gathered_plans"]
    assert plans == engine["flashinfer_plans"] - before["flashinfer_plans"] > 0


def test_beams(flashinfer, ending_pair, triggers):
    """Each has the score that it should have, and none that is left out a better one."""
    model = oracle_of(ending_pair, triggers, *E5M2).model
    prompt, width, tokens = prompt_of("beams"), 3, 3
    sampling = {"beam_width": width, "n": width, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "fathom": {}}
    reply = flashinfer.client.post("/generate", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    found = reply.json()["meta_info"]["beam_results"]

    def following(beam):
        ids = prompt + beam
        mask = attending.causal(len(ids))
        return attending.forward(
            model, ids, lambda _, q, k, v, scale: attending.masked(q, k, v, mask, scale)[0]
        )[0].log_softmax(-1)

    beams = [([], 0.0)]
    for _ in range(tokens):
        longer = [
            ([*beam, token], total + value)
            for beam, total in beams
            for value, token in zip(*(x.tolist() for x in following(beam).topk(width)), strict=True)
        ]
        beams = sorted(longer, key=lambda pair: -pair[1])[:width]
    assert [beam["output_ids"] for beam in found] == [beam for beam, _ in beams]
    scores = [beam["meta_info"]["sequence_score"] * tokens for beam in found]
    assert scores == pytest.approx([total for _, total in beams], abs=tokens * TOLERANCE)
