"""Messages that are out: handed to a POP consumer, and not acknowledged.

The index of the entry that hands a message out is the token of that grant. What changes a message
names the token that it found; where another one stands by then, it has no effect. So whatever a
leader proposes, a message never has two grants that stand, and never comes again once it is
acknowledged. Times are store times of entries: no clock of a replica is part of the state.

Spec: docs/internals/state.md; docs/internals/decisions/0016-pop.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from dledger.state.table import Form, StateChange

PopKey = tuple[str, str, int]
"""Consumer group, topic, queue id."""

MAX_OUT_PER_QUEUE: Final = 10_000
"""Messages of one row: its snapshot has 48 bytes for each, and RocketMQ has the same limit."""

MAX_OUT: Final = 500_000
"""Messages of all rows: 24 MB of every snapshot."""

MAX_REQUEST_MODES: Final = 1_000
"""Modes of groups in topics."""

HAS_ROW: Final = -1
"""What a grant names in place of the committed offset where it found a row."""

POP_MODE: Final = "POP"
PULL_MODE: Final = "PULL"

_OUT: Final = struct.Struct(">6q")
_OUT_FIELDS: Final = 6


class Out(NamedTuple):
    """A grant that stands.

    Attributes:
        attempts: How often the message was handed out, this time included.
        token: Index of the entry that handed it out, or that changed its time.
        expires_ms: From this store time on it may be handed out again.
        attempt: `attempt_of` the receive that got it.
    """

    attempts: int
    token: int
    popped_ms: int
    expires_ms: int
    attempt: int = 0


def attempt_of(attempt_id: str | None) -> int:
    """Return what is kept of the id of a receive; 0: it has none, and is repeated by none."""
    if not attempt_id:
        return 0
    digest = blake2b(attempt_id.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


# ---------------------------------------------------------------------------------- what changes


class PopGrant(NamedTuple):
    """Messages of one queue handed out together.

    Attributes:
        since: Next offset of the row before; with no row the committed offset is not behind it.
        until: Next offset after. What lies between and is not in `fresh` is passed over.
        again: Offsets handed out once more, each with the token of the grant that is over.
        committed: Committed offset that was found with no row, None where there was none; `HAS_ROW`
            where there was a row.
        attempt: `attempt_of` the receive.
    """

    key: PopKey
    invisible_ms: int
    since: int
    until: int
    fresh: tuple[int, ...] = ()
    again: tuple[tuple[int, int], ...] = ()
    committed: int | None = None
    attempt: int = 0


class PopMark(NamedTuple):
    """A message that is done with, or is out for another time from now on.

    With *is_unseen* no consumer got it, and the newest attempt is none.
    """

    key: PopKey
    offset: int
    token: int
    invisible_ms: int = 0
    is_unseen: bool = False


class RequestMode(NamedTuple):
    """How a group's consumers get the messages of a topic."""

    group: str
    topic: str
    mode: str
    share: int = 0
    """`popShareQueueNum`: how many consumers share the queues of one; 0: all do."""


class PopChange(StateChange, frozen=True):
    """What one entry changes, in this order.

    ``dead`` is acknowledged like ``acked``; copies for the dead letter topic stand in the same
    entry.
    """

    acked: tuple[PopMark, ...] = ()
    dead: tuple[PopMark, ...] = ()
    changed: tuple[PopMark, ...] = ()
    grants: tuple[PopGrant, ...] = ()
    modes: tuple[RequestMode, ...] = ()


# ---------------------------------------------------------------------------------- the table


