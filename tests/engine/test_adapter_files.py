"""LoRA adapters as PEFT saves them: each form is computed as it says, or refused while it is loaded."""

import base64
import json
import pickle
import shutil

import pytest
import torch
from adapters import ATTENTION, ENDS, MLP, save_adapter
from conftest import save_random_model
from greedy import body_of, check_tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

PROMPT = [17, 250, 33, 1000, 42, 7, 99, 1500, 64, 23]
FORMS = {
    "both ends": {"modules": ENDS},
    "the last end": {"modules": ("lm_head",)},
    "the first end": {"modules": ("embed_tokens",)},
    "q": {"modules": ("q_proj",)},
    "k": {"modules": ("k_proj",)},
    "v": {"modules": ("v_proj",)},
    "k and v": {"modules": ("k_proj", "v_proj")},
    "q and k": {"modules": ("q_proj", "k_proj")},
    "gate": {"modules": ("gate_proj",)},
    "up": {"modules": ("up_proj", "o_proj")},
    "root": {"modules": ATTENTION + MLP, "rooted": True},
    "ranks": {"modules": ATTENTION + MLP + ENDS, "ranks": {"q_proj": 2, "1.mlp.down_proj": 7, "lm_head": 3}},
    "alphas": {"modules": ATTENTION + MLP, "alphas": {"q_proj": 3.0, "0.mlp.up_proj": 40.0}},
    "all of it": {
        "modules": ATTENTION + MLP + ENDS,
        "ranks": {"k_proj": 6, "gate_proj": 1},
        "alphas": {"k_proj": 3.0, "embed_tokens": 1.0},
        "rooted": True,
    },
}
RANK = 4
FLAGS = ("--dtype", "float32", "--max-total-tokens", "2000", "--enable-lora", "--max-lora-rank", "8")
FLAGS += ("--max-loras-per-batch", "1", "--lora-target-modules", *ATTENTION, *MLP, *ENDS)


