"""Rules, dashboard and docs ask only for series, labels and buckets that exist; the alerts fire as meant."""

import ast
import importlib.util
import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from fathom.server.telemetry.metrics import LABELS, TPOT_BUCKETS, TTFT_BUCKETS

promql = pytest.importorskip("promql_parser", reason="needs promql-parser: run `make test`")

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "chart" / "files"
RULES = yaml.safe_load((FILES / "rules.yaml").read_text())
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
ADAPTER = yaml.safe_load((FILES / "adapter.yaml").read_text())
METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text()

SUFFIXES = {
    "Histogram": ("_bucket", "_count", "_sum"),
    "Counter": ("_total",),
    "Gauge": ("",),
    "Summary": ("_count", "_sum"),
}
TARGET_LABELS = {"job", "instance", "namespace", "pod"}


def calls(paths) -> list[ast.Call]:
    return [n for path in paths for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]


def declared(paths) -> dict[str, str]:
    """Metric names that calls like ``Counter("name", ...)`` declare, with the kind of the metric."""
    found = {}
    for call in calls(paths):
        words = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "name")]
        names = [w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)]
        kind = getattr(call.func, "id", getattr(call.func, "attr", ""))
        for name in names:
            if re.fullmatch(r"(fathom|sglang):\w+", name):
                found[name] = next((k for k in SUFFIXES if k.lower() in kind.lower()), "Gauge")
    return found


OWN = declared(sorted([*(ROOT / "server").rglob("*.py"), *(ROOT / "runtime" / "sglang_host").rglob("*.py")]))
SGLANG = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
STOCK = declared([*(SGLANG / "observability").glob("*.py"), SGLANG / "utils" / "common.py"])
EXPORTED = {
    name.removesuffix("_total") + suffix if kind == "Counter" else name + suffix
    for name, kind in {**STOCK, **OWN}.items()
    for suffix in SUFFIXES[kind]
}
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}


def as_sent(expression: str) -> str:
    """A query as Prometheus gets it: Grafana's variables and the adapter's templates filled in."""
    for variable, value in (
        ("$__rate_interval", "5m"),
        ("$job", "fathom"),
        ("<<.LabelMatchers>>", 'pod="a"'),
    ):
        expression = expression.replace(variable, value)
    return expression.replace("<<.GroupBy>>", "pod")


QUERIES = {
    **{
        f"{group['name']}: {rule.get('record') or rule.get('alert')}": str(rule["expr"])
        for group in RULES["groups"]
        for rule in group["rules"]
    },
    **{
        f"panel {panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    },
    **{f"page {i}": text for i, text in enumerate(re.findall(r"```promql\n(.*?)```", METRICS_PAGE, re.S))},
    **{rule["name"]["as"]: rule["metricsQuery"] for rule in ADAPTER["rules"]["custom"]},
}


def selectors(node) -> list:
    """Every vector selector below a node of a parsed query."""
    if isinstance(node, promql.VectorSelector):
        return [node]
    if isinstance(node, promql.MatrixSelector):
        return selectors(node.vector_selector)
    parts = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")]
    parts += list(getattr(node, "args", None) or [])
    return [found for part in parts if part is not None for found in selectors(part)]


def matchers(selector) -> dict[str, str]:
    return {matcher.name: matcher.value for matcher in selector.matchers.matchers}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_what_the_server_exports(query):
    found = selectors(promql.parse(as_sent(QUERIES[query])))
    assert found
    for selector in found:
        assert selector.name in EXPORTED | RECORDED | {"up"}, f"{selector.name} is not exported"
        labels = matchers(selector)
        if selector.name.startswith("fathom:") and selector.name not in RECORDED:
            assert set(labels) <= {*LABELS, "outcome", "le", "span", "state", "model"} | TARGET_LABELS
        if "le" in labels:
            assert float(labels["le"]) in TTFT_BUCKETS and labels["le"] == str(float(labels["le"]))


BY_PRIORITY = {"sglang:num_running_reqs", "sglang:num_queue_reqs"}
"""With priority scheduling SGLang exports their sum, with an empty label, beside one series per priority."""


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_counts_no_request_under_its_priority_again(query):
    for selector in selectors(promql.parse(as_sent(QUERIES[query]))):
        assert selector.name not in BY_PRIORITY or matchers(selector).get("priority") == ""


def test_the_check_of_names_can_fail():
    (selector,) = selectors(promql.parse("rate(fathom:no_such_series_total[5m])"))
    assert selector.name not in EXPORTED
    assert {"fathom:time_to_first_token_seconds_bucket", "sglang:num_queue_reqs"} <= EXPORTED


def test_the_page_lists_exactly_what_fathom_exports():
    table = METRICS_PAGE.split("## What Fathom exports")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(fathom:\w+)`", table, re.M))
    assert set(OWN) - listed == set(), "give the new series a row in docs/metrics.md"
    assert listed - set(OWN) == set(), "docs/metrics.md has a row for a series that does not exist"
    assert set(re.findall(r"`(sglang:\w+)`", METRICS_PAGE)) <= EXPORTED


def test_the_page_lists_every_rule():
    alerts = {rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
    assert set(re.findall(r"`(Fathom\w+)`", METRICS_PAGE)) == alerts
    for name in RECORDED:
        series, _, window = name.rpartition("_")
        assert series.split(":")[1] in METRICS_PAGE and window in METRICS_PAGE


def test_alerts_point_to_a_section_that_exists():
    for group in RULES["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                page, _, anchor = rule["annotations"]["runbook"].partition("#")
                headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.M)
                assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize(("buckets", "low", "high"), [(TTFT_BUCKETS, 0.01, 300), (TPOT_BUCKETS, 0.001, 10)])
def test_buckets_are_narrow_enough_for_a_quantile_within_15_percent(buckets, low, high):
    assert (buckets[0], buckets[-1]) == (low, high)
    ratios = [above / below for below, above in itertools.pairwise(buckets)]
    assert min(ratios) > 1 and max(ratios) < 1.155


def test_panels_have_their_own_place_and_number():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        assert panel["description"] and panel["targets"]
        taken |= cells


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", FILES / "rules.yaml"),
        ("test", "rules", ROOT / "tests" / "deploy" / "rules_test.yaml"),
        ("check", "config", "--syntax-only", ROOT / "docker" / "prometheus.yaml"),
        ("check", "config", ROOT / "docker" / "prometheus.local.yaml"),
    ],
    ids=["rules are valid", "alerts fire as meant", "compose's configuration", "make watch"],
)
def test_promtool(prometheus_tools, arguments):
    command = [prometheus_tools["promtool"], *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_panel_of_memory_pressure_keeps_what_happened_between_two_scrapes(prometheus_tools, tmp_path):
    """SGLang's gauge is 0 again a step later; its counter appears with the first request that is put back."""
    (panel,) = (panel for panel in DASHBOARD["panels"] if panel["title"] == "Memory pressure")
    labels = 'job="fathom", instance="{}"'
    series = {
        f"up{{{labels.format('a')}}}": "1x20",
        f"up{{{labels.format('b')}}}": "1x20",
        f"sglang:num_retracted_requests_total{{{labels.format('a')}, tp_rank='0'}}": "_x9 3x10",
    }
    expected = [{"labels": f'{{instance="{name}"}}', "value": value} for name, value in (("a", 3), ("b", 0))]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": as_sent(panel["targets"][0]["expr"]), "eval_time": "15m", "exp_samples": expected}
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    command = [prometheus_tools["promtool"], "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
