"""Which drafted tokens stand: speculative sampling, batched over requests.

A request brings k drafted tokens and the target's k + 1 distributions, one before each of them and one after the
last. What is put out follows the target's distribution exactly, whatever the draft proposed (Leviathan et al. 2023,
"Fast Inference from Transformers via Speculative Decoding", Algorithm 1).
"""

import torch

from fathom.runtime.sampling import draw


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
