"""The parts of SFI composed in a plain loop give the tokens, phases and selections of Algorithms 1 and 2.

No engine: a pool with scattered slots, a batch whose rows are in different phases, contexts below sink + recent.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracles import attending
from oracles import sfi as oracle

from fathom.kernels.two_segment_attention import two_segment_attention
from fathom.runtime.sfi.buffers import CompactRuns, RunShape
from fathom.runtime.sfi.config import SelectorConfig, SfiConfig
from fathom.runtime.sfi.refresh import EvidenceRing, InOrder, RefreshExecutor
from fathom.runtime.sfi.step import plan_step, refresh_layer
from fathom.runtime.sfi.trigger import PhaseState, trigger_mask

VOCABULARY, KV_HEADS = 128, 2
SELECTOR = SelectorConfig(nms_radius=3, prior_clip=0.2)
CONFIG = SfiConfig(sink=4, recent=16, selected=20, refresh_budget=9)
TRIGGERS = list(range(0, VOCABULARY, 11))


def settings(config: SfiConfig) -> oracle.Settings:
    return oracle.settings_of(config, SELECTOR)


@pytest.fixture(scope="module")
def model(random_model):
    return random_model(3)


@dataclass
class Trace:
    """One request's history in the loop."""

    tokens: list[int]
    slow: list[bool]
    selected: list


