"""`fathom explain` against values computed by hand, and its staircase against the engine's own plan."""

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime import config, cost
from fathom.runtime.fastkv.step import config_of as fastkv_config
from fathom.runtime.fastkv.step import propagation_step, retention
from fathom.runtime.plan import build
from fathom.runtime.specprefill.step import config_of as specprefill_config
from fathom.runtime.specprefill.step import step as specprefill_step
from fathom.server import cli
from fathom.server.page import picture
from fathom.server.page.picture import Stair, Staircase

SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 10,
    "dtype": "float32",
    "max_position_embeddings": 4096,
}
POLICY = '{"depth_cutoff": 3, "tsp_rate": 0.5, "kv_retention_rate": 0.25}'


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


@pytest.fixture
def figures(model, capsys):
    """The figures for some options, as a program reads them."""

    def ask(*options):
        assert cli.main(["explain", str(model), "--json", *map(str, options)]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


def test_a_policy_by_hand(figures):
    """100 tokens: T = 2, K = 3. A layer has 576 weights (128 for Q, K and V), the head 80; 32 bytes an entry."""
    found = figures("--prompt-tokens", 100, "--output-tokens", 5, "--policy", POLICY)
    assert [(s["computed"], s["kept"]) for s in found["spans"]] == [(100, 25), (100, 25), (50, 25), (2, 2)]
    dense, policy = found["costs"]["dense"], found["costs"]["policy"]
    # per layer: tokens x 2 x 576, and 2 heads x 4 x 4 for each of n (n + 1) / 2 pairs; 160 for the head
    whole = 115200 + 5050 * 32
    # one token goes through the last layer, which sees 100 of them; two through layer K, and one of two above it
    last = 1152 + 100 * 32 + 99 * 256
    below_k, above_k = 2 * 1152 + (49 + 50) * 32 + 48 * 256, 1152 + 2 * 32 + 256
    assert dense["target_flops"] == 3 * whole + last + 160
    assert policy["target_flops"] == 2 * whole + below_k + above_k + 160
    assert found["ratios"]["ttft"] == pytest.approx(860256 / 572992)
    # a step reads (4 x 576 + 80) x 4 bytes of weights; KV of 77 and 400 entries, and of 1 to 4 generated tokens
    assert dense["step_weight_bytes"] == policy["step_weight_bytes"] == 9536
    assert (dense["step_kv_bytes"], policy["step_kv_bytes"]) == (410 * 32, 87 * 32)
    assert found["ratios"]["tpot"] == pytest.approx(22656 / 12320)
    # four of five answer tokens have KV in the end
    assert policy["span_kv_bytes"] == [29 * 32] * 3 + [6 * 32]
    assert dense["kv_bytes"] == 104 * 4 * 32
    assert found["ratios"]["kv"] == pytest.approx(13312 / 2976)
    narrow = figures(
        "--prompt-tokens", 100, "--output-tokens", 5, "--policy", POLICY, "--kv-cache-dtype", "fp8_e5m2"
    )
    assert narrow["costs"]["policy"]["span_kv_bytes"] == [29 * 8] * 3 + [6 * 8]
    assert (
        narrow["costs"]["dense"]["step_kv_bytes"] == 410 * 8
        and narrow["ratios"]["kv"] == found["ratios"]["kv"]
    )
    assert narrow["costs"]["dense"]["step_weight_bytes"] == 9536
    paged = figures("--prompt-tokens", 100, "--output-tokens", 5, "--policy", POLICY, "--page-size", 16)
    assert paged["costs"]["policy"]["span_kv_bytes"] == [32 * 32] * 3 + [16 * 32]
    assert paged["costs"]["dense"]["kv_bytes"] == 112 * 4 * 32


def test_a_draft_and_fast_steps_by_hand(figures, model, tmp_path):
    """The draft has one layer of the same kind; 96 tokens are 3 chunks, of which 2 enter."""
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(SMALL | {"num_hidden_layers": 1}))
    policy = '{"prefill_keep_rate": 0.5, "min_prompt_tokens": 0, "decode": "slow_fast"}'
    sfi = ("--sfi-sink", 2, "--sfi-recent", 8, "--sfi-selected", 10, "--slow-share", 0.25)
    found = figures(
        "--prompt-tokens", 96, "--output-tokens", 2, "--draft-model", draft, "--policy", policy, *sfi
    )
    assert [(s["computed"], s["kept"]) for s in found["spans"]] == [(64, 64)] * 4
    costs = found["costs"]["policy"]
    assert costs["draft_flops"] == 1152 + 96 * 32 + 95 * 256 + 160  # its one layer is its last
    # the one step reads 65 entries if slow, 2 + 8 + 10 if fast
    assert costs["step_kv_bytes"] == 4 * 32 * (0.25 * 65 + 0.75 * 20)
    assert costs["compact_bytes"] == 4 * 32 * 12
    assert found["costs"]["dense"]["draft_flops"] == found["costs"]["dense"]["compact_bytes"] == 0


