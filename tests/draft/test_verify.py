"""Speculative sampling leaves the target's distribution as it is, whatever the draft proposed."""

import pytest
import torch

from fathom.runtime.sampling import target_probs
from fathom.runtime.verify import match, reject

SAMPLES = 60_000


def distributions(seed: int, rows: int, vocabulary: int, sharpness: float) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * sharpness
    return logits.softmax(-1)


def frequencies(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.bincount(tokens, minlength=vocabulary) / len(tokens)


@pytest.mark.parametrize("one_hot", [False, True], ids=["sampled draft", "greedy draft"])
@pytest.mark.parametrize("width", [1, 3])
def test_every_position_follows_the_target(width, one_hot):
    """All SAMPLES requests share the target's distributions, which do not depend on earlier tokens here."""
    vocabulary = 11
    generator = torch.Generator().manual_seed(width)
    target = distributions(1, width + 1, vocabulary, 0.7)
    draft = distributions(2, width, vocabulary, 1.5)
    if one_hot:
        draft = torch.nn.functional.one_hot(draft.argmax(-1), vocabulary).float()
    drafted = torch.multinomial(draft, SAMPLES, replacement=True, generator=generator).T
    accepted, following = reject(
        target.expand(SAMPLES, -1, -1),
        draft.expand(SAMPLES, -1, -1),
        drafted,
        torch.full((SAMPLES,), width),
        generator,
    )
    assert 0 < accepted.float().mean() < width
    for place in range(width + 1):
        reached = accepted >= place
        tokens = following.clone()
        if place < width:
            tokens = torch.where(accepted > place, drafted[:, place], following)
        found = frequencies(tokens[reached], vocabulary)
        distance = (found - target[place]).abs().sum() / 2
        # Expected distance of an unbiased sample: about sqrt(vocabulary / (2 pi n)).
        limit = 2.5 * (vocabulary / (2 * torch.pi * int(reached.sum()))) ** 0.5
        assert distance < limit, f"place {place}: total variation {distance:.4f}, limit {limit:.4f}"


def test_the_acceptance_rate_is_the_overlap():
    vocabulary = 7
    target, draft = distributions(3, 2, vocabulary, 1.0), distributions(4, 1, vocabulary, 1.0)
    generator = torch.Generator().manual_seed(0)
    drafted = torch.multinomial(draft, SAMPLES, replacement=True, generator=generator).T
    accepted, _ = reject(
        target.expand(SAMPLES, -1, -1),
        draft.expand(SAMPLES, -1, -1),
        drafted,
        torch.ones(SAMPLES, dtype=torch.long),
        generator,
    )
    overlap = torch.minimum(target[0], draft[0]).sum()
    assert accepted.float().mean() == pytest.approx(float(overlap), abs=0.01)


def test_requests_may_draft_different_numbers_of_tokens():
    target = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), 5).float()
    draft = target[:, :2]
    drafted = torch.tensor([[1, 2], [1, 2], [1, 2]])
    accepted, following = reject(target, draft, drafted, torch.tensor([2, 1, 0]))
    assert accepted.tolist() == [2, 1, 0]
    assert following.tolist() == [3, 2, 1]


def test_a_drafted_token_that_the_target_never_says_does_not_stand():
    target = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    draft = torch.tensor([[[1.0, 0.0, 0.0]]])
    for seed in range(50):
        accepted, following = reject(
            target, draft, torch.tensor([[0]]), torch.tensor([1]), torch.Generator().manual_seed(seed)
        )
        assert accepted.item() == 0 and following.item() in (1, 2)


def test_match_stops_at_the_first_difference():
    choices = torch.tensor([[5, 6, 7], [5, 9, 7], [5, 6, 7], [9, 6, 7]])
    drafted = torch.tensor([[5, 6]] * 4)
    assert match(choices, drafted, torch.tensor([2, 2, 1, 2])).tolist() == [2, 1, 1, 0]


def test_chance_at_its_ends(monkeypatch):
    """The least number that can be drawn accepts nothing that the target never says; and where the target's numbers
    are the draft's but for rounding, what follows a rejected token is drawn from the target's."""
    target = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])
    draft = torch.tensor([[[1.0, 0.0]]])
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    accepted, following = reject(target, draft, torch.tensor([[0]]), torch.tensor([1]))
    assert (accepted.item(), following.item()) == (0, 1)
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.ones(shape))
    target = torch.tensor([[[0.5, 0.4999], [0.0, 1.0]]]).expand(200, -1, -1)
    draft = torch.full((200, 1, 2), 0.5)
    accepted, following = reject(
        target,
        draft,
        torch.ones(200, 1, dtype=torch.long),
        torch.ones(200, dtype=torch.long),
        torch.Generator().manual_seed(1),
    )
    assert accepted.sum() == 0 and 70 < following.sum() < 130


def test_without_a_limit_every_token_can_be_drawn():
    """Also where rounding brings the sum of a large vocabulary above 1."""
    logits = torch.randn(2, 128256, generator=torch.Generator().manual_seed(0)) * 3
    probs = logits.softmax(-1)
    assert (probs.sort(descending=True)[0].cumsum(-1) > 1 + 1e-6).any()
    one = torch.ones(2)
    got = target_probs(logits, one, torch.full((2,), 1 << 30), one, torch.zeros(2))
    torch.testing.assert_close(got, probs, atol=0, rtol=1e-4)


@pytest.mark.parametrize("binding", ["top_k", "top_p", "min_p", "all", "at the limit"])
def test_target_probs_are_what_the_sampler_draws_from(binding):
    """Against SGLang's own sampler: same support, and the same weights up to its scale."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    rows, vocabulary = 40, 50
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    temperatures = torch.rand(rows, generator=generator) + 0.3
    top_ks = torch.randint(1, vocabulary + 1, (rows,), generator=generator)
    top_ps = torch.rand(rows, generator=generator) * 0.9 + 0.1
    min_ps = torch.rand(rows, generator=generator) * 0.3
    if binding == "at the limit":  # probabilities and limits without rounding, which often coincide
        logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(rows, 1)
        temperatures, top_ks = torch.ones(rows), torch.full_like(top_ks, 4)
        top_ps, min_ps = (torch.randint(1, 9, (rows,), generator=generator) / 8 for _ in range(2))
    elif binding != "all":
        top_ks = top_ks if binding == "top_k" else torch.full_like(top_ks, vocabulary)
        top_ps = top_ps if binding == "top_p" else torch.ones_like(top_ps)
        min_ps = min_ps if binding == "min_p" else torch.zeros_like(min_ps)
    got = target_probs(logits, temperatures, top_ks, top_ps, min_ps)
    probs = torch.softmax(logits / temperatures.view(-1, 1), -1)
    _, weights, index, *_ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs, top_ks, top_ps, min_ps, True, None, torch.zeros(rows), return_filtered_probs=True
    )
    want = torch.zeros_like(probs).scatter_(1, index, weights)
    want /= want.sum(1, keepdim=True)
    assert torch.equal(got > 0, want > 0)
    assert torch.allclose(got, want, atol=1e-6)
