"""Sends what a producer hands over: in requests of many or of one, repeated, each settled once.

::

    offer ─► line of the lane ─► request ─► answer ─► settled
               ▲                    ▲          │
               │                    │          ▼ failure: `NEXT` has what follows
               └── RELEASE ─────────┴── HOLD, REPEAT

A slot belongs to the engine, and its `LiveSends`, from `SendEngine.offer` until it is settled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import BackpressureError, ClientClosedError
from dledger.client.core.hooks import CommunicationMode
from dledger.client.core.message import Message
from dledger.client.core.retry import (
    Failure,
    FailureKind,
    Retry,
    Where,
    failure_of_code,
)
from dledger.client.core.route import MessageQueue
from dledger.client.producer.attempts import Attempt, Attempts
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.encoder import SlotEncoder, goes_alone
from dledger.client.producer.lane import Coalescer, Lane, SendBatch, batch_of_one, moved_records
from dledger.client.producer.queue_selection import PublishTopics
from dledger.client.producer.results import LiveSends, SendHooks
from dledger.client.producer.sequences import HeldSend, Sequences
from dledger.client.producer.state import Next, SendSlot, SlotState, error_of, next_of
from dledger.remoting.protocol.codes import ResponseCode
from dledger.remoting.protocol.own_fields import PRODUCER_ID_BYTES


@dataclass(eq=False, repr=False)
class SendEngine:
    """All sends of one producer that are under way.

    *hooks*: called once for each send that is stored or has failed, before its task goes on.
    """

    _instance: ClientInstance
    _group: str
    _config: ProducerConfig
    _encoder: SlotEncoder
    _topics: PublishTopics
    _hooks: SendHooks

    def __post_init__(self) -> None:
        self.sends = LiveSends(self._instance.clock, self._hooks)
        self._clock = self._instance.clock
        self._attempts = Attempts(
            self._instance, self._group, self._config, self._encoder, self._topics, self.sends
        )
        self._producer_id = cache(partial(self._instance.rng.randbytes, PRODUCER_ID_BYTES))
        self._steps: dict[Next, Callable[[Attempt, Failure], Awaitable[Attempt | None]]] = {
            Next.RELEASE: self._release,
            Next.HOLD: self._hold,
            Next.MOVE_OR_HOLD: self._move_or_hold,
            Next.REPEAT: self._hold,
            Next.RENEW: self._renew,
            Next.END: self._give_up,
        }
        self._lanes: dict[str, Lane] = {}
        self._nursery: trio.Nursery

    # ------------------------------------------------------------------------------ slots

    def open(self, nursery: trio.Nursery) -> None:
        """Send from now on, in tasks of *nursery*, until that is cancelled."""
        self._nursery = nursery
        nursery.start_soon(self.sends.run)

    def close(self) -> None:
        """Fail what is under way, and what waits to be put in line."""
        self.sends.fail_all()
        for lane in self._lanes.values():
            lane.close()

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
            lane = self._lanes[broker_name] = Lane(
                broker_name, line, Sequences(self._producer_id), config.requests_in_flight
            )
            self._nursery.start_soon(self._run, lane)
        return lane

    def enqueue(
        self,
        lane: Lane,
        message: Message,
        queue: MessageQueue,
        pinned: bool,
        timeout_s: float | None,
        mode: CommunicationMode,
    ) -> SendSlot:
        """Put *message* on its way to *queue*, however full *lane* is. Never blocks.

        Raises MessageIllegalError: it cannot be sent.
        """
        is_alone = lane.records is False or goes_alone(message)
        encode = self._encoder.single if is_alone else self._encoder.record
        slot = encode(message, queue, pinned, timeout_s)
        if self.sends.has_hooks:
            self._hooks.before(slot, mode)
        if is_alone:
            self.send_alone(lane, slot)
        else:
            self.offer(lane, slot)
        return slot

    async def wait_for_space(self, lane: Lane, longest_s: float) -> None:
        """Return when another send may be put in line.

        Raises:
            BackpressureError: There are still too many.
            ClientClosedError: The producer is closed.
        """
        with self.sends.arriving(), trio.move_on_after(longest_s):
            await lane.wait_for_space()
        if lane.is_closed:
            raise ClientClosedError("the producer was closed before the send")
        if not lane.line.has_space:
            raise BackpressureError(
                f"{lane.line.waiting_bytes} bytes still wait for {lane.broker_name}"
            )

    def offer(self, lane: Lane, slot: SendSlot) -> None:
        """Put *slot* in line; it leaves together with others. Never blocks."""
        self.sends.add(slot)
        if lane.offer(slot):
            self._leave(lane)

    def send_alone(self, lane: Lane, slot: SendSlot) -> None:
        """Let *slot* leave at once, in a request of its own (310 or 320). Never blocks."""
        self.sends.add(slot)
        self._nursery.start_soon(self._carry_one, lane, slot)

    # ------------------------------------------------------------------------------ requests

    async def _run(self, lane: Lane) -> None:
        """Let sends leave that had to wait for those before them."""
        while True:
            await lane.ready()
            while lane.may_leave:
                self._leave(lane)

    def _leave(self, lane: Lane) -> None:
        """Take the next request's worth of sends and send them. Never blocks."""
        batch = lane.take()
        if batch is None:
            return
        lane.open += 1
        attempt = self._attempts.begin(lane, batch)
        if self._attempts.start(attempt, self._attempt_ended):
            self.sends.watch(attempt)
            return
        lane.is_entering = attempt.failure is None
        self._nursery.start_soon(self._carry_open, attempt, lane.is_entering)

    def _attempt_ended(self, attempt: Attempt) -> None:
        self.sends.unwatch(attempt)
        self._attempts.finish(attempt)
        if attempt.failure is None and not attempt.refused:
            attempt.lane.request_ended(attempt.batch.slot_count)
        else:
            self._nursery.start_soon(self._carry_open, attempt, False)

    async def _carry_open(self, attempt: Attempt, is_entering: bool) -> None:
        lane, sends = attempt.lane, attempt.batch.slot_count
        try:
            if is_entering:
                try:
                    await self._attempts.make(attempt)
                finally:
                    lane.entered()
            await self._carry(attempt)
        finally:
            lane.request_ended(sends)

    async def _carry_one(self, lane: Lane, slot: SendSlot) -> None:
        await self._carry(await self._attempt(lane, batch_of_one(slot)))

    async def _attempt(self, lane: Lane, batch: SendBatch, held: HeldSend | None = None) -> Attempt:
        attempt = self._attempts.begin(lane, batch, held)
        await self._attempts.make(attempt)
        return attempt

    async def _carry(self, attempt: Attempt) -> None:
        """Do what follows *attempt* until each of its sends is settled, or has a step of its own.

        Cancellation: Slots may stay unsettled; a request may have been sent.
        """
        following: Attempt | None = attempt
        try:
            while following is not None:
                attempt = following
                following = await self._step_after(attempt)
        finally:
            if attempt.held is not None:
                attempt.held.settle()

    async def _step_after(self, attempt: Attempt) -> Attempt | None:
        """Do what follows *attempt*, which has ended; return the next one."""
        failure, batch = attempt.failure, attempt.batch
        if failure is None:
            await self._one_by_one(attempt.lane, attempt.alone)
            await self._release_refused(attempt)
            return None
        if not batch.live_slots():
            return None
        follows = next_of(attempt.standing, failure, is_alone=batch.is_alone)
        return await self._steps[follows](attempt, failure)

    async def _release(self, attempt: Attempt, failure: Failure) -> Attempt | None:
        if attempt.held is not None:
            attempt.held.settle()
        return await self._release_each(attempt, failure, attempt.batch.live_slots())

    async def _renew(self, attempt: Attempt, failure: Failure) -> Attempt | None:
        self._leave_session(attempt)
        # Only this attempt was ever made, and it stored nothing.
        failure = replace(failure, kind=FailureKind.BUSY, code=ResponseCode.SYSTEM_BUSY)
        return await self._release(attempt, failure)

    async def _give_up(self, attempt: Attempt, failure: Failure) -> None:
        self._leave_session(attempt)
        self._end(attempt, failure, attempt.batch.live_slots())

    def _leave_session(self, attempt: Attempt) -> None:
        held = attempt.held
        assert held is not None
        attempt.lane.sequences.leave(held.session)
        held.settle()

    async def _move_or_hold(self, attempt: Attempt, failure: Failure) -> Attempt | None:
        moving: list[SendSlot] = []
        staying: list[SendSlot] = []
        for slot in attempt.batch.live_slots():
            may_move = not slot.pinned and self._topics.elsewhere(slot.queue) is not None
            (moving if may_move else staying).append(slot)
        if not staying:
            return await self._release(attempt, failure)
        if moving:
            self._nursery.start_soon(self._release_each, attempt, failure, moving)
            attempt.batch = attempt.batch.with_only(staying)
        return await self._hold(attempt, failure)

    async def _hold(self, attempt: Attempt, failure: Failure) -> Attempt | None:
        """Make the next attempt under the same sequence, when it is the turn of that."""
        held, batch = attempt.held, attempt.batch
        assert held is not None
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
            self._end(attempt, failure, live)
            return None
        self.sends.counters.retries += len(live)
        if not held.sent:
            for slot in live:
                slot.state = SlotState.WAITING
        held.session.hold(held.sequence)
        await self._pause(attempt, failure, step, live)
        await held.session.turn(held.sequence)
        if not held.sent:
            batch = batch.without_settled()
        return await self._attempt(attempt.lane, batch, held) if batch.live_slots() else None

    async def _release_each(
        self, attempt: Attempt, failure: Failure, slots: Sequence[SendSlot]
    ) -> Attempt | None:
        """Give failed slots their next step: another broker, or the head of this line again.

        A slot that goes alone stands in no line: its next attempt is made here.
        """
        is_alone = attempt.batch.is_alone
        staying: list[SendSlot] = []
        moving: list[SendSlot] = []
        pause = Retry(Where.NAMED_LEADER, 0.0)
        move_delay_s = 0.0
        for slot in slots:
            step, elsewhere = self._own_step(attempt, failure, slot)
            if step is None:
                continue
            if not slot.sent:
                slot.state = SlotState.WAITING
            if step.where is Where.OTHER_BROKER and elsewhere is not None:
                _move(slot, elsewhere)
                moving.append(slot)
                move_delay_s = max(move_delay_s, step.delay_s)
                continue
            staying.append(slot)
            where = step.where if pause.where is Where.NAMED_LEADER else pause.where
            pause = Retry(where, max(pause.delay_s, step.delay_s))
        if not is_alone:
            attempt.lane.line.requeue(staying)
        if moving:
            await self._clock.sleep(move_delay_s)
            for slot in moving:
                lane = self.lane(slot.queue.broker_name)
                if not (is_alone or slot.settled) and lane.offer(slot):
                    self._leave(lane)
        if staying:
            await self._pause(attempt, failure, pause, staying)
        for slot in (*moving, *staying):
            if is_alone and not slot.settled:
                lane = self.lane(slot.queue.broker_name)
                return await self._attempt(lane, batch_of_one(slot))
        return None

    def _own_step(
        self, attempt: Attempt, failure: Failure, slot: SendSlot
    ) -> tuple[Retry | None, MessageQueue | None]:
        """Return the next step of *slot* and a queue elsewhere; without a step, settle it."""
        kind = failure.kind
        elsewhere = None
        if kind is FailureKind.UNKNOWN:
            slot.sent = True
        elif not slot.pinned:
            elsewhere = self._topics.elsewhere(slot.queue)
        step = slot.schedule_under(self._attempts.policy).next(
            kind, self._clock.monotonic(), other_broker=elsewhere is not None
        )
        if step is None:
            self._end(attempt, failure, [slot])
        else:
            self.sends.counters.retries += 1
        return step, elsewhere

    async def _pause(
        self, attempt: Attempt, failure: Failure, step: Retry, slots: Sequence[SendSlot]
    ) -> None:
        for slot in slots:
            slot.reason = failure.remark
        if failure.code == ResponseCode.SYSTEM_BUSY or failure.kind is FailureKind.REQUESTER_AWAY:
            # It leads; questions would only add to its load.
            await self._clock.sleep(max(step.delay_s, failure.retry_after_s))
        elif step.where is not Where.NAMED_LEADER:
            await self._instance.leader_search.pause(
                attempt.lane.broker_name,
                step.delay_s,
                topic=slots[0].queue.topic if slots else "",
                failed=attempt.address,
                failed_term=attempt.term,
            )

    def _end(self, attempt: Attempt, failure: Failure, slots: Sequence[SendSlot]) -> None:
        for slot in slots:
            self.sends.fail(slot, error_of(slot, failure, attempt.lane.broker_name))

    async def _release_refused(self, attempt: Attempt) -> None:
        """Give the sends of runs that were not taken their next step."""
        # At once: a run does not wait until the pause after another one is over.
        async with trio.open_nursery() as nursery:
            for run in attempt.refused:
                failure = Failure(failure_of_code(run.code), run.code, run.remark)
                live = [slot for slot in run.slots if not slot.settled]
                nursery.start_soon(self._release_each, attempt, failure, live)

    async def _one_by_one(self, lane: Lane, slots: Sequence[SendSlot]) -> None:
        if not slots:
            return
        async with trio.open_nursery() as nursery:
            for slot in slots:
                nursery.start_soon(self._carry_one, lane, slot)


def _move(slot: SendSlot, queue: MessageQueue) -> None:
    """Give *slot* another queue."""
    slot.records = moved_records(slot.records, slot.sizes, queue.queue_id)
    slot.queue = queue
