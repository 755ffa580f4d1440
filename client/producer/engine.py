"""Sends what a producer hands over: in requests of many or of one, repeated, each settled once.

::

    offer ─► line of the lane ─► request ─► answer ─► settled
               ▲                    ▲          │
               │                    │          ▼ failure: `NEXT` has what follows
               └── RELEASE ─────────┴── HOLD, REPEAT

A slot belongs to the engine from `SendEngine.offer` until it is settled; the engine alone changes
its state, and wakes the task that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import trio

from client.core.client_instance import ClientInstance
from client.core.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    UnknownOutcomeError,
)
from client.core.links import Link
from client.core.retry import (
    Failure,
    FailureKind,
    Retry,
    RetryPolicy,
    RetrySchedule,
    Where,
    failure_from_answer,
    failure_from_error,
    failure_of_code,
    time_left_s,
)
from client.core.route import MessageQueue
from client.producer.config import ProducerConfig
from client.producer.encoder import SlotEncoder
from client.producer.lane import (
    Coalescer,
    HeldSend,
    Lane,
    OpenRefusedError,
    ProducerId,
    RunRefusal,
    SendBatch,
    Sequences,
    batch_of_one,
    moved_records,
    settle_batch,
    settle_one,
)
from client.producer.queue_selection import PublishTopics
from client.producer.results import SendHooks
from client.producer.state import Next, SendSlot, SlotState, Standing, error_of, next_of
from commitlog.errors import MQError
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, SerializeType, request
from remoting.protocol.producer_stamp import STAMP_FIELD

STORED_CODES: Final = frozenset({0, 10, 11, 12})
"""Response codes that mean the message is in the log."""
DRAIN_PERIOD_S: Final = 0.005
"""How often a producer that closes checks whether its sends have ended."""
NEVER: Final = float("inf")


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


@dataclass(slots=True)
class _Missed:
    """An attempt that failed.

    Attributes:
        lane: The group it went to.
        address: The broker asked; None: no leader was known.
        term: The term known at the time.
        held: The sequence it went under.
        failure: Why it failed.
    """

    lane: Lane
    address: str | None
    term: int
    held: HeldSend | None
    failure: Failure

    @property
    def standing(self) -> Standing:
        """What the broker may know of it."""
        if self.held is None:
            return Standing.UNNUMBERED
        return Standing.UNCERTAIN if self.held.sent else Standing.NUMBERED


class SendEngine:
    """All sends of one producer that are under way.

    Attributes:
        counters: See `SendCounters`.
    """

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        config: ProducerConfig,
        encoder: SlotEncoder,
        topics: PublishTopics,
        hooks: SendHooks,
    ) -> None:
        """Prepare.

        Args:
            encoder: Writes the requests of sends that go alone.
            topics: Where else a send may go.
            hooks: Called once for each send that is stored or has failed, before its task goes on.
        """
        self.counters = SendCounters()
        self._instance = instance
        self._clock = instance.clock
        self._group = group
        self._config = config
        self._policy = RetryPolicy(
            max_retries=config.max_retries, retry_unknown=config.retry_unknown
        )
        self._encoder = encoder
        self._topics = topics
        self._hooks = hooks
        self._producer_id = ProducerId(instance.rng)
        self._lanes: dict[str, Lane] = {}
        self._live: dict[SendSlot, None] = {}
        self._nursery: trio.Nursery | None = None
        self._next_wake = NEVER
        self._wake = trio.Event()

    # ------------------------------------------------------------------------------ slots

    def open(self, nursery: trio.Nursery) -> None:
        """Send from now on, in tasks of *nursery*, until that is cancelled."""
        self._nursery = nursery
        nursery.start_soon(self._expire_sends)

    def lane(self, broker_name: str) -> Lane:
        """Return the line of sends to a broker group."""
        lane = self._lanes.get(broker_name)
        if lane is None:
            config = self._config
            line = Coalescer(
                max_request_bytes=config.max_request_bytes,
                max_request_records=config.max_request_records,
                max_waiting_bytes=config.max_waiting_bytes,
            )
            lane = self._lanes[broker_name] = Lane(broker_name, line, Sequences(self._producer_id))
            assert self._nursery is not None
            self._nursery.start_soon(self._run, lane)
            for _ in range(config.requests_in_flight - 1):
                self._nursery.start_soon(partial(self._run, lane, ahead=True))
        return lane

    def offer(self, lane: Lane, slot: SendSlot) -> None:
        """Put *slot* in line; it leaves together with others. Never blocks."""
        self._own(slot)
        lane.offer(slot)

    def send_alone(self, lane: Lane, slot: SendSlot) -> None:
        """Let *slot* leave at once, in a request of its own (310 or 320). Never blocks."""
        self._own(slot)
        assert self._nursery is not None
        self._nursery.start_soon(self._carry, lane, batch_of_one(slot))

    def abandon(self, slot: SendSlot) -> None:
        """Forget a slot whose sender was cancelled; what is on its way stays on its way."""
        slot.task = None
        slot.state = SlotState.ABANDONED
        self._live.pop(slot, None)

    async def drain(self) -> None:
        """Wait for the sends under way; each ends by its deadline."""
        while self._live:
            await self._clock.sleep(DRAIN_PERIOD_S)

    def fail_all(self) -> None:
        """Fail every send that is under way: the producer is closed."""
        for slot in list(self._live):
            if slot.sent or slot.state is SlotState.IN_FLIGHT:
                self._fail(slot, UnknownOutcomeError("the producer was closed during the send"))
            else:
                self._fail(slot, ClientClosedError("the producer was closed before the send"))

    def _own(self, slot: SendSlot) -> None:
        self._live[slot] = None
        if slot.deadline < self._next_wake:
            self._wake.set()

    async def _expire_sends(self) -> None:
        """Fail sends at their deadline; waits until the earliest one."""
        clock = self._clock
        while True:
            self._wake = trio.Event()
            now = clock.monotonic()
            earliest = NEVER
            for slot in list(self._live):
                if slot.deadline <= now:
                    self._expire(slot)
                elif slot.deadline < earliest:
                    earliest = slot.deadline
            self._next_wake = earliest
            with trio.move_on_after(earliest - now):
                await self._wake.wait()

    def _expire(self, slot: SendSlot) -> None:
        name = slot.queue.broker_name
        if slot.sent or slot.state is SlotState.IN_FLIGHT:
            text = f"no answer from {name} in time; the message may be stored"
            self._fail(slot, UnknownOutcomeError(text))
        else:
            text = f"{name} took nothing in time; the message is not stored"
            self._fail(slot, BrokerUnreachableError(text))

    def _fail(self, slot: SendSlot, error: ClientError) -> None:
        """Settle *slot* as failed and wake its task; nothing if it is settled."""
        if slot.settled:
            return
        slot.state = SlotState.FAILED
        slot.error = error
        self._live.pop(slot, None)
        self._hooks.after(slot)
        task = slot.task
        if task is not None:
            slot.task = None
            trio.lowlevel.reschedule(task)

    def _store(self, slots: Sequence[SendSlot]) -> None:
        """Wake the tasks of *slots*, which have become STORED."""
        if self._hooks:
            for slot in slots:
                self._hooks.after(slot)
        reschedule = trio.lowlevel.reschedule
        live = self._live
        count = 0
        for slot in slots:
            count += slot.count
            live.pop(slot, None)
            task = slot.task
            if task is not None:
                slot.task = None
                reschedule(task)
        self.counters.stored += count

    # ------------------------------------------------------------------------------ requests

    async def _run(self, lane: Lane, *, ahead: bool = False) -> None:
        is_pipelined = self._config.requests_in_flight > 1
        while True:
            batch = await lane.next_batch(ahead=ahead, is_pipelined=is_pipelined)
            await self._carry(lane, batch)
            lane.crowd = batch.slot_count > 1

    async def _carry(self, lane: Lane, batch: SendBatch) -> None:
        """Send *batch* until each of its sends is settled, or has a next step of its own.

        Cancellation: Slots may stay unsettled; a request may have been sent.
        """
        held: HeldSend | None = None
        try:
            while True:
                missed = await self._attempt(lane, batch, held)
                if missed is None:
                    return
                held = missed.held
                if not batch.live_slots():
                    return
                follows = self._follows(batch, missed)
                if follows in (Next.RELEASE, Next.RENEW):
                    if follows is Next.RENEW:
                        assert held is not None
                        lane.sequences.leave(held.session)
                        # Only this attempt was ever made, and it stored nothing.
                        code = ResponseCode.SYSTEM_BUSY
                        missed.failure = replace(missed.failure, kind=FailureKind.BUSY, code=code)
                    if held is not None:
                        held.settle()
                        held = None
                    if not batch.is_alone:
                        await self._release(missed, batch.live_slots())
                        return
                    going_on = await self._release_one(missed, batch.slots()[0])
                    if going_on is None:
                        return
                    lane, batch = going_on
                    continue
                assert held is not None
                if follows is Next.END:
                    lane.sequences.leave(held.session)
                    held.settle()
                    self._end(missed, batch.live_slots())
                    return
                if not await self._hold(missed, held, batch):
                    return
                if not held.sent:
                    batch = batch.without_settled()
                if not batch.live_slots():
                    return
        finally:
            if held is not None:
                held.settle()

    def _follows(self, batch: SendBatch, missed: _Missed) -> Next:
        follows = next_of(missed.standing, missed.failure, is_alone=batch.is_alone)
        if follows is Next.MOVE_OR_HOLD:
            may_move = any(
                not slot.pinned and self._topics.elsewhere(slot.queue) is not None
                for slot in batch.live_slots()
            )
            return Next.RELEASE if may_move else Next.HOLD
        return follows

    async def _hold(self, missed: _Missed, held: HeldSend, batch: SendBatch) -> bool:
        """Wait until *batch* may go out under its sequence again; false, and failed, if never."""
        failure = missed.failure
        if failure.kind is FailureKind.UNKNOWN:
            held.sent = True
            for slot in batch.slots():
                slot.sent = True
        live = batch.live_slots()
        step = held.schedule.next(
            failure.kind, self._clock.monotonic(), repeatable=failure.is_repeatable
        )
        if step is None:
            held.settle()
            self._end(missed, live)
            return False
        self.counters.retries += len(live)
        if not held.sent:
            for slot in live:
                slot.state = SlotState.WAITING
        held.session.hold(held.sequence)
        await self._pause(missed, step, live)
        await held.session.turn(held.sequence)
        return True

    async def _release(self, missed: _Missed, slots: Sequence[SendSlot]) -> None:
        """Give failed slots their next step: another broker, or the head of this line again."""
        staying: list[SendSlot] = []
        moving: list[SendSlot] = []
        pause = Retry(Where.NAMED_LEADER, 0.0)
        move_delay_s = 0.0
        for slot in slots:
            step, elsewhere = self._own_step(missed, slot)
            if step is None:
                continue
            if step.where is Where.OTHER_BROKER and elsewhere is not None:
                _move(slot, elsewhere)
                moving.append(slot)
                move_delay_s = max(move_delay_s, step.delay_s)
                continue
            staying.append(slot)
            where = step.where if pause.where is Where.NAMED_LEADER else pause.where
            pause = Retry(where, max(pause.delay_s, step.delay_s))
        missed.lane.line.requeue(staying)
        if moving:
            await self._clock.sleep(move_delay_s)
            for slot in moving:
                if not slot.settled:
                    self.lane(slot.queue.broker_name).offer(slot)
        if staying:
            await self._pause(missed, pause, staying)

    async def _release_one(self, missed: _Missed, slot: SendSlot) -> tuple[Lane, SendBatch] | None:
        """Give a slot that goes alone its next step; return where it goes on, None if nowhere."""
        if slot.settled:
            return None
        lane = missed.lane
        step, elsewhere = self._own_step(missed, slot)
        if step is None:
            return None
        if not slot.sent:
            slot.state = SlotState.WAITING
        if step.where is Where.OTHER_BROKER and elsewhere is not None:
            _move(slot, elsewhere)
            lane = self.lane(elsewhere.broker_name)
            await self._clock.sleep(step.delay_s)
        else:
            await self._pause(missed, step, [slot])
        return None if slot.settled else (lane, batch_of_one(slot))

    def _own_step(
        self, missed: _Missed, slot: SendSlot
    ) -> tuple[Retry | None, MessageQueue | None]:
        """Return the next step of *slot* and a queue elsewhere; without a step, settle it."""
        kind = missed.failure.kind
        elsewhere = None
        if kind is FailureKind.UNKNOWN:
            slot.sent = True
        elif not slot.pinned:
            elsewhere = self._topics.elsewhere(slot.queue)
        step = self._schedule_of(slot).next(
            kind, self._clock.monotonic(), other_broker=elsewhere is not None
        )
        if step is None:
            self._end(missed, [slot])
        else:
            self.counters.retries += 1
        return step, elsewhere

    def _schedule_of(self, slot: SendSlot) -> RetrySchedule:
        if slot.schedule is None:
            slot.schedule = RetrySchedule(self._policy, slot.deadline)
        return slot.schedule

    async def _pause(self, missed: _Missed, step: Retry, slots: Sequence[SendSlot]) -> None:
        failure = missed.failure
        if failure.code == ResponseCode.SYSTEM_BUSY or failure.kind is FailureKind.REQUESTER_AWAY:
            # It leads; questions would only add to its load.
            await self._clock.sleep(max(step.delay_s, failure.retry_after_s))
        elif step.where is not Where.NAMED_LEADER:
            await self._instance.leader_search.pause(
                missed.lane.broker_name,
                step.delay_s,
                topic=slots[0].queue.topic if slots else "",
                failed=missed.address,
                failed_term=missed.term,
            )

    def _end(self, missed: _Missed, slots: Sequence[SendSlot]) -> None:
        for slot in slots:
            self._fail(slot, error_of(slot, missed.failure, missed.lane.broker_name))

    # ------------------------------------------------------------------------------ one attempt

    async def _attempt(self, lane: Lane, batch: SendBatch, held: HeldSend | None) -> _Missed | None:
        """Send *batch* once and settle its slots; or return why that did not work."""
        instance, name = self._instance, lane.broker_name
        began = self._clock.monotonic()
        timeout_s = time_left_s(batch.deadline, began, self._config.attempt_timeout_s)
        address, term = instance.leaders.address(name), instance.leaders.term(name)
        nothing = Failure(FailureKind.NOT_LEADER, remark=f"no leader of {name} is known")
        missed = _Missed(lane, address, term, held, nothing)
        if address is None:
            return missed
        if batch.is_alone and timeout_s <= 0:
            self._expire(batch.slots()[0])
            return None
        try:
            refused = await self._exchange(missed, batch, address, timeout_s)
        except OpenRefusedError as error:
            kind = instance.leader_search.note_refusal(name, address, error.answer)
            if kind is FailureKind.UNKNOWN:
                kind = FailureKind.NOT_LEADER  # of the messages nothing was sent
            missed.failure = failure_from_answer(error.answer, kind)
        except _RefusedError as error:
            kind = instance.leader_search.note_refusal(name, address, error.answer)
            missed.failure = failure_from_answer(error.answer, kind)
        except MQError as error:
            missed.failure = failure_from_error(error)
        else:
            if refused is None:
                return None
            self._topics.note_send(name, (self._clock.monotonic() - began) * 1000, failed=False)
            for run in refused:
                failure = Failure(failure_of_code(run.code), run.code, run.remark)
                live = [slot for slot in run.slots if not slot.settled]
                await self._release(_Missed(lane, address, term, None, failure), live)
            return None
        self._topics.note_send(name, (self._clock.monotonic() - began) * 1000, failed=True)
        return missed

    async def _exchange(
        self, missed: _Missed, batch: SendBatch, address: str, timeout_s: float
    ) -> list[RunRefusal] | None:
        """Send *batch*, settle what is stored, and return the runs refused.

        None: nothing was sent under this request, as its sends ended before, or went one by one.

        Raises:
            _RefusedError, OpenRefusedError: All of it was refused.
            MQError: No answer, or one that makes no sense.
        """
        lane, held = missed.lane, missed.held
        link = await self._instance.link(address, timeout_s, group=lane.broker_name)
        if held is None and not batch.is_alone:
            switched = lane.records is False
            lane.records = link.records
            if switched or not link.records:
                await self._one_by_one(lane, batch.slots())
                return None
        command: RemotingCommand | None = None
        if batch.is_alone:
            command = self._encoder.request_of(batch.slots()[0])
        if held is None and self._is_numbered(link, command):
            held = missed.held = await lane.sequences.enter(
                link, timeout_s, self._schedule_under_sequence(batch)
            )
        if batch.is_alone or held is None or not held.sent:
            # What failed as "not stored" meanwhile must not be stored.
            batch = batch.without_settled()
            if not batch.runs:
                if held is not None:
                    held.settle()
                return None
        if command is None:
            command = self._records_request(batch, timeout_s, held)
        elif held is not None:
            command.ext.update(held.stamp.as_texts())
        self._count(batch)
        response = await link.connection.invoke(command, timeout_s)
        if response.code not in (STORED_CODES if batch.is_alone else (ResponseCode.SUCCESS,)):
            raise _RefusedError(response)
        refused: list[RunRefusal] = []
        if batch.is_alone:
            stored = settle_one(batch.slots()[0], response.code, response.ext)
        else:
            stored, refused = settle_batch(batch, response.ext)
        if held is not None:
            held.settle()
        self._store(stored)
        return refused

    def _is_numbered(self, link: Link, command: RemotingCommand | None) -> bool:
        is_reply = command is not None and command.code == RequestCode.SEND_REPLY_MESSAGE_V2
        return self._config.idempotent and link.idempotent and not is_reply

    def _schedule_under_sequence(self, batch: SendBatch) -> RetrySchedule:
        if batch.is_alone:
            return self._schedule_of(batch.slots()[0])
        return RetrySchedule(self._policy, batch.deadline)

    def _records_request(
        self, batch: SendBatch, timeout_s: float, held: HeldSend | None
    ) -> RemotingCommand:
        ext: dict[str, Any] = {
            "group": self._group,
            "runs": batch.run_list(),
            "default_topic_queue_nums": self._instance.config.default_topic_queue_nums,
            "timeout_ms": max(1, int(timeout_s * 1000)),
        }
        if held is not None:
            ext[STAMP_FIELD] = held.stamp.as_field()
        return request(RequestCode.SEND_RECORDS, ext, batch.body(), serialize=SerializeType.CBOR)

    def _count(self, batch: SendBatch) -> None:
        slots = batch.slots()
        for slot in slots:
            if slot.state < SlotState.STORED:
                slot.state = SlotState.IN_FLIGHT
        counters = self.counters
        counters.requests += 1
        counters.records += batch.record_count
        counters.attempts += len(slots)

    async def _one_by_one(self, lane: Lane, slots: Sequence[SendSlot]) -> None:
        async with trio.open_nursery() as nursery:
            for slot in slots:
                nursery.start_soon(self._carry, lane, batch_of_one(slot))


class _RefusedError(Exception):
    """A broker refused a whole request; never leaves this file."""

    def __init__(self, answer: RemotingCommand) -> None:
        super().__init__(answer.remark)
        self.answer = answer


def _move(slot: SendSlot, queue: MessageQueue) -> None:
    """Give *slot* another queue."""
    slot.records = moved_records(slot.records, slot.sizes, queue.queue_id)
    slot.queue = queue
