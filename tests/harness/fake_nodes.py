"""Programs of a fake cluster: they serve requests, and can be killed and started again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import trio
import trio.testing

from dledger.remoting.connection import Connection
from dledger.remoting.handling import Handled, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.server import RemotingServer
from dledger.testing.doubles import MemoryNetwork

Address = tuple[str, int]


@dataclass
class Seen:
    """One request a node got."""

    node: str
    code: int
    command: RemotingCommand
    at: float


@dataclass
class NodeWorld:
    """Where nodes run, and all that they were asked."""

    nursery: trio.Nursery
    network: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(host="10.0.0.9"))
    seen: list[Seen] = field(default_factory=list)

    def count(self, code: RequestCode) -> int:
        return sum(seen.code == code for seen in self.seen)


def fixed(
    number: int = 0,
    remark: str | None = None,
    ext: Mapping[str, str] = MappingProxyType({}),
    *,
    body: bytes = b"",
) -> Callable[[RemotingCommand], RemotingCommand]:
    """Return what answers every request alike."""
    return lambda asked: response_to(asked, number, remark, dict(ext), body)


class Node:
    """A program that serves requests and can be killed and started again."""

    def __init__(self, world: NodeWorld, address: str) -> None:
        self.world = world
        self.address = address
        self.processors = ProcessorTable()
        self._handlers: dict[int, Callable[[Connection, RemotingCommand], Handled]] = {}
        self.seen: list[Seen] = []
        self._scope: trio.CancelScope | None = None
        self.connections = 0

    def on(self, code: RequestCode, handler: Callable[[RemotingCommand], Handled]) -> None:
        """Answer *code* by *handler* from now on; the request is noted first."""
        self.on_from(code, lambda _, command: handler(command))

    def on_from(
        self, code: RequestCode, handler: Callable[[Connection, RemotingCommand], Handled]
    ) -> None:
        """Answer *code*, knowing whose connection it is."""
        if code not in self._handlers:
            self.processors.register(code, self._handle, Limiter(code.name, 10_000))
        self._handlers[code] = handler

    def _handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        self.seen.append(Seen(self.address, command.code, command, trio.current_time()))
        self.world.seen.append(self.seen[-1])
        return self._handlers[command.code](connection, command)

    async def start(self) -> None:
        host, port = self.address.split(":")
        await self.world.nursery.start(self._serve, host, int(port))

    async def _serve(self, host: str, port: int, task_status: trio.TaskStatus[Address]) -> None:
        with trio.CancelScope() as self._scope:
            server = RemotingServer(self.world.network, self.processors)
            await server.serve(host, port, task_status=task_status)

    async def kill(self) -> None:
        """Close the listener and every connection at once."""
        assert self._scope is not None
        self._scope.cancel()
        await trio.testing.wait_all_tasks_blocked()

    def count(self, code: RequestCode) -> int:
        return sum(seen.code == code for seen in self.seen)
