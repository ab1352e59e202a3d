"""The page ``/fathom``: what this server does now, and the staircase of each of its last generations.

One HTML document, made anew for every view: no script, nothing fetched from elsewhere, readable in light and dark.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import starmap
from typing import Any

from fathom.runtime import config
from fathom.server.page import picture
from fathom.server.page.html import Html, el, join
from fathom.server.page.picture import Staircase
from fathom.server.page.style import STYLE
from fathom.server.requests.admission import Gate
from fathom.server.requests.context import Face
from fathom.server.telemetry.history import SECONDS, Finished, History, quantile, ratio
from fathom.server.units import percent, seconds, size
from fathom.server.version import versions

REFRESH_SECONDS = 3
SHOWN = 12
"""Generations with a picture."""
PATIENCE_SECONDS = 0.7
"""How long a view waits for the scheduler, which answers between two steps."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Live:
    """What the page needs; one per server."""

    def __init__(self, face: Face, gate: Gate, model: str, internal_states: Callable[[], Any]):
        self._face, self._gate, self._model = face, gate, model
        self._internal_states = internal_states
        self._asking: asyncio.Task[Any] | None = None
        self._states: list[dict[str, Any]] = []
        self._seen: float | None = None

    async def page(self, refresh: int = REFRESH_SECONDS) -> Html:
        """The document; ``refresh`` seconds until the browser asks again, 0 for never."""
        await self._ask()
        now = time.perf_counter()
        age = None if self._seen is None else now - self._seen
        return document(self._face, self._gate, self._model, self._states, age, now, max(refresh, 0))

    async def _ask(self) -> None:
        """Ask the scheduler processes; a busy one answers a later view. Never more than one question at a time."""
        asking = self._asking = self._asking or asyncio.ensure_future(self._internal_states())
        done, _ = await asyncio.wait({asking}, timeout=PATIENCE_SECONDS)
        if done:
            if self._asking is asking:  # no other view was first
                self._asking = None
            self._states = [state.get("fathom") or {} for state in asking.result()]
            self._seen = time.perf_counter()


def document(
    face: Face,
    gate: Gate,
    model: str,
    states: list[dict[str, Any]],
    age: float | None,
    now: float,
    refresh: int = REFRESH_SECONDS,
) -> Html:
    """The page from what it shows.

    Args:
        states: one per scheduler process, as in ``/fathom/info``.
        age: seconds since they were told; None for never.
        now: ``time.perf_counter()`` seconds.
    """
    history = face.history
    body = join(
        _header(model, face, refresh),
        _tiles(history, gate, now),
        _by_preset(history),
        *(_engine(number, state, age) for number, state in enumerate(states)),
        None
        if states
        else el("p", "The scheduler has not answered yet: it does between two of its steps.", class_="soft"),
        _generations(history, face.limits, now),
    )
    head = join(
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="refresh", content=refresh) if refresh else None,
        el("title", f"Fathom: {model}"),
        el("style", Html(STYLE)),
    )
    return Html("<!doctype html>" + el("html", el("head", head), el("body", body), lang="en"))


def _header(model: str, face: Face, refresh: int) -> Html:
    links = [("/fathom/info", "info"), ("/metrics", "metrics"), ("/docs", "API")]
    pause = ("?refresh=0", f"pause (every {refresh} s)") if refresh else ("?", "go on refreshing")
    nav = el("nav", *(join(el("a", name, href=href), " ") for href, name in [*links, pause]))
    without = ", ".join(face.choice.left_out)
    policy = face.default.preset + (f" without {without}" if without else "")
    about = f"{model} · default policy {policy} · Fathom {versions()['fathom']}"
    return el("header", el("h1", "Fathom"), el("span", about, class_="soft"), nav)


def _tiles(history: History, gate: Gate, now: float) -> Html:
    recent = [g for g in history.finished if g.end > now - SECONDS]
    by_second = history.tokens_by_second(now)
    ttfts = [g.ttft for g in history.finished if g.ttft is not None]
    tpots = [g.tpot for g in history.finished if g.tpot is not None]
    last10 = sum(by_second[-10:]) / 10
    tiles = [
        ("requests inside", str(gate.inside), f"{len(recent)} generations ended in {SECONDS} s"),
        ("output tokens/s, last 10 s", f"{last10:,.1f}", _sparkline(by_second)),
        (
            "prompt tokens/s, of those that ended",
            f"{sum(g.prompt for g in recent) / SECONDS:,.0f}",
            f"last {SECONDS} s",
        ),
        ("TTFT, median", seconds(quantile(ttfts, 0.5)), _tail(ttfts)),
        ("TPOT, median", seconds(quantile(tpots, 0.5)), _tail(tpots)),
    ]
    return el("div", *(el("div", el("span", n, class_="soft"), el("b", v), el("small", d), class_="tile")
                       for n, v, d in tiles), class_="tiles")  # fmt: skip


