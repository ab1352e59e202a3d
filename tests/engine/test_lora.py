"""LoRA adapters beside policies: each answer is that of a model with the adapter in its weights."""

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from adapters import ATTENTION, ENDS, MLP, save_adapter
from conftest import save_random_model
from greedy import body_of
from interpreted import NEW_TOKENS, POLICIES, SERVED, Oracle, prompt_of
from noisy import draft_flags
from sglang.srt.lora.lora_registry import LoRARef
from transformers import AutoModelForCausalLM

from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.runtime.sglang_host.layers.cpu_linear import multiplies_bfloat16

KINDS = {"a": (4, ATTENTION + MLP), "b": (6, ATTENTION + ENDS), "c": (3, ("q_proj", "v_proj", "down_proj"))}
"""Rank and matrices; a, b and the model alone fill all places that the server has."""
FOLLOWING = ("--num-continuous-decode-steps", "3")
"""Of requests without log-probabilities, steps follow each other before the scheduler is asked again."""


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """By name: folder of the adapter, folder of the model that has taken it in."""
    return {
        name: save_adapter(tmp_path_factory.mktemp(name), tiny_model, *kind, seed)
        for seed, (name, kind) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def server(start_server, tiny_model, close_draft, saved):
    paths = ("--lora-paths", *(f"{name}={saved[name][0]}" for name in ("a", "b")))
    more = ("--max-loras-per-batch", "3", "--max-loaded-loras", "3", *FOLLOWING)
    return start_server(tiny_model, *SERVED, *draft_flags(close_draft), *paths, *more)


@pytest.fixture(scope="module")
def oracles(tiny_model, close_draft, triggers, saved):
    models = {None: tiny_model} | {name: merged for name, (_, merged) in saved.items()}
    return {name: Oracle(model, close_draft, triggers) for name, model in models.items()}


def ask(server, name, adapter, new_tokens=NEW_TOKENS, **more):
    body = body_of(prompt_of(name), POLICIES[name], new_tokens) | {"lora_path": adapter} | more
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def check_together(server, oracles, pairs):
    """All at once: rows of several adapters and of none meet in the batches."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        answers = list(pool.map(lambda pair: ask(server, *pair), pairs))
    for (name, adapter), answer in zip(pairs, answers, strict=True):
        account = oracles[adapter].check(name, answer)
        assert account.get("adapter") == adapter
        assert (account["kept_tokens"] < account["prompt_tokens"]) == (
            name not in ("dense", "SFI", "drafting")
        )
    return answers


def check_steps_that_follow(server, count=10):
    """The same tokens as one step at a time."""
    pairs = [(name, adapter) for name in ("dense", "SFI") for adapter in (None, "a", "b")]

    def tokens_of(**more):
        with ThreadPoolExecutor(len(pairs)) as pool:
            answers = pool.map(lambda pair: ask(server, *pair, count, **more), pairs)
            return [answer["output_ids"] for answer in answers]

    one_by_one, before = tokens_of(), server.engine()["steps_that_followed"]
    assert tokens_of(return_logprob=False) == one_by_one
    assert server.engine()["steps_that_followed"] > before


def test_steps_that_follow_each_other(server):
    check_steps_that_follow(server)


def test_every_mechanism_with_every_adapter(server, oracles):
    adapters = (None, "a", "b")
    answers = check_together(server, oracles, [(name, adapter) for name in POLICIES for adapter in adapters])
    texts = [tuple(answer["output_ids"]) for answer in answers]
    assert len(set(texts)) == len(texts)  # no prompt has the same answer with another adapter
    assert server.engine()["ended_rows"] > 0 and server.engine()["lacking"] == {}


def test_a_client_cannot_take_an_adapters_place_in_the_prefix_cache(server, oracles, saved):
    """Its id there follows from its name and folder, which /v1/models tells."""
    server.flush()
    ask(server, "dense", None, extra_key=LoRARef.deterministic_id("a", str(saved["a"][0])))
    answer = ask(server, "dense", "a", extra_key="")
    assert answer["meta_info"]["cached_tokens"] == 0
    oracles["a"].check("dense", answer)
    assert ask(server, "dense", "a")["meta_info"]["cached_tokens"] > 0


def test_more_adapters_than_places(server, oracles, saved):
    """An adapter that comes later takes a place, waits for one, and goes; nobody's answer is another's."""
    server.flush()
    reply = server.client.post("/load_lora_adapter", json={"lora_name": "c", "lora_path": str(saved["c"][0])})
    assert reply.status_code == 200, reply.text
    names = ("dense", "FastKV", "SFI", "everything")
    check_together(server, oracles, [(name, adapter) for adapter in oracles for name in names])
    assert server.client.post("/unload_lora_adapter", json={"lora_name": "c"}).status_code == 200
    assert "c" not in {model["id"] for model in server.client.get("/v1/models").json()["data"]}


def test_names_that_no_adapter_can_have(server, tiny_model, saved):
    """Requests for the model by its name, or by none, would be answered by the adapter."""
    for name in (str(tiny_model), "", " c", "c\n"):
        body = {"lora_name": name, "lora_path": str(saved["c"][0])}
        reply = server.client.post("/load_lora_adapter", json=body)
        assert reply.status_code == 400 and "lora_name" in reply.text
    models = {model["id"] for model in server.client.get("/v1/models").json()["data"]}
    assert models == {str(tiny_model), "a", "b"}


def test_who_waits_for_a_place_gets_one(server, saved):
    """However many ask for the adapters that have them."""
    body = {"lora_name": "c", "lora_path": str(saved["c"][0])}
    assert server.client.post("/load_lora_adapter", json=body).status_code == 200
    done, lengths = threading.Event(), random.Random(0)

    def come(adapter):
        while not done.is_set():
            ask(server, "dense", adapter, lengths.randrange(20, 60))

    with ThreadPoolExecutor(10) as pool:
        others = [pool.submit(come, adapter) for adapter in "abc" for _ in range(3)]
        time.sleep(0.5)
        try:
            wanted = pool.submit(ask, server, "dense", None)
            assert wanted.result(timeout=60)
        finally:
            done.set()
        for other in others:
            other.result()
    assert server.client.post("/unload_lora_adapter", json={"lora_name": "c"}).status_code == 200


def test_what_ends_early_gives_its_adapter_back(server, saved):
    """Requests that are refused, left or ended keep no adapter from being unloaded."""
    body = body_of(prompt_of("dense"), {}, 200) | {"lora_path": "b", "stream": True}
    with server.client.stream("POST", "/generate", json=body) as stream:
        next(stream.iter_lines())
    refused = (
        {"fathom": {"depth_cutoff": 99}},
        {"sampling_params": {"max_new_tokens": 4, "temperature": -1}},
        {"sampling_params": {"max_new_tokens": 4, "n": 0}},
        {"input_ids": list(range(6, 600))},
    )
    for change in refused:
        reply = server.client.post("/generate", json=body | {"stream": False} | change)
        assert reply.status_code == 400, reply.text
    several = {"sampling_params": {"n": 3, "max_new_tokens": 2, "temperature": 1}, "stream": False}
    assert server.client.post("/generate", json=body | several).status_code == 200
    began = time.monotonic()
    assert server.client.post("/unload_lora_adapter", json={"lora_name": "b"}, timeout=20).status_code == 200
    assert time.monotonic() - began < 15
    back = {"lora_name": "b", "lora_path": str(saved["b"][0])}
    assert server.client.post("/load_lora_adapter", json=back).status_code == 200


@pytest.fixture
def four(server, saved):
    """Names of adapters that were loaded, of which the server holds three at a time."""
    folders = {"a": "a", "b": "b", "c": "c", "as c": "c"}
    for name in ("c", "as c"):
        body = {"lora_name": name, "lora_path": str(saved[folders[name]][0])}
        assert server.client.post("/load_lora_adapter", json=body).status_code == 200
    yield tuple(folders)
    for name in ("c", "as c"):
        server.client.post("/unload_lora_adapter", json={"lora_name": name})
    for name in ("a", "b"):
        assert server.client.post("/generate", json=short_of(name)).status_code == 200


def short_of(adapter):
    """A request, or one for several adapters."""
    prompts = [prompt_of("dense")] * len(adapter) if isinstance(adapter, list) else prompt_of("dense")
    return {
        "input_ids": prompts,
        "lora_path": adapter,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0},
    }


def test_who_leaves_while_an_adapter_is_loaded_takes_none_away(server, four):
    """Neither the one that was to be loaded nor the one that was to make room: all can be had afterwards."""
    loaded = {model["id"] for model in server.client.get("/v1/models").json()["data"]} & set(four)
    (missing,) = set(four) - loaded
    busy = [body_of(prompt_of("dense"), {}, 400) | {"lora_path": name, "stream": True} for name in loaded]
    engine = server.engine()["pid"]
    with contextlib.ExitStack() as streams:
        for body in busy:
            stream = streams.enter_context(server.client.stream("POST", "/generate", json=body))
            next(stream.iter_lines())
        os.kill(engine, signal.SIGSTOP)  # so that no stream ends
        try:
            with pytest.raises(httpx.ReadTimeout):  # waits until one of the others may go
                server.client.post("/generate", json=short_of(missing), timeout=0.5)
            time.sleep(0.2)
        finally:
            os.kill(engine, signal.SIGCONT)
    for name in four:
        reply = server.client.post("/generate", json=short_of(name))
        assert reply.status_code == 200, reply.text


def test_requests_that_take_turns_in_needing_adapters(server, four):
    """Each has three, of which others may be loading the fourth in the place of one."""
    alone = {name: server.client.post("/generate", json=short_of(name)).json()["output_ids"] for name in four}
    threes = [names for names in itertools.combinations(four, 3) for _ in range(3)]
    with ThreadPoolExecutor(len(threes)) as pool:
        replies = list(
            pool.map(lambda names: server.client.post("/generate", json=short_of(list(names))), threes)
        )
    for names, reply in zip(threes, replies, strict=True):
        assert reply.status_code == 200, reply.text
        assert [answer["output_ids"] for answer in reply.json()] == [alone[name] for name in names]


def test_an_adapter_is_loaded_instead_of_one_that_came_back(server, oracles, saved):
    """Requests bring back what was unloaded; it does not keep out what is to be loaded by its name."""

    def load(name):
        body = {"lora_name": "new", "lora_path": str(saved[name][0])}
        return server.client.post("/load_lora_adapter", json=body)

    def unload():
        reply = server.client.post("/unload_lora_adapter", json={"lora_name": "new"})
        assert reply.status_code == 200, reply.text

    assert load("c").status_code == 200
    unload()
    oracles["c"].check("dense", ask(server, "dense", "new"))
    with ThreadPoolExecutor(1) as pool:
        longer = pool.submit(ask, server, "dense", "new", 60)
        reply = load("a")
        assert reply.status_code == 200, reply.text
        assert len(longer.result()["output_ids"]) == 60
    oracles["a"].check("dense", ask(server, "dense", "new"))
    reply = load("c")
    assert reply.status_code == 400 and "already loaded" in reply.text
    unload()


def test_an_adapter_that_has_made_room_can_be_unloaded_and_loaded(server, four, saved):
    """Nothing is there to be unloaded, which is told; requests may bring it back all the same."""
    loaded = {model["id"] for model in server.client.get("/v1/models").json()["data"]}
    (missing,) = set(four) - loaded
    reply = server.client.post("/unload_lora_adapter", json={"lora_name": missing})
    assert reply.status_code == 400 and "does not exist" in reply.text
    assert server.client.post("/generate", json=short_of(missing)).status_code == 200
    body = {"lora_name": missing, "lora_path": str(saved[missing.removeprefix("as ")][0])}
    reply = server.client.post("/load_lora_adapter", json=body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("adapter", ["a", "b"])
def test_log_probabilities_of_a_prompt(server, saved, adapter):
    """The output matrix gets other rows than the layers do."""
    prompt = prompt_of(adapter, 90)
    sampling = {"max_new_tokens": 1, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 20}
    others = [body | {"lora_path": name} for name in ("a", None, "b")]
    with ThreadPoolExecutor(4) as pool:
        replies = list(
            pool.map(
                lambda b: server.client.post("/generate", json=b), [*others, body | {"lora_path": adapter}]
            )
        )
    got = [value for value, _, _ in replies[-1].json()["meta_info"]["input_token_logprobs"][1:]]
    model = AutoModelForCausalLM.from_pretrained(saved[adapter][1], dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    want = rows[torch.arange(20, 89), torch.tensor(prompt[21:])].tolist()
    assert got == pytest.approx(want, abs=1e-4)


def test_an_adapter_is_asked_for_by_its_name(server, tiny_model):
    """As `/v1/models` lists it, or behind the model's; on every route."""
    messages = [{"role": "user", "content": "Which code?"}]
    sampling = {"temperature": 0, "max_tokens": 8, "fathom": {"depth_cutoff": 3}}

    def said(route, **body):
        reply = server.client.post(route, json=body)
        assert reply.status_code == 200, reply.text
        reply = reply.json()
        assert reply["fathom"]["policy"]["depth_cutoff"] == 3
        named = body["model"].rpartition(":")[2]
        assert reply["fathom"].get("adapter") == (named if named in KINDS else body.get("lora_path"))
        return reply

    def chat(**body):
        return said("/v1/chat/completions", messages=messages, **sampling, **body)["choices"][0]["message"][
            "content"
        ]

    texts = {name: chat(model=str(tiny_model), lora_path=name) for name in (None, "a", "b")}
    assert len(set(texts.values())) == 3
    assert chat(model=str(tiny_model)) == texts[None]
    for name, other in (("a", "b"), ("b", "a")):  # what the model says comes first, as in SGLang
        assert (
            chat(model=f"{tiny_model}:{name}", lora_path=other)
            == chat(model=name, lora_path=other)
            == texts[name]
        )
    for name in ("a", "b"):
        assert chat(model=name) == chat(model=f"{tiny_model}:{name}") == texts[name]
        response = said(
            "/v1/responses",
            model=name,
            input=messages,
            max_output_tokens=8,
            temperature=0,
            fathom={"depth_cutoff": 3},
        )
        assert response["output"][-1]["content"][0]["text"] == texts[name]
        message = said("/v1/messages", model=name, messages=messages, **sampling)
        assert message["content"][0]["text"] == texts[name]
    completions = [
        said("/v1/completions", model=model, prompt="Which code?", **sampling)["choices"][0]["text"]
        for model in ("a", f"{tiny_model}:a", str(tiny_model))
    ]
    assert completions[0] == completions[1] != completions[2]
    unknown = {"model": f"{tiny_model}:zzz", "messages": messages}
    reply = server.client.post("/v1/chat/completions", json=unknown)
    assert reply.status_code == 400 and "zzz" in reply.text


def test_on_a_gpu_in_name_only(start_nominal, tiny_model, close_draft, saved, oracles):
    """SGLang's Triton kernels for adapters, interpreted; decode steps captured, and launched ahead of the host."""
    paths = ("--lora-paths", *(f"{name}={saved[name][0]}" for name in ("a", "b")))
    graphs = ("--cuda-graph-bs-decode", "1", "4", "--sfi-evidence-mib", "8")
    more = ("--device", "cuda", *graphs, *paths, "--lora-backend", "triton", "--max-loras-per-batch", "3")
    more += FOLLOWING
    server = start_nominal(tiny_model, close_draft, *SERVED, *more)
    for name in ("dense", "SFI", "drafting", "everything"):
        check_together(server, oracles, [(name, adapter) for adapter in (None, "a", "b")])
    engine = server.engine()
    assert engine["replayed_steps"]["dense"] > 0 and engine["replayed_steps"]["alternating"] > 0
    assert engine["overlapped_steps"] > 0 and engine["lacking"] == {}
    check_steps_that_follow(server, 7)


def test_two_devices(start_server, tiny_model, saved, oracles):
    """Whose turn it is, one process says for both."""
    paths = ("--lora-paths", *(f"{name}={saved[name][0]}" for name in saved))
    cores = sorted(os.sched_getaffinity(0))
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    turns = ("--max-loras-per-batch", "2", "--lora-drain-wait-threshold", "0.01")
    server = start_server(tiny_model, *SERVED, "--tp-size", "2", *paths, *turns, env=binding)
    names = ("dense", "SPEED", "FastKV")
    check_together(server, oracles, [(name, adapter) for name in names for adapter in oracles])
    assert server.stop() == 0


def test_bfloat16(start_server, tmp_path):
    """Steps of requests without an adapter are those of a server without adapters, joined layers and all."""
    for folder in ("model", "adapter"):
        (tmp_path / folder).mkdir()
    model = save_random_model(tmp_path / "model", dtype="bfloat16")
    adapter, merged = save_adapter(tmp_path / "adapter", model, 4, ATTENTION + MLP, 1)
    flags = ("--dtype", "bfloat16", "--max-total-tokens", "4000", "--num-continuous-decode-steps", "4")
    server, plain = (start_server(model, *flags, *more) for more in (("--lora-paths", f"a={adapter}"), ()))
    engine = server.engine()
    assert all(engine[name] == plain.engine()[name] for name in ("joined_layers", "packed_weights"))
    before = engine["joined_steps"]
    assert ask(server, "dense", None, 20)["output_ids"] == ask(plain, "dense", None, 20)["output_ids"]
    joined = server.engine()["joined_steps"]
    assert joined - before == (19 if has_bfloat16_products() or not multiplies_bfloat16() else 0)
    answer = ask(server, "dense", "a", 12)
    assert server.engine()["joined_steps"] == joined
    tokens, tops = prompt_of("dense") + answer["output_ids"], answer["meta_info"]["output_top_logprobs"]

    def apart_from(folder):
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            rows = exact(torch.tensor([tokens])).logits[0, 68:-1].log_softmax(-1)
        pairs = zip(rows, tops, strict=True)
        return [abs(value - row[token].item()) for row, top in pairs for value, token, _ in top]

    near, far = apart_from(merged), apart_from(model)
    assert sum(near) / len(near) < 0.1 and max(near) < 0.6
    assert sum(far) / len(far) > 1
    assert server.stop() == 0
