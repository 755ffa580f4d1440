"""What an application sees of a fault, computed from the lines its load program wrote. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

SENT, FAILED, CONSUMED = "sent", "failed", "consumed"
ORDERED = "ordered"
STREAMS = ("plain", ORDERED)
"""What a client sends and consumes at the same time: any queue in turn, and one queue in order."""

REASONS_MAX = 5
"""Different errors kept of a stream."""
REASON_CHARS = 120
NUMBER = re.compile(r"\d+")
"""Addresses and durations would make each error another one."""


class Event(NamedTuple):
    """What happened to one message, and when by the machine's monotonic clock."""

    kind: str
    stream: str
    number: int
    at_ms: int
    reason: str = ""


def event_of(line: Mapping[str, Any]) -> Event:
    """Return the event of a line of a load program."""
    stream, _, number = line["key"].rpartition("-")
    return Event(line["kind"], stream, int(number), line["at_ms"], line["reason"])


class Window(NamedTuple):
    """When all streams ran, when the fault began, and when sending ended."""

    steady_ms: int
    fault_ms: int
    end_ms: int


def longest_gap_ms(times_ms: Iterable[int], begin_ms: int, end_ms: int) -> int:
    """Return the longest time without an event that reaches into a window.

    The last event before the window begins the first gap; the window's end ends the last one.
    """
    times = sorted(times_ms)
    before = [at for at in times if at < begin_ms]
    inside = [at for at in times if begin_ms <= at < end_ms]
    points = [before[-1] if before else begin_ms, *inside, end_ms]
    return max(later - earlier for earlier, later in pairwise(points))


@dataclass(frozen=True)
class Figures:
    """What one client saw of one stream in one run.

    Attributes:
        send_gap_ms: Longest time between acknowledgements from the fault on.
        consume_gap_ms: Longest time between consumptions from the fault on.
        delivery_ms: Longest time from an acknowledgement to a first consumption after the fault.
        idle_gap_ms: Longest of both gaps before the fault.
        acknowledged: Messages whose send succeeded.
        errors: Sends whose error reached the application.
        lost: Acknowledged messages that are not stored.
        twice: Messages that are stored more than once.
        reordered: Acknowledged messages of the ordered queue that are stored, or consumed for the
            first time, behind one sent later.
        unconsumed: Acknowledged and stored messages that were never consumed.
        reasons: The errors, with # for each number, and how often each came.
    """

    send_gap_ms: int
    consume_gap_ms: int
    delivery_ms: int
    idle_gap_ms: int
    acknowledged: int
    errors: int = 0
    lost: int = 0
    twice: int = 0
    reordered: int = 0
    unconsumed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


def figures_of(
    events: Iterable[Event], stream: str, stored: Sequence[int], window: Window
) -> Figures:
    """Return the figures of one stream of a client.

    Args:
        events: The client's, of all streams, in any order.
        stored: Numbers of the messages that its topic holds, each queue in its order.
    """
    mine = sorted((event for event in events if event.stream == stream), key=lambda e: e.at_ms)
    sent = {event.number: event.at_ms for event in mine if event.kind == SENT}
    failures = [NUMBER.sub("#", event.reason) for event in mine if event.kind == FAILED]
    consumptions = [event for event in mine if event.kind == CONSUMED]
    consumed = {event.number: event.at_ms for event in reversed(consumptions)}  # the first ones
    kinds = (list(sent.values()), [event.at_ms for event in consumptions])
    gaps = [longest_gap_ms(times, window.fault_ms, window.end_ms) for times in kinds]
    late = [at for at in consumed.items() if at[1] >= window.fault_ms and at[0] in sent]
    copies = Counter(stored)
    orders = (stored, [event.number for event in consumptions]) if stream == ORDERED else ()
    return Figures(
        send_gap_ms=gaps[0],
        consume_gap_ms=gaps[1],
        delivery_ms=max((at - sent[number] for number, at in late), default=0),
        idle_gap_ms=max(longest_gap_ms(each, window.steady_ms, window.fault_ms) for each in kinds),
        acknowledged=len(sent),
        errors=len(failures),
        lost=len(sent.keys() - copies.keys()),
        twice=sum(count > 1 for count in copies.values()),
        reordered=sum(_behind_later(order, sent) for order in orders),
        unconsumed=len(sent.keys() & copies.keys() - consumed.keys()),
        reasons=dict(Counter(text[:REASON_CHARS] for text in failures).most_common(REASONS_MAX)),
    )


def _behind_later(order: Iterable[int], sent: Mapping[int, int]) -> int:
    """Return how many acknowledged numbers stand behind a greater one, each at its first place."""
    highest = -1
    count = 0
    for number in dict.fromkeys(order):
        if number in sent:
            count += number < highest
            highest = max(highest, number)
    return count


def is_steady(events: Iterable[Event], since_ms: int, until_ms: int, gap_ms: int) -> bool:
    """Return whether every stream was sent and consumed without a gap as long as that."""
    times: dict[tuple[str, str], list[int]] = {
        (kind, stream): [] for kind in (SENT, CONSUMED) for stream in STREAMS
    }
    for event in events:
        times.get((event.kind, event.stream), []).append(event.at_ms)
    return all(longest_gap_ms(each, since_ms, until_ms) < gap_ms for each in times.values())
