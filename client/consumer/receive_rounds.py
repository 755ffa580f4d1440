"""Receives of one consumer: those that wait share requests, and what comes is dealt out to them.

::

    receive ─► line ─► round: one request for the sum ─► messages, to the first first
                ▲                                             │
                └──── those that got nothing and have time ◄──┘

A round leaves at once where none is under way, or when a whole round's worth waits; else those that
come wait for one that ends in their time. A call for many messages is worth its own request.

A message that came for a call that is cancelled goes to the next one, or back: the broker hands it
out again at once, with this attempt counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

from dledger.client.consumer.pop_calls import ReceivedMessage
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientClosedError, RequestTimedOutError, same_again
from dledger.commitlog.errors import MQError

ROUND_MESSAGES_MAX: Final = 256
"""Messages that calls ask for together."""

ALONE_MESSAGES_MIN: Final = 32
"""A call for that many messages shares no request."""

GRACE_S: Final = 0.05
"""A call whose time is over so soon ends with those whose time is over now."""

GIVE_BACK_S: Final = 0.001
"""Invisible time of a message that no call waits for any more: the shortest there is."""

Find = Callable[[int, float, float], Awaitable[list[ReceivedMessage]]]
"""Receives at most that many messages, for that many seconds, until a deadline."""

LineKey = tuple[float, int]
"""Invisible time in seconds, and which subscriptions: only such calls share a request."""


@dataclass(slots=True, eq=False)
class _Call:
    """A receive that waits."""

    wanted: int
    deadline_s: float
    is_gone: bool = False
    messages: list[ReceivedMessage] = field(default_factory=list)
    error: MQError | None = None
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True, eq=False)
class _Round:
    """A request under way, and whom it is for."""

    calls: list[_Call]
    deadline_s: float

    @property
    def live(self) -> list[_Call]:
        """Return the calls that still wait."""
        return [call for call in self.calls if not call.is_gone]


@dataclass(slots=True, eq=False)
class _Line:
    """Calls that may share requests, in the order in which they came.

    Attributes:
        waiting: Those in no round: as many as there are tasks that wait, and no more.
        is_leaving: A round is about to take what waits.
    """

    waiting: deque[_Call] = field(default_factory=deque)
    rounds: dict[_Round, None] = field(default_factory=dict)
    is_leaving: bool = False

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is under way."""
        return not (self.waiting or self.rounds or self.is_leaving)

    @property
    def is_due(self) -> bool:
        """Return whether a round is to leave before one that is under way ends."""
        if not self.waiting or self.is_leaving:
            return False
        if sum(call.wanted for call in self.waiting) >= ROUND_MESSAGES_MAX:
            return True
        ends_s = [each.deadline_s for each in self.rounds]
        first_s = min(call.deadline_s for call in self.waiting)
        return not ends_s or min(ends_s) > first_s + GRACE_S

    def begin(self, calls: list[_Call]) -> _Round:
        """Return a round for *calls*, which do not wait here."""
        begun = _Round(calls, min(call.deadline_s for call in calls))
        self.rounds[begun] = None
        return begun

    def take(self) -> _Round | None:
        """Take the next round's worth of calls; None: none waits."""
        calls: list[_Call] = []
        wanted = 0
        while self.waiting and (not calls or wanted + self.waiting[0].wanted <= ROUND_MESSAGES_MAX):
            calls.append(self.waiting.popleft())
            wanted += calls[-1].wanted
        return self.begin(calls) if calls else None

    def deal(
        self, calls: Iterable[_Call], messages: Sequence[ReceivedMessage]
    ) -> Sequence[ReceivedMessage]:
        """Give messages to *calls*, then to those that wait; return what is left."""
        for call in (*calls, *self.waiting):
            if not messages:
                break
            call.messages, messages = list(messages[: call.wanted]), messages[call.wanted :]
            call.ended.set()
        self.waiting = deque(call for call in self.waiting if not call.messages)
        return messages

    def settle(self, ended: _Round, messages: Sequence[ReceivedMessage]) -> None:
        """Let calls of a round go on that have messages now, or no time; others wait in front."""
        for call in reversed(ended.live):
            if call.messages:
                continue
            # Found for others, messages may be there for this one: elsewhere, or behind them.
            if messages or call.deadline_s > ended.deadline_s + GRACE_S:
                self.waiting.appendleft(call)
            else:
                call.ended.set()


