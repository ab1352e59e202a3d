"""Several decode steps of a batch between two looks of SGLang's scheduler (``--num-continuous-decode-steps``).

Between two steps the scheduler, the composition of the batch and the look at its results take a few milliseconds of
the host, longer than a fast step of a GPU. Room for all tokens is taken before the first step; each further one is
SGLang's own step, of the same batch moved on by a token, and reads what was sampled just before it, on the device.
The host sees the tokens at the end, and gives back the room of those that do not stand.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from fathom.runtime.decode_chain import Chain
from fathom.runtime.decode_step import Outcome
from fathom.runtime.sglang_host.memory.tails import Tail, Tails
from fathom.runtime.sglang_host.requests import ends_of, speculates
from fathom.runtime.sglang_host.step.bursts import BurstResult, burst, lengthen
from fathom.runtime.sglang_host.step.rows import Run, alone
from fathom.runtime.staging import send


def continues(request: Req) -> bool:
    """Whether a step of the request may follow another one that the host has not looked at."""
    plain = alone(request) and not speculates(request)
    return plain and request.grammar is None and not request.return_logprob


class Continuous:
    """The further steps of decode batches."""

    def __init__(self, tails: Tails, most: int) -> None:
        """
        Args:
            most: decode steps between two looks of the scheduler.
        """
        self.tails, self.most = tails, most
        self.steps = 0

    def takes(self, requests: Iterable[Req]) -> bool:
        """Whether a batch of these requests may go on by itself."""
        return self.most > 1 and all(map(continues, requests))

    def room(self, batch: ScheduleBatch) -> list[Tail]:
        """Room for the tokens of further steps, the same behind each request; none where one step is all."""
        if not batch.forward_mode.is_decode() or not self.takes(batch.reqs):
            return []
        if self.tails.allocator.memory.any_pending(batch.req_pool_indices_cpu.tolist()):
            return []
        lengths = [len(request.origin_input_ids) + len(request.output_ids) for request in batch.reqs]
        if lengths != batch.seq_lens_cpu.tolist():  # a last token is not known yet
            return []
        left = max(request.sampling_params.max_new_tokens - len(request.output_ids) for request in batch.reqs)
        wanted = min(self.most, left) - 1
        if wanted < 1:
            return []
        tails = self.tails.take([(request, wanted) for request in batch.reqs])
        count = min(tail.count for tail in tails)
        tails = self.tails.shrink(tails, [count] * len(tails))
        return tails if count else []

    def go_on(
        self,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
        tails: Sequence[Tail],
        chain: Chain | None,
        within: Callable[[int], AbstractContextManager[None]],
        forward: Callable[[ScheduleBatch], GenerationBatchResult],
        again: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> tuple[BurstResult, dict[Req, list[Outcome | None]]]:
        """Run the further steps and settle what stands.

        Args:
            result: of the first step; tails: of :meth:`room`.
            chain: has the first step, where some request decodes slow and fast.
            within: a step runs in it, given for how many tokens there is room behind it; forward: a step.
            again: the tokens of a step that is a captured one replayed with what the last one has left, given the
                tokens that it reads; None where there is none.

        Returns:
            The result of all steps, and by request what each of its steps was.
        """
        first, device = batch.out_cache_loc, result.next_token_ids.device
        tokens, there = [result.next_token_ids], batch.seq_lens_cpu
        room = send(np.stack([tail.slots for tail in tails], 1), device, torch.int64)
        for place, slots in enumerate(room, 1):
            batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens_cpu + 1, None
            read = tokens[-1].long()
            with within(len(room) - place):
                put_out = again(read)
                if put_out is None:
                    batch.input_ids, batch.out_cache_loc = read, slots
                    lengthen(batch, batch.seq_lens_cpu - there)
                    there = batch.seq_lens_cpu
                    put_out = forward(batch).next_token_ids
            tokens.append(put_out)
        self.steps += len(tokens) - 1
        all_tokens = torch.stack(tokens)
        known = all_tokens.cpu().numpy()
        counts = np.array([_stands(request, own) for request, own in zip(batch.reqs, known.T, strict=True)])
        outcomes: list[list[Outcome | None]] = [[None] * int(count) for count in counts]
        if chain is not None:
            counts, outcomes = chain.settle(known, counts)
        self.tails.settle(tails, (counts - 1).tolist())
        batch.seq_lens_cpu = batch.seq_lens_cpu + torch.from_numpy(counts) - len(tokens)
        batch.seq_lens_sum = None
        lengthen(batch, batch.seq_lens_cpu - there)
        batch.out_cache_loc = first
        result.next_token_ids = all_tokens.gather(0, send(counts - 1, device).view(1, -1)).squeeze(0)
        runs = {place: Run(known[:count, place].tolist()) for place, count in enumerate(counts.tolist())}
        return burst(result, runs), dict(zip(batch.reqs, outcomes, strict=True))


def _stands(request: Req, tokens: np.ndarray) -> int:
    """How many of the tokens may stand: up to the answer's length, or its end."""
    left = min(request.sampling_params.max_new_tokens - len(request.output_ids), len(tokens))
    ends = np.flatnonzero(np.isin(tokens[:left], list(ends_of(request))))
    return int(ends[0]) + 1 if len(ends) else max(left, 1)
