"""One forward pass of a model over rows that we choose ourselves, outside SGLang's batches."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from fathom.runtime.kv.places import Places
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sglang_host.layers import lora
from fathom.runtime.sglang_host.models import split_prefill
from fathom.runtime.staging import send

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


FEWEST_ENDED = 32
"""Rows that leave a layer earlier, at least, for the layer's second pass over the others to pay."""


def segments(
    slots: Sequence[np.ndarray], rows: Sequence[int], places: Sequence[Places] | None = None
) -> SpanView:
    """The view in which segment i reads ``slots[i]`` and computes, and writes, its last ``rows[i]`` entries.

    Args:
        places: where each segment's entries are; None for the positions from 0 on.
    """
    entry = np.concatenate([[0], np.cumsum([len(part) for part in slots])]).astype(np.int64)
    query = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    write = [part[len(part) - count :] for part, count in zip(slots, rows, strict=True)]
    look_up = np.concatenate(slots).astype(np.int32).__getitem__
    return SpanView(look_up, entry, query, np.concatenate(write).astype(np.int64), places)


def prepare(
    runner: "ModelRunner",
    tokens: Sequence[int],
    positions: np.ndarray,
    wanted: np.ndarray,
    decode: bool = False,
    adapters: Sequence[str | None] = (),
    capture: CaptureHiddenMode = CaptureHiddenMode.NULL,
) -> ForwardBatch:
    """The forward batch of ``len(tokens)`` packed rows, of which the ``wanted`` ones give logits.

    Args:
        tokens: token ids; positions: [rows] int64.
        wanted: ascending rows; the logits of a pass are [len(wanted), vocabulary].
        decode: whether every row is one of SGLang's requests, as in a decode step (all rows are wanted then).
        adapters: of the rows up to each wanted one, as :func:`lora.assign`; none for a draft.
        capture: whether the pass gives hidden states too: of all rows, or of the wanted ones.
    """
    ids = send(torch.tensor(tokens, dtype=torch.int64), runner.device)
    # SGLang's logits are those of each request's last row: a "request" here ends at each wanted row.
    ends = np.asarray(wanted, np.int64) + 1
    counts = np.diff(np.concatenate([[0], ends])).astype(np.int64)
    lengths = torch.from_numpy(np.asarray(positions, np.int64)[ends - 1] + 1)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        batch_size=len(counts),
        input_ids=ids,
        req_pool_indices=torch.zeros(len(counts), dtype=torch.int64, device=runner.device),
        seq_lens=send(lengths, runner.device),
        out_cache_loc=torch.zeros(len(ids), dtype=torch.int64, device=runner.device),
        seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths,
        positions=send(np.asarray(positions, np.int64), runner.device),
        capture_hidden_mode=capture,
        spec_algorithm=runner.spec_algorithm,
    )
    if not decode:
        set_wanted(batch, counts)
    lora.assign(runner, batch, adapters)
    return batch


def set_wanted(batch: ForwardBatch, counts: np.ndarray) -> None:
    """Let the logits be those of the rows at which runs of ``counts`` rows end."""
    device = batch.input_ids.device
    batch.extend_seq_lens = send(counts, device, torch.int32)
    batch.extend_seq_lens_cpu = counts.tolist()
    batch.extend_prefix_lens = torch.zeros(len(counts), dtype=torch.int32, device=device)
    batch.extend_prefix_lens_cpu = [0] * len(counts)
    batch.extend_start_loc = send(np.cumsum(counts) - counts, device, torch.int32)
    batch.extend_num_tokens = int(counts.sum())


@torch.no_grad()
def run(runner: "ModelRunner", batch: ForwardBatch) -> LogitsProcessorOutput:
    """Logits [wanted rows, vocabulary], and hidden states if the batch asks for them; the attention backend's views
    are set already.
    """
    model = runner.model
    with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
        # The class's own forward: the object's may be the one that called us.
        return type(model).forward(model, batch.input_ids, batch.positions, batch)


def pays(rows: int, stay: int) -> bool:
    """Whether a layer is worth a second pass to compute only ``stay`` of ``rows`` rows whole."""
    return rows - stay >= max(FEWEST_ENDED, stay)


def ends_early(runner: "ModelRunner", rows: int, wanted: int) -> bool:
    """Whether the last layer is to compute only keys and values of the rows whose logits nobody wants."""
    return split_prefill.possible(runner.model) and pays(rows, wanted)


@torch.no_grad()
def run_ending(
    runner: "ModelRunner", batch: ForwardBatch, wanted: np.ndarray, narrow: Callable[[], None]
) -> torch.Tensor:
    """Logits as of :func:`run`; the last layer computes the wanted rows alone, and of the others keys and values.

    Args:
        wanted: ascending rows; narrow: sets the views of these.
    """
    model, backend = runner.model, runner.attn_backend
    layers, rows = runner.layer_info.num_effective_layers, send(wanted, batch.input_ids.device)

    def run_layers(low: int, high: int) -> LogitsProcessorOutput | None:
        return model.forward_split_prefill(batch.input_ids, batch.positions, batch, (low, high))

    with forward_context(ForwardContext(attn_backend=backend)):
        if layers > 1:
            run_layers(0, layers - 1)
        left = [x if x is None else x[rows] for x in (batch.hidden_states, batch.residual)]
        backend.store_alone(lambda: run_layers(layers - 1, layers))
        backend.ended_rows += len(batch.input_ids) - len(wanted)
        # What the layer was given it may have changed in place.
        batch.hidden_states, batch.residual = left
        batch.input_ids, batch.positions = batch.input_ids[rows], batch.positions[rows]
        set_wanted(batch, np.ones(len(wanted), np.int64))
        narrow()
        output = run_layers(layers - 1, layers)
    assert output is not None
    return output.next_token_logits
