"""Which messages a POP consumer gets, and what becomes of its acknowledgements: decided, not done.

All decisions of one entry are made together, on what is applied. A message that one request of the
entry touches is left alone by the others. One whose time is over is handed out again before new
ones, or goes to the dead letter topic in the same entry when its group allows no more.

Spec: docs/internals/decisions/0016-pop.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from dledger.commitlog.entry import Run
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.filters.property_filter import MAX_SCAN_COST
from dledger.remoting.protocol.pop_requests import revive_queue_of
from dledger.state.pop import (
    HAS_ROW,
    MAX_OUT,
    MAX_OUT_PER_QUEUE,
    PopChange,
    PopGrant,
    PopKey,
    PopMark,
    PopRow,
    RequestMode,
)
from dledger.state.topics import TopicConfig

MAX_MESSAGES_PER_ENTRY: Final = 4_096
"""Messages that one entry hands out or marks: some 5 ms of apply on each replica. A grant that only
passes messages over counts as one: a new group may begin at the end of tens of thousands of queues.
"""

MAX_REQUESTS_PER_ENTRY: Final = 256
"""Requests looked at for one entry, whether or not they get something: 10 ms of the event loop."""

MAX_SCAN_COST_PER_ENTRY: Final = MAX_SCAN_COST
"""What filters may cost in one decision, over all its requests and queues: as much as in one pull,
beside one more queue; nothing else runs meanwhile."""

MAX_DEAD_BYTES_PER_ENTRY: Final = 1 << 20
"""Copies for dead letter topics in one entry; what is left waits for the next one."""

MAX_EXPIRED_LOOKED_AT: Final = 256
"""Messages that one request finds removed or spent in one queue, each with a read."""

MAX_SET_ASIDE: Final = 100_000
"""Spent messages that are remembered because they have no copy now: 20 MB; they are tried again
some time later anyway."""

SpentKey = tuple[PopKey, int, int]
"""Queue, offset and token of a message that was handed out as often as its group allows."""


class Found(NamedTuple):
    """Messages of a queue behind an offset that a consumer wants."""

    offsets: tuple[int, ...]
    size_bytes: int
    until: int
    """What stands before it was looked at."""
    scan_cost: int = 0
    """What reading properties took, of `MAX_SCAN_COST`."""


class DeadLetter(NamedTuple):
    """A copy for the dead letter topic of a group, and that topic if it has to be made."""

    record: bytes
    run: Run
    create: TopicConfig | None


class PopReader(Protocol):
    """What is read of queues and log for a decision."""

    def find(
        self, receive: Receive, queue_id: int, offset: int, wanted: int, max_bytes: int
    ) -> Found:
        """Return messages that match: at most *wanted* and *max_bytes*, but one in any case."""

    def size_of(self, topic: str, queue_id: int, offset: int) -> int | None:
        """Return the bytes of a message; None when it is not kept any more."""

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the first offset kept and the next one."""

    def start(self, key: PopKey) -> int | None:
        """Return the newest committed offset of a group without messages out."""

    def committed(self, key: PopKey) -> int | None:
        """Return the committed offset that is applied."""

    def is_young(self, topic: str, queue_id: int) -> bool:
        """Return whether a queue still has its first message, and that in memory."""

    def may_pop(self, key: PopKey) -> bool:
        """Return whether the queue is there, stays, and is not consumed by pulls."""

    def dead_letter(self, key: PopKey, offset: int, attempts: int) -> DeadLetter | None:
        """Return the copy of a message; None: it cannot be made now."""


@dataclass(slots=True, kw_only=True, eq=False)
class Receive:
    """A request for messages.

    Attributes:
        queue_ids: Where to look, in this order.
        max_bytes: Of messages, one in any case.
        from_end: A group without an offset begins where the queue ends.
        young_from_begin: But for a queue that is young: there it begins where the queue does.
        retries: How often a message may be handed out after its first time.
        attempt: Of a request that may be repeated; see `dledger.state.pop.attempt_of`.
    """

    group: str
    topic: str
    queue_ids: tuple[int, ...]
    wanted: int
    max_bytes: int
    invisible_ms: int
    is_fifo: bool = False
    from_end: bool = False
    young_from_begin: bool = False
    retries: int = 16
    attempt: int = 0
    wants: object = None


class Receipt(NamedTuple):
    """A message as its consumer names it."""

    key: PopKey
    offset: int
    pop_time_ms: int
    revive_queue_id: int


