"""What the draft reads while it looks ahead, and whose queries judge which prompt; the draft is made up."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.sglang_host.draft.draft_attention import Captured
from fathom.runtime.sglang_host.draft.draft_model import SCRATCH_SLOTS
from fathom.runtime.sglang_host.draft.lookahead import Prompt, groups, look_ahead

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


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_prompts_changes_nothing_for_any_of_them(order):
    """Their look-aheads end at different times."""
    prompts = [
        Prompt(torch.arange(first, first + 3, dtype=torch.int32), steps, frozenset({END}))
        for first, steps in ((1, 2), (11, 5), (21, 5))
    ]
    said = [[7, 8], [20, 21, 22, 23, 24], [END - 2, END - 1, END]]
    begin = torch.tensor([said[i][0] for i in order])
    own = torch.tensor([float(i) for i in order])
    first = Captured(torch.empty(0), {layer: [own + layer * 100] for layer in range(2)}, 0.5)
    draft, asked = Draft(), [prompts[i] for i in order]
    _, rows = look_ahead(draft, asked, torch.nn.functional.one_hot(begin, VOCABULARY), first)
    assert [prompt.tokens for prompt in prompts] == said
    assert rows == [len(said[i]) for i in order]
    assert draft.scored[0][0] == [query for i in order for query in (float(i), *said[i][:-1])]
    for passed, done in zip(draft.passes, range(1, 5), strict=True):
        own = [(place, i) for place, i in enumerate(order) if len(said[i]) > done]
        slots = [
            prompts[i].slots.tolist() + list(range(100 + 5 * place, 100 + 5 * place + done))
            for place, i in own
        ]
        assert passed == [(slot, [said[i][done - 1]]) for slot, (_, i) in zip(slots, own, strict=True)]


@given(st.lists(st.sampled_from([1, 2, 8, 100, 341, 342, 512, SCRATCH_SLOTS]), min_size=1, max_size=12))
def test_groups_are_as_large_as_their_look_aheads_fit(steps):
    prompts = [Prompt(torch.empty(0), count, frozenset()) for count in steps]
    found = groups(prompts)
    assert [index for group in found for index in group] == list(range(len(steps)))
    for group, after in itertools.pairwise([*found, []]):
        room = len(group) * max(steps[i] for i in group)
        assert room <= SCRATCH_SLOTS
        if after:
            assert (len(group) + 1) * max(steps[i] for i in [*group, after[0]]) > SCRATCH_SLOTS
