"""What a request may hold: types and ranges that the engine relies on, refused before it sees them."""

import re

import pytest
import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from fathom.server.requests import bounds

VOCABULARY = 2048
LEGAL = [
    {},
    {"temperature": None, "max_new_tokens": None, "skip_special_tokens": None},
    {"temperature": 0, "top_k": -1, "top_p": 1, "n": 128, "stop": ["a"], "stop_token_ids": [7]},
    {"regex": "a+", "ignore_eos": True, "logit_bias": {"2047": -100}, "stream_interval": 1},
    {"temperature": 1e6, "repetition_penalty": 1e-6, "logit_bias": {"1": 1e30, "2": -1e30}},
    {"sampling_seed": 2**62, "custom_params": {"deep": {"er": {}}}, "unheard_of": 1},
]
ILLEGAL = [
    ({"skip_special_tokens": [[]]}, "sampling_params.skip_special_tokens: Expected `bool`"),
    ({"temperature": "hot"}, "sampling_params.temperature: Expected `float`"),
    ({"logit_bias": True}, "sampling_params.logit_bias: Expected"),
    ({"logit_bias": {"2048": 1.0}}, "token ids in [0, 2047] as keys, got '2048'"),
    ({"logit_bias": {"²": 1.0}}, "token ids in [0, 2047] as keys, got '²'"),
    ({"logit_bias": {"7": float("nan")}}, "logit_bias must be in [-1e+30, 1e+30], got nan"),
    ({"logit_bias": {"-1": 1.0}}, "token ids in [0, 2047] as keys, got '-1'"),
    ({"max_new_tokens": 2**40}, "max_new_tokens must be an integer in"),
    ({"max_new_tokens": 1.5}, "sampling_params.max_new_tokens: Expected `int"),
    ({"stop_token_ids": [7, 2048]}, "stop_token_ids must be token ids in [0, 2047], got 2048"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids in [0, 2047], got -1"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids must be token ids in [0, 2047]"),
    ({"sampling_seed": 2**70}, "sampling_seed must be an integer in"),
    ({"sampling_seed": "x"}, "sampling_seed must be an integer in"),
    ({"n": 129}, "n must be an integer in [1, 128], got 129"),
    ({"n": True}, "n must be an integer in [1, 128], got True"),
    ({"beam_width": 10**9}, "beam_width must be an integer in [1, 128]"),
    ({"beam_width": [2]}, "beam_width must be an integer in [1, 128], got [2]"),
    ({"n": [2]}, "n must be an integer in [1, 128], got [2]"),
    ({"sampling_seed": [1]}, "sampling_seed must be an integer in"),
    ({"stop": ""}, "stop must not have an empty text"),
    ({"stop": ["a", ""]}, "stop must not have an empty text"),
    ({"stop_regex": ""}, "stop_regex must not have an empty text"),
    ({"stop_regex": ["a", "(("]}, "stop_regex '((' is not a regular expression"),
    ({"stop_regex": r"\p{L}"}, r"stop_regex '\\p{L}' is not a regular expression"),
    ({"stop_regex": "(" * 5000}, "is not a regular expression"),
    ({"stop_regex": "a{99999999999999999999}"}, "is not a regular expression"),
    ({"stop_regex": "[[:none:]]"}, "stop_regex '[[:none:]]' is not a regular expression"),
    ({"logit_bias": {"7": 1e38}}, "logit_bias must be in [-1e+30, 1e+30], got 1e+38"),
    ({"logit_bias": {"7": -1e31}}, "logit_bias must be in [-1e+30, 1e+30], got -1e+31"),
    ({"temperature": 1e39}, "temperature must be in [0, 1e+06], got 1e+39"),
    ({"repetition_penalty": 1e-50}, "repetition_penalty must be in [1e-06, 2], got 1e-50"),
    ({"stream_interval": 0}, "stream_interval must be an integer in [1, "),
]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *((sampling, told) for sampling, told in ILLEGAL),
        ([1], "must be a JSON object"),
        ({"n": 2}, "n is not for requests that do not say it"),
        ({"beam_width": 2}, "beam_width is not for requests that do not say it"),
        ({"is_normalized": True}, "is_normalized is not for requests"),
        ({"unheard_of": 1}, "unheard_of is not a sampling parameter"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 1.5}, "top_p must be in"),
    ],
)
def test_what_no_request_may_have_is_not_preferred(given, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        bounds.check_preferred(given, VOCABULARY)
    bounds.check_preferred({"temperature": 0.2, "max_new_tokens": 5, "stop": ["a"]}, VOCABULARY)


@pytest.mark.parametrize(
    ("prompts", "sampling", "legal"),
    [
        ({"text": ["a"] * 4096}, {}, True),
        ({"text": ["a"] * 4097}, {}, False),
        ({"input_ids": [[1]] * 32}, {"n": 128}, True),
        ({"input_ids": [[1]] * 33}, {"n": 128}, False),
        ({"text": ["a"] * 64}, [{"n": 65}] * 64, False),
        ({"text": ["a"] * 64}, [*[{}] * 63, {"n": 65}], False),
        ({"text": ["a"] * 65}, [{"n": 63}, *[{}] * 64], True),
    ],
)
def test_a_batch_is_bounded(prompts, sampling, legal):
    asked = GenerateReqInput(**prompts, sampling_params=sampling)
    if legal:
        bounds.check(asked, VOCABULARY)
    else:
        with pytest.raises(ValueError, match=r"at most 4096 generations \(prompts times n\), got "):
            bounds.check(asked, VOCABULARY)


@pytest.mark.parametrize("params", LEGAL)
def test_what_sglang_takes_is_left_as_it_is(params):
    before = dict(params)
    bounds.check_sampling(params, VOCABULARY)
    assert params == before


@pytest.mark.parametrize(("params", "message"), ILLEGAL)
def test_sampling_parameters(params, message):
    for given in (params, [{}, params]):
        with pytest.raises(ValueError) as caught:
            bounds.check(GenerateReqInput(text="a", sampling_params=given), VOCABULARY)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", [1, -1]),
        ("input_ids", [[1], [VOCABULARY]]),
        ("input_ids", [True]),
        ("token_ids_logprob", [VOCABULARY]),
        ("top_logprobs_num", 1025),
        ("top_logprobs_num", [0, -1]),
        ("logprob_start_len", -2),
        ("logprob_start_len", 2**31),
        ("priority", 2**40),
        ("max_thinking_tokens", -1),
        ("return_hidden_states", []),
        ("return_hidden_states", "first"),
        ("return_logprob", [True]),
        ("token_ids_logprob", [[1]]),
        ("rid", ["a"]),
        ("bootstrap_room", 2**70),
        ("bootstrap_host", "2.2.2.2"),
        ("session_params", "a"),
        ("session_params", {"id": {"a": 1}}),
        ("session_params", {"id": "a", "rid": ["b"]}),
        ("session_params", {"id": "a", "offset": 2**40}),
        ("session_params", {"id": "a", "replace": 1}),
        ("session_params", {"id": "a", "turn": 1}),
    ],
)
def test_fields_of_the_request(field, value):
    prompt = {} if field == "input_ids" else {"text": "a"}
    with pytest.raises(ValueError, match=field) as caught:
        bounds.check(GenerateReqInput(**prompt, **{field: value}), VOCABULARY)
    assert "None prompts" not in str(caught.value)


