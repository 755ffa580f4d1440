"""One connection between members: how its ends introduce themselves, then what the data link sends.

No frame counts before the introduction. Without a secret (all members on loopback)::

    dialler ── HELLO: own name ─────────────────────► acceptor
    dialler ◄── HELLO_ACK: own name, or "refused" ──── acceptor

With a secret the dialler proves itself first, so that a process that cannot prove anything learns
no names and gets nothing to guess the secret from::

    dialler ── HELLO: own name, name of the acceptor, a nonce ─► acceptor
    dialler ◄── HELLO_ACK: a nonce ───────────────────────────── acceptor
    dialler ── HELLO: proof ───────────────────────────────────► acceptor
    dialler ◄── HELLO_ACK: own name, proof ───────────────────── acceptor

Without a secret two members that do not know each other's newest folder would refuse each other
permanently. So a refused dialler has shown its incarnation; the other one shows its own in its next
call, to the address where it finds that name.

A data link carries entries, replies and copies for repair, never votes or heartbeats. A frame
leaves in the turn that has it while the stream takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dledger.commitlog.errors import RemoteProtocolError
from dledger.raft.identity import (
    NONCE,
    NONCE_BYTES,
    PROOF,
    REFUSED,
    GroupSecret,
    Hello,
    Side,
    check_nonce,
    check_version,
)
from dledger.raft.member import RaftNode
from dledger.raft.peers import SHOWN_MAX, NotAMemberError, Outgoing
from dledger.raft.wire import (
    HELLO_BYTES_MAX,
    PROTOCOL_VERSION,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
    is_incarnation,
)
from dledger.remoting.seams import Clock, Rng, Stream, send_at_once

CHANNELS: Final = ("control", "data")

HELLO_TIMEOUT_S: Final = 2.0
"""How long to wait for the hello of a peer."""

RECEIVE_BYTES: Final = 256 << 10
"""How much is read from a connection at once."""

CALLED: Final = "to"
"""Name of the acceptor."""

SHOWN: Final = "shown"
"""Incarnations that diallers under the name of the acceptor have shown to this dialler."""

Map = dict[str, Any]
"""The one field of a HELLO or HELLO_ACK."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A dialler that has introduced itself and is known."""

    hello: Hello
    epoch: int
    rest: list[PeerFrame]
    """Frames that arrived behind its introduction."""


