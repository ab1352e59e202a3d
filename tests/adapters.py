"""LoRA adapters with random weights, as PEFT saves them, and models that have taken one in."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ENDS = ("embed_tokens", "lm_head")
ALPHA = 2.0
"""Of an adapter, as a multiple of its rank."""
SIZE = 0.5
"""Of an adapter's change, as a share of the matrix it is added to."""


def save_adapter(
    folder: Path,
    model: Path,
    rank: int,
    modules: tuple[str, ...],
    seed: int,
    ranks: Mapping[str, int] = MappingProxyType({}),
    alphas: Mapping[str, float] = MappingProxyType({}),
    rooted: bool = False,
) -> tuple[Path, Path]:
    """An adapter of a model, and the model with the adapter's changes in its own weights.

    Args:
        modules: last names of the matrices that it changes; one of ``ENDS`` of a model whose ends are one matrix
            makes them two.
        ranks, alphas: of matrices whose names end so, where they are not those of all; rooted: scales are alpha
            over the root of the rank.

    Returns:
        Folder of the adapter, folder of the model.
    """
    random = torch.Generator().manual_seed(seed)
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if merged.config.tie_word_embeddings and set(modules) & set(ENDS):
        merged.config.tie_word_embeddings = False
        merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())
    most, weights = rank, {}
    for name, matrix in merged.named_parameters():
        owner = name.removesuffix(".weight")
        if owner.rpartition(".")[2] not in modules:
            continue
        rank = next((own for end, own in ranks.items() if owner.endswith(end)), most)
        alpha = next((own for end, own in alphas.items() if owner.endswith(end)), ALPHA * most)
        scale = alpha / (rank**0.5 if rooted else rank)
        up, down = (
            torch.randn(*shape, generator=random) for shape in ((len(matrix), rank), (rank, matrix.shape[1]))
        )
        down *= SIZE * matrix.std().detach() / scale / rank**0.5
        matrix.data += scale * up @ down
        place = f"base_model.model.{owner}"
        if owner.endswith("embed_tokens"):  # looked up, not multiplied by
            weights[f"{place}.lora_embedding_A"], weights[f"{place}.lora_embedding_B"] = up.T, down.T
        else:
            weights[f"{place}.lora_A.weight"], weights[f"{place}.lora_B.weight"] = down, up
    adapter, whole = folder / "adapter", folder / "merged"
    adapter.mkdir(parents=True)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": most, "lora_alpha": ALPHA * most, "target_modules": list(modules)}
    config |= {"rank_pattern": dict(ranks), "alpha_pattern": dict(alphas), "use_rslora": rooted}
    config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    merged.save_pretrained(whole)
    return adapter, whole