@pytest.mark.parametrize("given", [[[0.5, 0.5]], [[[0.5, 0.5]], [[1.0, 1.0]]], []])
def test_embeddings_are_refused(given):
    with pytest.raises(ValueError, match="input_embeds is not supported"):
        bounds.check(GenerateReqInput(input_embeds=given), VOCABULARY)


def test_labels_for_metrics_are_those_that_the_operator_configured():
    """Any other name would end SGLang's front end, and one of its own would make a series for each value."""
    request = GenerateReqInput(text="a", custom_labels={"tenant": "b"})
    with pytest.raises(ValueError, match="custom_labels are not configured on this server, got 'tenant'"):
        bounds.check(request, VOCABULARY)
    with pytest.raises(ValueError, match="custom_labels must be among team, user, got 'tenant'"):
        bounds.check(request, VOCABULARY, {"user", "team"})
    bounds.check(request, VOCABULARY, {"tenant"})
    bounds.check(GenerateReqInput(text="a", custom_labels={}), VOCABULARY)


def test_several_prompts_may_have_a_value_each():
    request = GenerateReqInput(
        text=["a", "b"],
        rid=["x", "y"],
        return_logprob=[True, False],
        token_ids_logprob=[[1], [2]],
        return_hidden_states=["last", False],
        custom_logit_processor=[None, "x"],
        bootstrap_host=["a", None],
    )
    bounds.check(request, VOCABULARY)
    bounds.check(GenerateReqInput(text=["a", "b"], token_ids_logprob=[1, 2, 3]), VOCABULARY)  # one for both
    request.return_hidden_states = ["last", "first"]
    with pytest.raises(ValueError, match="return_hidden_states: Invalid enum value 'first'"):
        bounds.check(request, VOCABULARY)
    request.return_hidden_states, request.bootstrap_host = False, ["a", "2.2.2.2"]
    with pytest.raises(ValueError, match="bootstrap_host must not be"):
        bounds.check(request, VOCABULARY)