def _tail(values: list[float]) -> str:
    shown = (f"p{share * 100:.0f} {seconds(quantile(values, share))}" for share in (0.95, 0.99))
    return ", ".join(shown) + f" of the last {len(values)}"


def _sparkline(counts: list[int], width: int = 150, height: int = 26) -> Html:
    """Tokens of each second as bars."""
    top, step = max(*counts, 1), width / len(counts)
    bars = []
    for place, count in enumerate(counts):
        if count:
            tall = max(height * count / top, 1)
            shape = {"x": f"{place * step:.2f}", "y": f"{height - tall:.2f}"}
            bars.append(el("rect", **shape, width=f"{step * 0.8:.2f}", height=f"{tall:.2f}", class_="kept"))
    about = f"output tokens of each of the last {len(counts)} seconds, at most {max(counts)}"
    ground = el("rect", x=0, y=height - 1, width=width, height=1, class_="whole")
    return el("svg", el("title", about), ground, *bars, viewBox=f"0 0 {width} {height}", width=width, height=height,
              role="img", aria_label=about)  # fmt: skip


def _by_preset(history: History) -> Html | None:
    if not history.finished:
        return None
    names = sorted({g.preset for g in history.finished})
    head = ("preset", "ended", "TTFT p50", "p95", "TPOT p50", "p95", "tokens computed", "KV held", "fast steps",
            "drafts that stood")  # fmt: skip
    rows = [el("tr", *(el("td", cell) for cell in _preset_row(name, history))) for name in names]
    table = el(
        "table", el("thead", el("tr", *(el("th", name, scope="col") for name in head))), el("tbody", *rows)
    )
    title = el("h2", f"By preset, over the last {len(history.finished)} generations")
    return join(title, el("div", table, class_="scroll"))


def _preset_row(preset: str, history: History) -> list[str]:
    mine = [g for g in history.finished if g.preset == preset]
    ttfts = [g.ttft for g in mine if g.ttft is not None]
    tpots = [g.tpot for g in mine if g.tpot is not None]
    reports = [g.report for g in mine if g.report]

    def share(part: str, whole: str) -> str:
        return percent(ratio((r.get(part, 0) for r in reports), (r.get(whole, 0) for r in reports)))

    times = [seconds(quantile(values, s)) for values in (ttfts, tpots) for s in (0.5, 0.95)]
    steps = [share("kept_tokens", "prompt_tokens"), share("kv_bytes", "kv_bytes_dense")]
    steps += [share("fast_steps", "decode_steps"), share("accepted_tokens", "draft_tokens")]
    return [preset, str(len(mine)), *times, *steps]


def _engine(number: int, state: Mapping[str, Any], age: float | None) -> Html:
    title = f"Engine {number}" + (f", as of {age:.0f} s ago: it is in a long step" if age and age > 1 else "")
    pool = state.get("kv_pool") or {}
    pages, steps = pool.get("depth_pages"), state.get("steps") or {}
    decode, fast = steps.get("decode_steps", 0), steps.get("fast_steps", 0)
    drafted, stood = steps.get("draft_tokens", 0), steps.get("accepted_tokens", 0)
    facts = [f"{steps.get('requests', 0):,} requests since its start"]
    facts += [
        f"{decode:,} decode steps, {percent(fast / decode)} of them fast" if decode else "no decode step yet"
    ]
    facts += [f"{drafted:,} tokens drafted, {percent(stood / drafted)} stood"] if drafted else []
    if buffers := (state.get("slow_fast") or {}).get("buffers"):
        facts.append(f"{state['slow_fast']['buffers_in_use']} of {buffers} compact buffers in use")
    body = _depth_pages(pages, pool) if pages else _tokens(pool)
    return join(el("h2", title), el("p", _facts(facts), class_="soft"), body)


