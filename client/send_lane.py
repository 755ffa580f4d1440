"""Sends to one broker group: coalesced into requests, retried, each settled with its own result.

The lane is the only thing that moves slots between "waiting", "in flight" and "settled"; it wakes
the task that waits for a slot when it settles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from client.client_instance import ClientInstance, Link
from client.coalescer import Coalescer, SendBatch, SendSlot, SlotState, settle_batch
from client.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    MessageIllegalError,
    UnknownOutcomeError,
)
from client.retry import FailureKind, Retry, RetryPolicy, RetrySchedule, Where, failure_of_code
from client.route import MessageQueue
from commitlog.errors import LocalProtocolError, RemoteProtocolError
from commitlog.record import QUEUE_ID_OFFSET
from remoting.errors import ConnectionLostError, RequestTimedOutError, TooManyInFlightError
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, SerializeType, request
from remoting.protocol.headers import SendMessageResponseHeader

PIPELINE_BYTES: Final = 128 << 10
"""With more than this waiting, requests of this size leave one after the other without waiting
for answers. Below it one larger request is cheaper than two."""

STORED_CODES: Final = frozenset({0, 10, 11, 12})
"""Response codes that mean the message is in the log."""


@dataclass(slots=True)
class SendCounters:
    """What a producer has done so far; for tests and people.

    Attributes:
        requests: Requests that went out.
        records: Messages in them.
        attempts: Sends put into a request, retries included.
        retries: Sends that got another attempt.
        stored: Messages known to be stored.
    """

    requests: int = 0
    records: int = 0
    attempts: int = 0
    retries: int = 0
    stored: int = 0


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How a lane sends.

    Attributes:
        group: Producer group.
        policy: Retries.
        attempt_timeout_s: One request.
        default_topic_queue_nums: For topics that are created by the send.
        requests_in_flight: Requests to one group at the same time, more than one only when much
            is waiting. 1 keeps the order of concurrent sends to a queue whatever happens.
    """

    group: str
    policy: RetryPolicy
    attempt_timeout_s: float
    default_topic_queue_nums: int
    requests_in_flight: int


EncodeSingle = Callable[[SendSlot], RemotingCommand]
"""Builds the RocketMQ request (310 or 320) for a slot."""
Elsewhere = Callable[[SendSlot], MessageQueue | None]
"""Finds a queue on another broker for a slot that may move; None when there is none."""
NoteSend = Callable[[str, float, bool], None]
"""Told after each request: broker name, how long it took in ms, whether it failed."""


