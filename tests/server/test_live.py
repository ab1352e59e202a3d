"""The live page: what it shows, that all text in it is text, and that a busy engine does not hold it up."""

import asyncio
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.config import Limits, Policy
from fathom.server.page import live
from fathom.server.page.html import el, join
from fathom.server.requests.admission import Gate
from fathom.server.requests.context import Face
from fathom.server.telemetry.history import REMEMBERED, SECONDS, Finished, History, quantile, ratio

EVIL = "<script>alert('x')</script>\"&"
REPORT = {
    "policy": Policy(
        "balanced", prefill_keep_rate=0.2, prefill_protect=("user", "tools"), depth_cutoff=3
    ).to_wire(),
    "prompt_tokens": 1000,
    "kept_tokens": 600,
    "kv_bytes": 2048,
    "kv_bytes_dense": 8192,
    "decode_steps": 10,
    "fast_steps": 7,
    "draft_tokens": 20,
    "accepted_tokens": 5,
    "staircase": [(1000, 500), (1000, 500), (400, 400), (2, 2)],
}
STATE = {
    "kv_pool": {
        "page_size": 16,
        "depth_pages": {
            "total": 200,
            "free": 90,
            "cached": 60,
            "held": 50,
            "per_span": [80, 20, 10, 0],
            "span": 1,
            "page_bytes": 3072,
        },
    },
    "steps": {
        "requests": 31,
        "decode_steps": 400,
        "fast_steps": 100,
        "draft_tokens": 80,
        "accepted_tokens": 60,
    },
    "slow_fast": {"buffers": 16, "buffers_in_use": 3},
}
DENSE = Finished(
    95.0, "/generate", "exact", "length", 40, 9, 0.5, 0.02, 0.7, {"policy": {}, "staircase": None}
)


def face_of(*generations, **changes):
    face = Face(limits=Limits(4, 1, {}, 2), **changes)
    for generation in generations:
        face.history.end(generation)
    return face


def page_of(face, states=(STATE,), age=0.0, now=100.0, model="demo", **more):
    return live.document(face, Gate(in_flight=7), model, list(states), age, now, **more)


def parse(page):
    """The document as XML: every element must be closed, every character escaped."""
    text = re.sub(r"<meta ([^>]*)>", r"<meta \1/>", page.removeprefix("<!doctype html>"))
    return ElementTree.fromstring(text)


def text_of(page):
    return text_of_element(parse(page).find("body"))


def text_of_element(element):
    return " ".join("".join(element.itertext()).split())


def test_what_it_shows():
    done = Finished(90.0, "/v1/chat/completions", "balanced", "stop", 1000, 11, 2.5, 0.0043, 3.0, REPORT)
    face = face_of(done, DENSE)
    for second, tokens in ((97, 30), (98, 12), (99, 8), (100, 99)):
        face.history.put_out(second + 0.5, tokens)
    page = page_of(face, now=100.5)
    text = text_of(page)
    for words in (
        "requests inside7",
        "2 generations ended in 60 s",
        "last 10 s5.0",  # 50 tokens; those of the current second do not count yet
        "17last 60 s",  # 1,040 prompt tokens
        "TTFT, median500 ms",
        "p95 2.50 s",
        "31 requests since its start · 400 decode steps, 25 % of them fast · 80 tokens drafted, 75 % stood",
        "3 of 16 compact buffers in use",
        "50 held, 60 cached",
        "200 depth pages of 16 x 1 layers, 3.00 KiB each: held by requests only in the prefix cache both, per span",
        "layer 180 in use, 40 %",
        "1,000 prompt, 11 output tokens · TTFT 2.50 s · TPOT 4.3 ms · KV 2.00 KiB of 8.00 KiB",
        "7 of 10 steps fast · 5 of 20 drafts stood",
        "prefill_keep_rate 0.2, prefill_protect tools user, depth_cutoff 3",
        "40 prompt, 9 output tokens · TTFT 500 ms · TPOT 20 ms",  # it ended at its length, with times
    ):
        assert words in text, (words, text)
    labels = [svg.get("aria-label") for svg in parse(page).iter("svg") if svg.get("class") == "staircase"]
    assert labels[0].startswith("40 prompt tokens; layers 1: 40 computed, 40 kept")
    assert "; layers 1: 1,000 computed, 500 kept; " in labels[1]
    assert labels[1].endswith("layers 3: 400 computed, 400 kept; layers 4: 2 computed, 2 kept")
    rows = [[cell.text for cell in row.iter("td")] for row in parse(page).iter("tr")]
    assert ["balanced", "1", "2.50 s", "2.50 s", "4.3 ms", "4.3 ms", "60 %", "25 %", "70 %", "25 %"] in rows
    links = [a.get("href") for a in parse(page).iter("a")]
    assert links == ["/fathom/info", "/metrics", "/docs", "?refresh=0"]


