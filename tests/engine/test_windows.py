"""Models some of whose layers look back over a window of positions only."""

import pytest
from greedy import ask, body_of
from interpreted import FLAGS, LOOKAHEAD, SERVED, Oracle, check_all, prompt_of
from noisy import draft_flags, noisy_copy
from windowed import F, S, save_windowed

LONG = {
    "prefill_keep_rate": 0.8,
    "min_prompt_tokens": 64,
    "lookahead": LOOKAHEAD,
    "kv_retention_rate": 0.3,
    "depth_cutoff": 3,
}
KINDS = {"judged right below the selection": (S, F, S, F), "judged further down": (F, S, S, F)}


@pytest.mark.parametrize("kinds", KINDS)
def test_every_mechanism(start_server, tmp_path, triggers, kinds):
    """Its draft has windows too, and judges prompts by the layers without."""
    target = save_windowed(tmp_path / "target", KINDS[kinds])
    draft = noisy_copy(target, tmp_path / "draft", 0.02)
    server = start_server(target, *SERVED, *draft_flags(draft))
    check_all(server, target, draft, triggers)
    # More tokens enter than a step computes; and once more, of which the prefix cache has some.
    expected, prompt = Oracle(target, draft, triggers), prompt_of("long", 300)
    for policy in (
        LONG,
        {"tsp_rate": 0.4},
        LONG | {"decode": "slow_fast"},
        {"kv_retention_rate": 0.3},
        {},
        LONG,
    ):
        expected.compare(prompt, policy, ask(server, prompt, policy, 12), 12)


def test_on_a_gpu_in_name_only(start_nominal, tmp_path, triggers):
    """In steps that are captured and replayed, and others."""
    target = save_windowed(tmp_path / "target", KINDS["judged further down"])
    draft = noisy_copy(target, tmp_path / "draft", 0.02)
    server = start_nominal(target, draft, *FLAGS, "--cuda-graph-bs-decode", "1", "4")
    check_all(server, target, draft, triggers)
    assert server.engine()["replayed_steps"]["dense"] > 0


def test_what_needs_a_layer_that_sees_everything(start_server, tmp_path):
    """Selections do: of prompts by a draft, of tokens that go on, of entries that fast steps read."""
    model = save_windowed(tmp_path / "model", (S, S, S, S))
    server = start_server(model, *SERVED, *draft_flags(model))
    assert server.engine()["lacking"] == {
        "SpecPrefill": "the draft model has sliding windows in all its layers",
        "SFI": "the model has sliding windows in all its layers",
        "FastKV": "all layers below --tsp-layer 2 have sliding windows",
    }
    prompt = list(range(6, 150))

    def reply(policy):
        return server.client.post("/generate", json=body_of(prompt, policy, 12))

    for policy in ({"prefill_keep_rate": 0.5}, {"decode": "slow_fast"}, {"tsp_rate": 0.5}):
        assert reply(policy).status_code == 400
    drafted, dense = reply({"speculative": True}).json(), reply({}).json()
    assert drafted["output_ids"] == dense["output_ids"]
    assert drafted["meta_info"]["fathom"]["draft_tokens"] > 0
    assert reply({"depth_cutoff": 2}).json()["meta_info"]["fathom"]["kept_tokens"] < len(prompt)
