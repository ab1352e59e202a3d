"""Makes a request's ``seed`` count without SGLang's deterministic mode, whatever its neighbours ask for.

Beside it, what else of sampling SGLang lets neighbours or rounding decide.

SGLang fills ``SamplingBatchInfo.sampling_seed`` only under ``--enable-deterministic-inference``, and then gives
every request without a seed the same one. Its PyTorch sampler draws from (seed, position) where there is one, so
filling it for the batches that hold a seeded request is enough; the other rows get a seed drawn at random.
Neither that sampler with min-p nor FlashInfer's takes seeds: batches with one are drawn here.

A token's noise belongs to its id. SGLang's belongs to its place among the tokens sorted by probability, where
rounding changes places: of 128,000 tokens many are as likely as the next.
"""

import inspect
import random
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from fathom.kernels.murmur_hash import murmur_hash32
from fathom.kernels.sampling_cpu import draw_seeded_cpu
from fathom.runtime.sampling import draw, filtered
from fathom.runtime.sglang_host.sampling import unsound
from fathom.runtime.staging import send

BACKENDS = ("pytorch", "flashinfer")
"""SGLang's sampling backends with which a seed counts."""

_merge_batch = SamplingBatchInfo.merge_batch


class SeededSampler(sampler.Sampler):
    """SGLang's sampler, by whose PyTorch branch batches with seeds are drawn.

    It takes log-probabilities from the logits, as SGLang's does in deterministic mode. Else it takes logarithms of
    probabilities, of which all below 1e-45 are zero: at a low temperature the most likely alternatives to a token
    were any, each with the lowest number there is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enable_deterministic = True

    def forward(
        self, logits_output: Any, sampling_info: SamplingBatchInfo, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        unsound.mark(logits_output, has_grammar=bool(sampling_info.grammars))
        return super().forward(logits_output, sampling_info, *args, **kwargs)

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> tuple[torch.Tensor, Any]:
        if sampling_info.sampling_seed is None:
            if not simple_sampling_case:
                # SGLang's draw from numbers that are none ends the engine, and with it everybody's requests.
                probs = probs.nan_to_num(nan=1.0)
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        with get_exec().kernel.override(sampling_backend="pytorch"):
            return super()._sample_from_probs(probs, sampling_info, positions, False)


_sample = sampler.top_k_top_p_min_p_sampling_from_probs_torch
_sample_plainly = sampler.sampling_from_probs_torch


def sample(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
) -> Any:
    """SGLang's draw by PyTorch; with seeds and on a CPU, where it sorts whole vocabularies, ours."""
    if sampling_seed is None and probs.device.type != "cpu":
        return _sample(
            probs,
            top_ks,
            top_ps,
            min_ps,
            need_min_p_sampling,
            None,
            positions,
            return_filtered_probs=return_filtered_probs,
        )
    weights = filtered(probs, top_ks, top_ps, min_ps)
    tokens = draw(weights) if sampling_seed is None else draw_seeded(weights, sampling_seed, positions)
    tokens = tokens.to(torch.int32)
    if not return_filtered_probs:
        return tokens
    weight = weights.gather(1, tokens.long().view(-1, 1)).view(-1)
    # SGLang takes the first ones for what could have been drawn.
    weights, ids = weights.sort(dim=-1, descending=True, stable=True)
    return tokens, weights, ids.to(torch.int32), weight


def sample_plainly(
    probs: torch.Tensor, sampling_seed: torch.Tensor | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """SGLang's draw where there are no rules; on a CPU, where it draws a number for each token, ours."""
    if sampling_seed is None and probs.device.type == "cpu":
        return draw(probs).to(torch.int32)
    tokens: torch.Tensor = _sample_plainly(probs, sampling_seed, positions)
    return tokens


def draw_seeded(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A token of each row of [rows, vocabulary], by the row's seed and position.

    Returns:
        [rows] int64.
    """
    if weights.device.type == "cpu":
        return draw_seeded_cpu(weights, seeds, positions)
    drawn: torch.Tensor = sampler.multinomial_with_seed(weights.double().log_(), seeds, positions)
    return drawn.view(-1)


def _random_seed() -> int:
    return random.getrandbits(63)


def _supported() -> bool:
    return get_exec().kernel.sampling_backend in BACKENDS


def as_if_alone(info: SamplingBatchInfo) -> None:
    """Let no neighbour that samples give a request without chance a temperature.

    Where all take the most likely token SGLang leaves it out; where one samples it scales everybody's
    log-probabilities.
    """
    info.temperatures.masked_fill_(info.top_ks.view(-1, 1) <= 1, 1)


def _set(info: SamplingBatchInfo, seeds: list[int]) -> None:
    info.sampling_seed = send(torch.tensor(seeds), info.device)


def adjusted_from_schedule_batch(self: SamplingBatchInfo, batch: Any, vocab_size: int) -> None:
    """SGLang's hook at the end of ``from_schedule_batch``: fill the seeds if any request brought one."""
    as_if_alone(self)
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if self.sampling_seed is None and any(seed is not None for seed in seeds) and _supported():
        _set(self, [_random_seed() if seed is None else seed % (1 << 63) for seed in seeds])


def merge_batch(self: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
    """SGLang's ``merge_batch``, which drops the rows of a side without seeds: give it seeds first."""
    both = (self, other)
    if any(info.sampling_seed is not None for info in both):
        for info in both:
            if info.sampling_seed is None:
                _set(info, [_random_seed() for _ in range(len(info))])
    _merge_batch(self, other)


def install(native: bool) -> None:
    """Put the functions in SGLang's places; on a platform of ours, also a hash and a draw that are not compiled.

    SGLang's draw is: everybody would wait for the compiler when the first seeded request comes, and again for the
    first two at once.
    """
    SamplingBatchInfo.adjusted_from_schedule_batch = adjusted_from_schedule_batch
    SamplingBatchInfo.merge_batch = merge_batch
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample
    sampler.sampling_from_probs_torch = sample_plainly
    for backend in BACKENDS:
        sampler.register_sampler_backend(backend, SeededSampler)
    if native:
        sampler.murmur_hash32 = murmur_hash32
        sampler.multinomial_with_seed = inspect.unwrap(sampler.multinomial_with_seed)
