"""From a history to the numbers of its pictures. Pure; columns once, then numpy.

Everything over time is put into buckets of whole seconds, so a picture of a day has no more marks
than one of a minute.

Of nodes: which led when, which was down, how far followers were behind, which faults there were.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.history.operation import NEVER, Event, F, Operation, Outcome, Sample
from dledger.jepsen_like.plans.plan import Kind
from dledger.jepsen_like.report.run_folder import Skipped

# --------------------------------------------------------------------------------- what clients saw


I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

BUCKETS_MAX: Final = 900
"""Buckets across a picture: about one per pixel of a wide screen."""

BUCKET_WIDTHS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
"""Widths a person can read; a run of a month has buckets of an hour."""

DURATION_MAX_S: Final = BUCKETS_MAX * BUCKET_WIDTHS_S[-1]
"""A stamp further from the first than this is no stamp; it is drawn at the end."""

NS: Final = 1_000_000_000
MS_PER_NS: Final = 1e-6

UNKNOWN_LASTS_NS: Final = 5 * NS
"""A send without an answer counts as asked for so long: clients wait about that time for one."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The operations of a history, column by column, in one order."""

    op_id: I64
    f: I64
    outcome: I64
    call_ns: I64
    ret_ns: I64

    def __len__(self) -> int:
        return len(self.op_id)


