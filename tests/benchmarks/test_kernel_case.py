"""What the kernels' measurements read: as many entries as they say, and from where."""

import json
import math

import pytest
import torch

from fathom.benchmarks import paper_figures as papers
from fathom.benchmarks import sfi_kernels
from fathom.benchmarks.kernel_case import RECENT, KernelCase


# The shape of the other tests' models, so that the kernels are compiled once for all of them.
def make(scattered=False, length=700):
    return KernelCase(2, length, 4, 2, 32, torch.float32, scattered=scattered)


@pytest.mark.parametrize("scattered", [False, True])
def test_all_entries_are_read_as_dense_decoding_reads_them(scattered):
    case = make(scattered)
    assert (case.table[0].diff() == 1).all() != scattered
    torch.testing.assert_close(case.two_segments(700)(), case.dense()())


@pytest.mark.parametrize("read", [2, 90, 600, 699])
def test_no_more_is_read_than_counted(read):
    """Entries that are not among those counted may hold anything; each of those counted matters."""
    case = make(scattered=True)
    recent = min(RECENT, read // 2)
    runs = torch.arange(2)[:, None] * 700 + torch.arange(read - recent)
    for held, kept in ((case.pool, case.table[:, 700 - recent :]), (case.compact, runs)):
        for each in held:
            others = torch.ones(1400, dtype=torch.bool)
            others[kept.flatten().long()] = False
            each[others] = math.nan
    assert case.two_segments(read)().isfinite().all()
    for held, entry in ((case.pool, case.table[0, 700 - recent]), (case.compact, read - recent - 1)):
        before = held[1][entry].clone()
        held[1][entry] = math.nan
        got = case.two_segments(read)()
        assert got[0].isnan().all() and got[1].isfinite().all()
        held[1][entry] = before


def test_the_table_stands_beside_the_papers(tmp_path, capsys):
    out = tmp_path / "kernels.json"
    flags = ["--length", "512", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
    assert sfi_kernels.main([*flags, "--dtype", "float32", "--calls", "3", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["retained"] for row in rows] == [0.016, 0.063, 0.125, 0.25, 0.5]
    assert [row["paper"] for row in rows] == [papers.SFI_KERNEL_SPEEDUP[s] for s in sfi_kernels.RETAINED]
    assert [row["entries_ratio"] for row in rows][2:] == [8, 4, 2]
    assert all(row["ratio"]["n"] == 3 and row["ratio"]["min"] > 0 for row in rows)
    assert "| 12.5% |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "3", "--kv-heads", "4"], "--heads must be a multiple of --kv-heads, got 3 and 4"),
        (["--batch", "0"], "argument --batch: must be an integer >= 1"),
        (["--calls", "-5"], "argument --calls: "),
        (["--calls", "0"], "argument --calls: must be an integer >= 1"),
        (["--out", "."], "argument --out: . is a folder; give a file"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sfi_kernels, "measure", None)
    with pytest.raises(SystemExit) as stop:
        sfi_kernels.main(flags)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_of_few_entries_one_is_read_at_least():
    flags = ["--length", "10", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
    args = sfi_kernels.parser().parse_args([*flags, "--dtype", "float32", "--calls", "1"])
    assert [row["entries_ratio"] for row in sfi_kernels.measure(args)] == [10, 10, 10, 5, 2]
