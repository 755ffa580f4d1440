"""Waiting: for a wake-up, for the next second, for one's turn.

Requests that are answered later wait here, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Final, Generic, TypeVar

import trio
from msgspec import Raw

from dledger.remoting.seams import Clock

T = TypeVar("T")

# --------------------------------------------------------------------------------- for another task


class Wakeup:
    """Wakes the one task that waits on it. `set` never blocks and is idempotent."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: trio.lowlevel.Task | None = None

    def set(self) -> None:
        """Wake the waiter now, or let its next wait return at once."""
        self._is_set = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            trio.lowlevel.reschedule(waiting)

    async def wait(self) -> None:
        """Wait until set, then clear. A checkpoint.

        Raises:
            RuntimeError: Another task waits.
        Cancellation: A set that was not noticed yet stays set.
        """
        if self._waiting is not None:
            raise RuntimeError("two tasks wait for one wake-up")
        if self._is_set:
            await trio.lowlevel.checkpoint()
        else:
            self._waiting = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        self._is_set = False

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def wait_or(self, clock: Clock, seconds: float) -> bool:
        """Wait until set or until *seconds* have passed; return whether it was set."""
        with clock.time_out(seconds):
            await self.wait()
            return True
        return False


class WakeAll:
    """Wakes every task that waits on it; a later wait ends with the next `set`."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake all that wait now. Never blocks."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next `set`. A checkpoint."""
        await self._event.wait()


class Future(Generic[T]):
    """What comes by a call: it is called once with it, and one task waits for it."""

    __slots__ = ("_came", "_value")

    def __init__(self) -> None:
        self._came = trio.Event()
        self._value: list[T] = []

    def __call__(self, value: T) -> None:
        """Let `wait` return *value*."""
        self._value.append(value)
        self._came.set()

    async def wait(self) -> T:
        """Wait for the value, and return it."""
        await self._came.wait()
        return self._value[0]


# ---------------------------------------------------------------------------------- on the clock


PERIOD_S: Final = 1.0
"""A disk that is written at a GiB a second loses one percent of a small disk in that time; rates
are shown over ten seconds and more."""


async def every_second(clock: Clock, *calls: Callable[[], None]) -> None:
    """Call each of *calls* now and every second, in their order, without end.

    Args:
        calls: Cheap, and must not raise.
    Cancellation: Between two calls.
    """
    while True:
        for call in calls:
            call()
        await clock.sleep(PERIOD_S)


# ----------------------------------------------------------------------------------- for one's turn

CALLS_PER_TURN: Final = 128
"""Requests answered, messages stored again or connections closed before other tasks have their
turn. Each takes some 40 to 80 microseconds: 10 ms at most."""

CALLED_AT_ONCE: Final = 16
"""Of these, calls that need no new turn: a turn costs a switch of tasks."""

ROWS_PER_TURN: Final = 2_048
"""Rows in memory looked at in one turn: a microsecond or two each."""


async def call_in_turns(call: Callable[[T], object], items: Iterable[T], at_once: int) -> None:
    """Call *call* with each of *items*; after *at_once* of them other tasks have their turn.

    Args:
        items: Not changed by others meanwhile.
    Cancellation: Between two calls.
    """
    for place, item in enumerate(items, 1):
        call(item)
        if place % at_once == 0:
            await trio.lowlevel.checkpoint()


async def joined_in_turns(pieces: Iterable[bytes], brackets: bytes) -> Any:
    """Return a list or an object for a body, encoded; after some of it others have their turn.

    Args:
        pieces: Made one by one, when they are taken; what they are made of others may change.
        brackets: The pair of them.
    Cancellation: Between two pieces.
    """
    rows = [brackets[:1]]
    await call_in_turns(lambda piece: rows.extend((piece, b",")), pieces, CALLS_PER_TURN)
    return Raw(b"".join((*(rows[:-1] or rows), brackets[1:])))