class Introduction:
    """Hellos and proofs of one member's connections."""

    def __init__(self, node: RaftNode, *, clock: Clock, rng: Rng) -> None:
        self._node = node
        self._clock = clock
        self._rng = rng

    # -- as acceptor -----------------------------------------------------------------------

    async def accept(self, stream: Stream, decoder: PeerFrameDecoder) -> Caller:
        """Read the hello of a dialler, and answer it.

        Raises:
            NotAMemberError: No member vouches for the dialler; it learnt no more than that.
            RemoteProtocolError: No member introduces itself so, or it proves nothing.
        """
        frames = await self._receive(stream, decoder, "a peer")
        fields = _fields_of(frames[0], Kind.HELLO)
        hello, epoch = self._read(fields), frames[0].epoch
        secret, rest = self._node.settings.secret, frames[1:]
        if secret is None:
            await self._answer(stream, hello, fields, epoch)
        else:
            rest = await self._exchange_proofs(stream, decoder, secret, hello, fields, epoch, rest)
        await self._until_known(hello)
        return Caller(hello, epoch, rest)

    async def _answer(self, stream: Stream, hello: Hello, fields: Map, epoch: int) -> None:
        roster = self._node.roster
        if not roster.is_answered(hello.key, _shown_in(fields)):
            roster.note_shown(hello)
            refusal = {"v": PROTOCOL_VERSION, REFUSED: True}
            await self._send(stream, Kind.HELLO_ACK, refusal, epoch)
            raise NotAMemberError(f"{hello.name} is no member of this group")
        own = self._own(hello)
        if not roster.is_known(hello.key):
            # It has given its name, no more. A member learns the founders when this one calls it.
            own["voters"] = {}
        await self._send(stream, Kind.HELLO_ACK, own, epoch)

    async def _exchange_proofs(
        self,
        stream: Stream,
        decoder: PeerFrameDecoder,
        secret: GroupSecret,
        hello: Hello,
        fields: Map,
        epoch: int,
        frames: list[PeerFrame],
    ) -> list[PeerFrame]:
        check_nonce(fields, hello.name)
        if fields.get(CALLED) != self._node.settings.self_id:
            raise RemoteProtocolError(f"{hello.name} calls another member")
        challenge = {"v": PROTOCOL_VERSION, NONCE: self._nonce()}
        await self._send(stream, Kind.HELLO_ACK, challenge, epoch)
        frames = frames or await self._receive(stream, decoder, hello.name)
        shown = _proof_in(frames[0])
        secret.check(shown, Side.DIALLER, fields, challenge, epoch, who=hello.name)
        # It has the secret: with any folder it belongs to the group.
        await self._send_proved(stream, secret, fields, self._own(hello), epoch)
        return frames[1:]

    async def _until_known(self, hello: Hello) -> None:
        """Wait until a member vouches for *hello*: mostly, until our own call has found it."""
        roster, contacts = self._node.roster, self._node.contacts
        with self._clock.time_out(HELLO_TIMEOUT_S):
            while not roster.is_known(hello.key):
                await contacts.found_wake.wait()
            return
        raise NotAMemberError(f"{hello.name} was not found where it should be")

    def _own(self, hello: Hello) -> Map:
        """Return this member's answer to *hello*."""
        to_member = self._node.roster.is_member(hello.key)
        return self._with_nonce(
            self._node.contacts.hello(hello.channel, to_member=to_member).encode()
        )

    # -- as dialler ------------------------------------------------------------------------

    async def call(self, stream: Stream, peer: str, channel: str) -> tuple[Hello, int]:
        """Introduce this member to *peer*, and check that *peer* answers.

        Returns:
            Its answer, and the epoch of the connection.
        Raises:
            RemoteProtocolError: It refuses, is another member, or proves nothing.
        """
        epoch = 1 + self._rng.randrange((1 << 48) - 1)
        decoder = PeerFrameDecoder(HELLO_BYTES_MAX)
        secret = self._node.settings.secret
        own = self._with_nonce(self._node.contacts.hello(channel).encode())
        if secret is not None:
            own[CALLED] = peer
        elif shown := self._node.roster.shown_by(peer):
            own[SHOWN] = list(shown)
        await self._send(stream, Kind.HELLO, own, epoch)
        frames = await self._receive(stream, decoder, peer)
        answer = _fields_of(frames[0], Kind.HELLO_ACK)
        if secret is not None and REFUSED not in answer:
            check_version(answer)
            check_nonce(answer, peer)
            if "name" in answer:
                raise RemoteProtocolError(f"{peer} answers before it asks for a proof")
            await self._send_proof(stream, secret, own, answer, epoch)
            frames = frames[1:] or await self._receive(stream, decoder, peer)
            answer = _fields_of(frames[0], Kind.HELLO_ACK)
            self._check_proved(secret, own, answer, epoch, peer)
        hello = self._read(answer)
        if hello.name != peer or frames[0].epoch != epoch:
            raise RemoteProtocolError(f"{hello.name} answers where {peer} was expected")
        return hello, epoch

    def _check_proved(
        self, secret: GroupSecret, own: Map, answer: Map, epoch: int, peer: str
    ) -> None:
        if REFUSED in answer:
            return  # a refusal needs no proof: it only ends the call
        check_nonce(answer, peer)
        proof = answer.pop(PROOF, None)
        secret.check(proof, Side.ACCEPTOR, own, answer, epoch, who=peer)

    # -- both ------------------------------------------------------------------------------

    def _with_nonce(self, fields: Map) -> Map:
        if self._node.settings.secret is not None:
            fields[NONCE] = self._nonce()
        return fields

    def _nonce(self) -> bytes:
        return self._rng.randbytes(NONCE_BYTES)

    async def _send(self, stream: Stream, kind: Kind, fields: Map, epoch: int) -> None:
        await stream.send_all(frame_of(Outgoing(kind, self._node.term, (fields,)), epoch, 0))

    async def _send_proved(
        self, stream: Stream, secret: GroupSecret, fields: Map, own: Map, epoch: int
    ) -> None:
        proof = secret.proof(Side.ACCEPTOR, fields, own, epoch)
        await self._send(stream, Kind.HELLO_ACK, {**own, PROOF: proof}, epoch)

    async def _send_proof(
        self, stream: Stream, secret: GroupSecret, own: Map, answer: Map, epoch: int
    ) -> None:
        proof = secret.proof(Side.DIALLER, own, answer, epoch)
        await self._send(stream, Kind.HELLO, {PROOF: proof}, epoch)

    async def _receive(
        self, stream: Stream, decoder: PeerFrameDecoder, whose: str
    ) -> list[PeerFrame]:
        """Wait for at least one frame of a peer that introduces itself."""
        frames: list[PeerFrame] = []
        with self._clock.time_out(HELLO_TIMEOUT_S):
            while not frames:
                data = await stream.receive_some(RECEIVE_BYTES)
                if not data:
                    raise RemoteProtocolError(f"{whose} closed before its hello")
                frames = decoder.feed(memoryview(data))
        if not frames:
            raise RemoteProtocolError(f"no hello of {whose} within {HELLO_TIMEOUT_S} s")
        return frames

    def _read(self, fields: Map) -> Hello:
        hello = Hello.decode(fields)
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
        return hello


