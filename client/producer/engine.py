"""Sends what a producer hands over: in requests of many or of one, repeated, each settled once.

::

    offer ─► line of the lane ─► request ─► answer ─► settled
               ▲                    ▲          │
               │                    │          ▼ failure: `NEXT` has what follows
               └── RELEASE ─────────┴── HOLD, REPEAT

A slot belongs to the engine, and its `LiveSends`, from `SendEngine.offer` until it is settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from dledger.client.producer.attempts import Answered, Attempt, Attempts, Missed
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.encoder import SlotEncoder, goes_alone
from dledger.client.producer.lane import Coalescer, Lane, SendBatch, batch_of_one, moved_records
from dledger.client.producer.queue_selection import PublishTopics
from dledger.client.producer.results import LiveSends, SendHooks
from dledger.client.producer.sequences import HeldSend, ProducerId, Sequences
from dledger.client.producer.state import Next, SendSlot, SlotState, error_of, next_of
from dledger.remoting.protocol.codes import ResponseCode


class SendEngine:
    """All sends of one producer that are under way."""

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

        *hooks*: called once for each send that is stored or has failed, before its task goes on.
        """
        self.sends = LiveSends(instance.clock, hooks)
        self._instance = instance
        self._clock = instance.clock
        self._config = config
        self._attempts = Attempts(instance, group, config, encoder, topics, self.sends)
        self._encoder = encoder
        self._topics = topics
        self._hooks = hooks
        self._producer_id = ProducerId(instance.rng)
        self._lanes: dict[str, Lane] = {}
        self._nursery: trio.Nursery | None = None

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
            assert self._nursery is not None
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
        assert self._nursery is not None
        self._nursery.start_soon(self._carry, lane, batch_of_one(slot))

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
        attempt = self._attempts.begin(lane, batch, self._attempt_ended)
        if isinstance(attempt, Attempt):
            self.sends.watch(attempt)
        else:
            lane.is_entering = attempt is None
            self._carry_soon(lane, batch, attempt)

    def _attempt_ended(self, attempt: Attempt) -> None:
        self.sends.unwatch(attempt)
        ended = self._attempts.finish(attempt)
        lane, batch = attempt.missed.lane, attempt.batch
        if isinstance(ended, Missed):
            self._carry_soon(lane, batch, ended)
        elif ended.refused:
            assert self._nursery is not None
            self._nursery.start_soon(self._release_open, ended, batch.slot_count)
        else:
            lane.request_ended(batch.slot_count)

    def _carry_soon(self, lane: Lane, batch: SendBatch, missed: Missed | None = None) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._carry_open, lane, batch, missed)

    async def _carry_open(self, lane: Lane, batch: SendBatch, missed: Missed | None) -> None:
        try:
            ended: Missed | Answered | None = missed
            if ended is None:
                try:
                    ended = await self._attempts.make(lane, batch, None)
                finally:
                    lane.entered()
            await self._carry(lane, batch, ended)
        finally:
            lane.request_ended(batch.slot_count)

    async def _carry(
        self, lane: Lane, batch: SendBatch, ended: Missed | Answered | None = None
    ) -> None:
        """Send *batch* until each of its sends is settled, or has a next step of its own.

        Args:
            ended: The first attempt, if that was made.

        Cancellation: Slots may stay unsettled; a request may have been sent.
        """
        held: HeldSend | None = ended.held if isinstance(ended, Missed) else None
        try:
            while True:
                if ended is None:
                    ended = await self._attempts.make(lane, batch, held)
                if isinstance(ended, Answered):
                    await self._one_by_one(lane, ended.alone)
                    await self._release_refused(ended)
                    return
                missed = ended
                held, batch = missed.held, missed.batch
                if not batch.live_slots():
                    return
                follows, batch, moving = self._follows(batch, missed)
                if moving:
                    assert self._nursery is not None
                    self._nursery.start_soon(self._release, missed, moving)
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
                    ended = None
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
                ended = None
        finally:
            if held is not None:
                held.settle()

    def _follows(
        self, batch: SendBatch, missed: Missed
    ) -> tuple[Next, SendBatch, Sequence[SendSlot]]:
        """Return what follows, for what, and beside a HOLD what may go to another broker."""
        follows = next_of(missed.standing, missed.failure, is_alone=batch.is_alone)
        if follows is not Next.MOVE_OR_HOLD:
            return follows, batch, ()
        moving: list[SendSlot] = []
        staying: list[SendSlot] = []
        for slot in batch.live_slots():
            may_move = not slot.pinned and self._topics.elsewhere(slot.queue) is not None
            (moving if may_move else staying).append(slot)
        if not staying:
            return Next.RELEASE, batch, ()
        return Next.HOLD, batch.with_only(staying) if moving else batch, moving

    async def _hold(self, missed: Missed, held: HeldSend, batch: SendBatch) -> bool:
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
        self.sends.counters.retries += len(live)
        if not held.sent:
            for slot in live:
                slot.state = SlotState.WAITING
        held.session.hold(held.sequence)
        await self._pause(missed, step, live)
        await held.session.turn(held.sequence)
        return True

    async def _release(self, missed: Missed, slots: Sequence[SendSlot]) -> None:
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
                if not slot.sent:
                    slot.state = SlotState.WAITING
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
                    lane = self.lane(slot.queue.broker_name)
                    if lane.offer(slot):
                        self._leave(lane)
        if staying:
            await self._pause(missed, pause, staying)

    async def _release_one(self, missed: Missed, slot: SendSlot) -> tuple[Lane, SendBatch] | None:
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

    def _own_step(self, missed: Missed, slot: SendSlot) -> tuple[Retry | None, MessageQueue | None]:
        """Return the next step of *slot* and a queue elsewhere; without a step, settle it."""
        kind = missed.failure.kind
        elsewhere = None
        if kind is FailureKind.UNKNOWN:
            slot.sent = True
        elif not slot.pinned:
            elsewhere = self._topics.elsewhere(slot.queue)
        step = slot.schedule_under(self._attempts.policy).next(
            kind, self._clock.monotonic(), other_broker=elsewhere is not None
        )
        if step is None:
            self._end(missed, [slot])
        else:
            self.sends.counters.retries += 1
        return step, elsewhere

    async def _pause(self, missed: Missed, step: Retry, slots: Sequence[SendSlot]) -> None:
        failure = missed.failure
        for slot in slots:
            slot.reason = failure.remark
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

    def _end(self, missed: Missed, slots: Sequence[SendSlot]) -> None:
        for slot in slots:
            self.sends.fail(slot, error_of(slot, missed.failure, missed.lane.broker_name))

    async def _release_refused(self, ended: Answered) -> None:
        """Give the sends of runs that were not taken their next step."""
        # At once: a run does not wait until the pause after another one is over.
        async with trio.open_nursery() as nursery:
            for run in ended.refused:
                failure = Failure(failure_of_code(run.code), run.code, run.remark)
                live = [slot for slot in run.slots if not slot.settled]
                missed = replace(ended.missed, held=None, failure=failure)
                nursery.start_soon(self._release, missed, live)

    async def _release_open(self, ended: Answered, sends: int) -> None:
        try:
            await self._release_refused(ended)
        finally:
            ended.missed.lane.request_ended(sends)

    async def _one_by_one(self, lane: Lane, slots: Sequence[SendSlot]) -> None:
        if not slots:
            return
        async with trio.open_nursery() as nursery:
            for slot in slots:
                nursery.start_soon(self._carry, lane, batch_of_one(slot))


def _move(slot: SendSlot, queue: MessageQueue) -> None:
    """Give *slot* another queue."""
    slot.records = moved_records(slot.records, slot.sizes, queue.queue_id)
    slot.queue = queue
