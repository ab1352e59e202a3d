"""Checkpoints that take images too, of which the language model alone is served."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from interpreted import SERVED, check_all
from noisy import draft_flags
from safetensors.torch import load_file, save_file
from seeing import FAMILIES, SECTIONS, logits, save
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from fathom.runtime.sglang_host.models import language_models
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
    tensors = language_models.NAMES.apply(load_file(source / SAVED).items())
    tensors = dict(language_models.by_expert(tensors, config.hidden_size))
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
        before = {name for name, _ in language_models.NAMES.apply(load_file(source / SAVED).items())}

        def renamed(name, tensor):
            old = next((old for old in LAYOUTS if name.startswith(old)), "")
            return LAYOUTS.get(old, "") + name.removeprefix(old), tensor

        changed(source, renamed)
        tensors = load_file(source / SAVED)
        assert all(name.startswith(("model.", "lm_head.")) for name in tensors)
        assert {name for name, _ in language_models.NAMES.apply(tensors.items())} == before


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


def test_a_checkpoints_own_words_stay(tmp_path):
    """What is said of the whole checkpoint, and is the language model's too."""
    save(tmp_path, "Qwen3VL")
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    told = {"quant_method": "fp8", "modules_to_not_convert": ["model.visual.merger", "lm_head"]}
    del content["text_config"]["eos_token_id"]
    file.write_text(json.dumps(content | {"quantization_config": told, "eos_token_id": 77}))
    config = config_of(tmp_path).hf_config
    assert config.quantization_config == told and config.eos_token_id == 77


def test_names_of_quantized_checkpoints_are_the_text_models():
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

    parts = ["model.visual.merger.linear_fc1", "model.language_model.layers.0.mlp.gate", "lm_head"]
    config = Fp8Config(ignored_layers=parts)
    config.apply_weight_name_mapper(language_models.taking(Qwen3MoeForCausalLM).hf_to_sglang_mapper)
    assert config.ignored_layers == ["model.layers.0.mlp.gate", "lm_head"]


def test_others_are_as_they_were(tmp_path, tiny_model):
    save(tmp_path, "Qwen3VL")
    assert ModelConfig(str(tmp_path)).hf_config.architectures == ["Qwen3VLForConditionalGeneration"]
    plain, asked = (ModelConfig(str(tiny_model), language_model_only=asked) for asked in (False, True))
    assert plain.hf_config.to_dict() | {"language_model_only": True} == asked.hf_config.to_dict()


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3VLMoe"])
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


def test_what_has_no_language_model_of_ours_is_refused(tmp_path):
    config = transformers.Gemma3Config(
        text_config={"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32},
        architectures=["Gemma3ForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(StartError, match=r"does not support .*Gemma3.*Supported: .*Qwen3VLForConditional"):
        serve._server_args(["--model-path", str(tmp_path), "--language-model-only"], EngineOptions())
