"""Whose work a GPU takes up first: a step's own, before that of the auxiliary lane beside it.

CUDA's default priority is its least. The auxiliary lane (``runtime/sfi/refresh.py``) has that, so the streams that
steps are launched on, or captured on, need a higher one. What is captured keeps the priority of its stream.
"""

from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.runner_utils.pool import _CAPTURE_STREAM_NAME
from sglang.srt.runtime_context import set_stream

from fathom.runtime.sfi.refresh import FIRST

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def put_steps_first(runner: "ModelRunner") -> None:
    """Give overlapped steps, and what is captured, streams of a higher priority; before anything uses them."""
    module = torch.get_device_module(runner.device)
    runner.forward_stream = module.Stream(priority=FIRST)
    set_stream(_CAPTURE_STREAM_NAME, module.Stream(priority=FIRST))
