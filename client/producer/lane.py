"""The line of sends to one broker group, and what leaves in one request.

There is no linger: sends that wait while an earlier request to the same group is out leave
together as soon as the line is free. Records stand in one request grouped by queue; every send gets
its own result, also when one queue refuses and another accepts.

What comes back to the line stands where it stood. Requests of a producer that has an id leave in
the order of their sequences; where a session is lost nothing leaves until all its requests have
ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from dledger.client.core.route import MessageQueue
from dledger.client.producer.sequences import Sequences
from dledger.client.producer.state import SendSlot, SlotState
from dledger.commitlog.record import QUEUE_ID_OFFSET
from dledger.remoting.errors import RemoteProtocolError
from dledger.remoting.protocol.command import ExtFields
from dledger.remoting.protocol.headers import SendMessageResponseHeader

MAX_REQUEST_BYTES: Final = 1024 * 1024
"""A request carries at most this many record bytes, unless one batch alone is larger: it bounds
how long a small send waits behind others on the wire."""
MAX_REQUEST_RECORDS: Final = 4096
"""And at most this many records: it bounds the size of one log entry's table."""
MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
"""Per broker group. Beyond it a send waits: memory stays bounded when a group is slow."""
OVERHEAD_BYTES: Final = 512
"""What a waiting send costs besides its records; counted so that tiny messages are bounded too."""


@dataclass(slots=True)
class SendBatch:
    """What leaves in one request: runs of slots, each run for one queue.

    Attributes:
        runs: Queue and its slots in the order they were offered.
        is_alone: One slot that leaves as the request RocketMQ's own clients would send.
    """

    runs: list[tuple[MessageQueue, list[SendSlot]]]
    is_alone: bool = False

    @property
    def deadline(self) -> float:
        """Monotonic seconds at which the last of its senders gives up."""
        return max([slot.deadline for slot in self.slots()])

    @property
    def slot_count(self) -> int:
        """How many slots it has."""
        return sum([len(run) for _, run in self.runs])

    def slots(self) -> list[SendSlot]:
        """Return all slots in the order of their records."""
        return [slot for _, run in self.runs for slot in run]

    def live_slots(self) -> list[SendSlot]:
        """Return the slots that are not settled."""
        return [slot for slot in self.slots() if slot.state < SlotState.STORED]

    def without_settled(self) -> SendBatch:
        """Return what is left of it when the slots that are settled by now are taken out."""
        if not any(slot.settled for slot in self.slots()):
            return self
        return self.with_only(self.live_slots())

    def with_only(self, slots: Iterable[SendSlot]) -> SendBatch:
        """Return what is left of it when all but *slots* are taken out."""
        kept = set(slots)
        runs = [(queue, [slot for slot in run if slot in kept]) for queue, run in self.runs]
        return SendBatch([(queue, run) for queue, run in runs if run], self.is_alone)

    def run_list(self) -> list[list[Any]]:
        """Return the header's ``runs``: [topic, queue id, record count] each."""
        return [
            [queue.topic, queue.queue_id, sum([slot.count for slot in run])]
            for queue, run in self.runs
        ]

    def body(self) -> bytes:
        """Return size table and records, joined once."""
        slots = self.slots()
        parts = [slot.sizes for slot in slots]
        parts.extend([slot.records for slot in slots])
        return b"".join(parts)


def batch_of_one(slot: SendSlot) -> SendBatch:
    """Return *slot* as what leaves alone."""
    return SendBatch([(slot.queue, [slot])], is_alone=True)


@dataclass(frozen=True, slots=True)
class RunRefusal:
    """A run the broker did not take.

    Attributes:
        slots: Its sends; not settled yet; the engine decides their next step.
        code: Response code for this run.
    """

    slots: list[SendSlot]
    code: int
    remark: str


