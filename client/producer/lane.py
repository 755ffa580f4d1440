"""Sends to one broker group: coalesced into requests, retried, each settled with its own result.

The lane is the only thing that moves slots between "waiting", "in flight" and "settled"; it wakes
the task that waits for a slot when it settles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from client.core.client_instance import ClientInstance
from client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    MessageIllegalError,
    RequesterAwayError,
    UnknownOutcomeError,
)
from client.core.links import Link
from client.core.retry import (
    FailureKind,
    Retry,
    RetryPolicy,
    RetrySchedule,
    Where,
    failure_of_code,
    is_retriable,
    retry_after_s,
    time_left_s,
)
from client.core.route import MessageQueue
from client.producer.coalescer import Coalescer, SendBatch, SendSlot, SlotState, settle_batch
from client.producer.session import HeldSend, ProducerSession
from commitlog.errors import LocalProtocolError, MQError, RemoteProtocolError
from commitlog.record import QUEUE_ID_OFFSET
from remoting.errors import (
    ConnectionLostError,
    RemotingError,
    RequestTimedOutError,
    TooManyInFlightError,
)
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, SerializeType, request
from remoting.protocol.headers import SendMessageResponseHeader
from remoting.protocol.outcome import REASON_FIELD, Condition
from remoting.protocol.producer_stamp import EPOCH_FIELD, ID_FIELD, STAMP_FIELD

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
        idempotent: Send under sequences where the broker knows them.
    """

    group: str
    policy: RetryPolicy
    attempt_timeout_s: float
    default_topic_queue_nums: int
    requests_in_flight: int
    idempotent: bool = False


EncodeSingle = Callable[[SendSlot], RemotingCommand]
"""Builds the RocketMQ request (310 or 320) for a slot."""
Elsewhere = Callable[[SendSlot], MessageQueue | None]
"""Finds a queue on another broker for a slot that may move; None when there is none."""
NoteSend = Callable[[str, float, bool], None]
"""Told after each request: broker name, how long it took in ms, whether it failed."""

OnEnd = Callable[[SendSlot], None]
"""Told of each slot that is stored or has failed, before its task goes on; it must not raise."""


class _OpenRefusedError(Exception):
    """A broker opened no session."""

    def __init__(self, answer: RemotingCommand) -> None:
        super().__init__(answer.remark)
        self.answer = answer


class Failure:
    """Why an attempt failed.

    Attributes:
        address: Who was asked; None: nobody was known to lead.
        term: The term known at the time.
        held: The sequence it went under.
        kind: What it means for the next attempt.
        code: Response code; -1 when there was no answer.
        remark: For people.
        retry_after_s: Shortest pause, as the broker asks for.
    """

    __slots__ = (
        "address",
        "code",
        "held",
        "is_forgotten",
        "is_repeatable",
        "kind",
        "remark",
        "retry_after_s",
        "term",
    )

    def __init__(self, address: str | None, term: int, held: HeldSend | None) -> None:
        self.address = address
        self.term = term
        self.held = held
        self.kind = FailureKind.FINAL
        self.code = -1
        self.remark = ""
        self.retry_after_s = 0.0
        self.is_repeatable = True
        self.is_forgotten = False

    def read(self, answer: RemotingCommand, kind: FailureKind) -> None:
        """Take over what a refusing answer says."""
        self.kind = kind
        self.code, self.remark = answer.code, answer.remark or ""
        self.retry_after_s = retry_after_s(answer)
        self.is_repeatable = is_retriable(answer)
        self.is_forgotten = answer.ext.get(REASON_FIELD) in _FORGOTTEN

    def of_error(self, error: MQError) -> None:
        """Take over what an error of the call says.

        Raises:
            MQError: *error*, when it is none that a call ends with.
        """
        self.remark = str(error)
        match error:
            case BrokerUnreachableError() | ClientClosedError():
                self.kind = FailureKind.UNREACHABLE
            case TooManyInFlightError():
                self.kind = FailureKind.BUSY
            case ConnectionLostError():
                self.kind = FailureKind.UNKNOWN if error.sent else FailureKind.UNREACHABLE
            case RequestTimedOutError() | RemoteProtocolError():
                self.kind = FailureKind.UNKNOWN
            case LocalProtocolError():
                self.kind = FailureKind.FINAL
            case _:
                raise error


