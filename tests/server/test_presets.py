"""Presets: any number of layers, whatever the server has, and a request's own values on top."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.config import CUSTOM, SPECS, Limits, Policy, PolicyError, choose, describe_presets
from fathom.runtime.plan import choose_span, choose_tsp_layer
from fathom.runtime.presets import PRESETS, boundary
from fathom.server.command.checks import StartError
from fathom.server.command.profile import Profile
from fathom.server.requests.context import Face, RequestContext

LIMITS = Limits(16, 4, {}, 8)
TURBO = PRESETS["turbo"]
NOTHING = dict.fromkeys(("SPEED", "FastKV", "SFI", "SpecPrefill", "drafting"), "not on this machine")


@pytest.fixture(autouse=True, scope="module")
def numbers():
    """These tests are about how a preset is used: its numbers are theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "balanced", {"depth_cutoff": 0.75, "tsp_rate": 0.5, "kv_retention_rate": 0.5})
        yield


def limits_of(layers, **changes):
    span = choose_span(layers, None)
    return replace(Limits(layers, span, {}, choose_tsp_layer(layers, span, None) or 0), **changes)


SHIPPED = {name: dict(values) for name, values in PRESETS.items()}


def test_the_data_holds_legal_values():
    assert list(PRESETS) == list(SPECS["preset"].words)
    for values in SHIPPED.values():
        for name, value in values.items():
            assert SPECS[name].accepts(value, Limits()) or (name == "depth_cutoff" and 0 < value < 1)


def test_the_shipped_numbers_are_those_of_the_documentation():
    lines = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text().splitlines()
    begin = lines.index("| | " + " | ".join(f"`{name}`" for name in SHIPPED) + " |")
    words, told = {"full": "full", "yes": True, "no": False, "3/4 of the layers": 0.75}, {}
    for line in itertools.takewhile(str.strip, lines[begin + 2 :]):
        name, *values = [cell.strip() for cell in line.strip("|").split("|")]
        for preset, value in zip(SHIPPED, values, strict=True):
            told.setdefault(preset, {})[name.split("`")[1]] = words.get(value, value)
    neutral = {name: SPECS[name].neutral for name in told["turbo"]}
    assert set(neutral) == {name for values in SHIPPED.values() for name in values}
    for preset, values in told.items():
        shipped = {**neutral, **SHIPPED[preset]}
        assert list(SHIPPED[preset]) == [name for name in values if name in SHIPPED[preset]]  # who goes first
        assert {name: str(value) for name, value in values.items()} == {
            name: f"{value:g}" if type(value) is float else str(value) for name, value in shipped.items()
        }


@pytest.mark.parametrize(
    ("share", "layers", "span", "expected"),
    [
        (0.75, 32, 8, 24),
        (0.75, 16, 4, 12),
        (0.75, 22, 2, 16),
        (0.5, 4, 3, 3),
        (0.75, 6, 1, 5),
        (0.9, 4, 4, None),
    ],
)
def test_a_share_of_the_layers_is_the_nearest_boundary(share, layers, span, expected):
    """Of 22 layers 16 and not 18 (16.5); of 6 layers 5 and not 4 (4.5: the deeper one)."""
    assert boundary(share, layers, span) == expected


@given(st.integers(1, 130), st.sampled_from(["balanced", "turbo"]))
def test_a_preset_can_be_had_for_any_number_of_layers(layers, name):
    limits = limits_of(layers)
    policy, left_out = choose({"preset": name}, {}, limits)
    if limits.span < layers and limits.tsp_layer < boundary(0.75, layers, limits.span):
        assert policy.preset == name and not left_out.keys() - {"speculative"}
        assert (
            policy.depth_cutoff % limits.span == 0 and abs(policy.depth_cutoff - 0.75 * layers) <= limits.span
        )
    else:
        assert left_out and all(left_out.values())
    again = choose({k: v for k, v in policy.to_wire().items() if k != "preset"}, {}, limits).policy
    assert again == policy


def test_what_the_server_lacks_is_left_out_and_said():
    limits = replace(LIMITS, lacking={"SpecPrefill": "no draft", "drafting": "no draft"})
    policy, left_out = choose({"preset": "turbo"}, {}, limits)
    assert left_out == {
        "prefill_keep_rate": "SpecPrefill is not available here (no draft)",
        "speculative": "drafting is not available here (no draft)",
    }
    assert policy == Policy("turbo", depth_cutoff=12, tsp_rate=0.2, kv_retention_rate=0.2, decode="slow_fast")
    policy, left_out = choose({"preset": "turbo"}, {}, replace(LIMITS, lacking=NOTHING))
    assert policy == Policy() and left_out.keys() == TURBO.keys()


