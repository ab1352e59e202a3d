"""Training: the loss falls, an interrupted run continues exactly, the export equals the trainer's forward."""

import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fathom.demo import judge, speed, train
from fathom.demo.export import MODELS, export, load_model
from fathom.demo.model import Llama, ModelConfig, grow, structured_init
from fathom.demo.rows import RowBuilder

TINY = ["--tokenizer", str(MODELS / "target"), "--compile", "0", "--threads", "1", "--quiet", "--warmup", "3"]
SHIPPED = ("target", "draft", "target-speed")


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    small = {
        "draft": ModelConfig(vocab=0, hidden=64, layers=4, ffn=64),
        "target": ModelConfig(
            vocab=0, hidden=64, layers=8, ffn=96, copy_guides=((4, 1), (7, 1)), topic_guides=((3, 1),)
        ),
    }
    monkeypatch.setattr(train, "SHAPES", small)


def run(main, out, stages, *extra):
    main([*extra, "--out", str(out), "--stages", stages, *TINY])
    return torch.load(out / "checkpoint.pt", weights_only=False)


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_loss_falls_and_resume_is_exact(tmp_path):
    stages = "96x2:80,96x2:20"
    whole = run(train.main, tmp_path / "whole", stages, "draft")
    log = log_of(tmp_path / "whole")
    assert log[1]["loss"] < log[0]["loss"] - 1
    interrupted = tmp_path / "parts" / "checkpoint.pt"
    interrupted.parent.mkdir()
    shutil.copy(tmp_path / "whole" / "stage0.pt", interrupted)
    assert torch.load(interrupted, weights_only=False)["step"] == 80
    parts = run(train.main, interrupted.parent, stages, "draft")
    assert [line["step"] for line in log_of(interrupted.parent)] == [100]
    assert parts["step"] == whole["step"] == 100
    for name, value in whole["model"].items():
        assert torch.equal(value, parts["model"][name]), name


def test_grown_target_starts_like_the_draft_and_adapts(tmp_path):
    draft = run(train.main, tmp_path / "draft", "96x1:2", "draft")
    small = Llama(ModelConfig.from_dict(draft["config"]))
    small.load_state_dict(draft["model"])
    shape = train.SHAPES["target"]
    big = Llama(ModelConfig.from_dict(shape.as_dict() | {"vocab": small.cfg.vocab}))
    structured_init(big)
    grow(big, draft["model"], train.PLACES)
    big.layers[-1].o.data.zero_()
    ids = torch.arange(10, 40)[None]
    assert torch.allclose(small(ids), big(ids), atol=1e-5)
    run(
        train.main,
        tmp_path / "target",
        "96x1:2",
        "target",
        "--grow",
        str(tmp_path / "draft" / "checkpoint.pt"),
    )
    aware = run(
        speed.main, tmp_path / "aware", "96x2:2", "--init", str(tmp_path / "target" / "checkpoint.pt")
    )
    assert aware["step"] == 2


def test_speed_training_sees_what_the_judge_masks(tokenizer):
    """The fine-tune's gathered rows give the logits of the explicit Eq. 5 mask."""
    model = load_model(MODELS / "target")
    row = RowBuilder(tokenizer).chat_row(random.Random(4), 200)
    begin, end, _ = row.spans[0]
    row.spans = row.spans[:1]
    index, turn = speed.decode_rows(train.collate([row]))
    ids = row.ids[:end]
    for cutoff in (4, 6):
        states, _ = speed.decode_states(model, torch.tensor([ids]), index, turn, cutoff, torch.float32)
        want = judge.forward(model, ids, list(range(end)), judge.speed(begin, cutoff))
        got = states[0, 1:] @ model.embedding.T
        assert (got - want[begin - 1 : end - 1]).abs().max() < 1e-3


def test_export_equals_the_trainers_forward(tmp_path, tokenizer):
    torch.manual_seed(0)
    model = Llama(ModelConfig(vocab=len(tokenizer), hidden=64, layers=4, ffn=96))
    structured_init(model)
    export(model.state_dict(), model.cfg, tokenizer, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(10, 2000, (1, 300))
    with torch.no_grad():
        assert (hf(ids).logits - load_model(tmp_path)(ids)).abs().max() < 1e-3


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_load_in_transformers(name):
    hf = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    tok = AutoTokenizer.from_pretrained(MODELS / name)
    assert hf.config.max_position_embeddings >= 16384 and hf.config.head_dim == 64
    assert hf.config.vocab_size == len(tok) and hf.generation_config.eos_token_id == tok.eos_token_id
    ids = torch.randint(10, len(tok), (1, 200))
    with torch.no_grad():
        assert (hf(ids).logits - load_model(MODELS / name)(ids)).abs().max() < 1e-3


def test_shipped_pair_answers_and_separates_policies(tokenizer):
    judged = judge.Judge(load_model(MODELS / "target"), load_model(MODELS / "draft"), tokenizer)
    items = judged.items("multikey", 768, 6)
    hits = {
        (policy, control): sum(judged.score(i, policy, 0.2, control) for i in items)
        for policy in ("dense", "retention", "specprefill", "sfi")
        for control in (False, True)
        if policy != "dense" or not control
    }
    assert hits["dense", False] >= 5
    for policy in ("retention", "specprefill", "sfi"):
        assert hits[policy, False] >= 5 > 3 >= hits[policy, True], (policy, hits)
