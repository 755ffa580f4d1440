"""What services of a leader have in common: how a message is built, and how an entry is stored.

A service reads what is due, builds one record for each message, proposes them together with its
own progress, and waits until that is applied. This module has the rules about what may go wrong:

- The stored bytes are damaged: they are repaired with another member's copy, the message waits.
  Where no other member exists, it is set aside when the damage has lasted.
- Nothing can be made of the message: it is set aside.
- The entry is certainly not stored: the service pauses and reads again.
- No majority takes the entry in time: the service waits until it is applied, or the leadership is
  over.

*Set aside* is: a dead letter with the reason takes the message's place in the entry, together with
the progress, so that it happens once. Where the stored bytes are damaged for good there is nothing
to copy: then a note that names their place is the dead letter. Only what stops the node leaves this
module as an error: a contradiction inside the applied state, or a log that cannot be read here.

Delay levels and timers share more: which of the messages that became due go into one entry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import ClassVar, Final

import structlog

from dledger.broker_errors import (
    NotLeaderError,
    PendingFullError,
    ShuttingDownError,
    UnknownOutcomeError,
)
from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    CorruptStoreError,
    DiskFullError,
    LocalProtocolError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.properties import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_SET_ASIDE_BY,
    PROPERTY_SET_ASIDE_POSITION,
    PROPERTY_SET_ASIDE_REASON,
    PROPERTY_UNIQ_KEY,
    encode_properties,
    get_property,
    with_properties,
)
from dledger.commitlog.record import (
    PHY_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_TRANSACTION_MASK,
    encode_record,
)
from dledger.group_api import STOPS_NODE, AppliedListener, BrokerGroup, Proposed, QueueTouched
from dledger.remoting.protocol.topic_names import SET_ASIDE_TOPIC
from dledger.remoting.seams import Clock
from dledger.services.delayed_message import (
    Delivery,
    RealQueue,
    delivered_message,
    delivery_batch,
    same_queue,
)
from dledger.services.stored_record import StoredBytes, StoredRecord, StoredRecords, copy_of
from dledger.state.state_record import (
    TopicsChange,
    behind_heads,
    state_record,
)
from dledger.state.table import StateChange
from dledger.state.topics import PERM_READ, PERM_WRITE, TopicConfig
from dledger.waiting import WakeAll

SET_ASIDE_RUN: Final = Run(SET_ASIDE_TOPIC, 0, 1)

MAX_REASON_CHARS: Final = 200
"""Of a reason: it may quote what a client sent."""

_UNIQ_KEY_BYTES: Final = 255
"""A longer key is not copied when there is no space for all properties."""


def set_aside_copy(record: StoredRecord, service: str, reason: str) -> bytes:
    """Return the dead letter for *record*, with its body, and its properties if there is space.

    Args:
        service: Which one could not process it.
        reason: Why; cut where it is long.
    Raises:
        CorruptRecordError: The body does not fit its checksum.
    """
    return copy_of(
        record,
        SET_ASIDE_RUN,
        properties=fitting_properties(
            record.properties, set_aside_properties(record.phy_offset, service, reason)
        ),
        sys_flag=record.sys_flag & ~SYS_FLAG_TRANSACTION_MASK,
        prepared_transaction_offset=0,
    )


def fitting_properties(properties: bytes, added: Mapping[str, str]) -> bytes:
    """Return *properties* with *added*; without space for all of them UNIQ_KEY and *added*."""
    found = with_properties(properties, added)
    if len(found) <= MAX_PROPERTIES_BYTES:
        return found
    key = get_property(properties, PROPERTY_UNIQ_KEY.encode()) or b""
    kept = b""
    if key and len(key) <= _UNIQ_KEY_BYTES:
        kept = b"%b\x01%b\x02" % (PROPERTY_UNIQ_KEY.encode(), key)
    return with_properties(kept, added)


def set_aside_note(position: int, service: str, reason: str) -> bytes:
    """Return the dead letter for a message that cannot be copied: it names where it stands."""
    return encode_record(
        topic=SET_ASIDE_TOPIC,
        queue_id=SET_ASIDE_RUN.queue_id,
        body=f"The message at position {position} of the log cannot be copied.".encode(),
        properties=encode_properties(set_aside_properties(position, service, reason)),
    )


def set_aside_properties(position: int, service: str, reason: str) -> dict[str, str]:
    """Return the properties that name the service that set a message aside, the reason, and its
    place."""
    plain = "".join(each if each.isprintable() else "?" for each in reason[:MAX_REASON_CHARS])
    return {
        PROPERTY_SET_ASIDE_BY: service,
        PROPERTY_SET_ASIDE_REASON: plain or "unknown",
        PROPERTY_SET_ASIDE_POSITION: str(position),
    }


RETRY_S: Final = 1.0
"""Pause after the log took nothing (full disk, too much pending); the messages wait, they are
kept."""

DAMAGE_FINAL_S: Final = 60.0
"""How long a group of one member reads a damaged entry again before what stands in it is set
aside: a disk that comes back does it sooner."""

DAMAGED_MAX: Final = 1024
"""Damaged entries whose time is kept; what is beyond waits until one of them is forgotten."""

NOT_STORED: Final = (PendingFullError, DiskFullError, NotLeaderError, ShuttingDownError)
"""What `BrokerGroup.submit` raises when nothing was stored, and the next try may be."""

logger = structlog.get_logger(__name__)


class Fate(Enum):
    """What became of an entry."""

    APPLIED = auto()
    NOT_STORED = auto()
    """Certainly: `pause`, then look again."""
    LEADERSHIP_OVER = auto()
    """The next leader finds in its applied state what became of it."""


@dataclass(eq=False, repr=False)
class LeaderLoop:
    """The common part of one service; its calls are awaited one at a time in each task."""

    _group: BrokerGroup
    _clock: Clock
    name: str
    is_deleting: Callable[[str], bool] = lambda _topic: False

    def __post_init__(self) -> None:
        self._damaged: dict[int, float] = {}
        self._open = 0
        self._settled = WakeAll()

    async def run(self, listener: AppliedListener, serve: Callable[[int], Awaitable[None]]) -> None:
        """Run *serve* with the term that this member leads in; without one return at once.

        *listener* is called after each applied entry. What an earlier run proposed is settled.
        """
        leadership = self._group.leadership
        if leadership is None:
            return
        self._group.on_applied.append(listener)
        try:
            while self._open:
                await self._settled.wait()
            await serve(leadership.term)
        finally:
            self._group.on_applied.remove(listener)

    def leads(self, term: int) -> bool:
        """Whether the leadership of *term* goes on."""
        leadership = self._group.leadership
        return leadership is not None and leadership.term == term

    # -- one message -----------------------------------------------------------------------

    def build(
        self,
        records: StoredRecords,
        position: int,
        make: Callable[[StoredRecords], Delivery | None],
    ) -> Delivery | None:
        """Return what *make* returns for the message at *position*, or the dead letter instead.

        None: the message has to wait, by *make* or since its bytes are being repaired.

        Raises:
            InvariantBroken: *make* found the applied state in contradiction with itself.
            CorruptStoreError, FlushFailedError: The log of this node cannot be read as it is, and
                another member may have the message.
        """
        try:
            return make(records)
        except STOPS_NODE as error:
            if isinstance(error, CorruptStoreError) and not self._group.has_other_members:
                return self._note(position, str(error))
            raise
        except CorruptEntryError as error:
            if not self._is_final(position, error):
                return None
            return self._note(position, str(error))
        except (CorruptRecordError, OffsetOutOfRangeError) as error:
            # The entry is whole: the message does not stand there.
            return self._note(position, str(error))
        except Exception as error:  # noqa: BLE001  # whatever a message holds, it ends no service
            reason = str(error) or type(error).__name__
            try:
                copy = set_aside_copy(records.read(position), self.name, reason)
            except Exception:  # noqa: BLE001  # then there is nothing that could be copied
                return self._note(position, reason)
            return Delivery(SET_ASIDE_TOPIC, 0, copy, position, reason)

    def _note(self, position: int, reason: str) -> Delivery:
        note = set_aside_note(position, self.name, reason)
        return Delivery(SET_ASIDE_TOPIC, 0, note, position, reason)

    def _is_final(self, position: int, error: CorruptEntryError) -> bool:
        """Whether the damage at *position* will not be repaired."""
        now = self._clock.monotonic()
        try:
            index = self._group.log.index_of(position)
        except OffsetOutOfRangeError:
            return True
        since = self._damaged.get(index)
        if since is None:
            if len(self._damaged) >= DAMAGED_MAX:
                del self._damaged[min(self._damaged)]
            since = self._damaged[index] = now
            logger.error(
                "service_reads_damaged_entry",
                service=self.name,
                index=index,
                position=position,
                error=str(error),
            )
        return not self._group.has_other_members and now - since >= DAMAGE_FINAL_S

    async def pause(self) -> None:
        """Let the reason go away why the log took nothing."""
        await self._clock.sleep(RETRY_S)

    # -- one entry -------------------------------------------------------------------------

    async def store_deliveries(
        self, deliveries: Sequence[Delivery], change: StateChange, *, term: int
    ) -> Fate:
        """Store *deliveries*, dead letters among them, and the progress *change* in one entry.

        Cancellation: The entry may still be stored; the next `run` waits for it.
        """
        if any(item.reason for item in deliveries) and self.is_deleting(SET_ASIDE_TOPIC):
            return Fate.NOT_STORED
        try:
            fate = await self.store(self._with_topic(deliveries, change), term=term)
        except LocalProtocolError as error:
            # Together they take half an entry at most: it is one message, larger than an entry
            # may be by now.
            deliveries = [self._note(item.position, str(error)) for item in deliveries]
            fate = await self.store(self._with_topic(deliveries, change), term=term)
        if fate is Fate.APPLIED:
            for item in deliveries:
                if item.reason:
                    self.was_set_aside(item.position, item.reason)
        return fate

    def _with_topic(self, deliveries: Sequence[Delivery], change: StateChange) -> RecordBatch:
        batch = delivery_batch(deliveries, change)
        is_there = self._group.state.topic_config(SET_ASIDE_TOPIC) is not None
        if is_there or not any(item.reason for item in deliveries):
            return batch
        config = TopicConfig(SET_ASIDE_TOPIC, 1, 1, PERM_READ | PERM_WRITE)
        return behind_heads([state_record(TopicsChange(put=(config,)))], batch)

    def was_set_aside(self, position: int, reason: str) -> None:
        """Count and log a message whose dead letter is stored."""
        self._group.service_counts.set_aside[self.name] += 1
        logger.error(
            "message_set_aside",
            service=self.name,
            position=position,
            reason=reason,
            topic=SET_ASIDE_RUN.topic,
        )

    async def store(self, batch: RecordBatch, *, term: int) -> Fate:
        """Propose *batch*, once, and return when it is known what became of it.

        Raises:
            LocalProtocolError: It is larger than an entry may be; nothing was stored.
        Cancellation: As `store_deliveries`.
        """
        outcomes: list[Proposed] = []

        def settled(proposed: Proposed) -> None:
            self._open -= 1
            outcomes.append(proposed)
            self._settled.set()

        self._open += 1
        reason = ""
        try:
            await self._group.submit(batch, [settled])
        except UnknownOutcomeError as error:
            reason = str(error)
            while not outcomes:
                await self._settled.wait()
        except (*NOT_STORED, LocalProtocolError) as error:
            reason = str(error)
            if not outcomes:  # not even proposed
                self._open -= 1
            if isinstance(error, LocalProtocolError):
                raise
        if not self.leads(term):
            return Fate.LEADERSHIP_OVER
        if outcomes and outcomes[0].outcome == "stored":
            return Fate.APPLIED
        logger.warning("service_waits", service=self.name, reason=reason)
        return Fate.NOT_STORED


# -------------------------------------------------------------------- delay levels and timers


MAX_DELIVERIES_PER_ENTRY: Final = 128
"""Messages of one delivery entry, 10 ms or so: a leader sends heartbeats between two of them."""

MAX_DELIVERY_BYTES: Final = 1 << 20
"""Bytes of one delivery entry, one message at least: an entry must stay far below a segment."""

LONGEST_SLEEP_S: Final = 60.0
"""The wall clock is read again after this long, in case it was set during the wait."""


@dataclass(slots=True)
class DueEntry:
    """What one step does: *deliveries* in the place of *chosen*; the others wait."""

    deliveries: list[Delivery] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    unready: list[int] = field(default_factory=list)
    """Those that are being repaired, or that *make* lets stay where they are."""


@dataclass(eq=False, repr=False)
class DeliveryService:
    """Moves due messages to their real queues.

    Args:
        is_deleting: Whether the removal of a topic is in flight: its messages wait until it is
            applied, since no queue offset can be assigned in that topic before.
        entry_bytes_max: Largest entry of the group. What is delivered together takes half of it at
            most, so that the note and what encoding adds have space; one message always fits, as
            the settings are checked.
    """

    name: ClassVar[str]
    """In dead letters, logs and metrics."""

    _group: BrokerGroup
    _clock: Clock
    is_deleting: Callable[[str], bool] = lambda _topic: False
    real_queue: RealQueue = same_queue
    entry_bytes_max: int = 2 * MAX_DELIVERY_BYTES

    def __post_init__(self) -> None:
        self._bytes_max = min(MAX_DELIVERY_BYTES, self.entry_bytes_max // 2)
        self._loop = LeaderLoop(self._group, self._clock, self.name, is_deleting=self.is_deleting)

    async def run(self) -> None:
        """Deliver until cancelled. Run it inside the leadership's nursery, once per leadership.

        Cancellation: An entry in flight may still be stored; the next leader sees what it did.
        """
        await self._loop.run(self._on_applied, self._serve)

    def _on_applied(self, touched: Sequence[QueueTouched]) -> None:
        raise NotImplementedError

    async def _serve(self, term: int) -> None:
        raise NotImplementedError

    def _entry_of(
        self,
        units: Iterable[tuple[int, int, int]],
        make: Callable[[int, int, StoredRecords], Delivery | None],
        *,
        in_order: bool = False,
    ) -> DueEntry:
        """Return messages for one entry, and what does not go with them.

        Args:
            units: Offset, position and size of each.
            make: From position and offset to what is stored; None: the message stays.
            in_order: None goes before one that has to wait.
        """
        entry, size, records = DueEntry(), 0, StoredRecords(self._group)
        for offset, position, record_bytes in units:
            is_full = bool(entry.chosen) and size + record_bytes > self._bytes_max
            is_held = in_order and bool(entry.left or entry.unready)
            if is_full or is_held or records.is_tired:
                entry.left.append(offset)
                continue
            delivery = self._loop.build(records, position, partial(make, position, offset))
            if delivery is None:
                entry.unready.append(offset)
            elif self.is_deleting(delivery.topic):
                entry.left.append(offset)
            else:
                entry.deliveries.append(delivery)
                entry.chosen.append(offset)
                size += record_bytes
        return entry

    def _delivered(
        self, queue_id: int, position: int, offset: int, records: StoredRecords
    ) -> Delivery:
        data = records.bytes_at(position)
        check_place(data, position, queue_id, offset)
        return delivered_message(data, self.real_queue)


def check_place(data: StoredBytes, position: int, queue_id: int, offset: int) -> None:
    """Raise CorruptRecordError where another message stands than that of *queue_id*, *offset*."""
    queue = int.from_bytes(data[QUEUE_ID_OFFSET : QUEUE_ID_OFFSET + 4], "big")
    found = int.from_bytes(data[QUEUE_OFFSET_OFFSET:PHY_OFFSET_OFFSET], "big")
    if (queue, found) != (queue_id, offset):
        raise CorruptRecordError(f"another record than message {offset} stands at {position}")
