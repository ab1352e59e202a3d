"""Which heads a device has, and what devices tell each other. That they choose the same tokens: ``test_matrix.py``,
``test_two_gpus.py``."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from conftest import save_random_model
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from torch import distributed

from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.memory import gpu_memory
from fathom.runtime.sglang_host.step import slow_fast


@pytest.mark.parametrize(
    ("count", "heads", "reason"),
    [(1, (8, 2), ""), (2, (4, 1), ""), (4, (2, 1), "4 devices share 2 KV heads")],
)
def test_no_kv_head_that_chooses_is_on_two_devices(tmp_path, count, heads, reason):
    folder = save_random_model(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    config = ModelConfig(str(folder))
    assert devices.heads_of(config, count) == heads
    assert devices.why_not(config, count) == reason


def told(rank, store, sizes):
    """What one of two processes takes its GPU's memory to be, and leaves of it for KV."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(sizes))
    devices._group = lambda: SimpleNamespace(cpu_group=distributed.group.WORLD)
    slow_fast.current_platform = SimpleNamespace(get_device_total_memory=sizes.__getitem__)
    gpu_memory._available_bytes = lambda configurator, before: 100 << 20
    gpu_memory.install(gpu_memory.Reserve((1 + rank) << 20, 0))
    left = KVCacheConfigurator._profile_available_bytes(None, 0)
    return slow_fast.gpu_bytes(SimpleNamespace(device="cuda", gpu_id=rank)), left


def test_unequal_gpus_have_as_many_compact_buffers_and_pages(tmp_path):
    sizes = [80 << 30, (80 << 30) - 4096]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        asked = [pool.apply_async(told, (rank, tmp_path / "store", sizes)) for rank in range(2)]
        assert [answer.get(60) for answer in asked] == [(min(sizes), 98 << 20)] * 2


@pytest.mark.parametrize("method", [None, "awq"])
def test_what_a_models_numbers_are(method):
    config = SimpleNamespace(dtype=torch.float16, quantization=method)
    runner = SimpleNamespace(model_config=config, kv_cache_dtype=torch.float8_e5m2)
    told = {"dtype": "float16", "quantization": method, "kv_dtype": "float8_e5m2"}
    assert devices.numbers_of(runner) == told
