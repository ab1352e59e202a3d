"""The papers' tables at a size for a CPU: every mechanism ran, and the papers' figures are what the papers print.

Four engines are started, one after the other.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from fathom.benchmarks import paper_engine, paper_shapes, paper_tables
from fathom.benchmarks import paper_figures as papers
from fathom.benchmarks.paper_engine import Cell, Setup, Variant, Work

SIZES = ("--target", "tiny", "--draft", "tiny-draft", "--sfi-target", "tiny-qwen3")
WORK = (
    "--lengths",
    "384",
    "--output",
    "12",
    "--sfi-output",
    "12",
    "--sfi-batch",
    "2",
    "--sfi-documents",
    "1",
    "--kernel-length",
    "512",
    "--depth-span",
    "2",
)
SMALL = (
    "--rounds",
    "1",
    "--profile",
    "4",
    "--dtype",
    "float32",
    "--sfi-selected",
    "32",
    "--sfi-recent",
    "16",
)
POOL = ("--engine-flags", "--max-total-tokens", "4000")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper") / "tables.json"
    command = [
        sys.executable,
        "-m",
        "fathom.benchmarks.paper_tables",
        *SIZES,
        *WORK,
        *SMALL,
        "--out",
        str(out),
    ]
    done = subprocess.run([*command, *POOL], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert all(f"### {title}" in done.stdout for title in found["tables"])
    return found | {"cells": list(map(json.loads, out.with_suffix(".cells.jsonl").read_text().splitlines()))}


@pytest.fixture(scope="module")
def tables(written):
    return {title.split(":")[0]: rows for title, rows in written["tables"].items()}


def test_the_papers_cutoffs_are_boundaries():
    for size, span in {"llama-3.1-8b": 4, "llama-1b": 2, "tiny": 1}.items():
        layers = paper_shapes.sized(size).layers
        assert paper_tables.papers_span(layers) == span
        cutoffs = [paper_tables.scaled(k, layers, span) for k in papers.SPEED_CUTOFFS]
        assert cutoffs == [k * layers // 32 for k in papers.SPEED_CUTOFFS]
    assert paper_tables.papers_span(36) is None


def test_a_size_may_have_fewer_layers():
    """The same otherwise, up to all that it has."""
    whole = paper_shapes.sized("qwen3-4b")
    assert paper_shapes.sized("qwen3-4b:6") == dataclasses.replace(whole, layers=6)
    assert paper_shapes.sized("qwen3-4b:36", 512) == dataclasses.replace(whole, vocab=512)


@pytest.mark.parametrize("size", ["qwen3-4b:0", "qwen3-4b:37", "qwen3-4b:x", "qwen3-4b:-1", "qwen3-5b"])
def test_a_size_that_there_is_not_is_refused(capsys, size):
    with pytest.raises(SystemExit) as ended:
        paper_tables.main(["--sfi-target", size])
    assert ended.value.code == 2
    told = r"layers must be in \[1, 36\]" if ":" in size else "known: .*qwen3-4b"
    assert re.search(told, capsys.readouterr().err)


def test_every_table_is_there(tables):
    assert set(tables) == {
        *("SPEED, Table 15", "SPEED, Table 16", "SPEED, Table 17", "FastKV, Figure 4", "FastKV, Table 8"),
        *("SpecPrefill", "All but SFI together"),
        *("Slow-Fast Inference, Figure 4", "Slow-Fast Inference, Table 1"),
    }
    assert all(rows for rows in tables.values())
    numbers = [
        value for rows in tables.values() for row in rows for value in row.values() if value is not None
    ]
    assert all(value >= 0 for value in numbers)


def test_stock_sglang_is_beside_ours(tables):
    assert tables["SPEED, Table 15"][0]["sglang"] > 0
    assert tables["FastKV, Figure 4"][0]["x TTFT of SGLang"] > 0
    assert tables["Slow-Fast Inference, Figure 4"][0]["SGLang"] > 0


def test_each_engine_says_what_it_is(written):
    engines = written["engines"]
    assert [engine["stock"] for engine in engines] == [True, False] * 2
    for engine in engines:
        scheduler = engine["report"].get("scheduler")
        assert scheduler == (
            None if engine["stock"] else "fathom.runtime.sglang_host.scheduler.FathomScheduler"
        )


def test_each_variant_was_profiled(written):
    """In a run of its own, of four tokens, behind those that count."""
    profiles = [engine["profiles"] for engine in written["engines"]]
    assert all("sglang, 384" in own for own in profiles[::2])
    assert {"dense, 384", "fastkv, 384"} < set(profiles[1]) and set(profiles[3]) == {
        "dense, 384",
        "slow_fast, 384",
    }
    for own in profiles:
        for name, found in own.items():
            assert 0 < found["busy"] <= found["seconds"] and not found["device"]
            multiplied = [line["calls"] for line in found["kernels"] if line["name"] == "aten::mm"]
            assert multiplied and multiplied[0] > 4
            assert found["account"].get("decode_steps", 3) == 3 or name.startswith("combination")
    assert not any(cell["profile"] for cell in written["cells"])


@pytest.mark.parametrize("given", [("--profile", "8"), ("--profile", "3", "--out", "x.json")])
def test_a_profile_that_cannot_be_kept_is_refused(capsys, given):
    with pytest.raises(SystemExit) as ended:
        paper_tables.main(list(given))
    assert ended.value.code == 2 and "--profile: at least 4 tokens, and --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rounds", "0"], "argument --rounds: must be an integer >= 1"),
        (["--lengths", "0"], "argument --lengths: must be an integer >= 1"),
        (["--output", "1"], "--output and --sfi-output: at least 2"),
        (["--warm-up", "-1"], "; --warm-up and --sfi-documents: at least 0"),
        (
            ["--depth-span", "3", "--tables", "speed"],
            "--depth-span 3 does not divide the model's 8 layers; legal: 1",
        ),
        (
            ["--depth-span", "5", "--tables", "sfi"],
            "--depth-span 5 does not divide the model's",
        ),
        (["--sfi-recent", "0"], "--sfi-recent must be >= 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(monkeypatch, capsys, given, message):
    monkeypatch.setattr(paper_tables, "run_group", None)
    with pytest.raises(SystemExit) as ended:
        paper_tables.main([*SIZES, *given])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_new_folder_is_made_for_the_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(paper_tables.paper_kernels, "tables", lambda *_: None)
    out = tmp_path / "new" / "figures.json"
    assert paper_tables.main([*SIZES, "--tables", "kernels", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["complete"]


def test_a_run_that_is_cut_short_leaves_what_it_has(monkeypatch, tmp_path, written):
    def measured(*_):
        cell = paper_engine.Cell(1.0, 0.1, 10.0, {"slow_steps": 1, "fast_steps": 9})
        return {64: dict.fromkeys(("sglang", "dense", "slow_fast"), cell)}

    def breaks(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(paper_tables, "run_group", measured)
    monkeypatch.setattr(paper_tables.paper_kernels, "tables", breaks)
    sizes = "--sfi-target", "tiny-qwen3", "--lengths", "64", "--tables", "sfi", "kernels"
    with pytest.raises(RuntimeError, match="no kernel"):
        paper_tables.main([*sizes, "--out", str(tmp_path / "cut.json")])
    found = json.loads((tmp_path / "cut.json").read_text())
    assert not found["complete"] and written["complete"]
    (title,) = found["tables"]
    assert title.startswith("Slow-Fast Inference, Figure 4") and found["tables"][title][0]["prompt"] == 64


@pytest.mark.parametrize(
    ("gpu", "stock", "depth_pages"), [(True, False, "1"), (True, True, "0"), (False, False, "0")]
)
def test_depth_pages_on_a_gpu_are_asked_for_by_our_engine_alone(monkeypatch, gpu, stock, depth_pages):
    """In the environment of the process that the engine is started in."""
    seen = []

    def measured(setup, ways, work):
        seen.append((setup.stock, os.environ["FATHOM_GPU_DEPTH_PAGES"]))
        return {}, {}

    monkeypatch.setenv("FATHOM_GPU_DEPTH_PAGES", "x")  # as it was is put back
    monkeypatch.setattr(paper_engine, "_measured", measured)
    monkeypatch.setattr(paper_engine, "ProcessPoolExecutor", lambda count, _: ThreadPoolExecutor(count))
    work = Work([8], batch=1, output=2, rounds=1, vocab=512, seed=0)
    with paper_engine.Processes(gpu) as started:
        assert started.run(Setup([], stock), [Variant("x", None, bool)], work) == ({}, {})
    assert seen == [(stock, depth_pages)]


def test_each_cell_is_left_when_it_is_measured(written):
    """A run that is cut short within a group of engines has them."""
    cells = written["cells"]
    assert all(cell["prompt"] == 384 and cell["round"] == 1 and cell["ttft"] > 0 for cell in cells)
    (fastkv,) = (cell for cell in cells if cell["variant"] == "fastkv")
    (row,) = written["tables"]["FastKV, Figure 4: prefill and decode"]
    assert fastkv["ttft"] == row["TTFT s"] and fastkv["account"]["propagated_tokens"] < 384
    assert {"sglang", "dense", "slow_fast", "combination", "specprefill-0.3"} < {
        cell["variant"] for cell in cells
    }


def test_tokens_that_came_all_at_once_have_no_ratio():
    """Of a short answer that is drafted, or whose reader was kept from reading; all else is told."""
    dense, at_once = Cell(2.0, 0.1, 10.0), Cell(1.0, 0.0, 0.0)
    cells = {paper_tables.DENSE: dense, paper_tables.STOCK: dense, "combination": at_once, "speed-6": at_once}
    row = paper_tables.gain_row(384, cells, "combination", {})
    assert row["x TPOT"] is None and row["x TPOT of SGLang"] is None and row["TPOT ms"] == 0
    assert row["x TTFT"] == row["x TTFT of SGLang"] == 2
    cutoffs, limits = [(3, 24, "speed-6")], {(384, "speed-6"): Cell(1.0, 1.0, 1.0)}
    assert paper_tables.speed_row(384, cells, cutoffs, "tpot", papers.SPEED_TPOT_MS, limits)["x 24"] is None
    swapped = {paper_tables.DENSE: at_once, "slow_fast": dense}
    dense.account |= {"slow_steps": 1, "fast_steps": 2}
    limits = {(384, "slow_fast"): Cell(1.0, 1.0, 1.0)}
    assert paper_tables.sfi_rows({384: swapped}, limits)[0]["x"] is None


def test_a_warm_up_may_be_shorter_than_what_is_measured():
    work = Work([9], batch=2, output=2, rounds=1, vocab=512, seed=0, warm_up=4)
    lengths = [list(map(len, paper_engine.prompts_of(9, work, turn))) for turn in (-1, 0, 1)]
    assert lengths == [[4, 4], [9, 9], [9, 9]]


def test_what_is_compared_may_be_less():
    names = [way.name for way in paper_tables.variants(32, 4, ("speed", "specprefill"), [24], [0.1])]
    assert names == ["dense", "speed-24", "specprefill-0.1"]
    with pytest.raises(SystemExit):
        paper_tables.main(["--keep-rates", "0.1", "1"])


def test_kv_saved_is_what_the_cutoff_says(tables):
    """Prompt of 384 tokens, 12 of output, eight layers: above K, one anchor, the last token and the output stay."""
    (row,) = tables["SPEED, Table 17"]
    boundaries = {16: 4, 20: 4, 24: 6, 28: 6}  # the nearest between spans of two layers, the even one of two
    for k in papers.SPEED_CUTOFFS:
        cutoff = boundaries[k]
        expected = (8 - cutoff) / 8 * (384 - 2) / (384 + 11)
        assert row[f"saved {k}"] == pytest.approx(expected, abs=0.03)


def test_limits_are_what_flops_and_bytes_allow(tables):
    """Above the cutoff nothing but an anchor, the last token and the answer is computed, and read; at a prompt's
    last layer, of eight or of six, little more than keys and values."""
    (prefill,), (decode,) = tables["SPEED, Table 15"], tables["SPEED, Table 16"]
    assert 8 / 6 < prefill["limit x 24"] < 7 / 5
    assert 1 < decode["limit x 24"] < 8 / 6 and decode["limit x 28"] <= decode["limit x 24"]
    (pruned,), (fast,) = tables["FastKV, Figure 4"], tables["Slow-Fast Inference, Figure 4"]
    assert 1 < pruned["limit x TPOT"] < 10 and 1 < pruned["limit x TTFT"] < 5
    assert 1 < fast["limit x"] < 384 / (4 + 32 + 16)
    assert tables["All but SFI together"][0]["limit x TPOT"] is None


def test_the_mechanisms_ran(tables):
    rows = tables["SpecPrefill"]
    assert [row["keep rate"] for row in rows] == [0.1, 0.3, 0.5]
    assert 0 < rows[0]["kept"] < rows[1]["kept"] < rows[2]["kept"] < 384
    assert all(row["x by formula"] > 0 for row in rows)
    (fast,) = tables["Slow-Fast Inference, Figure 4"]
    assert fast["fast"] > fast["slow"] > 0


@pytest.mark.parametrize(
    ("table", "length", "printed"),
    [
        (papers.SPEED_TTFT_MS, 1, (1.64, 1.40, 1.23, 1.09)),
        (papers.SPEED_TTFT_MS, 128, (2.01, 1.60, 1.33, 1.14)),
        (papers.SPEED_TPOT_MS, 128, (1.55, 1.36, 1.22, 1.10)),
        (papers.SPEED_TPOT_MS, 64, (1.23, 1.22, 1.15, 1.07)),
    ],
)
def test_the_papers_speedups_follow_from_their_times(table, length, printed):
    full, *rest = table[length]
    assert [round(full / time, 2) for time in rest] == pytest.approx(printed, abs=0.011)


def test_the_papers_memory_is_that_of_the_shape():
    """128 KiB of KV per token at 32 layers of 8 heads of 128 (bfloat16), and a decode of 128 tokens."""
    size = paper_shapes.sized("llama-3.1-8b")
    per_token = 2 * size.layers * size.kv_heads * size.head_dim * 2
    for length, (full, *cut) in papers.SPEED_KV_GIB.items():
        assert full == pytest.approx((length * 1024 + 128) * per_token / 2**30, abs=6e-4)
        for k, held in zip(papers.SPEED_CUTOFFS, cut, strict=True):
            deep = (length * 1024 * k / 32 + 128) * per_token / 2**30
            assert held == pytest.approx(deep, abs=6e-4)