@dataclass(eq=False, repr=False)
class ReceiveRounds:
    """The receives of one consumer that are under way."""

    _instance: ClientInstance
    _find: Find
    _give_back: Callable[[ReceivedMessage, float], Awaitable[None]]

    def __post_init__(self) -> None:
        self._lines: dict[LineKey, _Line] = {}

    async def receive(self, wanted: int, deadline_s: float, key: LineKey) -> list[ReceivedMessage]:
        """Return messages, an empty list when there are none until *deadline_s*.

        Raises:
            MQError: As *find*, for each call that the request was for.
            ClientClosedError: The client is closed.
        Cancellation: What comes for this call goes to another one, or back to the broker.
        """
        line = self._lines.setdefault(key, _Line())
        call = _Call(wanted, deadline_s)
        try:
            if wanted >= ALONE_MESSAGES_MIN:
                self._instance.nursery.start_soon(self._make, key, line, line.begin([call]))
            else:
                line.waiting.append(call)
                if line.is_due:
                    self._leave(key, line)
            await call.ended.wait()
        except BaseException:
            self._gone(key, line, call)
            raise
        if call.error is not None:
            raise same_again(call.error) from call.error
        return call.messages

    def _leave(self, key: LineKey, line: _Line) -> None:
        """Begin a round one tick later: those that call in this one go together."""
        self._instance.nursery.start_soon(self._run, key, line)
        line.is_leaving = True

    def _go_on(self, key: LineKey, line: _Line) -> None:
        """As `_leave`; where the client is closed, those that wait get that error."""
        try:
            self._leave(key, line)
        except ClientClosedError as error:
            _fail(line.waiting, error)
            line.waiting.clear()

    def _gone(self, key: LineKey, line: _Line, call: _Call) -> None:
        call.is_gone = True
        if call in line.waiting:
            line.waiting.remove(call)
        if call.messages:
            self._return(line.deal((), call.messages))
        self._forget(key, line)

    def _forget(self, key: LineKey, line: _Line) -> None:
        if line.is_idle and self._lines.get(key) is line:
            del self._lines[key]

    async def _run(self, key: LineKey, line: _Line) -> None:
        """Make one round, and begin the next for those that wait by then.

        Cancellation: The client closes; callers get errors.
        """
        line.is_leaving = False
        taken = line.take()
        if taken is not None:
            if line.is_due:
                self._go_on(key, line)
            await self._make(key, line, taken)
        self._forget(key, line)

    async def _make(self, key: LineKey, line: _Line, taken: _Round) -> None:
        wanted = sum(call.wanted for call in taken.calls)
        try:
            found = await self._find(wanted, key[0], taken.deadline_s)
        except MQError as error:
            del line.rounds[taken]
            _fail(taken.calls, error)
        except BaseException:
            del line.rounds[taken]
            _fail(taken.calls, RequestTimedOutError("the client was closed while it was received"))
            _fail(line.waiting, ClientClosedError("the client was closed; nothing was received"))
            line.waiting.clear()
            raise
        else:
            del line.rounds[taken]
            left = line.deal(taken.live, found)
            line.settle(taken, found)
            self._return(left)
        if line.waiting and not line.is_leaving:
            self._go_on(key, line)
        self._forget(key, line)

    def _return(self, messages: Sequence[ReceivedMessage]) -> None:
        """Let the broker hand out again what no call waits for."""
        with suppress(ClientClosedError):  # it comes again when its time is over
            for message in messages:
                self._instance.nursery.start_soon(self._return_one, message)

    async def _return_one(self, message: ReceivedMessage) -> None:
        with suppress(MQError):  # as above
            await self._give_back(message, GIVE_BACK_S)


def _fail(calls: Iterable[_Call], error: MQError) -> None:
    for call in calls:
        call.error = error
        call.ended.set()