def test_rates_are_of_the_last_minute_and_quantiles_of_all():
    old, new = (
        Finished(end, "/generate", "exact", "stop", prompt, 9, ttft, 0.02, 3.0)
        for end, prompt, ttft in ((39.0, 6000, 0.1), (41.0, 120, 0.3))
    )
    text = text_of(page_of(face_of(old, new), now=100.0))
    assert "1 generations ended in 60 s" in text and "that ended2last 60 s" in text
    assert "TTFT, median100 ms" in text and "of the last 2" in text


def test_the_last_generations_are_shown_the_newest_first():
    ended = [Finished(float(n), "/generate", "exact", "stop", 1000 + n, 9) for n in range(live.SHOWN + 3)]
    cards = map(text_of_element, parse(page_of(face_of(*ended))).iter("article"))
    prompts = [int(re.search(r"([\d,]+) prompt", text)[1].replace(",", "")) for text in cards]
    assert prompts == [g.prompt for g in reversed(ended)][: live.SHOWN]


def test_spans_of_several_layers_are_named_from_the_top():
    pages = STATE["kv_pool"]["depth_pages"] | {"span": 2, "per_span": [80, 20]}
    state = STATE | {"kv_pool": STATE["kv_pool"] | {"depth_pages": pages}}
    rows = [text_of_element(row) for row in parse(page_of(face_of(), states=[state])).iter("tr")]
    assert [row for row in rows if row.startswith("layers")] == [
        "layers 3-420 in use, 10 %",
        "layers 1-280 in use, 40 %",
    ]


@pytest.mark.parametrize(("age", "said"), [(None, False), (0.4, False), (5.2, True)])
def test_an_engine_in_a_long_step_is_shown_as_it_was(age, said):
    title = next(h2.text for h2 in parse(page_of(face_of(), age=age)).iter("h2"))
    assert title == "Engine 0" + (", as of 5 s ago: it is in a long step" if said else "")


def test_all_text_is_text():
    report = REPORT | {"policy": {"preset": EVIL, "anchors": EVIL}}
    bad = Finished(99.0, EVIL, EVIL, EVIL, 3, 2, None, None, None, report)
    page = page_of(face_of(bad), model=EVIL)
    root = parse(page)
    assert not list(root.iter("script")) and "<script" not in page
    assert root.find("head/title").text == f"Fathom: {EVIL}"
    assert text_of(page).count("<script>alert('x')</script>") >= 4
    assert not any(name.startswith("on") for item in root.iter() for name in item.attrib)


@given(st.text(max_size=20), st.text(alphabet="<>&\"' =/a", max_size=20))
def test_elements_escape_any_text(text, value):
    clean = "".join(c for c in text if c.isprintable())
    root = ElementTree.fromstring(el("p", clean, el("b", clean), None, class_=value, aria_label=clean))
    assert (root.text or "") == clean and (root.find("b").text or "") == clean
    assert root.get("class") == value and root.get("aria-label") == clean
    assert join("a<", el("i", "b")) == "a&lt;<i>b</i>"


def test_nothing_is_fetched_from_elsewhere_and_nothing_runs():
    page = page_of(face_of(DENSE))
    assert not re.search(r"(src|href)=\"(https?:)?//|url\(|@import|<script|<link", page)
    assert "default-src 'none'" in live.HEADERS["Content-Security-Policy"]


def test_before_the_first_generation_and_without_an_answer_of_the_engine():
    text = text_of(page_of(face_of(), states=(), age=None))
    assert "No generation has ended yet" in text and "The scheduler has not answered yet" in text
    assert "TTFT, median–" in text
    text = text_of(page_of(face_of(), states=[{}]))
    assert "Engine 0" in text and "0 held and 0 cached of 0 tokens" in text