class SendLane:
    """The sends of one producer to one broker group."""

    def __init__(
        self,
        instance: ClientInstance,
        broker_name: str,
        coalescer: Coalescer,
        options: LaneOptions,
        counters: SendCounters,
        *,
        encode_single: EncodeSingle,
        elsewhere: Elsewhere,
        lane_of: Callable[[str], SendLane],
        note_send: NoteSend,
    ) -> None:
        self.broker_name = broker_name
        self.coalescer = coalescer
        self.records: bool | None = None
        self._instance = instance
        self._clock = instance.clock
        self._options = options
        self._counters = counters
        self._encode_single = encode_single
        self._elsewhere = elsewhere
        self._lane_of = lane_of
        self._note_send = note_send
        self._idle = trio.lowlevel.ParkingLot()
        self._ahead = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._in_flight: dict[SendSlot, None] = {}
        self._crowd = False

    # ------------------------------------------------------------------------------ offering

    def offer(self, slot: SendSlot) -> None:
        """Put *slot* in line. Never blocks."""
        self.coalescer.offer(slot)
        if self._idle:
            self._idle.unpark()
        elif self._ahead and self.coalescer.waiting_bytes >= PIPELINE_BYTES:
            self._ahead.unpark()

    async def wait_for_room(self) -> None:
        """Return when another send may be offered."""
        while not self.coalescer.has_room:
            await self._room.park()

    def live_slots(self) -> list[SendSlot]:
        """Return every slot that waits or is in flight here."""
        return [
            slot for slot in (*self.coalescer.waiting_slots(), *self._in_flight) if not slot.settled
        ]

    # ------------------------------------------------------------------------------ sending

    async def run(self, *, ahead: bool = False) -> None:
        """Send what is offered, for ever.

        Args:
            ahead: One of those that send while another request is in flight, and only when much
                is waiting: then encoding, network and disk work at the same time.
        """
        coalescer = self.coalescer
        pipelined = self._options.requests_in_flight > 1
        while True:
            while ahead and coalescer.waiting_bytes < PIPELINE_BYTES:
                await self._ahead.park()
            while not coalescer:
                await self._idle.park()
            if self._crowd and not ahead:
                # Those whose sends just ended offer their next ones now; take them along.
                await trio.lowlevel.cancel_shielded_checkpoint()
                await trio.lowlevel.cancel_shielded_checkpoint()
            much = pipelined and coalescer.waiting_bytes > PIPELINE_BYTES
            batch = coalescer.take(PIPELINE_BYTES if much else None)
            if self._ahead and coalescer.waiting_bytes >= PIPELINE_BYTES:
                self._ahead.unpark()
            if self._room:
                self._room.unpark_all()
            if batch is None:
                continue
            slots = batch.slots()
            self._in_flight.update(dict.fromkeys(slots))
            try:
                await self._attempt(batch, slots)
            finally:
                for slot in slots:
                    self._in_flight.pop(slot, None)
            self._crowd = len(slots) > 1

    async def _attempt(self, batch: SendBatch, slots: list[SendSlot]) -> None:
        instance, clock, name = self._instance, self._clock, self.broker_name
        began = clock.monotonic()
        timeout_s = min(
            self._options.attempt_timeout_s, max([slot.deadline for slot in slots]) - began
        )
        address = instance.leaders.address(name)
        term = instance.leaders.term(name)
        remark = ""
        code = -1
        if address is None:
            kind = FailureKind.NOT_LEADER
            remark = f"nobody is known to lead {name}"
        else:
            try:
                link = await instance.link(address, timeout_s)
                switched = self.records is False
                self.records = link.records
                if switched or not link.records:
                    await self._one_by_one(slots)
                    return
                response = await self._send(link, batch, slots, timeout_s)
                if response.code == ResponseCode.SUCCESS:
                    stored, refused = settle_batch(batch, response.ext)
                    self._settled(stored)
                    self._note_send(name, (clock.monotonic() - began) * 1000, False)
                    for run in refused:
                        await self._again(
                            [s for s in run.slots if not s.settled],
                            failure_of_code(run.code),
                            run.remark,
                            run.code,
                            address,
                            term,
                        )
                    return
                kind = instance.note_refusal(name, address, response)
                code, remark = response.code, response.remark or ""
            except (BrokerUnreachableError, ClientClosedError) as error:
                kind, remark = FailureKind.UNREACHABLE, str(error)
            except TooManyInFlightError as error:
                kind, remark = FailureKind.BUSY, str(error)
            except ConnectionLostError as error:
                kind = FailureKind.UNKNOWN if error.sent else FailureKind.UNREACHABLE
                remark = str(error)
            except (RequestTimedOutError, RemoteProtocolError) as error:
                kind, remark = FailureKind.UNKNOWN, str(error)
            except LocalProtocolError as error:
                kind, remark = FailureKind.FINAL, str(error)
            self._note_send(name, (clock.monotonic() - began) * 1000, True)
        await self._again([s for s in slots if not s.settled], kind, remark, code, address, term)

    async def _send(
        self, link: Link, batch: SendBatch, slots: list[SendSlot], timeout_s: float
    ) -> RemotingCommand:
        options, counters = self._options, self._counters
        command = request(
            RequestCode.SEND_RECORDS,
            {
                "group": options.group,
                "runs": batch.run_list(),
                "default_topic_queue_nums": options.default_topic_queue_nums,
                "timeout_ms": max(1, int(timeout_s * 1000)),
            },
            batch.body(),
            serialize=SerializeType.CBOR,
        )
        for slot in slots:
            if slot.state < SlotState.STORED:
                slot.state = SlotState.IN_FLIGHT
        counters.requests += 1
        counters.records += batch.record_count
        counters.attempts += len(slots)
        return await link.connection.invoke(command, timeout_s)

    def _settled(self, slots: Sequence[SendSlot]) -> None:
        reschedule = trio.lowlevel.reschedule
        count = 0
        for slot in slots:
            count += slot.count
            task = slot.task
            if task is not None:
                slot.task = None
                reschedule(task)
        self._counters.stored += count

    # ------------------------------------------------------------------------------ failing

    def fail(self, slot: SendSlot, error: ClientError) -> None:
        """Settle *slot* as failed and wake its task; nothing if it is settled."""
        if slot.settled:
            return
        slot.state = SlotState.FAILED
        slot.error = error
        task = slot.task
        if task is not None:
            slot.task = None
            trio.lowlevel.reschedule(task)

    def expire(self, slot: SendSlot) -> None:
        """Settle *slot* as failed because its time is over."""
        if slot.sent or slot.state == SlotState.IN_FLIGHT:
            self.fail(
                slot,
                UnknownOutcomeError(
                    f"no answer from {self.broker_name} in time; the message may be stored"
                ),
            )
        else:
            self.fail(
                slot,
                BrokerUnreachableError(
                    f"{self.broker_name} took nothing in time; the message is not stored"
                ),
            )

    def _error(self, slot: SendSlot, kind: FailureKind, code: int, remark: str) -> ClientError:
        where = f"{slot.queue.topic} on {self.broker_name}"
        if slot.sent or kind is FailureKind.UNKNOWN:
            return UnknownOutcomeError(f"{where}: {remark}; the message may or may not be stored")
        if kind is FailureKind.UNREACHABLE or code < 0:
            if kind is FailureKind.FINAL:
                return MessageIllegalError(f"{where}: {remark}")
            return BrokerUnreachableError(f"{where}: {remark}; the message is not stored")
        if code == ResponseCode.MESSAGE_ILLEGAL:
            return MessageIllegalError(f"{where}: {remark}")
        text = f"{where}: refused with code {code}: {remark}"
        if kind in (FailureKind.BUSY, FailureKind.NOT_LEADER, FailureKind.REDIRECTED):
            return BrokerBusyError(text, code=code, remark=remark)
        return BrokerRefusedError(text, code=code, remark=remark)

    def _step(
        self, slot: SendSlot, kind: FailureKind, code: int, remark: str, other: bool
    ) -> Retry | None:
        """Return the next step of *slot*; settles it when there is none."""
        if kind is FailureKind.UNKNOWN:
            slot.sent = True
        schedule = slot.schedule
        if schedule is None:
            schedule = slot.schedule = RetrySchedule(self._options.policy, slot.deadline)
        step = schedule.next(kind, self._clock.monotonic(), other_broker=other)
        if step is None:
            self.fail(slot, self._error(slot, kind, code, remark))
        else:
            self._counters.retries += 1
        return step

    def _move(self, slot: SendSlot) -> SendLane | None:
        """Give *slot* a queue on another broker; return that broker's lane."""
        queue = None if slot.pinned else self._elsewhere(slot)
        if queue is None:
            return None
        slot.records = moved_records(slot.records, slot.sizes, queue.queue_id)
        slot.queue = queue
        return self._lane_of(queue.broker_name)

    async def _again(
        self,
        slots: list[SendSlot],
        kind: FailureKind,
        remark: str,
        code: int,
        address: str | None,
        term: int,
    ) -> None:
        """Give failed slots their next step: another broker, or the head of this line again."""
        staying: list[SendSlot] = []
        moving: list[tuple[SendLane, SendSlot]] = []
        delay_s = 0.0
        move_delay_s = 0.0
        search = False
        for slot in slots:
            other = (
                not slot.pinned
                and kind is not FailureKind.UNKNOWN
                and (self._elsewhere(slot) is not None)
            )
            step = self._step(slot, kind, code, remark, other)
            if step is None:
                continue
            if step.where is Where.OTHER_BROKER:
                lane = self._move(slot)
                if lane is not None:
                    moving.append((lane, slot))
                    move_delay_s = max(move_delay_s, step.delay_s)
                    continue
            staying.append(slot)
            delay_s = max(delay_s, step.delay_s)
            search = search or step.where is not Where.NAMED_LEADER
        self.coalescer.requeue(staying)
        if moving:
            await self._clock.sleep(move_delay_s)
            for lane, slot in moving:
                if not slot.settled:
                    lane.offer(slot)
        if staying and code == ResponseCode.SYSTEM_BUSY:
            await self._clock.sleep(delay_s)  # it leads; questions would only add to its load
        elif staying and search:
            await self._instance.pause_for_leader(
                self.broker_name,
                delay_s,
                topic=staying[0].queue.topic,
                failed=address,
                failed_term=term,
            )

    # ------------------------------------------------------------------------------ RocketMQ's way

    async def _one_by_one(self, slots: list[SendSlot]) -> None:
        async with trio.open_nursery() as nursery:
            for slot in slots:
                nursery.start_soon(self.send_single, slot)

    async def send_single(self, slot: SendSlot) -> None:
        """Send *slot* in a request of its own (310 or 320), with retries, until it is settled.

        Cancellation: The slot stays unsettled; its request may have been sent.
        """
        instance, options, counters = self._instance, self._options, self._counters
        lane = self
        while not slot.settled:
            slot.state = SlotState.WAITING
            name = lane.broker_name
            address = instance.leaders.address(name)
            term = instance.leaders.term(name)
            began = self._clock.monotonic()
            timeout_s = min(options.attempt_timeout_s, slot.deadline - began)
            code, remark = -1, ""
            if address is None:
                kind, remark = FailureKind.NOT_LEADER, f"nobody is known to lead {name}"
            elif timeout_s <= 0:
                lane.expire(slot)
                return
            else:
                try:
                    link = await instance.link(address, timeout_s)
                    command = self._encode_single(slot)
                    counters.requests += 1
                    counters.records += slot.count
                    counters.attempts += 1
                    if slot.settled:
                        return
                    slot.state = SlotState.IN_FLIGHT
                    response = await link.connection.invoke(command, timeout_s)
                    if response.code in STORED_CODES:
                        header = SendMessageResponseHeader.decode(response.ext)
                        slot.base_offset = header.queue_offset
                        slot.offset_message_id = header.msg_id
                        slot.status = response.code
                        if header.queue_id != slot.queue.queue_id:
                            slot.queue = MessageQueue(slot.queue.topic, name, header.queue_id)
                        if not slot.settled:
                            slot.state = SlotState.STORED
                            lane._settled([slot])
                        self._note_send(name, (self._clock.monotonic() - began) * 1000, False)
                        return
                    kind = instance.note_refusal(name, address, response)
                    code, remark = response.code, response.remark or ""
                except (BrokerUnreachableError, ClientClosedError) as error:
                    kind, remark = FailureKind.UNREACHABLE, str(error)
                except TooManyInFlightError as error:
                    kind, remark = FailureKind.BUSY, str(error)
                except ConnectionLostError as error:
                    kind = FailureKind.UNKNOWN if error.sent else FailureKind.UNREACHABLE
                    remark = str(error)
                except (RequestTimedOutError, RemoteProtocolError) as error:
                    kind, remark = FailureKind.UNKNOWN, str(error)
                except LocalProtocolError as error:
                    kind, remark = FailureKind.FINAL, str(error)
                self._note_send(name, (self._clock.monotonic() - began) * 1000, True)
            if slot.settled:
                return
            other = None if slot.pinned or kind is FailureKind.UNKNOWN else self._elsewhere(slot)
            step = lane._step(slot, kind, code, remark, other is not None)
            if step is None:
                return
            if step.where is Where.OTHER_BROKER and other is not None:
                slot.queue = other
                lane = self._lane_of(other.broker_name)
                await self._clock.sleep(step.delay_s)
            elif code == ResponseCode.SYSTEM_BUSY:
                await self._clock.sleep(step.delay_s)
            elif step.where is not Where.NAMED_LEADER:
                await instance.pause_for_leader(
                    name, step.delay_s, topic=slot.queue.topic, failed=address, failed_term=term
                )


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
