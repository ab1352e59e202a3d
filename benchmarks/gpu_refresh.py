"""How much of SFI's refresh a slow step hides (Slow-Fast Inference, section 4.1), on this machine's GPU.

Some layers of a decode step in which selections are renewed: for each the matrix products of its weights, the
attention, which keeps the logits of the requests that are renewed, and their Selector, Top-K and packing; then the
vocabulary's product. The same launches as a captured step of the engine, as one CUDA graph, timed without the
refresh, with it in the step's own stream, and with it on a second one that yields to the first. Hidden is what the
second stream saves of what the refresh costs in the first:

    (in order - beside) / (in order - without)

Needs PyTorch, Triton and NumPy alone. Compact buffers and outputs of both must be the same, bit for bit; the exit
status is 1 where they are not. Without a GPU, TRITON_INTERPRET=1 does the same in Triton's interpreter, where
nothing is beside anything and only the values count.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import rms_norm, silu

from fathom.benchmarks import stats
from fathom.benchmarks.gpu_inputs import Inputs, Pool, Setting
from fathom.benchmarks.gpu_kernels import describe, print_header, print_row, versions, write_json
from fathom.benchmarks.gpu_timing import Clock
from fathom.benchmarks.paper_shapes import SIZES, Size, sized
from fathom.kernels import key_shares, segments_by_warp
from fathom.kernels.dispatch import INTERPRETED
from fathom.kernels.two_segment_attention import two_segment_attention
from fathom.runtime.sfi.config import SelectorConfig, SfiConfig
from fathom.runtime.sfi.refresh import (
    FIRST,
    RING_SLOTS,
    CudaLanes,
    EvidenceRing,
    InOrder,
    Lanes,
    RefreshExecutor,
)
from fathom.runtime.sfi.step import NOBODY, RefreshBatch, plan_step, refresh_layer

SCHEMA = 1
WITHOUT, IN_ORDER, BESIDE = "without", "in order", "beside"
COLUMNS = [
    *("requests", "renewed", "pieces", "without ms", "in order ms", "beside ms", "refresh, ms a layer"),
    *("hidden", "beside : without"),
]


class SlowStep:
    """Layers of one decode step of ``batch`` requests, the first ``renewed`` of them slow.

    All layers read the same KV and have the same weights, both larger than any L2 cache at the sizes that count.

    Attributes:
        outputs: [batch, vocabulary], the logits.
        compact: of each layer the keys and values that fast steps would read.
    """

    def __init__(self, size: Size, setting: Setting, renewed: int, layers: int, config: SfiConfig) -> None:
        inputs, batch = Inputs(setting), setting.batch
        self.size, self.config, self.renewed = size, config, renewed
        self.pool = Pool(inputs)
        widths = [
            (size.hidden, (size.heads + 2 * size.kv_heads) * size.head_dim),
            (size.heads * size.head_dim, size.hidden),
            (size.hidden, 2 * size.intermediate),
            (size.intermediate, size.hidden),
            (size.hidden, size.vocab),
        ]
        self.weights = [inputs.normal(*each).mul_(each[0] ** -0.5) for each in widths]
        self.hidden = inputs.normal(batch, size.hidden)
        room = config.compact_tokens
        self.compact = [
            tuple(inputs.normal(size.kv_heads, batch * room, size.head_dim).transpose(0, 1) for _ in range(2))
            for _ in range(layers)
        ]
        lengths, longest = np.array(setting.lengths), max(setting.lengths)
        slow = np.arange(batch) < renewed
        rows, start = self.pool.rows.cpu().numpy(), np.arange(batch) * room
        held = np.full(batch, room)
        step = plan_step(rows, lengths, slow, start, held, renewed, size.kv_heads, config)
        who = torch.tensor(NOBODY).unsqueeze(1).repeat(1, batch)
        who[:, :renewed] = step.refresh.packed
        self.plan, self.who = step.on(setting.device).plan, RefreshBatch(who.to(setting.device))
        self.pitch = inputs.integers([longest])
        heads = size.heads + size.kv_heads
        # `n` rows of evidence may have `entries - batch`, and each request rounds its part down.
        entries = renewed * longest + 2 * batch + 32
        self.ring = EvidenceRing(
            RING_SLOTS, size.heads, size.kv_heads, 4 * RING_SLOTS * heads * entries, setting.device
        )
        self.outputs = self.hidden

    def run(self, lanes: Lanes, refreshes: bool) -> None:
        """All layers, their launches in the order in which the engine gives them to the device."""
        size, x = self.size, self.hidden
        into, out, up, down, head = self.weights
        selector, executor = SelectorConfig(), RefreshExecutor(lanes)
        with executor.step():
            for compact in self.compact:
                query = (rms_norm(x, (size.hidden,)) @ into)[:, : size.heads * size.head_dim]
                query = query.unflatten(1, (size.heads, size.head_dim))
                evidence = self.ring.captured(executor.acquire(), len(x), self.pitch)
                where = self.pool.pair, compact, self.pool.table, self.plan
                attended = query.new_empty(query.shape)
                two_segment_attention(query, *where, size.head_dim**-0.5, evidence, attended)
                executor.submit(self._refresh(evidence, compact, selector) if refreshes else lambda: None)
                x = x + attended.flatten(1) @ out
                gate, wide = (rms_norm(x, (size.hidden,)) @ up).chunk(2, -1)
                x = x + (silu(gate) * wide) @ down
            # The barrier comes behind it: what is still renewed has this for a cover, too.
            self.outputs = rms_norm(x, (size.hidden,)) @ head

    def _refresh(self, evidence: Any, compact: Any, selector: SelectorConfig) -> Callable[[], Any]:
        given = self.pool.pair, compact, self.pool.table, self.who, self.config, selector
        return lambda: refresh_layer(evidence, *given)

    def results(self) -> list[torch.Tensor]:
        """Copies of what a run leaves."""
        return [self.outputs.clone(), *(buffer.clone() for pair in self.compact for buffer in pair)]

    def spoil(self) -> None:
        """NaN wherever a run packs."""
        for pair in self.compact:
            for buffer in pair:
                buffer[: self.renewed * self.config.compact_tokens].fill_(float("nan"))


def launched(step: SlowStep, lanes: Lanes, refreshes: bool, cuda: bool) -> Callable[[], Any]:
    """The step's launches as a CUDA graph on a stream that comes first; without a GPU the step itself."""

    def call() -> None:
        step.run(lanes, refreshes)

    call()  # compiled
    if not cuda:
        return call
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(priority=FIRST)
    with torch.cuda.graph(graph, stream=stream):
        call()
    # What the graph wrote to is the step's only while the graph is.
    outputs = step.outputs

    def replay() -> None:
        graph.replay()
        step.outputs = outputs

    return replay


