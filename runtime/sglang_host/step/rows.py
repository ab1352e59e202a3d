"""The target's distribution at a row, as SGLang's sampler makes it, for rows that SGLang's step does not sample."""

from collections.abc import Callable, Iterator, Sequence
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
from fathom.runtime.sglang_host.sampling.seeds import draw_seeded
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

    @property
    def chooses(self) -> bool:
        """Whether there is one token that it takes, by no chance."""
        return self.greedy or self.seeded

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


ROWS_AT_ONCE = 32
"""Of a large vocabulary a row is 600 KB, and a sort takes several times that."""


def grouped(counts: Sequence[int]) -> Iterator[slice]:
    """Requests with so many rows each in groups of at most :data:`ROWS_AT_ONCE` rows, or of one request."""
    begin, rows = 0, 0
    for place, count in enumerate(counts):
        if rows and rows + count > ROWS_AT_ONCE:
            yield slice(begin, place)
            begin, rows = place, 0
        rows += count
    if rows:
        yield slice(begin, len(counts))


def without_overflow(logits: torch.Tensor) -> torch.Tensor:
    """The draft's logits: what they overflow to is as good as any other logit, as its tokens are verified."""
    return logits.nan_to_num(nan=0.0, posinf=0.0, neginf=float("-inf"))


