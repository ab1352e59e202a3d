"""Labels that clients could make up: of requests as many as routes and methods, of priorities a few."""

from collections import defaultdict
from http import HTTPMethod
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.server.telemetry.labels import OTHER, endpoint_of

torchvision_ops.declare()

from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402

from fathom.runtime.sglang_host.scheduling import priorities  # noqa: E402
from fathom.runtime.sglang_host.scheduling.priorities import FirstValues  # noqa: E402
from fathom.server.tokenizer_manager import MOST_VALUES, FathomTokenizerManager  # noqa: E402

APP = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@APP.get("/things/{name}")
@APP.post("/plain")
async def answer():
    return "here"


def labels_of(method, path):
    """What SGLang's middleware counts a request under."""
    request = Request({"type": "http", "method": method, "path": path, "headers": [], "app": APP})
    endpoint, handled = endpoint_of(request)
    return endpoint, request.method, handled


@given(
    st.text(max_size=12),
    st.one_of(st.sampled_from(["/", "/things/", "/plain"]), st.text(max_size=9)),
    st.text(),
)
def test_labels_are_those_of_routes_and_methods(method, start, rest):
    endpoint, method, handled = labels_of(method, start + rest)
    assert endpoint in {"/things/{name}", "/plain", OTHER}
    assert method in {*HTTPMethod.__members__, OTHER}
    assert handled <= (endpoint != OTHER)


@pytest.mark.parametrize(
    ("asked", "counted"),
    [
        (("GET", "/things/a"), ("/things/{name}", "GET", True)),
        (("POST", "/plain"), ("/plain", "POST", True)),
        (("GET", "/plain"), ("/plain", "GET", False)),
        (("DELETE", "/things/a"), ("/things/{name}", "DELETE", False)),
        (("GET", "/plain/2"), (OTHER, "GET", False)),
        (("FETCH", "/plain"), ("/plain", OTHER, False)),
    ],
)
def test_a_request_is_counted_under_its_route(asked, counted):
    assert labels_of(*asked) == counted


def test_clients_make_few_series_by_their_priorities(monkeypatch):
    manager, seen = FathomTokenizerManager.__new__(FathomTokenizerManager), []
    manager._priorities, manager.request_metrics = priorities.PriorityLabels(), None
    monkeypatch.setattr(TokenizerManager, "collect_metrics", lambda _, s, *__: seen.append(s.obj.priority))
    for priority in (*range(100), 7, 70):
        state = SimpleNamespace(obj=SimpleNamespace(priority=priority, log_metrics=True))
        manager.collect_metrics(state, None, 0)
        assert state.obj.priority == priority
    assert seen == [*range(16)] + ["other"] * 84 + [7, "other"]


def test_queues_have_few_series_by_priority(monkeypatch):
    logged, collector = [], priorities.FathomCollector.__new__(priorities.FathomCollector)
    monkeypatch.setattr(
        priorities.SchedulerMetricsCollector, "_log_gauge_queue_count", lambda _, __, d: logged.append(d)
    )
    collector.priorities, count = priorities.PriorityLabels(), priorities.QueueCount
    met = dict.fromkeys(range(64), 1)
    for data in (count(5), count(64, met), count(9, {None: 2, 3: 3, 99: 4}), count(0, {})):
        collector._log_gauge_queue_count(None, data)
    folded = count(64, dict.fromkeys(range(16), 1) | {"other": 48})
    assert logged == [count(5), folded, count(9, {3: 3, "other": 6}), count(0, {})]


def test_clients_make_up_so_many_values_of_a_label(monkeypatch):
    """Of one that the operator lets them fill in."""
    manager, told = FathomTokenizerManager.__new__(FathomTokenizerManager), []
    manager.request_metrics = None
    manager._label_values = defaultdict(lambda: FirstValues(MOST_VALUES))
    monkeypatch.setattr(TokenizerManager, "collect_metrics", lambda _, state, *rest: told.append(state.obj))
    for number in [*range(2 * MOST_VALUES), 0]:
        request = SimpleNamespace(custom_labels={"tenant": f"t{number}", "team": "a"}, log_metrics=True)
        manager.collect_metrics(SimpleNamespace(obj=request), None, 0)
    tenants = [request.custom_labels["tenant"] for request in told]
    assert tenants[:MOST_VALUES] == [f"t{number}" for number in range(MOST_VALUES)]
    assert {*tenants[MOST_VALUES:-1]} == {"other"} and tenants[-1] == "t0"
    assert {request.custom_labels["team"] for request in told} == {"a"}
