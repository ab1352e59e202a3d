"""What the draft reads while it looks ahead, and whose queries judge which prompt; the draft is made up."""

import torch

from fathom.runtime.sglang_host.draft_attention import Captured
from fathom.runtime.sglang_host.lookahead import Prompt, look_ahead

VOCABULARY, END = 50, 49


class Draft:
    """Says the next number after the last token; its query of a token is that token."""

    def __init__(self):
        self.passes, self.scored = [], None

    def scratch_slots(self, request, count):
        return torch.arange(100 + request * count, 100 + (request + 1) * count, dtype=torch.int32)

    def read(self, lists, reads, captured):
        self.passes.append([(lists.parts[r.which][: r.length].tolist(), r.tokens) for r in reads])
        said = torch.tensor([r.tokens[-1] + 1 for r in reads])
        captured.queries = {layer: [said.float() - 1 + layer * 100] for layer in range(2)}
        return torch.nn.functional.one_hot(said, VOCABULARY).float()

    def scores(self, queries, rows, prompts, scale):
        self.scored = {layer: query.tolist() for layer, query in queries.items()}, list(rows), scale
        return "scores"


def test_each_token_is_read_behind_its_own_prompt_and_those_before_it():
    draft = Draft()
    prompts = [
        Prompt(torch.arange(first, first + length, dtype=torch.int32), steps, frozenset({END}))
        for first, length, steps in ((1, 3, 4), (11, 2, 4), (21, 4, 2))
    ]
    logits = torch.nn.functional.one_hot(torch.tensor([7, END - 1, 30]), VOCABULARY)
    first = Captured(
        torch.empty(0), {layer: [torch.tensor([1.0, 2.0, 3.0]) + layer * 100] for layer in range(2)}, 0.5
    )
    assert look_ahead(draft, prompts, logits, first) == ("scores", [4, 2, 2])
    assert [prompt.tokens for prompt in prompts] == [[7, 8, 9, 10], [END - 1, END], [30, 31]]
    assert draft.passes == [
        [([1, 2, 3, 100], [7]), ([11, 12, 104], [END - 1]), ([21, 22, 23, 24, 108], [30])],
        [([1, 2, 3, 100, 101], [8])],
        [([1, 2, 3, 100, 101, 102], [9])],
    ]
    queries = [1.0, 7, 8, 9, 2, END - 1, 3, 30]
    assert draft.scored == ({0: queries, 1: [query + 100 for query in queries]}, [4, 2, 2], 0.5)
    assert [prompt.scratch[:2].tolist() for prompt in prompts] == [[100, 101], [104, 105], [108, 109]]
