"""The seam ledger against the pinned SGLang, and what happens when a seam breaks."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fathom.benchmarks.servers import free_port
from fathom.runtime.sglang_host import forking
from fathom.runtime.sglang_host.platform import FathomCpuPlatform
from fathom.runtime.sglang_host.seams import seams

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("seam", seams.LEDGER, ids=lambda seam: seam.target.split(":")[-1])
def test_row_resolves(seam):
    seams.check(seam)
    assert set(seam.roles) <= set(seams.ROLES)
    assert seam.why


def test_every_place_of_sglang_that_is_taken_has_a_row():
    run = subprocess.run([sys.executable, TESTS / "replaced.py"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert {what: without for what, (_, without) in told.items()} == {what: [] for what in told}
    least = {"overrides": 100, "server": 50, "scheduler": 20, "detokenizer": 1}
    assert told.keys() == least.keys() and all(told[what][0] >= number for what, number in least.items())


def test_every_role_has_rows():
    for role in seams.ROLES:
        assert seams.rows(role)
        seams.verify(role)


@pytest.mark.parametrize(
    "broken",
    [
        seams.Seam("managers.scheduler:Scheduler.no_such_method", "override", "x", ("scheduler",)),
        seams.Seam("managers.no_such_module:Scheduler", "override", "x", ("scheduler",)),
        seams.Seam(
            "managers.scheduler:Scheduler.init_tp_model_worker", "override", "x", ("scheduler",), ("a",)
        ),
        seams.Seam("managers.scheduler:Scheduler", "replace", "x", ("scheduler",), None, lambda _: False),
    ],
)
def test_a_broken_row_is_an_error(broken):
    with pytest.raises(seams.SeamError, match=broken.target.split(":")[0]):
        seams.verify("scheduler", [*seams.rows("scheduler"), broken])


def test_another_version_is_an_error(monkeypatch):
    import sglang

    monkeypatch.setattr(sglang, "__version__", "0.5.21")
    with pytest.raises(seams.SeamError, match=r"needs sglang==0\.5\.20, found 0\.5\.21"):
        seams.verify("detokenizer")


def test_a_stock_report_is_an_error():
    with pytest.raises(seams.SeamError, match="stock SGLang"):
        seams.verify_scheduler_report(None)
    with pytest.raises(seams.SeamError, match="as worker"):
        seams.verify_scheduler_report({"scheduler": "a.FathomScheduler", "worker": "sglang.TpModelWorker"})


@pytest.mark.parametrize(
    ("module", "damage", "names"),
    [
        # Every other process is a copy of the server: the damage is in all of them.
        (
            "sglang.srt.managers.scheduler",
            "del module.Scheduler.init_tp_model_worker",
            "Scheduler.init_tp_model_worker",
        ),
        (
            "sglang.srt.managers.tokenizer_manager",
            "module.TokenizerManager.collect_metrics = lambda self, state: None",
            "TokenizerManager.collect_metrics",
        ),
        (
            "fathom.runtime.sglang_host.process",
            "module.install = lambda *_: None",
            "the engine process runs stock SGLang",
        ),
    ],
)
def test_the_server_refuses_a_broken_seam(template, tmp_path, tiny_model, module, damage, names):
    (log := tmp_path / "log").touch()
    argv = [f"import {module} as module; {damage}", "serve", str(tiny_model), "--port", str(free_port())]
    with template.start(argv, log, dict(os.environ), Path(__file__).with_name("broken.py")) as process:
        code = process.wait(150)
    told = log.read_text()
    assert code == 3, told
    assert names in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("platform", "others", "method"),
    [(FathomCpuPlatform(), False, "fork"), (FathomCpuPlatform(), True, "spawn"), (object(), False, "spawn")],
)
def test_processes_are_forked_where_that_is_safe(monkeypatch, platform, others, method):
    asked, end = [], threading.Event()
    monkeypatch.setattr(forking, "current_platform", platform)
    monkeypatch.setattr(threading, "_active", {threading.get_ident(): threading.current_thread()})
    stock = SimpleNamespace(set_start_method=lambda *given: asked.append(given), Pipe="a pipe")
    thread = threading.Thread(target=end.wait)
    if others:
        thread.start()
    mp = forking.Forking(stock)
    mp.set_start_method("spawn", force=True)
    end.set()
    assert asked == [(method, True)] and mp.Pipe == "a pipe"


def test_a_process_that_is_spawned_can_begin():
    """It imports this first: beside PyTorch for CPUs torchvision's operators are missing."""
    ran = subprocess.run(
        [sys.executable, "-c", "import fathom.server.children"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_the_engines_processes_are_copies_of_the_server(server):
    """Of one that was spawned, the resource tracker that its pipes need would be a child too."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) == 2
    assert {"sglang::scheduler", "sglang::detokenizer"} == {child.cmdline()[0].strip() for child in children}


def test_the_engine_process_says_what_it_runs(server):
    engine = server.engine()
    assert engine["scheduler"] == "fathom.runtime.sglang_host.scheduler.FathomScheduler"
    assert engine["worker"] == "fathom.runtime.sglang_host.worker.FathomWorker"
    assert (
        engine["attention_backend"]
        == "fathom.runtime.sglang_host.attention.cpu_attention.CpuAttentionBackend"
    )
    assert engine["bfloat16_products"] is False  # the model is in float32
    assert engine["platform"] == "fathom.runtime.sglang_host.platform.FathomCpuPlatform"
    assert engine["pid"] != server.process.pid
    before = engine["steps"]
    answer = server.client.post(
        "/generate",
        json={"input_ids": [7] * 33, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}},
    ).json()
    after = server.engine()["steps"]
    assert after["decode_steps"] - before["decode_steps"] == 4
    report = answer["meta_info"]["fathom"]
    assert report["decode_steps"] == 4
    assert report["prompt_tokens"] == report["kept_tokens"] == 33
    per_token = engine["kv_pool"]["bytes_per_token"]
    assert per_token == 4 * 2 * 2 * 32 * 4  # layers x (keys, values) x KV heads x head_dim x float32
    assert report["kv_bytes"] == report["kv_bytes_dense"] == 37 * per_token
