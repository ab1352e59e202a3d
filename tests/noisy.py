"""Drafts for a model that is there: the model itself, with noise on its weights."""

import shutil
from pathlib import Path


def noisy_copy(model: Path, folder: Path, noise: float) -> Path:
    """The model with noise on its weights: a draft that is right often, but not always."""
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder, dirs_exist_ok=True)
    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(11)
    with torch.no_grad():
        for weights in copy.parameters():
            weights += noise * torch.randn_like(weights)
    copy.save_pretrained(folder)
    return folder


def draft_flags(folder: Path, cost: float = 0.05) -> tuple[str, ...]:
    """Flags of a server with such a draft, which costs what its target does and here counts as cheap.

    One that costs nothing never rests, whatever became of other requests' drafts.
    """
    return ("--draft-model-path", str(folder), "--draft-cost", str(cost))
