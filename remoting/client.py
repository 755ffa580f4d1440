"""Calls servers by address over one shared connection per address."""

from __future__ import annotations

import ssl
from typing import Final

import trio

from dledger.remoting.addresses import split_address
from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from dledger.remoting.errors import ConnectFailedError, RemotingError
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.signature import Credentials, RequestSigner
from dledger.remoting.seams import Network

CONNECT_TIMEOUT_S: Final = 3.0
RPC_TIMEOUT_S: Final = 3.0


class RemotingClient:
    """A pool of connections, one per "host:port", made when first needed and again when broken."""

    def __init__(
        self,
        nursery: trio.Nursery,
        network: Network,
        processors: ProcessorTable | None = None,
        *,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Prepare a client; nothing is connected yet.

        Args:
            credentials: Every request is signed with them; None: none is.
            nursery: Connections are served in it; `close` or its cancellation ends them.
            processors: Answers requests that servers send; None refuses them all.
        """
        self._nursery = nursery
        self._network = network
        self._processors = processors if processors is not None else ProcessorTable()
        self._limits = limits
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._credentials = credentials
        self._connections: dict[str, Connection] = {}
        self._connecting: dict[str, trio.Lock] = {}
        self._closed = False

    async def invoke(
        self, address: str, command: RemotingCommand, timeout_s: float = RPC_TIMEOUT_S
    ) -> RemotingCommand:
        """Send a request to *address* and return its answer, whatever its code.

        Args:
            command: Gets its opaque here; its body must not change until this returns.
            timeout_s: For everything, connecting included.
        Raises:
            ConnectFailedError: No connection; nothing was sent.
            ConnectionLostError: The connection ended; `sent`: whether the request had left.
            RequestTimedOutError: The request was sent and no answer came in time.
            TooManyInFlightError: A limit of this side; nothing was sent.
            LocalProtocolError: The request or the address cannot be written; nothing was sent.
        Cancellation: The request may have been sent; its answer is ignored.
        """
        deadline = trio.current_time() + timeout_s
        connection = self.live(address)
        if connection is None:
            connection = await self.connection(address, timeout_s)
            timeout_s = deadline - trio.current_time()
            if timeout_s <= 0:
                raise ConnectFailedError(f"connecting to {address} took all the time there was")
        return await connection.invoke(command, timeout_s)

    async def invoke_oneway(
        self, address: str, command: RemotingCommand, timeout_s: float = RPC_TIMEOUT_S
    ) -> None:
        """Hand a one-way request to the connection of *address*.

        Raises ConnectFailedError, ConnectionLostError, TooManyInFlightError, LocalProtocolError:
        nothing was sent.
        """
        connection = self.live(address)
        if connection is None:
            connection = await self.connection(address, timeout_s)
        connection.invoke_oneway(command)

    async def connection(self, address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
        """Return the connection to *address*, made now if there is none.

        Raises:
            ConnectFailedError: No connection could be made in time, or the client is closed.
            LocalProtocolError: Not "host:port".
        """
        host, port = split_address(address)
        failed = f"no connection to {address}"
        lock = self._connecting.get(address)
        if lock is None:
            lock = self._connecting[address] = trio.Lock()
        with trio.move_on_after(timeout_s) as waiting:
            async with lock:
                live = self.live(address)
                if live is not None:
                    return live
                if self._closed:
                    raise ConnectFailedError(f"{failed}: this client is closed")
                try:
                    stream = await self._network.connect(
                        host, port, timeout_s=min(timeout_s, self._connect_timeout_s), tls=self._tls
                    )
                except (OSError, UnicodeError) as error:
                    # The latter: a name that no resolver takes, such as one of a long label.
                    raise ConnectFailedError(f"{failed}: {error}") from error
                signer = self._signer()
                connection = Connection(
                    stream,
                    self._processors,
                    limits=self._limits,
                    sign=None if signer is None else signer.sign,
                )
                connection.on_close.append(lambda ended: self._forget(address, ended))
                self._nursery.start_soon(connection.run)
                if signer is not None:
                    await self._ask_for_challenge(connection, signer, failed)
                    if self._closed:
                        connection.close("client closed")
                        raise ConnectFailedError(f"{failed}: this client is closed")
                self._connections[address] = connection
                return connection
        assert waiting.cancelled_caught
        raise ConnectFailedError(f"{failed} within {timeout_s} s")

    def _signer(self) -> RequestSigner | None:
        credentials = self._credentials
        return None if credentials is None else RequestSigner(credentials, trio.current_time)

    async def _ask_for_challenge(
        self, connection: Connection, signer: RequestSigner, failed: str
    ) -> None:
        """Let *signer* sign for this connection alone, if the server knows how to check that.

        Cancellation: The connection is closed: nothing was asked over it.
        """
        question = request(RequestCode.SIGNATURE_CHALLENGE)
        try:
            answer = await connection.invoke(question, self._connect_timeout_s, is_signed=False)
        except RemotingError as error:
            connection.close("it gave no answer about signatures")
            raise ConnectFailedError(f"{failed}: {error}") from error
        except BaseException:
            connection.close("connecting was given up")
            raise
        if answer.code == ResponseCode.SUCCESS:
            signer.take_challenge(answer.ext)

    def live(self, address: str) -> Connection | None:
        """Return the connection to *address* if there is one that takes requests."""
        connection = self._connections.get(address)
        if connection is None or connection.is_closed or connection.is_sent_away:
            return None
        return connection

    def _forget(self, address: str, ended: Connection) -> None:
        if self._connections.get(address) is ended:
            del self._connections[address]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that have a live connection."""
        return tuple(self._connections)

    def disconnect(self, address: str, reason: str = "closed by the client") -> None:
        """Close the connection to *address* if there is one; calls over it end as lost."""
        connection = self._connections.get(address)
        if connection is not None:
            connection.close(reason)

    def close(self) -> None:
        """Close every connection and refuse new ones. Idempotent, returns at once."""
        self._closed = True
        for connection in list(self._connections.values()):
            connection.close("client closed")
