"""Which heads a device has. That devices choose the same tokens: ``test_matrix.py``, ``test_two_gpus.py``."""

import pytest
from conftest import save_random_model
from sglang.srt.configs.model_config import ModelConfig

from fathom.runtime.sglang_host import devices


@pytest.mark.parametrize(
    ("count", "heads", "reason"),
    [(1, (8, 2), ""), (2, (4, 1), ""), (4, (2, 1), "4 devices share 2 KV heads")],
)
def test_no_kv_head_that_chooses_is_on_two_devices(tmp_path, count, heads, reason):
    folder = save_random_model(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    config = ModelConfig(str(folder))
    assert devices.heads_of(config, count) == heads
    assert devices.why_not(config, count) == reason