def test_a_note_says_what_counts_in_a_budget(figures, model):
    asked = {"prefill_keep_rate": 0.5, "min_prompt_tokens": 0}
    found = figures("--prompt-tokens", 64, "--policy", json.dumps(asked), "--draft-model-path", model)
    assert any("stays and counts in SpecPrefill's budget" in note for note in found["notes"])


def test_presets_and_what_they_leave_out(figures, tmp_path):
    found = figures("--prompt-tokens", 5000, "--preset", "turbo", "--policy", '{"kv_retention_rate": 0.3}')
    assert found["policy"]["preset"] == "custom" and found["policy"]["kv_retention_rate"] == 0.3
    assert found["left_out"].keys() == {"prefill_keep_rate", "speculative"}
    profile = tmp_path / "p.json"
    profile.write_text(
        '{"fathom_profile": 1, "layers": 4, "tsp_layer": 1, "presets": {"balanced": {"tsp_rate": 0.2}}}'
    )
    found = figures("--prompt-tokens", 100, "--preset", "balanced", "--profile", profile)
    assert [s["computed"] for s in found["spans"]] == [100, 20, 20, 20]


def test_what_the_run_decides_is_said(figures):
    spec = '{"tsp_rate": 0.5}'
    long = figures("--prompt-tokens", 4096, "--policy", spec, "--propagation-buffer", 4000)
    assert [s["computed"] for s in long["spans"]] == [4096] * 4
    assert any("propagation buffer of 4,000" in note for note in long["notes"])
    assert any("context is 4,096 tokens" in note for note in long["notes"])
    one = figures("--prompt-tokens", 10, "--output-tokens", 1)
    assert one["ratios"] == {"kv": 1, "ttft": 1, "tpot": None, "tpot_kv": None}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 2}, True),
        ({"sliding_window": 1024}, True),
        ({"text_config": SMALL | {"sliding_window": 1024}}, True),
        ({"sliding_window": 1024, "layer_types": ["full_attention"] * 4}, False),
        ({"sliding_window": 1024, "use_sliding_window": False}, False),
        ({"sliding_window": None}, False),
    ],
)
def test_sliding_windows_are_said_not_to_be_counted(figures, model, changes, told):
    (model / "config.json").write_text(json.dumps(SMALL | changes))
    notes = figures("--prompt-tokens", 3000)["notes"]
    assert any("sliding window of 1,024 tokens" in note for note in notes) == told


def test_sliding_windows_that_the_engine_knows_are_counted(figures, model):
    """Of Gemma 3: half of the layers read 64 entries where they would read 3,000."""
    half = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
    found = []
    for changes in ({}, half):
        (model / "config.json").write_text(json.dumps(SMALL | {"model_type": "gemma3_text"} | changes))
        found.append(
            figures("--prompt-tokens", 3000, "--policy", '{"decode": "slow_fast"}', "--output-tokens", 2)
        )
    whole, part = (each["costs"]["dense"] for each in found)
    assert part["step_kv_bytes"] / whole["step_kv_bytes"] == pytest.approx((3001 + 64) / (2 * 3001))
    assert part["kv_bytes"] == whole["kv_bytes"] and part["target_flops"] < whole["target_flops"]
    copied = [each["costs"]["policy"]["compact_bytes"] for each in found]
    assert copied[1] == copied[0] / 2 > 0
    assert any("(2 of 4): a token sees the last 64 positions" in note for note in found[1]["notes"])


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"vision_config": {"depth": 2}}, "takes images too"),
        ({"audio_config": {"layers": 1}, "vision_config": {"depth": 2}}, "takes images and sound too"),
        ({"vision_config": None}, ""),
        ({}, ""),
    ],
)
@pytest.mark.parametrize("name", ["text_config", "llm_config"])
def test_images_and_sound_are_said_not_to_be_counted(figures, model, name, parts, told):
    (model / "config.json").write_text(json.dumps({name: SMALL} | parts))
    notes = [note for note in figures("--prompt-tokens", 3000)["notes"] if "--language-model-only" in note]
    assert bool(notes) == bool(told) and all(told in note for note in notes)


def test_the_table_of_the_demo(capsys):
    assert cli.main(["explain", "--prompt-tokens", "4k", "--preset", "turbo"]) == 0
    text = capsys.readouterr().out
    assert "policy   turbo: " in text and "min_prompt_tokens 256" in text
    rows = [line.split() for line in text.splitlines() if "▒" in line or "·" in line]
    assert [row[0] for row in rows] == ["7-8", "5-6", "3-4", "1-2"]
    assert rows[0][1:3] == ["2", "2"] and rows[-1][1] == "2,048"
    assert all(
        words in text for words in ("predicted TTFT", "predicted TPOT", "prefill, draft", "weights read")
    )


