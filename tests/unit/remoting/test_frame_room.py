"""Room for unfinished frames: how much there is, who waits, who gives way."""

from __future__ import annotations

from remoting.frame_room import (
    LOOK_EVERY_S,
    SLOW_BYTES_PER_S,
    SMALL_FRAME_BYTES,
    STALLED_S,
    YOUNG_S,
    FrameRoom,
    FrameTicket,
)

MIB = 1024 * 1024
FRAME = 16 * MIB
SMALL = SMALL_FRAME_BYTES


class Peer:
    """A connection as the room sees it."""

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


def room() -> FrameRoom:
    return FrameRoom(4 * FRAME, FRAME)  # three of the largest beside the part of small ones


def test_many_half_frames_never_hold_more_than_the_limit() -> None:
    rooms, peers = room(), [Peer() for _ in range(150)]
    for peer in peers:
        rooms.take(peer.ticket, FRAME, 60_000, 0.0)
    for tick in range(1, 400):
        rooms.relieve(tick * LOOK_EVERY_S)
        assert rooms.used_bytes <= rooms.limit_bytes
        assert rooms.waiting_bytes <= rooms.max_waiting_bytes
    # Each had its turn and gave way to one that waited; the last ones have nobody to give way to.
    assert sum(peer.ended for peer in peers) == rooms.given_way == 147
    assert rooms.used_bytes == 3 * FRAME


def test_small_frame_fits_beside_large_ones() -> None:
    rooms, hoarders = room(), [Peer() for _ in range(10)]
    for hoarder in hoarders:
        rooms.take(hoarder.ticket, FRAME, 100, 0.0)
    assert rooms.take(Peer("b").ticket, SMALL, 100, 0.0)


def test_a_large_frame_waits_and_is_granted_when_one_is_complete() -> None:
    rooms, first, second = FrameRoom(2 * FRAME, FRAME), Peer(), Peer()
    assert rooms.take(first.ticket, FRAME, 100, 0.0)
    assert not rooms.take(second.ticket, FRAME, 100, 0.0)
    rooms.leave(first.ticket, 0.1)
    assert second.granted
    assert second.ticket.held_bytes == FRAME
    assert (rooms.used_bytes, rooms.waiting_bytes) == (FRAME, 0)


def test_a_frame_that_arrives_in_time_does_not_give_way() -> None:
    rooms, fast, waiting = FrameRoom(2 * FRAME, FRAME), Peer(), Peer(proven=True)
    rooms.take(fast.ticket, FRAME, 100, 0.0)
    rooms.take(waiting.ticket, FRAME, 100, 0.0)
    now = 0.0
    while now < 10 * YOUNG_S:
        now += STALLED_S / 2
        rooms.progress(fast.ticket, int(SLOW_BYTES_PER_S * STALLED_S), now)
        rooms.relieve(now)
    assert not fast.ended


def test_slow_frame_gives_way_only_to_one_that_waits() -> None:
    rooms, slow, waiting = FrameRoom(2 * FRAME, FRAME), Peer(), Peer()
    rooms.take(slow.ticket, FRAME, 100, 0.0)
    now = 0.0
    while now < 2 * YOUNG_S:
        now += STALLED_S / 2
        rooms.progress(slow.ticket, 1, now)
        rooms.relieve(now)
    assert not slow.ended  # nobody waits
    rooms.take(waiting.ticket, FRAME, 100, now)
    rooms.relieve(now + LOOK_EVERY_S)
    assert slow.ended
    assert waiting.granted


def test_frame_of_a_known_client_goes_before_a_new_one() -> None:
    rooms, holder, stranger, client = FrameRoom(2 * FRAME, FRAME), Peer(), Peer(), Peer(proven=True)
    rooms.take(holder.ticket, FRAME, 100, 0.0)
    rooms.take(stranger.ticket, FRAME, 100, 0.0)
    rooms.take(client.ticket, FRAME, 100, 0.0)
    rooms.leave(holder.ticket, 0.1)
    assert (client.granted, stranger.granted) == (True, False)


def test_the_address_that_holds_less_goes_first() -> None:
    rooms = FrameRoom(4 * FRAME, FRAME)
    holders = [Peer("a"), Peer("a"), Peer("b")]
    for holder in holders:
        assert rooms.take(holder.ticket, FRAME, 100, 0.0)
    more, other = Peer("a"), Peer("c")
    rooms.take(more.ticket, FRAME, 100, 0.0)
    rooms.take(other.ticket, FRAME, 100, 0.0)
    rooms.leave(holders[2].ticket, 0.1)
    assert (other.granted, more.granted) == (True, False)


def test_waiting_bytes_are_bounded_and_new_clients_go_first() -> None:
    rooms, client = room(), Peer(proven=True)
    for _ in range(4):
        rooms.take(Peer().ticket, FRAME, 100, 0.0)
    rooms.take(client.ticket, FRAME, 64 * 1024, 0.0)
    waiting = [Peer() for _ in range(1_000)]
    for peer in waiting:
        rooms.take(peer.ticket, FRAME, 64 * 1024, 0.0)
        assert rooms.waiting_bytes <= rooms.max_waiting_bytes
    assert any(peer.ended for peer in waiting)
    assert not client.ended


def test_leaving_twice_gives_back_once() -> None:
    rooms, one = room(), Peer()
    rooms.take(one.ticket, FRAME, 100, 0.0)
    rooms.leave(one.ticket, 0.1)
    rooms.leave(one.ticket, 0.1)
    assert rooms.used_bytes == 0
