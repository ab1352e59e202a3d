"""The engine in float16 on a GPU in name only: SGLang's layers for CUDA, which take no float32.

Their compiled kernels are PyTorch here (``nominal_machine.py``); how SGLang calls them is its own.
"""

import interpreted
import pytest
from interpreted import ask_all

NAMES = ("dense", "SPEED", "SpecPrefill", "FastKV", "SFI", "drafting")
TOLERANCE = 0.06
"""Of a log-probability: eleven bits through four layers."""


@pytest.fixture(scope="module")
def server(start_nominal, tiny_model, close_draft):
    flags = "--dtype", "float16", "--cuda-graph-bs-decode", "4"
    return start_nominal(tiny_model, close_draft, *interpreted.FLAGS, *flags)


def test_answers_are_the_oracles_but_for_rounding(server, oracle):
    answers = ask_all(server, NAMES)
    for name, answer in answers.items():
        oracle.check(name, answer, tolerance=TOLERANCE)
    engine = server.engine()
    assert engine["replayed_steps"]["dense"] and engine["steps"]["fast_steps"]
