"""LoRA adapters beside policies: which adapter each row of a pass has, where the rows are not SGLang's own."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def assign(runner: "ModelRunner", batch: "ForwardBatch", adapters: Sequence[str | None]) -> None:
    """Tell the layers that hold adapters whose the rows of the next layers are; nothing without ``--enable-lora``.

    Args:
        batch: as the layers get it, its rows in runs of ``extend_seq_lens`` (in a decode step, one each).
        adapters: of each run, by SGLang's id of an adapter; None for the model alone.
    """
    manager: Any = runner.lora_manager
    if manager is None:
        return
    runs = copy.copy(batch)
    runs.batch_size, runs.lora_ids = len(adapters), list(adapters)
    manager.prepare_lora_batch(runs)
