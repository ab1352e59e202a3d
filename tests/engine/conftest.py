"""Servers and drafts that several tests of this folder share: a server takes seconds to start."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import environment
from forked import Template
from noisy import draft_flags, noisy_copy
from transformers import AutoTokenizer, LlamaForCausalLM

from fathom.runtime.sfi.trigger import trigger_ids

pytest.register_assert_rewrite("greedy", "interpreted")

PAGE = 16
FLAGS = ("--dtype", "float32")
ROOMY_TOKENS = 4 * (4096 + 120 + 16) + 16
"""Just above what four dense requests of 4,096 tokens need, 120 generated ones and a page each included."""
PRESSED_TOKENS = 4000
INTERPRETED = {"TRITON_INTERPRET": "1"}


@pytest.fixture(scope="session")
def roomy_server(share_server, tiny_model):
    """Whole prompts; the pool is sized for exactly four dense requests of 4,096 tokens."""
    flags = (
        "--chunked-prefill-size",
        "-1",
        "--max-total-tokens",
        str(ROOMY_TOKENS),
        "--page-size",
        str(PAGE),
    )
    return share_server(tiny_model, *FLAGS, *flags)


@pytest.fixture(scope="session")
def narrow_server(share_server, tiny_model):
    """Such a pool, in which no more tokens may be held however little memory each takes; chunks of 256."""
    pool = ("--max-total-tokens", str(ROOMY_TOKENS), "--page-size", str(PAGE), "--shallow-factor", "1")
    return share_server(tiny_model, *FLAGS, *pool, "--chunked-prefill-size", "256", "--enable-mixed-chunk")


@pytest.fixture(scope="session")
def pressed_server(share_server, tiny_model):
    """Chunks of 64, prefill and decode rows in one batch, and a pool too small for the requests in flight."""
    flags = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--page-size", str(PAGE))
    return share_server(tiny_model, *FLAGS, *flags, "--max-total-tokens", str(PRESSED_TOKENS))


@pytest.fixture(scope="session")
def retracting_server(share_server, tiny_model):
    """Chunks of 256, and SGLang takes running requests back every few steps: they start again."""
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "2"}
    flags = ("--chunked-prefill-size", "256", "--max-total-tokens", "40000")
    return share_server(tiny_model, *FLAGS, *flags, env=env)


@pytest.fixture(scope="session")
def draft_of(tiny_model, tmp_path_factory):
    """A function: how much noise -> the folder of a draft for the tiny model."""
    return lambda noise: noisy_copy(tiny_model, tmp_path_factory.mktemp("draft"), noise)


@pytest.fixture(scope="session")
def close_draft(draft_of):
    """A draft that often says what the tiny model says."""
    return draft_of(0.0008)


@pytest.fixture(scope="session")
def triggers(tiny_model):
    return trigger_ids(AutoTokenizer.from_pretrained(tiny_model).backend_tokenizer)


@pytest.fixture(scope="session")
def ending_pair(tiny_model, triggers, tmp_path_factory):
    """Folders of a target that ends sentences now and then, and of a draft: the same with noise on its weights."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[triggers] *= 1.5
    folder = tmp_path_factory.mktemp("ending")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    model.save_pretrained(folder)
    return folder, noisy_copy(folder, tmp_path_factory.mktemp("draft"), 0.0008)


@pytest.fixture(scope="session")
def oracle(tiny_model, close_draft, triggers):
    from interpreted import Oracle  # after its assertions were told to explain themselves

    return Oracle(tiny_model, close_draft, triggers)


@pytest.fixture(scope="session")
def nominal_template(tmp_path_factory):
    """What servers on a GPU in name only are forks of."""
    env = environment() | INTERPRETED
    with Template(tmp_path_factory.mktemp("template"), env, "nominal_gpu") as template:
        yield template


@pytest.fixture(scope="module")
def start_nominal(start_process, nominal_template):
    """A function: target and draft, flags -> its server on a GPU in name only, Triton's kernels interpreted."""

    def start(target, draft, *flags, script="nominal_gpu.py"):
        fork = partial(nominal_template.start, script=Path(__file__).with_name(script))
        command = ["serve", str(target), *flags, *draft_flags(draft)]
        return start_process(command, INTERPRETED, fork)

    return start
