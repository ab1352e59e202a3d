"""What is drawn: the same from the same seed, and legal unless it is meant not to be."""

import random

import pytest
from fuzz import policies, worlds
from fuzz.requests import KINDS, Drawer

from fathom.runtime.config import Limits, PolicyError, choose, without_draft

SEEDS = range(60)


def limits_of(world):
    """What the world's server allows."""
    lacking = {} if world.draft else without_draft()
    return Limits(world.target.layers, world.span, lacking, world.tsp_layer, world.settings.k)


def first_wave(world):
    drawer = Drawer(world)
    drawer.remember([11, 12, 13], [21, 22], "a b")
    return drawer.wave(0, 30)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_draws_the_same(seed):
    assert worlds.draw(seed) == worlds.draw(seed)
    assert first_wave(worlds.draw(seed)) == first_wave(worlds.draw(seed))
    assert worlds.draw(seed) != worlds.draw(seed + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_of_a_server_go_together(seed):
    world = worlds.draw(seed)
    assert world.target.layers % world.span == world.tsp_layer % world.span == world.pool % world.page == 0
    assert world.chunk == -1 or world.chunk % world.page == 0
    assert world.settings.gap <= world.settings.t_max
    assert world.devices == 1 or world.target.kv_heads % world.devices == 0
    assert all(isinstance(word, str) for word in world.flags)


@pytest.mark.parametrize("seed", SEEDS)
def test_devices_that_are_asked_for(seed):
    """One changes nothing of a world that has one."""
    world, spread = worlds.draw(seed), worlds.draw(seed, 2)
    assert spread.devices == 2 and spread.target.kv_heads % 2 == 0
    assert world.devices == 2 or worlds.draw(seed, 1) == world


@pytest.mark.parametrize("seed", SEEDS)
def test_policies_are_legal_unless_they_are_not_to_be(seed):
    world, rng = worlds.draw(seed), random.Random(seed)
    for _ in range(30):
        choose(policies.draw(rng, world), limits=limits_of(world))
        policy, field = policies.illegal(rng, world)
        with pytest.raises(PolicyError) as error:
            choose(policy, limits=limits_of(world))
        assert error.value.field == field


def test_every_kind_of_request_is_drawn():
    kinds = {request.kind for seed in SEEDS for request in first_wave(worlds.draw(seed))}
    assert kinds == {
        "greedy",
        "leave",
        "illegal",
        "seeded",
        "grammar",
        "altered",
        "prompt logprobs",
        "batch",
    } | {
        *("flush", "pause", "abort", "abort all", "session", "chat", "load again", "beams"),
    }
    assert sum(share for share, _ in KINDS) == 100
