"""A log of Kafka's kind: sends that return offsets, polls of consumers, transactions of both.

Offsets and times are judged by the kernel that judges queues of our own, `checkers.queue_log`:
sends and polls become rows, and an offset that no client saw becomes a send of unknown outcome, for
the mark of a transaction takes one. The rest is what Jepsen's kafka workload finds in the order of
the values, and has its names: lost writes, polls and sends that skip or go back, aborted and
precommitted reads, cycles of transactions that read each other's messages.

Reported and allowed, as there: `int-send-skip`, and skips of consumers that subscribed, because a
rebalance explains them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from dledger.jepsen_like.checkers import queue_log
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.foreign.cycles import Graph, cycles_of
from dledger.jepsen_like.foreign.recorded import (
    Attempt,
    RecordError,
    edn_text,
    key_of,
    micro_operations,
    word,
)
from dledger.jepsen_like.history.columns import obs_table, ops_table
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

NAME: Final = "kafka"

LOST_WRITE: Final = "lost-write"
ABORTED: Final = "G1a"
PRECOMMITTED: Final = "precommitted-read"
POLL_SKIP: Final = "poll-skip"
POLL_BACK: Final = "nonmonotonic-poll"
SEND_BACK: Final = "nonmonotonic-send"
INT_POLL_SKIP: Final = "int-poll-skip"
INT_POLL_BACK: Final = "int-nonmonotonic-poll"
INT_SEND_SKIP: Final = "int-send-skip"
INT_SEND_BACK: Final = "int-nonmonotonic-send"

JEPSEN_NAMES: Final = {
    queue_log.INCONSISTENT_OFFSETS: "inconsistent-offsets",
    queue_log.DUPLICATE: "duplicate",
    queue_log.ABORTED_READ: ABORTED,
}
"""What the kernel finds and Jepsen has a name for; the rest keeps ours."""

REPORTED_MAX: Final = 8
"""Violations reported of each name."""
GAPS_MAX: Final = 4_000_000
"""Offsets of a key that no client saw; with more of them the kernel would hold 100 MB a key."""
_NUMBERED: Final = re.compile(r"\d{19}")
"""The number that stands for a value which is no integer."""
_OUTCOMES: Final = {"ok": Outcome.OK, "info": Outcome.INFO, "fail": Outcome.FAIL}
_FS: Final = ("send", "poll", "txn")
_ASSIGNS: Final = ("subscribe", "assign")


class Message(NamedTuple):
    """A message that was sent or found; *off* is `NOTHING` where the answer has none."""

    key: str
    off: int
    value: Any


@dataclass(slots=True)
class Step:
    """One attempt: what it sent and what its polls found, in order."""

    attempt: Attempt
    sends: list[Message] = field(default_factory=list)
    polls: list[Message] = field(default_factory=list)


class Log(NamedTuple):
    """The values of a key in the order of their offsets, one for each offset."""

    values: tuple[Any, ...]
    place: dict[Any, int]


def check(attempts: list[Attempt]) -> Verdict:
    """Return the verdict over a history of sends and polls.

    Raises:
        RecordError: A row is no send, poll or transaction of them.
    """
    steps = [step_of(one) for one in attempts if one.f in _FS]
    writers = _writers(steps)
    found: dict[str, list[Violation]] = {}
    reads = {(m.key, m.value) for step in steps for m in step.polls if step.attempt.kind != "fail"}
    sure = {id(step): _happened(step, reads) for step in steps}
    for violation in (
        *_by_kernel(steps),
        *_lost(steps, writers, sure),
        *_own(steps, writers),
        *_order(attempts, steps, sure),
        *_circular(steps, writers),
    ):
        found.setdefault(violation.name, []).append(violation)
    allowed = {INT_SEND_SKIP}
    if any(one.f == "subscribe" for one in attempts):
        allowed |= {POLL_SKIP, POLL_BACK}
    counts = {
        "sends": sum(len(step.sends) for step in steps),
        "polls": sum(bool(step.polls) for step in steps),
        "messages found": sum(len(step.polls) for step in steps),
        "unseen": len(_acknowledged(steps) - reads),
        **{name: len(found[name]) for name in sorted(allowed & found.keys())},
    }
    wrong = [
        violation
        for name, every in found.items()
        if name not in allowed
        for violation in every[:REPORTED_MAX]
    ]
    return judge(NAME, wrong, counts, looked_at=counts["messages found"])


def _acknowledged(steps: list[Step]) -> set[tuple[str, Any]]:
    return {(m.key, m.value) for s in steps if s.attempt.kind == "ok" for m in s.sends}


def _happened(step: Step, reads: set[tuple[str, Any]]) -> bool:
    """Return whether the sends of *step* certainly took effect."""
    kind = step.attempt.kind
    return kind == "ok" or (kind == "info" and any((m.key, m.value) in reads for m in step.sends))


# -- rows to steps -----------------------------------------------------------------------------


def step_of(one: Attempt) -> Step:
    """Return what *one* sent and found.

    Raises:
        RecordError: It is no send, poll or transaction of them.
    """
    step = Step(one)
    for name, *rest in micro_operations(one, one.value):
        if name == "send" and len(rest) == 2:
            step.sends.append(_sent(one, *rest))
        elif name == "poll" and len(rest) <= 1:
            step.polls += _polled(one, rest[0] if rest else None)
        else:
            raise RecordError(f"row {one.index} holds {name!r}, no send of a key and no poll")
    return step


def _sent(one: Attempt, key: Any, given: Any) -> Message:
    off = NOTHING
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise RecordError(f"row {one.index} sends no pair of an offset and a value")
        off, given = _offset(one, given[0]), given[1]
    return Message(key_of(key), off, _plain(one, given))


def _polled(one: Attempt, given: Any) -> Iterator[Message]:
    if given is None:
        return
    if not isinstance(given, dict):
        raise RecordError(f"row {one.index} polls no map of keys")
    for key, pairs in given.items():
        if not isinstance(pairs, tuple | list):
            raise RecordError(f"row {one.index} polls no list of messages")
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise RecordError(f"row {one.index} polls no pair of an offset and a value")
            yield Message(key_of(key), _offset(one, pair[0]), _plain(one, pair[1]))


def _offset(one: Attempt, given: Any) -> int:
    if given is None:
        return NOTHING
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < NEVER:
        raise RecordError(f"row {one.index} has the offset {edn_text(given)}")
    return given


def _plain(one: Attempt, given: Any) -> Any:
    try:
        hash(given)
    except TypeError:
        raise RecordError(f"row {one.index} holds a value that is a map") from None
    return word(given)


def _writers(steps: list[Step]) -> dict[tuple[str, Any], Step]:
    writers: dict[tuple[str, Any], Step] = {}
    for step in steps:
        for message in step.sends:
            place = (message.key, message.value)
            if writers.setdefault(place, step) is not step:
                raise RecordError(
                    f"row {step.attempt.index} sends {edn_text(message.value)} to {message.key} a "
                    "second time: values must be unique"
                )
    return writers


# -- offsets and times, by the kernel ----------------------------------------------------------


def _by_kernel(steps: list[Step]) -> Iterator[Violation]:
    keys = {m.key: None for step in steps for m in (*step.sends, *step.polls)}
    for key in keys:
        rows, indexes, names = rows_of(steps, key)
        _, found = queue_log.check_tables(ops_table("", rows), obs_table("", rows, ()), key)
        for one in found:
            name = JEPSEN_NAMES.get(one.name, one.name)
            known = tuple(indexes[op_id] for op_id in one.operations if op_id in indexes)
            detail = _NUMBERED.sub(lambda found: names.get(found[0], found[0]), one.detail)  # noqa: B023
            yield Violation(name, one.subject, detail, known, at_ns=one.at_ns)


class Rows(NamedTuple):
    """One key as rows of ours: their indexes in the history, and values that are no integers."""

    rows: list[Operation]
    indexes: dict[int, int]
    names: dict[str, str]


def rows_of(steps: Iterable[Step], key: str) -> Rows:
    """Return the rows of one key.

    Raises:
        RecordError: Its offsets have more gaps than the kernel can hold.
    """
    rows: list[Operation] = []
    indexes: dict[int, int] = {}
    numbers: dict[Any, int] = {}

    def add(one: Attempt, f: F, **given: Any) -> None:
        process = one.process if isinstance(one.process, int) and 0 <= one.process < 1 << 31 else 0
        indexes[len(rows)] = one.index
        outcome = _OUTCOMES[one.kind]
        stamps = (one.call, one.ret)
        rows.append(
            Operation(
                len(rows), len(rows), process, NOTHING, f, outcome, *stamps, "log", 0, **given
            )
        )

    def number(value: Any) -> int:
        plain = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 61
        return value if plain else numbers.setdefault(value, (1 << 61) + len(numbers))

    taken: set[int] = set()
    for step in steps:
        for message in step.sends:
            if message.key == key:
                add(step.attempt, F.SEND, off=message.off, value=number(message.value))
        if step.attempt.kind == "ok":
            for off, values in _runs([m for m in step.polls if m.key == key]):
                given = tuple(map(number, values))
                add(step.attempt, F.PULL, off=off, cnt=len(given), values=given)
                taken.update(range(off, off + len(given)))
        taken.update(m.off for m in step.sends if m.key == key and step.attempt.kind == "ok")
    gaps = max(taken, default=NOTHING) + 1 - len(taken - {NOTHING})
    if gaps > GAPS_MAX:
        raise RecordError(f"key {key} has {gaps:,} offsets that no client saw")
    for off in range(max(taken, default=NOTHING)):
        if off not in taken:
            unknown = Attempt(NOTHING, 0, "send", "info", 0, NEVER, None, None)
            add(unknown, F.SEND, value=(1 << 62) + off)
            del indexes[len(rows) - 1]
    return Rows(rows, indexes, {str(n): edn_text(value) for value, n in numbers.items()})


def _runs(found: list[Message]) -> Iterator[tuple[int, list[Any]]]:
    """Yield what one poll found as runs without a gap."""
    begin = NOTHING
    values: list[Any] = []
    for message in found:
        if message.off == NOTHING:
            continue
        if values and message.off == begin + len(values):
            values.append(message.value)
            continue
        if values:
            yield begin, values
        begin, values = message.off, [message.value]
    if values:
        yield begin, values


# -- the order of values -----------------------------------------------------------------------


def logs_of(steps: Iterable[Step], sure: dict[int, bool]) -> dict[str, Log]:
    """Return the order of the values of each key: of what polls found and of what was stored."""
    at: dict[str, dict[int, Any]] = {}
    for step in steps:
        stored = step.sends if sure[id(step)] else []
        for message in (*stored, *step.polls):
            if message.off != NOTHING:
                at.setdefault(message.key, {}).setdefault(message.off, message.value)
    logs: dict[str, Log] = {}
    for key, given in at.items():
        values = tuple(dict.fromkeys(given[off] for off in sorted(given)))
        logs[key] = Log(values, {value: place for place, value in enumerate(values)})
    return logs


def _lost(
    steps: list[Step], writers: dict[tuple[str, Any], Step], sure: dict[int, bool]
) -> Iterator[Violation]:
    """Yield what was stored before something that a poll found, and no poll found."""
    seen: dict[str, dict[Any, Step]] = {}
    for step in steps:
        if step.attempt.kind == "ok":
            for message in step.polls:
                seen.setdefault(message.key, {}).setdefault(message.value, step)
    for key, log in logs_of(steps, sure).items():
        polled = [log.place[value] for value in seen.get(key, ()) if value in log.place]
        last = max(polled, default=NOTHING)
        for value in log.values[: last + 1]:
            writer = writers.get((key, value))
            if value not in seen[key] and writer is not None and sure[id(writer)]:
                reader = seen[key][log.values[last]]
                text = (
                    f"row {writer.attempt.index} sent {edn_text(value)}, no poll found it, and "
                    f"row {reader.attempt.index} polled {edn_text(log.values[last])} behind it"
                )
                rows = (writer.attempt.index, reader.attempt.index)
                yield Violation(LOST_WRITE, key, text, rows, at_ns=reader.attempt.call)


def _own(steps: list[Step], writers: dict[tuple[str, Any], Step]) -> Iterator[Violation]:
    """Yield polls of a transaction that found what it sent itself."""
    for step in steps:
        for message in step.polls:
            if writers.get((message.key, message.value)) is step:
                index = step.attempt.index
                text = f"row {index} polls {edn_text(message.value)}, which it sends itself"
                yield Violation(PRECOMMITTED, message.key, text, (index,), at_ns=step.attempt.call)


def _order(
    attempts: list[Attempt], steps: list[Step], sure: dict[int, bool]
) -> Iterator[Violation]:
    """Yield polls and sends, of one attempt or of one process, that skip values or go back."""
    logs = logs_of(steps, sure)
    by_attempt = {id(step.attempt): step for step in steps}
    polled: dict[Any, dict[str, tuple[Attempt, Any]]] = {}
    sent: dict[Any, dict[str, tuple[Attempt, Any]]] = {}
    for one in attempts:
        if one.f in _ASSIGNS and one.kind != "fail":
            keys = _keys(one)
            for last in (polled, sent):
                kept = last.get(one.process, {})
                last[one.process] = {key: given for key, given in kept.items() if key in keys}
            continue
        step = by_attempt.get(id(one))
        if step is None:
            continue
        moved = _rebalanced(one)
        for key, found in _by_key(step.polls).items():
            if key not in moved:
                yield from _pairs(logs, key, one, found, INT_POLL_SKIP, INT_POLL_BACK)
            before = polled.setdefault(one.process, {})
            if key in before:
                yield from _pair(logs, key, before[key], (one, found[0]), POLL_SKIP, POLL_BACK)
            if one.kind == "ok":
                before[key] = (one, found[-1])
        for key, found in _by_key(step.sends).items() if one.kind != "fail" else ():
            yield from _pairs(logs, key, one, found, INT_SEND_SKIP, INT_SEND_BACK)
            before = sent.setdefault(one.process, {})
            if key in before:
                yield from _pair(logs, key, before[key], (one, found[0]), "", SEND_BACK)
            before[key] = (one, found[-1])


def _keys(one: Attempt) -> set[str]:
    given = one.value
    return {key_of(key) for key in given} if isinstance(given, tuple | list | frozenset) else set()


def _rebalanced(one: Attempt) -> set[str]:
    """Return the keys whose assignment changed while *one* was under way."""
    given = next((v for k, v in one.row.items() if word(k) == "rebalance-log"), None) or ()
    moved: set[str] = set()
    for event in given if isinstance(given, tuple | list) else ():
        for name, keys in event.items() if isinstance(event, dict) else ():
            if word(name) == "keys" and isinstance(keys, tuple | list):
                moved.update(map(key_of, keys))
    return moved


def _by_key(messages: Iterable[Message]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for message in messages:
        found.setdefault(message.key, []).append(message.value)
    return found


def _pairs(
    logs: dict[str, Log], key: str, one: Attempt, found: list[Any], skip: str, back: str
) -> Iterator[Violation]:
    for first, then in pairwise(found):
        yield from _pair(logs, key, (one, first), (one, then), skip, back)


def _pair(
    logs: dict[str, Log],
    key: str,
    before: tuple[Attempt, Any],
    after: tuple[Attempt, Any],
    skip: str,
    back: str,
) -> Iterator[Violation]:
    """Yield that the second value is not the next after the first; *skip* empty: it may skip."""
    (one, first), (other, then) = before, after
    log = logs.get(key)
    if log is None or first not in log.place or then not in log.place:
        return
    step = log.place[then] - log.place[first]
    if step < 1:
        name, what = back, "which is before it" if step else "the same"
    elif step > 1 and skip:
        between = log.values[log.place[first] + 1 : log.place[then]][:REPORTED_MAX]
        name, what = skip, f"and {', '.join(map(edn_text, between))} between them is left out"
    else:
        return
    text = (
        f"p{edn_text(other.process)} goes from {edn_text(first)} (row {one.index}) to "
        f"{edn_text(then)} (row {other.index}), {what}"
    )
    rows = tuple(dict.fromkeys((one.index, other.index)))
    yield Violation(name, key, text, rows, at_ns=other.call)


def _circular(steps: list[Step], writers: dict[tuple[str, Any], Step]) -> Iterator[Violation]:
    """Yield cycles of transactions each of which polled what the one before sent."""
    place = {id(step): at for at, step in enumerate(steps)}
    graph = Graph()
    for at, step in enumerate(steps):
        for message in step.polls if step.attempt.kind != "fail" else ():
            writer = writers.get((message.key, message.value))
            if writer is not None:
                text = f"sent {edn_text(message.value)} to {message.key}, which the other polled"
                graph.link(place[id(writer)], at, "wr", text)
    for cycle in cycles_of(graph):
        rows = tuple(steps[node].attempt.index for node in cycle.nodes)
        given = "; ".join(
            f"row {steps[a].attempt.index} {why} (row {steps[b].attempt.index})"
            for a, b, why in cycle.steps(graph)
        )
        subject = "a cycle of " + ", ".join(f"row {row}" for row in rows)
        yield Violation(cycle.name, subject, f"{given}: no order has all of that", rows)
