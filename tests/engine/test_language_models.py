"""Checkpoints that take images too, of which the language model alone is served."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import save_random_model
from interpreted import SERVED, check_all
from noisy import draft_flags
from safetensors.torch import load_file, save_file
from seeing import FAMILIES, SECTIONS, logits, save
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from fathom.runtime.sglang_host.models import language_models, language_weights
from fathom.runtime.sglang_host.options import EngineOptions
from fathom.server import serve
from fathom.server.command.checks import StartError
from fathom.server.requests import templates

PROMPT = list(range(6, 60))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SAVED = "model.safetensors"
LAYOUTS = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
    "visual.": "model.visual.",
    "model.visual.": "model.visual.",
    "model.language_model.": "model.language_model.",
    "model.": "model.language_model.",
}
"""By how a tensor's name begins as Transformers saves it, the first that fits: its module's name in a model."""


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    for place, name in (
        (language_models.model_config, "get_config"),
        (ModelConfig, "__init__"),
        (ServerArgs, "LANGUAGE_MODEL_ONLY_ARCHITECTURES"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    language_models.install()


def config_of(folder, **options):
    return ModelConfig(str(folder), language_model_only=True, **options)


def changed(folder, change):
    """A checkpoint's tensors, by what a function makes of their names and values."""
    tensors = dict(change(name, tensor) for name, tensor in load_file(folder / SAVED).items())
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SAVED, {"format": "pt"}
    )


def split(source, folder):
    """A checkpoint's language model, as a checkpoint of its own."""
    config = config_of(source).hf_config
    config.save_pretrained(folder)
    tensors = language_weights.NAMES.apply(load_file(source / SAVED).items())
    tensors = dict(language_weights.by_expert(tensors, config.hidden_size))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SAVED, {"format": "pt"}
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def alone(folder):
    """[tokens, vocabulary] float32: what Transformers' model of a text gives."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_is_the_whole_models_on_texts(tmp_path, family, tied):
    """By Transformers, of both: nothing but the language model is left, and all of that."""
    source, folder = tmp_path / "whole", tmp_path / "alone"
    source.mkdir()
    save(source, family, tied)
    config = config_of(source)
    assert not config.is_multimodal and not config.model_is_mrope
    assert config.hf_config.tie_word_embeddings == tied
    assert torch.equal(alone(split(source, folder)), logits(source, PROMPT))


def test_names_that_newer_checkpoints_have(tmp_path):
    for family in FAMILIES:
        (source := tmp_path / family).mkdir()
        save(source, family)
        before = {name for name, _ in language_weights.NAMES.apply(load_file(source / SAVED).items())}

        def renamed(name, tensor):
            old = next((old for old in LAYOUTS if name.startswith(old)), "")
            return LAYOUTS.get(old, "") + name.removeprefix(old), tensor

        changed(source, renamed)
        tensors = load_file(source / SAVED)
        assert all(name.startswith(("model.", "lm_head.")) for name in tensors)
        assert {name for name, _ in language_weights.NAMES.apply(tensors.items())} == before


def test_internvl_as_its_makers_publish_it(tmp_path):
    """Not Transformers' class, but SGLang's: other names, and another word for the language model's part."""
    (source := tmp_path / "whole").mkdir()
    save(source, "InternVL")
    want = logits(source, PROMPT)
    old = {"vision_tower.": "vision_model.", "multi_modal_projector.": "mlp1."}

    def renamed(name, tensor):
        begin = next((begin for begin in old if name.startswith(begin)), "")
        return old.get(begin, "") + name.removeprefix(begin), tensor

    changed(source, renamed)
    file = source / "config.json"
    content = json.loads(file.read_text())
    inner = content["text_config"] | {"architectures": ["Qwen3ForCausalLM"]}
    told = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"}
    seen = {"vision_config": {"architectures": ["InternVisionModel"]}}
    file.write_text(json.dumps(told | seen | {"llm_config": inner, "dtype": "float32"}))
    config = config_of(source)
    assert not config.is_multimodal and config.hf_config.architectures == ["Qwen3ForCausalLM"]
    overrides = json.dumps({"llm_config": {"rope_scaling": YARN}})
    scaled = config_of(source, model_override_args=overrides).hf_config.rope_parameters
    assert (
        scaled["factor"] == YARN["factor"] and scaled["rope_theta"] == inner["rope_parameters"]["rope_theta"]
    )
    assert torch.equal(alone(split(source, tmp_path / "alone")), want)


