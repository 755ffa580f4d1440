"""Multiset algebra over everything sent and everything held, in columns.

A message is *at home* where its acknowledgement has it and a replica holds it. Nearly all are, and
those are only counted. What is left, acknowledged and not at home or held and not acknowledged
there, is few, and is compared across queues by its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from dledger.jepsen_like.checkers.kernel.facts import I64, SUSPECTS_MAX, Flags, QueueFacts, Spares
from dledger.jepsen_like.history.operation import NOTHING, Outcome

MUST_BE_THERE: Final = len(Outcome)
"""Beside the outcomes: it was acknowledged, and its queue has been read from the beginning."""


class Home(msgspec.Struct):
    """What is not at home in one queue, on the replica that was chosen. Values as bytes.

    Attributes:
        sent: Sends with an acknowledged offset.
        removed: Those of them that retention took.
        there: Messages the replica holds.
        away: Acknowledged values, kept, and not at home.
        strange: Held values that no acknowledgement put there.
        spare: Values of sends without an offset.
        spare_outcome: How those ended, a byte each; `MUST_BE_THERE` for those that were appended
            and that nothing can have removed.
        echo: Values that are at home, and strange somewhere in this queue, too.
        lost: Values acknowledged that some replica does not hold at their offset: offset, value,
            replica, what it holds there.
        differ: Offsets two replicas disagree on: offset, value and value, and the two replicas.
    """

    sent: int = 0
    removed: int = 0
    there: int = 0
    away: bytes = b""
    strange: bytes = b""
    spare: bytes = b""
    spare_outcome: bytes = b""
    echo: bytes = b""
    lost: tuple[tuple[int, int, int, int], ...] = ()
    differ: tuple[tuple[int, int, int, int, int], ...] = ()


def home_of(
    facts: QueueFacts, begins: Mapping[int, int], chosen: int, order: Sequence[int]
) -> Home:
    """Return what is not at home. The facts must not be judged yet.

    *chosen*: the replica whose messages count; `NOTHING`: none was read.
    """
    none = (np.zeros(0, dtype=np.int64),) * 2
    first = facts.begin
    log = facts.log[: facts.end]
    acked = np.flatnonzero(log != NOTHING)
    held = {replica: (off - first, value) for replica, (off, value) in facts.held().items()}
    begins = {replica: begin - first for replica, begin in begins.items()}
    spares = facts.spares()
    home = Home(
        sent=facts.acked,
        spare=spares.value.tobytes(),
        spare_outcome=spare_outcomes(spares, begins.get(chosen, NOTHING) + first, log),
    )
    if chosen != NOTHING:
        off, value = held.get(chosen, none)
        begin = begins.get(chosen, 0)
        is_home = _matches(log, off, value)
        present = np.zeros(len(log), dtype=np.bool_)
        present[off[is_home]] = True
        home.removed = int(np.count_nonzero(acked < begin))
        away = log[acked[(acked >= begin) & ~present[acked]]]
        strange = value[~is_home & (value != NOTHING)]
        home.there = int(np.count_nonzero(value != NOTHING))
        home.away = np.concatenate((away, *_misplaced(facts, begins.get(chosen, 0)))).tobytes()
        home.strange = strange.tobytes()
        if len(strange):
            home.echo = _common(log[present], np.unique(strange)).tobytes()
    beside = _beside(facts)
    lost = {**_lost(log, acked, held, begins, order), **_lost_beside(beside, held, begins, order)}
    home.lost = tuple(
        (off + first, *lost[off, value]) for off, value in sorted(lost)[:SUSPECTS_MAX]
    )
    home.differ = tuple((off + first, *row) for off, row in _differ(held, order))
    return home


def spare_outcomes(spares: Spares, begin: int, log: I64) -> bytes:
    """Return how sends without an offset ended, a byte each.

    Args:
        begin: First offset that the chosen replica has of their queue.
        log: Values of the queue; what is among them was acknowledged at an offset as well.
    """
    outcome = spares.outcome.astype(np.int8)
    required = np.flatnonzero(spares.required)
    if begin == 0 and len(required):
        outcome[required[~np.isin(spares.value[required], log)]] = MUST_BE_THERE
    return outcome.tobytes()


def echo_of(facts: QueueFacts, chosen: int, among: I64) -> I64:
    """Return which of some values, sorted, the chosen replica holds where they belong."""
    off, value = facts.held().get(chosen, (among[:0], among[:0]))
    return _common(value[_matches(facts.log[: facts.end], off - facts.begin, value)], among)


def join_homes(homes: Sequence[Home], order: Sequence[int]) -> Home:
    """Return the sums over the chunks of a queue; what is at home in another chunk is not known."""
    lost = sorted(one for home in homes for one in home.lost)[:SUSPECTS_MAX]
    differ: dict[int, tuple[int, int, int, int, int]] = {}
    for one in sorted(one for home in homes for one in home.differ):
        differ.setdefault(one[4], one)
    return Home(
        sent=sum(home.sent for home in homes),
        removed=sum(home.removed for home in homes),
        there=sum(home.there for home in homes),
        away=b"".join(home.away for home in homes),
        strange=b"".join(home.strange for home in homes),
        echo=b"".join(home.echo for home in homes),
        lost=tuple(lost),
        differ=tuple(differ[replica] for replica in order if replica in differ),
    )


def _misplaced(facts: QueueFacts, begin: int) -> list[I64]:
    """Return acknowledged values that have no offset of their own within the queue."""
    off, value = facts.far()
    return [value[off - facts.begin >= begin], *(beaten for _, beaten in facts.displaced)]


def _common(many: I64, few: I64) -> I64:
    """Return which of *few*, sorted, are among *many*."""
    place = np.minimum(np.searchsorted(few, many), len(few) - 1)
    return np.unique(many[few[place] == many])


def _matches(log: I64, off: I64, value: I64) -> Flags:
    inside = (off >= 0) & (off < len(log)) & (value != NOTHING)
    matches: Flags = inside.copy()
    rows = np.flatnonzero(inside)
    matches[rows] = log[off[rows]] == value[rows]
    return matches


Lost = dict[tuple[int, int], tuple[int, int, int]]
"""By offset and value: the value, the first replica without it, and what that holds there."""


def _lost(
    log: I64,
    acked: I64,
    held: Mapping[int, tuple[I64, I64]],
    begins: Mapping[int, int],
    order: Sequence[int],
) -> Lost:
    """Return what is lost of the values in *log*."""
    found: Lost = {}
    for replica in order:
        here = np.full(len(log), NOTHING - 1, dtype=np.int64)
        off, value = held.get(replica, (acked[:0], acked[:0]))
        rows = np.flatnonzero((off >= 0) & (off < len(log)))
        here[off[rows]] = value[rows]
        kept = acked[acked >= begins[replica]]
        for at in kept[here[kept] != log[kept]][:SUSPECTS_MAX].tolist():
            wanted = int(log[at])
            found.setdefault((at, wanted), (wanted, replica, int(here[at])))
    return found


def _beside(facts: QueueFacts) -> tuple[I64, I64]:
    """Return offset and value of what was acknowledged and is not in the log of the facts."""
    parts = [*facts.displaced, facts.far()]
    off, value = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    return off - facts.begin, value


def _lost_beside(
    pairs: tuple[I64, I64],
    held: Mapping[int, tuple[I64, I64]],
    begins: Mapping[int, int],
    order: Sequence[int],
) -> Lost:
    """Return what is lost of these offsets and values."""
    wanted_off, wanted = pairs
    found: Lost = {}
    for replica in order if len(wanted) else ():
        off, value = held.get(replica, (wanted[:0], wanted[:0]))
        by_off = np.append(np.argsort(off), 0)  # one more, for what is beyond the last
        place = np.searchsorted(off, wanted_off, sorter=by_off[:-1])
        here = np.full(len(wanted), NOTHING - 1, dtype=np.int64)
        if len(off):
            is_there = (place < len(off)) & (off[by_off[place]] == wanted_off)
            here[is_there] = value[by_off[place[is_there]]]
        for at in np.flatnonzero((wanted_off >= begins[replica]) & (here != wanted)).tolist():
            row = (int(wanted[at]), replica, int(here[at]))
            found.setdefault((int(wanted_off[at]), int(wanted[at])), row)
    return found


def _differ(
    held: Mapping[int, tuple[I64, I64]], order: Sequence[int]
) -> tuple[tuple[int, tuple[int, int, int, int]], ...]:
    """Return the first offset at which each replica disagrees with the one read first."""
    if len(order) < 2 or order[0] not in held:
        return ()
    known = order[0]
    found: list[tuple[int, tuple[int, int, int, int]]] = []
    ours_off, ours = held[known]
    for other in order[1:]:
        off, value = held.get(other, (ours_off[:0], ours_off[:0]))
        _, left, right = np.intersect1d(ours_off, off, return_indices=True)
        wrong = np.flatnonzero(ours[left] != value[right])
        if len(wrong):
            a, b = left[wrong[0]], right[wrong[0]]
            found.append((int(ours_off[a]), (int(ours[a]), int(value[b]), known, other)))
    return tuple(found)
