"""A set that only grows: what was added, and what each read of the whole set found.

As Jepsen's set-full: an element is *known* when its add was acknowledged or a read found it; it is
lost if a read that began later, and the last such read, does not find it; stale if it was missed
and found again; never read if no read proves either. Lost elements make a history invalid; stale
ones do if it is to be linearizable, and then it is judged exactly: each read orders itself behind
the adds that it found and before those that it missed, and the order may have no cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.foreign.cycles import Graph, components, link_real_time, shortest_cycle
from dledger.jepsen_like.foreign.recorded import Attempt, RecordError, edn_text

NAME: Final = "set"

LOST: Final = "lost"
STALE: Final = "stale"
UNEXPECTED: Final = "unexpected"
ABORTED: Final = "aborted read"
DUPLICATED: Final = "duplicated"
NO_ORDER: Final = "nonlinearizable"

REPORTED_MAX: Final = 8
"""Violations reported of each name."""
PAIRS_MAX: Final = 4_000_000
"""Pairs of an add and a read in the exact judgement; about 2 GB."""


@dataclass(slots=True)
class _Element:
    add: Attempt
    known: int
    known_by: Attempt
    present: Attempt | None = None
    absent: Attempt | None = None


def check(attempts: list[Attempt], *, is_linearizable: bool = False) -> Verdict:
    """Return the verdict over a set.

    Args:
        is_linearizable: Reads must see each element as soon as it is known.

    Raises:
        RecordError: A row is no add and no read, or an element is added twice.
    """
    adds = _adds(attempts)
    reads = [(one, _found(one)) for one in attempts if one.f == "read" and one.kind == "ok"]
    found: dict[str, list[Violation]] = {}

    def violate(name: str, element: Any, detail: str, *rows: Attempt) -> None:
        indexes = tuple(dict.fromkeys(row.index for row in rows))
        one = Violation(name, edn_text(element), detail, indexes, at_ns=rows[-1].call)
        found.setdefault(name, []).append(one)

    elements = _elements(adds, reads)
    for read, seen in reads:
        times = Counter(seen)
        for element in times:
            if times[element] > 1:
                text = f"row {read.index} reads {edn_text(element)} more than once"
                violate(DUPLICATED, element, text, read)
            if element not in adds:
                text = f"row {read.index} reads {edn_text(element)}, which no row added"
                violate(UNEXPECTED, element, text, read)
            elif adds[element].kind == "fail":
                text = (
                    f"row {read.index} reads {edn_text(element)}, whose add in row "
                    f"{adds[element].index} failed"
                )
                violate(ABORTED, element, text, adds[element], read)
    stable = stale = never = 0
    for element, one in elements.items():
        gone = one.absent if one.absent is not None and one.absent.call > one.known else None
        since = one.present.call if one.present is not None else -1
        if gone is not None and gone.call > since:
            text = (
                f"row {gone.index} reads the set without {edn_text(element)}, which was there when "
                f"row {one.known_by.index} had completed; no later read finds it"
            )
            violate(LOST, element, text, one.known_by, gone)
        elif one.present is None:
            never += 1
        else:
            stable += 1
            stale += gone is not None
            if gone is not None and is_linearizable:
                text = (
                    f"row {gone.index} misses {edn_text(element)}, which was there when row "
                    f"{one.known_by.index} had completed"
                )
                violate(STALE, element, text, one.known_by, gone)
    is_too_long = len(adds) * len(reads) > PAIRS_MAX
    if is_linearizable and not found and not is_too_long:
        for rows, text in _contradictions(adds, reads):
            violate(NO_ORDER, "the set", text, *rows)
    counts = {"elements": len(adds), "reads": len(reads), "stable": stable, "stale": stale}
    counts["never read"] = never
    few = [one for every in found.values() for one in every[:REPORTED_MAX]]
    verdict = judge(NAME, few, counts, looked_at=stable)
    if verdict.is_valid and is_linearizable and is_too_long:
        reason = f"more than {PAIRS_MAX:,} pairs of an add and a read are not judged exactly"
        return Verdict(NAME, "unknown", (), counts, reason)
    return verdict


def _adds(attempts: Iterable[Attempt]) -> dict[Any, Attempt]:
    adds: dict[Any, Attempt] = {}
    for one in attempts:
        if one.f not in ("add", "read"):
            raise RecordError(f"row {one.index} asks for {one.f!r}, no add and no read")
        if one.f == "add":
            try:
                is_new = one.asked not in adds
            except TypeError:
                raise RecordError(f"row {one.index} adds a map") from None
            if not is_new:
                raise RecordError(f"row {one.index} adds {edn_text(one.asked)} a second time")
            adds[one.asked] = one
    return adds


def _found(read: Attempt) -> tuple[Any, ...]:
    if not isinstance(read.value, tuple | list | set | frozenset):
        raise RecordError(f"row {read.index} reads no set")
    try:
        hash(tuple(read.value))
    except TypeError:
        raise RecordError(f"row {read.index} reads an element that is a map") from None
    return tuple(read.value)


def _elements(
    adds: dict[Any, Attempt], reads: list[tuple[Attempt, tuple[Any, ...]]]
) -> dict[Any, _Element]:
    elements = {
        value: _Element(add, add.ret, add) for value, add in adds.items() if add.kind != "fail"
    }
    for read, seen in reads:
        for value in set(seen) & elements.keys():
            one = elements[value]
            if read.ret < one.known:
                one.known, one.known_by = read.ret, read
    for read, seen in reads:
        there = set(seen)
        for value, one in elements.items():
            if value in there:
                if one.present is None or read.call > one.present.call:
                    one.present = read
            elif one.absent is None or read.call > one.absent.call:
                one.absent = read
    return elements


def _contradictions(
    adds: dict[Any, Attempt], reads: list[tuple[Attempt, tuple[Any, ...]]]
) -> list[tuple[list[Attempt], str]]:
    """Return cycles of what comes before what: membership in each read, and real time."""
    graph = Graph()
    read_values = {value for _, seen in reads for value in seen}
    nodes = [one for value, one in adds.items() if one.kind == "ok" or value in read_values]
    place = {one.asked: at for at, one in enumerate(nodes)}
    for at, (read, seen) in enumerate(reads, len(nodes)):
        there = set(seen)
        for value, add in place.items():
            if value in there:
                graph.link(add, at, "wr", f"added {edn_text(value)}, which the other found")
            else:
                graph.link(at, add, "rw", f"did not find {edn_text(value)}, which the other added")
        nodes.append(read)
    link_real_time(graph, enumerate(nodes))
    contradictions: list[tuple[list[Attempt], str]] = []
    for group in components(graph, ("wr", "rw", "rt")):
        cycle = shortest_cycle(graph, set(group), "rw", ("wr", "rw", "rt"))
        assert cycle is not None, "real time alone has no cycle, nor have adds and what found them"
        rows = [nodes[node] for node in cycle[0]]
        ends = (*rows[1:], rows[0])
        kinds = zip(cycle[0], (*cycle[0][1:], cycle[0][0]), cycle[1], strict=True)
        why = [graph.edges[begin][end][kind] for begin, end, kind in kinds]
        steps = zip(rows, why, ends, strict=True)
        text = "; ".join(f"row {a.index} {reason} (row {b.index})" for a, reason, b in steps)
        contradictions.append((rows, f"{text}: no order has all of that"))
    return contradictions
