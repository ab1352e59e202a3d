"""How a refresh is hidden, measured without a GPU: in Triton's interpreter, whole and with a planted error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fathom.benchmarks import gpu_refresh
from fathom.kernels import key_shares, segments_by_warp

# Few programs: the interpreter runs one after the other. A second stream that loses the work of a layer.
SCRIPT = """
import sys
sys.path.append(sys.argv[1])
import interpreter_pace, interpreter_scans
from fathom.benchmarks import gpu_refresh
from fathom.kernels import key_shares, selector_scores, stable_top_k
interpreter_pace.install()
interpreter_scans.install()
selector_scores.PARTS = selector_scores.REFINERS = stable_top_k.PARTS = 2
key_shares.PIECES_PER_PROCESSOR = 1
given, ways = gpu_refresh.launched, []

def lossy(step, lanes, refreshes, cuda):
    ways.append(refreshes)
    if len(ways) == 3:
        refresh = step._refresh
        step._refresh = lambda evidence, compact, selector: (
            (lambda: None) if compact is step.compact[-1] else refresh(evidence, compact, selector)
        )
    return given(step, lanes, refreshes, cuda)

if sys.argv[2] == "lossy":
    gpu_refresh.launched = lossy
sys.exit(gpu_refresh.main(sys.argv[3:]))
"""


def run(kind, out, *flags):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, Path(__file__).parents[1], kind, *flags, "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_row_is_there_and_nothing_is_wrong(tmp_path):
    done = run("whole", tmp_path / "r.json", "--batch", "2", "--length", "100", "--layers", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert [(row["batch"], row["renewed"]) for row in result["rows"]] == [(2, 1), (2, 2)]
    assert result["failures"] == result["left_out"] == []
    assert all(row["seconds"]["in order"]["median"] > 0 for row in result["rows"])
    assert "%" not in done.stdout.split("hidden", 1)[1]  # nothing is hidden where nothing is beside anything


def test_work_that_the_second_stream_loses_is_found(tmp_path):
    done = run(
        "lossy", tmp_path / "r.json", "--batch", "2", "--renewed", "1", "--length", "100", "--layers", "1"
    )
    assert done.returncode == 1
    (failure,) = json.loads((tmp_path / "r.json").read_text())["failures"]
    assert failure == "2 requests, 1 renewed, 1 pieces: two streams leave something else than one"


@pytest.mark.parametrize(
    ("seconds", "hidden", "over"),
    [
        ((10, 14, 11), 0.75, 1.1),
        ((10, 14, 14), 0.0, 1.4),
        ((10, 14, 10), 1.0, 1.0),
        ((10, 10, 10), None, 1.0),
    ],
)
def test_what_is_hidden_is_the_part_of_the_refreshs_time_that_is_saved(seconds, hidden, over):
    ways = (gpu_refresh.WITHOUT, gpu_refresh.IN_ORDER, gpu_refresh.BESIDE)
    found = {way: {"median": each} for way, each in zip(ways, seconds, strict=True)}
    told = gpu_refresh.shares(found, 8)
    assert told == {
        "refresh_seconds": (seconds[1] - 10) / 8,
        "hidden": hidden,
        "beside_over_without": pytest.approx(over),
    }


def test_a_length_without_a_whole_selection_is_refused(tmp_path):
    done = run("whole", tmp_path / "r.json", "--length", "20")
    assert done.returncode == 2 and "--length must be at least 84, got 20" in done.stderr


@pytest.mark.parametrize(
    ("dtype", "flags", "cuts"),
    [
        ("bfloat16", (), {2: (2, 4)}),
        ("bfloat16", ("--pieces", "5", "3"), {5: (5, 4), 3: (3, 4)}),
        ("float16", (), {4: (2, 4)}),
        ("float16", ("--pieces", "6"), {6: (2, 6)}),
    ],
)
def test_pieces_are_those_of_the_kernel_that_is_measured(dtype, flags, cuts, monkeypatch):
    """Of that for bfloat16 alone, or of all others'; the engine's own by default."""
    seen = {}
    for module in (segments_by_warp, key_shares):
        monkeypatch.setattr(module, "PIECES_PER_PROCESSOR", module.PIECES_PER_PROCESSOR)  # put back
    monkeypatch.setattr(gpu_refresh, "SlowStep", lambda *given: None)
    args = gpu_refresh.parser().parse_args(["--size", "llama-3.1-8b", "--dtype", dtype, *flags])
    run = gpu_refresh.Run(args, torch.device("cpu"))

    def measure(step, clock):
        seen[run.args.pieces[len(seen)]] = (
            segments_by_warp.PIECES_PER_PROCESSOR,
            key_shares.PIECES_PER_PROCESSOR,
        )
        return {
            way: {"median": 1.0} for way in (gpu_refresh.WITHOUT, gpu_refresh.IN_ORDER, gpu_refresh.BESIDE)
        }, ""

    monkeypatch.setattr(gpu_refresh, "measure", measure)
    args.given = []
    for pieces in args.pieces:
        run.row(1, 1, pieces)
    assert seen == cuts
    assert [row["pieces"] for row in run.rows] == list(cuts)