class Loop:
    """Greedy decoding of a batch with SFI's parts and nothing else."""

    def __init__(self, model, config: SfiConfig, requests: int, width: int, runs: int) -> None:
        self.model, self.config = model, config
        layers, heads, kv_heads = len(model.model.layers), model.config.num_attention_heads, KV_HEADS
        dim = model.config.head_dim
        slots = requests * width + 3
        self.table = torch.randperm(slots)[: requests * width].view(requests, width).int()
        self.pool = [
            (torch.randn(slots, kv_heads, dim), torch.randn(slots, kv_heads, dim)) for _ in range(layers)
        ]
        shape = RunShape.of(config, layers, kv_heads, dim, dim, 4)
        self.runs = CompactRuns(shape, runs * shape.bytes)
        buffer = (self.runs.tokens, kv_heads, dim)
        self.compact = [(torch.full(buffer, torch.nan), torch.full(buffer, torch.nan)) for _ in range(layers)]
        self.phases = PhaseState(requests, trigger_mask(TRIGGERS, VOCABULARY), config)
        memory = 4 * requests * width * (heads + kv_heads) * 2
        self.ring = EvidenceRing(2, heads, kv_heads, memory)
        self.executor = RefreshExecutor(InOrder(), slots=2)
        self.start = np.full(requests, -1)
        self.held = np.zeros(requests, np.int64)
        self.length = np.zeros(requests, np.int64)
        self.traces: list[Trace] = []

    def prefill(self, prompt: list[int]) -> None:
        row, n = len(self.traces), len(prompt)
        self.length[row] = n
        start = self.runs.acquire(row)
        self.start[row] = -1 if start is None else start

        def attend(i, q, k, v, scale):
            slots = self.table[row, :n].long()
            self.pool[i][0][slots], self.pool[i][1][slots] = k.transpose(0, 1), v.transpose(0, 1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        first = attending.forward(self.model, prompt, attend).argmax(-1)
        self.phases.admit(np.array([row]), first.numpy())
        self.traces.append(Trace([int(first)], [], []))

    def refresh(self, layer, evidence, batch):
        return refresh_layer(
            evidence, self.pool[layer], self.compact[layer], self.table, batch, self.config, SELECTOR
        )

    @staticmethod
    def listed(selections, entry) -> list[list[list[int]]]:
        """[layer][KV head] chosen indices of one entry of the refresh."""
        return [[[j for j in head if j >= 0] for head in s.indices[entry].tolist()] for s in selections]

    def decode(self, rows: np.ndarray, capacity: int) -> None:
        self.length[rows] += 1
        lengths = self.length[rows]
        slow = self.phases.slow(rows)
        step = plan_step(
            rows, lengths, slow, self.start[rows], self.held[rows], capacity, KV_HEADS, self.config
        )
        self.held[rows] = step.held
        width = int(lengths.max())
        chosen = []

        def attend(i, q, k, v, scale):
            slots = self.table[rows, lengths - 1].long()
            self.pool[i][0][slots], self.pool[i][1][slots] = k.transpose(0, 1), v.transpose(0, 1)
            slot = self.executor.acquire()
            evidence = self.ring.view(slot, capacity, width)
            query = q.transpose(0, 1).contiguous()
            output, _ = two_segment_attention(
                query, self.pool[i], self.compact[i], self.table, step.plan, scale, evidence
            )
            self.executor.submit(lambda: chosen.append(self.refresh(i, evidence, step.refresh)))
            return output.transpose(0, 1)

        with self.executor.step():
            ids = [self.traces[row].tokens[-1] for row in rows.tolist()]
            logits = attending.forward(self.model, ids, attend, torch.from_numpy(lengths - 1), len(ids))
            tokens = logits.argmax(-1)
        self.phases.advance(rows, step.refreshed, tokens.numpy())
        entry = 0
        for i, row in enumerate(rows.tolist()):
            trace, renewed = self.traces[row], bool(step.refreshed[i])
            trace.tokens.append(int(tokens[i]))
            trace.slow.append(bool(slow[i]))
            trace.selected.append(self.listed(chosen, entry) if renewed else None)
            entry += renewed


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def agree(trace: Trace, want: oracle.Generation) -> None:
    assert trace.slow == want.slow
    assert trace.selected == want.selected
    assert trace.tokens == want.tokens


@torch.inference_mode()
@pytest.mark.parametrize(("lengths", "gap"), [([150], 0), ([90], 2), ([150, 37, 6], 0)], ids=str)
def test_loop_equals_algorithm_1(model, lengths, gap):
    config = SfiConfig(**{**vars(CONFIG), "minimum_gap": gap})
    new = 60
    loop = Loop(model, config, len(lengths), max(lengths) + new, runs=len(lengths))
    for prompt in prompts(lengths):
        loop.prefill(prompt)
    rows = np.arange(len(lengths))[::-1].copy()  # batch order is not table order
    mixed = 0
    for _ in range(new - 1):
        phases = loop.phases.slow(rows)
        mixed += bool(phases.any() and not phases.all())
        loop.decode(rows, capacity=len(lengths))
    for prompt, trace in zip(prompts(lengths), loop.traces, strict=True):
        want = oracle.generate(model, prompt, new, TRIGGERS, settings(config))
        agree(trace, want)
        assert 3 < sum(want.slow) < new // 2
        assert len(set(want.tokens)) > 10
    assert len(lengths) == 1 or mixed > 10


@torch.inference_mode()
def test_a_request_without_a_compact_buffer_decodes_dense(model):
    loop = Loop(model, CONFIG, 2, 130, runs=1)
    for prompt in prompts([60, 90]):
        loop.prefill(prompt)
    assert len(loop.runs) == 1
    for _ in range(29):
        loop.decode(np.arange(2), capacity=2)
    first, second = prompts([60, 90])
    agree(loop.traces[0], oracle.generate(model, first, 30, TRIGGERS, settings(CONFIG)))
    dense = oracle.generate(model, second, 30, range(VOCABULARY), settings(CONFIG))
    assert loop.traces[1].tokens == dense.tokens
    assert not any(loop.traces[1].selected)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("triggers", "s"),
    [(range(VOCABULARY), oracle.Settings(recent=16, k=9)), ([], oracle.Settings(recent=200))],
    ids=["always slow", "all tokens recent"],
)
def test_the_oracle_is_the_model_when_it_reads_everything(model, triggers, s):
    (prompt,) = prompts([70])
    got = oracle.generate(model, prompt, 12, triggers, s)
    assert got.slow[0] and set(got.slow[1:]) == {bool(triggers)}
    tokens = torch.tensor([prompt + got.tokens])
    want = model(tokens).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(got.logits), want, atol=1e-4, rtol=1e-4)
    assert want.argmax(-1).tolist() == got.tokens
