"""An embedded cluster for code without trio: it runs in a thread of its own.

::

    with EmbeddedBroker() as broker:
        broker.create_topic("Orders")
        run_my_service(broker.name_server_addr)
        broker.assert_messages("Orders", [b"one"])

Any client may be used, of any make: it listens on loopback.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Self, TypeVar

import trio
import trio.from_thread

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

JOIN_TIMEOUT_S: Final = 30.0
"""Brokers have stopped cleanly long before."""


class EmbeddedBroker:
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
        self._stop = trio.Event()
        self._failure: BaseException | None = None
        started: SimpleQueue[tuple[EmbeddedCluster, trio.lowlevel.TrioToken] | BaseException]
        started = SimpleQueue()

        async def main() -> None:
            async with embedded_cluster(
                brokers=brokers, topics=topics, settings=settings, folder=folder, seed=seed
            ) as cluster:
                started.put((cluster, trio.lowlevel.current_trio_token()))
                await self._stop.wait()

        def run() -> None:
            try:
                trio.run(main)
            except BaseException as error:  # noqa: BLE001  # raised where it is waited for
                self._failure = error
                started.put(error)

        self._thread = threading.Thread(target=run, name="embedded-broker", daemon=True)
        self._thread.start()
        found = started.get()
        if isinstance(found, BaseException):
            self._thread.join()
            raise found
        self._cluster, self._token = found

    @property
    def name_server_addr(self) -> str:
        """``host:port`` for clients."""
        return self._cluster.name_server_addr

    @property
    def brokers(self) -> tuple[str, ...]:
        """Names of all brokers, running or not."""
        return self._cluster.brokers

    def leader(self, *, other_than: str | None = None) -> str:
        """Return the name of the leader as soon as there is one."""
        return self.run(lambda: self._cluster.leader(other_than=other_than))

    def kill(self, name: str) -> None:
        """End a broker as a crash does."""
        self.run(lambda: self._cluster.kill(name))

    def start(self, name: str) -> None:
        """Start a broker that does not run."""
        self.run(lambda: self._cluster.start(name))

    def stop(self, name: str) -> None:
        """Stop a broker cleanly."""
        self.run(lambda: self._cluster.stop(name))

    def restart(self, name: str) -> None:
        """Stop a broker cleanly if it runs, and start it again."""
        self.run(lambda: self._cluster.restart(name))

    def partition(self, sides: Sequence[Iterable[str]]) -> None:
        """Cut brokers of different sides off from each other."""
        self.run(lambda: self._cluster.partition(sides))

    def heal(self) -> None:
        """End the partition."""

        async def heal() -> None:
            self._cluster.heal()

        self.run(heal)

    def create_topic(self, topic: str, *, queue_nums: int = 4) -> None:
        """Create a topic; it can be written and read when this returns."""
        self.run(lambda: self._cluster.create_topic(topic, queue_nums=queue_nums))

    def drain(self, topic: str) -> list[MessageExt]:
        """Return every message of *topic*."""

        async def work() -> list[MessageExt]:
            async with self._cluster.client() as client:
                return await drain(client, topic)

        return self.run(work)

    def assert_messages(self, topic: str, bodies: Iterable[bytes]) -> None:
        """Demand that *topic* holds exactly these bodies, in any order."""

        __tracebackhide__ = True

        async def work() -> None:
            async with self._cluster.client() as client:
                await assert_messages(client, topic, bodies)

        self.run(work)

    def wait_for_lag(
        self, group: str, topic: str, lag: int = 0, *, timeout_s: float = 10.0
    ) -> None:
        """Wait until *group* has at most *lag* messages of *topic* left to commit."""

        __tracebackhide__ = True

        async def work() -> None:
            async with self._cluster.client() as client:
                await wait_for_lag(client, group, topic, lag, timeout_s=timeout_s)

        self.run(work)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run *work* in the brokers' event loop and return what it returns.

        Raises:
            RuntimeError: A broker broke and everything ended; its error is the cause.
        """
        __tracebackhide__ = True  # pytest leaves this frame out
        try:
            return trio.from_thread.run(work, trio_token=self._token)
        except AssertionError as error:
            # The way through two event loops adds nothing about what is missing.
            raise error.with_traceback(None) from None
        except trio.RunFinishedError as error:
            raise RuntimeError("the embedded cluster has ended") from (self._failure or error)

    def close(self) -> None:
        """Stop everything. May be called twice.

        Raises:
            BaseException: What broke a broker while it ran.
        """
        try:
            trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        except trio.RunFinishedError:
            pass
        self._thread.join(JOIN_TIMEOUT_S)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
