"""The seams of a machine without a GPU: SGLang's layers that run on Fathom's kernels and packed weights."""

from collections.abc import Iterator

from fathom.runtime.sglang_host.seams.seam import SCHEDULER, Seam, reads_attributes, reads_global, relies_on

# Classes that differ from the first only in how they fill the table of cosines and sines.
ROTARY_CLASSES = tuple(
    f"layers.rotary_embedding.{place}"
    for place in (
        "base:RotaryEmbedding",
        "base:LinearScalingRotaryEmbedding",
        "rope_variant:Llama3RotaryEmbedding",
        "rope_variant:DynamicNTKAlphaRotaryEmbedding",
        "rope_variant:DynamicNTKScalingRotaryEmbedding",
        "rope_variant:Gemma4RotaryEmbedding",
        "yarn:YaRNScalingRotaryEmbedding",
    )
)

# Families whose decoder layers are norm, attention, norm, gated feed-forward, and nothing else: module, prefix of
# the classes, further parameters of a layer's forward, and what it reads.
_FAMILIES = (
    ("models.llama", "Llama", "", "input_layernorm self_attn post_attention_layernorm mlp"),
    ("models.qwen2", "Qwen2", "", "input_layernorm self_attn post_attention_layernorm mlp"),
    ("models.qwen3", "Qwen3", " post_residual_addition", "layer_communicator self_attn mlp"),
)
LAYER_CLASSES = tuple(f"{module}:{name}DecoderLayer" for module, name, *_ in _FAMILIES)


def _layer_seams(module: str, name: str, more: str, parts: str) -> Iterator[Seam]:
    """What stands between two attentions of a family's layers is computed in two calls for few rows."""
    why = "few rows go through a layer in two calls"
    inputs = "positions hidden_states forward_batch residual" + more
    layer = f"{module}:{name}DecoderLayer.forward"
    yield relies_on(SCHEDULER, layer, "replace", why, inputs, reads_attributes(parts))
    yield relies_on(
        SCHEDULER,
        f"{module}:{name if name != 'Qwen3' else 'Qwen2'}Model.forward",
        "read",
        "what a layer gives is what the next one is given",
        None,
        reads_attributes("layers layers_to_capture"),
    )
    yield relies_on(
        SCHEDULER,
        f"{module}:{name}Attention.forward",
        "replace",
        why,
        "positions hidden_states forward_batch",
        reads_attributes("attn o_proj"),
    )
    yield relies_on(
        SCHEDULER,
        f"{module}:{name}MLP.forward",
        "replace",
        why,
        "x forward_batch",
        reads_attributes("gate_up_proj act_fn down_proj"),
    )


CPU_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SCHEDULER,
        "layers.layernorm:BaseFusedOp.register_oot_forward",
        "call",
        "our kernels run as the forward of SGLang's layers",
        "op_cls fn platform_key",
    ),
    relies_on(
        SCHEDULER,
        "layers.layernorm:BaseFusedOp._resolve_forward_method",
        "read",
        "a platform's registered forwards come first",
        "",
        lambda f: "_oot_forward_registry" in f.__code__.co_names,
    ),
    relies_on(
        SCHEDULER,
        "layers.quantization.unquant:UnquantizedLinearMethod.apply",
        "override",
        "linear layers run on packed weights",
        "layer x bias",
    ),
    relies_on(
        SCHEDULER,
        "layers.quantization.unquant:UnquantizedEmbeddingMethod.embedding",
        "replace",
        "an embedding that is also the output matrix is read from the packed weight",
        "layer input_",
    ),
    relies_on(
        SCHEDULER,
        "layers.vocab_parallel_embedding:VocabParallelEmbedding._embed_local_shard",
        "read",
        "an embedding asks its quant_method in every call",
        None,
        lambda f: {"quant_method", "embedding"} <= set(f.__code__.co_names),
    ),
    relies_on(
        SCHEDULER,
        "layers.linear:ColumnParallelLinear.forward",
        "read",
        "a linear layer asks its quant_method in every call",
        None,
        lambda f: "quant_method" in f.__code__.co_names,
    ),
    relies_on(
        SCHEDULER,
        "distributed.device_communicators.pynccl_wrapper:find_nccl_library",
        "replace",
        "devices that are no GPUs talk over Gloo, also where PyTorch brings NCCL",
        "",
    ),
    relies_on(
        SCHEDULER,
        "distributed.device_communicators.pynccl_wrapper:NCCLLibrary.__init__",
        "read",
        "looks NCCL up by that function",
        "so_file",
        reads_global("find_nccl_library"),
    ),
    relies_on(
        SCHEDULER, "platforms.interface:SRTPlatform.get_dispatch_key_name", "call", "where to register", ""
    ),
    relies_on(
        SCHEDULER,
        "layers.layernorm:RMSNorm.forward_native",
        "replace",
        "RMSNorm and the residual before it in one pass",
        "x residual post_residual_addition quant_linear",
        reads_attributes(
            "variance_size_override cast_x_before_out_mul fp32_residual override_orig_dtype hidden_size "
            "weight variance_epsilon"
        ),
    ),
    relies_on(
        SCHEDULER,
        "layers.activation:SiluAndMul.forward_native",
        "replace",
        "SiLU and product in one pass",
        "x",
    ),
    *(
        relies_on(
            SCHEDULER,
            f"{place}.forward_native",
            "replace",
            "rotary embedding of queries and keys in one pass",
            "positions query key offsets fused_set_kv_buffer_arg",
            reads_attributes("sin_cos_cache cos_sin_cache head_size rotary_dim is_neox_style"),
        )
        for place in ROTARY_CLASSES
    ),
    relies_on(
        SCHEDULER,
        "constrained.xgrammar_backend:XGrammarGrammarBackend.apply_vocab_mask",
        "replace",
        "strict thinking asks for it where a request has no grammar of its own",
        "logits vocab_mask",
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:adjust_config_with_unaligned_cpu_tp",
        "replace",
        "Qwen2's heads are as large as its config says, where nothing is added to them",
        "model_config load_config tp_size",
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:ModelRunner.load_model",
        "read",
        "calls it by its name in the module",
        "",
        reads_global("adjust_config_with_unaligned_cpu_tp"),
    ),
    *(row for family in _FAMILIES for row in _layer_seams(*family)),
)