_FORGOTTEN: Final = frozenset({Condition.PRODUCER_UNKNOWN.value, Condition.SEQUENCE_TOO_OLD.value})
"""The broker does not know (any more) what became of a sequence."""


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
        producer_id: Callable[[], bytes],
        on_end: OnEnd | None = None,
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
        self._on_end = on_end
        self._idle = trio.lowlevel.ParkingLot()
        self._ahead = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._in_flight: dict[SendSlot, None] = {}
        self._crowd = False
        self._producer_id = producer_id
        self._session: ProducerSession | None = None
        self._left_epoch = 0
        self._opening = trio.Lock()

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
                await self._attempt(batch)
            finally:
                for slot in slots:
                    self._in_flight.pop(slot, None)
            self._crowd = len(slots) > 1

    async def _attempt(self, batch: SendBatch) -> None:
        """Send *batch* once; under a sequence, until its outcome is known."""
        held: HeldSend | None = None
        try:
            while True:
                failure = await self._request(batch, held)
                if failure is None:
                    return None
                held = failure.held
                if held is None:
                    live = [slot for slot in batch.slots() if not slot.settled]
                    return await self._again(live, failure)
                repeated = await self._before_repetition(batch, held, failure)
                if repeated is None:
                    return None
                batch = repeated
        finally:
            if held is not None:
                held.settle()

    async def _request(self, batch: SendBatch, held: HeldSend | None) -> Failure | None:
        """Send *batch* and settle its slots; or return why that did not work."""
        instance, clock, name = self._instance, self._clock, self.broker_name
        began = clock.monotonic()
        deadline = max([slot.deadline for slot in batch.slots()])
        timeout_s = time_left_s(deadline, began, self._options.attempt_timeout_s)
        address = instance.leaders.address(name)
        failure = Failure(address, instance.leaders.term(name), held)
        if address is None:
            failure.kind = FailureKind.NOT_LEADER
            failure.remark = f"nobody is known to lead {name}"
            return failure
        try:
            link = await instance.link(address, timeout_s, group=name)
            if held is None:
                switched = self.records is False
                self.records = link.records
                if switched or not link.records:
                    await self._one_by_one(batch.slots())
                    return None
                held = failure.held = await self._enter(link, timeout_s, batch.slots())
            if held is None or not held.sent:
                # Who was told "not stored" meanwhile must not be stored.
                batch = batch.without_settled()
                if not batch.runs:
                    if held is not None:
                        held.settle()
                    return None
            response = await self._send(link, batch, timeout_s, held)
            if response.code == ResponseCode.SUCCESS:
                stored, refused = settle_batch(batch, response.ext)
                if held is not None:
                    held.settle()
                self._settled(stored)
                self._note_send(name, (clock.monotonic() - began) * 1000, False)
                for run in refused:
                    failure = Failure(address, failure.term, None)
                    failure.kind = failure_of_code(run.code)
                    failure.remark, failure.code = run.remark, run.code
                    await self._again([s for s in run.slots if not s.settled], failure)
                return None
            failure.read(response, instance.leader_search.note_refusal(name, address, response))
        except _OpenRefusedError as error:
            failure.read(
                error.answer, instance.leader_search.note_refusal(name, address, error.answer)
            )
            if failure.kind is FailureKind.UNKNOWN:
                failure.kind = FailureKind.NOT_LEADER  # of the messages nothing was sent
        except MQError as error:
            failure.of_error(error)
        self._note_send(name, (clock.monotonic() - began) * 1000, True)
        return failure

    async def _send(
        self, link: Link, batch: SendBatch, timeout_s: float, held: HeldSend | None
    ) -> RemotingCommand:
        options, counters = self._options, self._counters
        ext: dict[str, Any] = {
            "group": options.group,
            "runs": batch.run_list(),
            "default_topic_queue_nums": options.default_topic_queue_nums,
            "timeout_ms": max(1, int(timeout_s * 1000)),
        }
        if held is not None:
            ext[STAMP_FIELD] = held.stamp.as_field()
        command = request(RequestCode.SEND_RECORDS, ext, batch.body(), serialize=SerializeType.CBOR)
        slots = batch.slots()
        for slot in slots:
            if slot.state < SlotState.STORED:
                slot.state = SlotState.IN_FLIGHT
        counters.requests += 1
        counters.records += batch.record_count
        counters.attempts += len(slots)
        return await link.connection.invoke(command, timeout_s)

    # ------------------------------------------------------------------------------ sequences

    async def _enter(
        self, link: Link, timeout_s: float, slots: Sequence[SendSlot]
    ) -> HeldSend | None:
        """Return the next sequence when it may leave; None where the broker knows no sequences.

        Raises:
            _OpenRefusedError, BrokerUnreachableError: There is no session; nothing was sent.
        """
        if not self._options.idempotent or not link.idempotent:
            return None
        while True:
            session = self._session
            if session is None:
                session = await self._open_session(link, timeout_s)
            await session.room()
            if session is self._session:
                break
        deadline = max([slot.deadline for slot in slots])
        schedule = RetrySchedule(self._options.policy, deadline)
        return HeldSend(session, session.begin(), schedule)

    async def _open_session(self, link: Link, timeout_s: float) -> ProducerSession:
        async with self._opening:
            if self._session is not None:
                return self._session
            producer_id = self._producer_id()
            command = request(
                RequestCode.OPEN_PRODUCER,
                {ID_FIELD: producer_id.hex(), EPOCH_FIELD: str(self._left_epoch)},
                serialize=link.serialize,
            )
            try:
                answer = await link.connection.invoke(command, timeout_s)
                if answer.code != ResponseCode.SUCCESS:
                    raise _OpenRefusedError(answer)
                epoch = int(answer.ext[EPOCH_FIELD])
            except (RemotingError, KeyError, ValueError) as error:
                raise BrokerUnreachableError(
                    f"broker {link.address} opened no session: {error}"
                ) from error
            session = self._session = ProducerSession(producer_id, epoch)
            return session

    def _leave_session(self, session: ProducerSession) -> None:
        if self._session is session:
            self._session = None
            self._left_epoch = session.epoch

    async def _before_repetition(
        self, batch: SendBatch, held: HeldSend, failure: Failure
    ) -> SendBatch | None:
        """Wait until *batch* may go out under its sequence again; None when it is over."""
        slots = batch.slots()
        live = [slot for slot in slots if not slot.settled]
        if failure.is_forgotten and not held.sent:
            # Only this attempt was ever made, and it stored nothing.
            failure.kind, failure.code = FailureKind.BUSY, ResponseCode.SYSTEM_BUSY
            self._leave_session(held.session)
            held.settle()
            await self._again(live, failure)
            return None
        if failure.kind is FailureKind.UNKNOWN:
            held.sent = True
            for slot in slots:
                slot.sent = True
        elif not held.sent and self._is_elsewhere_better(live, failure.kind):
            held.settle()
            await self._again(live, failure)
            return None
        if not await self._pause(held, live, failure):
            return None
        if not held.sent:
            batch = batch.without_settled()
        return batch if any(not slot.settled for slot in batch.slots()) else None

    def _is_elsewhere_better(self, slots: Sequence[SendSlot], kind: FailureKind) -> bool:
        if kind in (FailureKind.FINAL, FailureKind.REFUSED_HERE):
            return True
        return kind in (FailureKind.UNREACHABLE, FailureKind.BUSY) and any(
            not slot.pinned and self._elsewhere(slot) is not None for slot in slots
        )

    async def _pause(self, held: HeldSend, live: Sequence[SendSlot], failure: Failure) -> bool:
        """Wait before a repetition and for its turn; false, and all settled, when there is none."""
        step: Retry | None = None
        if failure.is_forgotten:
            self._leave_session(held.session)
        else:
            step = held.schedule.next(
                failure.kind, self._clock.monotonic(), repeatable=failure.is_repeatable
            )
        if step is None:
            held.settle()
            for slot in live:
                self.fail(slot, self._error(slot, failure))
            return False
        self._counters.retries += len(live)
        if not held.sent:
            for slot in live:
                slot.state = SlotState.WAITING
        held.session.hold(held.sequence)
        await self._wait(step, failure, held_topic(live))
        await held.session.turn(held.sequence)
        return True

    async def _wait(self, step: Retry, failure: Failure, topic: str) -> None:
        if failure.code == ResponseCode.SYSTEM_BUSY or failure.kind is FailureKind.REQUESTER_AWAY:
            # It leads; questions would only add to its load.
            await self._clock.sleep(max(step.delay_s, failure.retry_after_s))
        elif step.where is not Where.NAMED_LEADER:
            await self._instance.leader_search.pause(
                self.broker_name,
                step.delay_s,
                topic=topic,
                failed=failure.address,
                failed_term=failure.term,
            )

    def _settled(self, slots: Sequence[SendSlot]) -> None:
        if self._on_end is not None:
            for slot in slots:
                self._on_end(slot)
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
        if self._on_end is not None:
            self._on_end(slot)
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

    def _error(self, slot: SendSlot, failure: Failure) -> ClientError:
        kind, code, remark = failure.kind, failure.code, failure.remark
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
        if kind is FailureKind.REQUESTER_AWAY:
            return RequesterAwayError(text, code=code, remark=remark)
        if kind in (FailureKind.BUSY, FailureKind.NOT_LEADER, FailureKind.REDIRECTED):
            return BrokerBusyError(text, code=code, remark=remark)
        return BrokerRefusedError(text, code=code, remark=remark)

    def _step(self, slot: SendSlot, failure: Failure, other: bool) -> Retry | None:
        """Return the next step of *slot*; settles it when there is none."""
        if failure.kind is FailureKind.UNKNOWN:
            slot.sent = True
        schedule = slot.schedule
        if schedule is None:
            schedule = slot.schedule = RetrySchedule(self._options.policy, slot.deadline)
        step = schedule.next(
            failure.kind,
            self._clock.monotonic(),
            other_broker=other,
            repeatable=failure.held is not None and failure.is_repeatable,
        )
        if step is None:
            self.fail(slot, self._error(slot, failure))
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

    async def _again(self, slots: list[SendSlot], failure: Failure) -> None:
        """Give failed slots their next step: another broker, or the head of this line again."""
        kind, code = failure.kind, failure.code
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
            step = self._step(slot, failure, other)
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
            # It leads; questions would only add to its load.
            await self._clock.sleep(max(delay_s, failure.retry_after_s))
        elif staying and search:
            await self._instance.leader_search.pause(
                self.broker_name,
                delay_s,
                topic=staying[0].queue.topic,
                failed=failure.address,
                failed_term=failure.term,
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
        lane = self
        held: HeldSend | None = None
        try:
            while not slot.settled:
                failure = await lane._request_single(slot, held)
                if failure is None or slot.settled:
                    return
                held = failure.held
                if failure.is_forgotten and held is not None:
                    lane._leave_session(held.session)
                    if not held.sent:
                        # Only this attempt was ever made, and it stored nothing.
                        failure.kind, failure.code = FailureKind.BUSY, ResponseCode.SYSTEM_BUSY
                    else:
                        lane.fail(slot, lane._error(slot, failure))
                        return
                if failure.kind is FailureKind.UNKNOWN and held is not None:
                    held.sent = True
                elif held is not None and not held.sent:
                    held.settle()
                    held = failure.held = None
                other = None
                if not slot.pinned and failure.kind is not FailureKind.UNKNOWN and held is None:
                    other = self._elsewhere(slot)
                step = lane._step(slot, failure, other is not None)
                if step is None:
                    return
                if not slot.sent:
                    slot.state = SlotState.WAITING
                if held is not None:
                    held.session.hold(held.sequence)
                if step.where is Where.OTHER_BROKER and other is not None:
                    slot.queue = other
                    lane = self._lane_of(other.broker_name)
                    await self._clock.sleep(step.delay_s)
                else:
                    await lane._wait(step, failure, slot.queue.topic)
                if held is not None:
                    await held.session.turn(held.sequence)
        finally:
            if held is not None:
                held.settle()

    async def _request_single(self, slot: SendSlot, held: HeldSend | None) -> Failure | None:
        """Send *slot* once and settle it; or return why that did not work."""
        instance, options, counters = self._instance, self._options, self._counters
        name = self.broker_name
        address = instance.leaders.address(name)
        failure = Failure(address, instance.leaders.term(name), held)
        began = self._clock.monotonic()
        timeout_s = min(options.attempt_timeout_s, slot.deadline - began)
        if address is None:
            failure.kind = FailureKind.NOT_LEADER
            failure.remark = f"nobody is known to lead {name}"
            return failure
        if timeout_s <= 0:
            self.expire(slot)
            return None
        try:
            link = await instance.link(address, timeout_s, group=name)
            command = self._encode_single(slot)
            if held is None and command.code != RequestCode.SEND_REPLY_MESSAGE_V2:
                held = failure.held = await self._enter(link, timeout_s, [slot])
            if held is not None:
                command.ext.update(held.stamp.as_texts())
            counters.requests += 1
            counters.records += slot.count
            counters.attempts += 1
            if slot.settled:
                if held is not None:
                    held.settle()
                return None
            slot.state = SlotState.IN_FLIGHT
            response = await link.connection.invoke(command, timeout_s)
            if response.code in STORED_CODES:
                header = SendMessageResponseHeader.decode(response.ext)
                slot.base_offset = header.queue_offset
                slot.offset_message_id = header.msg_id
                slot.recall_handle = header.recall_handle or ""
                slot.status = response.code
                if header.queue_id != slot.queue.queue_id:
                    slot.queue = MessageQueue(slot.queue.topic, name, header.queue_id)
                if held is not None:
                    held.settle()
                if not slot.settled:
                    slot.state = SlotState.STORED
                    self._settled([slot])
                self._note_send(name, (self._clock.monotonic() - began) * 1000, False)
                return None
            failure.read(response, instance.leader_search.note_refusal(name, address, response))
        except _OpenRefusedError as error:
            failure.read(
                error.answer, instance.leader_search.note_refusal(name, address, error.answer)
            )
            if failure.kind is FailureKind.UNKNOWN:
                failure.kind = FailureKind.NOT_LEADER  # of the message nothing was sent
        except MQError as error:
            failure.of_error(error)
        self._note_send(name, (self._clock.monotonic() - began) * 1000, True)
        return failure


def held_topic(slots: Sequence[SendSlot]) -> str:
    """Return a topic of *slots*; empty when there are none."""
    return slots[0].queue.topic if slots else ""


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
