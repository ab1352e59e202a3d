"""Which drafted tokens stand: speculative sampling, batched over requests.

A request brings k drafted tokens and the target's k + 1 distributions, one before each of them and one after the
last. What is put out follows the target's distribution exactly, whatever the draft proposed (Leviathan et al. 2023,
"Fast Inference from Transformers via Speculative Decoding", Algorithm 1).
"""

import torch


def target_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """The distribution that the engine's sampler draws from, made explicit.

    Args:
        logits: [rows, vocabulary] float, biases and grammar masks already applied.
        temperatures, top_ps, min_ps: [rows] float; top_ks: [rows] integers.

    Returns:
        [rows, vocabulary] float32.
    """
    return filtered(torch.softmax(logits.float() / temperatures.view(-1, 1), -1), top_ks, top_ps, min_ps)


def filtered(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """What the rules leave of probabilities [rows, vocabulary], scaled to sum 1.

    Top-k and top-p are both judged on the unfiltered distribution, min-p on what they left.
    """
    ordered, index = probs.sort(-1, descending=True)
    mass = ordered.cumsum(-1)
    place = torch.arange(probs.shape[-1], device=probs.device)
    ordered = ordered.masked_fill(place >= top_ks.view(-1, 1), 0)
    # Sums of a large vocabulary end above 1 by rounding, which is no reason to leave anything out.
    limits = top_ps.view(-1, 1).masked_fill(top_ps.view(-1, 1) >= 1, float("inf"))
    ordered = ordered.masked_fill(mass - probs.gather(-1, index) > limits, 0)
    ordered = ordered.masked_fill(ordered < ordered[:, :1] * min_ps.view(-1, 1), 0)
    ordered /= ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token from each row of [rows, vocabulary], as ``torch.multinomial`` draws it.

    That function first looks at the probabilities on the host, for which it waits for the device.

    Returns:
        [rows] int64.
    """
    return (probs / torch.empty_like(probs).exponential_(1, generator=generator)).argmax(-1)


def match(choices: torch.Tensor, drafted: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """How many drafted tokens are what the target chose itself (greedy, or sampled with a seed).

    Args:
        choices: [requests, k + 1] the target's own token before each drafted one, and after the last.
        drafted: [requests, k]; only the first ``counts`` [requests] of a row are its drafted tokens.

    Returns:
        accepted [requests] int64. The output is ``choices[:, : accepted + 1]``.
    """
    width = drafted.shape[1]
    same = (choices[:, :width] == drafted) & (torch.arange(width, device=drafted.device) < counts.view(-1, 1))
    return same.long().cumprod(1).sum(1)


def reject(
    target: torch.Tensor,
    draft: torch.Tensor,
    drafted: torch.Tensor,
    counts: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling: which drafted tokens stand, and the target's token after them.

    Args:
        target: [requests, k + 1, vocabulary] the target's distributions.
        draft: [requests, k, vocabulary] the distributions that the drafted tokens were drawn from; one-hot for a
            token that was chosen without chance.
        drafted: [requests, k]; only the first ``counts`` [requests] of a row are its drafted tokens.

    Returns:
        accepted [requests] int64, and the token that follows the accepted ones [requests] int64.
    """
    requests, width = drafted.shape
    # p: target's probability of the drafted token, q: the draft's
    p = target[:, :width].gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    q = draft.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    u = torch.rand(p.shape, generator=generator, device=p.device)
    stands = (u * q < p) & (torch.arange(width, device=p.device) < counts.view(-1, 1))
    accepted = stands.long().cumprod(1).sum(1)
    each = torch.arange(requests, device=p.device)
    here = target[each, accepted]
    if width == 0:
        residual = here
    else:
        rejected = (accepted < counts).view(-1, 1)
        residual = (here - draft[each, accepted.clamp(max=width - 1)] * rejected).clamp_(min=0)
    # Nothing is left where both agree up to rounding: then the target's own distribution is as good.
    empty = residual.sum(-1, keepdim=True) <= 0
    residual = torch.where(empty, here, residual)
    return accepted, draw(residual, generator)
