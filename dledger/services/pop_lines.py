"""Requests of POP consumers, and the lines in which those stand that found nothing.

Held requests of one group for the same queues stand in a line: each is tried when the one before
got something, so an arrival costs one look for a line and not one for each consumer.

Spec: docs/internals/decisions/0016-pop.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from commitlog.errors import MQError
from dledger.services.pop_decision import Receipt, Receive
from dledger.state.pop import Out, PopGrant, PopKey, RequestMode

LineKey = tuple[str, str, int, bool]
"""Consumer group, topic, queue id (-1: any) and whether it only asks if there is something."""


class HandedOut(NamedTuple):
    """A message that a consumer got."""

    key: PopKey
    offset: int
    out: Out


@dataclass(slots=True, kw_only=True, eq=False)
class PopAsk:
    """One request.

    Attributes:
        receive, receipts, modes: What it asks for; one of them.
        queue_id: As the request names it: -1 for any.
        invisible_ms: The new time of its receipts; None acknowledges them.
        hold_s: For how long it may wait for messages.
        is_notice: It only asks whether there are messages.
        on_done: Called exactly once, perhaps from inside `PopGrants.ask`.
        owner: Its connection.
    """

    on_done: Callable[[PopAsk, MQError | None], None]
    receive: Receive | None = None
    receipts: tuple[Receipt, ...] = ()
    invisible_ms: int | None = None
    modes: tuple[RequestMode, ...] = ()
    queue_id: int = -1
    hold_s: float = 0.0
    is_notice: bool = False
    owner: object = None
    # What became of it.
    grants: list[PopGrant] = field(default_factory=list)
    messages: list[HandedOut] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    has_messages: bool = False
    is_full: bool = False
    index: int = 0
    store_time_ms: int = 0
    deadline: float = 0.0
    is_held: bool = False
    is_current: bool = False
    """It is decided on a state that holds all that was stored before it came."""

    @property
    def line(self) -> LineKey:
        """Where it waits for messages."""
        assert self.receive is not None
        return (self.receive.group, self.receive.topic, self.queue_id, self.is_notice)


class PopLines:
    """Requests that wait for messages, by line, by connection, and by the end of their time."""

    def __init__(self) -> None:
        self._lines: dict[LineKey, dict[PopAsk, None]] = {}
        self._of_topic: dict[str, dict[LineKey, None]] = {}
        self._of_owner: dict[object, dict[PopAsk, None]] = {}
        self._deadlines: list[tuple[float, int, PopAsk]] = []
        self._serial = 0
        self.count = 0

    def hold(self, ask: PopAsk) -> None:
        """Let a request wait."""
        ask.is_held = True
        self._lines.setdefault(ask.line, {})[ask] = None
        self._of_topic.setdefault(ask.line[1], {})[ask.line] = None
        self._of_owner.setdefault(ask.owner, {})[ask] = None
        self._serial += 1
        heapq.heappush(self._deadlines, (ask.deadline, self._serial, ask))
        self.count += 1

    def release(self, ask: PopAsk) -> None:
        """Take a request out; nothing happens to one that does not wait."""
        if not ask.is_held:
            return
        ask.is_held = False
        self.count -= 1
        line = self._lines[ask.line]
        del line[ask]
        if not line:
            del self._lines[ask.line]
            of_topic = self._of_topic[ask.line[1]]
            del of_topic[ask.line]
            if not of_topic:
                del self._of_topic[ask.line[1]]
        of_owner = self._of_owner[ask.owner]
        del of_owner[ask]
        if not of_owner:
            del self._of_owner[ask.owner]
        if len(self._deadlines) > 2 * self.count + 64:
            self._deadlines = [item for item in self._deadlines if item[2].is_held]
            heapq.heapify(self._deadlines)

    def first(self, line: LineKey) -> PopAsk | None:
        """Return the one that waits longest in a line."""
        return next(iter(self._lines.get(line, ())), None)

    def of_topic(self, topic: str) -> list[LineKey]:
        """Return the lines of a topic."""
        return list(self._of_topic.get(topic, ()))

    def of_owner(self, owner: object) -> list[PopAsk]:
        """Return what waits of a connection."""
        return list(self._of_owner.get(owner, ()))

    def all(self) -> list[PopAsk]:
        """Return all that wait."""
        return [ask for line in self._lines.values() for ask in line]

    def waits(self, line: LineKey) -> int:
        """Return how many wait in a line."""
        return len(self._lines.get(line, ()))

    def take_expired(self, now: float) -> list[PopAsk]:
        """Release and return all whose time is over."""
        result = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            ask = heapq.heappop(self._deadlines)[2]
            self.release(ask)
            result.append(ask)
        return result

    @property
    def next_deadline(self) -> float | None:
        """When the time of the first is over; None: none waits."""
        while self._deadlines and not self._deadlines[0][2].is_held:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
