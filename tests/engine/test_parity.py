"""Fathom's dense path against Transformers and stock SGLang, in float32: same tokens, log-probabilities to 1e-3."""

import concurrent.futures
import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from waiting import held, slowed, wait_until

NEW_TOKENS = 6
TOLERANCE = 1e-3
LENGTHS = [1, 2, 3, 5, 8, 13, 31, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 400, 511, 513, 600]
LENGTHS += [random.Random(i).randint(1, 900) for i in range(23)] + [1000, 1500, 2047, 2600, 3000]


def make_prompts(vocabulary: int) -> list[list[int]]:
    """Distinct random prompts, and last a few that share a long prefix with an earlier one."""
    rng = random.Random(0)
    prompts = [[rng.randrange(6, vocabulary - 1) for _ in range(n)] for n in LENGTHS]
    for base, keep, extra in ((-2, 1999, 40), (-3, 1024, 7), (20, 300, 200)):
        prompts.append(prompts[base][:keep] + [rng.randrange(6, vocabulary - 1) for _ in range(extra)])
    return prompts


@pytest.fixture(scope="module")
def reference(tiny_model):
    """Transformers' greedy tokens and their log-probabilities for every prompt."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompts = make_prompts(model.config.vocab_size)
    answers = []
    for prompt in prompts:
        tokens, logprobs = [], []
        step, cache = prompt, None
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                output = model(torch.tensor([step]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            row, cache = output.logits[0, -1].log_softmax(-1), output.past_key_values
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            step = tokens[-1:]
        answers.append((tokens, logprobs))
    assert len({tuple(tokens) for tokens, _ in answers}) > len(prompts) // 2, "the model says little"
    return prompts, answers


def generate(server, prompts: list[list[int]]) -> list[tuple[list[int], list[float], dict]]:
    """Greedy answers of one batched request."""
    response = server.client.post(
        "/generate",
        json={
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            "return_logprob": True,
        },
    )
    assert response.status_code == 200, response.text
    answers = []
    for output in response.json():
        logprobs = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        answers.append((output["output_ids"], logprobs, output["meta_info"]))
    return answers


def assert_same(got, want) -> None:
    for i, ((tokens, logprobs, _), (want_tokens, want_logprobs)) in enumerate(zip(got, want, strict=True)):
        assert tokens == want_tokens, f"prompt {i}"
        assert logprobs == pytest.approx(want_logprobs, abs=TOLERANCE), f"prompt {i}"


def check_server(server, reference) -> None:
    """Cold and warm prefix cache, one prompt at a time and eight at once."""
    prompts, want = reference
    server.flush()
    batches = [range(begin, min(begin + 8, len(prompts))) for begin in range(0, len(prompts), 8)]
    for batch in batches:
        got = generate(server, [prompts[i] for i in batch])
        assert_same(got, [want[i] for i in batch])
    cached = 0
    for i in range(0, len(prompts), 3):
        got = generate(server, [prompts[i]])
        cached += got[0][2]["cached_tokens"]
        assert_same(got, [want[i]])
    assert cached > 1000, "no prefix was hit"
    server.flush()
    for i in range(1, len(prompts), 5):
        got = generate(server, [prompts[i]])
        assert got[0][2]["cached_tokens"] == 0
        assert_same(got, [want[i]])
    assert server.engine()["ended_rows"] > 5000


@pytest.fixture(scope="module")
def base_flags():
    return ["--dtype", "float32", "--max-total-tokens", "40000"]


def test_whole_prompts(roomy_server, reference):
    check_server(roomy_server, reference)


def test_chunks_of_64_on_pages_of_16(start_server, tiny_model, reference, base_flags):
    server = start_server(tiny_model, *base_flags, "--chunked-prefill-size", "64", "--page-size", "16")
    check_server(server, reference)
    check_prompt_log_probabilities(server, tiny_model)
    assert server.stop() == 0


def check_prompt_log_probabilities(server, path) -> None:
    """Of whole prompts, of their ends, and of none beside others', four at once in the same chunks."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rng = random.Random(5)
    prompts = [[rng.randrange(6, model.config.vocab_size - 1) for _ in range(n)] for n in (200, 150, 97, 70)]
    starts = [0, 120, -1, 69]
    response = server.client.post(
        "/generate",
        json={
            "input_ids": prompts,
            "sampling_params": [{"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}] * len(prompts),
            "return_logprob": [True] * len(prompts),
            "logprob_start_len": starts,
        },
    )
    assert response.status_code == 200, response.text
    for prompt, start, output in zip(prompts, starts, response.json(), strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        got = output["meta_info"]["input_token_logprobs"]
        begin = len(prompt) if start < 0 else start
        assert [token for _, token, _ in got] == prompt[begin:]
        want = [float(rows[at - 1, prompt[at]]) for at in range(max(begin, 1), len(prompt))]
        # Nothing comes before the first token, and of what comes before the first one asked for SGLang has no row.
        values = [value for value, _, _ in got]
        assert values[:1] in ([], [None])
        assert values[1:] == pytest.approx(want if begin == 0 else want[1:], abs=TOLERANCE)


def test_chunks_of_256_with_retractions(retracting_server, reference):
    """SGLang takes running requests back every few steps; they restart and must not differ."""
    prompts, want = reference
    retractions = 0
    for begin in range(0, len(prompts), 8):
        got = generate(retracting_server, prompts[begin : begin + 8])
        assert_same(got, want[begin : begin + 8])
        retractions += sum(meta["num_retractions"] for _, _, meta in got)
    assert retractions > 0, "nothing was retracted"
    check_server(retracting_server, reference)


@pytest.fixture(scope="module")
def stock(start_server, tiny_model, base_flags):
    return start_server(tiny_model, *base_flags, stock=True)


def test_stock_sglang_gives_the_same(stock, reference):
    prompts, want = reference
    for begin in range(0, len(prompts), 8):
        got = generate(stock, prompts[begin : begin + 8])
        assert_same(got, want[begin : begin + 8])


def beams(server, prompt: list[int], width: int) -> list[list[int]]:
    """The tokens of each beam, the best one first."""
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "beam_width": width, "n": width}
    response = server.client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    found = [beam["output_ids"] for beam in response.json()["meta_info"]["beam_results"]]
    assert len(set(map(tuple, found))) == width
    return found


def test_beams_are_stock_sglangs(server, stock, reference):
    """Beside requests whose KV ends at a layer, and with nothing left behind."""
    prompts, _ = reference
    cases = [(prompts[i], width) for i, width in ((4, 2), (12, 5), (20, 3), (47, 4))]
    policy = {
        "input_ids": prompts[30],
        "fathom": {"depth_cutoff": 2},
        "sampling_params": {"max_new_tokens": 40},
    }
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        others = [pool.submit(server.client.post, "/generate", json=policy) for _ in range(4)]
        got = [beams(server, *case) for case in cases]
        assert all(other.result().status_code == 200 for other in others)
    assert got == [beams(stock, *case) for case in cases]
    wait_until(lambda: held(server) == 0)


def test_beams_of_prompts_in_chunks(start_server, stock, tiny_model, reference, base_flags):
    """As stock SGLang has them of whole prompts: of one in chunks it computes the first for ever."""
    prompts = [prompt for prompt in reference[0] if len(prompt) in (64, 65, 200, 1500)]
    assert len(prompts) == 4
    server = start_server(tiny_model, *base_flags, "--chunked-prefill-size", "64")
    for prompt in prompts:
        assert beams(server, prompt, 3) == beams(stock, prompt, 3)
    wait_until(lambda: held(server) == 0)


def test_mixed_arrivals_give_the_same(server, reference):
    """Requests that arrive one by one while others decode."""
    prompts, want = reference
    order = list(range(len(prompts)))
    random.Random(3).shuffle(order)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for i, got in zip(order, pool.map(lambda i: generate(server, [prompts[i]]), order), strict=True):
            assert_same(got, [want[i]])


def test_log_probabilities_of_ids_beside_requests_that_name_none(server, tiny_model):
    """Of a prompt and its answer, in the batches of one that asks for nothing and one that asks for others."""
    rng, ids = random.Random(4), [5, 77, 1999]
    prompt = [rng.randrange(6, 2000) for _ in range(90)]
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
    }
    plain = body | {"sampling_params": body["sampling_params"] | {"max_new_tokens": 1500}}
    asked = body | {"return_logprob": True, "token_ids_logprob": ids, "logprob_start_len": 0}
    other = body | {"return_logprob": True, "top_logprobs_num": 2}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with slowed(server, 0.02):
            running = pool.submit(server.client.post, "/generate", json=plain)
            wait_until(lambda: held(server) > 1)
            answers = list(
                pool.map(lambda body: server.client.post("/generate", json=body).json(), (asked, other))
            )
            assert not running.done()
        assert running.result().json()["output_ids"][:20] == answers[0]["output_ids"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([prompt + answers[0]["output_ids"]])).logits[0].log_softmax(-1)
    meta = answers[0]["meta_info"]
    known = [*meta["input_token_ids_logprobs"][1:], *meta["output_token_ids_logprobs"]]
    for row, entries in zip(rows[:-1], known, strict=True):
        assert [entry[1] for entry in entries] == ids
        assert [entry[0] for entry in entries] == pytest.approx(row[ids].tolist(), abs=TOLERANCE)
