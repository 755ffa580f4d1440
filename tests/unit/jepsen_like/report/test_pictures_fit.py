"""What is written in a picture is whole, and nothing stands on it."""

from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from msgspec import structs

from dledger.jepsen_like.plans.plan import Kind
from dledger.jepsen_like.report import canvas
from dledger.jepsen_like.report.canvas import Canvas
from dledger.jepsen_like.report.run_report import report
from dledger.jepsen_like.report.wording import kind_text
from tests.harness.run_folders import make_run, write_run

TOUCH_PX = 2.0
"""Boxes of texts have a margin; this part of it may be shared."""


def shown(axes: Axes) -> list[Text]:
    """Return what is written at and in a plot, without ticks that lie outside of it."""
    box = axes.get_window_extent()
    across = [t for t in axes.get_xticklabels() if box.x0 - 1 <= middle(t)[0] <= box.x1 + 1]
    along = [t for t in axes.get_yticklabels() if box.y0 - 1 <= middle(t)[1] <= box.y1 + 1]
    found = [*axes.texts, *across, *along, axes.xaxis.label, axes.yaxis.label]
    return [text for text in found if text.get_text() and text.get_visible()]


def middle(text: Text) -> tuple[float, float]:
    box = text.get_window_extent()
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


def overlap(one: Bbox, other: Bbox) -> bool:
    across = min(one.x1, other.x1) - max(one.x0, other.x0)
    along = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(across > TOUCH_PX and along > TOUCH_PX)


def faults_of(made: Canvas) -> list[str]:
    """Return what is cut, or stands on something else, in a picture that is ready."""
    figure = made.figure
    figure.canvas.draw()
    own = [text for axes in made.axes for text in shown(axes)]
    legend = [text for one in figure.legends for text in one.get_texts()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in (*own, *legend)]
    whole = figure.bbox
    name = made.name
    found = [
        f"{name}: {text!r} is cut"
        for text, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1
    ]
    found += [
        f"{name}: {one!r} stands on {other!r}"
        for (one, box), (other, its) in combinations(boxes, 2)
        if overlap(box, its)
    ]
    plots = [axes.get_window_extent() for axes in made.axes]
    found += [
        f"{name}: {text.get_text()!r} of the legend stands in a plot"
        for text in legend
        if any(overlap(text.get_window_extent(), plot) for plot in plots)
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("duration_s", "faults"), [(700, 14), pytest.param(90, 4, marks=pytest.mark.hunt)]
)
def test_texts_of_all_pictures_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duration_s: int, faults: int
) -> None:
    found: list[str] = []
    seen: set[str] = set()
    draw_legend = canvas.draw_legend

    def checked(made: Canvas) -> None:
        draw_legend(made)
        seen.add(made.name)
        found.extend(faults_of(made))

    monkeypatch.setattr(canvas, "draw_legend", checked)
    made = make_run(operations=3_000, duration_s=duration_s, faults=faults, stale_read=True)
    longest = max(Kind, key=lambda kind: len(kind_text(kind.value)))
    made.history.events = [
        structs.replace(event, kind=longest.value) if event.kind == "isolate" else event
        for event in made.history.events
    ]
    report(write_run(tmp_path / "run", made, duration_s=duration_s))
    assert {"order-1", "leader", "faults", "latency"} <= seen
    assert found == []
