"""A peer that is no member, at the port where members exchange frames."""

from dataclasses import dataclass, field
from typing import Any

import trio

from dledger.raft.identity import Hello
from dledger.raft.wire import (
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_cbor_head,
    encode_frame,
    encode_head,
)
from dledger.remoting.seams import Network, Stream
from tests.harness.eventually import WITHIN_S

EPOCH = 5


def frame(kind: Kind, term: int, *fields: Any, sequence: int = 1, payload: bytes = b"") -> bytes:
    """Return one frame of the stranger's connection."""
    head = encode_cbor_head(kind, term, EPOCH, sequence, fields)
    return encode_frame(head, [memoryview(payload)] if payload else None)


def hello(name: str = "evil", **changes: Any) -> bytes:
    """Return the first frame of a connection; *changes* go over the fields of an honest hello."""
    said = Hello("C", "G", name, "ab" * 16, {}, False, "h:1", "control", peer="127.0.0.1:40999")
    return frame(Kind.HELLO, 0, {**said.encode(), **changes}, sequence=0)


@dataclass
class Stranger:
    """Calls members, and listens for those that call back."""

    network: Network
    heard: list[PeerFrame] = field(default_factory=list)
    callers: int = 0

    async def say(self, address: tuple[str, int], *sent: bytes, seconds: float = 1.0) -> bool:
        """Say all of *sent* on one connection; return whether the other side has hung up.

        What it answers within *seconds* stands in `heard`.
        """
        stream = await self.network.connect(*address, timeout_s=WITHIN_S)
        try:
            with trio.move_on_after(seconds):
                for data in sent:
                    await stream.send_all(data)
                await self._hear(stream)
                return True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return True
        else:
            return False
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def listen(self, host: str, port: int) -> None:
        """Accept connections and keep every frame that comes, until cancelled."""
        listener = await self.network.listen(host, port)
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    stream = await listener.accept()
                    self.callers += 1
                    nursery.start_soon(self._answer, stream)
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()

    async def _answer(self, stream: Stream) -> None:
        decoder = PeerFrameDecoder()
        try:
            while data := await stream.receive_some(65536):
                for heard in decoder.feed(memoryview(data)):
                    self.heard.append(heard)
                    if heard.kind is Kind.HELLO:
                        said = Hello(
                            "C",
                            "G",
                            "evil",
                            "ab" * 16,
                            {},
                            False,
                            "h:1",
                            heard.fields[0]["channel"],
                        )
                        head = encode_head(Kind.HELLO_ACK, 0, heard.epoch, 0, (said.encode(),))
                        await stream.send_all(encode_frame(head))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def _hear(self, stream: Stream) -> None:
        decoder = PeerFrameDecoder()
        try:
            while data := await stream.receive_some(65536):
                self.heard += decoder.feed(memoryview(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
