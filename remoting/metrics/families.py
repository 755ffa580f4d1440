"""Metrics and their series, written by prometheus_client in Prometheus' text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

MAX_LABEL_CHARS: Final = 255
"""Of a label's value; longer ones are cut. Names are no longer than that, and what clients call
themselves need not be."""

SERIES_PER_PIECE: Final = 250
"""Series written in one go, two milliseconds or so: others are served between two pieces."""

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


def load_library() -> None:
    """Import the library that writes the page: before the first page is asked for."""
    import prometheus_client  # noqa: F401


def family_text(
    family: Family, samples: Iterable[Sample | None], common: Mapping[str, str]
) -> Iterator[str]:
    """Yield a family in pieces; nothing when it has no series.

    Args:
        samples: None between them ends a piece, so that others are served meanwhile.
        common: Labels that every series has.
    """
    # Here, so that a daemon starts without the library.
    from prometheus_client import Metric

    metric = Metric(family.name.removesuffix("_total"), family.about, family.kind)
    is_begun = False
    for sample in samples:
        if sample is not None:
            labels = {**common, **sample[0]}
            shown = {name: _label(text) for name, text in labels.items()}
            metric.add_sample(family.name, shown, sample[1])
        if sample is None or len(metric.samples) >= SERIES_PER_PIECE:
            yield _text(metric, is_begun=is_begun)
            is_begun = is_begun or bool(metric.samples)
            metric.samples.clear()
    if metric.samples:
        yield _text(metric, is_begun=is_begun)


def _text(metric: Metric, *, is_begun: bool) -> str:
    """Return the series of *metric*; its help and type stand before the first of them only."""
    from prometheus_client import generate_latest

    if not metric.samples:
        return ""
    registry: Any = SimpleNamespace(collect=lambda: [metric])
    text = generate_latest(registry).decode()
    return text.split("\n", 2)[2] if is_begun else text


def _label(text: str) -> str:
    """Return the value of a label, no longer than shown and such that it can be encoded."""
    cut = text[:MAX_LABEL_CHARS]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()
