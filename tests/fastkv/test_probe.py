"""Where to put the selection: the probe against the oracle's model, and the command that uses it."""

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from oracles.compressed_model import CompressedModel

from fathom.benchmarks import calibrate
from fathom.runtime.fastkv.config import FastKVConfig
from fathom.runtime.fastkv.probe import Probe, stack
from fathom.server.command.checks import StartError
from fathom.server.command.profile import Profile


def test_final_states_are_the_oracles(tiny_model):
    """Of short prompts too, in which the window is a large part of what its queries see."""
    rng, probe = random.Random(1), Probe.load(str(tiny_model), FastKVConfig(), torch.float32)
    oracle = CompressedModel(tiny_model)
    for length, rate in ((40, 0.4), (24, 0.6), (30, 0.5), (150, 0.2)):
        probe.config = FastKVConfig(tsp_rate=rate)
        prompt = [rng.randrange(6, 2000) for _ in range(length)]
        full, selected = probe.final_states(prompt, [1, 2, 3])
        for layer, state in ({4: full} | selected).items():
            want = oracle.log_probs(prompt, [], layer, 1.0 if layer == 4 else rate)[0]
            with torch.no_grad():
                got = oracle.model.lm_head(state).log_softmax(-1)
            assert torch.allclose(got, want, atol=1e-4)
    both = stack([(full, selected), (full, selected)], 2)
    assert both[0].shape == both[1].shape == (2, 64) and torch.equal(both[1][0], selected[2])


def test_the_command_writes_a_profile_that_serve_reads(tiny_model, tmp_path, capsys):
    rng, lines = random.Random(2), []
    for kind in ("text", "prompt"):
        lines.append(json.dumps({kind: " ".join(str(rng.randrange(10**6)) for _ in range(40))}))
    lines.append(json.dumps({"messages": [{"role": "user", "content": "What is the key of Lena? " * 20}]}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "new" / "tsp.json"
    flags = ["--model-path", str(tiny_model), "--max-layer", "2", "--depth-span", "1", "--out", str(out)]
    assert calibrate.main(["tsp", str(tmp_path / "prompts.jsonl"), *flags]) == 0
    profile = Profile.read(out)
    distances = {int(layer): value for layer, value in profile.measured["distances"].items()}
    assert profile.layers == 4 and sorted(distances) == [1, 2, 3]
    assert profile.tsp_layer == min((1, 2), key=distances.get) and all(d > 0 for d in distances.values())
    assert f"{profile.tsp_layer:>4}" in capsys.readouterr().out
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    profile.check(4, out)
    assert profile.selection_layer(None, 4, 1, out) == profile.tsp_layer
    assert profile.selection_layer(3, 4, 1, out) == 3
    with pytest.raises(
        StartError, match=r"--profile .*: its tsp-layer 1 is not a multiple of 2 layers below 4"
    ):
        replace(profile, tsp_layer=1).selection_layer(None, 4, 2, out)
    with pytest.raises(StartError, match="made for a model of 4 layers; this one has 32"):
        profile.check(32, out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "not a profile"),
        ('{"fathom_profile": 1}', "not a profile"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path, content, message):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartError, match=message):
        Profile.read(path)


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ("", [], "no prompts in it"),
        ('{"txt": "a"}', [], "line 1: no prompt in it"),
        ('{"text": "a b"}', [], "too short to select from"),
        ('{"text": "' + "one two " * 60 + '"}', ["--depth-span", "3"], "does not divide"),
        ('{"text": "' + "one two " * 60 + '"}', ["--max-layer", "0"], "no boundary between spans"),
        ('{"text": "a"}', ["--tsp-rate", "1"], "--tsp-rate must be in"),
        ('{"text": "a"}', ["--tolerance", "-1"], "--tolerance must be a finite distance >= 0, got -1"),
        ('{"text": "a"}', ["--tolerance", "nan"], "--tolerance must be a finite distance >= 0, got nan"),
        ('\n{"messages": "hello"}', [], r"line 2: no prompt in it \(TypeError\)"),
        ('{"messages": ["hello"]}', [], r"line 1: no prompt in it \(TypeError\)"),
        ('{"messages": [{"role": "user"}]}', [], "line 1: no prompt in it"),
    ],
)
def test_what_cannot_be_measured_is_said(tiny_model, tmp_path, lines, flags, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(StartError, match=message):
        calibrate.main(["tsp", str(path), "--model-path", str(tiny_model), *flags])


def test_a_prompt_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "one\u2028two"}\n\n{"text": "three\x85"}\r\n')
    assert calibrate.read_prompts(path, lambda text: {"input_ids": [text]}, 9) == [
        ["one\u2028two"],
        ["three\x85"],
    ]


def test_models_and_files_that_cannot_be_read_are_said(tiny_model, tmp_path):
    path, model = tmp_path / "prompts.jsonl", tmp_path / "model"
    path.write_text('{"text": "' + "one two " * 60 + '"}')
    shutil.copytree(tiny_model, model)
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(StartError, match="model cannot be loaded: "):
        calibrate.main(["tsp", str(path), "--model-path", str(model)])
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StartError, match=r"no tokenizer at .*one of: \(1\)"):
        calibrate.main(["tsp", str(path), "--model-path", str(model)])
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StartError, match="not text in UTF-8"):
        calibrate.main(["tsp", str(path), "--model-path", str(tiny_model)])