def test_aborted_generations_have_no_times():
    gone = Finished(99.0, "/generate", "exact", "abort", 12, 0)
    text = text_of(page_of(face_of(gone)))
    assert "12 prompt, 0 output tokens · abort" in text and "exact1–––––––" in text.replace(" ", "")


def test_refreshing_can_be_paused():
    pause, again = page_of(face_of()), page_of(face_of(), refresh=0)
    assert '<meta http-equiv="refresh" content="3">' in pause and "pause (every 3 s)" in pause
    assert "http-equiv" not in again and "go on refreshing" in again


def test_the_default_policy_and_what_it_leaves_out():
    face = Face(asked={"preset": "turbo"})
    face.learn(Limits(4, 1, {"SPEED": "sliding windows"}, 2))
    assert "default policy turbo without depth_cutoff" in text_of(page_of(face))


def test_a_busy_engine_does_not_hold_the_page_up(monkeypatch):
    """The view shows what is known, and the one question to the engine stays open."""
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.02)
    asked = []

    async def run():
        answer = asyncio.get_running_loop().create_future()

        async def internal_states():
            asked.append(1)
            return await asyncio.shield(answer)

        page = live.Live(face_of(), Gate(), "demo", internal_states)
        first = await page.page()
        assert "has not answered yet" in first
        await page.page()
        assert asked == [1]
        answer.set_result([{"fathom": STATE}])
        assert "31 requests since its start" in await page.page()
        assert "31 requests since its start" in await page.page()
        assert asked == [1, 1]

    asyncio.run(run())


def test_views_at_the_same_time_share_a_question():
    async def run():
        asked = []

        async def internal_states():
            asked.append(1)
            await asyncio.sleep(0.05)
            return [{"fathom": STATE}]

        page = live.Live(face_of(), Gate(), "demo", internal_states)

        async def two():
            return [await page.page(), await page.page()]

        views = await asyncio.gather(*(page.page() for _ in range(4)))
        assert all("31 requests since its start" in view for view in views) and asked == [1]
        await asyncio.gather(two(), two())  # the second of one begins before the first of the other ends
        assert asked == [1, 1, 1]

    asyncio.run(run())


def test_what_was_told_is_as_old_as_the_answer(monkeypatch):
    """By a clock of the test's own; the second view asks an engine that is in a long step."""
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.02)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    async def run():
        never = asyncio.get_running_loop().create_future()
        answers = iter([asyncio.sleep(0, [{"fathom": STATE}]), never])

        async def internal_states():
            return await next(answers)

        page = live.Live(face_of(), Gate(), "demo", internal_states)
        assert "as of" not in await page.page()
        clock.now += 7
        view = await page.page(-1)  # less than never is never
        assert "Engine 0, as of 7 s ago" in view and "http-equiv" not in view
        never.cancel()

    asyncio.run(run())


def test_a_question_that_fails_is_asked_again():
    async def run():
        answers = [RuntimeError("engine gone"), [{"fathom": STATE}]]

        async def internal_states():
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        page = live.Live(face_of(), Gate(), "demo", internal_states)
        with pytest.raises(RuntimeError):
            await page.page()
        assert "31 requests" in await page.page()

    asyncio.run(run())


def test_history_is_bounded_and_counts_whole_seconds():
    history = History()
    for n in range(10 * REMEMBERED):
        history.end(DENSE)
        history.put_out(n + 0.25, 1)
        history.put_out(n + 0.75, 2)
    assert len(history.finished) == REMEMBERED
    last = 10 * REMEMBERED - 1
    assert history.tokens_by_second(last + 0.9) == [3] * SECONDS
    assert history.tokens_by_second(last + 2.1) == [*[3] * (SECONDS - 1), 0]


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.51, 3), (0.95, 4), (0.0, 1), (1.0, 4)])
def test_quantiles_are_nearest_ranks(share, expected):
    assert quantile([4, 1, 3, 2], share) == expected
    assert quantile([], share) is None and ratio([1], []) is None and ratio([1, 2], [4, 8]) == 0.25