MISTAKES = [
    (["--prompt-tokens", "0"], "--prompt-tokens: must be an integer >= 1, such as 8192 or 8k, got '0'"),
    (["--prompt-tokens", "8 kB"], "--prompt-tokens: must be an integer >= 1, such as 8192 or 8k, got '8 kB'"),
    (["--prompt-tokens", "100", "--policy", "{"], "'{' is not JSON"),
    (["--prompt-tokens", "100", "--policy", '{"depth_cutoff": 9}'], 'an integer in [1, 4] or "full", got 9'),
    (["--prompt-tokens", "100", "--policy", '{"speculative": true}'], "no draft model is loaded"),
    (["--prompt-tokens", "100", "--preset", "fast"], 'fathom.preset must be one of "exact"'),
    (["--prompt-tokens", "100", "--preset", "exact", "--policy", '{"preset": "turbo"}'], "not both"),
    (["--prompt-tokens", "100", "--propagation-buffer", "-1"], "--propagation-buffer must be at least 0"),
    (["--prompt-tokens", "100", "--depth-span", "3"], "--depth-span 3 does not divide"),
    (["--prompt-tokens", "100", "--tsp-layer", "4"], "--tsp-layer 4 is not a multiple of 1 layers below 4"),
    (["--prompt-tokens", "100", "--sfi-recent", "0"], "--sfi-recent"),
    (
        ["--prompt-tokens", "100", "--slow-share", "2", "--policy", '{"decode": "slow_fast"}'],
        "outside [0, 1]",
    ),
    (["--prompt-tokens", "100", "--png", "/no/such/folder/x.png"], "/no/such/folder/x.png: No such file"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[" ".join(m[0][2:]) for m in MISTAKES])
def test_a_mistake_is_one_line(options, message, model, capsys):
    try:
        code = cli.main(["explain", str(model), *options])
    except SystemExit as stop:
        code = stop.code
    shown = capsys.readouterr().err
    assert code == 2 and message in shown and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"num_hidden_layers": 4}', "'num_attention_heads' is missing"),
        (json.dumps(SMALL | {"kv_lora_rank": 4}), "latent attention"),
        (json.dumps(SMALL | {"dtype": "int3"}), "'int3' is missing or not known"),
        ("[]", "config.json: "),
        (json.dumps(SMALL | {"num_hidden_layers": "four"}), "the model's layers is no positive integer"),
        (json.dumps(SMALL | {"num_attention_heads": 0, "head_dim": None}), "modulo by zero"),
    ],
)
def test_a_config_that_cannot_be_counted(content, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["explain", str(path), "--prompt-tokens", "9"]) == 2
    assert message in capsys.readouterr().err


def test_auto_is_decided_per_prompt(capsys):
    policy = '{"prefill_keep_rate": "auto"}'
    assert cli.main(["explain", "--prompt-tokens", "4k", "--policy", policy]) == 2
    assert "decided per prompt" in capsys.readouterr().err


def test_a_png(model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "stairs.png"
    asked = ["explain", str(model), "--prompt-tokens", "100", "--policy", POLICY, "--png", str(path)]
    assert cli.main(asked) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    path.unlink()
    assert cli.main(asked) == 2
    assert "--png needs matplotlib, which is not installed" in capsys.readouterr().err
    assert not path.exists()


def test_an_svg():
    """320 wide, 52 of them labels: 268 pixels for 1,000 tokens."""
    stairs = Staircase(1000, (Stair(1, 2, 1000, 250), Stair(3, 4, 500, 0)))
    root = ElementTree.fromstring(picture.svg(stairs))
    rects = [(r.get("class"), float(r.get("width"))) for r in root.iter("rect")]
    assert rects == [
        ("whole", 268), ("computed", 134), ("kept", 0),
        ("whole", 268), ("computed", 268), ("kept", 67),
    ]  # fmt: skip
    assert [t.text for t in root.iter("text")] == ["3-4", "1-2"]
    assert "layers 3-4: 500 computed, 0 kept" in root.get("aria-label")


rates = st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0])


@given(
    prompt=st.integers(1, 3000),
    fields=st.fixed_dictionaries(
        {
            "prefill_keep_rate": rates,
            "tsp_rate": rates,
            "kv_retention_rate": rates,
            "depth_cutoff": st.sampled_from([6, "full"]),
            "anchors": st.sampled_from(["bos", "none"]),
            "min_prompt_tokens": st.sampled_from([0, 500]),
        }
    ),
)
@settings(max_examples=300, deadline=None)
def test_the_staircase_is_the_engines_plan(prompt, fields):
    """Two ways to the same numbers: the cost model's layers here, the plan that the engine steps through there."""
    layers, span, tsp = 8, 2, 4
    policy = config.choose(fields, None, config.Limits(layers, span, {}, tsp)).policy
    mine = cost.policy_plan(policy, layers, prompt, tsp_layer=tsp)
    wire = policy.to_wire()
    selection = specprefill_step(specprefill_config(wire), prompt, ())
    entered = prompt if selection is None else selection.most_kept(prompt)
    anchored = build(wire, layers, span).anchored_above(1)
    fastkv = fastkv_config(wire, tsp)
    steps = [lambda *_: selection, lambda *_: propagation_step(fastkv, entered, anchored)]
    plan = build(wire, layers, span, steps, retention(fastkv, entered))
    for number in range(layers):
        assert mine.computed[number] == plan.present_tokens(number // span, prompt)
        assert mine.retained[number] == plan.retained_tokens(number // span, prompt)
