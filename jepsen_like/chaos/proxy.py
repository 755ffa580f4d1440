"""A proxy between real processes: links that are cut, slow, or broken.

A process gets the proxy's port in place of another's; every connection lies on two links, one each
way, which TCP could have: what is sent arrives whole and in order, or the connection breaks. Frames
are lost, doubled or changed in the simulator alone. Members name themselves in the first frame of a
connection; in front of ports for clients all connections have one name.

On a cut link nothing arrives; what is sent waits, `WINDOW_BYTES` of it, then the sender does; new
connections are not answered until both ways are whole. After a reset both sides see RST, after the
end of a target the accepted connection does. Otherwise the end of one side arrives behind its
bytes, and neither end nor reset passes a cut link.

Only here are links slow, and connections reset, and no root is needed. Only `namespaces` lets
packets vanish, so that TCP itself has to find out.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
import trio

from dledger.commitlog.errors import ConfigError, RemoteProtocolError
from dledger.jepsen_like.chaos.proxy_pump import GONE, RECEIVE_BYTES, Direction, Ending, Link
from dledger.jepsen_like.nemesis.ground import HEALTHY, CannotBeDone, LinkFault
from dledger.raft.wire import Kind, PeerFrameDecoder
from dledger.remoting.seams import Rng

log = structlog.get_logger(__name__)

LOOPBACK: Final = "127.0.0.1"
"""Where the proxy listens and dials; never anywhere else."""

CONNECTIONS_MAX: Final = 400
"""Connections at a time; others wait unaccepted. Two descriptors each stay below 1,024."""

LISTEN_BACKLOG: Final = 128
"""Connections the kernel keeps for one port between two accepts."""

HELLO_BYTES_MAX: Final = 1 << 20
"""Longest first frame of a member, bytes; a longer one is refused."""

DIAL_TIMEOUT_S: Final = 2.0
"""A target that takes no connection for this long counts as ended."""

ACCEPT_PAUSE_S: Final = 0.1
"""Before another accept when descriptors have run out."""

_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RST: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Target:
    """The process behind a port of the proxy.

    Attributes:
        name: As members call it in their hello.
        host, port: Where it really listens.
        source: Name of all that dial this port; None: members, which send theirs.
    """

    name: str
    host: str
    port: int
    source: str | None = None


class Connection:
    """One accepted connection, from before its dialler is known to its end."""

    def __init__(self, dialler: trio.SocketStream, target: Target) -> None:
        self.target = target
        self.source = target.source
        self.dialler = dialler
        self.directions: tuple[Direction, ...] = ()
        self.scope = trio.CancelScope()
        self._streams = [dialler]

    def reset(self) -> None:
        """Break it at once; both sides see a reset. Idempotent."""
        self.scope.cancel()  # first: its tasks must not find their sockets closed
        for stream in self._streams:
            if stream.socket.fileno() >= 0:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        self.close()

    def close(self) -> None:
        """Close what is open of it."""
        for stream in self._streams:
            stream.socket.close()

    def join(self, dialled: trio.SocketStream, out: Direction, home: Direction) -> None:
        """Connect both sides."""
        self._streams.append(dialled)
        out.opposite, home.opposite = home, out
        out.begin(dialled)
        home.begin(self.dialler)
        self.directions = (out, home)

    async def carry(self) -> None:
        """Carry both ways until both have ended."""
        async with trio.open_nursery() as nursery:

            async def deliver(direction: Direction) -> None:
                if await direction.deliver() is Ending.RESET:
                    self.reset()
                nursery.cancel_scope.cancel()

            for direction in self.directions:
                nursery.start_soon(direction.read)
                nursery.start_soon(deliver, direction)


class LinkProxy:
    """Listens for all targets and owns the links between all names, also those yet to dial.

    *sometimes*: what happened how often: connections, resets (by the proxy's own doing).
    """

    def __init__(
        self, rng: Rng, targets: Mapping[int, Target], why_whole: str | None = None
    ) -> None:
        """Args:
        targets: By the port to listen on.
        why_whole: Why no link can be broken as it was asked for; None: each can.

        Raises:
            ConfigError: A target is not on this machine.
        """
        for target in targets.values():
            if target.host != LOOPBACK:
                raise ConfigError(f"{target.name} listens on {target.host}; only {LOOPBACK} may be")
        self.sometimes: Counter[str] = Counter()
        self._rng = rng
        self._targets = dict(targets)
        self._why_whole = why_whole
        self._links: defaultdict[tuple[str, str], Link] = defaultdict(Link)
        self._connections: dict[Connection, None] = {}
        self._places = trio.Semaphore(CONNECTIONS_MAX)
        self._mended = trio.lowlevel.ParkingLot()

    # -- faults ----------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from *source* to *target*; what is sent waits."""
        self._must_be_possible()
        self._links[source, target].is_cut = True

    def mend(self, source: str, target: str, *, reset: float = 0.0) -> None:
        """Let everything through again.

        *reset*: chance of each connection with bytes waiting to be broken instead.
        """
        link = self._links[source, target]
        link.is_cut = False
        for connection, direction in list(self._on(link)):
            if reset and direction.has_waiting and self._rng.random() < reset:
                self._break(connection)
            else:
                direction.link_changed()
        self._mended.unpark_all()

    def mend_all(self, *, reset: float = 0.0) -> None:
        """Heal every cut and every link."""
        for (source, target), link in list(self._links.items()):
            if link.fault is not HEALTHY:
                self.set_fault(source, target, HEALTHY)
            if link.is_cut:
                self.mend(source, target, reset=reset)

    def set_fault(self, source: str, target: str, fault: LinkFault) -> None:
        """Let a link behave like *fault*, whose delay comes on top of the real one.

        What is under way waits no longer than if it were sent now, unless *fault* limits the link.

        Raises CannotBeDone: *fault* is one of frames, or no link can be broken.
        """
        if fault != HEALTHY:
            self._must_be_possible()
        if not fault.is_plain:
            raise CannotBeDone("the proxy passes all bytes on; the simulator does this to frames")
        link = self._links[source, target]
        link.fault = fault
        if not fault.bytes_per_s:
            link.busy_until_s = 0.0
        for _, direction in self._on(link):
            direction.link_changed()

    def reset_between(self, one: str, other: str) -> int:
        """Break every connection between two names, both ends at once; return how many."""
        self._must_be_possible()
        found = [
            connection
            for connection in self._connections
            if {connection.source, connection.target.name} == {one, other}
            and not connection.scope.cancel_called
        ]
        for connection in found:
            self._break(connection)
        return len(found)

    def _must_be_possible(self) -> None:
        if self._why_whole is not None:
            raise CannotBeDone(self._why_whole)

    def _on(self, link: Link) -> Iterator[tuple[Connection, Direction]]:
        for connection in self._connections:
            for direction in connection.directions:
                if direction.link is link and not connection.scope.cancel_called:
                    yield connection, direction

    def _break(self, connection: Connection) -> None:
        self.sometimes["resets"] += 1
        connection.reset()

    # -- serving ---------------------------------------------------------------------------

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and carry until cancelled; started when all ports are bound.

        Raises:
            OSError: A port is taken; nothing is listened on.

        Cancellation: every port is closed and every connection reset.
        """
        listeners: list[tuple[trio.SocketListener, Target]] = []
        try:
            for port, target in self._targets.items():
                bound = await trio.open_tcp_listeners(port, host=LOOPBACK, backlog=LISTEN_BACKLOG)
                listeners += [(listener, target) for listener in bound]
            async with trio.open_nursery() as nursery:
                for listener, target in listeners:
                    nursery.start_soon(self._accept_loop, listener, target, nursery)
                task_status.started()
        finally:
            for listener, _ in listeners:
                listener.socket.close()

    async def _accept_loop(
        self, listener: trio.SocketListener, target: Target, nursery: trio.Nursery
    ) -> None:
        while True:
            await self._places.acquire()
            connection = Connection(await _accept(listener), target)
            self._connections[connection] = None
            self.sometimes["connections"] += 1
            nursery.start_soon(self._serve_connection, connection)

    async def _serve_connection(self, connection: Connection) -> None:
        try:
            with connection.scope:
                await self._connect(connection)
                connection.close()
        finally:
            connection.reset()
            del self._connections[connection]
            self._places.release()

    async def _connect(self, connection: Connection) -> None:
        target, early = connection.target, b""
        if connection.source is None:
            early = await self._learn_source(connection)
        if (source := connection.source) is None:
            return
        there, back = self._links[source, target.name], self._links[target.name, source]
        out = Direction(there, connection.dialler, self._rng)
        out.take(early)
        async with trio.open_nursery() as waiting:
            waiting.start_soon(_until_gone, out, connection.scope)
            await self._until_through(there, back)
            waiting.cancel_scope.cancel()
        dialled = await _dial(target)
        if dialled is None:
            self._break(connection)
            return
        connection.join(dialled, out, Direction(back, dialled, self._rng))
        await connection.carry()

    async def _learn_source(self, connection: Connection) -> bytes:
        """Read the first frame, and return all that was read; unless a member's, it has no name."""
        early = b""
        try:
            while connection.source is None:
                data = await connection.dialler.receive_some(RECEIVE_BYTES)
                if not data:
                    break
                early += data
                connection.source = _caller_of(early)
        except GONE:
            pass
        except RemoteProtocolError as error:
            log.warning("proxy_refused", target=connection.target.name, error=str(error))
            self._break(connection)
        return early

    async def _until_through(self, there: Link, back: Link) -> None:
        """Wait as a connection attempt does."""
        while True:
            while there.is_cut or back.is_cut:
                await self._mended.park()
            round_trip_s = there.fault.delay_s + back.fault.delay_s
            if not round_trip_s:
                return
            await trio.sleep(round_trip_s)
            if not (there.is_cut or back.is_cut):
                return


def _caller_of(early: bytes) -> str | None:
    """Return the name of the sender of *early*; None: its first frame is not complete."""
    if len(early) < 4:
        return None
    size = 4 + int.from_bytes(early[:4], "big")
    if size > HELLO_BYTES_MAX:
        raise RemoteProtocolError(f"a first frame of {size} bytes")
    if len(early) < size:
        return None
    frame = PeerFrameDecoder().feed(memoryview(early)[:size])[0]
    if frame.kind is not Kind.HELLO:
        raise RemoteProtocolError(f"a connection that begins with {frame.kind.name}")
    match frame.fields[0]:
        case {"name": str(name)}:
            return name
    raise RemoteProtocolError("a hello without a name")


async def _until_gone(out: Direction, scope: trio.CancelScope) -> None:
    """Cancel *scope* when the dialler goes away before it is through; keep its bytes until then."""
    await out.read()
    scope.cancel()


async def _accept(listener: trio.SocketListener) -> trio.SocketStream:
    while True:
        try:
            return await listener.accept()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
            log.warning("proxy_accept_waits", error=str(error), pause_s=ACCEPT_PAUSE_S)
            await trio.sleep(ACCEPT_PAUSE_S)


async def _dial(target: Target) -> trio.SocketStream | None:
    """Return a connection to *target*; None: there is none to be had."""
    with trio.move_on_after(DIAL_TIMEOUT_S):
        try:
            return await trio.open_tcp_stream(target.host, target.port)
        except OSError as error:
            log.info("proxy_cannot_dial", target=target.name, error=str(error))
    return None
