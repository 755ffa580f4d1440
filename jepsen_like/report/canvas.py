"""What all pictures have in common: size, margins, time axis, fault bands, legend, files.

The axes of all pictures begin and end at the same place, so one can look straight down the page
from a peak in the latency to the fault that made it. Each fault kind has one look, the same in
every picture; kinds that mean nearly the same share a hue and differ by hatching, and the hues can
be distinguished with any of the common colour blindnesses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from dledger.jepsen_like.plans.plan import Kind
from dledger.jepsen_like.report.series import Span
from dledger.jepsen_like.report.wording import clock_text, kind_lines

INDIGO, CYAN, TEAL, GREEN = "#332288", "#66b8e0", "#44aa99", "#117733"
OLIVE, SAND, ROSE, WINE = "#999933", "#d9b93b", "#cc6677", "#882255"
PURPLE, ORANGE, VERMILLION, BLUE, GREY = "#aa4499", "#e69f00", "#d55e00", "#0072b2", "#777777"

GOOD: Final = "#2a7f9e"
DOUBT: Final = "#d99a00"
BAD: Final = "#b3261e"
INK: Final = "#22262b"
FAINT: Final = "#d7dade"

NODE_COLOURS: Final = (
    *("#4477aa", "#228833", "#ee6677", "#aa8a00", "#aa3377", "#33a5c4", "#666666"),
)
"""A plan has at most seven members."""


class Look(NamedTuple):
    """How a kind is drawn: a colour, and lines across it."""

    colour: str
    hatch: str = ""


_HATCHES: Final = ("", "////", "----", "||||", "++++")
"""Straight lines only: a dot is a circle of many points in an SVG, and there are hundreds."""

_HUES: Final[dict[str, tuple[Kind, ...]]] = {
    VERMILLION: (
        Kind.KILL,
        Kind.BUGGIFY_KILL,
        Kind.CLIENT_KILL,
        Kind.NAMESRV_KILL,
        Kind.PROXY_KILL,
    ),
    BLUE: (Kind.CLEAN_RESTART, Kind.ROLLING_RESTART, Kind.TRANSFER, Kind.VERSION_SKEW),
    SAND: (Kind.PAUSE, Kind.SLOW_LINK, Kind.DISK_SLOW, Kind.CLOCK_YEARS, Kind.PROXY_PAUSE),
    INDIGO: (Kind.POWER_CUT, Kind.POWER_CUT_ALL, Kind.ZOMBIE_CLIENT, Kind.BAD_SECTOR),
    WINE: (Kind.WIPE, Kind.BIT_ROT, Kind.CORRUPT, Kind.TORN_TAIL, Kind.FILE_ROT),
    TEAL: (Kind.ISOLATE, Kind.PARTIAL, Kind.RESET, Kind.LYING_FLUSH),
    GREEN: (Kind.SPLIT, Kind.RING, Kind.BRIDGE, Kind.SWIZZLE),
    CYAN: (Kind.MUTE, Kind.DEAF, Kind.CLIENT_CUT, Kind.NAMESRV_LOSS, Kind.READ_BURST),
    OLIVE: (Kind.LOSS, Kind.DUPLICATE, Kind.MID_SEND_KILL, Kind.MID_BATCH_KILL),
    ORANGE: (Kind.DELAY, Kind.REORDER, Kind.HOLD, Kind.STALL),
    ROSE: (Kind.DISK_FULL, Kind.FSYNC_ERROR, Kind.FD_LIMIT, Kind.CONNECTIONS),
    PURPLE: (Kind.CLOCK_JUMP, Kind.CLOCK_DRIFT, Kind.NAME_THIEF, Kind.PEER_STRANGER),
    GREY: (
        Kind.MEMBER_ADD,
        Kind.MEMBER_REMOVE,
        Kind.MEMBER_REPLACE,
        Kind.CHANGE_WITHOUT_MINORITY,
        Kind.ROLE_ORDER,
    ),
}

LOOKS: Final[dict[str, Look]] = {
    kind.value: Look(colour, hatch)
    for colour, kinds in _HUES.items()
    for kind, hatch in zip(kinds, _HATCHES, strict=False)
}


def look_of(kind: str) -> Look:
    """Return how *kind* is drawn; one that no plan knows gets a look from its name."""
    known = LOOKS.get(kind)
    if known is not None:
        return known
    drawn = crc32(kind.encode())
    return Look(tuple(_HUES)[drawn % len(_HUES)], "\\\\" * 4 + ("|" * (drawn % 2)))


TOP_IN: Final = 0.14
TITLES: Final = {
    "latency-raw": "Every operation at its call",
    "latency": "Latency of acknowledged operations",
    "rate": "Operations by how they ended",
    "leader": "Leaders and their terms",
    "lag": "Followers behind the leader",
    "availability": "Whether sends were acknowledged",
    "failover": "Time without a serving leader",
    "faults": "Faults",
    "unseen": "Acknowledged messages that no pull had found",
    "timeline": "Every operation in the lane of its client",
}
"""Of the pictures of a whole run, by their names."""
TITLE_IN: Final = 0.2
BOTTOM_IN: Final = 0.5
LEGEND_ROW_IN: Final = 0.185
LEGEND_MARGIN_IN: Final = 0.05
"""Between a legend and the bottom of its picture, at least."""
PNG_DPI: Final = 130

BAND_ALPHA: Final = 0.16
EDGE_STRIPE: Final = 0.035
"""Part of the height at the top where a band is drawn in full colour, so that kinds differ."""

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


WIDTH_IN: Final = 11.0
"""Of a whole picture."""
LEFT_IN: Final = 1.2
"""Left of the plot, for the names of lanes and values."""
RIGHT_IN: Final = 1.85
"""Right of the plot, for the legend."""
PLOT_IN: Final = WIDTH_IN - LEFT_IN - RIGHT_IN
TICKS_MAX: Final = 11
"""On the time axis."""


@dataclass(slots=True)
class Canvas:
    """A figure in the common layout."""

    name: str
    figure: Figure
    axes: list[Axes]
    entries: list[tuple[Artist, str]] = field(default_factory=list)
    top_in: float = TOP_IN


def canvas(
    name: str,
    heights_in: Sequence[float],
    *,
    legend_rows: int = 0,
    gap_in: float = 0.18,
    title: str = "",
) -> Canvas:
    """Return a canvas with one axes per height, as high as its legend needs."""
    title = title or TITLES.get(name, "")
    inner_in = sum(heights_in) + gap_in * (len(heights_in) - 1)
    missing_in = max(0.0, legend_rows * LEGEND_ROW_IN + 0.1 - inner_in)
    heights_in = [heights_in[0] + missing_in, *heights_in[1:]]
    above_in = TOP_IN + TITLE_IN * bool(title)
    height_in = sum(heights_in) + gap_in * (len(heights_in) - 1) + above_in + BOTTOM_IN
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="white")
        FigureCanvasAgg(figure)
        made = Canvas(name, figure, [], top_in=above_in)
        top_in = height_in - above_in
        for own_in in heights_in:
            box = (
                LEFT_IN / WIDTH_IN,
                (top_in - own_in) / height_in,
                PLOT_IN / WIDTH_IN,
                own_in / height_in,
            )
            made.axes.append(figure.add_axes(box))
            top_in -= own_in + gap_in
        if title:
            made.axes[0].set_title(title, loc="left", fontsize=10, fontweight="bold", pad=5)
    return made


def time_axis(made: Canvas, span: Span) -> None:
    """Give all axes the time of *span*; only the lowest shows it."""
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
    made.entries += [(patch_of(kind), kind_lines(kind)) for kind in bands]


def patch_of(kind: str) -> Patch:
    """Return the legend's picture of *kind*."""
    colour, hatch = look_of(kind)
    return Patch(facecolor=colour, edgecolor="white", hatch=hatch, linewidth=0)


