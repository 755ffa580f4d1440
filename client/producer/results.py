"""What becomes of a send: a result, those of a batch, or a future for its caller; hooks called.

A send that is under way is settled once, by its end or its deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, overload

import trio

from dledger.client.core.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    UnknownOutcomeError,
)
from dledger.client.core.hooks import (
    CommunicationMode,
    MessageType,
    SendMessageContext,
    SendMessageHook,
    call_each,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult, SendStatus
from dledger.client.producer.state import SendSlot, SlotState
from dledger.commitlog.errors import MQError
from dledger.commitlog.properties import (
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
)
from dledger.remoting.seams import Clock

# ---------------------------------------------------------------------------------- results


_STATUS: Final = {status.value: status for status in SendStatus}


class SendFuture:
    """The result of a send that is under way."""

    __slots__ = ("_slot",)

    def __init__(self, slot: SendSlot) -> None:
        self._slot = slot

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._slot.settled

    async def result(self) -> SendResult:
        """Wait for the end of the send. May be called again, by one task at a time.

        Raises:
            ClientError: See `dledger.client.producer.producer.Producer.send`.
            trio.BusyResourceError: Another task is waiting.
        Cancellation: The send goes on; call again to get its result.
        """
        slot = self._slot
        if slot.task is not None:
            raise trio.BusyResourceError("another task waits for this result")
        if slot.settled:
            await trio.lowlevel.checkpoint()
        else:
            slot.task = trio.lowlevel.current_task()

            def stop_waiting(_: object) -> trio.lowlevel.Abort:
                slot.task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(stop_waiting)
        return result_of_one(slot)


class BatchSendResult(Sequence[SendResult]):
    """Results of a batch in the order of its messages; each is made when it is looked at.

    Attributes:
        message_queue: The queue all messages of the batch are in.
        queue_offset: Of the first message; the others follow without a gap.
    """

    __slots__ = ("_slot", "message_queue", "queue_offset")

    def __init__(self, slot: SendSlot) -> None:
        self._slot = slot
        self.message_queue = slot.queue
        self.queue_offset = slot.base_offset

    @classmethod
    def of(cls, slot: SendSlot) -> BatchSendResult:
        """Return where the messages of a slot that is settled are stored.

        Raises:
            ClientError: What became of them instead.
        """
        if slot.state is not SlotState.STORED:
            assert slot.error is not None
            raise slot.error
        return cls(slot)

    def __len__(self) -> int:
        return self._slot.count

    @overload
    def __getitem__(self, index: int) -> SendResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...
    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        slot = self._slot
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(slot.count))]
        if index < 0:
            index += slot.count
        if not 0 <= index < slot.count:
            raise IndexError("no such message in the batch")
        offset_ids = slot.offset_message_id
        phy_offset = slot.phy_offset
        if phy_offset >= 0:
            sizes = slot.sizes
            phy_offset += index * slot.grown_bytes + sum(
                int.from_bytes(sizes[at : at + 4], "big") for at in range(0, index * 4, 4)
            )
        return SendResult(
            SendStatus(slot.status),
            slot.message_ids[index],
            slot.queue,
            slot.base_offset + index,
            phy_offset,
            slot.store_host,
            None if offset_ids is None else _nth(offset_ids, index),
        )


def _nth(joined: str, index: int) -> str:
    ids = joined.split(",")
    return ids[index] if index < len(ids) else ""


def result_of_one(slot: SendSlot) -> SendResult:
    """Return where the message of a slot that is settled is stored.

    Raises ClientError: what became of it instead.
    """
    if slot.state is not SlotState.STORED:
        assert slot.error is not None
        raise slot.error
    message_id = slot.message_ids
    return SendResult(
        _STATUS[slot.status],
        message_id if isinstance(message_id, str) else message_id[0],
        slot.queue,
        slot.base_offset,
        slot.phy_offset,
        slot.store_host,
        slot.offset_message_id,
        slot.recall_handle,
    )


def result_of(slot: SendSlot) -> SendResult | BatchSendResult:
    """Return where what a settled slot holds is stored, one message or a batch.

    Raises ClientError: as `result_of_one`.
    """
    return result_of_one(slot) if isinstance(slot.message_ids, str) else BatchSendResult(slot)


_DELAYS: Final = frozenset(
    {PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS}
)


@dataclass(eq=False, repr=False)
class SendHooks:
    """The hooks of one producer, and the sends they wait for the end of."""

    _hooks: Sequence[SendMessageHook]
    group: str
    born_host: str
    leader_of: Callable[[str], str | None]
    result_of: Callable[[SendSlot], SendResult | Sequence[SendResult]]

    def __post_init__(self) -> None:
        self._before = [hook.send_message_before for hook in self._hooks]
        self._after = [hook.send_message_after for hook in self._hooks]
        self._open: dict[SendSlot, SendMessageContext] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def before(self, slot: SendSlot, mode: CommunicationMode) -> None:
        """Tell that *slot* is about to leave. Nothing without hooks."""
        if not self._before:
            return
        message = slot.message
        context = self._open[slot] = SendMessageContext(
            producer_group=self.group,
            message=message,
            mq=slot.queue,
            broker_addr=self.leader_of(slot.queue.broker_name) or "",
            born_host=self.born_host,
            communication_mode=mode,
            msg_type=type_of(message) if isinstance(message, Message) else MessageType.NORMAL_MSG,
        )
        call_each(self._before, context)

    def after(self, slot: SendSlot) -> None:
        """Call the hooks with the outcome of *slot*; not twice, and not if it never left."""
        if slot.state is SlotState.STORED:
            self._ended(slot, None)
        elif slot.state is SlotState.FAILED:
            self._ended(slot, slot.error)
        else:
            self._ended(slot, UnknownOutcomeError("the caller left; the message may be stored"))

    def after_oneway(self, slot: SendSlot, error: MQError | None) -> None:
        """Tell that *slot* was handed over, or why not."""
        self._ended(slot, error)

    def _ended(self, slot: SendSlot, error: MQError | None) -> None:
        context = self._open.pop(slot, None)
        if context is None:
            return
        context.mq = slot.queue
        context.broker_addr = self.leader_of(slot.queue.broker_name) or context.broker_addr
        context.exception = error
        if slot.state is SlotState.STORED:
            context.send_result = self.result_of(slot)
        call_each(self._after, context)


def type_of(message: Message) -> MessageType:
    """Return what kind of message it is."""
    properties = message.properties or {}
    if properties.get(PROPERTY_TRANSACTION_PREPARED) == "true":
        return MessageType.TRANS_MSG_HALF
    return MessageType.DELAY_MSG if asks_for_delay(message) else MessageType.NORMAL_MSG


def asks_for_delay(message: Message) -> bool:
    """Return whether *message* is to be delivered later, by a field or a property."""
    return message.is_delayed or not _DELAYS.isdisjoint(message.properties or {})


# ---------------------------------------------------------------------------------- sends under way


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


class Timed(Protocol):
    """Something with a deadline of its own."""

    deadline: float

    def expire(self) -> None:
        """End it; it is not watched any more."""

    def forget(self) -> None:
        """Drop it: the producer is closed."""


class LiveSends:
    """The slots that are not settled, and the tasks that wait for them."""

    def __init__(self, clock: Clock, hooks: SendHooks) -> None:
        """Begin with none."""
        self.counters = SendCounters()
        self.has_hooks = bool(hooks)
        self._clock = clock
        self._hooks = hooks
        self._live: dict[SendSlot, None] = {}
        self._arriving = 0
        self._timed: dict[Timed, None] = {}
        self._next_wake = NEVER
        self._wake = trio.Event()

    def add(self, slot: SendSlot) -> None:
        """Settle *slot* by its deadline, if it is not before."""
        self._live[slot] = None
        if slot.deadline < self._next_wake:
            self._wake.set()

    def watch(self, timed: Timed) -> None:
        """Expire *timed* at its deadline, unless `unwatch` comes before."""
        self._timed[timed] = None
        if timed.deadline < self._next_wake:
            self._wake.set()

    def unwatch(self, timed: Timed) -> None:
        """Let *timed* go on beyond its deadline."""
        self._timed.pop(timed, None)

    def wait(self, slot: SendSlot) -> Awaitable[object]:
        """Return what ends when *slot* is settled; to be awaited at once.

        Cancellation: The slot is abandoned; what is on its way stays on its way.
        """
        slot.task = trio.lowlevel.current_task()
        # A coroutine less for each send.
        return trio.lowlevel.wait_task_rescheduled(partial(self._abandon, slot))  # noqa: ASYNC105

    def _abandon(self, slot: SendSlot, _: object) -> trio.lowlevel.Abort:
        slot.task = None
        slot.state = SlotState.ABANDONED
        self._live.pop(slot, None)
        self._hooks.after(slot)
        return trio.lowlevel.Abort.SUCCEEDED

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Count a send, that is not added yet, as under way inside the block."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    async def drain(self) -> None:
        """Wait for the sends under way; each ends by its deadline."""
        while self._live or self._arriving:
            await self._clock.sleep(DRAIN_PERIOD_S)

    def fail_all(self) -> None:
        """Fail every send that is under way: the producer is closed."""
        for timed in self._timed:
            timed.forget()
        self._timed.clear()
        for slot in list(self._live):
            if slot.sent or slot.state is SlotState.IN_FLIGHT:
                self.fail(slot, UnknownOutcomeError("the producer was closed during the send"))
            else:
                self.fail(slot, ClientClosedError("the producer was closed before the send"))

    async def run(self) -> None:
        """Fail sends at their deadline; waits until the earliest one."""
        while True:
            self._wake = trio.Event()
            left_s = self._expire_due()
            with trio.move_on_after(left_s):
                await self._wake.wait()

    def _expire_due(self) -> float:
        """Fail sends whose time is over; return after how long the next one's is."""
        # A hook may send, too: what is added meanwhile is looked at in another turn.
        self._next_wake = earliest = NEVER
        now = self._clock.monotonic()
        for slot in list(self._live):
            if slot.deadline <= now:
                self.expire(slot)
            else:
                earliest = min(earliest, slot.deadline)
        for timed in list(self._timed):
            if timed.deadline <= now:
                del self._timed[timed]
                timed.expire()
            else:
                earliest = min(earliest, timed.deadline)
        self._next_wake = earliest
        return earliest - now

    def expire(self, slot: SendSlot) -> None:
        """Fail *slot*, whose time is over."""
        name = slot.queue.broker_name
        if slot.sent or slot.state is SlotState.IN_FLIGHT:
            text = f"no answer from {name} in time; the message may be stored"
            self.fail(slot, UnknownOutcomeError(text))
        else:
            why = f": {slot.reason}" if slot.reason else ""
            text = f"{name} took nothing in time{why}; the message is not stored"
            self.fail(slot, BrokerUnreachableError(text))

    def fail(self, slot: SendSlot, error: ClientError) -> None:
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

    def store(self, slots: Sequence[SendSlot]) -> None:
        """Wake the tasks of *slots*, which have become STORED."""
        if self.has_hooks:
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
