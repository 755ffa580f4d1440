"""The budget of requests in work and unsent answers.

Space for unfinished frames: how much there is, which waits, which gives way.

Frames leave in order, whatever a socket takes at once.
"""

import random
import weakref
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from typing_extensions import Buffer

from dledger.remoting.memory_budget import (
    LOOK_EVERY_S,
    NOTED_BYTES,
    SLOW_BYTES_PER_S,
    SMALL_FRAME_BYTES,
    STALLED_S,
    UNREAD_CHECK_EVERY_S,
    YOUNG_S,
    BudgetLimits,
    FrameSpace,
    FrameTicket,
    MemoryBudget,
    budget_bytes,
)
from dledger.remoting.write_buffer import BURST_S, SEND_BYTES, WriteBuffer


@dataclass(eq=False)
class Peer:
    """A connection as the budget sees it."""

    peer_address: tuple[str, int]
    unsent_bytes: int = 0
    unread_s: float = 0.0
    ended: str = ""

    def unread_for_s(self, now_s: float) -> float:
        return self.unread_s

    def give_way(self, reason: str) -> None:
        self.ended = reason


def budget(total: int = 10 * NOTED_BYTES) -> MemoryBudget:
    return MemoryBudget(BudgetLimits(total_bytes=total))


def hold(counted: MemoryBudget, peer: Peer, held: int, now_s: float = 0.0) -> None:
    counted.count(peer, peer.unsent_bytes, held, now_s)
    peer.unsent_bytes = held


def test_the_budget_is_met_and_free_again() -> None:
    counted, peer = budget(), Peer(("a", 1))
    hold(counted, peer, 10 * NOTED_BYTES)
    assert counted.is_met
    hold(counted, peer, NOTED_BYTES)
    assert not counted.is_met
    assert counted.used_bytes == NOTED_BYTES


def test_largest_unread_of_the_largest_address_gives_way() -> None:
    counted = budget()
    reading = Peer(("a", 1))
    unread = [Peer(("a", 2), unread_s=5.0), Peer(("a", 3), unread_s=5.0)]
    other = Peer(("b", 1), unread_s=5.0)
    hold(counted, reading, 2 * NOTED_BYTES)
    hold(counted, unread[0], NOTED_BYTES)
    hold(counted, unread[1], 2 * NOTED_BYTES)
    hold(counted, other, 3 * NOTED_BYTES)
    hold(counted, unread[1], 4 * NOTED_BYTES)
    assert [bool(peer.ended) for peer in (reading, *unread, other)] == [False, False, True, False]
    assert counted.given_way == 1


def test_a_peer_that_reads_never_gives_way() -> None:
    counted, peers = budget(), [Peer(("a", port), unread_s=0.5) for port in range(20)]
    for at, peer in enumerate(peers):
        hold(counted, peer, NOTED_BYTES, at * UNREAD_CHECK_EVERY_S)
    assert counted.is_met
    assert not any(peer.ended for peer in peers)


@pytest.mark.parametrize(("configured", "expected"), [(0, 250), (7, 7)])
def test_the_budget_is_a_quarter_of_the_memory_unless_set(configured: int, expected: int) -> None:
    assert budget_bytes(configured, 1_000) == expected


MIB = 1024 * 1024
FRAME = 16 * MIB
SMALL = SMALL_FRAME_BYTES


class Sender:
    """A connection as `FrameSpace` sees it."""

    def __init__(self, address: str = "a", *, proven: bool = False) -> None:
        self.ended = False
        self.granted = False
        self.ticket = FrameTicket(address, self._end)
        self.ticket.is_proven = proven
        self.ticket.granted = self._grant

    def _end(self) -> None:
        self.ended = True

    def _grant(self) -> None:
        self.granted = True


def space() -> FrameSpace:
    return FrameSpace(4 * FRAME, FRAME)  # three of the largest beside the part of small ones


def test_many_half_frames_never_hold_more_than_the_limit() -> None:
    frames, peers = space(), [Sender() for _ in range(150)]
    for peer in peers:
        frames.take(peer.ticket, FRAME, 60_000, 0.0)
    for tick in range(1, 400):
        frames.relieve(tick * LOOK_EVERY_S)
        assert frames.used_bytes <= frames.limit_bytes
        assert frames.waiting_bytes <= frames.max_waiting_bytes
    # Each had its turn and gave way to one that waited; for the last ones no other waits.
    assert sum(peer.ended for peer in peers) == frames.given_way == 147
    assert frames.used_bytes == 3 * FRAME


