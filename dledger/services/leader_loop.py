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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

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
from dledger.commitlog.record import SYS_FLAG_TRANSACTION_MASK, encode_record
from dledger.group_api import STOPS_NODE, AppliedListener, BrokerGroup, Proposed
from dledger.remoting.protocol.topic_names import SET_ASIDE_TOPIC
from dledger.remoting.seams import Clock
from dledger.services.delayed_message import Delivery, delivery_batch
from dledger.services.stored_record import StoredRecord, StoredRecords, copy_of
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

    @contextmanager
    def listening(self, listener: AppliedListener) -> Iterator[None]:
        """Hear of applied entries inside; *listener* is called after each."""
        self._group.on_applied.append(listener)
        try:
            yield
        finally:
            self._group.on_applied.remove(listener)

    def leads(self, term: int) -> bool:
        """Whether the leadership of *term* goes on."""
        leadership = self._group.leadership
        return leadership is not None and leadership.term == term

    # -- one message -----------------------------------------------------------------------

    def build(
        self, records: StoredRecords, position: int, make: Callable[[StoredRecords], Delivery]
    ) -> Delivery | None:
        """Return what *make* returns for the message at *position*, or the dead letter instead.

        None: the message has to wait, its bytes are being repaired.

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

        Cancellation: The entry may still be stored; `settle` before the next one is built.
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

    async def settle(self) -> None:
        """Wait until every entry is settled whose wait was broken off."""
        while self._open:
            await self._settled.wait()
