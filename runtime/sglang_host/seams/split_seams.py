"""The seams of models whose layers are run a few at a time though SGLang cannot: see ``split_prefill.py``.

They are checked when such a model is served, not at each start: a row means that its module is imported.
"""

from fathom.runtime.sglang_host.seams.seam import Seam, reads_attributes, relies_on

NO_ROLE = ""
WHY = "layers are run a few at a time, between which rows are chosen"

_INPUTS = "positions hidden_states forward_batch"
_ROTATIONS = "position_embeddings_global position_embeddings_local"

# By architecture: module, prefix of the classes, and what a layer is given besides hidden states.
_FAMILIES = {
    "ArceeForCausalLM": ("models.arcee", "Arcee", " residual"),
    "CohereForCausalLM": ("models.commandr", "Cohere", " residual"),
    "Cohere2ForCausalLM": ("models.commandr", "Cohere", " residual"),
    "Ernie4_5_ForCausalLM": ("models.ernie4", "Ernie4", " residual"),
    "Ernie4_5_MoeForCausalLM": ("models.ernie4", "Ernie4", " residual"),
    "Glm4MoeForCausalLM": ("models.glm4_moe", "Glm4Moe", " residual"),
    "GraniteForCausalLM": ("models.granite", "Granite", " residual"),
    "GraniteMoeForCausalLM": ("models.granitemoe", "GraniteMoe", ""),
    "HunYuanDenseV1ForCausalLM": ("models.hunyuan", "HunYuan", " residual kv_states"),
    "HunYuanMoEV1ForCausalLM": ("models.hunyuan", "HunYuan", " residual kv_states"),
    "MixtralForCausalLM": ("models.mixtral", "Mixtral", " residual"),
    "OlmoForCausalLM": ("models.olmo", "Olmo", ""),
    "Olmo2ForCausalLM": ("models.olmo2", "Olmo2", ""),
    "OlmoeForCausalLM": ("models.olmoe", "Olmoe", " residual"),
    "Starcoder2ForCausalLM": ("models.starcoder2", "Starcoder2", ""),
}


_MODULES = "apertus gemma glm4 llama qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe spark2_5"
CHECKED = frozenset(f"sglang.srt.models.{name}" for name in _MODULES.split())
"""Modules whose models are the same a few layers at a time as all at once: by answers; qwen2_moe, sarvam_moe and
spark2_5 by their code. By theirs, exaone4, gemma2 and gemma3_causal are not."""


def _seams_of(module: str, layer: str, body: str, inputs: str) -> tuple[Seam, ...]:
    return (
        relies_on(NO_ROLE, f"{module}:{layer}.forward", "replace", WHY, inputs),
        relies_on(NO_ROLE, f"{module}:{body}.forward", "call", WHY, None, reads_attributes("layers")),
    )


SEAMS_BY_ARCHITECTURE = {
    name: _seams_of(module, f"{prefix}DecoderLayer", f"{prefix}Model", _INPUTS + more)
    for name, (module, prefix, more) in _FAMILIES.items()
}
SEAMS_BY_ARCHITECTURE["Gemma3ForCausalLM"] = _seams_of(
    "models.gemma3_causal",
    "Gemma3DecoderLayer",
    "Gemma3TextModel",
    f"positions hidden_states {_ROTATIONS} forward_batch residual kwargs",
)
SPLIT_SEAMS = tuple(seam for seams in SEAMS_BY_ARCHITECTURE.values() for seam in seams)
