"""A proxy between real sockets: both ends of a link, and frames to send through it."""

import random
import select
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import trio
from trio.testing import wait_all_tasks_blocked

from dledger.jepsen_like.chaos.proxy import LinkProxy, Target
from dledger.jepsen_like.nemesis.ground import HEALTHY, LinkFault
from dledger.raft.identity import Hello
from dledger.raft.wire import Kind, PeerFrame, PeerFrameDecoder, encode_frame, encode_head

SEED = 7
PATIENCE_S = 20
"""A test whose bytes have not come after so long has failed."""
SETTLED_S = 0.02
"""After so long without a task that can run, nothing happens any more."""
EPOCH = 99


def hello(name: str, channel: str = "control", kind: Kind = Kind.HELLO) -> bytes:
    """Return the first frame of a member on a connection."""
    said = Hello(
        cluster="c",
        group="g",
        name=name,
        incarnation="i",
        voters={},
        doubtful=False,
        client_address="127.0.0.1:1",
        channel=channel,
    )
    return encode_frame(encode_head(kind, 1, EPOCH, 0, (said.encode(),)))


def frame(sequence: int, payload: bytes = b"") -> bytes:
    """Return an append of that sequence number."""
    head = encode_head(Kind.APPEND, 1, EPOCH, sequence, (1, 2, 3))
    return encode_frame(head, [memoryview(payload)])


def fault(**changes: float | bool) -> LinkFault:
    """Return a link that is healthy but for *changes*."""
    return replace(HEALTHY, **changes)  # type: ignore[arg-type]  # names and values of the test's own


class End:
    """One end of a connection, as bytes and as frames."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = PeerFrameDecoder()
        self._frames: list[PeerFrame] = []

    async def send(self, *frames: bytes) -> None:
        """Send frames in one piece."""
        await self.stream.send_all(b"".join(frames))

    async def frames(self, count: int) -> list[PeerFrame]:
        """Return the next *count* frames."""
        while len(self._frames) < count:
            data = await self.stream.receive_some()
            assert data, "the stream ended"
            self._frames += self._decoder.feed(data)
        found, self._frames = self._frames[:count], self._frames[count:]
        return found

    async def sequences(self, count: int) -> list[int]:
        """Return the sequence numbers of the next *count* frames."""
        return [found.sequence for found in await self.frames(count)]

    async def sequences_to_the_end(self) -> list[int]:
        """Return those of all frames up to the end of the stream."""
        frames = self._frames
        async for data in self.stream:
            frames += self._decoder.feed(data)
        return [found.sequence for found in frames]

    async def exactly(self, size: int) -> bytes:
        """Return the next *size* bytes."""
        got = bytearray()
        while len(got) < size:
            data = await self.stream.receive_some(size - len(got))
            assert data, "the stream ended"
            got += data
        return bytes(got)

    async def close(self) -> None:
        """Close so that the other side sees the end of the stream."""
        await self.stream.aclose()

    async def break_off(self) -> None:
        """Close so that the other side sees a reset."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.stream.aclose()

    async def is_silent(self) -> bool:
        """Whether nothing at all has come when nothing happens any more."""
        await wait_all_tasks_blocked(SETTLED_S)
        raw = socket.fromfd(self.stream.socket.fileno(), socket.AF_INET, socket.SOCK_STREAM)
        with raw:
            try:
                raw.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            return False


class Net:
    """A proxy in front of b."""

    def __init__(self, listener: trio.SocketListener, port: int, source: str | None) -> None:
        self.listener = listener
        self._ends: list[End] = []
        self._scope = trio.CancelScope()
        real = listener.socket.getsockname()[1]
        self.port = port
        self.proxy = LinkProxy(random.Random(SEED), {port: Target("b", "127.0.0.1", real, source)})

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until `stop` is called."""
        with self._scope:
            await self.proxy.serve(task_status=task_status)

    def stop(self) -> None:
        """End the proxy."""
        self._scope.cancel()

    async def dial(self, *first: bytes) -> End:
        """Connect to the proxy and send *first*."""
        end = self._known(await trio.open_tcp_stream("127.0.0.1", self.port))
        await end.send(*first)
        return end

    async def accept(self) -> End:
        """Return the next connection at b."""
        return self._known(await self.listener.accept())

    def _known(self, stream: trio.SocketStream) -> End:
        self._ends.append(End(stream))
        return self._ends[-1]

    async def close(self) -> None:
        """Close all connections."""
        for end in self._ends:
            await trio.aclose_forcefully(end.stream)

    async def link(self, name: str = "a", channel: str = "control") -> tuple[End, End]:
        """Return both ends of a connection whose hello has passed."""
        ours = await self.dial(hello(name, channel))
        theirs = await self.accept()
        assert [(f.kind, f.sequence) for f in await theirs.frames(1)] == [(Kind.HELLO, 0)]
        return ours, theirs

    async def has_nobody(self) -> bool:
        """Whether no connection waits to be accepted when nothing happens any more."""
        await wait_all_tasks_blocked(SETTLED_S)
        poll = select.poll()
        poll.register(self.listener.socket.fileno(), select.POLLIN)
        return not poll.poll(0)


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@asynccontextmanager
async def proxied(source: str | None = None) -> AsyncIterator[Net]:
    """Give a proxy that serves; *source*: the address it connects to b from."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        net = Net(listener, free_port(), source)
        try:
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    await nursery.start(net.serve)
                    yield net
                    net.stop()
        finally:
            await net.close()