def test_experts_as_they_were_published(tmp_path):
    """All in one, inputs before outputs; Transformers saves them the other way around."""
    (source := tmp_path / "whole").mkdir()
    save(source, "Qwen3VLMoe")
    want = logits(source, PROMPT)

    def turned(name, tensor):
        return name, tensor.transpose(1, 2) if ".mlp.experts." in name else tensor

    changed(source, turned)
    assert torch.equal(alone(split(source, tmp_path / "alone")), want)


@pytest.mark.parametrize("wrapped", [False, True])
def test_overrides_are_of_the_language_model(tmp_path, wrapped):
    save(tmp_path, "Qwen3VL")
    overrides = {"rope_scaling": YARN, "max_position_embeddings": 256}
    overrides = {"text_config": overrides} if wrapped else overrides
    own, other = (config_of(tmp_path, model_override_args=json.dumps(x)).hf_config for x in ({}, overrides))
    told = {name: value for name, value in own.rope_parameters.items() if name != "type"}
    assert told == {"rope_type": "default", "rope_theta": SECTIONS["rope_theta"]}
    assert {**other.rope_parameters, "type": "x"} == told | YARN | {"type": "x"}
    assert other.max_position_embeddings == 256 < own.max_position_embeddings


def test_gemma_3_as_it_was_published(tmp_path):
    """Before Transformers 5: its scaling is that of layers without windows, and every sixth layer is one."""
    save(tmp_path, "Gemma3", num_hidden_layers=7, layer_types=None)
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    inner |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 6}
    told(
        tmp_path, text_config={k: v for k, v in inner.items() if k not in ("rope_parameters", "layer_types")}
    )
    config = config_of(tmp_path).hf_config
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    kinds = config.rope_parameters
    assert kinds["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}
    assert kinds["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def told(folder, **changes):
    """The folder, whose config.json says this too; what is None, it leaves out."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return folder


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_what_is_said_of_the_whole_is_said_of_the_language_model(tmp_path, key):
    """LLaVA's language model has ids of its own, the defaults of its class."""
    save(tmp_path, "Llava")
    parts = ["language_model.model.layers.0.mlp.gate", "language_model.lm_head", "vision_tower"]
    method = {"quant_method": "fp8"}
    config = config_of(told(tmp_path, **{key: method | {"ignore": parts}}, eos_token_id=77)).hf_config
    assert config.eos_token_id == 77
    assert getattr(config, key) == method | {"ignore": ["model.layers.0.mlp.gate", "lm_head", "vision_tower"]}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
        ("language_model.model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
        ("language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
        ("re:model.language_model.layers.*mlp.gate$", "re:model.layers.*mlp.gate$"),
        (r"re:model\.language_model\.layers\.\d+\.mlp\.gate", r"re:model\.layers\.\d+\.mlp\.gate"),
        ("language_model.lm_head", "lm_head"),
        ("re:.*lm_head", "re:.*lm_head"),
        ("re:visual.*", "re:visual.*"),
        ("Linear", "Linear"),
    ],
)
def test_parts_that_are_not_quantized_have_a_text_models_names(said, meant):
    assert language_models.renamed({said: [said, 4, None]}) == {meant: [meant, 4, None]}


@pytest.mark.parametrize("name", ["qweight", "weight_packed"])
def test_a_quantized_head_is_a_head(tmp_path, name):
    save(tmp_path, "Llava")
    head = "language_model.lm_head."

    def packed(old, tensor):
        return old.replace(f"{head}weight", head + name), tensor

    changed(tmp_path, packed)
    assert not config_of(tmp_path).hf_config.tie_word_embeddings


@pytest.mark.parametrize(
    ("whole", "part", "tied"),
    [(None, None, False), (None, True, True), (True, None, True), (False, True, False)],
)
def test_without_tensors_the_checkpoints_words_say_what_is_tied(tmp_path, whole, part, tied):
    """Not the defaults of its classes: of Mistral 3, the whole is tied and the part is not."""
    save(tmp_path, "Mistral3")
    (tmp_path / SAVED).unlink()
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    inner |= {"tie_word_embeddings": part}
    if part is None:
        del inner["tie_word_embeddings"]
    told(tmp_path, tie_word_embeddings=whole, text_config=inner)
    assert config_of(tmp_path).hf_config.tie_word_embeddings == tied
    names = ["language_model.model.norm.weight", "language_model.lm_head.weight"]
    index = {"weight_map": dict.fromkeys(names, "pytorch_model-00001-of-00001.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert not config_of(tmp_path).hf_config.tie_word_embeddings


def test_overrides_win_over_what_the_checkpoint_says(tmp_path):
    save(tmp_path, "Qwen3VL", tied=True)
    told(tmp_path, quantization_config={"quant_method": "fp8"}, eos_token_id=77)
    other = {"quantization_config": {"quant_method": "awq"}, "tie_word_embeddings": False, "eos_token_id": 78}
    for overrides in (other, {"text_config": other}):
        config = config_of(tmp_path, model_override_args=json.dumps(overrides)).hf_config
        assert config.quantization_config == other["quantization_config"]
        assert config.eos_token_id == other["eos_token_id"]
        assert not config.tie_word_embeddings
    assert config_of(tmp_path, model_override_args='{"text_config": null}').hf_config.tie_word_embeddings


def test_overrides_of_a_part_are_a_text_drafts_too(tiny_model):
    overrides = json.dumps({"text_config": {"max_position_embeddings": 4096}})
    assert config_of(tiny_model, model_override_args=overrides).hf_config.max_position_embeddings == 4096


def test_names_of_quantized_checkpoints_are_the_text_models():
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

    parts = ["model.visual.merger.linear_fc1", "model.language_model.layers.0.mlp.gate", "lm_head"]
    config = Fp8Config(ignored_layers=parts)
    config.apply_weight_name_mapper(language_weights.taking(Qwen3MoeForCausalLM).hf_to_sglang_mapper)
    assert config.ignored_layers == ["model.layers.0.mlp.gate", "lm_head"]


def test_others_are_as_they_were(tmp_path, tiny_model):
    save(tmp_path, "Qwen3VL")
    assert ModelConfig(str(tmp_path)).hf_config.architectures == ["Qwen3VLForConditionalGeneration"]
    plain, asked = (ModelConfig(str(tiny_model), language_model_only=asked) for asked in (False, True))
    assert plain.hf_config.to_dict() | {"language_model_only": True} == asked.hf_config.to_dict()


@pytest.mark.parametrize("family", ["Gemma3", "Qwen3VL", "Qwen3VLMoe"])
def test_every_mechanism_serves_its_texts(start_server, tmp_path, triggers, family):
    """The draft is such a checkpoint too. The oracle's models are the language models alone."""
    target, draft = (tmp_path / name for name in ("target", "draft"))
    for folder in (target, draft):
        folder.mkdir()
        save(folder, family)
    torch.manual_seed(11)
    changed(draft, lambda name, tensor: (name, tensor + 0.01 * torch.randn_like(tensor)))
    template = target / "chat_template.jinja"
    kept = {"chat_template": template.read_text()}
    template.rename(target / "chat_template.json").write_text(json.dumps(kept))
    server = start_server(target, *SERVED, *draft_flags(draft), "--language-model-only")
    check_all(server, *(split(each, tmp_path / f"{each.name} alone") for each in (target, draft)), triggers)
    chat = {"model": "x", "messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 4}
    reply = server.client.post("/v1/chat/completions", json=chat)
    assert reply.status_code == 200, reply.text
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}
    reply = server.client.post("/v1/chat/completions", json={"model": "x", "messages": [message]})
    assert reply.status_code == 400 and "only supports text" in reply.text
    body = {"input_ids": PROMPT, "image_data": "data:image/png;base64,iVBORw0KGgo="}
    reply = server.client.post("/generate", json=body)
    assert reply.status_code == 400 and "--language-model-only" in reply.text
    assert server.stop() == 0


@pytest.mark.parametrize("own", [None, "{{ 'own' }}"])
def test_a_template_that_is_kept_for_the_processor_is_the_tokenizers(tmp_path, own):
    """Not in the place of one that the tokenizer has."""
    tokenizer = SimpleNamespace(chat_template=own)
    templates.complete(tokenizer, str(tmp_path), None)
    assert tokenizer.chat_template == own
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'kept' }}"}))
    templates.complete(tokenizer, str(tmp_path), None)
    assert tokenizer.chat_template == (own or "{{ 'kept' }}")
    templates.complete(None, str(tmp_path), None)


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [("gate_up_proj_scale_inv", (2, 64, 128), "quantized"), ("gate_up_proj", (2, 64, 64), "square")],
)
def test_experts_that_cannot_be_told_apart_are_refused(name, shape, why):
    name = f"model.layers.0.mlp.experts.{name}"
    with pytest.raises(ValueError, match=f"does not take {why} weights of all experts in one: {name}"):
        list(language_weights.by_expert([(name, torch.zeros(shape))], 64))


GEMMA = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}


