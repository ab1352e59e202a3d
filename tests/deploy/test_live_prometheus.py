"""A real Prometheus scrapes a real server, and its answers are what clients measure themselves.

Every panel of the dashboard and every recorded rule has an answer. Time to first token and time per output token,
read by the queries of docs/metrics.md, agree with what the `openai` client and `sglang.bench_serving` measured.
About 45 s.
"""

import json
import random
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy
import pytest
import yaml
from waiting import wait_until

from fathom.benchmarks.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "chart" / "files"


@pytest.fixture(scope="module")
def server(start_server, tiny_model):
    """One of this file's own: what Prometheus averages must all be from here."""
    return start_server(tiny_model, "--dtype", "float32", "--max-total-tokens", "40000")


@pytest.fixture(scope="module")
def bench_serving():
    """SGLang's bench, which imports while Prometheus sees its first requests."""
    with subprocess.Popen(
        [sys.executable, "-c", BENCH_SERVING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def prometheus(server, prometheus_tools, bench_serving, tmp_path_factory):
    """A Prometheus with our rules that scrapes the server each second; its URL."""
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
    files = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    command = [prometheus_tools["prometheus"], *files]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={url}"], stdout=log, stderr=log)
    try:
        traffic(server, f"http://{url}")
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait(20)


def traffic(server, url: str) -> None:
    """Requests until Prometheus has seen their counters rise and has evaluated the rules."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        body = {"text": "the key of", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        assert server.client.post("/generate", json=body).status_code == 200
        try:
            if query(url, "fathom:goodput:rate_5m > 0") and query(url, "fathom:ttft_slow:ratio_6h"):
                return
        except (httpx.TransportError, ValueError):
            pass  # it is starting: no answer, or one that is no JSON
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
        if "fathom:draft_" not in target["expr"]  # the server has no draft
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


REQUESTS, OUTPUT_TOKENS, AT_ONCE = 40, 32, 2
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AGREEMENT = 0.15
BENCH_SERVING = """
import json, runpy, sys
from fathom.runtime.sglang_host.machine import torchvision_ops
torchvision_ops.declare()
import sglang.benchmark.serving
sys.argv[1:] = json.loads(input())
runpy.run_module("sglang.bench_serving", run_name="__main__")
"""
"""`python -m sglang.bench_serving`, which without a GPU imports only after torchvision's operators are declared.
It is told its flags when that is done."""


def documented(quantile: str, series: str, route: str) -> str:
    """The query of docs/metrics.md for a quantile of a series, for one route."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    (found,) = (
        text
        for text in re.findall(r"```promql\n(.*?)\n```", page, re.S)
        if text.startswith(f"histogram_quantile({quantile}, ") and f"{series}_bucket" in text
    )
    return found.replace('{job="fathom"}', f'{{job="fathom", route="{route}"}}')


def value(url: str, expression: str) -> float:
    (sample,) = query(url, expression)
    return float(sample["value"][1])


def wait_for(url: str, route: str, answers: int) -> None:
    """Until a route's answers are scraped. The first is none of a rate, which begins at a series' first sample."""
    expression = f'fathom:time_to_first_token_seconds_count{{route="{route}"}} == {answers}'
    wait_until(lambda: query(url, expression), 20)


def as_prometheus_has_it(url: str, route: str) -> dict[str, float]:
    """Mean, median and 95th percentile of both times, in seconds, over all but the first answer of a route."""
    wait_for(url, route, REQUESTS + 1)
    times = {"ttft": "fathom:time_to_first_token_seconds", "tpot": "fathom:time_per_output_token_seconds"}
    found = {}
    for name, series in times.items():
        rates = (f'sum(rate({series}_{part}{{route="{route}"}}[5m]))' for part in ("sum", "count"))
        found[f"mean {name}"] = value(url, " / ".join(rates))
        for quantile in ("0.5", "0.95"):
            found[f"{quantile} {name}"] = value(url, documented(quantile, series, route))
    return found


def assert_agreement(prometheus: dict[str, float], client: dict[str, float]) -> None:
    apart = {name: round(prometheus[name] / client[name] - 1, 4) for name in client}
    print("apart:", apart)
    assert all(abs(share) < AGREEMENT for share in apart.values()), (apart, prometheus, client)


def summary(name: str, seconds: list[float]) -> dict[str, float]:
    quantiles = {f"{q} {name}": float(numpy.quantile(seconds, float(q))) for q in ("0.5", "0.95")}
    return {f"mean {name}": statistics.fmean(seconds), **quantiles}


@pytest.mark.alone
def test_prometheus_agrees_with_the_openai_client(server, prometheus):
    client = server.openai
    model = client.models.list().data[0].id
    draw = random.Random(3)

    def ask(text: str) -> tuple[float, float]:
        begin = time.perf_counter()
        events = []
        for chunk in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            max_tokens=OUTPUT_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ):
            events += [time.perf_counter()] if chunk.choices else []
            usage = chunk.usage
        assert usage.completion_tokens == OUTPUT_TOKENS
        return events[0] - begin, (events[-1] - events[0]) / (OUTPUT_TOKENS - 1)

    ask("key")  # a client's first request takes longer, too
    wait_for(prometheus, CHAT, 1)
    lengths = [draw.randrange(1500, 3500) for _ in range(REQUESTS)]
    words = (draw.choices(["key", "red", "box", "job", "code"], k=length) for length in lengths)
    texts = [f"{draw.random()} {' '.join(text)}" for text in words]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        measured = list(pool.map(ask, texts))
    ttft, tpot = (list(column) for column in zip(*measured, strict=True))
    assert_agreement(
        as_prometheus_has_it(prometheus, CHAT), {**summary("ttft", ttft), **summary("tpot", tpot)}
    )


@pytest.mark.alone
def test_prometheus_agrees_with_bench_serving(server, prometheus, bench_serving, tiny_model, tmp_path):
    model = server.openai.models.list().data[0].id
    first = {"model": model, "prompt": "key", "max_tokens": 4, "ignore_eos": True}
    assert server.client.post(COMPLETIONS, json=first).status_code == 200
    wait_for(prometheus, COMPLETIONS, 1)
    result = tmp_path / "result.jsonl"
    options = {
        "backend": "sglang-oai",
        "base-url": server.url,
        "model": model,
        "tokenizer": tiny_model,
        "dataset-name": "random-ids",
        "random-input-len": 3000,
        "random-output-len": OUTPUT_TOKENS,
        "random-range-ratio": 0.5,
        "num-prompts": REQUESTS,
        "max-concurrency": AT_ONCE,
        "warmup-requests": 0,
        "output-file": result,
    }
    flags = [str(part) for name, given in options.items() for part in (f"--{name}", given)]
    _, errors = bench_serving.communicate(json.dumps([*flags, "--disable-tqdm"]) + "\n", timeout=240)
    assert bench_serving.returncode == 0, errors[-3000:]
    report = json.loads(result.read_text())
    assert report["completed"] == REQUESTS
    client = {
        f"{label} {name}": report[f"{key}_{name}_ms"] / 1000
        for name in ("ttft", "tpot")
        for label, key in (("mean", "mean"), ("0.5", "median"), ("0.95", "p95"))
    }
    assert_agreement(as_prometheus_has_it(prometheus, COMPLETIONS), client)
