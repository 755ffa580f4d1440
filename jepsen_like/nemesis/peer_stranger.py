"""A process that is no member, at the ports where the members of a group talk to each other.

It sends hellos under its own name and under those of members, claims to lead, asks for votes in
terms near and far, asks for entries, sends some that it made, leaves hellos unfinished, and listens
at the address that it gives. Through seams alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import trio

from commitlog.entry import seal_no_op
from commitlog.errors import RemoteProtocolError
from dledger.raft.identity import Hello
from dledger.raft.wire import (
    HELLO_BYTES_MAX,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
)
from remoting.seams import Clock, Network, Rng, Stream

T = TypeVar("T")

PAUSE_S: Final = 0.5
"""Between two attempts at all members."""

LISTENS_S: Final = 0.5
"""Seconds it waits on each connection for answers."""

TIMEOUT_S: Final = 2.0

NAME: Final = "evil"

EPOCH: Final = 5

HOSTS: Final = ("127.0.0.1:" + "9" * 19, "a..b:1", "x" * 300 + ":1", "\ud7ff:1", "127.0.0.1:0")
"""Addresses that cannot be called."""


@dataclass(frozen=True, slots=True)
class Group:
    """The group it is after.

    Attributes:
        members: Names, and where their peer ports are.
    """

    cluster: str
    name: str
    members: dict[str, tuple[str, int]]


class PeerStranger:
    """The process.

    Attributes:
        seen: What became of it: ``refused`` connections and ``unreachable`` members; ``told``,
            the frames with a name or an index in it that it was sent; ``named``, those in which a
            member without a log names itself alone; ``called``, the members that called it back.
    """

    def __init__(
        self, network: Network, clock: Clock, rng: Rng, group: Group, address: tuple[str, int]
    ) -> None:
        self._network = network
        self._clock = clock
        self._rng = rng
        self._group = group
        self._address = address
        self.seen: Counter[str] = Counter()

    async def run(self) -> None:
        """Go on until cancelled."""
        listener = await self._network.listen(*self._address)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._attack_all)
                while True:
                    stream = await listener.accept()
                    self.seen["called"] += 1
                    nursery.start_soon(self._hear, stream)
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()

    async def _attack_all(self) -> None:
        while True:
            for member, address in sorted(self._group.members.items()):
                try:
                    stream = await self._network.connect(*address, timeout_s=TIMEOUT_S)
                except OSError:
                    self.seen["unreachable"] += 1
                    continue
                await self._attack(stream, member)
            await self._clock.sleep(PAUSE_S)

    async def _attack(self, stream: Stream, member: str) -> None:
        with self._clock.time_out(LISTENS_S):
            try:
                for data in self._words(member):
                    await stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.seen["refused"] += 1
            else:
                await self._hear(stream)
        with trio.CancelScope(shield=True):
            await stream.aclose()

    async def _hear(self, stream: Stream) -> None:
        decoder = PeerFrameDecoder(HELLO_BYTES_MAX)
        try:
            while data := await stream.receive_some(65_536):
                for frame in decoder.feed(memoryview(data)):
                    if _names_itself_alone(frame):
                        self.seen["named"] += 1
                    else:
                        self.seen["told"] += _is_telling(frame)
            self.seen["refused"] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.seen["refused"] += 1
        except RemoteProtocolError:
            self.seen["told"] += 1  # more than a hello

    # -- what it sends ---------------------------------------------------------------------

    def _words(self, member: str) -> Sequence[bytes]:
        others = sorted(self._group.members.keys() - {member})
        hello = self._hello(self._one_of((NAME, NAME, *others)))
        term = self._one_of((0, 1, 2, 3, 5, 9, 2**29, 2**40, 2**62, 2**63 - 1, 2**200))
        index = self._one_of((0, 1, 10, 100, 10_000, 2**40))
        forged = seal_no_op(index + 1, min(term, 2**62), 0, 0, 0)
        words: list[tuple[Kind, tuple[Any, ...], bytes]] = [
            (Kind.HEARTBEAT, (1, index), b""),
            (Kind.VOTE, (2**30, 2**30, True), b""),
            (Kind.PRE_VOTE, (term, 2**30, 2**30), b""),
            (Kind.FETCH, (1, 10**6), b""),
            (Kind.APPEND, (index, min(term, 2**30), index + 1), forged),
            (Kind.TIMEOUT_NOW, (index,), b""),
            (Kind.SNAPSHOT, (2**40, 0, 9), b"no tables"),
            (Kind.APPEND_REPLY, (True, index), b""),
            (Kind.TERM_NOTICE, (), b""),
        ]
        draw = self._rng.random()
        if draw < 0.1:
            return [hello[:-3]]
        if draw < 0.2:
            return [self._rng.randbytes(200)]
        chosen = [self._one_of(words) for _ in range(3)]
        frames = [
            _frame(kind, term, n, fields, data) for n, (kind, fields, data) in enumerate(chosen, 1)
        ]
        return [hello, *frames]

    def _one_of(self, things: Sequence[T]) -> T:
        return things[self._rng.randrange(len(things))]

    def _hello(self, name: str) -> bytes:
        group, (host, port) = self._group, self._address
        said = Hello(
            cluster=group.cluster,
            group=group.name,
            name=name,
            incarnation=self._rng.randbytes(16).hex(),
            voters={},
            doubtful=False,
            client_address="127.0.0.1:1",
            channel=self._one_of(("control", "data")),
            peer=f"{host}:{port}",
        ).encode()
        if self._rng.random() < 0.2:
            said["peer"] = self._one_of(HOSTS)
        return _frame(Kind.HELLO, 0, 0, (said,), b"")


def _frame(kind: Kind, term: int, sequence: int, fields: tuple[Any, ...], payload: bytes) -> bytes:
    head = encode_head(kind, term, EPOCH, sequence, fields)
    return encode_frame(head, [memoryview(payload)] if payload else None)


def _is_telling(frame: PeerFrame) -> bool:
    """Whether a frame holds more than that its sender does not know this process."""
    said = frame.fields[0] if frame.kind is Kind.HELLO_ACK else None
    return not isinstance(said, dict) or "name" in said


def _names_itself_alone(frame: PeerFrame) -> bool:
    """Whether a frame is how a member introduces itself before it knows any other."""
    said = frame.fields[0] if frame.kind is Kind.HELLO_ACK else None
    return (
        isinstance(said, dict)
        and "name" in said
        and not said["voters"]
        and not said.get("members")
        and not any(said.get("last", ()))
    )
