"""What all pictures have in common: size, margins, time axis, fault bands, legend, files.

The axes of all pictures begin and end at the same place, so one can look straight down the page
from a peak in the latency to the fault and the change of leader that made it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from jepsen_like.report.colours import FAINT, INK, look_of
from jepsen_like.report.series import Span
from jepsen_like.report.wording import clock_text, kind_text

WIDTH_IN: Final = 11.0
LEFT_IN: Final = 1.2
RIGHT_IN: Final = 1.85
TOP_IN: Final = 0.14
BOTTOM_IN: Final = 0.5
LEGEND_ROW_IN: Final = 0.185
PNG_DPI: Final = 130

BAND_ALPHA: Final = 0.16
EDGE_STRIPE: Final = 0.035
"""Part of the height at the top where a band is drawn in full colour, so kinds can be told."""

TICKS_MAX: Final = 11
_TICK_STEPS_S: Final = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 14_400, 43_200, 86_400, 172_800, 604_800),
)

_STYLE: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "path.simplify_threshold": 0.3,
}
_NO_METADATA: Final = {"Creator": None, "Date": None, "Format": None, "Type": None}
_NAMES = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(slots=True)
class Canvas:
    """A figure in the common layout.

    Attributes:
        name: Of the PNG file, and prefix of every id in the SVG.
        figure: Of matplotlib.
        axes: From top to bottom.
        entries: What the legend will say: lines first, then faults.
    """

    name: str
    figure: Figure
    axes: list[Axes]
    entries: list[tuple[Artist, str]] = field(default_factory=list)


def canvas(
    name: str, heights_in: Sequence[float], *, legend_rows: int = 0, gap_in: float = 0.18
) -> Canvas:
    """Return a canvas with one axes per height, as high as its legend needs."""
    inner_in = sum(heights_in) + gap_in * (len(heights_in) - 1)
    missing_in = max(0.0, legend_rows * LEGEND_ROW_IN + 0.1 - inner_in)
    heights_in = [heights_in[0] + missing_in, *heights_in[1:]]
    inner_in += missing_in
    height_in = inner_in + TOP_IN + BOTTOM_IN
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="white")
        FigureCanvasAgg(figure)
        made = Canvas(name, figure, [])
        top_in = height_in - TOP_IN
        for own_in in heights_in:
            box = (
                LEFT_IN / WIDTH_IN,
                (top_in - own_in) / height_in,
                (WIDTH_IN - LEFT_IN - RIGHT_IN) / WIDTH_IN,
                own_in / height_in,
            )
            made.axes.append(figure.add_axes(box))
            top_in -= own_in + gap_in
    return made


def time_axis(made: Canvas, span: Span) -> None:
    """Give all axes the time of *span*; only the lowest says it."""
    step_s = next(
        (step for step in _TICK_STEPS_S if span.duration_s / step <= TICKS_MAX - 1),
        _TICK_STEPS_S[-1],
    )
    in_seconds = span.duration_s < 180
    end_s = max(span.duration_s, float(span.bucket_s))
    for axes in made.axes:
        axes.set_xlim(0, end_s)
        axes.set_xticks([step_s * at for at in range(int(end_s / step_s) + 1)])
        axes.tick_params(axis="x", labelbottom=axes is made.axes[-1])
        text = FuncFormatter(lambda at, _: f"{at:g}" if in_seconds else clock_text(at))
        axes.xaxis.set_major_formatter(text)
    unit = "s" if in_seconds else "min:s" if span.duration_s < 3600 else "h:min"
    made.axes[-1].set_xlabel(f"time since the run began ({unit})", labelpad=3)


def draw_bands(made: Canvas, bands: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Put translucent bands behind all axes, with a stripe in full colour at the top."""
    lasted = {kind: sum(end - begin for begin, end in spells) for kind, spells in bands.items()}
    for kind, spells in sorted(bands.items(), key=lambda band: -lasted[band[0]]):
        colour, hatch = look_of(kind)  # the short ones last, so that they lie on top
        widths = [(begin, end - begin) for begin, end in spells]
        for place, axes in enumerate(made.axes):
            across = axes.get_xaxis_transform()
            axes.broken_barh(
                widths, (0, 1), transform=across, color=colour, alpha=BAND_ALPHA, lw=0, zorder=0.5
            )
            if place == 0:
                axes.broken_barh(
                    widths,
                    (1 - EDGE_STRIPE, EDGE_STRIPE),
                    transform=across,
                    facecolor=colour,
                    edgecolor="white",
                    hatch=hatch,
                    lw=0,
                    zorder=0.6,
                )
    made.entries += [(patch_of(kind), kind_text(kind)) for kind in bands]


def patch_of(kind: str) -> Patch:
    """Return the legend's picture of *kind*."""
    colour, hatch = look_of(kind)
    return Patch(facecolor=colour, edgecolor="white", hatch=hatch, linewidth=0)


def draw_legend(made: Canvas) -> None:
    """Put the legend to the right of the plot, at its top."""
    if not made.entries:
        return
    handles = [handle for handle, _ in made.entries]
    labels = [label for _, label in made.entries]
    height_in = made.figure.get_figheight()
    anchor = ((WIDTH_IN - RIGHT_IN + 0.12) / WIDTH_IN, 1 - TOP_IN / height_in)
    made.figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=anchor,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.5,
        labelspacing=0.35,
    )


def save(made: Canvas, folder: Path) -> str:
    """Write the PNG into *folder* and return the SVG, to be put into a page.

    The SVG asks for nothing from outside, is the same for the same run, and shares no id with
    another picture of the page.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": made.name}):
        draw_legend(made)
        made.figure.savefig(folder / f"{made.name}.png", dpi=PNG_DPI)
        text = StringIO()
        made.figure.savefig(text, format="svg", metadata=_NO_METADATA)
    svg = text.getvalue()
    return _NAMES.sub(rf"\g<1>{made.name}-", svg[svg.index("<svg") :])