@dataclass(eq=False, repr=False, slots=True)
class Coalescer:
    """The sends waiting for one broker group."""

    max_request_bytes: int = MAX_REQUEST_BYTES
    max_request_records: int = MAX_REQUEST_RECORDS
    max_waiting_bytes: int = MAX_WAITING_BYTES
    _pending: deque[SendSlot] = field(default_factory=deque)
    _offered: int = 0
    _waiting: int = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all slots that are waiting, overhead included."""
        return self._waiting

    @property
    def has_space(self) -> bool:
        """Whether another send may be offered. One may overshoot; the next one waits."""
        return self._waiting < self.max_waiting_bytes

    def offer(self, slot: SendSlot) -> None:
        """Put *slot* at the end of the line."""
        slot.state = SlotState.WAITING
        slot.place = self._offered
        self._offered += 1
        self._waiting += len(slot.records) + OVERHEAD_BYTES
        self._pending.append(slot)

    def requeue(self, slots: Iterable[SendSlot]) -> None:
        """Put slots that were taken back to where they stood in the line."""
        pending, returned = self._pending, sorted(slots, key=_place)
        for slot in returned:
            if slot.state < SlotState.STORED:
                slot.state = SlotState.WAITING
            self._waiting += len(slot.records) + OVERHEAD_BYTES
        ahead: list[SendSlot] = []
        while returned and pending and pending[0].place < returned[-1].place:
            ahead.append(pending.popleft())
        pending.extendleft(sorted([*ahead, *returned], key=_place, reverse=True))

    def take(self, max_bytes: int | None = None) -> SendBatch | None:
        """Take the next request's worth of sends, oldest first; None when nothing waits.

        Args:
            max_bytes: Less than the usual limit of a request; one send goes whatever its size.

        Slots settled while they waited (abandoned, timed out) are dropped here.
        """
        pending = self._pending
        runs: dict[MessageQueue, list[SendSlot]] = {}
        records = 0
        nbytes = 0
        max_records = self.max_request_records
        limit = self.max_request_bytes
        max_bytes = limit if max_bytes is None else min(max_bytes, limit)
        waiting = self._waiting
        while pending:
            slot = pending[0]
            size = len(slot.records)
            if slot.state >= SlotState.STORED:
                pending.popleft()
                waiting -= size + OVERHEAD_BYTES
                continue
            if records and (records + slot.count > max_records or nbytes + size > max_bytes):
                break
            pending.popleft()
            waiting -= size + OVERHEAD_BYTES
            records += slot.count
            nbytes += size
            run = runs.get(slot.queue)
            if run is None:
                runs[slot.queue] = [slot]
            else:
                run.append(slot)
        self._waiting = waiting
        return SendBatch(list(runs.items())) if runs else None


def _place(slot: SendSlot) -> int:
    return slot.place


def settle_batch(
    batch: SendBatch, ext: Mapping[str, Any]
) -> tuple[list[SendSlot], list[RunRefusal]]:
    """Give every slot of an accepted run its offsets.

    Args:
        batch: What was sent.
        ext: Header fields of the answer with code 0.
    Returns:
        The slots now STORED, and the runs that were refused.
    Raises:
        RemoteProtocolError: The answer does not fit the request; the outcome is unknown and no
            slot was touched.
    """
    try:
        results = [(int(r[0]), int(r[1]), str(r[2]) if len(r) > 2 else "") for r in ext["results"]]
        # There is no position when every run was refused.
        phy_offset = int(ext.get("phy_offset", -1))
        store_host = bytes(ext.get("store_host", b""))
        grown_bytes = int(ext.get("grown_bytes", 0))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RemoteProtocolError(
            f"the broker's answer to SEND_RECORDS cannot be read: {error}"
        ) from error
    if len(results) != len(batch.runs):
        raise RemoteProtocolError(f"{len(results)} results for {len(batch.runs)} runs")
    stored: list[SendSlot] = []
    refused: list[RunRefusal] = []
    for (_, run), (code, base_offset, remark) in zip(batch.runs, results, strict=True):
        if code != 0:
            refused.append(RunRefusal(run, code, remark))
            continue
        for slot in run:
            if slot.state < SlotState.STORED:
                slot.base_offset = base_offset
                slot.phy_offset = phy_offset
                slot.store_host = store_host
                slot.grown_bytes = grown_bytes
                slot.state = SlotState.STORED
                stored.append(slot)
            base_offset += slot.count
            phy_offset += len(slot.records) + slot.count * grown_bytes
    return stored, refused


def settle_one(slot: SendSlot, code: int, ext: ExtFields) -> list[SendSlot]:
    """Give *slot*, which left alone, its place; return it if it is now STORED.

    Raises MQError: the answer cannot be read; the outcome is unknown and the slot was not touched.
    """
    header = SendMessageResponseHeader.decode(ext)
    slot.base_offset = header.queue_offset
    slot.offset_message_id = header.msg_id
    slot.recall_handle = header.recall_handle or ""
    slot.status = code
    if header.queue_id != slot.queue.queue_id:
        slot.queue = MessageQueue(slot.queue.topic, slot.queue.broker_name, header.queue_id)
    if slot.settled:
        return []
    slot.state = SlotState.STORED
    return [slot]


def moved_records(records: bytes, sizes: bytes, queue_id: int) -> bytes:
    """Return *records* with another queue id in each."""
    if not records:
        return records
    moved = bytearray(records)
    packed = queue_id.to_bytes(4, "big")
    start = 0
    for at in range(0, len(sizes), 4):
        moved[start + QUEUE_ID_OFFSET : start + QUEUE_ID_OFFSET + 4] = packed
        start += int.from_bytes(sizes[at : at + 4], "big")
    return bytes(moved)


PIPELINE_BYTES: Final = 128 << 10
"""With more than this waiting, requests of this size leave one after the other without waiting
for answers. Below it one larger request is cheaper than two."""


SOLOS_MIN: Final = 2
"""After this many requests of one send each the next send is not expected to have company."""


@dataclass(eq=False, repr=False, slots=True)
class Lane:
    """The line of sends to one broker group, and the requests of them that are open.

    Attributes:
        broker_name: The group.
        line: What waits.
        sequences: What requests are numbered by.
        records: Whether the broker takes records; None before the first connection.
        open: Requests that are not settled.
        is_entering: One has been taken and waits for a connection, a leader or a sequence; whatever
            left meanwhile could be numbered before it.
        is_closed: Nothing leaves it any more.
        _open_max: Requests open at a time; more than one only while much is waiting: then encoding,
            network and disk work at the same time.
    """

    broker_name: str
    line: Coalescer
    sequences: Sequences
    _open_max: int
    records: bool | None = None
    open: int = 0
    is_entering: bool = False
    is_closed: bool = False
    # The request that ended last held more than one send; else how many in a row held one.
    _is_crowded: bool = False
    _solos: int = 0
    _has_ended: bool = False
    _idle: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    _space: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    @property
    def may_leave(self) -> bool:
        """Whether the next request may leave.

        None does while requests of a lost session are open: their sends come back one request
        after the other, in any order, and stand before all others then.
        """
        return self._has_request and not (self.is_entering or self.sequences.is_draining)

    @property
    def _has_request(self) -> bool:
        line = self.line
        if not self.open:
            return bool(line)
        return self.open < self._open_max and line.waiting_bytes >= PIPELINE_BYTES

    def offer(self, slot: SendSlot) -> bool:
        """Put *slot* in line; return whether it is to leave in this turn. Never blocks."""
        self.line.offer(slot)
        if not self.open and self._solos >= SOLOS_MIN and not self.sequences.is_draining:
            return True
        if self._idle and self._has_request:
            self._idle.unpark()
        return False

    async def wait_for_space(self) -> None:
        """Return when another send may be offered, or none may ever."""
        while not (self.line.has_space or self.is_closed):
            await self._space.park()

    def close(self) -> None:
        """Let nothing wait for space any more."""
        self.is_closed = True
        self._space.unpark_all()

    async def ready(self) -> None:
        """Return when a request may leave, and senders that send again have put that in line."""
        while not self.may_leave:
            if self._has_request and not self.is_entering:
                await self.sequences.drained()
            else:
                await self._idle.park()
        if self._is_crowded:
            if self._has_ended:
                await trio.lowlevel.cancel_shielded_checkpoint()
            await trio.lowlevel.cancel_shielded_checkpoint()
        self._has_ended = False

    def entered(self) -> None:
        """End `is_entering`: the next request may leave."""
        self.is_entering = False
        if self._idle and self._has_request:
            self._idle.unpark()

    def take(self) -> SendBatch | None:
        """Return what leaves in the next request; None when no send waits any more."""
        much = self._open_max > 1 and self.line.waiting_bytes > PIPELINE_BYTES
        batch = self.line.take(PIPELINE_BYTES if much else None)
        if self._space:
            self._space.unpark_all()
        return batch

    def request_ended(self, sends: int) -> None:
        """Count a request of that many *sends* as settled: the next one may leave."""
        self.open -= 1
        self._is_crowded = sends > 1
        self._solos = 0 if self._is_crowded else self._solos + 1
        if self._has_request and self._idle:
            self._has_ended = True
            self._idle.unpark()
