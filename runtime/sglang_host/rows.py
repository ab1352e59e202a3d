"""The target's distribution at a row, as SGLang's sampler makes it, for rows that SGLang's step does not sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.layers import sampler
from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.sampling import draw, target_probs
from fathom.runtime.sglang_host.requests import penalised, speculates
from fathom.runtime.sglang_host.seeds import draw_seeded
from fathom.runtime.staging import send
from fathom.runtime.verify import match, reject


@dataclass
class Run:
    """The tokens that one step puts out for a request.

    Attributes:
        logprobs: per token its log-probability, empty when nobody asked.
        top: per token (values, ids) of the most likely tokens; chosen: (values, ids) of the ids asked for.
    """

    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[list[float], list[int]]] = field(default_factory=list)
    chosen: list[tuple[list[float], list[int]]] = field(default_factory=list)


def alone(request: Req) -> bool:
    """Whether a token's distribution follows from the tokens before it, and no more is asked of its step.

    Penalties and a minimal length make it depend on them in ways that SGLang's sampler keeps account of for one
    token per step; such requests run one token at a time.
    """
    whole = not request.return_hidden_states and not request.return_sampling_mask
    return (
        not penalised(request)
        and whole
        and request.sampling_params.min_new_tokens == 0
        and request.custom_logit_processor is None
        and request.beam_group is None
    )


def drafts(request: Req) -> bool:
    """Whether the request wants drafted tokens, and they can be verified in one pass.

    Requests whose grammar cannot take tokens back (that of ``outlines``) run one token at a time.
    """
    return speculates(request) and alone(request) and takes_back(request.grammar)


def takes_back(grammar: Any) -> bool:
    """Whether a grammar can forget tokens that it has accepted; None can."""
    if isinstance(grammar, ReasonerGrammarObject):
        grammar = grammar.grammar
    return grammar is None or type(grammar).rollback is not BaseGrammarObject.rollback


def is_greedy(request: Req) -> bool:
    """Whether the request takes the most likely token."""
    return request.sampling_params.top_k == 1


def grammar_mask(grammar: Any, vocabulary: int) -> torch.Tensor | None:
    """SGLang's bit mask [1, words] of what the grammar allows next; None when it allows everything."""
    if grammar is None or grammar.finished or grammar.is_terminated():
        return None
    mask = grammar.allocate_vocab_mask(vocab_size=vocabulary, batch_size=1, device="cpu")
    grammar.fill_vocab_mask(mask, 0)
    return mask


