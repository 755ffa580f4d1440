"""What tests ask of a cluster: is it all there, and has a group come to its end?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import trio

from client.consumer.pull_consumer import PullConsumer
from client.core.client_instance import ClientInstance
from client.core.errors import NoRouteError
from client.core.message_ext import MessageExt
from client.core.route import MessageQueue

GROUP = "dledger-testing"
"""Group under which tests read; it commits nothing."""

LOOK_S = 0.05

ROUTE_WAIT_S = 10.0
"""From a broker's start as leader to its registration: milliseconds, on a busy machine seconds."""


async def drain(client: ClientInstance, topic: str) -> list[MessageExt]:
    """Return every message of *topic*, queue by queue, up to where each ended at the call.

    A broker that was started just now registers a moment after it leads: its topics are waited for.

    Raises:
        NoRouteError: No broker has *topic*, `ROUTE_WAIT_S` long.
    """
    found: list[MessageExt] = []
    async with PullConsumer(client, GROUP) as consumer:
        async for _, result in consumer.drain(await _queues(consumer, topic)):
            found += result.messages
    return found


async def _queues(consumer: PullConsumer, topic: str) -> tuple[MessageQueue, ...]:
    with trio.move_on_after(ROUTE_WAIT_S):
        while True:
            try:
                return await consumer.fetch_message_queues(topic)
            except NoRouteError:
                await trio.sleep(LOOK_S)
    return await consumer.fetch_message_queues(topic)


async def assert_messages(client: ClientInstance, topic: str, bodies: Iterable[bytes]) -> None:
    """Demand that *topic* holds exactly these bodies, each as often as it is given, in any order.

    Raises:
        AssertionError: Names what is missing and what is too much.
    """
    there = Counter(bytes(message.body) for message in await drain(client, topic))
    wanted = Counter(bytes(body) for body in bodies)
    missing, extra = wanted - there, there - wanted
    if missing or extra:
        raise AssertionError(
            f"{topic}: missing {sorted(missing.elements())[:5]}, of {missing.total()}; "
            f"too much {sorted(extra.elements())[:5]}, of {extra.total()}"
        )


async def wait_for_lag(
    client: ClientInstance, group: str, topic: str, lag: int = 0, *, timeout_s: float = 10.0
) -> None:
    """Wait until *group* has at most *lag* messages of *topic* left to commit.

    Raises:
        AssertionError: Not within *timeout_s*; names the lag there is.
    """
    behind = -1
    with trio.move_on_after(timeout_s):
        # Not opened: it asks for a group that it is no member of, and gets no queues of it.
        consumer = PullConsumer(client, group)
        while True:
            # Time may be over in the middle of a look: only a whole one counts.
            seen = 0
            for queue in await _queues(consumer, topic):
                committed = await consumer.committed_offset(queue)
                begin = committed if committed is not None else await consumer.min_offset(queue)
                seen += await consumer.max_offset(queue) - begin
            behind = seen
            if behind <= lag:
                return
            await trio.sleep(LOOK_S)
    if behind < 0:
        raise AssertionError(
            f"no broker answered how far group {group} is in {topic}; is there a topic?"
        )
    raise AssertionError(f"group {group} is {behind} messages behind in {topic}, not {lag}")
