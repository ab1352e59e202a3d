"""The generated model: the same files for the same seed, and a model that Transformers can run."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from fathom.benchmarks import args, model
from fathom.runtime import cost
from fathom.runtime.sglang_host.machine import torchvision_ops

SHAPE = replace(model.TINY, vocab=64)


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_same_seed_gives_the_same_files_and_another_seed_other_weights(tmp_path):
    first = digests(model.ensure(SHAPE, tmp_path / "a"))
    assert first == digests(model.ensure(SHAPE, tmp_path / "b"))
    other = digests(model.ensure(replace(SHAPE, seed=1), tmp_path / "a"))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_bfloat16_is_the_rounded_float32_model(tmp_path):
    from safetensors.torch import load_file

    wide = load_file(model.ensure(replace(SHAPE, dtype="float32"), tmp_path) / "model.safetensors")
    narrow = load_file(model.ensure(SHAPE, tmp_path) / "model.safetensors")
    assert all(torch.equal(narrow[name], wide[name].to(torch.bfloat16)) for name in wide)


def test_the_cache_is_reused_and_left_clean(tmp_path):
    folder = model.ensure(SHAPE, tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert model.ensure(SHAPE, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_write_leaves_no_model_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "_tokenizer", lambda shape: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.ensure(SHAPE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_key_depends_on_every_field():
    changed = [
        replace(SHAPE, **{name: "float32" if name == "dtype" else getattr(SHAPE, name) + 1})
        for name in SHAPE.__dataclass_fields__
    ]
    assert len({shape.key for shape in [SHAPE, *changed]}) == len(changed) + 1


def test_transformers_loads_every_tensor_and_generates_varied_tokens(tmp_path):
    torchvision_ops.declare()
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = model.ensure(replace(SHAPE, dtype="float32"), tmp_path)
    llama, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert llama.config.rope_parameters["rope_theta"] == 500000.0
    assert llama.lm_head.weight.data_ptr() != llama.model.embed_tokens.weight.data_ptr()
    prompt = torch.arange(model.FIRST_WORD, model.FIRST_WORD + 20)[None]
    output = llama.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)[0, 20:]
    assert len(set(output.tolist())) > 4
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode([5, 6]) == "w5 w6"
    assert tokenizer("w5 w6")["input_ids"] == [5, 6]


def test_the_draft_of_a_model_is_much_smaller_and_shares_its_vocabulary():
    shape, draft = model.BENCH, model.draft_of(model.BENCH)
    big, small = (cost.ModelShape.from_config(model.config_json(each)) for each in (shape, draft))
    for prompt in (512, 8192):
        dense = [cost.make_plan(each.layers, prompt) for each in (big, small)]
        assert cost.prefill_flops(big, dense[0]) > 8 * cost.prefill_flops(small, dense[1])
    assert (draft.vocab, draft.max_position, draft.dtype) == (shape.vocab, shape.max_position, shape.dtype)


def test_a_checkpoints_format_is_its_own_unless_another_is_asked_for(tmp_path):
    config = model.config_json(model.TINY) | {"torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--model", str(tmp_path), "--prompts", "64", "--output", "4"]
    shapes = [
        args.plan(args.parser().parse_args([*given, *more]))[0] for more in ([], ["--dtype", "float32"])
    ]
    assert [shape.dtype for shape in shapes] == ["float16", "float32"]
    assert args.plan(args.parser().parse_args([]))[0].dtype == model.BENCH.dtype
