"""A world's models on disk, and what the oracles expect of a request to them."""

import copy
import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from adapters import save_adapter
from conftest import save_random_model
from fuzz.worlds import Adapter, World
from noisy import draft_flags, noisy_copy
from oracles import combined, drafted, specprefill
from transformers import AutoModelForCausalLM, AutoTokenizer

from fathom.runtime.sfi.trigger import trigger_ids
from fathom.runtime.specprefill.step import random_scores

CHUNK = 32
"""SpecPrefill's, in tokens."""
SHAKES = (2e-7, 2e-7, 1e-6, 1e-6, 3e-6, 3e-6)
"""Relative noise on weights, as large as float32's rounding: an answer that it changes is decided by rounding."""
LOGPROB_SHIFT = 1e-3
"""Log-probabilities that such noise moves further than this are not compared."""


class Reference:
    """The oracles of a world.

    Attributes:
        flags: of a server, to find the models and adapters.
        ends: ids that end an answer if they are not ignored.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.target = world, folder / "target"
        self.target.mkdir(parents=True)
        save_random_model(self.target, world.target.family, **world.target.config)
        self.tokenizer = AutoTokenizer.from_pretrained(self.target)
        self.triggers = trigger_ids(self.tokenizer.backend_tokenizer)
        self.model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()
        with torch.no_grad():
            self.model.lm_head.weight[self.triggers] *= world.target.ending
        self.model.save_pretrained(self.target)
        self.ends = self._ends()
        self.judge, self.flags = None, ()
        if world.draft is not None:
            draft = self._make_draft(folder / "draft")
            self.judge = drafted.Draft(draft)
            self.flags = draft_flags(draft, world.draft.cost)
        self._known: dict[Any, combined.Answer] = {}
        self._judged: dict[Any, list[int]] = {}
        self._adapted = {adapter.name: self._with(adapter, folder) for adapter in world.adapters}
        if world.adapters:
            self.flags += ("--lora-paths", *(f"{name}={folder / name / 'adapter'}" for name in self._adapted))

    def of(self, adapter: str | None) -> "Reference":
        """That of requests with an adapter: another model, the same draft."""
        return self if adapter is None else self._adapted[adapter]

    def _with(self, adapter: Adapter, folder: Path) -> "Reference":
        other = copy.copy(self)
        told = {"seed": adapter.seed, "rooted": adapter.rooted}
        _, merged = save_adapter(folder / adapter.name, self.target, adapter.rank, adapter.modules, **told)
        other.model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
        other._known = {}
        return other

    def _make_draft(self, folder: Path) -> Path:
        draft = self.world.draft
        if draft.noise is not None:
            return noisy_copy(self.target, folder, draft.noise)
        folder.mkdir()
        return save_random_model(folder, draft.family, **draft.config)

    def _ends(self) -> frozenset[int]:
        ends = {self.tokenizer.eos_token_id, self.model.config.eos_token_id}
        if (file := self.target / "generation_config.json").exists():
            told = json.loads(file.read_text()).get("eos_token_id")
            ends |= set(told if isinstance(told, list) else [told])
        return frozenset(ends - {None})

    def expected(
        self,
        prompt: Sequence[int],
        policy: Mapping[str, Any],
        new_tokens: int,
        ends: Collection[int] = frozenset(),
        spans: Iterable[tuple[int, int]] = (),
        forced: Sequence[int] = (),
        seed: int | None = None,
        taken_back: int = 0,
    ) -> combined.Answer:
        """The answer, computed once.

        Args:
            policy: as it took effect. spans: of the prompt, which SpecPrefill protects.
            ends: ids at which the draft ends what it says.
            forced: the answer's first tokens. seed: of sampling. taken_back: as of ``combined.generate``.
        """
        spans = tuple(spans)
        key = (
            *(tuple(prompt), tuple(sorted(policy.items())), new_tokens, frozenset(ends), spans),
            *(tuple(forced), seed, taken_back),
        )
        if key not in self._known:
            prefill, decode = combined.of_policy(
                policy,
                prompt,
                self.world.tsp_layer or None,
                lambda rate: self._entered(prompt, policy, rate, ends, spans),
                self.world.settings,
                self.triggers,
            )
            if seed is not None:
                decode = dataclasses.replace(decode, seed=combined.random_seed(prompt, seed))
            force = lambda i: forced[i] if i < len(forced) else None  # noqa: E731
            self._known[key] = combined.generate(
                self.model, prompt, new_tokens, prefill, decode, force, taken_back
            )
        return self._known[key]

    def _entered(self, prompt, policy, rate, ends, spans) -> list[int]:
        if policy.get("prefill_selection") == "random":
            return specprefill.kept_tokens(random_scores(prompt, CHUNK), spans, rate)
        key = (tuple(prompt), rate, policy["lookahead"], frozenset(ends), spans)
        if key not in self._judged:
            self._judged[key] = self.judge.kept(prompt, rate, spans, steps=policy["lookahead"], ends=ends)
        return self._judged[key]

    @torch.no_grad()
    def prompt_logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """[N, vocabulary] of the dense model: row i is of what follows token i."""
        return self.model(torch.tensor([list(prompt)])).logits[0].float().log_softmax(-1)

    def decided_by_rounding(self, *asked: Any, moved: float = 0.0, **more: Any) -> bool:
        """Whether noise like rounding changes the answer, what is kept, or the log-probabilities visibly.

        Args:
            asked: as of :meth:`expected`, as ``more`` is.
            moved: by how much a log-probability is off; what is far more than noise does is no rounding.
        """
        want, most = self.expected(*asked, **more), 0.0
        for number, noise in enumerate(SHAKES):
            other = self._shaken(noise, number).expected(*asked, **more)
            if (other.tokens, other.sets, other.kept) != (want.tokens, want.sets, want.kept):
                return True
            for a, b in zip(other.logits, want.logits, strict=True):
                most = max(most, off(a.log_softmax(-1), b.log_softmax(-1)).max().item())
            if most > max(LOGPROB_SHIFT, moved / 2):
                return True
        return False

    def is_said_by_rounding(self, tokens: list[int], *asked: Any) -> bool:
        """Whether noise like rounding makes this very answer of the one that is expected."""
        return any(
            self._shaken(noise, number).expected(*asked).tokens == tokens
            for number, noise in enumerate(SHAKES)
        )

    def _shaken(self, noise: float, seed: int) -> "Reference":
        other = copy.copy(self)
        other._known, other._judged, other.model = {}, {}, shaken(self.model, noise, seed)
        if self.judge is not None:
            other.judge = copy.copy(self.judge)
            other.judge.model = shaken(self.judge.model, noise, seed + len(SHAKES))
        return other


def off(value: float | torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Difference of log-probabilities; of very unlikely tokens relative to how unlikely they are."""
    return (value - want).abs() / (-want / 10).clamp(min=1.0)


@torch.no_grad()
def shaken(model: torch.nn.Module, noise: float, seed: int) -> torch.nn.Module:
    """A copy with relative noise on its weights."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weights in other.parameters():
        weights *= 1 + noise * torch.randn(weights.shape, generator=generator)
    return other
