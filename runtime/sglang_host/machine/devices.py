"""What the devices that share a model agree on (tensor parallelism).

Each device has some of the heads, so it sees a part of what SpecPrefill and FastKV choose tokens by. These scores
are brought together, and so is what each host knows of its own device; everything else that decides where a token
goes is equal on all devices: the host's plans, the logits, and the tokens drawn from them. What a KV head keeps or
reads is its own device's business.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import GroupCoordinator


def name_of(device: str) -> str:
    """A device as its maker calls it; "CPU" for a machine without one."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU"


def numbers_of(runner: Any) -> dict[str, str | None]:
    """What a model's numbers are on its devices, for who runs it.

    Args:
        runner: SGLang's ``ModelRunner``, of a target or a draft.

    Returns:
        ``dtype`` that it computes in, ``quantization``, SGLang's method of its weights (None for plain ones),
        and ``kv_dtype`` of keys and values.
    """
    config = runner.model_config
    dtype, kv_dtype = (str(each).removeprefix("torch.") for each in (config.dtype, runner.kv_cache_dtype))
    return {"dtype": dtype, "quantization": config.quantization, "kv_dtype": kv_dtype}


def heads_of(config: "ModelConfig", devices: int) -> tuple[int, int]:
    """Query heads and KV heads on each of so many devices; where there are fewer KV heads, one is on several."""
    return config.num_attention_heads // devices, config.get_num_kv_heads(devices)


def why_not(config: "ModelConfig", devices: int) -> str:
    """Why KV heads cannot choose for themselves; "" where they can.

    A KV head that is on several devices would keep other entries on each.
    """
    heads = config.get_total_num_kv_heads()
    return f"{devices} devices share {heads} KV heads" if devices > heads else ""


def largest(values: torch.Tensor) -> torch.Tensor:
    """The maximum over all devices, element by element; ``values`` is changed."""
    if (devices := _devices()) is not None:
        distributed.all_reduce(values, distributed.ReduceOp.MAX, group=devices)
    return values


def mean(values: torch.Tensor) -> torch.Tensor:
    """The mean over all devices, element by element; ``values`` is changed."""
    if (devices := _devices()) is not None:
        distributed.all_reduce(values, group=devices)
        values /= devices.size()
    return values


def least(value: int) -> int:
    """The minimum over all devices of a number that each one's host knows."""
    if (hosts := _hosts()) is None:
        return value
    values = torch.tensor(value)
    distributed.all_reduce(values, distributed.ReduceOp.MIN, group=hosts)
    return int(values)


def _devices() -> distributed.ProcessGroup | None:
    """Those that share the model; None where it is on one, or in no engine."""
    group = _group()
    return None if group is None else group.device_group


def _hosts() -> distributed.ProcessGroup | None:
    """Their hosts."""
    group = _group()
    return None if group is None else group.cpu_group


def _group() -> "GroupCoordinator | None":
    if not distributed.is_initialized():
        return None
    from sglang.srt.runtime_context import get_parallel  # absent where kernels are tried alone

    return get_parallel().tp_group if get_parallel().tp_size > 1 else None