def measure(step: SlowStep, clock: Clock) -> tuple[dict[str, Any], str]:
    """Times of the three ways, and what is wrong; "" for nothing."""
    cuda = clock.device.type == "cuda"
    lanes: dict[str, Lanes] = {IN_ORDER: InOrder(), BESIDE: CudaLanes() if cuda else InOrder()}
    found: dict[str, Any] = {}
    want: list[torch.Tensor] = []
    wrong = ""
    for way in (WITHOUT, IN_ORDER, BESIDE):
        call = launched(step, lanes.get(way, lanes[IN_ORDER]), way != WITHOUT, cuda)
        step.spoil()
        call()
        results = step.results()
        if way == IN_ORDER:
            want = results
            if any(not result.isfinite().all() for result in results):
                wrong = "not all of a run of the compact buffers, or of the outputs, was written"
        elif way == BESIDE and not all(map(torch.equal, results, want)):
            wrong = "two streams leave something else than one"
        found[way] = stats.summary(clock.samples(call))
    return found, wrong


def shares(found: dict[str, Any], layers: int) -> dict[str, Any]:
    """Seconds of a layer's refresh in order, and the part of it that the second stream hides; None for no cost."""
    without, in_order, beside = (found[way]["median"] for way in (WITHOUT, IN_ORDER, BESIDE))
    cost = in_order - without
    hidden = (in_order - beside) / cost if cost > 0 else None
    return {"refresh_seconds": cost / layers, "hidden": hidden, "beside_over_without": beside / without}


def parser() -> argparse.ArgumentParser:
    """Every flag with its default, which is small in the interpreter."""
    p = argparse.ArgumentParser(prog="python -m fathom.benchmarks.gpu_refresh", description=__doc__)
    add, default = p.add_argument, "default: %(default)s"
    size, length, batch = ("tiny", 400, [2]) if INTERPRETED else ("llama-3.1-8b", 131072, [1, 16])
    add("--size", choices=SIZES, default=size, help=default)
    add("--length", type=int, default=length, help=f"KV entries per request ({default})")
    add("--batch", nargs="+", type=int, default=batch, help=f"requests ({default})")
    add("--renewed", nargs="+", type=int, help="of them slow (default: one, and all)")
    add("--layers", type=int, default=2 if INTERPRETED else 8, help=default)
    add(
        "--pieces",
        nargs="+",
        type=int,
        help="programs of the attention for each multiprocessor, of which fewer leave room beside them "
        "(default: the engine's)",
    )
    dtype, repeats = ("float32", 1) if INTERPRETED else ("bfloat16", 20)
    add("--dtype", choices=["bfloat16", "float16", "float32"], default=dtype, help=default)
    add("--repeats", type=int, default=repeats, help=f"of what is timed ({default})")
    add("--seconds", type=float, default=240.0, help=f"no row is begun later ({default})")
    add("--seed", type=int, default=0, help=default)
    add("--out", type=Path, help="JSON, written anew after every row")
    return p


