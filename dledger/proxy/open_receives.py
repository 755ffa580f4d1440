"""Receives under way, and those whose clients have ended meanwhile.

::

    client ── receive ──► task of its own ── POP, held ──► broker
       │ ends                   │ goes on: brokers hand out to it still
       └── abandon ─────────────┴─► messages go back, held bytes are released
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from dledger.client.consumer.pop_calls import ReceivedMessage
from dledger.client.core.errors import RequestTimedOutError
from dledger.client.core.route import MessageQueue
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import full_name
from dledger.proxy.receives import Receives, Returned, hold_s_of
from dledger.remoting.seams import Clock

LAST_MARGIN: Final = 0.5
"""Of the margin of a call is left when it is ended; its steps end earlier, with an error that
states more."""

CAME_MAX: Final = 10_000
"""Messages of one group of which it is known that they came to a receive that was left; others wait
as if they had."""

HOLD_MARGIN_S: Final = 1.0
"""A broker begins to count the time of a receive later, as a rule by less than that."""


@dataclass(slots=True, eq=False)
class Received:
    """One receive, and what it hands out.

    Attributes:
        ends_s: When they have waited long enough for messages.
        seen: How many of its messages were written, or may have been.
        is_over: Set when brokers have answered.
        release: Called by `abandon` when nothing of it is held any more.
    """

    group: str
    answers: list[pb.ReceiveMessageResponse] = field(default_factory=list)
    messages: list[ReceivedMessage] = field(default_factory=list)
    error: Exception | None = None
    is_begun: bool = False
    ends_s: float = 0.0
    seen: int = 0
    is_over: trio.Event = field(default_factory=trio.Event)
    is_abandoned: bool = False
    release: Callable[[], None] = lambda: None


class OpenReceives:
    """The receives of all clients of a proxy, until brokers have answered."""

    def __init__(self, clock: Clock, receives: Receives) -> None:
        """Ask brokers by *receives*."""
        self._clock = clock
        self._receives = receives
        # Those without a client that brokers may answer still, by group.
        self._left: dict[str, set[Received]] = {}
        # What came to them and went back, until the last of a group is over.
        self._came: dict[str, set[tuple[MessageQueue, int]]] = {}
        self._nursery: trio.Nursery | None = None

    def begin(self, nursery: trio.Nursery) -> None:
        """Ask in tasks of *nursery* from now on."""
        self._nursery = nursery

    @property
    def left(self) -> int:
        """How many have no client any more, and no answer yet."""
        return sum(map(len, self._left.values()))

    async def receive(
        self, request: pb.ReceiveMessageRequest, caller: Caller, received: Received | None = None
    ) -> Received:
        """Receive; see `Receives.receive`.

        Args:
            received: Gets what comes; of a caller that may be cancelled before it sees the result.
        Cancellation: What brokers still hand out for it is given back; what they have handed out is
            in *received*, for `abandon`.
        """
        caller = caller.begun(self._clock)
        if received is None:
            received = Received(full_name(request.group))
        assert self._nursery is not None
        received.ends_s = self._clock.monotonic() + hold_s_of(request, caller) + HOLD_MARGIN_S
        self._nursery.start_soon(self._receive, received, request, caller)
        received.is_begun = True
        try:
            left_s = caller.left_s(LAST_MARGIN)
            if left_s is None:
                await received.is_over.wait()
            else:
                with self._clock.time_out(max(0.0, left_s)):
                    await received.is_over.wait()
        except trio.Cancelled:
            self._leave(received)
            raise
        if not received.is_over.is_set():
            self._leave(received)
            raise RequestTimedOutError("no broker answers in the time of the call")
        if received.error is not None:
            raise received.error
        return received

    async def _receive(
        self, received: Received, request: pb.ReceiveMessageRequest, caller: Caller
    ) -> None:
        unseen: list[Returned] = []
        try:
            received.answers = await self._receives.receive(
                request, caller, received.messages.append, unseen
            )
        except Exception as error:  # noqa: BLE001  # handed to the caller
            received.error = error
        except BaseException:
            received.error = RequestTimedOutError("the proxy stops while messages are received")
            raise
        finally:
            received.is_over.set()
            self._forget_left(received)
        if received.is_abandoned:
            await self._give_back(received)
        await self._receives.give_back(received.group, unseen)

    def _leave(self, received: Received) -> None:
        received.is_abandoned = True
        if received.is_begun and not received.is_over.is_set():
            self._left.setdefault(received.group, set()).add(received)

    def _forget_left(self, received: Received) -> None:
        left = self._left.get(received.group, set())
        left.discard(received)
        if not left:
            self._left.pop(received.group, None)
            self._came.pop(received.group, None)

    async def abandon(self, received: Received) -> None:
        """Let what did not reach its client come again at once, also what brokers still give.

        Returns when brokers have answered, and have taken it back.
        """
        self._leave(received)
        try:
            if received.is_begun:
                await received.is_over.wait()
            await self._give_back(received)
        finally:
            received.release()

    async def _give_back(self, received: Received) -> None:
        """Give messages back: no other receive that was left is to get them over and over.

        Of many clients that ended together each has left one: a message goes through one of them at
        once, and comes again when all of them are over.
        """
        received.answers = []
        if not received.messages:
            return
        left = self._left.get(received.group, ())
        again_s = max((each.ends_s for each in left), default=0.0) - self._clock.monotonic()
        came = self._came.setdefault(received.group, set()) if left else set()
        returned: list[Returned] = []
        for place, message in enumerate(received.messages):
            key = (message.message_queue, message.queue_offset)
            waits = key in came or len(came) >= CAME_MAX
            if not waits:
                came.add(key)
            returned.append(Returned(message, again_s * waits, place >= received.seen))
        received.messages.clear()
        await self._receives.give_back(received.group, returned)
