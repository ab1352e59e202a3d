"""The seams of rotations and windows: those that are another model's are put right when a model is loaded."""

import inspect

from fathom.runtime.sglang_host.seams.seam import (
    SCHEDULER,
    SERVER,
    Seam,
    reads_attributes,
    reads_global,
    relies_on,
)

_WHY = "is put right behind the positions that a model was scaled for"

ROTATION_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SCHEDULER,
        "layers.rotary_embedding.rope_variant:Phi3LongRoPEScaledRotaryEmbedding.forward",
        "read",
        "takes another table for it: KV in the prefix cache is rotated alike, whatever its batch was",
        "positions query key offsets",
        reads_attributes("long_short_cos_sin_cache original_max_position_embeddings"),
    ),
    relies_on(
        SCHEDULER,
        "layers.rotary_embedding.rope_variant:Phi3LongRoPEScaledRotaryEmbedding.__init__",
        "subclass",
        "ours rotates pairs too: it is told that they are halves",
        "head_size rotary_dim max_position_embeddings original_max_position_embeddings base is_neox_style dtype "
        "short_factor long_factor short_mscale long_mscale",
    ),
    relies_on(
        SCHEDULER,
        "layers.rotary_embedding.factory:get_rope",
        "replace",
        "makes our class by this name",
        "head_size rotary_dim max_position base is_neox_style rope_scaling dtype partial_rotary_factor "
        "dual_chunk_attention_config",
        reads_global("Phi3LongRoPEScaledRotaryEmbedding"),
    ),
    relies_on(
        SCHEDULER,
        "layers.rotary_embedding.factory:get_rope",
        "call",
        "scales the layers of a model that passes over scaling",
        "head_size rotary_dim max_position base is_neox_style rope_scaling dtype partial_rotary_factor "
        "dual_chunk_attention_config",
    ),
    relies_on(
        SCHEDULER,
        "layers.rotary_embedding.rope_variant:Phi3LongRoPEScaledRotaryEmbedding._compute_cos_sin_cache",
        "call",
        "the table for all positions that there may be",
        "max_position_embeddings rescale_factors mscale",
    ),
    relies_on(
        SCHEDULER,
        "layers.rotary_embedding.base:RotaryEmbedding._ensure_cos_sin_cache_length",
        "call",
        "the table of rotations that are not scaled, for all positions that there may be",
        "needed_max_pos",
        reads_attributes("cos_sin_cache"),
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "configs.olmo3:Olmo3Config.__init__",
        "replace",
        "is told of rotations in the words that it knows",
        check=lambda f: {"rope_theta", "rope_scaling"} <= set(inspect.signature(f).parameters),
    ),
    relies_on(
        SCHEDULER,
        "layers.radix_attention:RadixAttention.__init__",
        "read",
        "how many earlier positions a layer's tokens see, -1 for all, in a number that is put right",
        check=lambda f: "sliding_window_size" in inspect.signature(f).parameters,
    ),
    *(
        relies_on(
            SCHEDULER,
            f"layers.rotary_embedding.{place}._compute_cos_sin_cache",
            "read",
            f"its table {_WHY}",
            "",
            reads_attributes(f"max_position_embeddings _compute_inv_freq {names}"),
        )
        for place, names in (
            ("base:LinearScalingRotaryEmbedding", "scaling_factors base"),
            ("rope_variant:DynamicNTKScalingRotaryEmbedding", "scaling_factor base rotary_dim"),
            ("yarn:YaRNScalingRotaryEmbedding", "scaling_factor mscale"),
        )
    ),
)
