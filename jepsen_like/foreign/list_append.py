"""Transactions that append to lists and read them: is there one order that explains every read?

A read shows the whole list, so the order of the appends of a key follows from its longest read, and
what depends on what from that. Exact: strict serializability holds if and only if nothing below is
found. An unknown transaction counts when a read saw one of its appends.

Names: Adya's and Elle's. Sources: Adya, Weak Consistency (1999); Kingsbury and Alvaro, Elle (2020).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.foreign.cycles import Cycle, Graph, cycles_of, link_real_time
from dledger.jepsen_like.foreign.recorded import (
    Attempt,
    RecordError,
    edn_text,
    key_of,
    micro_operations,
)

NAME: Final = "list-append"

ABORTED: Final = "G1a"
INTERMEDIATE: Final = "G1b"
INTERNAL: Final = "internal"
FUTURE: Final = "future-read"
DUPLICATE: Final = "duplicate-elements"
INCOMPATIBLE: Final = "incompatible-order"
UNEXPECTED: Final = "unexpected"

REPORTED_MAX: Final = 8
"""Violations reported of each name."""


class Read(NamedTuple):
    """What a transaction saw of a key before its own appends to it."""

    node: int
    key: str
    seen: tuple[Any, ...]


@dataclass
class _Transactions:
    """What the transactions of a history did; a node is a place in *attempts*."""

    attempts: list[Attempt]
    appends: dict[tuple[int, str], list[Any]] = field(default_factory=dict)
    writers: dict[tuple[str, Any], int] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    whole: list[Read] = field(default_factory=list)
    found: list[Violation] = field(default_factory=list)

    def violate(self, name: str, key: str, detail: str, *nodes: int) -> None:
        rows = tuple(dict.fromkeys(self.attempts[node].index for node in nodes))
        at_ns = max((self.attempts[node].call for node in nodes), default=0)
        self.found.append(Violation(name, key, detail, rows, at_ns=at_ns))

    def row(self, node: int) -> str:
        return f"row {self.attempts[node].index}"


def check(attempts: list[Attempt]) -> Verdict:
    """Return the verdict over transactions of appends and reads.

    Raises:
        RecordError: A row is no such transaction, or two append one value to one key.
    """
    done = _Transactions(attempts)
    for node, one in enumerate(attempts):
        _take_appends(done, node, one)
    for node, one in enumerate(attempts):
        if one.kind == "ok":
            _take_reads(done, node, one)
    orders = _orders(done)
    _check_values(done, orders)
    if not any(one.name in (INCOMPATIBLE, UNEXPECTED, DUPLICATE) for one in done.found):
        graph = graph_of(done, orders)
        for cycle in cycles_of(graph):
            _explain(done, graph, cycle)
    counts = {
        "transactions": sum(one.kind == "ok" for one in attempts),
        "reads": len(done.whole),
        "appends": len(done.writers),
    }
    looked_at = len(done.whole)
    return judge(NAME, _few(done.found), counts, looked_at=looked_at)


def _few(found: list[Violation]) -> list[Violation]:
    kept: dict[str, list[Violation]] = {}
    for one in found:
        kept.setdefault(one.name, []).append(one)
    return [one for name in kept for one in kept[name][:REPORTED_MAX]]


def _take_appends(done: _Transactions, node: int, one: Attempt) -> None:
    for name, *rest in micro_operations(one, one.asked):
        if name not in ("append", "r") or len(rest) != 2:
            raise RecordError(f"row {one.index} holds {name!r}, no append and no r of a key")
        if name == "append":
            key, value = key_of(rest[0]), rest[1]
            if _unhashable(value):
                raise RecordError(f"row {one.index} appends a value that is a map")
            if (key, value) in done.writers:
                raise RecordError(
                    f"row {one.index} appends {edn_text(value)} to {key} a second time: values "
                    "must be unique"
                )
            done.writers[key, value] = node
            done.appends.setdefault((node, key), []).append(value)


def _unhashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return True
    return False


def _take_reads(done: _Transactions, node: int, one: Attempt) -> None:
    """Take what *one* read, and hold it against its own earlier reads and appends."""
    known: dict[str, list[Any]] = {}
    own: dict[str, list[Any]] = {}
    for name, *rest in micro_operations(one, one.value):
        if name not in ("append", "r") or len(rest) != 2:
            raise RecordError(f"row {one.index} holds {name!r}, no append and no r of a key")
        key = key_of(rest[0])
        if name == "append":
            own.setdefault(key, []).append(rest[1])
            if key in known:
                known[key].append(rest[1])
            continue
        seen = () if rest[1] is None else rest[1]
        if not isinstance(seen, tuple | list) or any(map(_unhashable, seen)):
            raise RecordError(f"row {one.index} reads no list from {key}")
        seen = tuple(seen)
        mine = own.get(key, [])
        cut = len(seen) - len(mine)
        expected = known.get(key)
        if (expected is not None and list(seen) != expected) or list(seen[max(cut, 0) :]) != mine:
            shown = edn_text(expected) if expected is not None else f"[… {edn_text(mine)[1:]}"
            text = f"{done.row(node)} reads {edn_text(seen)} from {key}, and {shown} by itself"
            done.violate(INTERNAL, key, text, node)
            continue
        known[key] = list(seen)
        done.whole.append(Read(node, key, seen))
        done.reads.append(Read(node, key, seen[:cut]))


def _orders(done: _Transactions) -> dict[str, tuple[Any, ...]]:
    """Return the order of the appends of each key; every read must be a beginning of it."""
    longest: dict[str, Read] = {}
    for read in done.whole:
        if read.key not in longest or len(read.seen) > len(longest[read.key].seen):
            longest[read.key] = read
    for read in done.whole:
        best = longest[read.key]
        if best.seen[: len(read.seen)] != read.seen:
            text = (
                f"{done.row(read.node)} reads {edn_text(read.seen)} from {read.key}, and "
                f"{done.row(best.node)} reads {edn_text(best.seen)}"
            )
            done.violate(INCOMPATIBLE, read.key, text, read.node, best.node)
    return {key: read.seen for key, read in longest.items()}


def _check_values(done: _Transactions, orders: dict[str, tuple[Any, ...]]) -> None:
    failed = {node for node, one in enumerate(done.attempts) if one.kind == "fail"}
    for node, key, seen in done.whole:
        if len(set(seen)) != len(seen):
            text = f"{done.row(node)} reads {edn_text(seen)} from {key}: a value stands there twice"
            done.violate(DUPLICATE, key, text, node)
        for value in seen:
            writer = done.writers.get((key, value))
            if writer is None:
                text = f"{done.row(node)} reads {edn_text(value)} from {key}: no row appended it"
                done.violate(UNEXPECTED, key, text, node)
            elif writer in failed:
                text = (
                    f"{done.row(node)} reads {edn_text(value)} from {key}, which "
                    f"{done.row(writer)} appended and that failed"
                )
                done.violate(ABORTED, key, text, writer, node)
    for node, key, seen in done.reads:
        _check_prefix(done, node, key, seen)
    place = {(key, value): at for key, seen in orders.items() for at, value in enumerate(seen)}
    for (node, key), values in done.appends.items():
        places = [place[key, value] for value in values if (key, value) in place]
        if places != sorted(places):
            text = f"{done.row(node)} appended {edn_text(values)} to {key} in another order"
            done.violate(INCOMPATIBLE, key, text, node)


def _check_prefix(done: _Transactions, node: int, key: str, seen: tuple[Any, ...]) -> None:
    for value in seen:
        if done.writers.get((key, value)) == node:
            text = f"{done.row(node)} reads {edn_text(value)} from {key} before it appends it"
            done.violate(FUTURE, key, text, node)
    writer = done.writers.get((key, seen[-1]), node) if seen else node
    if writer != node and done.appends[writer, key][-1] != seen[-1]:
        text = (
            f"{done.row(node)} reads {key} up to {edn_text(seen[-1])}, in the middle of what "
            f"{done.row(writer)} appends"
        )
        done.violate(INTERMEDIATE, key, text, writer, node)


def graph_of(done: _Transactions, orders: dict[str, tuple[Any, ...]]) -> Graph:
    """Return what depends on what among the transactions that certainly happened."""
    graph = Graph()
    happened = {node for node, one in enumerate(done.attempts) if one.kind == "ok"}
    there = {(key, value) for key, order in orders.items() for value in order}
    happened |= {done.writers[place] for place in there}
    unseen: dict[str, list[tuple[int, Any]]] = {}
    for (key, value), node in done.writers.items():
        if node in happened and (key, value) not in there:
            unseen.setdefault(key, []).append((node, value))
    for key, order in orders.items():
        for first, then in pairwise(order):
            text = f"appended {edn_text(first)} to {key} before {edn_text(then)} was appended"
            graph.link(done.writers[key, first], done.writers[key, then], "ww", text)
        for node, value in unseen.get(key, ()) if order else ():
            text = f"appended {edn_text(order[-1])} to {key}, read without {edn_text(value)}"
            graph.link(done.writers[key, order[-1]], node, "ww", text)
    for node, key, seen in done.reads:
        order = orders[key]
        if seen:
            text = f"appended {edn_text(seen[-1])} to {key}, which the other read"
            graph.link(done.writers[key, seen[-1]], node, "wr", text)
        if len(seen) < len(order):
            value = order[len(seen)]
            nexts = [(done.writers[key, value], value)]
        else:
            nexts = unseen.get(key, [])
        for writer, value in nexts:
            text = f"read {key} before {edn_text(value)} was appended"
            graph.link(node, writer, "rw", text)
    link_real_time(graph, ((node, done.attempts[node]) for node in sorted(happened)))
    return graph


def _explain(done: _Transactions, graph: Graph, cycle: Cycle) -> None:
    steps = [f"{done.row(begin)} {why} ({done.row(end)})" for begin, end, why in cycle.steps(graph)]
    keys = "a cycle of " + ", ".join(done.row(node) for node in cycle.nodes)
    done.violate(cycle.name, keys, "; ".join(steps) + ": no order has all of that", *cycle.nodes)
