"""Profiles of a running engine, on a server of their own: what goes wrong in one ends the process."""

import gzip
import json

import pytest
from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

from fathom.runtime.sglang_host.reports.profiles import one_by_one


@pytest.fixture(scope="module")
def server(start_server, tiny_model):
    return start_server(tiny_model, "--dtype", "float32", "--max-total-tokens", "9000")


def answer(server):
    asked = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = server.client.post("/generate", json={"text": "the key of", "sampling_params": asked})
    return reply.json()["text"]


@pytest.fixture(autouse=True)
def the_engine_lives(server):
    before = answer(server), server.engine()["pid"]
    yield
    assert (answer(server), server.engine()["pid"]) == before


def test_a_profile_by_stage_has_files_of_both(server, tmp_path):
    given = {
        "output_dir": str(tmp_path / "new"),
        "num_steps": 1,
        "profile_by_stage": True,
        "with_stack": False,
    }
    server.flush()
    assert server.client.post("/start_profile", json={**given, "activities": ["CPU"]}).status_code == 200
    answer(server)
    traces = {path.name.split(".trace")[0].rsplit("-", 1)[-1]: path for path in (tmp_path / "new").iterdir()}
    assert traces.keys() == {"EXTEND", "DECODE"}
    for stage, trace in traces.items():
        spans = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e["ph"] == "X"]
        (step,) = (span for span in spans if span["name"] == "scheduler.run_batch")
        (forward,) = (span for span in spans if span["name"].startswith(f"step[{stage} "))
        within = step["ts"] <= forward["ts"] and forward["ts"] + forward["dur"] <= step["ts"] + step["dur"]
        assert within, "whoever ends a profile within a span has PyTorch write where memory was"


def test_profiles_that_are_asked_for_at_once_have_no_span_in_common():
    ask, other = ProfileReq(req_type=ProfileReqType.STOP_PROFILE), object()
    assert one_by_one([other, ask, ask]) == [[other], [ask], [ask]]
    assert one_by_one([other, ask, other]) == [[other, ask, other]]
    assert one_by_one([]) == [[]]


@pytest.mark.parametrize("steps", [None, 1])
def test_a_profile_that_cannot_be_written_ends_without_the_engine(server, tmp_path, steps):
    (tmp_path / "lost").mkdir()
    given = {"output_dir": str(tmp_path / "lost"), "activities": ["CPU"], "with_stack": False}
    assert server.client.post("/start_profile", json={**given, "num_steps": steps}).status_code == 200
    again = server.client.post("/start_profile", json=given)
    assert again.status_code == 400 and "already in progress" in again.text
    (tmp_path / "lost").rmdir()
    (tmp_path / "lost").touch()
    answer(server)
    told = [server.client.post("/stop_profile") for _ in range(2)]
    assert [reply.status_code for reply in told] == [400, 400]
    assert ("the profile was given up" in told[0].text) == (steps is None)
    assert "not in progress" in told[1].text