def allows(mask: torch.Tensor | None, token: int) -> bool:
    """Whether a mask of :func:`grammar_mask` allows a token."""
    return mask is None or bool(mask[0, token // 32] >> token % 32 & 1)


class RowSampler:
    """What one request of a batch asks of its rows.

    Args:
        info: SGLang's sampling information of the batch; index: the request's place in it.
    """

    def __init__(self, request: Req, info: Any, index: int) -> None:
        self.request, self.info, self.index = request, info, index
        self.greedy = is_greedy(request)
        self.seeded = request.sampling_params.sampling_seed is not None and info.sampling_seed is not None

    def prepare(self, logits: torch.Tensor, masks: list[torch.Tensor | None]) -> torch.Tensor:
        """Logits [rows, vocabulary] with the request's bias and each row's grammar mask; a new tensor."""
        logits = logits.float().clone()
        if self.info.logit_bias is not None:
            logits += self.info.logit_bias[self.index]
        for row, mask in zip(logits, masks, strict=True):
            if mask is not None:
                self.request.grammar.apply_vocab_mask(row.view(1, -1), send(mask, row.device))
        return logits

    def _each(self, values: torch.Tensor, rows: int) -> torch.Tensor:
        return values[self.index].reshape(1).expand(rows)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] that a token is drawn from."""
        info, rows = self.info, len(logits)
        return target_probs(
            logits,
            self._each(info.temperatures, rows),
            self._each(info.top_ks, rows),
            self._each(info.top_ps, rows),
            self._each(info.min_ps, rows),
        )

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A token [1] from the draft's prepared logits [1, vocabulary], and the distribution it was drawn from.

        None stands for a token taken without chance. Nothing waits for the device. What the draft's logits overflow
        to is as good as any other logit: the token is verified.
        """
        logits = logits.nan_to_num(nan=0.0, posinf=0.0, neginf=float("-inf"))
        if self.greedy or self.seeded:
            return logits.argmax(-1), None
        probs = self.probs(logits)
        return draw(probs), probs

    def accept(
        self, logits: torch.Tensor, drafted: list[int], proposed: list[torch.Tensor | None], position: int
    ) -> torch.Tensor:
        """The tokens that stand, and the one that follows them. Nothing waits for the device.

        Args:
            logits: [len(drafted) + 1, vocabulary] prepared; position: of the token before the first drafted one.

        Returns:
            [len(drafted) + 2] int64: how many drafted tokens stand, then them and the one that follows.
        """
        device = logits.device
        count, tokens = (
            send(torch.tensor([values]), device, torch.long) for values in (len(drafted), drafted)
        )
        if self.greedy or self.seeded:
            choices = logits.argmax(-1) if self.greedy else self._seeded(logits, position)
            choices = choices.view(1, -1).long()
            return torch.cat([match(choices, tokens, count), choices[0]])
        vocabulary = logits.shape[1]
        q = [
            torch.nn.functional.one_hot(token.view(1), vocabulary).float() if probs is None else probs
            for token, probs in zip(tokens[0], proposed, strict=True)
        ]
        draft = torch.cat(q).view(1, -1, vocabulary) if q else logits.new_zeros(1, 0, vocabulary)
        accepted, following = reject(self.probs(logits).unsqueeze(0), draft, tokens, count)
        put_out = torch.cat([tokens[0], following]).scatter(0, accepted, following)
        return torch.cat([accepted, put_out])

    def _seeded(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """What SGLang's sampler draws for the request's seed at each row's position."""
        seeds = self._each(self.info.sampling_seed, len(logits))
        positions = torch.arange(position, position + len(logits), device=logits.device)
        return draw_seeded(self.probs(logits), seeds, positions)

    def asked_of(self, logits: torch.Tensor, tokens: list[int]) -> list[torch.Tensor]:
        """What the request asked for of the tokens' log-probabilities, from its prepared logits, for :meth:`run`.

        Nothing waits for the device.

        Returns:
            As far as somebody asked: of each token its own [tokens, 1]; the highest and their ids [tokens, n] each;
            those of the ids asked for [tokens, m].
        """
        asked = self.request.logprob
        if not self.request.return_logprob:
            return []
        unscaled = self.greedy or sampler.SGLANG_RETURN_ORIGINAL_LOGPROB
        temperature = 1.0 if unscaled else self.info.temperatures[self.index]
        logprobs = torch.log_softmax(logits[: len(tokens)] / temperature, -1)
        logprobs = logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)
        found = [logprobs.gather(1, send(torch.tensor(tokens), logprobs.device).view(-1, 1))]
        if asked.top_logprobs_num > 0:
            found += logprobs.topk(asked.top_logprobs_num)
        if asked.token_ids_logprob is not None:
            ids = send(torch.tensor(list(asked.token_ids_logprob)), logprobs.device)
            found.append(logprobs.index_select(1, ids))
        return found

    def run(self, tokens: list[int], found: Iterator[np.ndarray]) -> Run:
        """The tokens with what :meth:`asked_of` found, taken off the front of ``found``."""
        run, asked = Run(tokens), self.request.logprob
        if not self.request.return_logprob:
            return run
        run.logprobs = next(found)[:, 0].tolist()
        if asked.top_logprobs_num > 0:
            values, ids = next(found).tolist(), next(found).astype(np.int64).tolist()
            run.top = list(zip(values, ids, strict=True))
        if asked.token_ids_logprob is not None:
            run.chosen = [(row, list(asked.token_ids_logprob)) for row in next(found).tolist()]
        return run


def fetched(tensors: Sequence[torch.Tensor]) -> Iterator[np.ndarray]:
    """The tensors on the host, in float64, which holds token ids and float32 exactly; one wait for all of them."""
    if not tensors:
        return iter(())
    flat = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return (part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
