"""The cost model against the papers' printed tables, the textbook formula, and properties of a staircase."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.benchmarks import paper_figures as papers
from fathom.runtime import config, cost
from fathom.runtime.cost import FastKV, ModelShape, SlowFast, SpecPrefill, Speed, make_plan
from fathom.runtime.kv.memory import pages_held
from fathom.runtime.plan import build

LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = ModelShape(80, 8192, 28672, 64, 8, 128, 128256)
LLAMA_405B = ModelShape(126, 16384, 53248, 128, 8, 128, 128256)

CUTOFFS = (32, *papers.SPEED_CUTOFFS)
CONTINUATION = 128
# SPEED, Table 18: estimated total teraFLOPs by the cutoffs above; then the printed reductions in per cent.
TABLE_18 = {
    1: (16.828, 9.432, 11.281, 13.130, 14.979),
    2: (32.853, 17.479, 21.323, 25.166, 29.010),
    4: (68.228, 35.235, 43.483, 51.731, 59.980),
    8: (152.274, 77.395, 96.115, 114.834, 133.554),
    16: (373.554, 188.310, 234.621, 280.932, 327.243),
    32: (1028.870, 516.518, 644.606, 772.694, 900.782),
    64: (3190.525, 1598.445, 1996.465, 2394.485, 2792.505),
    128: (10917.923, 5464.343, 6827.738, 8191.133, 9554.528),
}
REDUCTION_18 = {
    1: (44.0, 33.0, 22.0, 11.0),
    2: (46.8, 35.1, 23.4, 11.7),
    4: (48.4, 36.3, 24.2, 12.1),
    8: (49.2, 36.9, 24.6, 12.3),
    16: (49.6, 37.2, 24.8, 12.4),
    32: (49.8, 37.3, 24.9, 12.4),
    64: (49.9, 37.4, 25.0, 12.5),
    128: (50.0, 37.5, 25.0, 12.5),
}


@pytest.mark.parametrize("kilo", papers.SPEED_KV_GIB)
@pytest.mark.parametrize("anchors", [0, 1])
def test_active_kv_of_table_17(kilo, anchors):
    for cutoff, printed in zip(CUTOFFS, papers.SPEED_KV_GIB[kilo], strict=True):
        plan = make_plan(32, kilo * 1024, speed=Speed(cutoff, anchors))
        gib = cost.kv_bytes(LLAMA_8B, plan, CONTINUATION) / 2**30
        assert abs(gib - printed) <= 0.0005 + 1e-9, (cutoff, gib)


def flops_of_table_18(kilo, cutoff):
    """Total FLOPs under the rules that the printed figures follow.

    The paper names "the layer-token computation proxy". All forty cells come out if four prompt tokens exist at
    every layer (three anchors and the last token), and decode steps, 127 after the first token, read the whole
    prompt at every layer, above the cutoff too: the table credits SPEED with prefill only.
    """
    tokens, rules = kilo * 1024, cost.SPEED_TABLE_18
    prefill = cost.prefill_flops(LLAMA_8B, make_plan(32, tokens, speed=Speed(cutoff, anchors=3)), rules)
    dense = make_plan(32, tokens)
    steps = range(1, CONTINUATION)
    return prefill + sum(cost.decode_flops(LLAMA_8B, dense, generated, rules) for generated in steps)


@pytest.mark.parametrize("kilo", TABLE_18)
def test_flops_and_reductions_of_table_18(kilo):
    full = flops_of_table_18(kilo, 32)
    reductions = []
    for cutoff, printed in zip(CUTOFFS, TABLE_18[kilo], strict=True):
        flops = flops_of_table_18(kilo, cutoff)
        assert abs(flops / 1e12 - printed) <= 0.0005 + 1e-9, (cutoff, flops)
        reductions.append(100 * (1 - flops / full))
    for mine, printed in zip(reductions[1:], REDUCTION_18[kilo], strict=True):
        assert abs(mine - printed) <= 0.05 + 1e-9


def test_the_papers_limits_at_128k():
    """SPEED, section 5.1: limit 32/24; measured 1.33 x TTFT, 25.0 % less KV."""
    plan = make_plan(32, 128 * 1024, speed=Speed(24))
    prediction = cost.predict(LLAMA_8B, plan, CONTINUATION)
    dense = make_plan(32, 128 * 1024)
    flops = cost.prefill_flops(LLAMA_8B, dense) / cost.prefill_flops(LLAMA_8B, plan)
    assert flops == pytest.approx(32 / 24, rel=1e-3)
    # Here a prompt's tokens leave their last layer with keys and values alone.
    assert prediction.ttft == pytest.approx(31 / 23, rel=2e-3)
    assert prediction.kv == pytest.approx(32 / 24, rel=1e-3)
    assert 1 < prediction.tpot < prediction.tpot_kv < 32 / 24
    large_batch = cost.predict(LLAMA_8B, plan, CONTINUATION, batch=64)
    assert large_batch.tpot_kv == pytest.approx(prediction.tpot_kv)
    assert prediction.tpot < large_batch.tpot < prediction.tpot_kv


def test_specprefill_relative_flops():
    """SpecPrefill, Table 6 (14.24 % and 2.96 %) and appendix E (7.72 x at 10 % kept), for "32K" tokens.

    The printed digits are those of 31 x 1024 tokens; 32,768 tokens give 14.31 % and 2.99 %.
    """
    rules = cost.SPECPREFILL_TABLE_5

    def share(base, tokens):
        plan = make_plan(base.layers, tokens, specprefill=SpecPrefill(0.1, LLAMA_8B))
        return cost.draft_flops(plan, rules) / cost.prefill_flops(base, make_plan(base.layers, tokens), rules)

    assert 100 * share(LLAMA_70B, 32768) == pytest.approx(14.24, abs=0.08)
    assert 100 * share(LLAMA_405B, 32768) == pytest.approx(2.96, abs=0.03)
    assert round(100 * share(LLAMA_70B, 31744), 2) == 14.24
    assert round(100 * share(LLAMA_405B, 31744), 2) == 2.96
    assert 1 / (share(LLAMA_405B, 31744) + 0.1) == pytest.approx(7.72, abs=0.005)


def test_specprefill_table_5_term_by_term():
    """L·S·D·(3I + D(2 + 2H'/H) + 2S) + S·D·V multiply-adds, as printed."""
    L, D, I, H, K, V, S = 32, 4096, 14336, 32, 8, 128256, 5000  # noqa: E741
    printed = L * S * D * (3 * I + D * (2 + 2 * K / H) + 2 * S) + S * D * V
    assert cost.prefill_flops(LLAMA_8B, make_plan(L, S), cost.SPECPREFILL_TABLE_5) == pytest.approx(
        2 * printed
    )


shapes = st.builds(
    ModelShape,
    layers=st.integers(1, 12),
    hidden=st.sampled_from([64, 96, 256]),
    intermediate=st.sampled_from([128, 344]),
    heads=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([16, 80]),
    vocab=st.integers(10, 1000),
    kv_itemsize=st.sampled_from([1, 2, 4]),
)


@given(shape=shapes, tokens=st.integers(1, 5000), generated=st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_the_dense_plan_is_the_textbook_formula(shape, tokens, generated):
    """Two FLOPs per weight and token, two products per visible pair, KV of every token at every layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = [(shape.hidden, q), (shape.hidden, kv), (shape.hidden, kv), (q, shape.hidden)]
    matrices += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    per_token = sum(2 * rows * columns for rows, columns in matrices)
    pairs = sum(range(1, tokens + 1))
    plan, head = make_plan(shape.layers, tokens), 2 * shape.hidden * shape.vocab
    want = shape.layers * (tokens * per_token + pairs * 2 * 2 * q) + head
    assert cost.prefill_flops(shape, plan) == pytest.approx(want)
    step = shape.layers * (per_token + (tokens + generated) * 2 * 2 * q) + head
    assert cost.decode_flops(shape, plan, generated) == pytest.approx(step)
    held = 2 * shape.layers * (tokens + generated) * kv * shape.kv_itemsize
    assert cost.kv_bytes(shape, plan, generated) == held == cost.decode_bytes(shape, plan, generated).kv
    weights = shape.layers * sum(rows * columns for rows, columns in matrices) + shape.hidden * shape.vocab
    assert cost.decode_bytes(shape, plan, generated).weights == 2 * weights
    assert cost.predict(shape, plan, 8) == cost.Prediction(1, 1, 1, 1)


@st.composite
def mechanisms(draw, layers):
    """Any of the mechanisms together, over the whole range of each."""
    rates = st.sampled_from([0.01, 0.1, 0.2, 0.5, 0.9, 1.0])
    some = draw(st.fixed_dictionaries({name: st.booleans() for name in ("a", "b", "c", "d")}))
    return {
        "specprefill": SpecPrefill(draw(rates), min_prompt_tokens=draw(st.sampled_from([0, 100])))
        if some["a"]
        else None,
        "fastkv": FastKV(draw(st.integers(1, layers)), draw(rates), draw(rates)) if some["b"] else None,
        "speed": Speed(draw(st.integers(1, layers)), draw(st.integers(0, 4))) if some["c"] else None,
        "slow_fast": SlowFast(draw(st.floats(0, 1)), 4, 16, draw(st.integers(0, 200))) if some["d"] else None,
    }


@given(data=st.data(), shape=shapes, tokens=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_served_flops_token_by_token(data, shape, tokens):
    """A token is computed whole at a layer if it goes on, or if the layer decides who does; else up to its key."""
    given = data.draw(mechanisms(shape.layers))
    plan = make_plan(shape.layers, tokens, **given)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projected = 2 * shape.hidden * (q + 2 * kv)
    rest = 2 * (q * shape.hidden + 3 * shape.hidden * shape.intermediate)
    want = 2 * shape.hidden * shape.vocab
    for layer in range(1, shape.layers + 1):
        there = plan.computed[layer - 1]
        on = plan.computed[layer] if layer < shape.layers else 1
        decides = given["fastkv"] is not None and layer == given["fastkv"].layer
        for place in range(there):
            want += projected
            if decides or place >= there - on:
                want += rest + (place + 1) * 4 * q
    assert cost.prefill_flops(shape, plan, cost.SERVED) == pytest.approx(want)
    assert cost.prefill_flops(shape, plan, cost.SERVED) <= cost.prefill_flops(shape, plan) * (1 + 1e-12)


@given(data=st.data(), layers=st.integers(1, 12), tokens=st.integers(1, 3000), generated=st.integers(0, 300))
@settings(max_examples=150, deadline=None)
def test_mechanisms_combine_into_one_staircase(data, layers, tokens, generated):
    used = data.draw(mechanisms(layers))
    plan, dense = make_plan(layers, tokens, **used), make_plan(layers, tokens)
    shape = replace(LLAMA_8B, layers=layers)
    assert len(plan.computed) == len(plan.retained) == layers
    assert cost.kv_bytes(shape, plan, generated) == sum(
        shape.kv_entry_bytes * entries for entries in plan.held(generated)
    )
    for measure in (
        lambda p: cost.prefill_flops(shape, p),
        lambda p: cost.decode_flops(shape, p, generated + 1),
        lambda p: cost.kv_bytes(shape, p, generated),
        lambda p: cost.decode_bytes(shape, p, generated + 1).total,
    ):
        assert 0 < measure(plan) <= measure(dense)
    # Each mechanism can only take away from what the others leave; FastKV must spare SPEED's anchors.
    for name in used:
        fewer = make_plan(layers, tokens, **{**used, name: None})
        spared = used["speed"].anchors if name == "speed" and used["speed"] and used["fastkv"] else 0
        for layer in range(layers):
            assert plan.computed[layer] <= fewer.computed[layer] + spared
            assert plan.retained[layer] <= fewer.retained[layer] + spared
        if not spared:
            assert cost.kv_bytes(shape, plan, generated) <= cost.kv_bytes(shape, fewer, generated)
            assert cost.prefill_flops(shape, plan) <= cost.prefill_flops(shape, fewer)
    if used["speed"] and used["speed"].cutoff == layers:
        assert plan == make_plan(layers, tokens, **{**used, "speed": None})


@given(data=st.data(), tokens=st.integers(1, 3000), more=st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_costs_grow_with_prompt_cutoff_and_rates(data, tokens, more):
    used = data.draw(mechanisms(8))
    shape = replace(LLAMA_8B, layers=8)

    def costs(tokens, **changed):
        plan = make_plan(8, tokens, **{**used, **changed})
        return (
            cost.prefill_flops(shape, plan),
            cost.kv_bytes(shape, plan),
            cost.decode_bytes(shape, plan, 1).kv,
        )

    def assert_grows(less, more):
        assert all(a <= b for a, b in zip(less, more, strict=True)), (less, more)

    if used["specprefill"] is None:  # at its threshold a longer prompt starts to be cut, and may cost less
        assert_grows(costs(tokens), costs(tokens + more))
    for cutoff in range(1, 8):
        # The full depth has no anchors that FastKV must spare.
        anchors = int(cutoff < 7 or used["fastkv"] is None)
        less, deeper = Speed(cutoff, anchors), Speed(cutoff + 1, anchors)
        assert_grows(costs(tokens, speed=less), costs(tokens, speed=deeper))
    for low, high in ((0.1, 0.2), (0.2, 1.0)):
        assert_grows(costs(tokens, fastkv=FastKV(4, low, low)), costs(tokens, fastkv=FastKV(4, high, high)))
        assert_grows(
            costs(tokens, specprefill=SpecPrefill(low, min_prompt_tokens=0)),
            costs(tokens, specprefill=SpecPrefill(high, min_prompt_tokens=0)),
        )


def test_a_combined_plan_by_hand():
    """1,000 tokens, 8 layers, spans of 2: 32 chunks, of which 7 stay (the last has 8 tokens)."""
    plan = make_plan(
        8,
        1000,
        specprefill=SpecPrefill(0.2, min_prompt_tokens=0),
        fastkv=FastKV(4, 0.5, 0.1),
        speed=Speed(6, anchors=1),
        slow_fast=SlowFast(slow_share=0.25, sink=2, recent=5, selected=10),
    )
    entering = 6 * 32 + 8
    assert plan.computed == (entering,) * 4 + (100,) * 2 + (2,) * 2
    assert plan.retained == (20,) * 6 + (2,) * 2
    # 20 + 4 entries are read by a slow step and 17 by a fast one; 2 + 4 by both.
    assert plan.read(4) == (0.25 * 24 + 0.75 * 17,) * 6 + (6,) * 2
    assert cost.packed_bytes(LLAMA_8B, plan) == 8 * 12 * 4096
    assert cost.depth_pages(plan.computed, span=2, page_size=16) == (13, 13, 7, 1)
    assert cost.depth_pages(plan.held(13), span=2, page_size=16) == (3, 3, 3, 1)
    assert cost.depth_pages((5, 3), span=2, page_size=1) == (5,)
    with pytest.raises(ValueError, match="spans of 3 do not divide 8 layers"):
        cost.depth_pages(plan.computed, span=3, page_size=16)


@given(
    tokens=st.integers(1, 5000),
    generated=st.integers(0, 500),
    cutoff=st.sampled_from([4, 8, 12, 16]),
    anchors=st.sampled_from(["bos", "none"]),
    page_size=st.sampled_from([1, 16, 64]),
)
@settings(max_examples=60, deadline=None)
def test_pages_are_those_that_the_memory_manager_counts(tokens, generated, cutoff, anchors, page_size):
    """Two ways to the same number: entries per layer here, tables per span there."""
    policy = replace(config.Policy(), depth_cutoff=cutoff, anchors=anchors)
    mine = cost.depth_pages(cost.policy_plan(policy, 16, tokens).held(generated), 4, page_size)
    plan = build(policy.to_wire(), 16, 4)
    assert sum(mine) == pages_held(plan, tokens + generated, tokens, page_size)


@pytest.mark.parametrize(
    ("mechanism", "tokens", "kept"),
    [
        (SpecPrefill(0.2), 4095, 4095),  # below the threshold
        (SpecPrefill(0.2, min_prompt_tokens=0), 31, 31),  # one chunk
        (SpecPrefill(0.01, min_prompt_tokens=0), 6400, 64),  # first and last chunk stay
        (SpecPrefill(0.1, min_prompt_tokens=0), 960, 96),  # 3 of 30 chunks
    ],
)
def test_tokens_that_enter(mechanism, tokens, kept):
    assert make_plan(1, tokens, specprefill=mechanism).computed == (kept,)


def test_fastkv_sets_hold_their_window():
    assert make_plan(2, 30, fastkv=FastKV(1, 0.1, 0.1)).computed == (30, 8)
    assert make_plan(2, 5, fastkv=FastKV(1, 0.1, 0.1)).retained == (5, 5)
    assert make_plan(2, 300, fastkv=FastKV(2, 1.0, 0.1)).retained == (30, 30)


def test_a_draft_is_paid_for_only_where_it_runs():
    draft = replace(LLAMA_8B, layers=4)
    short, long = (make_plan(8, n, specprefill=SpecPrefill(0.5, draft)) for n in (4095, 4096))
    assert cost.draft_flops(short) == 0
    assert cost.draft_flops(long) == cost.prefill_flops(draft, make_plan(4, 4096))
    without = make_plan(8, 4096, specprefill=SpecPrefill(0.5))
    assert cost.predict(LLAMA_8B, long, 2).ttft < cost.predict(LLAMA_8B, without, 2).ttft


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, {}),
        ({"depth_cutoff": 24}, {"speed": Speed(24, 1)}),
        ({"depth_cutoff": 24, "anchors": "none"}, {"speed": Speed(24, 0)}),
        ({"prefill_keep_rate": 0.3}, {"specprefill": SpecPrefill(0.3, LLAMA_8B)}),
        ({"tsp_rate": 0.2}, {"fastkv": FastKV(16, 0.2, 1.0)}),
        ({"kv_retention_rate": 0.1}, {"fastkv": FastKV(16, 1.0, 0.1)}),
        ({"decode": "slow_fast"}, {"slow_fast": SlowFast()}),
    ],
)
def test_plan_of_a_policy(fields, same):
    policy = replace(config.Policy(), **fields)
    assert cost.policy_plan(policy, 32, 9000, draft=LLAMA_8B) == make_plan(32, 9000, **same)


@pytest.mark.parametrize(
    "more", [{}, {"prefill_keep_rate": 0.3}, {"prefill_keep_rate": 0.3, "depth_cutoff": 24}]
)
def test_the_draft_reads_what_it_proposes_for(more):
    """Once, whether it judges the prompt or not."""
    policy = replace(config.Policy(), speculative=True, **more)
    plan = cost.policy_plan(policy, 32, 9000, draft=LLAMA_8B)
    alone = cost.policy_plan(replace(policy, speculative=False), 32, 9000, draft=LLAMA_8B)
    assert plan.computed == alone.computed
    assert cost.draft_flops(plan) == cost.prefill_flops(LLAMA_8B, make_plan(32, 9000))


def test_kv_is_predicted_as_an_answer_reports_it():
    """The last of five tokens has no KV: 104 entries at a layer, and four and the anchors above K."""
    predicted = cost.predict(LLAMA_8B, make_plan(32, 100, speed=Speed(24)), 5).kv
    assert predicted == pytest.approx(32 * 104 / (24 * 104 + 8 * (2 + 4)), rel=1e-12)


def test_a_prompt_that_stays_whole_is_not_judged():
    """At 0.99 of 32 chunks all stay: the engine does not ask the draft then."""
    plan = make_plan(1, 1024, specprefill=SpecPrefill(0.99, LLAMA_8B, min_prompt_tokens=0))
    assert plan == make_plan(1, 1024)


def test_plan_of_a_policy_with_what_the_operator_set():
    policy = replace(config.Policy(), tsp_rate=0.2, prefill_keep_rate=0.5, min_prompt_tokens=10)
    policy = replace(policy, decode="slow_fast")
    slow_fast = SlowFast(0.5, 1, 2, 3)
    plan = cost.policy_plan(policy, 8, 400, tsp_layer=6, slow_fast=slow_fast)
    assert plan.computed == (208,) * 6 + (42,) * 2 and plan.budget == 6
    with pytest.raises(ValueError, match="decided per prompt"):
        cost.policy_plan(replace(config.Policy(), prefill_keep_rate="auto"), 8, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speed": Speed(9)}, "K = 9 is not a layer"),
        ({"fastkv": FastKV(0)}, "T = 0 is not a layer"),
    ],
)
def test_layers_outside_the_model_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_plan(8, 100, **arguments)


@pytest.mark.parametrize(
    ("computed", "retained"),
    [((3, 4), (3, 4)), ((4, 3), (4, 4)), ((11, 3), (4, 3)), ((4, 0), (4, 0)), ((), ()), ((4, 3), (4,))],
)
def test_what_is_no_staircase_is_refused(computed, retained):
    with pytest.raises(ValueError):
        cost.CostPlan(10, computed, retained)


def test_shapes_from_configs():
    llama = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
    assert ModelShape.from_config(llama) == LLAMA_8B
    wide = ModelShape.from_config({"text_config": {**llama, "dtype": "float32"}})
    assert wide == replace(LLAMA_8B, kv_itemsize=4, weight_itemsize=4)
    experts = {**llama, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 80}
    assert ModelShape.from_config(experts) == replace(LLAMA_8B, intermediate=6144, head_dim=80)
    counted = ModelShape.from_config({**experts, "num_experts": 128})
    assert (counted.experts, counted.experts_per_token) == (128, 8)
    for odd, message in (({"kv_lora_rank": 512}, "latent"), ({"n_shared_experts": 1}, "n_shared_experts")):
        with pytest.raises(ValueError, match=message):
            ModelShape.from_config({**experts, **odd})


@pytest.mark.parametrize("batch", [1, 2, 16, 4096])
def test_a_step_reads_the_experts_that_its_tokens_are_sent_to(batch):
    shape = replace(LLAMA_8B, intermediate=8 * 768, experts=32, experts_per_token=8)
    one = 3 * shape.hidden * 768 * shape.layers * shape.weight_itemsize
    generator = torch.Generator().manual_seed(batch)
    met = []
    for _ in range(200):
        sent = torch.rand(batch, 32, generator=generator).topk(8).indices
        met.append(len(sent.unique()))
    rest = shape.step_weight_bytes() - 8 * one
    assert shape.step_weight_bytes(batch) == pytest.approx(rest + one * sum(met) / len(met), rel=0.02)
    assert shape.step_weight_bytes(batch) <= rest + 32 * one
    assert LLAMA_8B.step_weight_bytes(batch) == LLAMA_8B.step_weight_bytes()