def columns_of(operations: Sequence[Operation]) -> Columns:
    """Return *operations* as columns."""

    def column(values: Any) -> I64:
        return np.fromiter(values, dtype=np.int64, count=len(operations))

    return Columns(
        column(op.op_id for op in operations),
        column(op.f for op in operations),
        column(op.outcome for op in operations),
        column(op.call_ns for op in operations),
        column(op.ret_ns for op in operations),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """The time a run took, from the first thing that happened to the last, in buckets."""

    begin_ns: int
    end_ns: int
    bucket_s: int

    @property
    def duration_s(self) -> float:
        """How long it was."""
        return (self.end_ns - self.begin_ns) / NS

    @property
    def buckets(self) -> int:
        """How many buckets there are; at least one."""
        return (self.end_ns - self.begin_ns) // (self.bucket_s * NS) + 1

    @property
    def starts_s(self) -> F64:
        """Where each bucket begins."""
        return np.arange(self.buckets, dtype=np.float64) * self.bucket_s

    def bucket_of(self, at_ns: I64) -> I64:
        """Return the bucket of each stamp; what lies outside counts for the outermost."""
        place = (at_ns - self.begin_ns) // (self.bucket_s * NS)
        return np.clip(place, 0, self.buckets - 1)

    def second_of(self, at_ns: I64) -> I64:
        """Return the second of each stamp, counted from the beginning."""
        return np.clip((at_ns - self.begin_ns) // NS, 0, int(self.duration_s))

    def at_s(self, at_ns: int) -> float:
        """Return a stamp in seconds from the beginning, within the span."""
        return (min(max(at_ns, self.begin_ns), self.end_ns) - self.begin_ns) / NS


def span_of(columns: Columns, events: Sequence[Event] = (), samples: Sequence[Sample] = ()) -> Span:
    """Return the span of everything that has a stamp; one second when nothing has."""
    stamps: list[int] = [stamp for event in events for stamp in (event.at_ns, event.end_ns)]
    stamps += [samples[0].at_ns, samples[-1].at_ns] if samples else []
    if len(columns):
        stamps += [int(columns.call_ns.min()), int(columns.call_ns.max())]
        returned = columns.ret_ns[columns.ret_ns != NEVER]
        stamps += [int(returned.max())] if len(returned) else []
    begin_ns = min(stamps, default=0)
    end_ns = min(max(stamps, default=0), begin_ns + (DURATION_MAX_S - 1) * NS)
    seconds = (end_ns - begin_ns) / NS
    fits = (width for width in BUCKET_WIDTHS_S if seconds < width * BUCKETS_MAX)
    return Span(begin_ns, end_ns, next(fits, BUCKET_WIDTHS_S[-1]))


def counts_of(columns: Columns) -> dict[str, dict[str, int]]:
    """Return how many operations there were, by name and outcome; names that occur, in order."""
    width = len(Outcome)
    flat = np.bincount(columns.f * width + columns.outcome, minlength=len(F) * width)
    return {
        f.name.lower(): {o.name.lower(): int(flat[f * width + o]) for o in Outcome}
        for f in F
        if flat[f * width : (f + 1) * width].any()
    }


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of acknowledged operations, per bucket of their calls; NaN where there was none."""

    at_s: F64
    p50_ms: F64
    p99_ms: F64
    max_ms: F64


def latency_of(columns: Columns, span: Span) -> Latency:
    """Return the percentiles of each bucket, each the latency of an operation (nearest rank)."""
    answered = (columns.outcome == Outcome.OK) & (columns.ret_ns != NEVER)
    call = columns.call_ns[answered]
    took = columns.ret_ns[answered] - call
    bucket = span.bucket_of(call)
    order = np.lexsort((took, bucket))
    took = took[order]
    count = np.bincount(bucket, minlength=span.buckets)
    first = np.cumsum(count) - count

    def rank(per_cent: int) -> F64:
        place = first + np.maximum(-(-count * per_cent // 100) - 1, 0)
        found = np.full(span.buckets, np.nan)
        there = count > 0
        found[there] = took[place[there]] * MS_PER_NS
        return found

    return Latency(span.starts_s, rank(50), rank(99), rank(100))


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations called per second, by how they ended; one number a bucket."""

    at_s: F64
    ok: F64
    info: F64
    fail: F64


def rates_of(columns: Columns, span: Span) -> Rates:
    """Return the rates; the last bucket may be shorter than the others and is divided as they."""
    bucket = span.bucket_of(columns.call_ns)

    def rate(outcome: Outcome) -> F64:
        chosen = bucket[columns.outcome == outcome]
        return np.bincount(chosen, minlength=span.buckets) / span.bucket_s

    return Rates(span.starts_s, rate(Outcome.OK), rate(Outcome.INFO), rate(Outcome.FAIL))


class Served(IntEnum):
    """What a second was for clients that send."""

    IDLE = 0
    """No client sent."""
    YES = 1
    """At least one send was acknowledged."""
    NO = 2
    """Sends were under way and none was acknowledged."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Second by second."""

    spells: tuple[tuple[Served, float, float], ...]
    served_s: int
    refused_s: int

    @property
    def share(self) -> float:
        """Of the seconds in which a client sent, those with an acknowledgement; NaN: no send."""
        asked = self.served_s + self.refused_s
        return self.served_s / asked if asked else float("nan")


def availability_of(columns: Columns, span: Span) -> Availability:
    """Return what each second was; a spell shorter than a bucket is widened when it was bad."""
    sends = columns.f == F.SEND
    call, ret = columns.call_ns[sends], columns.ret_ns[sends]
    acked = (columns.outcome[sends] == Outcome.OK) & (ret != NEVER)
    seconds = int(span.duration_s) + 1
    ends = np.where(ret == NEVER, _given_up_ns(call, np.sort(ret[acked])), ret)
    under_way = np.zeros(seconds + 1, dtype=np.int64)
    np.add.at(under_way, span.second_of(call), 1)
    np.add.at(under_way, span.second_of(ends) + 1, -1)
    state = np.where(np.cumsum(under_way)[:seconds] > 0, Served.NO, Served.IDLE)
    state[span.second_of(ret[acked])] = Served.YES
    starts = np.arange(0, seconds, span.bucket_s)
    per_bucket = np.maximum.reduceat(state, starts)
    return Availability(
        _spells(per_bucket, starts, seconds),
        int((state == Served.YES).sum()),
        int((state == Served.NO).sum()),
    )


def _given_up_ns(call_ns: I64, acked_ns: I64) -> I64:
    """Return until when clients may have waited for answers that never came."""
    waited = call_ns + UNKNOWN_LASTS_NS
    if not len(acked_ns):
        return waited
    place = np.searchsorted(acked_ns, call_ns)
    served = np.where(place < len(acked_ns), acked_ns[np.minimum(place, len(acked_ns) - 1)], waited)
    return np.minimum(waited, served)


def _spells(
    state: npt.NDArray[Any], starts: npt.NDArray[Any], end_s: float
) -> tuple[tuple[Served, float, float], ...]:
    changes = np.flatnonzero(np.diff(state)) + 1
    edges = [0, *changes.tolist()]
    begins = [float(starts[edge]) for edge in edges]
    ends = [*begins[1:], float(end_s)]
    kinds = [Served(int(state[edge])) for edge in edges]
    return tuple(zip(kinds, begins, ends, strict=True))


def percentile(values: Sequence[float], per_cent: int) -> float:
    """Return the nearest-rank percentile of *values*, which are not empty."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * per_cent // 100) - 1)]


# --------------------------------------------------------------------------------- nodes and faults


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
    """Return the faults that were done, in order of time."""
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

    *least_s*: width of the narrowest band, so that a fault of an instant is seen; 0: half a bucket.
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
