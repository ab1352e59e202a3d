"""The distribution that a token is drawn from, made explicit, and the draw."""

import torch

from fathom.kernels.sampling_cpu import draw_cpu, filtered_cpu


def target_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """The distribution that the engine's sampler draws from.

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
    """What the rules leave of probabilities [rows, vocabulary], scaled to sum 1; nothing waits for the device.

    Top-k and top-p are both judged on the unfiltered distribution, min-p on what they left.
    """
    if probs.device.type == "cpu":
        return filtered_cpu(probs, top_ks, top_ps, min_ps)
    return filtered_by_sorting(probs, top_ks, top_ps, min_ps)


def filtered_by_sorting(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """:func:`filtered` in plain PyTorch."""
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
    """One token from each row of [rows, vocabulary], as likely as it says; rows need not sum to 1.

    ``torch.multinomial`` first looks at the probabilities on the host, for which it waits for the device; and on a
    CPU it draws a number for each token of the vocabulary.

    Returns:
        [rows] int64.
    """
    if probs.device.type == "cpu":
        return draw_cpu(probs, torch.empty(len(probs), dtype=torch.double).uniform_(generator=generator))
    return (probs / torch.empty_like(probs).exponential_(1, generator=generator)).argmax(-1)
