"""Connections between members: tasks that carry a node's frames.

Every member dials every other twice: a *data* connection for appends and their answers, and a
*control* connection for heartbeats and votes, which never queue behind data. A connection carries
frames one way, from the dialler; the acceptor sends its hello back and then only holds it open. A
broken connection is noticed at once, so that a killed leader is missed long before its timeout. One
`FrameSpace` limits the sum of the frames that members are sending over all connections.

What ends a connection, and what ends the node: see `Links._closing`.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

import structlog
import trio

from dledger.commitlog.errors import InvariantBroken, RemoteProtocolError, StoreError
from dledger.raft.channel import CHANNELS, RECEIVE_BYTES, Caller, DataLink, Introduction, frame_of
from dledger.raft.identity import Hello
from dledger.raft.member import RaftNode
from dledger.raft.peers import ContradictionError, NotAMemberError, Refusals
from dledger.raft.wire import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    PREFIX_BYTES,
    PeerFrame,
    PeerFrameDecoder,
)
from dledger.remoting.memory_budget import FREE_FRAME_BYTES, FrameSpace, FrameTicket
from dledger.remoting.seams import Clock, Executor, Listener, Network, Rng, Stream

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_S: Final = 2.0
"""How long a peer has to answer a connection attempt, before the next one."""

REDIAL_S: Final = 0.1
"""Pause between connection attempts; up to twice as long by chance, so that they spread."""

STRANGERS_MAX: Final = 64
"""Connections without a hello. A new one closes the oldest, so that a member can connect beside any
number of others; each holds at most a hello, 4 MiB in all. With a hello there is one connection of
each kind from each member."""

SMALL_RECEIVE_BYTES: Final = 64 << 10
"""How much is read at once while less comes: a larger block is new memory to the process each time.
"""

LISTEN_AGAIN_S: Final = 1.0
"""Pause between attempts to bind the peer port of a member that served without one."""

REFRESH_S: Final = 2.0
"""How often members are called again for their lists, when an unknown member calls."""

LOCAL: Final = frozenset(
    {
        errno.EACCES,  # a firewall of this machine
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,  # no port left to call from, or no such address here
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EPERM,
    }
)
"""Numbers of errors that this machine causes. An operator must learn of them; that a peer closed a
connection is ordinary."""

UNFINISHED_BYTES: Final = 48 << 20
"""Unfinished frames of all peers: one of the largest, and an ordinary append of every other member.
A member gets large frames from one other at a time: its leader, or the member that repairs it."""

_CLOSED = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)
"""The other side closed the connection. An error of our own disk never arrives as OSError: see
`Failure`."""

_STOPS = (StoreError, InvariantBroken)
"""Errors that end the node; all others end a connection."""


class Links:
    """All connections of one node. `run` owns every task."""

    def __init__(
        self,
        node: RaftNode,
        *,
        network: Network,
        clock: Clock,
        rng: Rng,
        executor: Executor,
    ) -> None:
        """Prepare the links; nothing is bound yet."""
        self._node = node
        self.frames = peer_frame_space()
        self._network = network
        self._clock = clock
        self._rng = rng
        self._executor = executor
        # One of each kind from each peer: a new one ends the old, which may have died unnoticed.
        self._inbound: dict[tuple[str, str], trio.CancelScope] = {}
        self._dialling: dict[str, trio.CancelScope] = {}
        self._outbound: dict[tuple[str, str], trio.CancelScope] = {}
        self._unproved: dict[trio.CancelScope, None] = {}
        self._introduction = Introduction(node, clock=clock, rng=rng)
        self._refusals = Refusals()
        self._refreshed_at_s = -REFRESH_S

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, dial, flush and keep time until cancelled; started when the port is bound.

        Raises:
            OSError: The peer port cannot be bound.
            FlushFailedError, InvariantBroken: The node must stop.
        """
        node = self._node
        host, port = node.settings.peers[node.settings.self_id]
        port = node.settings.listen_port or port
        tls = node.settings.listen_tls
        listener = None
        if node.roster.talked_to():
            listener = await self._network.listen(host, port, tls=tls)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.flusher.flush_loop, self._executor)
            nursery.start_soon(node.flusher.vote_loop, self._executor)
            nursery.start_soon(self._heartbeat_loop)
            nursery.start_soon(self._election_loop)
            nursery.start_soon(self._agree_loop)
            task_status.started()
            node.contacts.links_wake.set()
            try:
                listens = listener is not None
                if listener is not None:
                    nursery.start_soon(self._accept_loop, listener, nursery)
                while True:
                    await node.contacts.links_wake.wait()
                    wanted = node.roster.talked_to()
                    if wanted and not listens:
                        # A single member gets a second one.
                        listens = True
                        nursery.start_soon(self._listen_late, host, port, nursery)
                    self._dial(wanted, nursery)
            finally:
                if listener is not None:
                    with trio.CancelScope(shield=True):
                        await listener.aclose()

    def _dial(self, wanted: Sequence[str], nursery: trio.Nursery) -> None:
        for peer in sorted(self._dialling.keys() - set(wanted)):
            self._dialling.pop(peer).cancel()
        for peer in wanted:
            if peer not in self._dialling:
                scope = self._dialling[peer] = trio.CancelScope()
                nursery.start_soon(self._keep_linked, peer, scope)

    async def _keep_linked(self, peer: str, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for channel in CHANNELS:
                    nursery.start_soon(self._dial_loop, peer, channel)

    # -- time ------------------------------------------------------------------------------

    async def _heartbeat_loop(self) -> None:
        node = self._node
        while True:
            while not node.is_leader:
                await node.contacts.leader_wake.wait()
            await self._clock.sleep(node.settings.heartbeat_interval_s)
            node.leader.send_heartbeats()
            node.settle()

    async def _election_loop(self) -> None:
        node = self._node
        while True:
            due_in = node.candidate.due_in()
            if due_in > 0:
                await node.contacts.timer_wake.wait_or(self._clock, due_in)
            else:
                node.begin_election()
                await trio.lowlevel.checkpoint()

    async def _agree_loop(self) -> None:
        node = self._node
        node.contacts.agree_wake.set()
        while not node.identity.voters:
            await node.contacts.agree_wake.wait()
            hellos = {name: peer.hello for name, peer in node.peers.items() if peer.hello}
            agree = partial(node.identity.agree, node.settings.others, hellos)
            agreed = await self._executor.run(agree, kind="agree")
            if agreed:
                node.contacts.note_agreed()
                log.info("voters_agreed", voters=sorted(node.identity.voters))
                node.timer.lost_leader(self._clock.monotonic())
                node.contacts.timer_wake.set()

    # -- inbound ---------------------------------------------------------------------------

    async def _listen_late(self, host: str, port: int, nursery: trio.Nursery) -> None:
        """Bind the peer port of a member that serves already; a failure ends nothing."""
        tls = self._node.settings.listen_tls
        while True:
            try:
                listener = await self._network.listen(host, port, tls=tls)
                break
            except OSError as error:
                self._log_broken((host, port), str(error))
                await self._clock.sleep(LISTEN_AGAIN_S)
        try:
            await self._accept_loop(listener, nursery)
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()

    async def _accept_loop(self, listener: Listener, nursery: trio.Nursery) -> None:
        while True:
            stream = await listener.accept()
            nursery.start_soon(self._closing, stream, self._serve)

    async def _closing(self, stream: Stream, work: Callable[[Stream], Awaitable[None]]) -> bool:
        """Do *work*, close the stream in any case, and return whether no frame was refused.

        The one place that decides what an error on a connection ends. A bad frame or a closed
        connection ends the connection; so does any unexpected error, for a received frame caused
        it. A disk that fails and a log that contradicts itself end the node.
        """
        try:
            await work(stream)
        except RemoteProtocolError as error:
            self._refuse(stream.peer_address, error)
            return False
        except _CLOSED as error:
            # The dial loop dials again.
            if (reason := _tls_failure(error)) is not None:
                self._log_refused(stream.peer_address, reason)
            self._note_broken(stream.peer_address, error)
        except Exception as error:
            if _is_fatal(error):
                raise
            self._log_failed(stream.peer_address, error)
            return False
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()
        return True

    def _refuse(self, address: tuple[str, int], error: RemoteProtocolError) -> None:
        if isinstance(error, ContradictionError):
            self._node.contradictions += 1
            if self._refusals.note(str(error), self._clock.monotonic()) is not None:
                log.error("peer_contradicts", peer_address=address, error=str(error))
            return
        self._log_refused(address, str(error))
        if isinstance(error, NotAMemberError):
            self._refresh_lists()

    def _log_refused(self, address: tuple[str, int], reason: str) -> None:
        times = self._refusals.note(reason, self._clock.monotonic())
        if times is not None:
            log.warning("peer_refused", peer_address=address, error=reason, times=times)

    def _note_broken(self, address: tuple[str, int], error: BaseException) -> None:
        """Log a connection that ended because of this machine."""
        if (fault := local_fault(error)) is not None:
            self._log_broken(address, fault)

    def _log_broken(self, address: tuple[str, int], reason: str) -> None:
        times = self._refusals.note(f"broken: {reason}", self._clock.monotonic())
        if times is not None:
            log.warning("peer_link_broken", peer_address=address, error=reason, times=times)

    def _log_failed(self, address: tuple[str, int], error: Exception) -> None:
        what = type(error).__name__
        times = self._refusals.note(f"failed: {what}", self._clock.monotonic())
        if times is not None:
            log.error("peer_link_failed", peer_address=address, times=times, exc_info=error)

    def _refresh_lists(self) -> None:
        """Call the members again for their lists, if that was not done lately."""
        node, now = self._node, self._clock.monotonic()
        if (
            node.is_leader
            or not node.roster.log.index
            or node.timer.hears_leader(now)
            or now - self._refreshed_at_s < REFRESH_S
        ):
            return
        self._refreshed_at_s = now
        for (_, channel), scope in self._outbound.items():
            if channel == "data":
                scope.cancel()

    async def _serve(self, stream: Stream) -> None:
        decoder = PeerFrameDecoder(HELLO_BYTES_MAX)
        caller = await self._accept_hello(stream, decoder)
        decoder.frame_bytes_max = FRAME_BYTES_MAX
        node, hello = self._node, caller.hello
        peer, key = hello.name, (hello.name, hello.channel)
        node.contacts.on_hello(hello)
        scope = trio.CancelScope()
        if (older := self._inbound.get(key)) is not None:
            older.cancel()
        self._inbound[key] = scope
        node.contacts.count_guest(peer, 1)
        memory = FrameMemory(self.frames, stream.peer_address[0], scope.cancel, clock=self._clock)
        try:
            with scope:
                sequence = self._deliver(hello, caller.epoch, 0, caller.rest)
                await memory.update(decoder, 0, 0)
                size = SMALL_RECEIVE_BYTES
                while data := await stream.receive_some(size):
                    if type(data) is not bytes:
                        data = memoryview(data)
                    size = RECEIVE_BYTES if len(data) >= size else SMALL_RECEIVE_BYTES
                    frames = decoder.feed(data)
                    sequence = self._deliver(hello, caller.epoch, sequence, frames)
                    await memory.update(decoder, len(data), len(frames))
            memory.check()
        finally:
            memory.release()
            node.contacts.count_guest(peer, -1)
            if self._inbound.get(key) is scope:
                del self._inbound[key]
                node.contacts.maybe_lost_leader(peer)

    async def _accept_hello(self, stream: Stream, decoder: PeerFrameDecoder) -> Caller:
        while len(self._unproved) >= STRANGERS_MAX:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.cancel()
        scope = trio.CancelScope()
        self._unproved[scope] = None
        try:
            with scope:
                return await self._introduction.accept(stream, decoder)
        finally:
            self._unproved.pop(scope, None)
        raise RemoteProtocolError("too many connections without a hello")

    def _deliver(self, hello: Hello, epoch: int, sequence: int, frames: list[PeerFrame]) -> int:
        if not frames:
            return sequence
        peer = hello.name
        if not self._node.contacts.is_newest(hello):
            # Late frames of the incarnation before must not count as the new one's.
            raise RemoteProtocolError(f"{peer} has another incarnation now, or has restarted")
        checked = self._node.guards.envelope
        is_news = False
        try:
            for frame in frames:
                if checked and (frame.epoch != epoch or frame.sequence <= sequence):
                    continue  # from an earlier connection, or a second time
                sequence = max(sequence, frame.sequence)
                is_news |= self._node.receive(peer, frame)
        except RemoteProtocolError:
            self._node.settle()
            raise
        if is_news:
            self._node.settle()
        return sequence

    # -- outbound --------------------------------------------------------------------------

    async def _dial_loop(self, peer: str, channel: str) -> None:
        turn = 0
        while True:
            addresses = self._node.roster.addresses(peer)
            stream = None
            if addresses:
                host, port = addresses[turn % len(addresses)]
                try:
                    stream = await self._network.connect(
                        host,
                        port,
                        timeout_s=CONNECT_TIMEOUT_S,
                        tls=self._node.settings.dial_tls,
                    )
                except OSError as error:
                    turn += 1
                    if isinstance(error.__cause__, trio.BrokenResourceError):
                        self._log_refused((host, port), str(error))
                    self._note_broken((host, port), error)
                except (ValueError, OverflowError) as error:
                    # An address that no resolver can look up.
                    turn += 1
                    self._log_failed((host, port), error)
            if stream is not None and not await self._closing(
                stream, lambda stream: self._send(stream, peer, channel)
            ):
                turn += 1
            await self._clock.sleep(REDIAL_S * (1.0 + self._rng.random()))

    async def _send(self, stream: Stream, peer: str, channel: str) -> None:
        hello, epoch = await self._introduction.call(stream, peer, channel)
        self._node.link_up(peer, channel, hello)
        try:
            async with trio.open_nursery() as nursery:
                self._outbound[peer, channel] = nursery.cancel_scope
                nursery.start_soon(self._until_closed, stream, nursery.cancel_scope)
                send = self._send_control if channel == "control" else self._send_data
                try:
                    await send(stream, peer, epoch)
                except _CLOSED as error:
                    self._note_broken(stream.peer_address, error)
                    nursery.cancel_scope.cancel()
        finally:
            self._outbound.pop((peer, channel), None)
            self._node.link_down(peer, channel)

    async def _until_closed(self, stream: Stream, scope: trio.CancelScope) -> None:
        try:
            while await stream.receive_some(RECEIVE_BYTES):
                log.warning("peer_talks_back", peer_address=stream.peer_address)
                break
        except _CLOSED as error:
            self._note_broken(stream.peer_address, error)
        scope.cancel()

    async def _send_control(self, stream: Stream, peer: str, epoch: int) -> None:
        state, sequence = self._node.peers[peer], 0
        while True:
            await state.control_wake.wait()
            parts = []
            while state.control:
                sequence += 1
                parts.append(frame_of(state.control.popleft(), epoch, sequence))
            if parts:
                await stream.send_all(b"".join(parts))

    async def _send_data(self, stream: Stream, peer: str, epoch: int) -> None:
        await DataLink(self._node, stream, peer, epoch).run()


def _tls_failure(error: BaseException) -> str | None:
    """Return why a TLS handshake failed; None when the connection just ended."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError) and not isinstance(
        cause, ssl.SSLEOFError | ssl.SSLZeroReturnError
    ):
        return f"TLS: {cause}"
    return None


def _is_fatal(error: BaseException) -> bool:
    """Whether a node must stop: the error, or one of the errors in a group, is fatal."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_fatal, error.exceptions))
    return isinstance(error, _STOPS)


def local_fault(error: BaseException) -> str | None:
    """Return what failed on this machine; None: the other side, or the way to it, failed."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in LOCAL:
            return str(cause)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the errors of a group, and what caused each of them."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from _causes(part)
        error = error.__cause__


def peer_frame_space() -> FrameSpace:
    """Return an empty budget of memory for the frames of peers."""
    return FrameSpace(UNFINISHED_BYTES, FRAME_BYTES_MAX + PREFIX_BYTES)


class FrameMemory:
    """The memory that one connection holds of the budget.

    It takes memory for a whole frame before it reads on in it, and is not read while none is left.
    Small frames (votes, heartbeats) take none, so they never wait behind large ones.

    Args:
        address: The host of its peer.
        end: Ends the connection; called once when its frame gives way to another one.
    """

    def __init__(
        self, space: FrameSpace, address: str, end: Callable[[], None], *, clock: Clock
    ) -> None:
        self._space = space
        self._end = end
        self._clock = clock
        self._ticket = FrameTicket(address, self._give_way)
        self._ticket.is_proven = True  # a process that is no member holds a hello at most
        self.has_given_way = False

    async def update(self, decoder: PeerFrameDecoder, size: int, whole_frames: int) -> None:
        """Count *size* received bytes, which completed frames or not; wait while no memory is left.

        A checkpoint only when it waits.

        Raises RemoteProtocolError: its unfinished frame has given way to another one.
        """
        now_s = self._clock.monotonic()
        if self._ticket.held_bytes:
            if whole_frames:
                self._space.leave(self._ticket, now_s)
            else:
                self._space.progress(self._ticket, size, now_s)
        wanted = decoder.unfinished_bytes
        if wanted > FREE_FRAME_BYTES and not self._ticket.held_bytes:
            await self._acquire(wanted, decoder.pending_bytes, now_s)

    async def _acquire(self, wanted: int, pending: int, now_s: float) -> None:
        granted = trio.Event()
        self._ticket.granted = granted.set
        if self._space.take(self._ticket, wanted, pending, now_s):
            return
        while not granted.is_set():
            with self._clock.time_out(self._space.look_every_s):
                await granted.wait()
            self._space.relieve(self._clock.monotonic())

    def release(self) -> None:
        """Give back what the connection holds; it has ended. Idempotent."""
        self._space.leave(self._ticket, self._clock.monotonic())
        self._ticket.give_way = self._ticket.granted = _nothing

    def check(self) -> None:
        """Distinguish a connection that gave way from one that ended for another reason.

        Raises RemoteProtocolError: it has given way.
        """
        if self.has_given_way:
            raise RemoteProtocolError("an unfinished frame gave way to those of other members")

    def _give_way(self) -> None:
        self.has_given_way = True
        self._end()


def _nothing() -> None:
    """Stand in for the callbacks of a connection that has ended."""