def test_small_frame_fits_beside_large_ones() -> None:
    frames, hoarders = space(), [Sender() for _ in range(10)]
    for hoarder in hoarders:
        frames.take(hoarder.ticket, FRAME, 100, 0.0)
    assert frames.take(Sender("b").ticket, SMALL, 100, 0.0)


def test_a_large_frame_waits_and_is_granted_when_one_is_complete() -> None:
    frames, first, second = FrameSpace(2 * FRAME, FRAME), Sender(), Sender()
    assert frames.take(first.ticket, FRAME, 100, 0.0)
    assert not frames.take(second.ticket, FRAME, 100, 0.0)
    frames.leave(first.ticket, 0.1)
    assert second.granted
    assert second.ticket.held_bytes == FRAME
    assert (frames.used_bytes, frames.waiting_bytes) == (FRAME, 0)


def test_a_frame_that_arrives_in_time_does_not_give_way() -> None:
    frames, fast, waiting = FrameSpace(2 * FRAME, FRAME), Sender(), Sender(proven=True)
    frames.take(fast.ticket, FRAME, 100, 0.0)
    frames.take(waiting.ticket, FRAME, 100, 0.0)
    now = 0.0
    while now < 10 * YOUNG_S:
        now += STALLED_S / 2
        frames.progress(fast.ticket, int(SLOW_BYTES_PER_S * STALLED_S), now)
        frames.relieve(now)
    assert not fast.ended


def test_slow_frame_gives_way_only_to_one_that_waits() -> None:
    frames, slow, waiting = FrameSpace(2 * FRAME, FRAME), Sender(), Sender()
    frames.take(slow.ticket, FRAME, 100, 0.0)
    now = 0.0
    while now < 2 * YOUNG_S:
        now += STALLED_S / 2
        frames.progress(slow.ticket, 1, now)
        frames.relieve(now)
    assert not slow.ended  # no other waits
    frames.take(waiting.ticket, FRAME, 100, now)
    frames.relieve(now + LOOK_EVERY_S)
    assert slow.ended
    assert waiting.granted


def test_frame_of_a_known_client_goes_before_a_new_one() -> None:
    frames, holder, stranger, client = (
        FrameSpace(2 * FRAME, FRAME),
        Sender(),
        Sender(),
        Sender(proven=True),
    )
    frames.take(holder.ticket, FRAME, 100, 0.0)
    frames.take(stranger.ticket, FRAME, 100, 0.0)
    frames.take(client.ticket, FRAME, 100, 0.0)
    frames.leave(holder.ticket, 0.1)
    assert (client.granted, stranger.granted) == (True, False)


def test_the_address_that_holds_less_goes_first() -> None:
    frames = FrameSpace(4 * FRAME, FRAME)
    holders = [Sender("a"), Sender("a"), Sender("b")]
    for holder in holders:
        assert frames.take(holder.ticket, FRAME, 100, 0.0)
    more, other = Sender("a"), Sender("c")
    frames.take(more.ticket, FRAME, 100, 0.0)
    frames.take(other.ticket, FRAME, 100, 0.0)
    frames.leave(holders[2].ticket, 0.1)
    assert (other.granted, more.granted) == (True, False)


def test_waiting_bytes_are_bounded_and_new_clients_go_first() -> None:
    frames, client = space(), Sender(proven=True)
    for _ in range(4):
        frames.take(Sender().ticket, FRAME, 100, 0.0)
    frames.take(client.ticket, FRAME, 64 * 1024, 0.0)
    waiting = [Sender() for _ in range(1_000)]
    for peer in waiting:
        frames.take(peer.ticket, FRAME, 64 * 1024, 0.0)
        assert frames.waiting_bytes <= frames.max_waiting_bytes
    assert any(peer.ended for peer in waiting)
    assert not client.ended


def test_leaving_twice_gives_back_once() -> None:
    frames, one = space(), Sender()
    frames.take(one.ticket, FRAME, 100, 0.0)
    frames.leave(one.ticket, 0.1)
    frames.leave(one.ticket, 0.1)
    assert frames.used_bytes == 0


@dataclass
class Socket:
    """A stream that takes as much at once as *takes* has, and everything when it may wait."""

    takes: list[int] = field(default_factory=list)
    got: bytearray = field(default_factory=bytearray)
    waited: int = 0
    error: OSError | None = None
    peer_address: tuple[str, int] = ("127.0.0.1", 1)
    local_address: tuple[str, int] = ("127.0.0.1", 2)

    def send_some_nowait(self, data: Buffer) -> int:
        if self.error is not None:
            raise self.error
        size = min(self.takes.pop(0) if self.takes else 1 << 30, memoryview(data).nbytes)
        self.got += memoryview(data)[:size]
        return size

    async def send_all(self, data: Buffer) -> None:
        self.waited += 1
        await trio.lowlevel.checkpoint()
        self.got += memoryview(data)

    async def receive_some(self, max_bytes: int) -> Buffer:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


