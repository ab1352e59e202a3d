"""What is made of a profile: busy and idle time of overlapping events, and whose time a nested one is."""

import gzip
import json
import os

import pytest

from fathom.benchmarks import trace


def event(name, start, duration, lane=0, kind="kernel"):
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": lane}


def test_a_gpu_is_busy_while_one_of_its_streams_is():
    events = [
        event("attention", 1000.0, 400.0),
        event("selector", 1100.0, 500.0, lane=1),  # 200 longer than what it runs beside
        event("attention", 1610.0, 90.0),  # launched at once
        event("copy", 2000.0, 100.0, kind="gpu_memcpy"),  # the host was late
        event("aten::mm", 0.0, 9000.0, kind="cpu_op"),
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 5000.0},
    ]
    found = trace.summary(reversed(events))
    kernels = found.pop("kernels")
    assert found == pytest.approx(
        {"device": True, "seconds": 1100e-6, "busy": 790e-6, "waits": 1, "waited": 300e-6}
    )
    assert [(line["name"], line["calls"]) for line in kernels] == [
        ("selector", 1),
        ("attention", 2),
        ("copy", 1),
    ]
    assert [line["seconds"] for line in kernels] == pytest.approx([500e-6, 490e-6, 100e-6])


def test_what_an_operator_calls_is_not_its_own_time():
    events = [
        event("linear", 0.0, 100.0, kind="cpu_op"),
        event("mm", 10.0, 70.0, kind="cpu_op"),
        event("fill", 20.0, 5.0, kind="cpu_op"),
        event("linear", 100.0, 30.0, kind="cpu_op"),
        event("mm", 5.0, 40.0, lane=1, kind="cpu_op"),  # another thread
    ]
    found = trace.summary(events)
    assert not found["device"] and found["seconds"] == found["busy"] == pytest.approx(130e-6)
    own = {line["name"]: (line["calls"], line["seconds"]) for line in found["kernels"]}
    assert own["linear"] == (2, pytest.approx(60e-6))
    assert own["mm"] == (2, pytest.approx(105e-6)) and own["fill"] == (1, pytest.approx(5e-6))


def test_kernels_that_took_little_are_one_line(monkeypatch):
    monkeypatch.setattr(trace, "LONGEST_NAMES", 2)
    events = [event(f"kernel {i}", 1000.0 * i, 10.0 * i) for i in range(1, 6)]
    lines = trace.summary(events)["kernels"]
    assert [line["name"] for line in lines] == ["kernel 5", "kernel 4", "3 others"]
    assert lines[-1]["calls"] == 3 and lines[-1]["seconds"] == pytest.approx(60e-6)


def test_the_newest_trace_of_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace"):
        trace.read(tmp_path)
    for age, name in enumerate(("new", "old")):
        with gzip.open(file := tmp_path / f"{name}.trace.json.gz", "wt") as written:
            json.dump({"traceEvents": [event(name, 0.0, 1.0)]}, written)
        os.utime(file, (1000 - age, 1000 - age))
    assert [line["name"] for line in trace.read(tmp_path)] == ["new"]


def test_nothing_was_recorded():
    with pytest.raises(ValueError, match="no events"):
        trace.summary([])
