"""A running server over HTTP: unmodified clients, every route, every refusal."""

import json
import re
import time

import anthropic
import httpx
import openai
import pytest
from waiting import one_of_three, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/generate"
ROUTES = [CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE]
HELLO = [{"role": "user", "content": "Where is the red box?"}]
COUNTERS = {"prompt_tokens", "kept_tokens", "cached_tokens", "kv_bytes", "kv_bytes_dense", "decode_steps"}


@pytest.fixture(scope="module")
def client(server):
    return server.client


@pytest.fixture(scope="module")
def model(server):
    return server.openai.models.list().data[0].id


@pytest.fixture(scope="module")
def body(model):
    """A small request in each route's form."""

    def build(route, tokens=4, text=None, **members):
        text = text or HELLO[0]["content"]
        messages = [{"role": "user", "content": text}]
        forms = {
            CHAT: {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0},
            COMPLETIONS: {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0},
            RESPONSES: {"model": model, "input": text, "max_output_tokens": tokens, "temperature": 0},
            MESSAGES: {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0},
            GENERATE: {
                "text": text,
                "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            },
        }
        return forms[route] | members

    return build


def events_of(text):
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def message_of(body):
    error = body.get("error", body)
    return error["message"]


def check_account(account, generations=1):
    assert account["preset"] == "exact"
    assert account["generations"] == generations
    assert account.keys() >= COUNTERS
    assert account["prompt_tokens"] == account["kept_tokens"] > 0
    assert account["kv_bytes"] == account["kv_bytes_dense"] > 0
    assert "first_token_time" not in account


def test_where_the_time_of_an_answer_went_is_told(client, body):
    """Alone, in at most one group of tokens: its stages follow each other, and its pace is that of its steps."""
    meta = client.post(GENERATE, json=body(GENERATE, 40, "Where does it go?")).json()["meta_info"]
    told = meta["fathom"]
    stages = [told[name] for name in ("queue_seconds", "prefill_seconds", "decode_seconds")]
    assert min(stages) > 0 and told["draft_prefill_seconds"] == 0
    assert sum(stages) < meta["e2e_latency"]
    decoding = (meta["completion_tokens"] - 1) / meta["decode_throughput"]
    assert 0.9 * told["decode_seconds"] < decoding < meta["e2e_latency"] - told["prefill_seconds"] / 2


def test_the_scheduler_process_tells_what_it_runs(client):
    info = client.get("/fathom/info").json()
    engine = info["engine"][0]
    assert engine["scheduler"].endswith(".FathomScheduler")
    assert engine["worker"].endswith(".FathomWorker")
    assert (engine["dtype"], engine["quantization"], engine["kv_dtype"]) == ("float32", None, "float32")
    assert info["policy"]["preset"] == "exact"
    assert info["fields"]["depth_cutoff"]["legal"] == 'an integer in [1, 4] or "full"'
    assert info["schema"]["additionalProperties"] is False
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", info["versions"]["fathom"])


class TestUnmodifiedOpenAI:
    def test_chat(self, server, model):
        answer = server.openai.chat.completions.create(
            model=model, messages=HELLO, max_tokens=6, temperature=0
        )
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens == 6
        check_account(answer.fathom)
        assert answer.fathom["prompt_tokens"] == answer.usage.prompt_tokens

    def test_chat_with_a_policy(self, server, model):
        answer = server.openai.chat.completions.create(
            model=model,
            messages=HELLO,
            max_tokens=3,
            extra_body={"fathom": {"preset": "exact", "decode": "full"}},
        )
        check_account(answer.fathom)

    def test_streaming_says_the_same(self, server, model):
        ask = {"model": model, "messages": HELLO, "max_tokens": 12, "temperature": 0}
        whole = server.openai.chat.completions.create(**ask)
        chunks = list(
            server.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        carrying = [chunk for chunk in chunks if getattr(chunk, "fathom", None)]
        assert len(carrying) == 1 and carrying[0].choices[0].finish_reason == "length"
        check_account(carrying[0].fathom)
        assert chunks[-1].usage.completion_tokens == 12

    def test_completions(self, server, model):
        ask = {"model": model, "prompt": "The red box", "max_tokens": 8, "temperature": 0}
        whole = server.openai.completions.create(**ask)
        chunks = list(server.openai.completions.create(**ask, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        check_account(whole.fathom)
        check_account(chunks[-1].fathom)

    def test_stop_strings(self, server, model):
        ask = {"model": model, "prompt": "The red box", "max_tokens": 30, "temperature": 0}
        text = server.openai.completions.create(**ask).choices[0].text
        stop = text[len(text) // 2 :][:3]
        stopped = server.openai.completions.create(**ask, stop=[stop]).choices[0]
        assert stopped.finish_reason == "stop"
        assert stopped.text == text[: text.index(stop)]

    def test_a_seed_repeats_the_sample(self, server, model):
        ask = {"model": model, "prompt": "The red box", "max_tokens": 12, "temperature": 1.0}
        texts = [server.openai.completions.create(**ask, seed=seed).choices[0].text for seed in (7, 7, 8)]
        assert texts[0] == texts[1]
        assert texts[0] != texts[2]

    def test_logprobs(self, server, model):
        answer = server.openai.chat.completions.create(
            model=model, messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
        )
        content = answer.choices[0].logprobs.content
        assert len(content) == 4
        for token in content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 3
            assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs), abs=1e-4)

    @pytest.mark.parametrize("stream", [False, True])
    def test_two_answers(self, server, model, stream):
        made = server.openai.chat.completions.create(
            model=model, messages=HELLO, max_tokens=5, n=2, temperature=1, stream=stream
        )
        if not stream:
            assert [choice.index for choice in made.choices] == [0, 1]
            check_account(made.fathom, generations=2)
            return
        chunks = list(made)
        assert {chunk.choices[0].index for chunk in chunks} == {0, 1}
        carrying = [chunk for chunk in chunks if getattr(chunk, "fathom", None)]
        assert carrying == chunks[-1:]
        check_account(carrying[0].fathom, generations=2)

    def test_a_json_schema_is_obeyed(self, server, model):
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
            "required": ["ok", "n"],
            "additionalProperties": False,
        }
        answer = server.openai.chat.completions.create(
            model=model,
            messages=HELLO,
            max_tokens=60,
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        )
        value = json.loads(answer.choices[0].message.content)
        assert isinstance(value["ok"], bool) and value["n"] in (1, 2)

    @pytest.mark.parametrize(("stream", "limit"), [(False, 1), (False, 8), (True, 8)])
    def test_responses(self, server, model, stream, limit):
        ask = {"model": model, "input": "Where?", "max_output_tokens": limit, "temperature": 0}
        made = server.openai.responses.create(**ask, stream=stream)
        response = list(made)[-1].response if stream else made
        assert response.usage.output_tokens == limit
        check_account(response.fathom)

    def test_a_refusal_is_a_bad_request_error(self, server, model):
        for create in (
            lambda **more: server.openai.chat.completions.create(model=model, messages=HELLO, **more),
            lambda **more: server.openai.completions.create(model=model, prompt="x", **more),
            lambda **more: server.openai.responses.create(model=model, input="x", **more),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                create(extra_body={"fathom": {"lookahead": 99}})
            assert caught.value.param == "fathom.lookahead"
            assert "fathom.lookahead must be an integer in [1, 64], got 99" in str(caught.value)


class TestUnmodifiedAnthropic:
    @pytest.fixture
    def claude(self, server):
        return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

    def test_messages(self, claude, model):
        answer = claude.messages.create(model=model, max_tokens=5, messages=HELLO)
        assert answer.content[0].type == "text" and answer.usage.output_tokens == 5
        check_account(answer.fathom)

    def test_streaming(self, claude, model):
        with claude.messages.stream(model=model, max_tokens=5, messages=HELLO) as stream:
            events = list(stream)
        carrying = [event for event in events if getattr(event, "fathom", None)]
        assert [event.type for event in carrying] == ["message_delta"]
        check_account(carrying[0].fathom)

    def test_a_stop_sequence_is_told(self, claude, model):
        ask = {"model": model, "max_tokens": 30, "messages": HELLO, "extra_body": {"temperature": 0}}
        whole = claude.messages.create(**ask)
        text = whole.content[0].text
        assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
        ask["stop_sequences"] = ["never said", text[len(text) // 2 :][:3]]
        with claude.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        for answer in (claude.messages.create(**ask), streamed):
            assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ask["stop_sequences"][1])
            assert answer.content[0].text == text[: text.index(answer.stop_sequence)]

    def test_a_refusal(self, claude, model):
        with pytest.raises(
            anthropic.BadRequestError, match=r'fathom\.decode must be one of "slow_fast", "full"'
        ):
            claude.messages.create(
                model=model, max_tokens=5, messages=HELLO, extra_body={"fathom": {"decode": "slow"}}
            )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("policy", [None, {"preset": "exact"}, {"depth_cutoff": 4, "tsp_rate": 1}])
def test_every_route_accounts_for_its_answer(client, body, route, policy):
    members = {} if policy is None else {"fathom": policy}
    check_account(client.post(route, json=body(route, **members)).json()["fathom"])
    reply = client.post(route, json=body(route, stream=True, **members))
    carrying = [event for event in events_of(reply.text) if "fathom" in event]
    assert len(carrying) == 1
    check_account(carrying[0]["fathom"])


def test_a_batch_accounts_for_each_item(client):
    ask = {"text": ["one", "two words"], "sampling_params": {"max_new_tokens": 3}}
    for item in client.post(GENERATE, json=ask).json():
        check_account(item["fathom"])
        assert item["fathom"]["prompt_tokens"] == item["meta_info"]["prompt_tokens"]
    events = events_of(client.post(GENERATE, json=ask | {"stream": True}).text)
    assert [event["fathom"]["generations"] for event in events if "fathom" in event] == [2]


def test_a_beam_search_accounts_for_its_policy(client, body):
    plain, beams = body(GENERATE), body(GENERATE)
    beams["sampling_params"] |= {"beam_width": 2}
    found = [client.post(GENERATE, json=ask).json()["fathom"] for ask in (plain, beams)]
    assert found[0]["policy"] == found[1]["policy"] and found[1]["policy"]["preset"] == "exact"
    check_account(found[1])


LONG = "red box " * 9000
NO_DRAFT = "no draft model is loaded; start with --draft-model-path"
REFUSED = [
    ({"fathom": {"prefill_keep_rate": 1.7}}, 'fathom.prefill_keep_rate must be in (0, 1] or "auto", got 1.7'),
    (
        {"fathom": {"prefill_keep_rate": 0.5}},
        f"SpecPrefill is not available here ({NO_DRAFT}); legal: 1.0, got 0.5",
    ),
    ({"fathom": {"lookahead": 0}}, "fathom.lookahead must be an integer in [1, 64], got 0"),
    ({"fathom": {"depth_cutoff": 0}}, 'fathom.depth_cutoff must be an integer in [1, 4] or "full", got 0'),
    ({"fathom": {"depth_cutoff": 5}}, 'fathom.depth_cutoff must be an integer in [1, 4] or "full", got 5'),
    ({"fathom": {"anchors": "x"}}, 'fathom.anchors must be one of "bos", "none", got "x"'),
    ({"fathom": {"tsp_rate": 0.2, "depth_cutoff": 2}}, "legal: 1.0, or a depth_cutoff above 2; got 0.2"),
    ({"fathom": {"kv_retention_rate": 0}}, "fathom.kv_retention_rate must be in (0, 1], got 0"),
    (
        {"fathom": {"retention_policy": 1}},
        'fathom.retention_policy must be one of "saliency", "streaming", "random", got 1',
    ),
    ({"fathom": {"decode": "slow"}}, 'fathom.decode must be one of "slow_fast", "full", got "slow"'),
    (
        {"fathom": {"speculative": True}},
        f"drafting is not available here ({NO_DRAFT}); legal: false, got true",
    ),
    (
        {"fathom": {"preset": "fast"}},
        'fathom.preset must be one of "exact", "conversation", "balanced", "turbo", got "fast"',
    ),
    ({"fathom": {"preset": "turbo", "speculative": True}}, f"drafting is not available here ({NO_DRAFT})"),
    ({"fathom": {"depth": 3}}, "fathom.depth is not a policy field; legal fields: preset, "),
    ({"fathom": 1}, "fathom must be an object, got 1"),
    ({"sampling_params": {"custom_params": {"fathom": {}}}}, "custom_params.fathom is reserved"),
    ({"extra_key": "fathom/0123456789abcdef/"}, 'extra_key must not start with "fathom/"'),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("members", "message"), REFUSED, ids=[json.dumps(r[0]) for r in REFUSED])
def test_every_refusal(client, body, route, members, message):
    if route == MESSAGES and "extra_key" in members:
        members, message = {"custom_params": {"fathom": 1}}, "custom_params.fathom is reserved"
    reply = client.post(route, json=body(route) | members)
    assert reply.status_code == 400
    assert message in message_of(reply.json())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "case",
    [
        (b'{"bad', "the request body is not valid JSON"),
        (b"[]", "the request body must be a JSON object"),
        ({"temperature": -1, "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"n": 0, "sampling_params": {"n": 0}}, "n must be an integer in [1, 128], got 0"),
        ({"messages": 3, "prompt": {}, "input": 3, "text": 3}, "Input should be a valid list"),
    ],
    ids=["json", "list", "temperature", "n", "type"],
)
def test_a_bad_request_is_a_400_that_shows_no_insides(client, body, route, case):
    content, message = case
    raw = content if isinstance(content, bytes) else json.dumps(body(route) | content).encode()
    reply = client.post(route, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert message in message_of(reply.json())
    assert not re.search(r'Traceback|File "|\.py\b|\.cc\b|site-packages|/srt/', reply.text)


@pytest.mark.parametrize("route", ROUTES)
def test_a_prompt_over_the_context_length(client, body, route):
    reply = client.post(route, json=body(route, text=LONG))
    assert reply.status_code == 400
    assert re.search(
        r"input \(\d+ tokens\) is longer than the model's context length", message_of(reply.json())
    )


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_streamed_prompt_over_the_context_length(client, body, route):
    assert client.post(route, json=body(route, text=LONG, stream=True)).status_code == 400


@pytest.mark.parametrize("route", [RESPONSES, MESSAGES, GENERATE])
def test_routes_that_have_begun_to_stream_say_it_inside(client, body, route):
    reply = client.post(route, json=body(route, text=LONG, stream=True))
    assert "longer than the model's context length" in reply.text


def test_unknown_sampling_parameters_and_schemas_are_named(client, body):
    for name in ("temprature", "", "it's", "x" * 100):
        ask = body(GENERATE)
        ask["sampling_params"][name] = 1
        reply = client.post(GENERATE, json=ask)
        assert reply.status_code == 400
        assert message_of(reply.json()) == f"sampling_params.{name[:40]} is not a sampling parameter"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    reply = client.post(CHAT, json=body(CHAT, response_format=schema))
    assert reply.status_code == 400
    assert "nonsense" in message_of(reply.json()) and "/" not in message_of(reply.json())


def test_routes_without_a_policy_run_the_default(client, model, body):
    reply = client.post("/invocations", json=body(CHAT))
    assert reply.status_code == 200
    reply = client.post("/invocations", json=body(CHAT, extra_key="fathom/0123456789abcdef/"))
    assert reply.status_code == 400


def metrics(client):
    """Sums, counts and counters of our series, by name and labels."""
    found = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("fathom:") and "_bucket" not in line:
            key, value = line.rsplit(" ", 1)
            found[key] = float(value)
    return found


def difference(before, after, name, **labels):
    """How much a series grew, over all its labels that match."""
    keys = [key for key in after if key.startswith(name + "{")]
    keys = [key for key in keys if all(f'{label}="{value}"' in key for label, value in labels.items())]
    return sum(after[key] - before.get(key, 0) for key in keys)


def test_tokens_and_outcomes_are_counted_once(client, body):
    before = metrics(client)
    client.post(CHAT, json=body(CHAT, tokens=5, n=3))
    client.post(CHAT, json=body(CHAT, tokens=5, stream=True))
    client.post(CHAT, json=body(CHAT, text=LONG))
    after = metrics(client)
    where = {"route": CHAT, "preset": "exact"}
    assert difference(before, after, "fathom:requests_total", outcome="length", **where) == 4
    assert difference(before, after, "fathom:requests_total", outcome="refused", **where) == 1
    assert difference(before, after, "fathom:requests_total") == 5
    assert difference(before, after, "fathom:request_output_tokens_total", **where) == 20
    assert difference(before, after, "fathom:time_to_first_token_seconds_count", **where) == 4
    assert difference(before, after, "fathom:time_per_output_token_seconds_count", **where) == 4
    text = client.get("/metrics").text
    assert "sglang:time_to_first_token_seconds_bucket" in text
    assert 'le="300.0"' in text


def long_prompt(number):
    """About 4,000 tokens that share no prefix with another number's."""
    return f"{number} and " + "the red box is in the old house . " * 400


def timed_stream(client, ask):
    """Seconds to the first token, to the last, and the number of tokens, by this process's clock."""
    start, times = time.perf_counter(), []
    with client.stream("POST", GENERATE, json=ask | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                last = json.loads(line[6:])
    return times[0] - start, times[-1] - start, last["meta_info"]["completion_tokens"]


@pytest.mark.alone
@one_of_three
def test_streaming_times_agree_with_the_clients_clock(client, body):
    before = metrics(client)
    runs = [timed_stream(client, body(GENERATE, tokens=30, text=long_prompt(n))) for n in range(3)]
    after = metrics(client)
    ttft = sum(first for first, _, _ in runs)
    tpot = sum((end - first) / (tokens - 1) for first, end, tokens in runs)
    latency = sum(end for _, end, _ in runs)
    assert [tokens for _, _, tokens in runs] == [30] * 3
    measured = {
        name: difference(before, after, f"fathom:{name}_seconds_sum", route=GENERATE) for name in TIMES
    }
    assert measured["time_to_first_token"] == pytest.approx(ttft, rel=0.1)
    assert measured["time_per_output_token"] == pytest.approx(tpot, rel=0.1)
    assert measured["request_latency"] == pytest.approx(latency, rel=0.1)


TIMES = ("time_to_first_token", "time_per_output_token", "request_latency")


@pytest.mark.alone
@one_of_three
def test_times_without_streaming_are_those_of_the_engine(client, body):
    """The HTTP process sees such outputs in groups of fifty: its own clock would put them all at the end."""
    streamed = [timed_stream(client, body(GENERATE, tokens=45, text=long_prompt(n))) for n in range(10, 12)]
    before, latency = metrics(client), 0.0
    for number in range(20, 22):
        start = time.perf_counter()
        client.post(GENERATE, json=body(GENERATE, tokens=45, text=long_prompt(number)))
        latency += time.perf_counter() - start
    after = metrics(client)
    measured = {
        name: difference(before, after, f"fathom:{name}_seconds_sum", route=GENERATE) for name in TIMES
    }
    assert measured["request_latency"] == pytest.approx(latency, rel=0.1)
    decoding = measured["time_per_output_token"] * 44
    assert measured["time_to_first_token"] + decoding == pytest.approx(measured["request_latency"], rel=1e-6)
    assert decoding == pytest.approx(sum(end - first for first, end, _ in streamed), rel=0.5)


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_request_is_counted_and_not_timed(client, body, stream):
    before = metrics(client)
    ask = body(GENERATE, tokens=4000, stream=stream)
    if stream:
        with client.stream("POST", GENERATE, json=ask) as reply:
            next(reply.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post(GENERATE, json=ask, timeout=2)
    wait_until(lambda: difference(before, metrics(client), "fathom:requests_total", outcome="abort"))
    after = metrics(client)
    assert difference(before, after, "fathom:requests_total", outcome="abort", route=GENERATE) == 1
    assert difference(before, after, "fathom:time_to_first_token_seconds_count") == 0
    check_account(client.post(GENERATE, json=body(GENERATE)).json()["fathom"])


@pytest.mark.alone
@one_of_three
def test_tokens_are_sent_as_they_are_made(client, body):
    """They must arrive spread over the time that decoding took: nothing on the way gathers the stream."""
    before = metrics(client)
    first, end, tokens = timed_stream(client, body(GENERATE, tokens=200))
    tpot = difference(before, metrics(client), "fathom:time_per_output_token_seconds_sum", route=GENERATE)
    assert tokens == 200
    assert end - first > 0.5 * tpot * (tokens - 1)