def buffer_over(socket: Socket, reasons: list[str] | None = None) -> WriteBuffer:
    noted = [] if reasons is None else reasons
    return WriteBuffer(socket, 30.0, sent=lambda: None, broken=noted.append)


async def running(nursery: trio.Nursery, socket: Socket) -> WriteBuffer:
    out = buffer_over(socket)
    nursery.start_soon(out.run)
    await trio.testing.wait_all_tasks_blocked()
    return out


async def test_write_buffer_sends_in_the_turn_of_the_put(nursery: trio.Nursery) -> None:
    socket = Socket()
    out = await running(nursery, socket)
    out.put(b"head", b"body")
    assert (bytes(socket.got), out.unsent_bytes, out.handed_total) == (b"headbody", 0, 8)
    assert socket.waited == 0


async def test_write_buffer_that_waits_holds_no_part(nursery: trio.Nursery) -> None:
    class Body(bytearray): ...

    out = await running(nursery, Socket(takes=[0]))
    body = Body(b"x" * SEND_BYTES)
    held = weakref.ref(body)
    out.put(b"head", body)
    del body
    await trio.testing.wait_all_tasks_blocked()
    assert (out.unsent_bytes, held()) == (0, None)


async def test_write_buffer_joins_what_follows_in_a_burst(nursery: trio.Nursery) -> None:
    socket = Socket()
    out = await running(nursery, socket)
    for number in range(10):
        out.put(b"%d" % number, b"")
    assert bytes(socket.got) == b"0"
    await trio.testing.wait_all_tasks_blocked()
    assert (bytes(socket.got), socket.waited) == (b"0123456789", 1)
    await trio.sleep(2 * BURST_S)
    out.put(b"next", b"")
    assert bytes(socket.got[-4:]) == b"next"


async def test_write_buffer_holds_until_it_is_released(nursery: trio.Nursery) -> None:
    socket = Socket()
    out = await running(nursery, socket)
    out.is_held = True
    out.put(b"one", b"")
    out.put(b"two", b"")
    assert not socket.got
    out.release()
    assert (bytes(socket.got), socket.waited) == (b"onetwo", 0)


async def test_write_buffer_reports_a_broken_socket(nursery: trio.Nursery) -> None:
    reasons: list[str] = []
    socket = Socket(error=BrokenPipeError(32, "broken pipe"))
    out = buffer_over(socket, reasons)
    nursery.start_soon(out.run)
    await trio.testing.wait_all_tasks_blocked()
    out.put(b"head", b"body")
    assert reasons == ["broken: [Errno 32] broken pipe"]
    assert out.handed_total == 8, "it may have left: the outcome of a request in it is unknown"


async def test_write_buffer_of_a_full_socket_hands_nothing_over(nursery: trio.Nursery) -> None:
    socket = Socket(takes=[0])
    out = await running(nursery, socket)
    out.put(b"head", b"body")
    assert (out.handed_total, out.unsent_bytes) == (0, 8)
    await trio.testing.wait_all_tasks_blocked()
    assert (bytes(socket.got), out.handed_total, out.unsent_bytes) == (b"headbody", 8, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_write_buffer_keeps_order_through_partial_sends(
    nursery: trio.Nursery, seed: int
) -> None:
    rng = random.Random(seed)
    socket = Socket(takes=[rng.choice([0, 1, 7, 300, SEND_BYTES]) for _ in range(200)])
    out = buffer_over(socket)
    nursery.start_soon(out.run)
    expected = bytearray()
    for _ in range(300):
        head = rng.randbytes(rng.randrange(1, 40))
        body = rng.randbytes(rng.choice([0, 0, 10, 1000, 70_000, SEND_BYTES + 3]))
        expected += head + body
        out.is_held = rng.random() < 0.3
        out.put(head, memoryview(body) if rng.random() < 0.5 else body)
        out.release()
        assert out.handed_total >= len(socket.got)
        assert out.unsent_bytes == out.queued_total - len(socket.got)
        if rng.random() < 0.5:
            await trio.sleep(rng.choice([0, BURST_S / 2, 2 * BURST_S]))
    await trio.testing.wait_all_tasks_blocked()
    assert socket.got == expected
    assert (out.unsent_bytes, out.handed_total) == (0, len(expected))
