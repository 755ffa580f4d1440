"""What a carrier does at a socket that is full, or closed: with socket pairs, so that no byte is in
between."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dledger.jepsen_like.chaos.link_model import Link, Passage
from dledger.jepsen_like.chaos.proxy_pump import RECEIVE_BYTES, Carrier

SETTLED_S = 0.02


@dataclass
class Pair:
    """Both carriers of a connection, and the sockets its two sides have."""

    there: Link
    out: Carrier
    home: Carrier
    left: socket.socket
    right: socket.socket
    resets: list[None] = field(default_factory=list)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        left, ours = map(stack.enter_context, socket.socketpair())
        theirs, right = map(stack.enter_context, socket.socketpair())
        for sock in (left, ours, theirs, right):
            sock.setblocking(False)
        links = Link("a", "b"), Link("b", "a")
        resets: list[None] = []
        out, home = (
            Carrier(
                Passage(link, 1, "data", rng=random.Random(1), sometimes=Counter()),
                source,
                sink,
                buffer=memoryview(bytearray(RECEIVE_BYTES)),
                reset=lambda: resets.append(None),
            )
            for link, source, sink in zip(links, (ours, theirs), (theirs, ours), strict=True)
        )
        out.opposite, home.opposite = home, out
        yield Pair(links[0], out, home, left, right, resets)


def drained(sock: socket.socket) -> bytes:
    """Return all that is there to be read now."""
    got = bytearray()
    while True:
        try:
            data = sock.recv(1 << 20)
        except BlockingIOError:
            return bytes(got)
        assert data, "the stream ended"
        got += data


async def test_cut_stops_a_waiting_send(pair: Pair) -> None:
    sent = random.Random(2).randbytes(4 << 20)
    async with trio.open_nursery() as nursery:
        pair.out.take(memoryview(sent))
        nursery.start_soon(pair.out.deliver)
        await wait_all_tasks_blocked(SETTLED_S)
        pair.there.cut()
        got = drained(pair.right)
        assert 0 < len(got) < len(sent)
        await wait_all_tasks_blocked(SETTLED_S)
        assert drained(pair.right) == b""
        pair.there.mend()
        pair.out.link_changed()
        while len(got) < len(sent):
            await wait_all_tasks_blocked()
            got += drained(pair.right)
        assert got == sent
        nursery.cancel_scope.cancel()


async def test_nothing_overtakes_waiting_bytes(pair: Pair) -> None:
    sent = random.Random(2).randbytes(1 << 20)
    pair.out.take(memoryview(sent))
    got = drained(pair.right)
    assert 0 < len(got) < len(sent)
    pair.out.take(memoryview(b"behind"))
    assert drained(pair.right) == b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.out.deliver)
        while len(got) < len(sent) + 6:
            await wait_all_tasks_blocked()
            got += drained(pair.right)
        assert got == sent + b"behind"
        nursery.cancel_scope.cancel()


async def test_closed_side_found_by_a_send_is_a_reset(pair: Pair) -> None:
    said = b"last words"
    pair.right.send(said)
    pair.right.close()
    pair.out.take(memoryview(b"to no peer"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.home.read)
        await pair.home.deliver()
    assert pair.resets == [None]
    assert not pair.home.is_done
    assert drained(pair.left) == said
