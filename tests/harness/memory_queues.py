"""A cluster in memory, as a copy of queues asks one: with lost answers and refusals, on request."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import trio
from typing_extensions import Buffer

from dledger.client.core.errors import (
    BrokerUnreachableError,
    OffsetIllegalError,
    OffsetNotExpectedError,
    RequestTimedOutError,
)
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import encode_record, pack_host
from dledger.remoting.protocol.codes import ResponseCode
from tests.harness.stored_fields import with_store

STORE_HOST_V6 = pack_host("2001:db8::7", 10911)


class MemoryQueues:
    """Queues by name: the first offset that is kept, and all records there ever were."""

    def __init__(self, seed: int = 0, *, fault_rate: float = 0.0) -> None:
        self.begins: dict[MessageQueue, int] = {}
        self.first: dict[MessageQueue, int] = {}
        self.records: dict[MessageQueue, list[bytes]] = {}
        self.fault_rate = fault_rate
        self.appends = 0
        self._rng = Random(seed)

    # -- what producers and retention do

    def produce(self, queue: MessageQueue, body: bytes, *, store_host: bytes = b"") -> None:
        """Append a message with everything that a copy has to keep."""
        offset = self.end(queue)
        record = encode_record(
            topic=queue.topic,
            queue_id=queue.queue_id,
            body=body,
            properties=b"TAGS\x01t\x02KEYS\x01k%d\x02UNIQ_KEY\x01u%d\x02" % (offset, offset),
            flag=offset % 7,
            born_timestamp_ms=1_700_000_000_000 + offset,
            born_host=pack_host("10.1.2.3", 4000 + offset % 100),
            reconsume_times=offset % 3,
            queue_offset=offset,
            phy_offset=offset * 1000,
            store_timestamp_ms=1_700_000_001_000 + offset,
            store_host=store_host or pack_host("10.9.9.9", 10911),
        )
        self.records.setdefault(queue, []).append(record)

    def keep_from(self, queue: MessageQueue, offset: int) -> None:
        """Give up what stands before *offset*."""
        self.begins[queue] = max(self.begin_of(queue), min(offset, self.end(queue)))

    def make_again(self, queue: MessageQueue) -> None:
        """Delete the topic and make it again."""
        for table in (self.begins, self.first, self.records):
            table.pop(queue, None)

    def begin_of(self, queue: MessageQueue) -> int:
        """Return the first offset that is kept."""
        return self.begins.get(queue, self.first.get(queue, 0))

    def end(self, queue: MessageQueue) -> int:
        """Return one past the last offset."""
        return self.first.get(queue, 0) + len(self.records.get(queue, ()))

    def record(self, queue: MessageQueue, offset: int) -> bytes:
        """Return a record, kept or not."""
        return self.records[queue][offset - self.first.get(queue, 0)]

    # -- what a copy asks

    async def bounds(self, queue: MessageQueue) -> tuple[int, int]:
        await self._asked()
        return self.begin_of(queue), self.end(queue)

    async def read(
        self, queue: MessageQueue, offset: int, max_bytes: int, max_messages: int = 4096
    ) -> list[memoryview]:
        await self._asked()
        begin, end = self.begin_of(queue), self.end(queue)
        if not begin <= offset <= end:
            raise OffsetIllegalError(
                f"{offset}", next_begin_offset=begin, min_offset=begin, max_offset=end
            )
        found: list[memoryview] = []
        size = 0
        for at in range(offset, min(end, offset + max_messages)):
            record = self.record(queue, at)
            size += len(record)
            if found and size > max_bytes:
                break
            found.append(memoryview(record))
        return found

    async def append(self, queue: MessageQueue, offset: int, records: Sequence[Buffer]) -> int:
        await self._asked()
        self._expect(queue, offset)
        self.appends += 1
        place = 5_000_000 + 100 * self.appends
        self.records.setdefault(queue, []).extend(
            with_store(record, place, 1_800_000_000_000, pack_host("10.8.8.8", 1))
            for record in records
        )
        await self._answered()
        return offset + len(records)

    async def begin(self, queue: MessageQueue, offset: int) -> None:
        await self._asked()
        self._expect(queue, 0)
        self.first[queue] = offset
        await self._answered()

    def _expect(self, queue: MessageQueue, offset: int) -> None:
        if self.end(queue) != offset:
            raise OffsetNotExpectedError(
                f"{queue} ends at {self.end(queue)}, not at {offset}",
                code=ResponseCode.OFFSET_NOT_EXPECTED,
                next_offset=self.end(queue),
            )

    async def _asked(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._rng.random() < self.fault_rate:
            raise BrokerUnreachableError("no leader")

    async def _answered(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._rng.random() < self.fault_rate:
            raise RequestTimedOutError("no answer")
