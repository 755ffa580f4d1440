"""The sends of a producer that are under way: each is settled once, by its end or its deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import trio

from client.core.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    UnknownOutcomeError,
)
from client.producer.results import SendHooks
from client.producer.state import SendSlot, SlotState
from remoting.seams import Clock

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
    """The slots that are not settled, and the tasks that wait for them.

    Attributes:
        counters: See `SendCounters`.
        has_hooks: Whether hooks are called.
    """

    def __init__(self, clock: Clock, hooks: SendHooks) -> None:
        """Begin with none.

        Args:
            hooks: Called once for each send that is stored or has failed, before its task goes on.
        """
        self.counters = SendCounters()
        self.has_hooks = bool(hooks)
        self._clock = clock
        self._hooks = hooks
        self._live: dict[SendSlot, None] = {}
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

    async def drain(self) -> None:
        """Wait for the sends under way; each ends by its deadline."""
        while self._live:
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
        clock = self._clock
        while True:
            self._wake = trio.Event()
            now = clock.monotonic()
            earliest = NEVER
            for slot in list(self._live):
                if slot.deadline <= now:
                    self.expire(slot)
                elif slot.deadline < earliest:
                    earliest = slot.deadline
            for timed in list(self._timed):
                if timed.deadline <= now:
                    del self._timed[timed]
                    timed.expire()
                elif timed.deadline < earliest:
                    earliest = timed.deadline
            self._next_wake = earliest
            with trio.move_on_after(earliest - now):
                await self._wake.wait()

    def expire(self, slot: SendSlot) -> None:
        """Fail *slot*, whose time is over."""
        name = slot.queue.broker_name
        if slot.sent or slot.state is SlotState.IN_FLIGHT:
            text = f"no answer from {name} in time; the message may be stored"
            self.fail(slot, UnknownOutcomeError(text))
        else:
            text = f"{name} took nothing in time; the message is not stored"
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
