"""A real Prometheus scrapes a real server: every panel of the dashboard and every recorded rule has an answer.

Runs where `prometheus` is installed, about 15 s on top of the shared server.
"""

import json
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "chart" / "files"

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt install prometheus)"
)


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory):
    """A Prometheus with our rules that scrapes the shared server each second; its URL."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = yaml.safe_load((FILES / "rules.yaml").read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    config = yaml.safe_load((ROOT / "docker" / "prometheus.yaml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={url}"], stdout=log, stderr=log)
    try:
        traffic(server, f"http://{url}")
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait(20)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def traffic(server, url: str) -> None:
    """Requests until Prometheus has seen their counters rise and has evaluated the rules."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        body = {"text": "the key of", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        assert server.client.post("/generate", json=body).status_code == 200
        try:
            if query(url, "fathom:goodput:rate_5m > 0") and query(url, "fathom:ttft_slow:ratio_6h"):
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError("Prometheus saw no traffic")


def query(url: str, expression: str) -> list:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=20).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def panels() -> dict[str, str]:
    board = json.loads((FILES / "dashboard.json").read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel["targets"]
        if "fathom:draft_" not in target["expr"]  # the shared server has no draft
    }


def test_every_panel_has_data(prometheus):
    empty = [
        title
        for title, expression in panels().items()
        if not query(prometheus, expression.replace("$__rate_interval", "1m").replace("$job", "fathom"))
    ]
    assert empty == []


def test_every_recorded_series_exists(prometheus):
    groups = yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
    recorded = [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]
    assert [name for name in recorded if not query(prometheus, name)] == []


def test_no_rule_fails_and_no_alert_fires(prometheus):
    groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=20).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["state"] for rule in rules if rule["type"] == "alerting"} == {"inactive"}
