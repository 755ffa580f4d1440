"""An embedded cluster for code without trio: it runs in a thread of its own.

::

    with EmbeddedBroker() as broker:
        broker.create_topic("Orders")
        run_my_service(broker.name_server_addr)
        broker.assert_messages("Orders", [b"one"])

Any client may be used, of any make: it listens on loopback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

import trio

from dledger.client.blocking import Closing, LoopThread, called, passed
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import NoRouteError
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.testing.clusters import EmbeddedCluster, embedded_cluster

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


T = TypeVar("T")
P = ParamSpec("P")

JOIN_TIMEOUT_S: Final = 30.0
"""Brokers have stopped cleanly long before."""


class EmbeddedBroker(Closing):
    """One broker, or a group of several, in a thread. Use it in ``with``, or call `close`."""

    def __init__(
        self,
        *,
        brokers: int = 1,
        topics: Mapping[str, int] | None = None,
        settings: Mapping[str, object] | None = None,
        folder: Path | None = None,
        seed: int | None = None,
    ) -> None:
        """Start it; returns when it serves. Arguments: as for `embedded_cluster`.

        Raises:
            trio.TooSlowError: No leader in time; also what a broker that cannot start raises.
        """
        cluster = embedded_cluster(
            brokers=brokers, topics=topics, settings=settings, folder=folder, seed=seed
        )
        self._loop = LoopThread(cluster, "embedded-broker", JOIN_TIMEOUT_S)
        # What `called` and `passed` call methods of, and by.
        self._inner, self._client, self._call = self._loop.opened, self, self.run

    @property
    def name_server_addr(self) -> str:
        """``host:port`` for clients."""
        return self._inner.name_server_addr

    @property
    def brokers(self) -> tuple[str, ...]:
        """Names of all brokers, running or not."""
        return self._inner.brokers

    leader = called(EmbeddedCluster.leader)
    kill = called(EmbeddedCluster.kill)
    start = called(EmbeddedCluster.start)
    stop = called(EmbeddedCluster.stop)
    restart = called(EmbeddedCluster.restart)
    partition = called(EmbeddedCluster.partition)
    heal = passed(EmbeddedCluster.heal)
    create_topic = called(EmbeddedCluster.create_topic)

    def drain(self, topic: str) -> list[MessageExt]:
        """Return every message of *topic*."""
        return self._with_client(drain, topic)

    def assert_messages(self, topic: str, bodies: Iterable[bytes]) -> None:
        """Demand that *topic* holds exactly these bodies, in any order."""
        __tracebackhide__ = True
        self._with_client(assert_messages, topic, bodies)

    def wait_for_lag(
        self, group: str, topic: str, lag: int = 0, *, timeout_s: float = 10.0
    ) -> None:
        """Wait until *group* has at most *lag* messages of *topic* left to commit."""
        __tracebackhide__ = True
        self._with_client(wait_for_lag, group, topic, lag, timeout_s=timeout_s)

    def _with_client(
        self,
        function: Callable[Concatenate[ClientInstance, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        __tracebackhide__ = True

        async def work() -> T:
            async with self._inner.client() as client:
                return await function(client, *args, **kwargs)

        return self.run(work)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run *work* in the brokers' event loop and return what it returns.

        Raises:
            RuntimeError: A broker broke and everything ended; its error is the cause.
        """
        __tracebackhide__ = True  # pytest leaves this frame out
        try:
            return self._loop.call(work)
        except AssertionError as error:
            # The way through two event loops adds nothing about what is missing.
            raise error.with_traceback(None) from None
        except trio.RunFinishedError as error:
            raise RuntimeError("the embedded cluster has ended") from (self._loop.failure or error)

    def close(self) -> None:
        """Stop everything. May be called twice.

        Raises:
            BaseException: What broke a broker while it ran.
        """
        self._loop.close()
        failure, self._loop.failure = self._loop.failure, None
        if failure is not None:
            raise failure
