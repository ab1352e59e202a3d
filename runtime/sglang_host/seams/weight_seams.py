"""The seams of models: how configurations and weights are read, and weights changed while the server runs."""

import inspect

from fathom.runtime.sglang_host.seams.seam import (
    SCHEDULER,
    SERVER,
    Seam,
    reads_attributes,
    reads_global,
    relies_on,
)

FILES = "source resolved_source startup_prefetch_started startup_prefetch_active"

WEIGHT_SEAMS: tuple[Seam, ...] = (
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "configs.model_config:ModelConfig.__init__",
        "replace",
        "asks the module's `get_config`, ours, which overrides positions as the model's config.json would, and "
        "reads the language model's alone where the option of that name says so",
        check=lambda f: (
            reads_global("get_config")(f) and "language_model_only" in inspect.signature(f).parameters
        ),
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "server_args:ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES",
        "replace",
        "what may be served without its images; those of which we serve the language model are there too",
        check=lambda names: isinstance(names, tuple),
    ),
    relies_on(
        SERVER,
        "arg_groups.model_hook:handle_language_model_only",
        "read",
        "refuses all other architectures by that list",
        "server_args",
        reads_attributes("LANGUAGE_MODEL_ONLY_ARCHITECTURES"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager._tokenize_one_request",
        "read",
        "refuses images where a language model is served without them",
        "obj",
        reads_attributes("language_model_only"),
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "models.utils:WeightsMapper",
        "call",
        "names of a checkpoint's tensors under a text model's",
        check=lambda c: {"apply", "apply_list"} <= set(vars(c)),
    ),
    relies_on(
        SCHEDULER,
        "models.gemma3_causal:Gemma3ForCausalLM.load_weights",
        "override",
        "passes over the output's matrix, which it has where it is not the input's",
        "weights",
        lambda f: "lm_head.weight" in f.__code__.co_consts,
    ),
    relies_on(
        SCHEDULER,
        "models.gemma3_causal:Gemma3ForCausalLM.forward",
        "read",
        "gives the logits' layer the input's matrix, in the place of which that layer takes the output's",
        check=reads_attributes("logits_processor embed_tokens"),
    ),
    relies_on(
        SCHEDULER,
        "model_loader.loader:_get_quantization_config",
        "read",
        "a quantized checkpoint's names go by the mapper of the model's class",
        check=reads_attributes("hf_to_sglang_mapper apply_weight_name_mapper"),
    ),
    *(
        relies_on(
            SCHEDULER,
            f"managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.{method}",
            "read",
            "waits for the other processes before it answers: one in which it fails has to meet them",
            "recv_req",
            reads_attributes("barrier tp_cpu_group"),
        )
        for method in ("update_weights_from_tensor", "update_weights_from_ipc")
    ),
    relies_on(
        SCHEDULER,
        "model_loader.loader:DefaultModelLoader._get_weights_iterator",
        "override",
        "every checkpoint that is loaded is looked at first; nothing was changed yet",
        FILES,
        reads_attributes("_prepare_weights model_or_path revision fall_back_to_pt allow_patterns_overrides"),
    ),
    relies_on(
        SCHEDULER,
        "model_loader.loader:DefaultModelLoader._prepare_weights",
        "call",
        "the files of a checkpoint",
        "model_name_or_path revision fall_back_to_pt allow_patterns_overrides",
    ),
    relies_on(
        SCHEDULER,
        "model_loader.loader:DefaultModelLoader.ResolvedSource",
        "read",
        "the files of a checkpoint that SGLang has looked up before",
        None,
        lambda c: "weight_files" in c.__dataclass_fields__,
    ),
    relies_on(
        SCHEDULER,
        "model_loader.loader:DefaultModelLoader.Source",
        "read",
        "says which model a checkpoint is for, and so whether that one is quantized, and of which shapes",
        None,
        lambda c: "model_config" in c.__dataclass_fields__,
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner_components.weight_updater:WeightUpdater.update_weights_from_disk",
        "read",
        "what it raises before the first weight is read is an answer, and the old weights stay",
        "model_path load_format weight_name_filter recapture_cuda_graph",
        lambda f: (
            {"_get_weights_iterator", "init_new"}
            <= {name for code in f.__code__.co_consts if hasattr(code, "co_names") for name in code.co_names}
        ),
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "model_loader.weight_utils:filter_duplicate_safetensors_files",
        "call",
        "which of a folder's files are the model's",
        "hf_weights_files hf_folder index_file allow_patterns",
    ),
)