@dataclass(slots=True)
class PopRow:
    """Messages of one queue that are out for one group; at least one.

    Attributes:
        floor: Lowest offset not acknowledged; the group's committed offset.
        next_offset: Lowest offset never handed out.
        out: By offset, lowest first; what is between `floor` and `next_offset` and not here is
            acknowledged. Changed by `put` and `remove` alone.
    """

    floor: int
    next_offset: int
    out: dict[int, Out] = field(default_factory=dict)
    _ends: dict[int, dict[int, None]] = field(init=False, compare=False, repr=False)
    """End of an invisible time to the offsets that have it; no end without one."""
    _times: list[int] = field(init=False, compare=False, repr=False)
    """A heap of ends; one that no offset has means nothing, and one may stand here twice."""
    _attempts: dict[int, dict[int, None]] = field(init=False, compare=False, repr=False)
    """Attempt to the offsets that it got; none without one."""

    def __post_init__(self) -> None:
        self._ends, self._attempts = {}, {}
        for offset, out in self.out.items():
            self._ends.setdefault(out.expires_ms, {})[offset] = None
            if out.attempt:
                self._attempts.setdefault(out.attempt, {})[offset] = None
        self._times = list(self._ends)
        heapify(self._times)

    def put(self, offset: int, out: Out) -> None:
        """Enter a grant; it replaces one of the same message."""
        self._forget(offset)
        self.out[offset] = out
        if out.attempt:
            self._attempts.setdefault(out.attempt, {})[offset] = None
        offsets = self._ends.get(out.expires_ms)
        if offsets is None:
            offsets = self._ends[out.expires_ms] = {}
            heappush(self._times, out.expires_ms)
        offsets[offset] = None

    def remove(self, offset: int) -> None:
        """Take out a message that is out."""
        self._forget(offset)
        del self.out[offset]

    def of_attempt(self, attempt: int) -> list[int]:
        """Return the messages that a receive got, and that are out still."""
        return list(self._attempts.get(attempt, ()))

    def _forget(self, offset: int) -> None:
        out = self.out.get(offset)
        if out is None:
            return
        if out.attempt:
            got = self._attempts[out.attempt]
            del got[offset]
            if not got:
                del self._attempts[out.attempt]
        offsets = self._ends[out.expires_ms]
        del offsets[offset]
        if not offsets:
            del self._ends[out.expires_ms]
            if len(self._times) > 2 * len(self._ends) + 64:
                self._times = list(self._ends)
                heapify(self._times)

    def next_expiry_ms(self) -> int | None:
        """Return when the first message may be handed out again; None: none is out."""
        while self._times and self._times[0] not in self._ends:
            heappop(self._times)
        return self._times[0] if self._times else None

    def expired(self, now_ms: int) -> Iterator[int]:
        """Yield offsets whose time is over, that which ended first first.

        The row may not change meanwhile.
        """
        self.next_expiry_ms()  # drops what means nothing in front
        heap, before = self._times, None
        # The smallest entries of a heap hang together: only their children are looked at.
        border = [(heap[0], 0)] if heap else []
        while border and border[0][0] <= now_ms:
            end, place = heappop(border)
            if end != before:
                yield from self._ends.get(end, ())
            before = end
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(border, (heap[child], child))

    def is_idle(self, now_ms: int) -> bool:
        """Return whether the time of every message that is out is over."""
        return all(end <= now_ms for end in self._ends)

    def raise_floor(self) -> None:
        """Let the floor be the lowest offset that is out, or the next one."""
        if not self.out:
            self.floor = self.next_offset
        for _ in range(len(self.out)):
            if self.floor in self.out:
                return
            self.floor += 1
        if self.out:
            # A long piece was passed over: what is out is fewer than its offsets.
            self.floor = min(self.out)

    def copied(self) -> PopRowCopy:
        """Return what a snapshot keeps of the row; it shares nothing that changes."""
        return PopRowCopy(self.floor, self.next_offset, self.out.copy())

    @classmethod
    def from_state(cls, value: Iterable[Any]) -> PopRow:
        """Read what `PopRowCopy.to_state` made."""
        floor, next_offset, packed = value
        return cls(floor, next_offset, {at: Out(*rest) for at, *rest in _OUT.iter_unpack(packed)})


