"""What POP reads of queues and log: which messages match, their bytes, copies of those given up.

An answer is the log's own bytes but for one field: a message that was handed out before shows how
often in its `reconsumeTimes`. The checksum of a record covers its body alone.

Spec: docs/internals/decisions/0016-pop.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from dledger.broker_errors import TableFullError
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.record import Layout, check_bodies
from dledger.filters.errors import DamagedMessageError
from dledger.filters.expiry import LivingFilter
from dledger.filters.property_filter import MAX_SCANNED_UNITS, PropertyFilter, scan
from dledger.group_api import BrokerGroup, starts_in_memory
from dledger.processors.answers import RefusedError
from dledger.processors.client_table import TagCodes
from dledger.processors.destination import Destinations
from dledger.processors.get_message import MIN_SCAN_UNITS, SCAN_FACTOR
from dledger.processors.pull import PullProcessor
from dledger.processors.send_back import dead_letter_copy
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.pop_decision import DeadLetter, Found, Receive
from dledger.services.pop_lines import HandedOut
from dledger.services.queue_locks import QueueLocks
from dledger.services.stored_record import StoredRecords
from dledger.services.throughput import Throughput
from dledger.settings.parts import BrokerSettings
from dledger.state.pop import PopKey

Wants = tuple[TagCodes | None, PropertyFilter | None]
"""What filters: hashes of tags, or an expression over properties, or neither."""

Living = Callable[[str, TagCodes | None, PropertyFilter | None], Wants]
"""Returns a topic's filter, and that messages have not expired."""

_MAX_TIMES: Final = 0x7FFFFFFF