@dataclass(slots=True, eq=False)
class Planned:
    """What one entry does to one queue."""

    next_offset: int
    touched: set[int] = field(default_factory=set)
    granted: int = 0


class Overdue:
    """Offsets of a queue whose time is over, in the order they are tried."""

    __slots__ = ("_offsets", "_place", "_read")

    def __init__(self, offsets: Iterator[int]) -> None:
        self._offsets = offsets
        self._read: list[int] = []
        self._place = 0

    def first(self) -> int | None:
        """Return the next one; None: there is none."""
        if self._place == len(self._read):
            offset = next(self._offsets, None)
            if offset is None:
                return None
            self._read.append(offset)
        return self._read[self._place]

    def go_on(self) -> None:
        """Pass the one that `first` returned."""
        self._place += 1

    def copy(self) -> Overdue:
        """Return one that goes on from here and leaves this one where it is."""
        other = Overdue(self._offsets)
        other._read, other._place = self._read, self._place
        return other


@dataclass(slots=True, eq=False)
class PopDecision:
    """Requests decided so far, for one entry.

    Args:
        now_ms: The leader's date; never before the newest store time.
        set_aside: Spent messages that had no copy a short time ago: they are passed over. More are
            entered.
    """

    rows: Mapping[PopKey, PopRow]
    reader: PopReader
    now_ms: int
    out: int
    """Messages that are out, of all rows."""
    set_aside: set[SpentKey] = field(default_factory=set)
    planned: dict[PopKey, Planned] = field(default_factory=dict)
    """By the queues that the entry touches."""
    acked: list[PopMark] = field(default_factory=list)
    dead: list[PopMark] = field(default_factory=list)
    changed: list[PopMark] = field(default_factory=list)
    grants: list[PopGrant] = field(default_factory=list)
    modes: list[RequestMode] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)
    passed_over: set[tuple[str, str]] = field(default_factory=set)
    """Groups and topics of queues that may be received from a little later."""
    overdue: dict[PopKey, Overdue] = field(default_factory=dict)
    requests: int = 0
    messages: int = 0
    dead_bytes: int = 0
    scan_cost: int = 0

    @property
    def change(self) -> PopChange | None:
        """What the entry changes; None: nothing."""
        change = PopChange(
            tuple(self.acked),
            tuple(self.dead),
            tuple(self.changed),
            tuple(self.grants),
            tuple(self.modes),
        )
        return None if change == PopChange() else change

    @property
    def is_full(self) -> bool:
        """Return whether the entry holds as much as one may."""
        return (
            self.requests >= MAX_REQUESTS_PER_ENTRY
            or self.messages >= MAX_MESSAGES_PER_ENTRY
            or self.dead_bytes >= MAX_DEAD_BYTES_PER_ENTRY
            or self.scan_cost >= MAX_SCAN_COST_PER_ENTRY
        )

    # ------------------------------------------------------------------------------ receipts

    def acknowledge(self, receipts: Iterable[Receipt]) -> list[bool]:
        """Plan to acknowledge messages; tell of each whether its receipt is that of its grant."""
        return [self._mark(receipt, self.acked) for receipt in receipts]

    def change_time(self, receipt: Receipt, invisible_ms: int, is_unseen: bool = False) -> bool:
        """Plan another end for the time that a message is out; as `acknowledge`."""
        return self._mark(receipt, self.changed, invisible_ms, is_unseen)

    def _mark(
        self, receipt: Receipt, marks: list[PopMark], invisible_ms: int = 0, is_unseen: bool = False
    ) -> bool:
        row = self.rows.get(receipt.key)
        out = None if row is None else row.out.get(receipt.offset)
        if (
            row is None
            or out is None
            or out.popped_ms != receipt.pop_time_ms
            or revive_queue_of(out.token) != receipt.revive_queue_id
        ):
            return False
        planned = self._planned(receipt.key, row.next_offset)
        if receipt.offset in planned.touched:
            return False
        planned.touched.add(receipt.offset)
        marks.append(PopMark(receipt.key, receipt.offset, out.token, invisible_ms, is_unseen))
        self.messages += 1
        return True

    def _planned(self, key: PopKey, next_offset: int) -> Planned:
        planned = self.planned.get(key)
        if planned is None:
            planned = self.planned[key] = Planned(next_offset)
        return planned

    # ------------------------------------------------------------------------------ messages

    def receive(self, receive: Receive) -> list[PopGrant]:
        """Plan to hand messages out; return the grants, none where there is nothing now.

        A request that is repeated, since its answer may be lost, gets what it got, for its whole
        time from now on; that is no further attempt.

        Raises CorruptRecordError, CorruptEntryError, OffsetOutOfRangeError: a queue is unreadable,
        and the others have nothing.
        """
        granted = self._repeated(receive) if receive.attempt else []
        if granted:
            return granted
        damage: MQError | None = None
        wanted, max_bytes = receive.wanted, receive.max_bytes
        for queue_id in receive.queue_ids:
            if wanted <= 0 or max_bytes <= 0 or self.is_full:
                break
            try:
                grant, size_bytes = self._from_queue(receive, queue_id, wanted, max_bytes)
            except (CorruptRecordError, CorruptEntryError, OffsetOutOfRangeError) as error:
                damage = error
                continue
            if grant is None:
                continue
            self.grants.append(grant)
            count = len(grant.fresh) + len(grant.again)
            self.messages += max(1, count)
            wanted -= count
            max_bytes -= size_bytes
            if count:
                granted.append(grant)
        if damage is not None and not granted:
            raise damage
        return granted

    def _repeated(self, receive: Receive) -> list[PopGrant]:
        """Plan another end for what this request got, and has not been acknowledged."""
        granted: list[PopGrant] = []
        for queue_id in receive.queue_ids:
            key = (receive.group, receive.topic, queue_id)
            row = self.rows.get(key)
            if row is None:
                continue
            got = [
                offset
                for offset in row.of_attempt(receive.attempt)
                if row.out[offset].expires_ms > self.now_ms
                and not (key in self.planned and offset in self.planned[key].touched)
            ]
            if not got:
                continue
            for offset in got:
                token = row.out[offset].token
                self.changed.append(PopMark(key, offset, token, receive.invisible_ms))
            self._planned(key, row.next_offset).touched.update(got)
            self.messages += len(got)
            at = row.next_offset
            granted.append(PopGrant(key, receive.invisible_ms, at, at, tuple(got)))
        return granted

    def _from_queue(
        self, receive: Receive, queue_id: int, wanted: int, max_bytes: int
    ) -> tuple[PopGrant | None, int]:
        key = (receive.group, receive.topic, queue_id)
        if not self.reader.may_pop(key):
            self.passed_over.add(key[:2])
            return None, 0
        row, planned = self.rows.get(key), self.planned.get(key)
        if receive.is_fifo and (
            planned is not None or (row is not None and not row.is_idle(self.now_ms))
        ):
            return None, 0
        again, size_bytes = self._again(receive, key, row, wanted, max_bytes)
        wanted, max_bytes = wanted - len(again), max_bytes - size_bytes
        low, high = self.reader.bounds(receive.topic, queue_id)
        since = self._next_offset(receive, key, row, planned, high)
        found = Found((), 0, since)
        if self.out >= MAX_OUT and max(since, low) < high:
            self.passed_over.add(key[:2])  # an end in another row wakes nothing here
        may_be_out = min(
            MAX_OUT_PER_QUEUE - (len(row.out) if row is not None else 0) - _granted(planned),
            MAX_OUT - self.out,
        )
        wanted = min(wanted, may_be_out)
        if receive.is_fifo and self._has_others(key, row, len(again)):
            wanted = 0
        if wanted > 0 and max_bytes > 0 and max(since, low) < high:
            found = self.reader.find(receive, queue_id, max(since, low), wanted, max_bytes)
            self.scan_cost += found.scan_cost
        # A new group's end of the queue is committed: what arrives from now on is behind it.
        begins = (
            planned is None
            and row is None
            and self._from_end(receive, queue_id)
            and self.reader.start(key) is None
        )
        if not again and found.until <= since and not begins:
            return None, 0
        planned = self._planned(key, since)
        planned.next_offset = max(found.until, since)
        planned.granted += len(again) + len(found.offsets)
        planned.touched.update(offset for offset, _ in again)
        self.out += len(found.offsets)
        grant = PopGrant(
            key,
            receive.invisible_ms,
            since,
            planned.next_offset,
            found.offsets,
            tuple(again),
            HAS_ROW if row is not None else self.reader.committed(key),
            receive.attempt,
        )
        return grant, size_bytes + found.size_bytes

    def _has_others(self, key: PopKey, row: PopRow | None, again: int) -> bool:
        """Return whether messages stay out besides those that are handed out again."""
        planned = self.planned.get(key)
        ended = len(planned.touched) if planned is not None else 0
        return row is not None and len(row.out) > again + ended

    def _next_offset(
        self, receive: Receive, key: PopKey, row: PopRow | None, planned: Planned | None, high: int
    ) -> int:
        if planned is not None:
            return planned.next_offset
        if row is not None:
            return row.next_offset
        start = self.reader.start(key)
        if start is None:
            return high if self._from_end(receive, key[2]) else 0
        return min(start, high)

    def _from_end(self, receive: Receive, queue_id: int) -> bool:
        """Return whether a group without an offset begins where a queue ends."""
        return receive.from_end and not (
            receive.young_from_begin and self.reader.is_young(receive.topic, queue_id)
        )

    def _again(
        self, receive: Receive, key: PopKey, row: PopRow | None, wanted: int, max_bytes: int
    ) -> tuple[list[tuple[int, int]], int]:
        """Return messages whose time is over; those that were out too often become dead letters."""
        again: list[tuple[int, int]] = []
        if row is None:
            return again, 0
        planned = self.planned.get(key)
        touched = planned.touched if planned is not None else frozenset[int]()
        overdue = self._overdue(receive, key, row)
        total = looked_at = 0
        while len(again) < wanted and not (again and total >= max_bytes) and not self.is_full:
            offset = overdue.first()
            if offset is None:
                break
            out = row.out[offset]
            is_spent = out.attempts > receive.retries
            has_no_copy = looked_at >= MAX_EXPIRED_LOOKED_AT or (
                (key, offset, out.token) in self.set_aside
            )
            if offset in touched or (is_spent and has_no_copy and not receive.is_fifo):
                # Those behind a spent one do not wait for its copy.
                overdue.go_on()
                continue
            size_bytes = self.reader.size_of(receive.topic, key[2], offset)
            if size_bytes is None or is_spent:
                looked_at += 1
                if looked_at > MAX_EXPIRED_LOOKED_AT or not self._give_up(
                    receive, key, row, offset, is_kept=size_bytes is not None
                ):
                    break
            elif again and total + size_bytes > max_bytes:
                break
            else:
                again.append((offset, out.token))
                total += size_bytes
            overdue.go_on()
        if looked_at >= MAX_EXPIRED_LOOKED_AT:
            self.passed_over.add(key[:2])
        return again, total

    def _overdue(self, receive: Receive, key: PopKey, row: PopRow) -> Overdue:
        overdue = self.overdue.get(key)
        if overdue is None or receive.is_fifo:
            # In order: all of them are over then, and the lowest goes first.
            offsets = iter(row.out) if receive.is_fifo else row.expired(self.now_ms)
            overdue = self.overdue[key] = Overdue(offsets)
        return overdue

    def _give_up(
        self, receive: Receive, key: PopKey, row: PopRow, offset: int, *, is_kept: bool
    ) -> bool:
        """Plan the end of a message that is not kept or is spent; tell whether to go on."""
        if not is_kept:
            # Retention has taken it: there is nothing to hand out or to copy.
            self._end(key, row, offset, self.acked)
            return True
        out = row.out[offset]
        letter = self.reader.dead_letter(key, offset, out.attempts)
        if letter is not None:
            self._end(key, row, offset, self.dead)
            self.letters.append(letter)
            self.dead_bytes += len(letter.record)
            return True
        if receive.is_fifo:
            return False
        if len(self.set_aside) < MAX_SET_ASIDE:
            self.set_aside.add((key, offset, out.token))
        return True

    def _end(self, key: PopKey, row: PopRow, offset: int, marks: list[PopMark]) -> None:
        self._planned(key, row.next_offset).touched.add(offset)
        marks.append(PopMark(key, offset, row.out[offset].token))
        self.messages += 1

    def has_messages(self, receive: Receive) -> bool:
        """Return whether `receive` would hand anything out or give anything up; plans nothing."""
        keys = [(receive.group, receive.topic, queue_id) for queue_id in receive.queue_ids]
        planned = {
            key: Planned(item.next_offset, set(item.touched), item.granted)
            for key in keys
            if (item := self.planned.get(key)) is not None
        }
        overdue = {key: due.copy() for key in keys if (due := self.overdue.get(key)) is not None}
        look = PopDecision(
            self.rows, self.reader, self.now_ms, self.out, self.set_aside, planned, overdue=overdue
        )
        granted = look.receive(receive)
        self.passed_over |= look.passed_over
        self.scan_cost += look.scan_cost
        # What is full has not looked everywhere.
        return bool(granted or look.dead or look.is_full) or any(
            grant.until < self.reader.bounds(receive.topic, grant.key[2])[1]
            for grant in look.grants
        )


def _granted(planned: Planned | None) -> int:
    return 0 if planned is None else planned.granted