class PopRowCopy(NamedTuple):
    """A row as it was; it is packed in a worker thread, which takes fifty times as long."""

    floor: int
    next_offset: int
    out: Mapping[int, Out]

    def to_state(self) -> list[Any]:
        """Return the row as a snapshot keeps it."""
        offsets = sorted(self.out)
        columns = np.empty((len(offsets), _OUT_FIELDS), ">i8")
        columns[:, 0] = offsets
        flat = chain.from_iterable([self.out[offset] for offset in offsets])
        width = _OUT_FIELDS - 1
        columns[:, 1:] = np.fromiter(flat, np.int64, width * len(offsets)).reshape(-1, width)
        return [self.floor, self.next_offset, columns.tobytes()]


PopRows = dict[PopKey, PopRow]

POPS: Final = Form[PopKey, PopRow](
    "pops",
    PopKey,
    tuple[int, int, bytes],
    copied=PopRow.copied,
    encoded=PopRowCopy.to_state,
    decoded=PopRow.from_state,
    names=(0, 1),
    parts=lambda row: len(row.out),
)
REQUEST_MODES: Final = Form[tuple[str, str], RequestMode](
    "request_modes", tuple[str, str], RequestMode, names=(0, 1)
)
"""By topic and consumer group."""


def apply_pop(
    rows: PopRows,
    change: PopChange,
    index: int,
    store_time_ms: int,
    committed: Callable[[PopKey], int | None],
) -> dict[PopKey, int]:
    """Bring *rows* to what they are behind the entry *index*.

    Args:
        committed: Committed offset of a group in a queue.
    Returns:
        The keys of rows that changed, or went, and the offset of each that is committed now.
    """
    floors: dict[PopKey, int] = {}
    for mark in (*change.acked, *change.dead):
        row = rows.get(mark.key)
        if row is not None and _token(row, mark.offset) == mark.token:
            row.remove(mark.offset)
            floors[mark.key] = 0
    for mark in change.changed:
        row = rows.get(mark.key)
        if row is not None and _token(row, mark.offset) == mark.token:
            expires_ms = store_time_ms + mark.invisible_ms
            out = row.out[mark.offset]
            attempts = max(0, out.attempts - mark.is_unseen)
            row.put(
                mark.offset,
                Out(attempts, index, store_time_ms, expires_ms, out.attempt),
            )
            floors[mark.key] = 0
    for grant in change.grants:
        row = _row_for(rows, grant, committed)
        if row is not None:
            _hand_out(row, grant, index, store_time_ms)
            floors[grant.key] = 0
    for key in floors:
        row = rows[key]
        row.raise_floor()
        floors[key] = row.floor
        if not row.out:
            del rows[key]
    return floors


def _token(row: PopRow, offset: int) -> int | None:
    out = row.out.get(offset)
    return None if out is None else out.token


def _row_for(
    rows: PopRows, grant: PopGrant, committed: Callable[[PopKey], int | None]
) -> PopRow | None:
    """Return the row that a grant is for; None where it stands elsewhere than the grant found."""
    row = rows.get(grant.key)
    if row is not None or grant.until < grant.since:
        return row if row is not None and row.next_offset == grant.since <= grant.until else None
    offset = committed(grant.key)
    if offset != grant.committed or (offset is not None and offset > grant.since):
        return None
    row = rows[grant.key] = PopRow(grant.since, grant.since)
    return row


def _hand_out(row: PopRow, grant: PopGrant, index: int, store_time_ms: int) -> None:
    expires_ms = store_time_ms + grant.invisible_ms
    for offset, token in grant.again:
        out = row.out.get(offset)
        if out is not None and out.token == token and out.expires_ms <= store_time_ms:
            times = out.attempts + 1
            row.put(offset, Out(times, index, store_time_ms, expires_ms, grant.attempt))
    for offset in sorted(grant.fresh):
        if grant.since <= offset < grant.until:
            row.put(offset, Out(1, index, store_time_ms, expires_ms, grant.attempt))
    row.next_offset = grant.until