class Turns:
    """Calls that an event makes for all that wait for it: `CALLS_PER_TURN` at once.

    They are made in their order, whatever events ask for them; `run` makes what is left, and calls
    *after_turn* then. Each stands for something that waits already, which limits their number.
    """

    def __init__(self, after_turn: Callable[[], None]) -> None:
        self._after_turn = after_turn
        self._left = CALLS_PER_TURN
        self._calls: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._next: dict[Callable[[], None], None] = {}
        self._is_calling = False
        self._wake = Wakeup()

    def next_turn(self, call: Callable[[], None]) -> None:
        """Call *call* once in the next turn, however often it is asked for."""
        self._next[call] = None
        self._wake.set()

    def call_each(self, call: Callable[[T], object], items: Iterable[T]) -> None:
        """Call *call* with each of *items*: from inside this call as far as the turn goes."""
        self._calls.extend((call, item) for item in items)
        self._go_on()

    def _go_on(self) -> None:
        if self._is_calling:
            return
        self._is_calling = True
        try:
            while self._calls and self._left:
                self._left -= 1
                call, item = self._calls.popleft()
                call(item)
        finally:
            self._is_calling = False
            if self._calls or self._left < CALLS_PER_TURN - CALLED_AT_ONCE:
                self._wake.set()

    async def run(self) -> None:
        """Make the calls that are left, without end.

        Cancellation: What is left is not called.
        """
        while True:
            await self._wake.wait()
            self._left = CALLS_PER_TURN
            calls, self._next = self._next, {}
            for call in calls:
                call()
            self._go_on()
            self._after_turn()


# --------------------------------------------------------------------------------- to be answered

LineT = TypeVar("LineT", bound=Hashable)


@dataclass(slots=True, kw_only=True, eq=False)
class HeldRequest:
    """A request that waits: in a line, for a connection, until its time is over."""

    owner: object = None
    deadline: float = 0.0
    is_held: bool = False

    @property
    def line(self) -> Any:
        """Where it waits."""
        raise NotImplementedError


HeldT = TypeVar("HeldT", bound=HeldRequest)


class HeldRequests(Generic[LineT, HeldT]):
    """Requests that wait, by line, by connection, and by the end of their time."""

    def __init__(self) -> None:
        # Dicts without values: in order of arrival, so that the oldest is answered first.
        self._lines: dict[LineT, dict[HeldT, None]] = {}
        self._of_owner: dict[object, dict[HeldT, None]] = {}
        self._deadlines: list[tuple[float, int, HeldT]] = []
        self._serial = 0
        self.count = 0

    def hold(self, request: HeldT) -> None:
        """Let a request wait."""
        request.is_held = True
        self._lines.setdefault(request.line, {})[request] = None
        self._of_owner.setdefault(request.owner, {})[request] = None
        self._serial += 1
        heappush(self._deadlines, (request.deadline, self._serial, request))
        self.count += 1

    def release(self, request: HeldT) -> None:
        """Take a request out; nothing happens to one that does not wait."""
        if not request.is_held:
            return
        request.is_held = False
        self.count -= 1
        take_out(self._lines, request.line, request)
        take_out(self._of_owner, request.owner, request)
        # The heap keeps released ones until they reach its top, or are most of it.
        if len(self._deadlines) > 2 * self.count + 64:
            self._deadlines = [item for item in self._deadlines if item[2].is_held]
            heapify(self._deadlines)

    def first(self, line: LineT) -> HeldT | None:
        """Return the one that waits longest in a line."""
        return next(iter(self._lines.get(line, ())), None)

    def waiting(self, line: LineT) -> list[HeldT]:
        """Return those that wait in a line."""
        return list(self._lines.get(line, ()))

    def release_owner(self, owner: object) -> None:
        """Take out what waits of a connection."""
        for request in list(self._of_owner.get(owner, ())):
            self.release(request)

    def all(self) -> list[HeldT]:
        """Return all that wait."""
        return [request for line in self._lines.values() for request in line]

    def take_expired(self, now: float) -> list[HeldT]:
        """Release and return those whose time is over, as many as a turn takes."""
        result = list[HeldT]()
        while len(result) < CALLS_PER_TURN:
            if (deadline := self.next_deadline) is None or deadline > now:
                break
            result.append(heappop(self._deadlines)[2])
            self.release(result[-1])
        return result

    @property
    def next_deadline(self) -> float | None:
        """When the time of the first is over; None: none waits."""
        while self._deadlines and not self._deadlines[0][2].is_held:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None


def take_out(table: dict[LineT, dict[T, None]], key: LineT, item: T) -> None:
    """Take *item* out of what stands at *key*; nothing stays there without any."""
    found = table[key]
    del found[item]
    if not found:
        del table[key]
