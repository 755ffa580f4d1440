"""How the two ends of a connection between members introduce themselves, before a word counts.

Without a secret (all members on loopback)::

    caller ── HELLO: who I am ──────────────────► called
    caller ◄── HELLO_ACK: who I am, or "refused" ─ called

With a secret the caller proves first, so that one who cannot prove anything hears no names and
gets nothing to guess the secret from::

    caller ── HELLO: who I am, whom I call, a nonce ─► called
    caller ◄── HELLO_ACK: a nonce ──────────────────── called
    caller ── HELLO: proof ──────────────────────────► called
    caller ◄── HELLO_ACK: who I am, proof ──────────── called

Without a secret two that know nothing of each other's newest folder (both wiped, or one wiped and
the other away meanwhile) would refuse each other for ever. So one that is refused has shown its
incarnation, as every caller does; the other one shows it in its own next call, to the address where
it looks for that name, and is answered: it tells only what the caller knows.

A caller of the version before neither says whom it calls nor waits for a nonce alone. It is
answered in one step, with a proof, if it knows the incarnation of a member to call itself by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from commitlog.errors import RemoteProtocolError
from dledger.raft.bounds import is_incarnation
from dledger.raft.identity import REFUSED, Hello, check_version
from dledger.raft.node import Outgoing, RaftNode
from dledger.raft.proof import NONCE, NONCE_BYTES, PROOF, GroupSecret, Side, check_nonce
from dledger.raft.refusals import NotAMemberError
from dledger.raft.roster import SHOWN_MAX
from dledger.raft.wire import (
    HELLO_BYTES_MAX,
    PROTOCOL_VERSION,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
)
from remoting.seams import Clock, Rng, Stream

CHANNELS: Final = ("control", "data")

HELLO_TIMEOUT_S: Final = 2.0
"""A peer that does not introduce itself for so long is given up."""

RECEIVE_BYTES: Final = 256 << 10
"""How much is read from a connection at once."""

CALLED: Final = "to"
"""Whom a caller calls; that it says so means that it proves first."""

SHOWN: Final = "shown"
"""Incarnations that callers under the name of the one called have shown to this caller."""

Said = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """One that has introduced itself and is known."""

    hello: Hello
    epoch: int
    rest: list[PeerFrame]
    """What came behind its introduction."""


class Introduction:
    """Hellos and proofs of one member's connections."""

    def __init__(self, node: RaftNode, *, clock: Clock, rng: Rng) -> None:
        self._node = node
        self._clock = clock
        self._rng = rng

    # -- called ----------------------------------------------------------------------------

    async def accept(self, stream: Stream, decoder: PeerFrameDecoder) -> Caller:
        """Find out who calls, and let it know who is called.

        Raises:
            NotAMemberError: Nobody answers for the caller; it was told no more than that.
            RemoteProtocolError: It is no member's introduction, or proves nothing.
        """
        frames = await self._receive(stream, decoder, "a peer")
        said = _said(frames[0], Kind.HELLO)
        hello, epoch = self._read(said), frames[0].epoch
        secret, rest = self._node.settings.secret, frames[1:]
        if secret is None:
            await self._answer(stream, hello, said, epoch)
        elif said.get(CALLED) is None:
            rest = await self._exchange_at_once(stream, decoder, secret, hello, said, epoch, rest)
        else:
            rest = await self._have_it_proved(stream, decoder, secret, hello, said, epoch, rest)
        await self._until_known(hello)
        return Caller(hello, epoch, rest)

    async def _answer(self, stream: Stream, hello: Hello, said: Said, epoch: int) -> None:
        roster = self._node.roster
        if not roster.is_answered(hello.key, _shown_in(said)):
            roster.note_shown(hello)
            refusal = {"v": PROTOCOL_VERSION, REFUSED: True}
            await self._say(stream, Kind.HELLO_ACK, refusal, epoch)
            raise NotAMemberError(f"{hello.name} is no member of this group")
        own = self._own(hello)
        if not roster.is_known(hello.key):
            # It has named itself, no more. A member learns the founders when this one calls it.
            own["voters"] = {}
        await self._say(stream, Kind.HELLO_ACK, own, epoch)

    async def _have_it_proved(
        self,
        stream: Stream,
        decoder: PeerFrameDecoder,
        secret: GroupSecret,
        hello: Hello,
        said: Said,
        epoch: int,
        frames: list[PeerFrame],
    ) -> list[PeerFrame]:
        check_nonce(said, hello.name)
        if said[CALLED] != self._node.settings.self_id:
            raise RemoteProtocolError(f"{hello.name} calls somebody else")
        challenge = {"v": PROTOCOL_VERSION, NONCE: self._nonce()}
        await self._say(stream, Kind.HELLO_ACK, challenge, epoch)
        frames = frames or await self._receive(stream, decoder, hello.name)
        shown = _proof_in(frames[0])
        secret.check(shown, Side.DIALLER, said, challenge, epoch, who=hello.name)
        # It has the secret: whatever its folder is, it belongs to the group.
        await self._say_proved(stream, secret, said, self._own(hello), epoch)
        return frames[1:]

    async def _exchange_at_once(
        self,
        stream: Stream,
        decoder: PeerFrameDecoder,
        secret: GroupSecret,
        hello: Hello,
        said: Said,
        epoch: int,
        frames: list[PeerFrame],
    ) -> list[PeerFrame]:
        check_nonce(said, hello.name)
        if not self._node.roster.is_known(hello.key):
            raise NotAMemberError(f"{hello.name} is no member of this group")
        own = self._own(hello)
        await self._say_proved(stream, secret, said, own, epoch)
        frames = frames or await self._receive(stream, decoder, hello.name)
        secret.check(_proof_in(frames[0]), Side.DIALLER, said, own, epoch, who=hello.name)
        return frames[1:]

    async def _until_known(self, hello: Hello) -> None:
        """Wait until somebody answers for *hello*: mostly, until a call of ours found it."""
        roster, contacts = self._node.roster, self._node.contacts
        with self._clock.time_out(HELLO_TIMEOUT_S):
            while not roster.is_known(hello.key):
                await contacts.found_wake.wait()
            return
        raise NotAMemberError(f"{hello.name} was not found where it should be")

    def _own(self, hello: Hello) -> Said:
        """Return what this member answers the one of *hello*."""
        to_member = self._node.roster.is_member(hello.key)
        return self._with_nonce(self._node.hello(hello.channel, to_member=to_member).encode())

    # -- calling ---------------------------------------------------------------------------

    async def call(self, stream: Stream, peer: str, channel: str) -> tuple[Hello, int]:
        """Introduce this member to *peer*, and find out whether it is *peer* that answers.

        Returns:
            Its answer, and the epoch of the connection.
        Raises:
            RemoteProtocolError: It refuses, it is somebody else, or it proves nothing.
        """
        epoch = 1 + self._rng.randrange((1 << 48) - 1)
        decoder = PeerFrameDecoder(HELLO_BYTES_MAX)
        secret = self._node.settings.secret
        own = self._with_nonce(self._node.hello(channel).encode())
        if secret is not None:
            own[CALLED] = peer
        elif shown := self._node.roster.shown_by(peer):
            own[SHOWN] = list(shown)
        await self._say(stream, Kind.HELLO, own, epoch)
        frames = await self._receive(stream, decoder, peer)
        said = _said(frames[0], Kind.HELLO_ACK)
        if secret is not None and "name" not in said and REFUSED not in said:
            check_version(said)
            check_nonce(said, peer)
            await self._say_proof(stream, secret, own, said, epoch)
            frames = frames[1:] or await self._receive(stream, decoder, peer)
            said = _said(frames[0], Kind.HELLO_ACK)
            self._check_proved(secret, own, said, epoch, peer)
        elif secret is not None and REFUSED not in said:
            self._check_proved(secret, own, said, epoch, peer)
            await self._say_proof(stream, secret, own, said, epoch)
        hello = self._read(said)
        if hello.name != peer or frames[0].epoch != epoch:
            raise RemoteProtocolError(f"{hello.name} answers where {peer} was expected")
        return hello, epoch

    def _check_proved(
        self, secret: GroupSecret, own: Said, said: Said, epoch: int, peer: str
    ) -> None:
        if REFUSED in said:
            return  # said without a proof, and believed without one: it only ends the call
        check_nonce(said, peer)
        proof = said.pop(PROOF, None)
        secret.check(proof, Side.ACCEPTOR, own, said, epoch, who=peer)

    # -- both ------------------------------------------------------------------------------

    def _with_nonce(self, said: Said) -> Said:
        if self._node.settings.secret is not None:
            said[NONCE] = self._nonce()
        return said

    def _nonce(self) -> bytes:
        return self._rng.randbytes(NONCE_BYTES)

    async def _say(self, stream: Stream, kind: Kind, said: Said, epoch: int) -> None:
        await stream.send_all(frame_of(Outgoing(kind, self._node.term, (said,)), epoch, 0))

    async def _say_proved(
        self, stream: Stream, secret: GroupSecret, said: Said, own: Said, epoch: int
    ) -> None:
        proof = secret.proof(Side.ACCEPTOR, said, own, epoch)
        await self._say(stream, Kind.HELLO_ACK, {**own, PROOF: proof}, epoch)

    async def _say_proof(
        self, stream: Stream, secret: GroupSecret, own: Said, said: Said, epoch: int
    ) -> None:
        proof = secret.proof(Side.DIALLER, own, said, epoch)
        await self._say(stream, Kind.HELLO, {PROOF: proof}, epoch)

    async def _receive(
        self, stream: Stream, decoder: PeerFrameDecoder, whose: str
    ) -> list[PeerFrame]:
        """Wait for at least one frame of somebody who introduces itself."""
        frames: list[PeerFrame] = []
        with self._clock.time_out(HELLO_TIMEOUT_S):
            while not frames:
                data = await stream.receive_some(RECEIVE_BYTES)
                if not data:
                    raise RemoteProtocolError(f"{whose} closed before it said hello")
                frames = decoder.feed(memoryview(data))
        if not frames:
            raise RemoteProtocolError(f"no hello of {whose} within {HELLO_TIMEOUT_S} s")
        return frames

    def _read(self, said: Said) -> Hello:
        hello = Hello.decode(said)
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
    return encode_frame(head, views)


def _said(frame: PeerFrame, kind: Kind) -> Said:
    if frame.kind is not kind:
        raise RemoteProtocolError(f"a {frame.kind.name} frame where a hello was expected")
    said = frame.fields[0]
    if not isinstance(said, dict):
        raise RemoteProtocolError("a hello that is not a map")
    return said


def _shown_in(said: Said) -> tuple[str, ...]:
    shown = said.get(SHOWN, [])
    if not isinstance(shown, list) or len(shown) > SHOWN_MAX or not all(map(is_incarnation, shown)):
        raise RemoteProtocolError("a hello with fields of the wrong type")
    return tuple(shown)


def _proof_in(frame: PeerFrame) -> object:
    said = frame.fields[0] if frame.kind is Kind.HELLO else None
    return said.get(PROOF) if isinstance(said, dict) else None
