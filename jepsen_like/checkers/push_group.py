"""What a push group must come to: all is consumed, each queue has one owner, the counts are right.

A message may be consumed more than once, whenever a member ends or queues change hands; it may not
be left out. In order, no listener gets a message before the one in front of it was consumed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NOTHING

NAME: Final = "push_group"

LOST: Final = "message never consumed"
PHANTOM: Final = "consumed what is not in the queue"
NO_OWNER: Final = "queue without an owner"
TWO_OWNERS: Final = "queue with more than one owner"
NOT_COMMITTED: Final = "offset not committed to the end"
WRONG_COUNT: Final = "a member counts otherwise than its listener"
OUT_OF_ORDER: Final = "consumed before a message in front of it"
OF_PAUSED: Final = "polled of a queue that is paused"


@dataclass(frozen=True, slots=True)
class Consumed:
    """One message that a listener has dealt with; *began_ns*: when it got it."""

    member: str
    queue: int
    offset: int
    value: int
    at_ns: int
    began_ns: int = NOTHING


@dataclass(slots=True)
class PushRecord:
    """What is known of a group when a run is over.

    Attributes:
        stored: Queue → first offset kept and the values from there on.
        owners: Live member → the queues that it owns.
        counts: A run of a member → what it counted as consumed, what its listener did.
        of_paused: Member and queue of each poll that returned what it had paused.
    """

    consumed: list[Consumed] = field(default_factory=list)
    stored: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    owners: dict[str, frozenset[int]] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    of_paused: list[str] = field(default_factory=list)
    is_orderly: bool = False


def encode_record(record: PushRecord) -> bytes:
    """Return *record* as JSON."""
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> PushRecord:
    """Return what `encode_record` made *data* of. Raises msgspec.DecodeError: it is no record."""
    return msgspec.json.decode(data, type=PushRecord)


def never_consumed(record: PushRecord) -> set[int]:
    """Return the values that are stored and that no listener has dealt with."""
    there = {value for _, values in record.stored.values() for value in values}
    return there - {item.value for item in record.consumed}


def ownership(queues: Iterable[int], owners: Mapping[str, frozenset[int]]) -> dict[int, int]:
    """Return the queues that have not exactly one owner, and how many each has."""
    counts = Counter(queue for own in owners.values() for queue in own)
    return {queue: counts[queue] for queue in queues if counts[queue] != 1}


def check_record(record: PushRecord) -> Verdict:
    """Return the verdict over a group that was given time to settle."""
    found: list[Violation] = []
    lost = never_consumed(record)
    found += [
        Violation(LOST, "group", f"value {value:#x} is stored and was never consumed")
        for value in sorted(lost)
    ]
    for queue, count in sorted(ownership(record.stored, record.owners).items()):
        who = ", ".join(sorted(name for name, own in record.owners.items() if queue in own))
        found.append(
            Violation(
                TWO_OWNERS if count else NO_OWNER, f"queue {queue}", who or "no member has it"
            )
        )
    for queue, (begin, values) in sorted(record.stored.items()):
        end, committed = begin + len(values), record.committed.get(queue)
        if values and committed != end:
            text = f"{committed} is committed, the queue ends at {end}"
            found.append(Violation(NOT_COMMITTED, f"queue {queue}", text))
    for start, (counted, handled) in sorted(record.counts.items()):
        if counted != handled:
            text = f"it counts {counted}, its listener dealt with {handled}"
            found.append(Violation(WRONG_COUNT, start, text))
    found += [Violation(OF_PAUSED, "group", text) for text in record.of_paused]
    found += _phantoms(record)
    if record.is_orderly:
        found += _out_of_order(record)
    dealt_with = [item.value for item in record.consumed]
    counts = {
        "consumed": len(dealt_with),
        "more_than_once": len(dealt_with) - len(set(dealt_with)),
        "members": len({item.member for item in record.consumed}),
        "lost": len(lost),
    }
    return judge(NAME, found, counts, looked_at=len(dealt_with))


def _phantoms(record: PushRecord) -> list[Violation]:
    found = []
    for item in record.consumed:
        if item.queue not in record.stored:
            continue
        begin, values = record.stored[item.queue]
        place = item.offset - begin
        if place >= len(values) or (place >= 0 and values[place] != item.value):
            text = f"{item.member} consumed {item.value:#x} at {item.offset}"
            found.append(Violation(PHANTOM, f"queue {item.queue}", text, at_ns=item.at_ns))
    return found


def _out_of_order(record: PushRecord) -> list[Violation]:
    found = []
    newest: dict[int, int] = {}
    done_ns: dict[tuple[int, int], int] = {}
    for item in record.consumed:
        if item.queue not in record.stored:
            continue
        ahead = newest.get(item.queue, -1)
        before_ns = done_ns.get((item.queue, item.offset - 1), NOTHING)
        if item.offset > ahead + 1 or NOTHING < item.began_ns < before_ns:
            text = f"{item.member} consumed {item.offset} when {min(ahead + 1, item.offset - 1)} "
            found.append(
                Violation(OUT_OF_ORDER, f"queue {item.queue}", text + "was next", at_ns=item.at_ns)
            )
        newest[item.queue] = max(ahead, item.offset)
        done_ns.setdefault((item.queue, item.offset), item.at_ns)
    return found
