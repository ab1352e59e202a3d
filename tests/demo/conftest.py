import pytest

from fathom.demo.export import MODELS
from fathom.demo.tokenizer import load_tokenizer
from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(MODELS / "target")