def draw_legend(made: Canvas) -> None:
    """Put the legend to the right of the plot, at its top."""
    if not made.entries:
        return
    legend = _legend(made)
    missing_in = LEGEND_MARGIN_IN - legend.get_window_extent().y0 / made.figure.dpi
    if missing_in > 0:
        legend.remove()
        _grow(made, missing_in)
        _legend(made)


def _legend(made: Canvas) -> Legend:
    right = (WIDTH_IN - RIGHT_IN + 0.12) / WIDTH_IN
    top = 1 - made.top_in / made.figure.get_figheight()
    return made.figure.legend(
        [handle for handle, _ in made.entries],
        [label for _, label in made.entries],
        loc="upper left",
        bbox_to_anchor=(right, top),
        borderaxespad=0,
        borderpad=0,
        handlelength=1.5,
        labelspacing=0.35,
    )


def _grow(made: Canvas, more_in: float) -> None:
    """Make a figure higher; what is in it keeps its size and its distance from the top."""
    before_in = made.figure.get_figheight()
    after_in = before_in + more_in
    made.figure.set_figheight(after_in)
    for axes in made.axes:
        box = axes.get_position()
        bottom, height = box.y0 * before_in + more_in, box.height * before_in
        axes.set_position((box.x0, bottom / after_in, box.width, height / after_in))


def save(made: Canvas, folder: Path) -> str:
    """Return the SVG, to be put into a page; write it as a PNG into *folder*, too.

    The SVG asks for nothing from outside, is the same for the same run, and shares no id with
    another picture of the page.
    """
    name = made.name
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        draw_legend(made)
        made.figure.savefig(folder / f"{name}.png", dpi=PNG_DPI)
        text = StringIO()
        made.figure.savefig(text, format="svg", metadata=_NO_METADATA)
    svg = text.getvalue()
    return _NAMES.sub(rf"\g<1>{name}-", svg[svg.index("<svg") :])
