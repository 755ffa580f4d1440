"""One look per fault kind, the same in every picture of every run.

Kinds that mean nearly the same share a hue and differ by hatching, so no two look alike, also to
those who see few colours. The hues are told apart with any of the common colour blindnesses.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from zlib import crc32

from jepsen_like.plans.plan import Kind

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


_HATCHES: Final = ("", "////", "----", "||||")
"""Straight lines only: a dot is a circle of many points in an SVG, and there are hundreds."""

_HUES: Final[dict[str, tuple[Kind, ...]]] = {
    VERMILLION: (Kind.KILL, Kind.BUGGIFY_KILL, Kind.CLIENT_KILL, Kind.NAMESRV_KILL),
    BLUE: (Kind.CLEAN_RESTART, Kind.ROLLING_RESTART, Kind.TRANSFER, Kind.VERSION_SKEW),
    SAND: (Kind.PAUSE, Kind.SLOW_LINK, Kind.DISK_SLOW, Kind.CLOCK_YEARS),
    INDIGO: (Kind.POWER_CUT, Kind.POWER_CUT_ALL, Kind.ZOMBIE_CLIENT, Kind.BAD_SECTOR),
    WINE: (Kind.WIPE, Kind.BIT_ROT, Kind.CORRUPT, Kind.TORN_TAIL),
    TEAL: (Kind.ISOLATE, Kind.PARTIAL, Kind.RESET),
    GREEN: (Kind.SPLIT, Kind.RING, Kind.BRIDGE, Kind.SWIZZLE),
    CYAN: (Kind.MUTE, Kind.DEAF, Kind.CLIENT_CUT),
    OLIVE: (Kind.LOSS, Kind.DUPLICATE, Kind.MID_SEND_KILL, Kind.MID_BATCH_KILL),
    ORANGE: (Kind.DELAY, Kind.REORDER, Kind.HOLD),
    ROSE: (Kind.DISK_FULL, Kind.FSYNC_ERROR, Kind.FD_LIMIT, Kind.CONNECTIONS),
    PURPLE: (Kind.CLOCK_JUMP, Kind.CLOCK_DRIFT, Kind.NAME_THIEF, Kind.PEER_STRANGER),
    GREY: (
        Kind.MEMBER_ADD,
        Kind.MEMBER_REMOVE,
        Kind.MEMBER_REPLACE,
        Kind.CHANGE_WITHOUT_MINORITY,
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
