"""The policy: legal values pass, illegal ones are named, the wire and the cache key are faithful."""

import argparse
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime import config
from fathom.runtime.config import CUSTOM, Limits, Policy, PolicyError
from fathom.runtime.fastkv.policies import RETENTION_POLICIES
from fathom.runtime.presets import PRESETS
from fathom.runtime.specprefill.config import PROTECTABLE
from fathom.server.command import flags

ALL = frozenset({"SpecPrefill", "SPEED", "FastKV", "SFI", "drafting"})
LIMITS = Limits(layers=16, span=4, sfi_selected=500)


def parse(request, default, limits, tunings=None):
    """The policy that a request gets, where the operator asked for the values of another."""
    return config.choose(request, default.differences(), limits, tunings).policy


@pytest.fixture
def every_mechanism(monkeypatch):
    monkeypatch.setattr(config, "MECHANISMS", ALL)


rates = st.floats(min_value=0, max_value=1, exclude_min=True, allow_nan=False)
LEGAL = {
    "preset": st.sampled_from(list(PRESETS)),
    "prefill_keep_rate": rates | st.just("auto"),
    "lookahead": st.integers(1, 64),
    "min_prompt_tokens": st.integers(0, 10000),
    "prefill_selection": st.sampled_from(["attention", "random"]),
    "prefill_protect": st.lists(st.sampled_from(PROTECTABLE), max_size=6),
    "depth_cutoff": st.sampled_from([4, 8, 12, 16, "full"]),
    "anchors": st.sampled_from(["bos", "none"]),
    "tsp_rate": rates,
    "kv_retention_rate": rates,
    "retention_policy": st.sampled_from(list(RETENTION_POLICIES)),
    "decode": st.sampled_from(["slow_fast", "full"]),
    "sfi_selection": st.sampled_from(["fused", "frozen", "random", "none"]),
    "sfi_budget": st.integers(1, 500) | st.just("server"),
    "sfi_window": st.integers(1, 10000) | st.just("server"),
    "speculative": st.booleans(),
    "draft_tokens": st.integers(1, 16),
}
requests = st.fixed_dictionaries({}, optional=LEGAL)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def test_every_field_has_a_strategy():
    assert LEGAL.keys() == config.SPECS.keys()


@given(requests)
def test_legal_values_survive_the_wire(request_object):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "MECHANISMS", ALL)
        policy = parse(request_object, Policy(), LIMITS)
        wire = json.loads(json.dumps(policy.to_wire()))
        assert Policy(**wire) == policy
        flat = [each for value in wire.values() for each in (value if isinstance(value, list) else [value])]
        assert all(isinstance(value, str | int | float | bool) for value in flat)
        hash(tuple(policy.to_wire().items()))  # the engine keeps plans by it
        assert parse({k: v for k, v in wire.items() if k != "preset"}, Policy(), LIMITS) == policy


@given(st.sampled_from(sorted(config.SPECS)), json_values)
def test_any_json_value_is_taken_or_refused_by_name(name, value):
    try:
        policy = parse({name: value}, Policy(), LIMITS)
    except PolicyError as error:
        assert error.field == name
        assert str(error).startswith(f"fathom.{name}")
        assert "must be" in str(error) or "legal:" in str(error) or "nearest:" in str(error)
    else:
        # What only refines a mechanism that is not asked for is as it was.
        assert name == "preset" or getattr(policy, name) in (value, getattr(Policy(), name))


@given(st.dictionaries(st.text(max_size=8), json_values, min_size=1, max_size=3))
def test_any_object_raises_nothing_but_policy_errors(request_object):
    if request_object.keys() - config.SPECS.keys():
        with pytest.raises(PolicyError):
            parse(request_object, Policy(), LIMITS)


