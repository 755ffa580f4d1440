"""`report.html` as a person meets it: every section, at the width of a desk and of a telephone.

Look yourself: the store stays in pytest's folder when a test fails; open its ``report.html``.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Locator, Page

from dledger.jepsen_like.history.operation import F, Outcome
from tests.browser.conftest import DURATION_S, OPERATIONS, VERDICTS, Look, Looker, Store
from tests.harness.run_folders import NODES

pytestmark = pytest.mark.slow

WIDTHS_PX = (1280, 390)
DRAWN = ("latency", "rate", "leader", "lag", "availability", "failover", "faults")
CONTRAST_LEAST = 4.5
"""WCAG AA for text of normal size."""

PICTURE_TEXT_LEAST_PX = 8.0

TEXT_OVER_GROUND = """() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const rows = [];
  for (const e of document.querySelectorAll('body *:not(svg):not(svg *)')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !e.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    rows.push([e.tagName + ' ' + e.textContent.trim().slice(0, 40), ratio]);
  }
  return rows;
}"""


def open_run(look: Looker, store: Store, name: str, width_px: int = 1280) -> Look:
    return look((store.folder / name / "report.html").as_uri(), width_px)


def section(page: Page, name: str) -> Locator:
    return page.locator(f"section#{name}")


def rows_of(table: Locator) -> list[list[str]]:
    found: list[list[str]] = table.evaluate(
        "t => [...t.rows].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    return found


@pytest.mark.parametrize("width_px", WIDTHS_PX)
@pytest.mark.parametrize("name", VERDICTS)
def test_a_page_fits_complains_of_nothing_and_asks_for_nothing(
    store: Store, look: Looker, name: str, width_px: int
) -> None:
    seen = open_run(look, store, name, width_px)
    for summary in seen.page.locator("summary").all():
        summary.click()
    wide = seen.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1], "the page scrolls sideways"
    sticks_out = seen.page.evaluate(
        "[...document.querySelectorAll('body *:not(.picture *)')]"
        ".filter(e => e.getBoundingClientRect().right > window.innerWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert sticks_out == []
    assert seen.complaints == []
    assert seen.asked_for == [(store.folder / name / "report.html").as_uri()]


@pytest.mark.parametrize("name", VERDICTS)
def test_headings_go_down_one_by_one_and_contrast_is_enough(
    store: Store, look: Looker, name: str
) -> None:
    page = open_run(look, store, name).page
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    ratios: list[tuple[str, float]] = page.evaluate(TEXT_OVER_GROUND)
    assert len(ratios) > 50
    assert [row for row in ratios if row[1] < CONTRAST_LEAST] == []
    assert page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("width_px", WIDTHS_PX)
def test_report_shows_each_picture_once_with_readable_text(
    store: Store, look: Looker, width_px: int
) -> None:
    page = open_run(look, store, "invalid", width_px).page
    for name in (*DRAWN, "order"):
        shown = section(page, name).locator("[role=img]:visible")
        assert shown.count() == 1, name
        assert len(shown.get_attribute("aria-label") or "") > 30, name
        box = shown.locator("svg").bounding_box()
        assert box is not None
        assert box["width"] > width_px * 0.8
        heights = shown.locator("svg text").evaluate_all(
            "all => all.map(t => t.getBoundingClientRect()).map(b => Math.min(b.width, b.height))"
        )
        assert heights, name
        # One digit may be narrower than the text is high.
        assert sorted(heights)[len(heights) // 2] >= PICTURE_TEXT_LEAST_PX - 3, name
        sizes = shown.locator("svg text").evaluate_all(
            "all => all.map(t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a)"
        )
        upright = [size for size in sizes if size > 0]
        assert min(upright) >= PICTURE_TEXT_LEAST_PX, name
    labels = page.locator("[role=img]:visible").evaluate_all(
        "all => all.map(e => e.getAttribute('aria-label'))"
    )
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(("name", "colour"), [("valid", "29, 111, 66"), ("invalid", "179, 38, 30")])
def test_the_verdict_is_the_first_sentence_and_has_its_colour(
    store: Store, look: Looker, name: str, colour: str
) -> None:
    page = open_run(look, store, name).page
    assert page.title() == f"{name} · {name}"
    first = page.locator("main p").first
    assert first.inner_text().lower().startswith(f"{name}: ")
    assert first.bounding_box()["y"] < 200  # type: ignore[index]  # it is visible
    assert first.locator("b").evaluate("e => getComputedStyle(e).color") == f"rgb({colour})"
    violations = store.made[name].verdicts[0].violations
    if violations:
        assert violations[0].detail in first.inner_text()
        assert len(violations[0].operations) == 2
        for op_id in violations[0].operations:
            assert f"operation {op_id}:" in first.inner_text()
    else:
        acked = sum(op.outcome == Outcome.OK for op in store.made[name].history.operations)
        assert f"{acked:,} acknowledged operations over 5 faults" in first.inner_text()


def test_report_of_an_unknown_run_names_what_is_missing(store: Store, look: Looker) -> None:
    page = open_run(look, store, "unknown").page
    said = page.locator("main p").first.inner_text()
    assert said.lower().startswith("unknown: a checker broke (")
    assert "No samples of a leader" in section(page, "lag").inner_text()
    assert "No logs were kept" in section(page, "logs").inner_text()
    assert "No command was written down" in section(page, "command").inner_text()
    assert section(page, "lag").locator("[role=img]").count() == 0


def test_counts_by_operation_and_outcome(store: Store, look: Looker) -> None:
    page = open_run(look, store, "valid").page
    rows = rows_of(section(page, "numbers").locator("table").first)
    assert rows[0] == ["operation", "ok", "info", "fail", "all"]
    operations = store.made["valid"].history.operations
    for f in (F.SEND, F.PULL, F.MAX_OFFSET):
        counts = [
            sum(op.f == f and op.outcome == outcome for op in operations) for outcome in Outcome
        ]
        assert [f.name.lower(), *(f"{n:,}" for n in (*counts, sum(counts)))] in rows
    assert rows[-1][-1] == f"{OPERATIONS:,}"
    checks = rows_of(section(page, "numbers").locator("table.checks"))
    assert [row[:2] for row in checks] == [["checker", "verdict"], ["queue_log", "valid"]]


@pytest.mark.parametrize("name", ["latency", "rate", "lag"])
def test_plots_have_their_lines_and_the_bands_of_faults(
    store: Store, look: Looker, name: str
) -> None:
    picture = section(open_run(look, store, "valid").page, name).locator(".picture svg")
    words = picture.locator("text").all_text_contents()
    assert {"kill", "isolate", "disk slow"} <= set(words)
    lines = {
        "latency": {"p50 (median)", "p99", "slowest"},
        "rate": {"ok", "info (not known)", "fail (not done)"},
        "lag": set(NODES),
    }
    assert lines[name] <= set(words)


def test_the_ribbon_has_a_lane_per_node_and_the_terms(store: Store, look: Looker) -> None:
    picture = section(open_run(look, store, "valid").page, "leader").locator(".picture")
    words = set(picture.locator("svg text").all_text_contents())
    assert set(NODES) <= words
    assert {f"{node} leads" for node in NODES} <= words
    roles = [e.detail for e in store.made["valid"].history.events if e.kind == "role"]
    last = max(int(found[1]) for text in roles if (found := re.match(r"leader term (\d+)", text)))
    assert str(last) in words
    assert f"term {last} from" in (picture.get_attribute("aria-label") or "")


def test_the_availability_strip_has_red_where_nothing_was_served(
    store: Store, look: Looker
) -> None:
    part = section(open_run(look, store, "valid").page, "availability")
    assert re.search(r"\d+ of \d+ seconds \(\d+\.\d%\)", part.inner_text())
    reported = part.locator(".picture").get_attribute("aria-label") or ""
    spells = [(float(a), float(b)) for a, b in re.findall(r"(\d+) to (\d+) s", reported)]
    long = [(a, b) for a, b in store.made["valid"].outages_s if b - a > 2.5]
    assert long, "no outage is long enough to be seen: choose another seed"
    for begin, end in long:
        assert any(a <= begin + 2 and b >= end - 2 for a, b in spells), (begin, end, spells)


def test_the_queue_is_drawn_only_where_something_is_wrong(store: Store, look: Looker) -> None:
    part = section(open_run(look, store, "invalid").page, "order")
    violation = store.made["invalid"].verdicts[0].violations[0]
    reported = part.locator(".picture").get_attribute("aria-label") or ""
    for op_id in violation.operations:
        assert f"operation {op_id}: " in reported
    assert violation.subject in part.locator("figcaption").inner_text()
    fine = section(open_run(look, store, "valid").page, "order")
    assert fine.locator("[role=img]").count() == 0
    assert "No violation names operations" in fine.inner_text()


def test_the_timeline_has_a_row_per_kind_and_a_table_that_opens(store: Store, look: Looker) -> None:
    part = section(open_run(look, store, "valid").page, "faults")
    events = store.made["valid"].history.events
    done = [e for e in events if e.kind != "role" and not e.detail.startswith("skipped")]
    kinds = {event.kind.replace("_", " ") for event in done}
    assert kinds <= set(part.locator(".picture svg text").all_text_contents())
    details = part.locator("details").first
    assert not details.locator("table").is_visible()
    details.locator("summary").click()
    rows = rows_of(details.locator("table"))
    assert [row[1:3] for row in rows[1:]] == [
        [event.kind.replace("_", " "), event.node] for event in done
    ]
    part.locator("summary", has_text="1 skipped").click()
    assert part.get_by_text("too few members would be left").is_visible()


def test_anomalies_name_their_witnesses(store: Store, look: Looker) -> None:
    part = section(open_run(look, store, "invalid").page, "anomalies")
    violations = store.made["invalid"].verdicts[0].violations
    rows = rows_of(part.locator("table.proofs").first)[1:]
    assert len(rows) == min(10, len(violations))
    for row, violation in zip(rows, violations, strict=False):
        assert row[1] == violation.subject
        assert all(f"operation {op_id}: " in row[2] for op_id in violation.operations)


def test_logs_and_plan_open_and_the_command_is_there(store: Store, look: Looker) -> None:
    page = open_run(look, store, "invalid").page
    logs = section(page, "logs")
    for node in NODES:
        line = logs.get_by_text(f"{node} entry_applied index=449")
        assert not line.is_visible()
        logs.locator("summary", has_text=node).click()
        assert line.is_visible()
    plan = section(page, "plan")
    plan.locator("summary").click()
    assert f'"duration_ms": {DURATION_S * 1000}' in plan.locator("pre").inner_text()
    said = section(page, "command").locator("pre").all_inner_texts()
    assert said == [
        "dledger chaos run --seed 1",
        "asked invalid",
        f"dledger-chaos minimize {store.folder / 'invalid'}",
    ]


def test_every_link_leads_to_its_section(store: Store, look: Looker) -> None:
    page = open_run(look, store, "invalid", 390).page
    links: list[Any] = page.locator("nav a").all()
    assert len(links) == page.locator("section").count()
    for link in links:
        target = (link.get_attribute("href") or "").removeprefix("#")
        link.click()
        assert page.url.endswith(f"#{target}")
        top, height = page.evaluate(
            "id => [document.getElementById(id).getBoundingClientRect().top, innerHeight]", target
        )
        assert -1 <= top < height, target
