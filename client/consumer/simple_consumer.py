"""Receives messages one by one, each for a time, and acknowledges each: POP.

A group may have any number of such consumers: no queue belongs to one of them. A message that is
not acknowledged within its invisible time comes again, to any of them, and goes to the dead letter
topic when it came too often.

Spec: docs/internals/protocol/remoting.md, section 14.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from dledger.client.consumer.ack_lines import AckLines
from dledger.client.consumer.pop_calls import PopCalls, ReceivedMessage
from dledger.client.consumer.receive_rounds import ReceiveRounds
from dledger.client.consumer.subscriptions import SUB_ALL, SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.client_state import ManagedScope
from dledger.client.core.errors import ClientError, NoRouteError
from dledger.commitlog.errors import ConfigError, MQError

INVISIBLE_S: Final = 60.0
"""RocketMQ's popInvisibleTime."""

RECEIVE_WAIT_S: Final = 15.0
"""How long a broker holds a request that finds nothing; RocketMQ's."""

DOWN_S: Final = 5.0
"""A broker group that failed is left out for so long while others answer."""

AGAIN_S: Final = 0.5
"""Before brokers are asked again that have no messages and hold no further request."""

LATE_S: Final = 0.05
"""A broker that has held a request may answer by this amount before its time is over."""

MAX_MESSAGES: Final = 32
"""Of one `SimpleConsumer.receive`, when it names no number."""


