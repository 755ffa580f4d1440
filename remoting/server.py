"""Accepts connections and serves each with one processor table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import trio

from remoting.connection import Connection, ConnectionLimits
from remoting.processor import ProcessorTable
from remoting.seams import Listener, Network, ServerTls

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one server.

    Attributes:
        max_connections: More are closed as soon as they are accepted: each costs a descriptor and
            a few tasks.
        connection: Limits of each connection.
    """

    max_connections: int = 10_000
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)


class RemotingServer:
    """Serves requests on any number of listeners.

    Attributes:
        connections: The connections that are open now.
        on_connect: Called for each new connection before it is served.
    """

    def __init__(
        self,
        network: Network,
        processors: ProcessorTable,
        *,
        limits: ServerLimits | None = None,
        tls: ServerTls | None = None,
        after_batch: Callable[[], None] | None = None,
    ) -> None:
        """Prepare a server; nothing is bound yet.

        Args:
            after_batch: See `Connection`; called after each received chunk of any connection.
        """
        # In order of arrival; a dict without values.
        self.connections: dict[Connection, None] = {}
        self.on_connect: list[Callable[[Connection], None]] = []
        self._network = network
        self._processors = processors
        self._limits = limits if limits is not None else ServerLimits()
        self._tls = tls
        self._after_batch = after_batch
        self._accepting: list[trio.CancelScope] = []
        self._refusing = False

    async def serve(
        self,
        host: str,
        port: int,
        *,
        task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen on *host*:*port* and serve until cancelled, or until `drain` has ended.

        The address really bound is given to `nursery.start`.

        Raises:
            OSError: The address cannot be bound.
        Cancellation: Closes the listener and every connection accepted by it at once.
        """
        listener = await self._network.listen(host, port, tls=self._tls)
        async with trio.open_nursery() as nursery:
            try:
                with trio.CancelScope() as accepting:
                    self._accepting.append(accepting)
                    task_status.started(listener.address)
                    await self._accept_loop(listener, nursery)
            finally:
                with trio.CancelScope(shield=True):
                    await listener.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, refuse new requests, answer the open ones, then close.

        Args:
            timeout_s: Connections with requests still open after it are closed all the same.
        """
        for accepting in self._accepting:
            accepting.cancel()
        self._accepting.clear()
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                for connection in list(self.connections):
                    nursery.start_soon(connection.drain)
        for connection in list(self.connections):
            connection.close("server shuts down")

    async def _accept_loop(self, listener: Listener, nursery: trio.Nursery) -> None:
        while True:
            stream = await listener.accept()
            if len(self.connections) >= self._limits.max_connections:
                if not self._refusing:
                    self._refusing = True
                    _log.warning("too_many_connections", limit=self._limits.max_connections)
                await stream.aclose()
                continue
            self._refusing = False
            connection = Connection(
                stream,
                self._processors,
                limits=self._limits.connection,
                after_batch=self._after_batch,
            )
            self.connections[connection] = None
            nursery.start_soon(self._serve_connection, connection)

    async def _serve_connection(self, connection: Connection) -> None:
        try:
            for callback in self.on_connect:
                callback(connection)
            await connection.run()
        finally:
            self.connections.pop(connection, None)
