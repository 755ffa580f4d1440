"""The processors of a broker over the fake group, called as a connection calls them."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any, TypeVar

import trio
import trio.testing

from dledger.commitlog.errors import MQError
from dledger.commitlog.record import pack_host
from dledger.processors.answers import refusal
from dledger.processors.wiring import BrokerProcessors, ProcessorSeams
from dledger.remoting.handling import DEFERRED, Answered
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.services.pending_configs import KnownGroups
from dledger.settings.parts import BrokerSettings, ReadLimits
from dledger.settings.tables import BrokerTable, StoreTable
from dledger.state.state_record import TopicsChange
from dledger.state.topics import TopicConfig
from dledger.testing.doubles import InlineExecutor
from tests.harness.beside import beside
from tests.harness.fake_group import BROKER, CLUSTER, LEADER, STORE_HOST, FakeConnection, FakeGroup

LEVELS_MS = tuple(
    seconds * 1000 for seconds in [1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200]
)


def topic_fields(queues: int = 1, **changes: Any) -> dict[str, str]:
    """Return the fields of UPDATE_AND_CREATE_TOPIC."""
    values = {
        "topic": "T", "defaultTopic": "TBW102", "readQueueNums": queues, "writeQueueNums": queues,
        "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false", **changes,
    }  # fmt: skip
    return {key: str(value) for key, value in values.items()}


T = TypeVar("T", BrokerTable, StoreTable)


async def later(
    connection: FakeConnection, command: RemotingCommand, handling: Awaitable[Answered]
) -> Answered:
    """Return what a handler with a task of its own answers."""
    try:
        handled = await handling
    except MQError as error:
        handled = refusal(command, error)
    if isinstance(handled, RemotingCommand):
        connection.answered(command, handled)
    return handled


def _table(kind: type[T], defaults: dict[str, Any], settings: dict[str, Any]) -> T:
    """Return a table of the settings that it has; they are taken out of *settings*."""
    named = {field.name for field in fields(kind)}
    chosen = {name: settings.pop(name) for name in list(settings) if name in named}
    return kind(**{name: value for name, value in defaults.items() if name in named} | chosen)


class Broker:
    """Calls handlers the way a connection does, without the connection."""

    def __init__(self, group: FakeGroup, **settings: Any) -> None:
        self.group = group
        self.clock = group.clock
        self.executor = InlineExecutor()
        names = {"cluster_name": CLUSTER, "broker_name": BROKER, "max_message_size": 4096}
        broker = _table(BrokerTable, names, settings)
        store = _table(StoreTable, names, settings)
        self.settings = BrokerSettings(
            LEADER,
            STORE_HOST,
            broker,
            store,
            bulk_pull_limits=ReadLimits(1000, 100_000),
            **{"max_held_pulls": 10, **settings},
        )
        self.seams = ProcessorSeams(self.clock, random.Random(1), self.executor, pid=7)
        self.processors = BrokerProcessors(group, self.settings, self.seams)
        self.connection = FakeConnection()

    def handle(self, command: RemotingCommand, connection: FakeConnection | None = None) -> Any:
        """Return what the handler returned: an answer, DEFERRED, None or an awaitable."""
        handler, _ = self.processors.handlers[command.code]  # type: ignore[index]  # keyed by RequestCode, an int
        connection = connection or self.connection
        try:
            handled = handler(connection, command)  # type: ignore[arg-type]  # a fake with what handlers use
        except MQError as error:
            handled = refusal(command, error)
        if isinstance(handled, RemotingCommand):
            connection.answered(command, handled)
        return later(connection, command, handled) if isinstance(handled, Awaitable) else handled

    def listen_at(self, host: str) -> None:
        """Take another address."""
        self.settings.store_host = self.group.store_host = pack_host(host, 10911)

    def make_group(self, name: str) -> None:
        """Have a consumer group and its retry topic, as its first pull makes them."""
        KnownGroups(self.group, self.processors.topics).make_known(name)
        self.group.settle()

    def call(
        self,
        code: int,
        ext: dict[str, Any] | None = None,
        body: bytes = b"",
        *,
        connection: FakeConnection | None = None,
        version: int = 407,
    ) -> RemotingCommand:
        """Return the answer, after the group has settled when it comes late."""
        connection = connection or self.connection
        command = request(code, dict(ext or {}), body)
        command.version = version
        handled = self.handle(command, connection)
        before = len(connection.replies)
        if isinstance(handled, Awaitable):
            handled = trio.run(self.finish, handled)
        if handled is DEFERRED:
            self.group.settle()
            assert len(connection.replies) == before + 1, "not answered"
            return connection.replies[-1][1]
        assert isinstance(handled, RemotingCommand), handled
        return handled

    async def finish(
        self, handled: Awaitable[Any], event: Callable[[], object] | None = None
    ) -> Any:
        """Return what a handler that waits returns, after the group has settled or an *event*."""

        async def settle() -> None:
            await trio.testing.wait_all_tasks_blocked()
            (event or self.group.settle)()

        async with beside(settle):
            return await handled

    def make_topic(self, topic: str = "T", queues: int = 4, perm: int = 6) -> None:
        """Create a topic past the processors."""
        config = TopicConfig(topic, queues, queues, perm)
        self.group.store(TopicsChange(put=(config,)))
