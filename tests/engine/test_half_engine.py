"""The engine in float16 on a GPU in name only: SGLang's layers for CUDA, which take no float32.

Their compiled kernels are PyTorch here (``nominal_machine.py``); how SGLang calls them is its own.
"""

import sys
from pathlib import Path

import interpreted
import pytest
from interpreted import Oracle, ask_all
from noisy import draft_flags, noisy_copy
from transformers import AutoTokenizer

from fathom.runtime.sfi.trigger import trigger_ids

NAMES = ("dense", "SPEED", "SpecPrefill", "FastKV", "SFI", "drafting")
TOLERANCE = 0.06
"""Of a log-probability: eleven bits through four layers."""


@pytest.fixture(scope="module")
def draft(tiny_model, tmp_path_factory):
    return noisy_copy(tiny_model, tmp_path_factory.mktemp("draft"), 0.0008)


@pytest.fixture(scope="module")
def server(start_process, tiny_model, draft):
    script = Path(__file__).with_name("nominal_gpu.py")
    flags = *interpreted.FLAGS, "--dtype", "float16", "--cuda-graph-bs-decode", "4"
    command = [sys.executable, str(script), "serve", str(tiny_model), *flags, *draft_flags(draft)]
    return start_process(command, {"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="module")
def oracle(tiny_model, draft):
    return Oracle(tiny_model, draft, trigger_ids(AutoTokenizer.from_pretrained(tiny_model).backend_tokenizer))


def test_answers_are_the_oracles_but_for_rounding(server, oracle):
    answers = ask_all(server, NAMES)
    for name, answer in answers.items():
        oracle.check(name, answer, tolerance=TOLERANCE)
    engine = server.engine()
    assert engine["replayed_steps"]["dense"] and engine["steps"]["fast_steps"]