class SampledRows:
    """Rows of several requests of a batch, one request's behind the other's: sampled together, at a few launches.

    Nothing here waits for the device.

    Args:
        samplers: of the requests; counts: rows of each.
    """

    def __init__(self, samplers: Sequence[RowSampler], counts: Sequence[int], device: torch.device) -> None:
        self.samplers, self.counts, self.device = samplers, np.array(counts), device
        self.first = np.cumsum(self.counts) - self.counts

    def prepare(self, logits: torch.Tensor, masks: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Logits [rows, vocabulary] with each request's bias and each row's grammar mask; float32, not in place."""
        given, bias = logits, self.samplers[0].info.logit_bias
        logits = logits.float()
        if bias is not None:
            logits = logits + self._each(bias, range(len(self.samplers)))
        requests = [
            s.request for s, count in zip(self.samplers, self.counts, strict=True) for _ in range(count)
        ]
        masked = [row for row, mask in enumerate(masks) if mask is not None]
        if masked and logits is given:
            logits = logits.clone()
        for row in masked:
            mask = send(masks[row], logits.device)
            requests[row].grammar.apply_vocab_mask(logits[row : row + 1], mask)
        return logits

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """A token of each request from the draft's prepared logits [requests, vocabulary], a row each.

        Returns:
            [requests] int64, and of each the distribution [1, vocabulary] it was drawn from; None stands for a
            token taken without chance.
        """
        logits = without_overflow(logits)
        tokens = logits.argmax(-1)
        drawn = self._which(lambda sampler: not sampler.chooses)
        if not drawn:
            return tokens, [None] * len(self.samplers)
        probs = self._probs(logits, drawn)
        tokens[self._sent(drawn)] = draw(probs)
        found = iter(probs.split(1))
        return tokens, [None if sampler.chooses else next(found) for sampler in self.samplers]

    def accept(
        self,
        logits: torch.Tensor,
        drafted: Sequence[list[int]],
        proposed: Sequence[list[torch.Tensor | None]],
        positions: Sequence[int],
        width: int,
    ) -> torch.Tensor:
        """The tokens that stand, and the one that follows them.

        Args:
            logits: prepared; of each request a row before each token drafted for it and one after the last.
            drafted: tokens of each; proposed: what :meth:`propose` said of each; positions: of the token before the
                first drafted one; width: of the answer, no fewer than the most drafted for one.

        Returns:
            [requests, 2 + width] int64: how many drafted tokens stand, then them and the one that follows; what is
            behind means nothing.
        """
        most = int(self.counts.max()) - 1
        padded = np.zeros((len(drafted), most), np.int64)
        for row, tokens in zip(padded, drafted, strict=True):
            row[: len(tokens)] = tokens
        answers = torch.zeros(len(drafted), width + 2, dtype=torch.long, device=self.device)
        given = self._sent(padded), self._sent(self.counts - 1)
        if chosen := self._which(lambda sampler: sampler.chooses):
            choices = self._padded(self._choices(logits, positions), self.counts, most + 1)
            choices, tokens, counts = self._of(chosen, choices, *given)
            stand = torch.cat([match(choices, tokens, counts).view(-1, 1), choices], 1)
            answers[self._places(chosen), : most + 2] = stand
        if drawn := self._which(lambda sampler: not sampler.chooses):
            tokens, counts = self._of(drawn, *given)
            target = self._padded(self._probs(logits, drawn), self.counts[drawn], most + 1)
            draft = self._drafts(target[:, :most], [drafted[i] for i in drawn], [proposed[i] for i in drawn])
            accepted, following = (each.view(-1, 1) for each in reject(target, draft, tokens, counts))
            put_out = torch.cat([tokens, following], 1).scatter(1, accepted, following)
            answers[self._places(drawn), : most + 2] = torch.cat([accepted, put_out], 1)
        return answers

    def _which(self, asked: Callable[[RowSampler], bool]) -> list[int]:
        return [place for place, sampler in enumerate(self.samplers) if asked(sampler)]

    def _places(self, which: Sequence[int]) -> Any:
        """What indexes some requests; nothing is sent where it is all of them."""
        return slice(None) if len(which) == len(self.samplers) else self._sent(which)

    def _of(self, which: Sequence[int], *values: torch.Tensor) -> list[torch.Tensor]:
        """Of values [requests, ...] those of some requests."""
        places = self._places(which)
        return [each[places] for each in values]

    def _sent(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        return send(np.asarray(numbers, np.int64), self.device)

    def _each(self, values: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        """Of a batch's values [batch, ...] the one of each row of some requests."""
        places = np.repeat([self.samplers[i].index for i in which], self.counts[list(which)])
        return values[self._sent(places)]

    def _rows(self, which: Sequence[int]) -> torch.Tensor:
        """The rows of some requests."""
        return self._sent(np.concatenate([self.first[i] + np.arange(self.counts[i]) for i in which]))

    def _padded(self, values: torch.Tensor, counts: np.ndarray, width: int) -> torch.Tensor:
        """Values [rows, ...] of requests with so many rows each as [requests, width, ...], the last repeated."""
        if (counts == width).all():
            return values.unflatten(0, (len(counts), width))
        first = np.cumsum(counts) - counts
        return values[self._sent(first[:, None] + np.minimum(np.arange(width), counts[:, None] - 1))]

    def _probs(self, logits: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        """What the rows of some requests are drawn from."""
        info = self.samplers[0].info
        rules = (info.temperatures, info.top_ks, info.top_ps, info.min_ps)
        rows = logits if len(which) == len(self.samplers) else logits[self._rows(which)]
        return target_probs(rows, *(self._each(rule.view(-1), which) for rule in rules))

    def _choices(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Of each row [rows] the token that its request takes: the most likely, or what its seed draws there."""
        choices = logits.argmax(-1)
        if seeded := self._which(lambda sampler: sampler.seeded and not sampler.greedy):
            seeds = self._each(self.samplers[0].info.sampling_seed, seeded)
            at = np.concatenate([positions[i] + np.arange(self.counts[i]) for i in seeded])
            drawn = draw_seeded(self._probs(logits, seeded), seeds, self._sent(at))
            choices[self._rows(seeded)] = drawn
        return choices

    def _drafts(
        self, like: torch.Tensor, drafted: Sequence[list[int]], proposed: Sequence[list[torch.Tensor | None]]
    ) -> torch.Tensor:
        """[requests, width, vocabulary] what each token was drawn from; all of it the token where by no chance."""
        draft, certain, known, probs = torch.zeros_like(like), [], [], []
        for i, (tokens, given) in enumerate(zip(drafted, proposed, strict=True)):
            for place, (token, drawn_from) in enumerate(zip(tokens, given, strict=True)):
                if drawn_from is None:
                    certain.append((i, place, token))
                else:
                    known.append((i, place))
                    probs.append(drawn_from)
        if certain:
            draft[tuple(self._sent(np.array(certain)).T)] = 1
        if known:
            draft[tuple(self._sent(np.array(known)).T)] = torch.cat(probs)
        return draft


def fetched(tensors: Sequence[torch.Tensor]) -> Iterator[np.ndarray]:
    """The tensors on the host, in float64, which holds token ids and float32 exactly; one wait for all of them."""
    if not tensors:
        return iter(())
    flat = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return (part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