@given(requests, requests)
def test_fingerprints_tell_apart_what_computes_prompts_differently(one, other):
    later = ("preset", "decode", "sfi_selection", "sfi_budget", "sfi_window", "draft_tokens")
    later += ("kv_retention_rate", "retention_policy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "MECHANISMS", ALL)
        first, second = parse(one, Policy(), LIMITS), parse(other, Policy(), LIMITS)
        values = [{k: v for k, v in vars(each).items() if k not in later} for each in (first, second)]
        assert (first.fingerprint() == second.fingerprint()) == (values[0] == values[1])
        assert len(first.fingerprint()) <= 16


BUSY = {"prefill_keep_rate": 0.2, "depth_cutoff": 8, "tsp_rate": 0.2, "kv_retention_rate": 0.2}
BUSY |= {"decode": "slow_fast", "speculative": True}
EARLIER = {"prefill_keep_rate": 0.3, "lookahead": 4, "min_prompt_tokens": 0, "prefill_selection": "random"}
EARLIER |= {
    "prefill_protect": ("user",),
    "depth_cutoff": 12,
    "anchors": "none",
    "tsp_rate": 0.3,
    "speculative": False,
}
LATER = {"kv_retention_rate": 0.3, "retention_policy": "random", "decode": "full", "sfi_selection": "random"}
LATER |= {"sfi_budget": 8, "sfi_window": 8, "draft_tokens": 2}


@pytest.mark.parametrize("name", [name for name in config.SPECS if name != "preset"])
def test_each_field_alone_is_in_the_fingerprint_if_prompts_are_computed_by_it(name, every_mechanism):
    changed = BUSY | {name: (EARLIER | LATER)[name]}
    one, other = (parse(each, Policy(), LIMITS).fingerprint() for each in (BUSY, changed))
    assert (one != other) == (name in EARLIER)


@pytest.mark.parametrize(
    ("request_object", "message"),
    [
        ({"prefill_keep_rate": 1.7}, 'fathom.prefill_keep_rate must be in (0, 1] or "auto", got 1.7'),
        ({"prefill_keep_rate": 0}, 'fathom.prefill_keep_rate must be in (0, 1] or "auto", got 0'),
        ({"prefill_keep_rate": True}, 'fathom.prefill_keep_rate must be in (0, 1] or "auto", got true'),
        ({"lookahead": 65}, "fathom.lookahead must be an integer in [1, 64], got 65"),
        ({"lookahead": 8.5}, "fathom.lookahead must be an integer in [1, 64], got 8.5"),
        ({"depth_cutoff": 17}, 'fathom.depth_cutoff must be a multiple of 4 in [4, 16] or "full", got 17'),
        ({"anchors": "eos"}, 'fathom.anchors must be one of "bos", "none", got "eos"'),
        ({"speculative": "yes"}, 'fathom.speculative must be true or false, got "yes"'),
        (
            {"preset": "fast"},
            'fathom.preset must be one of "exact", "conversation", "balanced", "turbo", got "fast"',
        ),
        (
            {"preset": None},
            'fathom.preset must be one of "exact", "conversation", "balanced", "turbo", got null',
        ),
        ("turbo", 'fathom must be an object, got "turbo"'),
        ([], "fathom must be an object, got []"),
    ],
)
def test_messages_name_field_value_and_range(request_object, message):
    with pytest.raises(PolicyError) as caught:
        parse(request_object, Policy(), LIMITS)
    assert str(caught.value) == message


def test_an_unknown_field_is_answered_with_the_known_ones():
    with pytest.raises(PolicyError, match=r"fathom\.dept_cutoff is not a policy field; .*depth_cutoff"):
        parse({"dept_cutoff": 4}, Policy(), LIMITS)


@pytest.mark.parametrize(
    ("request_object", "mechanism"),
    [
        ({"prefill_keep_rate": 0.2}, "SpecPrefill"),
        ({"prefill_keep_rate": "auto"}, "SpecPrefill"),
        ({"depth_cutoff": 4}, "SPEED"),
        ({"tsp_rate": 0.2}, "FastKV"),
        ({"kv_retention_rate": 0.1}, "FastKV"),
        ({"decode": "slow_fast"}, "SFI"),
        ({"speculative": True}, "drafting"),
    ],
)
def test_a_mechanism_must_be_in_the_build(request_object, mechanism, monkeypatch):
    monkeypatch.setattr(config, "MECHANISMS", ALL - {mechanism})
    with pytest.raises(PolicyError, match=f"{mechanism} is not available in this build; legal: "):
        parse(request_object, Policy(), LIMITS)
    monkeypatch.setattr(config, "MECHANISMS", ALL)
    assert parse(request_object, Policy(), LIMITS).preset == CUSTOM


@pytest.mark.parametrize(
    "request_object",
    [
        None,
        {},
        {"preset": "exact"},
        {"depth_cutoff": "full", "tsp_rate": 1, "kv_retention_rate": 1.0},
        {"decode": "full", "speculative": False},
        {"depth_cutoff": 16},
        {"lookahead": 3, "anchors": "none", "retention_policy": "random"},
    ],
)
def test_what_asks_for_nothing_is_exact(request_object):
    policy = parse(request_object, Policy(), LIMITS)
    assert policy == Policy()
    assert policy.fingerprint() == "exact"


def test_a_cutoff_off_the_span_names_the_nearest(every_mechanism):
    with pytest.raises(PolicyError, match=r"multiple of 4 layers, got 6; nearest: 4, 8"):
        parse({"depth_cutoff": 6}, Policy(), LIMITS)
    with pytest.raises(PolicyError, match=r"got 3; nearest: 4$"):
        parse({"depth_cutoff": 3}, Policy(), LIMITS)


def test_a_request_refines_the_servers_default(every_mechanism):
    default = parse({"depth_cutoff": 8}, Policy(), LIMITS)
    assert parse({"tsp_rate": 0.5}, default, LIMITS) == replace(default, tsp_rate=0.5)
    assert parse({"preset": "exact"}, default, LIMITS) == Policy()
    assert parse({"depth_cutoff": "full"}, default, LIMITS).preset == "exact"


@given(st.sampled_from(sorted(config.SPECS)), json_values)
def test_the_schema_agrees_with_the_validator(name, value):
    jsonschema = pytest.importorskip("jsonschema")
    schema = config.json_schema()["properties"][name]
    if isinstance(value, float) and value.is_integer():
        return  # JSON Schema counts 8.0 as an integer
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert valid == config.SPECS[name].accepts(value, Limits())


EDGES = [
    -1,
    0,
    1,
    2,
    16,
    17,
    64,
    65,
    10**6,
    0.5,
    1.5,
    -0.5,
    1e-9,
    True,
    None,
    "auto",
    "full",
    "server",
    "none",
    "",
]


@pytest.mark.parametrize("name", config.SPECS)
def test_the_schema_agrees_with_the_validator_at_the_bounds(name):
    jsonschema = pytest.importorskip("jsonschema")
    schema, spec = config.json_schema()["properties"][name], config.SPECS[name]
    validator = jsonschema.Draft202012Validator(schema)
    for value in [*EDGES, *spec.words]:
        assert validator.is_valid(value) == spec.accepts(value, Limits()), value
    assert all(text in schema["description"] for text in (spec.help, spec.unit, spec.source))


@pytest.mark.parametrize("limits", [Limits(), LIMITS, Limits(layers=16, span=1, sfi_selected=500)])
@pytest.mark.parametrize("name", config.SPECS)
def test_the_legal_values_are_said_as_they_are(name, limits):
    """Whoever reads the message knows what is taken: words in quotes, bounds in brackets."""
    spec = config.SPECS[name]
    said = spec.legal(limits)
    assert re.findall('"([^"]*)"', said) == list(spec.words)
    assert said.startswith("a list of ") == spec.several
    assert said.startswith("one of ") == (spec.kind is None and len(spec.words) > 1 and not spec.several)
    if numbers := re.search(r"([\[(])([\d.]+), ([\d.]+)\]", said):
        kind, low, high = spec.kind, *map(spec.kind, numbers.groups()[1:])
        assert spec.accepts(low, limits) == (numbers[1] == "[") and spec.accepts(high, limits)
        outside = [high + 1] if "multiple" in said else [low - 1, high + 1, low - kind(0.5)]
        assert not any(spec.accepts(value, limits) for value in outside if value != low)
    elif least := re.search(r">= (\d+)", said):
        assert spec.accepts(int(least[1]), limits) and not spec.accepts(int(least[1]) - 1, limits)
        assert spec.accepts(10**9, limits)
    else:
        assert ("true or false" in said) == (spec.kind is bool)
        assert spec.kind in (bool, None)


def test_presets_keep_their_names_where_the_operator_says_what_stays():
    """And the order of a list, and what it repeats, is of no matter."""
    limits, kinds = Limits(16, 4, tsp_layer=8), ["user", "tools", "user"]
    choice = config.choose({"preset": "turbo"}, None, limits, {"prefill_protect": kinds})
    assert (choice.policy.preset, choice.policy.prefill_protect) == ("turbo", ("tools", "user"))
    again = config.choose({"preset": "turbo", "prefill_protect": ["tools", "user"]}, None, limits)
    assert again.policy.fingerprint() == choice.policy.fingerprint()
    assert again.policy.fingerprint() != config.choose({"preset": "turbo"}, None, limits).policy.fingerprint()
    unused = config.choose({"depth_cutoff": 8, "prefill_protect": []}, None, limits).policy
    assert unused.prefill_protect == Policy().prefill_protect


def test_a_flags_word_that_is_no_number_is_refused_like_any_other_value():
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    with pytest.raises(PolicyError, match=r'^--tsp-rate must be in \(0, 1\], got "much"$'):
        flags.asked_by(parser.parse_args(["--tsp-rate", "much"]))
    asked = flags.asked_by(parser.parse_args(["--prefill-keep-rate", "auto", "--depth-cutoff", "8"]))
    assert asked == {"prefill_keep_rate": "auto", "depth_cutoff": 8}


def test_flags_come_from_the_fields():
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for name, spec in config.SPECS.items():
        assert "--" + name.replace("_", "-") in text
        assert " ".join(spec.legal(Limits()).split()) in text
    assert flags.asked_by(parser.parse_args([])) == {}
    with pytest.raises(PolicyError, match=r"^--tsp-rate must be in \(0, 1\], got 3.0$"):
        flags.asked_by(parser.parse_args(["--tsp-rate", "3"]))
    asked = flags.asked_by(parser.parse_args(["--speculative"]))
    with pytest.raises(PolicyError) as caught:
        config.choose(None, asked, Limits(lacking=config.without_draft()))
    assert flags.as_flag(caught.value).startswith("--speculative: drafting is not available here (no draft")


def test_what_the_model_lacks_is_refused_with_the_reason():
    lacking = Limits(16, 4, {"SPEED": "the model has sliding-window layers"})
    match = (
        r"depth_cutoff: SPEED is not available here \(the model has sliding-window layers\); legal: \"full\""
    )
    with pytest.raises(PolicyError, match=match):
        parse({"depth_cutoff": 8}, Policy(), lacking)
    assert not config.describe(lacking)["depth_cutoff"]["available"]
    assert parse({"depth_cutoff": 16}, Policy(), lacking) == Policy()


def test_what_fast_steps_read_is_bounded_by_the_compact_buffers(every_mechanism):
    policy = parse({"decode": "slow_fast", "sfi_budget": 500, "sfi_window": 9000}, Policy(), LIMITS)
    assert (policy.sfi_budget, policy.sfi_window) == (500, 9000)
    with pytest.raises(PolicyError, match=r'^fathom\.sfi_budget must be .* \[1, 500\] or "server", got 501$'):
        parse({"decode": "slow_fast", "sfi_budget": 501}, Policy(), LIMITS)
    assert parse({"sfi_budget": 5}, Policy(), LIMITS) == Policy()  # no effect without slow_fast


def test_a_whole_number_is_the_same_rate(every_mechanism):
    """However JSON writes it: one name, one key of the prefix cache."""
    one, other = ({"depth_cutoff": 8, "tsp_rate": rate, "prefill_keep_rate": rate} for rate in (1, 1.0))
    policies = [parse(each, Policy(), LIMITS) for each in (one, other, {"depth_cutoff": 8})]
    assert len({policy.fingerprint() for policy in policies}) == 1


def test_what_the_operator_asked_for_is_held_against_the_model(every_mechanism):
    """It was legal before the number of layers was known."""
    assert config.choose(None, {"depth_cutoff": 400}).policy.depth_cutoff == 400
    with pytest.raises(PolicyError, match=r"^fathom\.depth_cutoff must be .*, got 400$"):
        config.choose(None, {"depth_cutoff": 400}, LIMITS)


@pytest.mark.parametrize(
    ("request_object", "drops"),
    [({}, False), ({"depth_cutoff": 8}, True), ({"tsp_rate": 0.5}, True), ({"decode": "slow_fast"}, False)],
)
def test_which_policies_drop_tokens(request_object, drops, every_mechanism):
    assert parse(request_object, Policy(), LIMITS).drops_tokens is drops


def test_the_description_covers_every_field():
    described = config.describe(Limits(16, 4, {"SFI": "no tokenizer is loaded"}))
    assert described.keys() == config.SPECS.keys()
    assert described["depth_cutoff"]["legal"] == 'a multiple of 4 in [4, 16] or "full"'
    assert not described["decode"]["available"] and described["preset"]["available"]


def test_the_operators_tunings_are_for_requests_that_give_none(every_mechanism):
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    arguments = parser.parse_args(["--min-prompt-tokens", "300", "--draft-tokens", "6"])
    tunings = flags.tunings_of(arguments, {"lookahead": 5, "draft_tokens": 2})
    assert tunings == {"min_prompt_tokens": 300, "lookahead": 5, "draft_tokens": 6}
    asked = flags.asked_by(arguments)
    default = Policy()
    assert config.choose(None, asked).policy == default
    found = config.choose({"prefill_keep_rate": 0.2}, asked, LIMITS, tunings).policy
    assert (found.min_prompt_tokens, found.lookahead, found.draft_tokens) == (300, 5, 4)
    assert found == parse({"prefill_keep_rate": 0.2}, default, LIMITS, tunings)
    found = parse({"prefill_keep_rate": 0.2, "min_prompt_tokens": 7}, default, LIMITS, tunings)
    assert (found.min_prompt_tokens, found.lookahead) == (7, 5)
    assert (
        parse({}, default, LIMITS, tunings)
        == parse({"preset": "exact"}, default, LIMITS, tunings)
        == Policy()
    )
    default = Policy(prefill_keep_rate=0.5, lookahead=9)
    assert parse({"speculative": True}, default, LIMITS, tunings).lookahead == 9


@pytest.mark.parametrize(
    ("cutoff", "layer", "legal"), [(8, 8, False), (4, 8, False), (12, 8, True), ("full", 8, True)]
)
def test_a_propagation_needs_layers_above_it(cutoff, layer, legal, every_mechanism):
    limits = replace(LIMITS, tsp_layer=layer)
    asked = {"tsp_rate": 0.2, "depth_cutoff": cutoff}
    if legal:
        assert parse(asked, Policy(), limits).tsp_rate == 0.2
    else:
        with pytest.raises(PolicyError, match=r"a depth_cutoff above 8; got 0\.2"):
            parse(asked, Policy(), limits)
    with pytest.raises(PolicyError, match="no boundary between spans"):
        parse({"tsp_rate": 0.2}, Policy(), replace(LIMITS, tsp_layer=0))