@pytest.mark.parametrize(
    ("member", "several"),
    [
        ({"text": "a"}, None),
        ({"text": ["a"]}, 1),
        ({"text": []}, 0),
        ({"input_ids": [1, 2]}, None),
        ({"input_ids": [[1], [2]]}, 2),
        ({"input_embeds": [[0.5]]}, None),
        ({"input_embeds": [[[0.5]]]}, 1),
        ({}, None),
    ],
)
def test_a_batch_is_what_sglang_takes_for_one(member, several):
    request = GenerateReqInput(**member)
    assert bounds.prompts_of(request) == several
    if several != 0 and member:
        request.normalize_batch_and_arguments()
        assert (None if request.is_single else request.batch_size) == several


@pytest.mark.parametrize(
    "asked",
    [
        {"text": "a", "sampling_params": []},
        {"text": "a", "sampling_params": [{}]},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"text": ["a", "b"], "return_logprob": [True]},
        {"text": ["a", "b"], "rid": ["x", "y", "z"]},
    ],
)
def test_a_list_has_one_value_per_prompt(asked):
    with pytest.raises(ValueError, match=r"one (value )?for each"):
        bounds.check(GenerateReqInput(**asked), VOCABULARY)


def test_ordinary_requests_pass():
    session = {"id": "a", "rid": "b", "offset": 3, "replace": True, "drop_previous_output": False}
    bounds.check(GenerateReqInput(text="a", session_params=session, max_thinking_tokens=0), VOCABULARY)
    request = GenerateReqInput(
        input_ids=[0, VOCABULARY - 1], top_logprobs_num=5, logprob_start_len=-1, priority=3
    )
    bounds.check(request, VOCABULARY)
    with pytest.raises(ValueError, match=r"top_logprobs_num must be an integer in \[0, 4\], got 5"):
        bounds.check(GenerateReqInput(input_ids=[0], top_logprobs_num=5), 4)


EMBEDDED = [
    ({"input_ids": []}, "input_ids must have at least one token for each prompt"),
    ({"input_ids": [[5], []]}, "input_ids must have at least one token for each prompt"),
    ({"input_ids": [[5], 6]}, "input_ids must be a list of token ids, or"),
    ({"input_ids": [2048]}, "input_ids must be token ids in [0, 2047], got 2048"),
    ({"input_ids": [[5], [-1]]}, "input_ids must be token ids in [0, 2047], got -1"),
    ({"text": [["a", "b"]]}, "text must be a text or a list of texts"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params must be an object"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params must be an object"),
    ({"text": "a", "rid": ["r"]}, "rid must be a text for one prompt"),
    ({"text": ["a", "b"], "rid": "r"}, "rid must be a text for one prompt"),
    ({"text": ["a", "b"], "rid": ["r"]}, "rid must have one value for each of 2 prompts, got 1"),
    ({"text": "a", "priority": 2**40}, "priority must be an integer in"),
    ({"input_ids": [5], "embed_overrides": [[1.0]]}, "vectors in the place of tokens"),
    ({"input_ids": [5], "positional_embed_overrides": {"a": 1}}, "vectors in the place of tokens"),
]