@dataclass(eq=False, repr=False)
class PopMessages:
    """Implements `dledger.services.pop_decision.PopReader`.

    *living*: adds to a request's filter what the topic needs at the time of each look: a request
    that waits was made when the topic may have had no messages that expire.
    """

    _group: BrokerGroup
    _topics: TopicView
    _settings: BrokerSettings
    _destinations: Destinations
    _offsets: OffsetCommits
    _pulls: PullProcessor
    _locks: QueueLocks
    _throughput: Throughput
    _living: Living

    def is_young(self, topic: str, queue_id: int) -> bool:
        """Return whether a queue still has its first message, and that in memory."""
        return starts_in_memory(self._group, topic, queue_id, self._settings.recent_bytes)

    def may_pop(self, key: PopKey) -> bool:
        """Return whether the queue is there, stays, and is not consumed by pulls."""
        config = self._topics.config(key[1])
        group = self._topics.subscription_group(key[0])
        return (
            config is not None
            and config.readable
            and 0 <= key[2] < config.read_queue_nums
            and not self._topics.pending.removes(key[1])
            and not self._topics.pending_groups.removes(key[0])
            # The group may have been paused since the request came.
            and (group is None or group.consume_enable)
            and not self._locks.is_held(key)
            and not self._offsets.is_on_its_way(key)
            and not self._is_overtaken(key)
            and not self._pulls.holds(*key)
        )

    def _is_overtaken(self, key: PopKey) -> bool:
        """Return whether a taken offset has to be applied first: a grant cannot take it over."""
        if not self._offsets.waits(key):
            return False
        start, committed = self.start(key), self.committed(key)
        goes_back = start is not None and committed is not None and start < committed
        return goes_back or key in self._group.state.pops

    def start(self, key: PopKey) -> int | None:
        """Return the newest committed offset, one that is not proposed yet included."""
        return self._offsets.offset(*key)

    def committed(self, key: PopKey) -> int | None:
        """Return the committed offset that is applied."""
        return self._group.state.consumer_offset(*key)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the first offset kept and the next one."""
        bounds = self._group.state.queues.get((topic, queue_id))
        return (0, 0) if bounds is None else (bounds.min_offset, bounds.max_offset)

    def size_of(self, topic: str, queue_id: int, offset: int) -> int | None:
        """Return the bytes of a message; None when it is not kept any more."""
        place = self._place(topic, queue_id, offset)
        return None if place is None else place[1]

    def _place(self, topic: str, queue_id: int, offset: int) -> tuple[int, int] | None:
        low, high = self.bounds(topic, queue_id)
        if not low <= offset < high:
            return None
        units = self._group.queues.queue(topic, queue_id).read(offset, 1)
        return (int(units["phy_offset"][0]), int(units["size"][0])) if len(units) else None

    def find(
        self, receive: Receive, queue_id: int, offset: int, wanted: int, max_bytes: int
    ) -> Found:
        """Return messages that match: at most *wanted* and *max_bytes*, but one in any case."""
        _, high = self.bounds(receive.topic, queue_id)
        assert isinstance(receive.wants, tuple)
        codes, wants = self._living(receive.topic, *receive.wants)
        most = wanted if codes is None else max(MIN_SCAN_UNITS, SCAN_FACTOR * wanted)
        if wants is not None:
            most = MAX_SCANNED_UNITS
        units = self._group.queues.queue(receive.topic, queue_id).read(
            offset, min(high - offset, most)
        )
        if not len(units):
            return Found((), 0, offset)
        scanned, cost = len(units), 0
        if wants is not None:
            try:
                matching = scan(self._group.log.read, units, wanted, wants)
            except DamagedMessageError as error:
                self._group.report_damage(error.position, error.size)
                raise
            places, scanned = np.array(matching.places, np.int64), matching.scanned
            cost = matching.cost
            if isinstance(wants, LivingFilter):
                self._throughput.expired += wants.take_passed_over()
        elif codes is not None:
            places = np.flatnonzero(np.isin(units["tags_code"], codes))
        else:
            places = np.arange(len(units))
        if len(places) > wanted:
            places = places[:wanted]
            scanned = int(places[-1]) + 1
        ends = units["size"][places].astype(np.int64).cumsum()
        if len(ends) and int(ends[-1]) > max_bytes:
            count = max(1, int(ends.searchsorted(max_bytes, side="right")))
            places, ends = places[:count], ends[:count]
            scanned = int(places[-1]) + 1
        offsets = tuple((places + offset).tolist())
        return Found(offsets, int(ends[-1]) if len(ends) else 0, offset + scanned, cost)

    def dead_letter(self, key: PopKey, offset: int, attempts: int) -> DeadLetter | None:
        """Return the copy of a message that was handed out too often; None: not now."""
        group, topic, queue_id = key
        place = self._place(topic, queue_id, offset)
        if place is None:
            return None
        try:
            name, create = self._destinations.dead_letter_topic(group)
            record = StoredRecords(self._group).read(place[0])
            copy, run = dead_letter_copy(record, self._settings.store_host, name, times=attempts)
        except (
            RefusedError,
            TableFullError,
            CorruptEntryError,
            CorruptRecordError,
            OffsetOutOfRangeError,
        ):
            return None
        return DeadLetter(copy, run, create)

    def read(
        self, messages: Iterable[HandedOut], *, in_order: bool = False
    ) -> tuple[list[HandedOut], bytes]:
        """Return those of *messages* that can be read, and their records back to back.

        One that is not kept any more, or is damaged, is left out: it is handed out again when its
        time is over. With *in_order* those behind it in its queue are left out, too.

        Raises CorruptRecordError, CorruptEntryError, OffsetOutOfRangeError: none can be read.
        """
        there: list[HandedOut] = []
        parts: list[bytes | memoryview] = []
        failure: MQError | None = None
        cut = set[PopKey]()
        for message in messages:
            if message.key in cut:
                continue
            try:
                record = self._record(message)
            except (CorruptRecordError, CorruptEntryError, OffsetOutOfRangeError) as error:
                failure = error
                if in_order:
                    cut.add(message.key)
                continue
            times = message.out.attempts - 1
            parts.append(_counted(record, times) if times else record)
            there.append(message)
        if failure is not None and not there:
            raise failure
        return there, b"".join(parts)

    def _record(self, message: HandedOut) -> memoryview:
        (_, topic, queue_id), offset, _ = message
        place = self._place(topic, queue_id, offset)
        if place is None:
            raise OffsetOutOfRangeError(f"message {offset} of {topic} {queue_id} is not kept")
        record = self._group.log.read(*place)
        try:
            check_bodies(record)
        except CorruptRecordError as error:
            self._group.report_damage(*place)
            raise DamagedMessageError(
                f"message {offset} of {topic} {queue_id} is damaged on this broker's disk and is"
                " being repaired",
                *place,
            ) from error
        return record


def _counted(record: memoryview, times: int) -> bytes:
    """Return a record with *times* added to how often it was consumed again."""
    copied = bytearray(record)
    at = Layout.at(copied).reconsume_times
    before = int.from_bytes(copied[at : at + 4], "big", signed=True)
    copied[at : at + 4] = min(before + times, _MAX_TIMES).to_bytes(4, "big", signed=True)
    return bytes(copied)
