"""Beam searches, against one that is written down plainly: every prefix is computed anew."""

from itertools import pairwise

import torch
from fuzz.clients import Reply, Wrong
from fuzz.reference import Reference, off
from greedy import TOLERANCE

TIE = 2e-4
"""Sums of log-probabilities as close as this may change places."""
TOO_FEW_ROWS = "req-to-token slots"
"""Words of the refusal where a server has fewer places than a search has beams."""

Ids = list[int]


@torch.no_grad()
def search(
    reference: Reference, prompt: Ids, width: int, new_tokens: int
) -> tuple[list[Ids], list[float], float]:
    """The ``width`` best answers of ``new_tokens`` tokens that keep their beginnings among the best, best first.

    Returns:
        the answers; the sums of their log-probabilities; and the least distance between a sum that was kept and
        one that was not.
    """
    beams: list[tuple[Ids, float]] = [([], 0.0)]
    nearest = float("inf")
    for _ in range(new_tokens):
        rows = torch.tensor([prompt + tokens for tokens, _ in beams])
        following = reference.model(rows).logits[:, -1].float().log_softmax(-1)
        sums = torch.tensor([total for _, total in beams])[:, None] + following
        best = sums.flatten().topk(width + 1)
        nearest = min(nearest, float(best.values[-2] - best.values[-1]))
        places = [divmod(int(place), sums.shape[1]) for place in best.indices[:width]]
        beams = [
            ([*beams[row][0], token], float(total))
            for (row, token), total in zip(places, best.values, strict=False)
        ]
    return [tokens for tokens, _ in beams], [total for _, total in beams], nearest


@torch.no_grad()
def sums_of(reference: Reference, prompt: Ids, answers: list[Ids]) -> list[float]:
    """The sum of each answer's log-probabilities; all are of one length."""
    rows = reference.model(torch.tensor([prompt + tokens for tokens in answers])).logits
    following = rows[:, len(prompt) - 1 : -1].float().log_softmax(-1)
    return [float(row) for row in following.gather(2, torch.tensor(answers)[:, :, None]).sum((1, 2))]


def check(reference: Reference, reply: Reply) -> bool:
    """Whether the answers could be compared with the plain search's.

    Raises:
        Wrong: where they are others, or have other scores.
    """
    request, told = reply.request, reply.answers[0]
    width, count = (request.sampling[name] for name in ("beam_width", "n"))
    found = told["meta_info"]["beam_results"]
    if len(found) != count or found[0]["output_ids"] != told["output_ids"]:
        raise Wrong(f"{len(found)} beams, not {count} of which the first is the answer")
    beams = [beam["output_ids"] for beam in found]
    if len(set(map(tuple, beams))) != count or {len(beam) for beam in beams} != {request.new_tokens}:
        raise Wrong("beams that are alike, or not as long as was asked for", beams)
    sums = sums_of(reference, request.prompt, beams)
    for beam, want in zip(found, sums, strict=True):
        got = beam["meta_info"]["sequence_score"] * request.new_tokens
        if off(got, torch.tensor(want)).item() > TOLERANCE * request.new_tokens:
            raise Wrong(f"a beam's log-probabilities sum up to {got}", want)
    if any(later > earlier + TIE for earlier, later in pairwise(sums)):
        raise Wrong("beams that are not in their order", sums)
    answers, best, nearest = search(reference, request.prompt, width, request.new_tokens)
    same_sums = all(abs(want - got) < TIE for want, got in zip(best, sums, strict=False))
    if same_sums and all(beam in answers for beam in beams):
        return True
    if nearest < TIE:
        return False
    raise Wrong("a beam that the plain search does not find", answers)
