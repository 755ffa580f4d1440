"""Which node led when, which was down, how far followers were behind, and which faults there were.

Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from jepsen_like.history.operation import Event
from jepsen_like.plans.plan import Kind
from jepsen_like.report.run_folder import Sample, Skipped
from jepsen_like.report.series import F64, NS, Span

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


LEADER: Final = "leader"
LEADER_FRESH_NS: Final = 3 * NS
"""A leader without a sample for that long is no measure for its followers."""

ENDS_A_PROCESS: Final = frozenset(
    kind.value
    for kind in (
        *(Kind.KILL, Kind.CLEAN_RESTART, Kind.POWER_CUT, Kind.POWER_CUT_ALL),
        *(Kind.WIPE, Kind.BUGGIFY_KILL, Kind.BIT_ROT),
    )
)
_TERM = re.compile(r"\bterm\D{0,3}(\d+)")
_NO_TERM: Final = -1


@dataclass(frozen=True, slots=True)
class Leadership:
    """One node believed to lead, in seconds from the beginning of the run."""

    node: str
    term: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Change:
    at_ns: int
    node: str
    is_leader: bool
    term: int = _NO_TERM


def leaderships_of(
    events: Sequence[Event], samples: Sequence[Sample], span: Span
) -> list[Leadership]:
    """Return the terms in order of their beginning.

    A term ends when its node reports it, when its process ends, or with the run. Without events
    the samples tell, as exactly as they were taken.
    """
    changes = list(_changes(events))
    if not any(change.is_leader for change in changes):
        changes = [_Change(s.at_ns, s.node, s.is_up and s.role == LEADER, s.term) for s in samples]
    else:
        changes += [_Change(s.at_ns, s.node, is_leader=False) for s in samples if not s.is_up]
    terms: list[Leadership] = []
    leads: dict[str, _Change] = {}
    end = _Change(span.end_ns, "", is_leader=False)

    def close(node: str, at_ns: int) -> None:
        began = leads.pop(node)
        terms.append(Leadership(node, began.term, span.at_s(began.at_ns), span.at_s(at_ns)))

    for change in sorted(changes, key=lambda change: change.at_ns):
        began = leads.get(change.node)
        if began is not None and (not change.is_leader or change.term != began.term):
            close(change.node, change.at_ns)
        if change.is_leader:
            leads.setdefault(change.node, change)
    for node in list(leads):
        close(node, end.at_ns)
    return sorted(terms, key=lambda term: (term.begin_s, term.node))


def _changes(events: Iterable[Event]) -> Iterable[_Change]:
    for event in events:
        if event.kind == ROLE:
            term = _TERM.search(event.detail)
            is_leader = event.detail.startswith(LEADER)
            yield _Change(event.at_ns, event.node, is_leader, int(term[1]) if term else _NO_TERM)
        elif event.kind in ENDS_A_PROCESS and not event.detail.startswith("skipped"):
            for node in event.node.split(","):
                yield _Change(event.at_ns, node.strip(), is_leader=False)


def nodes_of(terms: Iterable[Leadership], samples: Iterable[Sample]) -> list[str]:
    """Return every node that led or was sampled, sorted."""
    return sorted({term.node for term in terms} | {sample.node for sample in samples})


def down_of(samples: Sequence[Sample], span: Span) -> dict[str, list[tuple[float, float]]]:
    """Return from and until when each node did not answer, in seconds."""
    spells: dict[str, list[tuple[float, float]]] = {}
    since: dict[str, int] = {}
    for sample in samples:
        if not sample.is_up:
            since.setdefault(sample.node, sample.at_ns)
        elif sample.node in since:
            spell = (span.at_s(since.pop(sample.node)), span.at_s(sample.at_ns))
            spells.setdefault(sample.node, []).append(spell)
    for node, at_ns in since.items():
        spells.setdefault(node, []).append((span.at_s(at_ns), span.duration_s))
    return spells


def lag_of(samples: Sequence[Sample], span: Span) -> dict[str, F64]:
    """Return by how many entries each node was behind the leader: the worst of each bucket.

    NaN where the node was not sampled as a follower, or no leader was sampled lately. The
    leader is the one of the newest term so far, so an old one that is cut off is no measure.
    """
    lead = np.array(
        [(s.at_ns, s.term, s.last_index) for s in samples if s.is_up and s.role == LEADER],
        dtype=np.int64,
    ).reshape(-1, 3)
    lead = lead[lead[:, 1] >= np.maximum.accumulate(lead[:, 1])]
    lag: dict[str, F64] = {}
    if not len(lead):
        return lag
    for node in nodes_of((), samples):
        rows = np.array(
            [
                (s.at_ns, s.last_index)
                for s in samples
                if s.node == node and s.is_up and s.role != LEADER
            ],
            dtype=np.int64,
        ).reshape(-1, 2)
        place = np.searchsorted(lead[:, 0], rows[:, 0], side="right") - 1
        rows, place = rows[place >= 0], place[place >= 0]
        fresh = rows[:, 0] - lead[place, 0] <= LEADER_FRESH_NS
        rows, place = rows[fresh], place[fresh]
        worst = np.full(span.buckets, -1.0)
        behind = np.maximum(lead[place, 2] - rows[:, 1], 0).astype(np.float64)
        np.maximum.at(worst, span.bucket_of(rows[:, 0]), behind)
        worst[worst < 0] = np.nan
        if not np.isnan(worst).all():
            lag[node] = worst
    return lag
