"""Accepts connections and serves each with one processor table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

import trio

from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import (
    Admission,
    ConnectionEnds,
    ConnectionLimits,
    Places,
    Turn,
)
from dledger.remoting.handling import Carry, OnAnswer
from dledger.remoting.log import get_logger
from dledger.remoting.memory_budget import MemoryBudget
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.outcome import GO_AWAY_FIELD, Condition, answer
from dledger.remoting.seams import Listener, Network, ServerTls, Stream

LOGGED_EVERY_S: Final = 1.0
"""One line for so long about connections that gave way: a flood does not write our logs."""

_log = get_logger(__name__)


RESERVED_SHARE: Final = 4
"""At most one part in this number of the connections is reserved: clients are most of them."""


class PortTable(Protocol):
    """Settings of a port."""

    max_connections: int
    reserved_connections: int


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one server.

    Attributes:
        max_connections: For one more, an idle one is closed, or it is itself where none is idle:
            each costs a descriptor and a few tasks.
        reserved_connections: Of these, places for requests of `reserved_codes` only.
        reserved_codes: Administration and registration: also taken when the budget is met.
    """

    max_connections: int = 10_000
    reserved_connections: int = 0
    reserved_codes: frozenset[int] = frozenset()
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)

    @classmethod
    def of(
        cls, table: PortTable, reserved_codes: frozenset[int], connection: ConnectionLimits
    ) -> Self:
        """Return the limits that the settings of a port set."""
        most = table.max_connections
        reserved = min(table.reserved_connections, most // RESERVED_SHARE)
        return cls(most, reserved, reserved_codes, connection)


class RemotingServer:
    """Serves requests on any number of listeners.

    *on_connect*: called for each new connection before it is served. *carry*: `Handling.carry` of
    each that is accepted from now on.
    """

    def __init__(
        self,
        network: Network,
        processors: ProcessorTable,
        *,
        limits: ServerLimits | None = None,
        tls: ServerTls | None = None,
        after_batch: Callable[[], None] | None = None,
        budget: MemoryBudget | None = None,
        turn: Turn | None = None,
        on_answer: OnAnswer | None = None,
    ) -> None:
        """Prepare a server; nothing is bound yet.

        Args:
            budget: Memory of all connections; servers of one daemon share one.
            after_batch: See `Connection`; called after each received chunk of any connection.
        """
        # In order of arrival; a dict without values.
        self.connections: dict[Connection, None] = {}
        self.on_connect: list[Callable[[Connection], None]] = []
        self.carry: Carry[Connection] | None = None
        self._network = network
        self._processors = processors
        self._limits = limits if limits is not None else ServerLimits()
        self._tls = tls
        self._after_batch = after_batch
        self._turn = turn
        self._on_answer = on_answer
        self._accepting: set[trio.CancelScope] = set()
        self.budget = budget if budget is not None else MemoryBudget()
        self.places: Places[Connection] = Places(
            self._limits.max_connections, self._limits.reserved_connections
        )
        self.ends = ConnectionEnds()
        self._reserve_processors: ProcessorTable | None = None
        self._noted: tuple[int, ...] = (0, 0, 0, 0)
        self._next_note_s = 0.0

    async def serve(
        self,
        host: str,
        port: int,
        *,
        accepting: trio.CancelScope | None = None,
        task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen on *host*:*port* and serve until cancelled, or until `drain` has ended.

        The address really bound is given to `nursery.start`. To cancel *accepting* closes the
        listener alone; its connections are served to their ends.

        Raises:
            OSError: The address cannot be bound.
        Cancellation: Closes the listener and every connection accepted by it at once.
        """
        listener = await self._network.listen(host, port, tls=self._tls)
        async with trio.open_nursery() as nursery:
            try:
                with accepting or trio.CancelScope() as accepting:
                    self._accepting.add(accepting)
                    task_status.started(listener.address)
                    await self._accept_loop(listener, nursery)
            finally:
                self._accepting.discard(accepting)
                with trio.CancelScope(shield=True):
                    await listener.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, refuse new requests, answer the open ones, then close."""
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
            connection = self._connection(stream)
            if connection is None:
                self._note_pressure()
                await stream.aclose()
                continue
            self.connections[connection] = None
            nursery.start_soon(self._serve_connection, connection)

    def _connection(self, stream: Stream) -> Connection | None:
        """Return the connection of an accepted stream, None where there is no place for it."""
        limits = self._limits
        connection = Connection(
            stream,
            self._processors,
            limits=limits.connection,
            after_batch=self._after_batch,
            budget=self.budget,
            always_taken=limits.reserved_codes,
            on_proven=self.places.prove,
            ends=self.ends,
            turn=self._turn,
            on_answer=self._on_answer,
        )
        connection.handling.carry = self.carry
        admission = self.places.admit(connection, trio.current_time())
        if admission is not Admission.SERVED:
            self._note_pressure()
        if admission is Admission.REFUSED:
            return None
        if admission is Admission.RESERVE:
            connection.handling.processors = self._for_reserve()
        return connection

    def _for_reserve(self) -> ProcessorTable:
        if self._reserve_processors is None:
            codes = self._limits.reserved_codes
            self._reserve_processors = self._processors.only(codes, self._refuse_full)
        return self._reserve_processors

    def _refuse_full(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        connection.leave_soon()
        return answer(
            asked,
            Condition.BUSY,
            f"[OVERLOAD]all {self._limits.max_connections} connections are in use, nothing was"
            " stored; try again later, or raise server.max_connections",
            **{GO_AWAY_FIELD: "true"},
        )

    async def _serve_connection(self, connection: Connection) -> None:
        try:
            for callback in self.on_connect:
                callback(connection)
            await connection.run()
        finally:
            self.connections.pop(connection, None)
            self.places.leave(connection)
            self._note_pressure()

    def _note_pressure(self) -> None:
        """Log what gave way since the last line, if anything did."""
        places, budget = self.places, self.budget
        noted = (places.given_way, places.refused, budget.given_way, budget.frames.given_way)
        now = trio.current_time()
        if noted == self._noted or now < self._next_note_s:
            return
        idle, refused, unread, unfinished = (
            new - old for new, old in zip(noted, self._noted, strict=True)
        )
        self._noted, self._next_note_s = noted, now + LOGGED_EVERY_S
        _log.warning(
            "connections_gave_way",
            idle=idle,
            refused=refused,
            unread_answers=unread,
            unfinished_frames=unfinished,
            connections=places.count,
            max_connections=self._limits.max_connections,
            budget_bytes=budget.limits.total_bytes,
            used_bytes=budget.used_bytes,
            unfinished_bytes=budget.frames.used_bytes,
        )