@pytest.mark.parametrize(("given", "told"), EMBEDDED)
def test_what_no_embedding_could_be_made_of(given, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        bounds.check_embedding(EmbeddingReqInput(**given), VOCABULARY)


@pytest.mark.parametrize(
    "given",
    [
        {"text": "a", "rid": "r", "sampling_params": {}},
        {"text": ["a", "b"], "rid": ["r", "s"], "sampling_params": [{}, {}]},
        {"text": [["a", "b"], ["a", "c"]], "is_cross_encoder_request": True},
        {"input_ids": [5, 2047], "priority": 3},
        {"input_ids": [[5], [6, 7]], "sampling_params": {}},
        {"text": []},
    ],
)
def test_what_can_be_embedded(given):
    bounds.check_embedding(EmbeddingReqInput(**given), VOCABULARY)


def test_a_text_has_tokens_of_the_model_only():
    """Its tokenizer may know more; what is behind the table of embeddings ends the engine."""
    bounds.check_prompt([], VOCABULARY)
    bounds.check_prompt([0, 2047], VOCABULARY)
    with pytest.raises(ValueError, match="the tokenizer made 2048"):
        bounds.check_prompt([1, 2048], VOCABULARY)
    with pytest.raises(ValueError, match=r"token ids in \[0, 2047\].*the tokenizer made 2050"):
        bounds.check_prompt([1, 2050, 2048], VOCABULARY)


def test_a_minimal_length_holds_off_tokens_of_the_model_only():
    bounds.check_least({"min_new_tokens": 5}, {None, 2047}, VOCABULARY)
    for nothing in ({}, {"min_new_tokens": 0}, {"min_new_tokens": None}):
        bounds.check_least(nothing, {2048}, VOCABULARY)
    with pytest.raises(ValueError, match=r"min_new_tokens must be 0 .* its token 2048 .* in \[0, 2047\]"):
        bounds.check_least({"min_new_tokens": 5}, {3, 2048}, VOCABULARY)


def test_a_prompt_has_no_vectors_in_the_place_of_tokens():
    """However wide: of another width than the model's, or in a prompt that is narrowed, they end the engine."""
    overrides = PositionalEmbeds(embeds=[torch.zeros(64)], positions=[0])
    obj = GenerateReqInput(input_ids=[5, 6], positional_embed_overrides=overrides)
    with pytest.raises(ValueError, match="vectors in the place of tokens"):
        bounds.check(obj, VOCABULARY)


@pytest.mark.parametrize(
    "rid", ["a\n[2026-01-01 00:00:00] b", "\x1b[31m", "a\u2028b", "x" * (bounds.LONGEST_RID + 1)]
)
def test_an_id_that_is_not_fit_for_a_line_of_the_log(rid):
    for given in ({"text": "a", "rid": rid}, {"text": ["a", "b"], "rid": ["x", rid]}):
        with pytest.raises(ValueError, match="rid must be of at most 512 characters that can be printed"):
            bounds.check_clients(GenerateReqInput(**given))
    bounds.check_clients(GenerateReqInput(text="a", rid="chat 7: ü".ljust(bounds.LONGEST_RID, "x")))


def test_what_clients_may_not_ask_for():
    for given in ("", ["x", ""]):
        with pytest.raises(ValueError, match="rid must not be empty"):
            bounds.check_clients(GenerateReqInput(text="a", rid=given))
    for given in (f"{HEALTH_CHECK_RID_PREFIX}_7", ["x", HEALTH_CHECK_RID_PREFIX]):
        with pytest.raises(ValueError, match=f"rid must not begin with {HEALTH_CHECK_RID_PREFIX}"):
            bounds.check_clients(GenerateReqInput(text="a", rid=given))
    with pytest.raises(ValueError, match="log_metrics must be true"):
        bounds.check_clients(GenerateReqInput(text="a", log_metrics=False))
    bounds.check_clients(GenerateReqInput(text="a"))
