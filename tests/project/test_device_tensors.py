"""The engine's tensors may lie on a GPU: who wants one on the host copies it, who sends one stages it."""

import ast
from pathlib import Path

import pytest
import torch

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
FILES = sorted(RUNTIME.rglob("*.py"))
ON_THE_HOST = {
    "captured.py": {
        *(f"{staged}.numpy()" for staged in ("plans", "renewed", "pitch")),
        *(f"planned.step.{planned}.packed.numpy()" for planned in ("plan", "refresh")),
    },
    "span_attention.py": {"table.numpy()"},  # after a look at its device
    "device_view.py": {"staging.numpy()"},  # host memory by what it is
    "near.py": {"of_segments.numpy()", "of_rows.numpy()"},  # the same
}
SENT_ONCE = {
    "probe.py": ["torch.tensor([list(tokens)], device=self.base.embed_tokens.weight.device)"],  # no server
}


def calls(path, name):
    """Calls of a method of this name, with what it is called on."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node, node.func.value


def is_torch(node):
    return isinstance(node, ast.Name) and node.id == "torch"


def method_of(node):
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


def names_a_dtype(call):
    """Whether ``tensor.to(…)`` asks for another type alone: ``torch.int64``, ``x.dtype``, ``dtype=…``."""
    asked = [*call.args, *(word.value for word in call.keywords if word.arg == "dtype")]
    names = [ast.unparse(node).rpartition(".")[2] for node in asked]
    return len(names) == 1 and (
        names[0] == "dtype" or isinstance(getattr(torch, names[0], None), torch.dtype)
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_numpy_sees_copies(path):
    found = {ast.unparse(call) for call, tensor in calls(path, "numpy") if method_of(tensor) != "cpu"}
    assert found == ON_THE_HOST.get(path.name, set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_sent_is_staged(path):
    """An array that is sent from memory that is not pinned would be waited for."""
    if path.name == "staging.py":
        return
    assert [
        ast.unparse(call) for call, tensor in calls(path, "to") if method_of(tensor) == "from_numpy"
    ] == []
    assert {ast.unparse(call) for call, _ in calls(path, "to") if not names_a_dtype(call)} == set()
    assert [ast.unparse(call) for call, _ in calls(path, "pin_memory")] == []
    assert [ast.unparse(call) for call, _ in calls(path, "cuda")] == []
    assert [ast.unparse(call) for call, _ in calls(path, "new_tensor")] == []
    made = [call for name in ("tensor", "as_tensor") for call, on in calls(path, name) if is_torch(on)]
    there = [ast.unparse(call) for call in made if any(word.arg == "device" for word in call.keywords)]
    assert there == SENT_ONCE.get(path.name, [])


def test_steps_make_tensors_that_later_steps_may_write_to():
    """SGLang's steps run in ``no_grad``: what was made in inference mode may not be changed there."""
    engine = [path for path in FILES if path.parent.name == "sglang_host"]
    assert engine and [path.name for path in engine if [*calls(path, "inference_mode")]] == []