def frame_of(
    outgoing: Outgoing, epoch: int, sequence: int, views: list[memoryview] | None = None
) -> bytes:
    """Return *outgoing* as it travels on the connection of *epoch*."""
    head = encode_head(outgoing.kind, outgoing.term, epoch, sequence, outgoing.fields)
    return encode_frame(head, views, outgoing.payload_crc)


def _fields_of(frame: PeerFrame, kind: Kind) -> Map:
    if frame.kind is not kind:
        raise RemoteProtocolError(f"a {frame.kind.name} frame where a hello was expected")
    fields = frame.fields[0]
    if not isinstance(fields, dict):
        raise RemoteProtocolError("a hello that is not a map")
    return fields


def _shown_in(fields: Map) -> tuple[str, ...]:
    shown = fields.get(SHOWN, [])
    if not isinstance(shown, list) or len(shown) > SHOWN_MAX or not all(map(is_incarnation, shown)):
        raise RemoteProtocolError("a hello with fields of the wrong type")
    return tuple(shown)


def _proof_in(frame: PeerFrame) -> object:
    fields = frame.fields[0] if frame.kind is Kind.HELLO else None
    return fields.get(PROOF) if isinstance(fields, dict) else None


class DataLink:
    """Sends what waits for one member, in order; what its stream does not take waits for `run`."""

    def __init__(self, node: RaftNode, stream: Stream, peer: str, epoch: int) -> None:
        self._node = node
        self._stream = stream
        self._state = node.peers[peer]
        self._epoch = epoch
        self._sequence = 0
        self._send_now = send_at_once(stream)
        # What the stream did not take at once.
        self._rest = memoryview(b"")

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: The connection ended.
            FlushFailedError: The disk failed: stop the node.
        """
        state = self._state
        while True:
            if self._rest:
                rest, self._rest = self._rest, memoryview(b"")
                await self._stream.send_all(rest)
            while (frame := self._next_frame()) is not None:
                await self._stream.send_all(frame)
            if self._send_now is not None:
                state.push = self._push
            try:
                await state.data_wake.wait()
            finally:
                state.push = None

    def _next_frame(self) -> bytes | None:
        replies = self._state.replies
        if replies:
            outgoing, views = replies.popleft(), None
        else:
            found = self._node.next_frame(self._state.name)
            if found is None:
                return None
            outgoing, views = found
        self._sequence += 1
        return frame_of(outgoing, self._epoch, self._sequence, views)

    def _push(self) -> None:
        """Send what there is; the task, which waits, goes on with what the stream does not take."""
        send, state = self._send_now, self._state
        assert send is not None
        while (frame := self._next_frame()) is not None:
            try:
                sent = send(frame)
            except OSError:
                sent = 0  # the task meets the same error and ends the connection
            if sent < len(frame):
                self._rest = memoryview(frame)[sent:]
                state.push = None
                state.data_wake.set()
                return
