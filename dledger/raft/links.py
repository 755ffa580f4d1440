"""Connections between members: thin tasks that carry a node's frames.

Every member dials every other twice: a *data* connection for appends and their answers, and a
*control* connection for heartbeats and votes, which so never queue behind data. A connection
carries frames one way, from the one that dialled; the other side sends its hello back and then
only holds it open. A broken connection is noticed at once, which is how a killed leader is
missed long before its timeout.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import structlog
import trio

from commitlog.errors import RemoteProtocolError
from dledger.raft.identity import Hello
from dledger.raft.node import Outgoing, RaftNode
from dledger.raft.proof import NONCE, NONCE_BYTES, PROOF, Side, check_nonce
from dledger.raft.refusals import Refusals
from dledger.raft.wire import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
)
from remoting.seams import Clock, Executor, Listener, Network, Rng, Stream

log = structlog.get_logger(__name__)

CHANNELS: Final = ("control", "data")

CONNECT_TIMEOUT_S: Final = 2.0
"""A peer that does not answer a connection attempt or a hello for so long is tried again."""

REDIAL_S: Final = 0.1
"""Pause between connection attempts; up to twice as long by chance, so that they spread."""

RECEIVE_BYTES: Final = 256 << 10
"""How much is read from a connection at once."""

_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class Links:
    """All connections of one node. `run` owns every task."""

    def __init__(
        self, node: RaftNode, *, network: Network, clock: Clock, rng: Rng, executor: Executor
    ) -> None:
        self._node = node
        self._network = network
        self._clock = clock
        self._rng = rng
        self._executor = executor
        # One of each kind from each peer: a new one ends the old, which may have died unnoticed.
        self._inbound: dict[tuple[str, str], trio.CancelScope] = {}
        self._dialling: dict[str, trio.CancelScope] = {}
        self._refusals = Refusals()

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
            nursery.start_soon(self._beat_loop)
            nursery.start_soon(self._election_loop)
            nursery.start_soon(self._agree_loop)
            task_status.started()
            node.contacts.links_wake.set()
            try:
                if listener is not None:
                    nursery.start_soon(self._accept_loop, listener, nursery)
                while True:
                    await node.contacts.links_wake.wait()
                    wanted = node.roster.talked_to()
                    if wanted and listener is None:
                        # A single member gets company.
                        listener = await self._network.listen(host, port, tls=tls)
                        nursery.start_soon(self._accept_loop, listener, nursery)
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

    async def _beat_loop(self) -> None:
        node = self._node
        while True:
            while not node.is_leader:
                await node.contacts.reign_wake.wait()
            await self._clock.sleep(node.settings.heartbeat_interval_s)
            node.beat()
            node.settle()

    async def _election_loop(self) -> None:
        node = self._node
        while True:
            due_in = node.election_due_in()
            if due_in > 0:
                await node.contacts.timer_wake.wait_or(self._clock, due_in)
            else:
                node.stand()
                await trio.lowlevel.checkpoint()

    async def _agree_loop(self) -> None:
        node = self._node
        node.contacts.agree_wake.set()
        while not node.identity.voters:
            await node.contacts.agree_wake.wait()
            heard = {name: peer.hello for name, peer in node.peers.items() if peer.hello}
            agree = partial(node.identity.agree, node.settings.others, heard)
            agreed = await self._executor.run(agree, kind="agree")
            if agreed:
                node.note_agreed()
                log.info("voters_agreed", voters=sorted(node.identity.voters))
                node.timer.lost_leader(self._clock.monotonic())
                node.contacts.timer_wake.set()

    # -- inbound ---------------------------------------------------------------------------

    async def _accept_loop(self, listener: Listener, nursery: trio.Nursery) -> None:
        while True:
            stream = await listener.accept()
            nursery.start_soon(self._closing, stream, self._serve)

    async def _closing(self, stream: Stream, work: Callable[[Stream], Awaitable[None]]) -> bool:
        """Do *work*, close the stream whatever happens, and tell whether the other side fitted."""
        try:
            await work(stream)
        except RemoteProtocolError as error:
            self._say_refused(stream.peer_address, str(error))
            return False
        except _GONE as error:
            # The caller's loop dials again; the other side's loss is its own affair.
            if (reason := _tls_failure(error)) is not None:
                self._say_refused(stream.peer_address, reason)
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()
        return True

    def _say_refused(self, address: tuple[str, int], reason: str) -> None:
        times = self._refusals.note(reason, self._clock.monotonic())
        if times is not None:
            log.warning("peer_refused", peer_address=address, error=reason, times=times)

    async def _serve(self, stream: Stream) -> None:
        decoder = PeerFrameDecoder(HELLO_BYTES_MAX)
        hello, said, epoch, rest = await self._receive_hello(stream, decoder, Kind.HELLO, "a peer")
        has_secret = self._node.settings.secret is not None
        if has_secret:
            rest = await self._have_it_proved(stream, decoder, hello, said, epoch, rest)
        decoder.frame_bytes_max = FRAME_BYTES_MAX
        node, peer = self._node, hello.name
        scope, key = trio.CancelScope(), (peer, hello.channel)
        node.heard(hello)
        if (older := self._inbound.get(key)) is not None:
            older.cancel()
        self._inbound[key] = scope
        node.contacts.guest(peer, 1)
        try:
            with scope:
                if not has_secret:
                    await self._say_hello(stream, Kind.HELLO_ACK, self._hello(hello.channel), epoch)
                sequence = self._deliver(hello, epoch, 0, rest)
                while data := await stream.receive_some(RECEIVE_BYTES):
                    sequence = self._deliver(hello, epoch, sequence, decoder.feed(memoryview(data)))
        finally:
            node.contacts.guest(peer, -1)
            if self._inbound.get(key) is scope:
                del self._inbound[key]
                node.contacts.maybe_lost_leader(peer)

    def _deliver(self, hello: Hello, epoch: int, sequence: int, frames: list[PeerFrame]) -> int:
        if not frames:
            return sequence
        peer = hello.name
        if not self._node.contacts.speaks_for(hello):
            # What the one before it on this name still says must not count as the new one's word.
            raise RemoteProtocolError(f"{peer} has another incarnation now")
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
                        self._say_refused((host, port), str(error))
            if stream is not None and not await self._closing(
                stream, lambda stream: self._converse(stream, peer, channel)
            ):
                turn += 1
            await self._clock.sleep(REDIAL_S * (1.0 + self._rng.random()))

    async def _converse(self, stream: Stream, peer: str, channel: str) -> None:
        epoch = 1 + self._rng.randrange((1 << 48) - 1)
        decoder = PeerFrameDecoder(HELLO_BYTES_MAX)
        own = self._hello(channel)
        await self._say_hello(stream, Kind.HELLO, own, epoch)
        hello, said, acked, _ = await self._receive_hello(stream, decoder, Kind.HELLO_ACK, peer)
        if hello.name != peer or acked != epoch:
            raise RemoteProtocolError(f"{hello.name} answers where {peer} was expected")
        secret = self._node.settings.secret
        if secret is not None:
            check_nonce(said, peer)
            proof = said.pop(PROOF, None)
            secret.check(proof, Side.ACCEPTOR, own, said, epoch, who=peer)
            answer = {PROOF: secret.proof(Side.DIALLER, own, said, epoch)}
            await self._say_hello(stream, Kind.HELLO, answer, epoch)
        self._node.link_up(peer, channel, hello)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_closed, stream, nursery.cancel_scope)
                send = self._send_control if channel == "control" else self._send_data
                try:
                    await send(stream, peer, epoch)
                except _GONE:
                    nursery.cancel_scope.cancel()
        finally:
            self._node.link_down(peer, channel)

    async def _until_closed(self, stream: Stream, scope: trio.CancelScope) -> None:
        try:
            while await stream.receive_some(RECEIVE_BYTES):
                log.warning("peer_talks_back", peer_address=stream.peer_address)
                break
        except _GONE:
            pass  # what ends the connection is the same either way
        scope.cancel()

    async def _send_control(self, stream: Stream, peer: str, epoch: int) -> None:
        state, sequence = self._node.peers[peer], 0
        while True:
            await state.control_wake.wait()
            parts = []
            while state.control:
                sequence += 1
                parts.append(_frame(state.control.popleft(), epoch, sequence))
            if parts:
                await stream.send_all(b"".join(parts))

    async def _send_data(self, stream: Stream, peer: str, epoch: int) -> None:
        node, state, sequence = self._node, self._node.peers[peer], 0
        while True:
            sent = False
            while state.replies:
                sequence, sent = sequence + 1, True
                await stream.send_all(_frame(state.replies.popleft(), epoch, sequence))
            if (append := node.next_append(peer)) is not None:
                sequence, sent = sequence + 1, True
                outgoing, views = append
                await stream.send_all(_frame(outgoing, epoch, sequence, views))
            if not sent:
                await state.data_wake.wait()

    # -- hello -----------------------------------------------------------------------------

    def _hello(self, channel: str) -> dict[str, Any]:
        """Return what this member says of itself on a new connection."""
        said = self._node.hello(channel).encode()
        if self._node.settings.secret is not None:
            said[NONCE] = self._rng.randbytes(NONCE_BYTES)
        return said

    async def _say_hello(
        self, stream: Stream, kind: Kind, said: dict[str, Any], epoch: int
    ) -> None:
        await stream.send_all(_frame(Outgoing(kind, self._node.term, (said,)), epoch, 0))

    async def _have_it_proved(
        self,
        stream: Stream,
        decoder: PeerFrameDecoder,
        hello: Hello,
        said: dict[str, Any],
        epoch: int,
        frames: list[PeerFrame],
    ) -> list[PeerFrame]:
        """Prove that this member knows the secret, and wait for the caller to do so.

        Returns:
            The frames that came behind the proof.
        Raises:
            RemoteProtocolError: The caller cannot; nothing it said has counted.
        """
        secret = self._node.settings.secret
        assert secret is not None
        check_nonce(said, hello.name)
        own = self._hello(hello.channel)
        proof = secret.proof(Side.ACCEPTOR, said, own, epoch)
        await self._say_hello(stream, Kind.HELLO_ACK, {**own, PROOF: proof}, epoch)
        frames = frames or await self._receive_first(stream, decoder, hello.name)
        first = frames[0]
        shown = first.fields[0] if first.kind is Kind.HELLO else None
        shown = shown.get(PROOF) if isinstance(shown, dict) else None
        secret.check(shown, Side.DIALLER, said, own, epoch, who=hello.name)
        return frames[1:]

    async def _receive_first(
        self, stream: Stream, decoder: PeerFrameDecoder, whose: str
    ) -> list[PeerFrame]:
        """Wait for at least one frame of somebody who introduces himself."""
        frames: list[PeerFrame] = []
        with trio.move_on_after(CONNECT_TIMEOUT_S):
            while not frames:
                data = await stream.receive_some(RECEIVE_BYTES)
                if not data:
                    raise RemoteProtocolError(f"{whose} closed before it said hello")
                frames = decoder.feed(memoryview(data))
        if not frames:
            raise RemoteProtocolError(f"no hello of {whose} within {CONNECT_TIMEOUT_S} s")
        return frames

    async def _receive_hello(
        self, stream: Stream, decoder: PeerFrameDecoder, kind: Kind, whose: str
    ) -> tuple[Hello, dict[str, Any], int, list[PeerFrame]]:
        frames = await self._receive_first(stream, decoder, whose)
        first = frames[0]
        if first.kind is not kind:
            raise RemoteProtocolError(f"a {first.kind.name} frame where a hello was expected")
        hello = Hello.decode(first.fields[0])
        settings = self._node.settings
        if (hello.cluster, hello.group) != (settings.cluster, settings.group):
            raise RemoteProtocolError(
                f"a member of group {hello.group} in cluster {hello.cluster} dialled group "
                f"{settings.group} in cluster {settings.cluster}"
            )
        if self._node.identity.is_of_another_group(hello.voters):
            raise RemoteProtocolError(
                f"{hello.name} was founded with other members: its group or this one went on alone"
            )
        if hello.name == settings.self_id or hello.channel not in CHANNELS:
            raise RemoteProtocolError(f"{hello.name!r} is this node's own name, or no channel")
        return hello, first.fields[0], first.epoch, frames[1:]


def _tls_failure(error: BaseException) -> str | None:
    """Return why a TLS handshake failed; None when the connection just ended."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError) and not isinstance(
        cause, ssl.SSLEOFError | ssl.SSLZeroReturnError
    ):
        return f"TLS: {cause}"
    return None


def _frame(
    outgoing: Outgoing, epoch: int, sequence: int, views: list[memoryview] | None = None
) -> bytes:
    head = encode_head(outgoing.kind, outgoing.term, epoch, sequence, outgoing.fields)
    return encode_frame(head, views)
