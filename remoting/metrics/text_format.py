"""Prometheus' text format 0.0.4, written. Pure.

The format is described at prometheus.io: Exposition formats, "Text format details".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

MAX_LABEL_CHARS: Final = 255
"""Of a label's value; longer ones are cut. Names are no longer than that, and what clients call
themselves need not be."""

LINES_PER_PIECE: Final = 500
"""Lines written in one go, a few hundred microseconds: others are served between two pieces."""

Sample = tuple[Mapping[str, str], float]
"""Labels and value of one series."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its series have this name and differ in their labels.

    Attributes:
        name: With its unit last; that of a counter ends in ``_total``.
        about: One line for people.
    """

    name: str
    kind: Literal["counter", "gauge"]
    about: str


def family_text(
    family: Family, samples: Iterable[Sample | None], common: Mapping[str, str]
) -> Iterator[str]:
    """Yield a family in pieces; nothing when it has no series.

    Args:
        samples: None between them ends a piece, so that others are served meanwhile.
        common: Labels every series has, before its own.
    """
    lines = [
        f"# HELP {family.name} {_escaped_help(family.about)}\n# TYPE {family.name} {family.kind}\n"
    ]
    is_empty = True
    for sample in samples:
        if sample is not None:
            is_empty = False
            lines.append(_line(family.name, {**common, **sample[0]}, sample[1]))
        if sample is None or len(lines) >= LINES_PER_PIECE:
            yield "" if is_empty else "".join(lines)
            if not is_empty:
                lines.clear()
    if not is_empty:
        yield "".join(lines)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{escaped_label(text)}"' for label, text in labels.items())
    return (
        f"{name}{{{inside}}} {number_text(value)}\n" if inside else f"{name} {number_text(value)}\n"
    )


def escaped_label(text: str) -> str:
    """Return the value of a label as it stands between quotes."""
    cut = text[:MAX_LABEL_CHARS]
    return cut.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def number_text(value: float) -> str:
    """Return a number as Go's ParseFloat reads it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(value) if isinstance(value, int) else repr(value)
