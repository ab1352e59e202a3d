"""One forward pass of a model over rows that we choose ourselves, outside SGLang's batches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from fathom.runtime.kv.view import SpanView
from fathom.runtime.staging import send

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def segments(slots: Sequence[np.ndarray], rows: Sequence[int]) -> SpanView:
    """The view in which segment i reads ``slots[i]`` and computes, and writes, its last ``rows[i]`` entries."""
    entry = np.concatenate([[0], np.cumsum([len(part) for part in slots])]).astype(np.int64)
    query = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    write = [part[len(part) - count :] for part, count in zip(slots, rows, strict=True)]
    look_up = np.concatenate(slots).astype(np.int32).__getitem__
    return SpanView(look_up, entry, query, np.concatenate(write).astype(np.int64))


def prepare(
    runner: "ModelRunner",
    tokens: Sequence[int],
    positions: np.ndarray,
    wanted: np.ndarray,
    decode: bool = False,
) -> ForwardBatch:
    """The forward batch of ``len(tokens)`` packed rows, of which the ``wanted`` ones give logits.

    Args:
        tokens: token ids; positions: [rows] int64.
        wanted: ascending rows; the logits of a pass are [len(wanted), vocabulary].
        decode: whether every row is one of SGLang's requests, as in a decode step (all rows are wanted then).
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
        capture_hidden_mode=CaptureHiddenMode.NULL,
        spec_algorithm=runner.spec_algorithm,
    )
    if not decode:
        set_wanted(batch, counts)
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
def run(runner: "ModelRunner", batch: ForwardBatch) -> torch.Tensor:
    """Logits [wanted rows, vocabulary]; the attention backend's views are set already."""
    model = runner.model
    with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
        # The class's own forward: the object's may be the one that called us.
        output = type(model).forward(model, batch.input_ids, batch.positions, batch)
    return output.next_token_logits