def _depth_pages(pages: Mapping[str, Any], pool: Mapping[str, Any]) -> Html:
    total, span = max(pages["total"], 1), pages["span"]
    parts = [("held", pages["held"]), ("cached", pages["cached"])]
    about = f"{pages['held']:,} held, {pages['cached']:,} cached"
    rows = [el("tr", el("td", "all spans"), el("td", _bar(parts, total)), el("td", about))]
    for number, used in reversed(list(enumerate(pages["per_span"]))):
        first = number * span + 1
        layers = f"layers {first}-{first + span - 1}" if span > 1 else f"layer {first}"
        bar = _bar([("used", used)], total)
        rows.append(
            el("tr", el("td", layers), el("td", bar), el("td", f"{used:,} in use, {percent(used / total)}"))
        )
    pool_of = f"{pages['total']:,} depth pages of {pool.get('page_size', 1)} x {span} layers, "
    pool_of += f"{size(pages['page_bytes'])} each:"
    keys = (
        ("held", "held by requests"),
        ("cached", "only in the prefix cache"),
        ("computed", "both, per span"),
    )
    key = el("p", pool_of, *starmap(_key, keys), class_="soft")
    return join(el("table", el("tbody", *rows), class_="pages"), key)


def _tokens(pool: Mapping[str, Any]) -> Html:
    return el(
        "p",
        f"{pool.get('held', 0):,} held and {pool.get('cached', 0):,} cached of {pool.get('tokens', 0):,} tokens",
    )


def _bar(parts: list[tuple[str, int]], total: int) -> Html:
    about = ", ".join(f"{count:,} {name}" for name, count in parts) + f" of {total:,}"
    pieces = (el("i", class_=f"i-{name}", style=f"width:{100 * count / total:.2f}%") for name, count in parts)
    return el("div", *pieces, class_="bar", role="img", aria_label=about)


def _key(kind: str, meaning: str) -> Html:
    """What a colour of a bar means, on one line."""
    return join(" ", el("span", el("span", class_=f"key k-{kind}"), meaning, class_="whole-line"))


def _facts(facts: list[str]) -> Html:
    """Facts in a row, none of which is broken at the end of a line."""
    last = len(facts) - 1
    spans = (
        el("span", fact + (" ·" if n < last else ""), class_="whole-line") for n, fact in enumerate(facts)
    )
    return Html(" ".join(spans))


def _generations(history: History, limits: config.Limits, now: float) -> Html:
    shown = list(history.finished)[-SHOWN:][::-1]
    title = el("h2", f"The last {len(shown)} generations" if shown else "No generation has ended yet")
    if not shown:
        return title
    keys = (("whole", "prompt"), ("computed", "computed"), ("kept", "KV kept"))
    cards = el("div", *(_card(generation, limits, now) for generation in shown), class_="cards")
    return join(
        title,
        el(
            "p",
            "One bar per span of layers, the first layers at the bottom:",
            *starmap(_key, keys),
            class_="soft",
        ),
        cards,
    )


def _card(g: Finished, limits: config.Limits, now: float) -> Html:
    report, policy = g.report, g.report.get("policy") or {}
    neutral = config.Policy().to_wire()
    asked = ", ".join(f"{k} {_said(v)}" for k, v in policy.items() if k != "preset" and neutral.get(k) != v)
    stairs = staircase_of(g, limits)
    times = [f"TTFT {seconds(g.ttft)}", f"TPOT {seconds(g.tpot)}"] if g.ttft is not None else [g.outcome]
    facts = [f"{g.prompt:,} prompt, {g.output:,} output tokens", *times]
    if report.get("kv_bytes_dense"):
        facts.append(f"KV {size(report['kv_bytes'])} of {size(report['kv_bytes_dense'])}")
    if report.get("fast_steps"):
        facts.append(f"{report['fast_steps']} of {report['decode_steps']} steps fast")
    if report.get("draft_tokens"):
        facts.append(f"{report['accepted_tokens']} of {report['draft_tokens']} drafts stood")
    return el(
        "article",
        el("p", el("b", g.preset), el("span", f" {g.route} · {now - g.end:.0f} s ago", class_="soft")),
        Html(picture.svg(stairs)) if stairs else None,
        el("p", _facts(facts)),
        el("p", asked, class_="soft policy") if asked else None,
        class_="card",
    )


def _said(value: Any) -> str:
    """A policy's value in words."""
    return " ".join(value) or "nothing" if isinstance(value, tuple) else str(value).lower()


def staircase_of(generation: Finished, limits: config.Limits) -> Staircase | None:
    """The picture of a generation; None where the engine did not report it, or the model is not known yet."""
    if not generation.report or limits.layers is None:
        return None
    pairs = generation.report.get("staircase")
    pairs = pairs or [(generation.prompt, generation.prompt)] * (limits.layers // limits.span)
    computed, kept = (list(column) for column in zip(*pairs, strict=True))
    return Staircase.of_spans(generation.prompt, limits.layers // len(pairs), computed, kept)