class SimpleConsumer(ManagedScope):
    """A member of a consumer group that receives. Open it with ``async with``.

    Attributes:
        group: The consumer group.
    """

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        subscriptions: dict[str, str | SubscriptionExpression] | None = None,
        *,
        invisible_s: float = INVISIBLE_S,
        from_end: bool = False,
        in_order: bool = False,
    ) -> None:
        """Prepare a consumer; *instance* must be open when the consumer is opened.

        Args:
            subscriptions: Topic → expression; `subscribe` adds others.
            invisible_s: For how long a message that is received is this consumer's.
            from_end: A group that knows nothing of a queue begins at its end.
            in_order: A queue hands out its next messages when those before are acknowledged.
        """
        self.group = group
        self._instance = instance
        self._invisible_s = invisible_s
        self._from_end = from_end
        self._in_order = in_order
        self._subscriptions: dict[str, SubscriptionExpression] = {}
        self._subscription_changes = 0
        self._turn = 0
        self._down_until: dict[str, float] = {}
        self._calls = PopCalls(instance, group)
        self._acks = AckLines(instance, self._calls)
        self._receives = ReceiveRounds(instance, self._find, self.change_invisible)
        for topic, expression in (subscriptions or {}).items():
            self.subscribe(topic, expression)

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        self._instance.nursery  # noqa: B018  # raises ClientClosedError when it is not open
        self._instance.heartbeats.add_consumer(self.group)
        try:
            yield
        finally:
            await self._instance.heartbeats.remove_consumer(self.group)

    def subscribe(self, topic: str, expression: str | SubscriptionExpression = SUB_ALL) -> None:
        """Receive messages of *topic*, too.

        Raises:
            SubscriptionIllegalError: The text is no expression over tags.
        """
        if isinstance(expression, str):
            expression = SubscriptionExpression.by_tag(expression)
        self._subscriptions[topic] = expression
        self._subscription_changes += 1

    def unsubscribe(self, topic: str) -> None:
        """Receive nothing more of *topic*; what was received is acknowledged all the same."""
        self._subscriptions.pop(topic, None)
        self._subscription_changes += 1

    # ------------------------------------------------------------------------------ receive

    async def receive(
        self,
        max_messages: int = MAX_MESSAGES,
        invisible_s: float | None = None,
        wait_s: float = RECEIVE_WAIT_S,
    ) -> list[ReceivedMessage]:
        """Return messages of one topic and broker group, an empty list after *wait_s*.

        Calls that wait at the same time share requests, and what comes goes to the first first; not
        with ``in_order``.

        Args:
            max_messages: At most this many.
            invisible_s: For how long they are this consumer's; None: as the consumer was made.
            wait_s: How long brokers hold the request when there is nothing; 0: not at all.
        Raises:
            ConfigError: Nothing is subscribed.
            NoRouteError: No broker has a queue of a topic.
            RequestFailedError: A broker refused; see its code and remark.
            RequestTimedOutError, BrokerUnreachableError: No broker answered in time. Messages may
                be out and in no hands: they come again when their time is over. A failure of one
                broker group is raised only when all others fail, too.
        Cancellation: What comes for this call goes to another one of this consumer, or back: it is
            handed out again at once, with this attempt counted. With ``in_order`` as a time-out.
        """
        if not self._subscriptions:
            raise ConfigError("nothing is subscribed: call subscribe first")
        deadline = self._instance.clock.monotonic() + wait_s
        invisible_s = self._invisible_s if invisible_s is None else invisible_s
        if self._in_order:
            # Messages of one queue are not to be out to two calls.
            return await self._find(max_messages, invisible_s, deadline)
        return await self._receives.receive(
            max_messages, deadline, (invisible_s, self._subscription_changes)
        )

    async def _find(
        self, max_messages: int, invisible_s: float, deadline: float
    ) -> list[ReceivedMessage]:
        """Return messages of the first place that has some, an empty list at *deadline*."""
        while True:
            every = await self._places()
            now = self._instance.clock.monotonic()
            # One that is down costs its whole time-out: the others are asked meanwhile.
            places = [place for place in every if self._down_until.get(place[1], now) <= now]
            places = places or every
            self._turn += 1
            first = self._turn % len(places)
            left_s = max(0.0, deadline - self._instance.clock.monotonic())
            hold_s = left_s if len(places) == 1 else 0.0
            failures: list[ClientError | MQError] = []
            for topic, broker_name in (*places[first:], *places[:first]):
                try:
                    found = await self._pop(topic, broker_name, max_messages, invisible_s, hold_s)
                except (ClientError, MQError) as error:
                    failures.append(error)
                    until = self._instance.clock.monotonic() + DOWN_S
                    self._down_until[broker_name] = until
                    continue
                if found:
                    return found
            if len(failures) == len(places):
                raise failures[0]
            left_s = deadline - self._instance.clock.monotonic()
            if left_s <= (LATE_S if len(places) == 1 else 0.0):
                return []
            is_noticed = len(places) > 1 and await self._is_noticed(places, deadline)
            if not is_noticed:
                # It was not held: as many wait at the broker as it lets.
                left_s = max(0.0, deadline - self._instance.clock.monotonic())
                await self._instance.clock.sleep(min(AGAIN_S, left_s))

    async def _places(self) -> list[tuple[str, str]]:
        """Return each topic with each broker group that has queues of it."""
        places: dict[tuple[str, str], None] = {}
        for topic in self._subscriptions:
            route = await self._instance.route(topic)
            places |= dict.fromkeys((topic, queue.broker_name) for queue in route.subscribe_queues)
        if not places:
            raise NoRouteError(f"no broker has queues of {', '.join(self._subscriptions)}")
        return list(places)

    async def _pop(
        self, topic: str, broker_name: str, max_messages: int, invisible_s: float, hold_s: float
    ) -> list[ReceivedMessage]:
        expression = self._subscriptions.get(topic)
        if expression is None:
            return []
        return await self._calls.pop(
            topic,
            broker_name,
            expression,
            max_messages=max_messages,
            invisible_s=invisible_s,
            hold_s=hold_s,
            from_end=self._from_end,
            in_order=self._in_order,
        )

    async def _is_noticed(self, places: Sequence[tuple[str, str]], deadline: float) -> bool:
        """Return whether a broker has messages: at once when one has, else when all answered."""
        left_s = max(0.0, deadline - self._instance.clock.monotonic())
        is_noticed = False
        async with trio.open_nursery() as nursery:

            async def notice(topic: str, broker_name: str) -> None:
                nonlocal is_noticed
                if await self._has_messages(topic, broker_name, left_s):
                    is_noticed = True
                    nursery.cancel_scope.cancel()

            for place in places:
                nursery.start_soon(notice, *place)
        return is_noticed

    async def _has_messages(self, topic: str, broker_name: str, hold_s: float) -> bool:
        expression = self._subscriptions.get(topic, SubscriptionExpression.by_tag(SUB_ALL))
        return await self._calls.has_messages(
            topic, broker_name, expression, hold_s=hold_s, in_order=self._in_order
        )

    # ------------------------------------------------------------------------------ acknowledge

    async def ack(self, message: ReceivedMessage, *, timeout_s: float = 10.0) -> None:
        """Tell the broker that *message* is dealt with; returns when that is stored.

        Those that are asked for while a request is under way share the next one.

        Raises:
            ReceiptStaleError: It is not this consumer's any more; another one may have it, and it
                may have been acknowledged.
            RequestTimedOutError: It may be acknowledged or not, and comes again if not.
            RequestFailedError: Refused; not acknowledged.
            BrokerUnreachableError, ClientClosedError: Not sent, not acknowledged.
        Cancellation: As a time-out.
        """
        await self._acks.ack(message.message_queue, message.receipt, timeout_s=timeout_s)

    async def ack_all(
        self, messages: Sequence[ReceivedMessage], *, timeout_s: float = 10.0
    ) -> None:
        """Acknowledge *messages* with one request for each broker group they came from.

        Raises:
            ReceiptStaleError: Some are not this consumer's any more; the others of the same broker
                group are acknowledged.
            RequestTimedOutError, RequestFailedError: As `ack`; what other groups acknowledged
                stays so.
        """
        await self._calls.ack_all(messages, timeout_s=timeout_s)

    async def change_invisible(
        self, message: ReceivedMessage, invisible_s: float, *, timeout_s: float = 10.0
    ) -> None:
        """Have *message* for *invisible_s* from now on; its `receipt` is another one then.

        Raises:
            ReceiptStaleError, RequestTimedOutError, RequestFailedError: As `ack`; its receipt
                stays as it is.
        """
        message.receipt = await self._calls.change_invisible(
            message.message_queue, message.receipt, invisible_s, timeout_s=timeout_s
        )