def test_what_is_given_must_be_possible_and_goes_before_the_preset():
    policy, left_out = choose({"preset": "balanced", "kv_retention_rate": 0.3}, {}, LIMITS)
    assert policy == Policy(CUSTOM, depth_cutoff=12, tsp_rate=0.5, kv_retention_rate=0.3) and not left_out
    policy, left_out = choose({"preset": "balanced", "depth_cutoff": 8}, {}, LIMITS)
    assert policy == Policy(CUSTOM, depth_cutoff=8, kv_retention_rate=0.5)
    assert left_out == {"tsp_rate": "selects above layer 8, where depth_cutoff 8 leaves nothing"}
    policy, left_out = choose({"preset": "balanced", "kv_retention_rate": 0.5}, {}, LIMITS)
    assert policy.preset == "balanced"
    with pytest.raises(PolicyError, match="SPEED is not available"):
        choose({"preset": "balanced", "depth_cutoff": 8}, {}, replace(LIMITS, lacking=NOTHING))


def test_the_operators_preset_is_a_requests_ground():
    asked = {"preset": "balanced", "tsp_rate": 0.25}
    default = choose(None, asked, LIMITS).policy
    assert default == Policy(CUSTOM, depth_cutoff=12, tsp_rate=0.25, kv_retention_rate=0.5)
    assert choose({"kv_retention_rate": 1.0}, asked, LIMITS).policy == replace(default, kv_retention_rate=1.0)
    assert choose({"preset": "exact"}, asked, LIMITS).policy == Policy()
    with pytest.raises(PolicyError, match="a depth_cutoff above 8"):
        choose({"depth_cutoff": 8}, asked, LIMITS)
    policy, left_out = choose({"depth_cutoff": 8}, {"preset": "balanced"}, LIMITS)
    assert policy.tsp_rate == 1 and left_out.keys() == {"tsp_rate"}


def test_tunings_refine_a_preset_that_says_nothing_of_them():
    presets = {**PRESETS, "turbo": {**TURBO, "lookahead": 3}}
    tunings = {"min_prompt_tokens": 256, "lookahead": 5}
    policy, _ = choose({"preset": "turbo"}, {}, replace(LIMITS, presets=presets), tunings)
    assert (policy.preset, policy.min_prompt_tokens, policy.lookahead) == ("turbo", 256, 3)


def test_the_face_learns_what_the_preset_comes_to():
    face = Face(asked={"preset": "balanced"})
    face.learn(LIMITS)
    assert face.default == Policy("balanced", depth_cutoff=12, tsp_rate=0.5, kv_retention_rate=0.5)
    face.learn(replace(LIMITS, lacking={"SPEED": "sliding windows"}))
    assert face.default == Policy("balanced", tsp_rate=0.5, kv_retention_rate=0.5)
    assert face.choice.left_out == {"depth_cutoff": "SPEED is not available here (sliding windows)"}


def test_an_answer_says_what_was_left_out():
    report = {"prompt_tokens": 3}
    plain = RequestContext("/generate", Policy(), 0.0).describe([report])
    assert "left_out" not in plain
    context = RequestContext("/generate", Policy("turbo"), 0.0, {"speculative": "no draft"})
    assert context.describe([report]) == plain | {"preset": "turbo", "left_out": {"speculative": "no draft"}}


def test_the_description_of_presets():
    described = describe_presets(replace(LIMITS, lacking={"FastKV": "tensor parallelism"}))
    assert described["exact"] == {"values": {}, "left_out": {}}
    assert described["balanced"]["values"] == {"depth_cutoff": 12}
    assert described["balanced"]["left_out"].keys() == {"tsp_rate", "kv_retention_rate"}


def test_a_profile_replaces_numbers(tmp_path):
    path = tmp_path / "p.json"
    own = {"balanced": {"depth_cutoff": 8, "decode": "slow_fast"}}
    Profile(16, presets=own).write(path)
    profile = Profile.read(path)
    assert profile == Profile(16, None, {}, own)
    limits = replace(LIMITS, presets=profile.over(PRESETS))
    assert choose({"preset": "balanced"}, {}, limits).policy == Policy(
        "balanced", depth_cutoff=8, decode="slow_fast"
    )
    assert choose({"preset": "turbo"}, {}, limits).policy == choose({"preset": "turbo"}, {}, LIMITS).policy


@pytest.mark.parametrize(
    ("presets", "message"),
    [
        (
            {"exact": {"decode": "slow_fast"}},
            "presets.exact cannot be set; legal: conversation, balanced, turbo",
        ),
        ({"fast": {}}, "presets.fast cannot be set"),
        ([1], "presets must be an object of objects"),
        ({"turbo": {"depth": 3}}, "presets.turbo.depth is not a policy field"),
        ({"turbo": {"preset": "exact"}}, "presets.turbo.preset is not a policy field"),
        ({"turbo": {"tsp_rate": 2}}, "presets.turbo.tsp_rate must be in (0, 1], got 2"),
        ({"turbo": {"depth_cutoff": 1.5}}, "or a share of the layers in (0, 1), got 1.5"),
    ],
)
def test_a_profile_with_an_illegal_preset(presets, message, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"fathom_profile": 1, "layers": 16, "presets": presets}))
    with pytest.raises(StartError) as caught:
        Profile.read(path)
    assert message in str(caught.value)