@pytest.fixture(scope="module", params=[False, True], ids=["two ends", "ends of one matrix"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save_random_model(folder, "Qwen3", tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def server(start_server, model):
    return start_server(model, *FLAGS)


def load(server, folder, name="x"):
    return server.client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})


def unload(server, name="x"):
    assert server.client.post("/unload_lora_adapter", json={"lora_name": name}).status_code == 200


def answer_of(server, adapter=None):
    body = body_of(PROMPT, None) | ({"lora_path": adapter} if adapter else {})
    reply = server.client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@torch.no_grad()
def rows_of(folder, answer):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = PROMPT + answer["output_ids"]
    return model(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)


def test_every_form_is_the_model_with_it_in_its_weights(server, model, tmp_path):
    plain = answer_of(server)
    check_tokens(plain, rows_of(model, plain), "without an adapter")
    for seed, (name, form) in enumerate(FORMS.items()):
        adapter, merged = save_adapter(tmp_path / str(seed), model, RANK, seed=seed, **form)
        reply = load(server, adapter)
        assert reply.status_code == 200, (name, reply.text)
        answer = answer_of(server, "x")
        check_tokens(answer, rows_of(merged, answer), name)
        apart = rows_of(model, answer) - rows_of(merged, answer)
        assert apart.abs().max() > 0.01, name
        unload(server)


@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens",), ("down_proj",)])
def test_nothing_is_left_of_the_adapter_that_had_the_place_before(server, model, tmp_path, modules):
    """Both stay loaded, and the server has one place."""
    changes = {"before": ATTENTION + MLP + ENDS, "after": modules}
    saved = {
        name: save_adapter(tmp_path / name, model, RANK, several, 5) for name, several in changes.items()
    }
    for name, (adapter, _) in saved.items():
        assert load(server, adapter, name).status_code == 200
    for name in ("before", "after", "before"):
        answer = answer_of(server, name)
        check_tokens(answer, rows_of(saved[name][1], answer), name)
    for name in saved:
        unload(server, name)


def changed_config(**fields):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def changed_weights(change):
    def write(folder):
        file = folder / "adapter_model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file({name: weight.contiguous() for name, weight in weights.items()}, file)

    return write


NAME = "base_model.model.model.layers.{}.self_attn.{}"
DOWN, UP = (NAME.format(1, f"q_proj.lora_{factor}.weight") for factor in "AB")


def rename(before, after):
    return changed_weights(lambda weights: weights.update({after: weights.pop(before)}))


def moved(layer, last):
    """A matrix's two factors under another name."""

    def change(weights):
        for name in (DOWN, UP):
            weights[name.replace("layers.1.", f"layers.{layer}.").replace("q_proj", last)] = weights.pop(name)

    return changed_weights(change)


def renamed(owner):
    """A matrix's two factors, outside of the layers."""

    def change(weights):
        for name, factor in ((DOWN, "A"), (UP, "B")):
            weights[f"base_model.model.{owner}.lora_{factor}.weight"] = weights.pop(name)

    return changed_weights(change)


def resized(name, *shape):
    return changed_weights(lambda weights: weights.update({name: torch.zeros(shape)}))


REFUSED = {
    "another method": (changed_config(peft_type="IA3"), "peft_type is 'IA3'"),
    "biases": (changed_config(bias="all"), "bias is 'all'"),
    "biases of adapters": (changed_config(lora_bias=True), "lora_bias is True"),
    "whole modules": (changed_config(modules_to_save=["lm_head"]), "modules_to_save is ['lm_head']"),
    "tokens": (changed_config(trainable_token_indices=[5]), "trainable_token_indices is [5]"),
    "layers": (changed_config(layer_replication=[[0, 2], [1, 3]]), "layer_replication"),
    "parameters": (changed_config(target_parameters=["experts.w"]), "target_parameters"),
    "from a place on": (changed_config(alora_invocation_tokens=[7]), "alora_invocation_tokens is [7]"),
    "another beginning": (changed_config(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
    "magnitudes": (changed_config(use_dora=True), "DoRA"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "more rank than told": (changed_config(r=2), "rank 2"),
    "more rank than there is room for": (changed_config(rank_pattern={"q_proj": 9}), "rank 9"),
    "not said to be changed": (changed_config(target_modules=["v_proj", "down_proj"]), "down_proj"),
    "an end not said to be changed": (renamed("lm_head"), "lm_head.lora_A.weight, its target_modules"),
    "what is no end and no layer": (renamed("score"), "score.lora_A.weight"),
    "a layer too many": (moved(77, "q_proj"), "layers.77"),
    "a module that there is not": (moved(1, "fc"), "self_attn.fc"),
    "a bias": (rename(UP, NAME.format(1, "q_proj.bias")), "q_proj.bias, which is no factor"),
    "half": (changed_weights(lambda weights: weights.pop(UP)), "only one factor"),
    "factors that do not fit": (resized(DOWN, 3, 64), "(3, 64)"),
    "another model's inputs": (resized(DOWN, RANK, 65), "65"),
    "another model's outputs": (resized(UP, 66, RANK), "66 outputs"),
    "another model's outputs elsewhere": (resized(UP.replace("q_proj", "o_proj"), 66, RANK), "(66, 4)"),
}


def test_what_cannot_be_served_is_refused_and_harms_nobody(server, model, tmp_path):
    adapter, _ = save_adapter(tmp_path / "good", model, RANK, ATTENTION, 1)
    before = answer_of(server)["output_ids"]
    for number, (name, (change, words)) in enumerate(REFUSED.items()):
        bad = tmp_path / str(number)
        shutil.copytree(adapter, bad)
        change(bad)
        reply = load(server, bad)
        assert reply.status_code == 400 and words in reply.text, (name, reply.status_code, reply.text)
        assert answer_of(server)["output_ids"] == before, name
    assert load(server, adapter).status_code == 200
    assert answer_of(server, "x")["output_ids"] != before
    unload(server)


def test_one_that_came_as_tensors_is_asked_for_again(server, model, tmp_path):
    """Its client has it, the server no longer: SGLang would look for it on Hugging Face."""
    adapter, _ = save_adapter(tmp_path, model, RANK, ATTENTION, 1)
    assert load(server, adapter).status_code == 200
    expected = answer_of(server, "x")["output_ids"]
    unload(server)
    assert answer_of(server, "x")["output_ids"] == expected  # its files are there
    tensors = pickle.dumps(load_file(adapter / "adapter_model.safetensors"))
    sent = {
        "lora_name": "sent",
        "config_dict": json.loads((adapter / "adapter_config.json").read_text()),
        "serialized_named_tensors": [base64.b64encode(tensors).decode()],
    }
    for _ in range(2):
        reply = server.client.post("/load_lora_adapter_from_tensors", json=sent)
        assert reply.status_code == 200, reply.text
        assert answer_of(server, "sent")["output_ids"] == expected
        unload(server, "sent")
        for asked in ("sent", ["sent"]):
            prompts = [PROMPT] if isinstance(asked, list) else PROMPT
            reply = server.client.post("/generate", json={"input_ids": prompts, "lora_path": asked})
            assert reply.status_code == 400 and "['sent'] were loaded from tensors" in reply.text
    unload(server)


def test_a_start_with_one_says_why(start_server, tiny_model, tmp_path):
    adapter, _ = save_adapter(tmp_path, tiny_model, RANK, ATTENTION, 1)
    changed_config(modules_to_save=["lm_head"])(adapter)
    with pytest.raises(RuntimeError, match="modules_to_save"):
        start_server(tiny_model, "--dtype", "float32", "--lora-paths", f"x={adapter}")
