"""`report.html` as a person meets it: what only a browser shows, at a desk and on a telephone.

What the page states is tested without one, in tests/unit/jepsen_like/report/test_report.py.

Look yourself: the store stays in pytest's folder when a test fails; open its ``report.html``.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page

from tests.browser.conftest import VERDICTS, Look, Looker

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


def open_run(look: Looker, store: Path, name: str, width_px: int = 1280) -> Look:
    return look((store / name / "report.html").as_uri(), width_px)


def section(page: Page, name: str) -> Locator:
    return page.locator(f"section#{name}")


@pytest.mark.parametrize("width_px", WIDTHS_PX)
@pytest.mark.parametrize("name", VERDICTS)
def test_a_page_fits_complains_of_nothing_and_asks_for_nothing(
    store: Path, look: Looker, name: str, width_px: int
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
    assert seen.asked_for == [(store / name / "report.html").as_uri()]


@pytest.mark.parametrize("name", VERDICTS)
def test_headings_go_down_one_by_one_and_contrast_is_enough(
    store: Path, look: Looker, name: str
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
    store: Path, look: Looker, width_px: int
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
    store: Path, look: Looker, name: str, colour: str
) -> None:
    page = open_run(look, store, name).page
    assert page.title() == f"{name} · {name}"
    first = page.locator("main p").first
    assert first.inner_text().lower().startswith(f"{name}: ")
    assert first.bounding_box()["y"] < 200  # type: ignore[index]  # it is visible
    assert first.locator("b").evaluate("e => getComputedStyle(e).color") == f"rgb({colour})"