class Run:
    """One run: its rows, what was left out and found wrong."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.size, self.clock = args, sized(args.size), Clock(device, args.repeats)
        self.config = SfiConfig(recent=16, selected=64) if INTERPRETED else SfiConfig()
        self.dtype, dim = getattr(torch, args.dtype), self.size.head_dim
        warps = segments_by_warp.takes(device, self.dtype, self.size.heads // self.size.kv_heads, dim, dim)
        self.attention: Any = segments_by_warp if warps else key_shares  # has its pieces
        args.pieces = args.pieces or [self.attention.PIECES_PER_PROCESSOR]
        self.begun = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.left_out: list[str] = []

    def row(self, batch: int, renewed: int, pieces: int) -> None:
        """Measure one row, print and write it, unless time or memory is up."""
        name = f"{batch} requests, {renewed} renewed, {pieces} pieces"
        if time.monotonic() - self.begun > self.args.seconds:
            self.left_out.append(name)
            return
        size, device = self.size, self.clock.device
        shape = size.heads, size.kv_heads, size.head_dim, size.head_dim
        lengths = (self.args.length,) * batch
        setting = Setting(*shape, lengths, self.dtype, device, self.args.seed)
        self.attention.PIECES_PER_PROCESSOR = pieces
        try:
            step = SlowStep(size, setting, renewed, self.args.layers, self.config)
            found, wrong = measure(step, self.clock)
        except torch.OutOfMemoryError:
            self.left_out.append(f"{name} (out of memory)")
            return
        if wrong:
            self.failures.append(f"{name}: {wrong}")
            print(f"FAILED: {self.failures[-1]}", file=sys.stderr, flush=True)
        told = shares(found, self.args.layers)
        self.rows.append({"batch": batch, "renewed": renewed, "pieces": pieces, "seconds": found} | told)
        times = [found[way]["median"] * 1e3 for way in (WITHOUT, IN_ORDER, BESIDE)]
        hidden = "–" if told["hidden"] is None or device.type != "cuda" else f"{told['hidden']:.0%}"
        cells = [batch, renewed, pieces, *times, told["refresh_seconds"] * 1e3, hidden]
        print_row([*cells, told["beside_over_without"]])
        write_json(self.args.out, self.result())

    def result(self) -> dict[str, Any]:
        """What the JSON holds."""
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "fathom.benchmarks.gpu_refresh", *self.args.given]),
            "device": describe(self.clock.device),
            "versions": versions(),
            "interpreted": INTERPRETED,
            "settings": {key: value for key, value in vars(self.args).items() if key not in ("out", "given")},
            "rows": self.rows,
            "left_out": self.left_out,
            "failures": self.failures,
        }


def main(argv: list[str]) -> int:
    """Measure, print, write; 1 where a value is wrong."""
    p = parser()
    args = p.parse_args(argv, argparse.Namespace(given=argv))
    cuda = torch.cuda.is_available() and not INTERPRETED
    if not cuda and not INTERPRETED:
        p.error("there is no GPU here; TRITON_INTERPRET=1 runs the kernels in Triton's interpreter")
    for name in ("length", "layers", "repeats"):
        if getattr(args, name) < 1:
            p.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name in ("batch", "renewed", "pieces"):
        if any(each < 1 for each in getattr(args, name) or ()):
            p.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    run = Run(args, torch.device("cuda" if cuda else "cpu"))
    if args.length < run.config.compact_tokens + run.config.recent:
        p.error(
            f"--length must be at least {run.config.compact_tokens + run.config.recent}, got {args.length}"
        )
    print(f"{describe(run.clock.device)['name']}; {args.size}, {args.layers} layers, {args.length} entries\n")
    print_header(COLUMNS)
    for batch, pieces in itertools.product(args.batch, args.pieces):
        for renewed in dict.fromkeys(min(each, batch) for each in args.renewed or (1, batch)):
            run.row(batch, renewed, pieces)
    if run.left_out:
        print(f"\nLeft out ({len(run.left_out)}):", *run.left_out, sep="\n- ")
    write_json(args.out, run.result())
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