@pytest.mark.parametrize(
    ("family", "kind", "why"),
    [
        ("PaliGemma", "gemma", "does not take PaliGemmaForConditionalGeneration; it takes .*Qwen3VLMoe"),
        ("Llava", "gemma", "does not take Llava.* of type gemma; it takes .*qwen3_vl_moe_text"),
    ],
)
def test_what_has_no_language_model_of_ours_is_refused(tmp_path, family, kind, why):
    architecture = f"{family}ForConditionalGeneration"
    config = getattr(transformers, f"{family}Config")(
        text_config=GEMMA | {"model_type": kind}, architectures=[architecture]
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(StartError, match=why):
        serve._server_args(["--model-path", str(tmp_path), "--language-model-only"], EngineOptions())


def test_gguf_files_are_refused(tmp_path, monkeypatch):
    save(tmp_path, "Qwen3VL")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    monkeypatch.setattr(language_models.rope_overrides, "get_config", lambda *_, **__: config)
    with pytest.raises(ValueError, match=r"takes no GGUF file, got model\.gguf"):
        ModelConfig("model.gguf", language_model_only=True)


@pytest.mark.parametrize(
    ("family", "ours"), [("Ernie4_5", "Ernie4_5_ForCausalLM"), ("SeedOss", "Qwen2ForCausalLM")]
)
def test_text_models_that_sglang_has_under_another_name(tmp_path, family, ours):
    """Not where they are to be served by Transformers' code, which knows them by their own."""
    save_random_model(tmp_path, family)
    assert ModelConfig(str(tmp_path)).hf_config.architectures == [ours]
    config = ModelConfig(str(tmp_path), model_impl="transformers").hf_config
    assert config.architectures == [f"{family}ForCausalLM"]


def test_transformers_code_knows_a_checkpoint_by_its_own_names(tmp_path):
    save(tmp_path, "Qwen3VL")
    config = config_of(tmp_path, model_impl="transformers").hf_config
    assert config.architectures == ["Qwen3VLForConditionalGeneration"]
