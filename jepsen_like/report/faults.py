"""Which events of a history are faults, how long they lasted, and what was left out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from jepsen_like.history.operation import Event
from jepsen_like.plans.plan import Kind
from jepsen_like.report.run_folder import Skipped
from jepsen_like.report.series import Span

ROLE: Final = "role"
"""Kind of an event that is a change of role."""

_SKIPPED: Final = "skipped"
_KINDS: Final = frozenset(kind.value for kind in Kind)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing done to the cluster, in seconds from the beginning of the run."""

    kind: str
    begin_s: float
    end_s: float
    node: str = ""


def faults_of(events: Iterable[Event], span: Span, more_kinds: Collection[str] = ()) -> list[Fault]:
    """Return the faults that were done, in order of time.

    Args:
        more_kinds: Kinds that the run calls faults although no plan knows them.
    """
    return [
        Fault(event.kind, span.at_s(event.at_ns), span.at_s(event.end_ns), event.node)
        for event in events
        if _is_fault(event, more_kinds) and not event.detail.startswith(_SKIPPED)
    ]


def _is_fault(event: Event, more_kinds: Collection[str]) -> bool:
    return event.kind in _KINDS or (event.kind in more_kinds and event.kind != ROLE)


def skipped_of(events: Iterable[Event]) -> list[Skipped]:
    """Return what was not done, by the history."""
    reasons = Counter(
        (event.kind, event.detail.removeprefix(_SKIPPED).lstrip(": "))
        for event in events
        if event.detail.startswith(_SKIPPED)
    )
    return [Skipped(kind, reason, count) for (kind, reason), count in sorted(reasons.items())]


def kinds_of(faults: Iterable[Fault]) -> list[str]:
    """Return the kinds that occur, in the order of the plan's table, unknown ones behind."""
    known = [kind.value for kind in Kind]
    there = {fault.kind for fault in faults}
    return [kind for kind in known if kind in there] + sorted(there - _KINDS)


def bands_of(
    faults: Sequence[Fault], span: Span, least_s: float = 0.0
) -> dict[str, list[tuple[float, float]]]:
    """Return when each kind was at work; what touches, or nearly does, is one band.

    Args:
        least_s: Width of the narrowest band, so that a fault of an instant is seen; 0: half a
            bucket.
    """
    least_s = least_s or max(span.bucket_s / 2, span.duration_s / 400)
    bands: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds_of(faults)}
    for fault in sorted(faults, key=lambda fault: fault.begin_s):
        row = bands[fault.kind]
        end_s = max(fault.end_s, fault.begin_s + least_s)
        if row and fault.begin_s <= row[-1][1]:
            row[-1] = (row[-1][0], max(row[-1][1], end_s))
        else:
            row.append((fault.begin_s, end_s))
    return bands
