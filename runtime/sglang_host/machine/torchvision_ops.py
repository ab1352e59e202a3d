"""Lets CPU-only PyTorch import the CUDA build of torchvision.

SGLang imports torchvision at its own import. PyPI ships torchvision only with CUDA operators; beside a CPU
build of PyTorch its library does not load, and registering the fake kernel of ``torchvision::nms`` then fails
because the operator was never defined. Defining the operators' schemas is enough: nothing here calls them.
"""

import importlib.util
from pathlib import Path

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _loads() -> bool:
    """Whether torchvision's own operator library loads beside the installed PyTorch."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # nothing to help: let the import error name what is missing
    libraries = [p for p in Path(spec.origin).parent.glob("_C*") if p.suffix in {".so", ".pyd"}]
    try:
        for path in libraries:
            torch.ops.load_library(str(path))
    except OSError:
        return False
    return bool(libraries)


def declare() -> None:
    """Define ``torchvision::nms`` and ``::qnms`` where torchvision cannot. Call before importing SGLang."""
    import torch
    from torch import library

    if hasattr(torch.ops.torchvision, "nms") or _loads():
        return
    for name in ("nms", "qnms"):
        library.define(f"torchvision::{name}", _SCHEMA)
