"""Requests of POP consumers, and the lines in which those stand that found nothing.

Held requests of one group for the same queues stand in a line: each is tried when the one before
got something, so an arrival costs one look for a line and not one for each consumer.

Spec: docs/internals/decisions/0016-pop.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dledger.commitlog.errors import MQError
from dledger.services.pop_decision import Receipt, Receive
from dledger.state.pop import Out, PopGrant, PopKey, RequestMode
from dledger.waiting import CALLS_PER_TURN, HeldRequest, HeldRequests, take_out

RECENT_S: Final = 60.0
"""A group that asked for messages of a topic so short a time ago receives them by POP."""

MAX_RECENT: Final = 10_000
"""Groups and topics that are remembered for it."""

LineKey = tuple[str, str, int, bool]
"""Consumer group, topic, queue id (-1: any) and whether it only asks if there is something."""


class HandedOut(NamedTuple):
    """A message that a consumer got."""

    key: PopKey
    offset: int
    out: Out


@dataclass(slots=True, kw_only=True, eq=False)
class PopAsk(HeldRequest):
    """One request.

    Attributes:
        receive, receipts, modes: What it asks for; one of them.
        queue_id: As the request names it: -1 for any.
        invisible_ms: The new time of its receipts; None acknowledges them.
        is_unseen: No consumer got the messages of its receipts.
        hold_s: For how long it may wait for messages.
        is_notice: It only asks whether there are messages.
        on_done: Called exactly once, perhaps from inside `PopGrants.ask`.
    """

    on_done: Callable[[PopAsk, MQError | None], None]
    receive: Receive | None = None
    receipts: tuple[Receipt, ...] = ()
    invisible_ms: int | None = None
    is_unseen: bool = False
    modes: tuple[RequestMode, ...] = ()
    queue_id: int = -1
    hold_s: float = 0.0
    is_notice: bool = False
    # What became of it.
    grants: list[PopGrant] = field(default_factory=list)
    messages: list[HandedOut] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    has_messages: bool = False
    is_full: bool = False
    index: int = 0
    store_time_ms: int = 0
    is_current: bool = False
    """It is decided on a state that holds all that was stored before it came."""

    def fail(self, error: MQError) -> None:
        """Answer with *error*."""
        self.on_done(self, error)

    @property
    def line(self) -> LineKey:
        """Where it waits for messages."""
        assert self.receive is not None
        return (self.receive.group, self.receive.topic, self.queue_id, self.is_notice)


Pair = tuple[str, str]
"""Consumer group and topic."""


class DueTimes:
    """When groups are to be looked at again in topics; the earliest time of a pair counts."""

    def __init__(self) -> None:
        self._times: dict[Pair, int] = {}
        # A time that is not that of its pair means nothing.
        self._heap: list[tuple[int, Pair]] = []

    def __len__(self) -> int:
        return len(self._times)

    def note(self, pair: Pair, at_ms: int) -> bool:
        """Note a time; tell whether none of the pair was as early."""
        known = self._times.get(pair)
        if known is not None and known <= at_ms:
            return False
        self._times[pair] = at_ms
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(at, each) for each, at in self._times.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (at_ms, pair))
        return True

    def take(self, now_ms: int) -> list[Pair]:
        """Forget and return the pairs whose time has come, as many as a turn takes."""
        taken = list[Pair]()
        while len(taken) < CALLS_PER_TURN:
            if (at_ms := self.next_ms) is None or at_ms > now_ms:
                break
            pair = heapq.heappop(self._heap)[1]
            del self._times[pair]
            taken.append(pair)
        return taken

    def clear(self) -> None:
        """Forget everything."""
        self._times.clear()
        self._heap.clear()

    @property
    def next_ms(self) -> int | None:
        """The earliest time; None: there is none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class RecentPairs:
    """Groups that asked for messages of topics a short time ago."""

    def __init__(self) -> None:
        self._asked: dict[Pair, float] = {}

    def note(self, pair: Pair, now: float) -> None:
        """Note a request; the oldest is forgotten where there are too many."""
        self._asked.pop(pair, None)
        self._asked[pair] = now
        if len(self._asked) > MAX_RECENT:
            del self._asked[next(iter(self._asked))]

    def has(self, pair: Pair, now: float) -> bool:
        """Tell whether a group asked within `RECENT_S`."""
        asked = self._asked.get(pair)
        return asked is not None and now - asked <= RECENT_S


class PopLines(HeldRequests[LineKey, PopAsk]):
    """Requests that wait for messages; their lines also by topic, and by group and topic."""

    def __init__(self) -> None:
        super().__init__()
        self._of_topic: dict[str, dict[LineKey, None]] = {}
        self._of_pair: dict[Pair, dict[LineKey, None]] = {}

    def hold(self, request: PopAsk) -> None:
        """Let a request wait."""
        super().hold(request)
        line = request.line
        self._of_topic.setdefault(line[1], {})[line] = None
        self._of_pair.setdefault(line[:2], {})[line] = None

    def release(self, request: PopAsk) -> None:
        """Take a request out; nothing happens to one that does not wait."""
        was_held = request.is_held
        super().release(request)
        if was_held and self.first(line := request.line) is None:
            take_out(self._of_topic, line[1], line)
            take_out(self._of_pair, line[:2], line)

    def of_topic(self, topic: str) -> list[LineKey]:
        """Return the lines of a topic."""
        return list(self._of_topic.get(topic, ()))

    def of_pair(self, pair: Pair) -> list[LineKey]:
        """Return the lines of a group in a topic; costs no more with many other groups there."""
        return list(self._of_pair.get(pair, ()))
