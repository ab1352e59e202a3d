"""/metrics keeps the names' colons for every scraper."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, make_asgi_app

from fathom.server.telemetry.metrics import Scrapes

# What Prometheus 2 and 3 ask for, and a browser.
ACCEPT = [
    b"application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    b"text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    b"application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5",
    b"*/*",
    None,
]


def scrape(app, accept, path="/metrics"):
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"here"), *([(b"accept", accept)] if accept else [])]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    return dict(sent[0]["headers"]), sent[1]["body"].decode()


@pytest.mark.parametrize("accept", ACCEPT)
def test_names_keep_their_colon(accept):
    registry = CollectorRegistry()
    Counter("fathom:things_total", "Things.", registry=registry).inc()
    app = make_asgi_app(registry)
    headers, body = scrape(Scrapes(app, lambda: None), accept)
    assert "\nfathom:things_total 1.0\n" in body
    kind = {name.lower(): value for name, value in headers.items()}[b"content-type"]
    assert kind.startswith(b"text/plain; version=0.0.4")


def test_without_it_an_older_prometheus_gets_other_names():
    """When this fails, prometheus_client has mended it, and the middleware can go."""
    registry = CollectorRegistry()
    Counter("fathom:things_total", "Things.", registry=registry).inc()
    assert "fathom_things_total" in scrape(make_asgi_app(registry), ACCEPT[0])[1]


def test_other_routes_are_left_alone():
    seen = []

    async def app(scope, receive, send):
        seen.append(dict(scope["headers"])[b"accept"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    looks = []
    scrape(Scrapes(app, lambda: looks.append(1)), b"text/html", "/other")
    assert seen == [b"text/html"] and not looks
    scrape(Scrapes(app, lambda: looks.append(1)), b"text/html")
    assert seen[1:] == [Scrapes.ACCEPT[1]] and looks == [1]
