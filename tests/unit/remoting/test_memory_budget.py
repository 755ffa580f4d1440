"""The budget of requests in work and unsent answers.

Room for unfinished frames: how much there is, who waits, who gives way.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from remoting.memory_budget import (
    LOOK_EVERY_S,
    NOTED_BYTES,
    SLOW_BYTES_PER_S,
    SMALL_FRAME_BYTES,
    STALLED_S,
    UNREAD_CHECK_EVERY_S,
    YOUNG_S,
    BudgetLimits,
    FrameRoom,
    FrameTicket,
    MemoryBudget,
    budget_bytes,
)


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
    rooms, peers = room(), [Sender() for _ in range(150)]
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
    rooms, hoarders = room(), [Sender() for _ in range(10)]
    for hoarder in hoarders:
        rooms.take(hoarder.ticket, FRAME, 100, 0.0)
    assert rooms.take(Sender("b").ticket, SMALL, 100, 0.0)


def test_a_large_frame_waits_and_is_granted_when_one_is_complete() -> None:
    rooms, first, second = FrameRoom(2 * FRAME, FRAME), Sender(), Sender()
    assert rooms.take(first.ticket, FRAME, 100, 0.0)
    assert not rooms.take(second.ticket, FRAME, 100, 0.0)
    rooms.leave(first.ticket, 0.1)
    assert second.granted
    assert second.ticket.held_bytes == FRAME
    assert (rooms.used_bytes, rooms.waiting_bytes) == (FRAME, 0)


def test_a_frame_that_arrives_in_time_does_not_give_way() -> None:
    rooms, fast, waiting = FrameRoom(2 * FRAME, FRAME), Sender(), Sender(proven=True)
    rooms.take(fast.ticket, FRAME, 100, 0.0)
    rooms.take(waiting.ticket, FRAME, 100, 0.0)
    now = 0.0
    while now < 10 * YOUNG_S:
        now += STALLED_S / 2
        rooms.progress(fast.ticket, int(SLOW_BYTES_PER_S * STALLED_S), now)
        rooms.relieve(now)
    assert not fast.ended


def test_slow_frame_gives_way_only_to_one_that_waits() -> None:
    rooms, slow, waiting = FrameRoom(2 * FRAME, FRAME), Sender(), Sender()
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
    rooms, holder, stranger, client = (
        FrameRoom(2 * FRAME, FRAME),
        Sender(),
        Sender(),
        Sender(proven=True),
    )
    rooms.take(holder.ticket, FRAME, 100, 0.0)
    rooms.take(stranger.ticket, FRAME, 100, 0.0)
    rooms.take(client.ticket, FRAME, 100, 0.0)
    rooms.leave(holder.ticket, 0.1)
    assert (client.granted, stranger.granted) == (True, False)


def test_the_address_that_holds_less_goes_first() -> None:
    rooms = FrameRoom(4 * FRAME, FRAME)
    holders = [Sender("a"), Sender("a"), Sender("b")]
    for holder in holders:
        assert rooms.take(holder.ticket, FRAME, 100, 0.0)
    more, other = Sender("a"), Sender("c")
    rooms.take(more.ticket, FRAME, 100, 0.0)
    rooms.take(other.ticket, FRAME, 100, 0.0)
    rooms.leave(holders[2].ticket, 0.1)
    assert (other.granted, more.granted) == (True, False)


def test_waiting_bytes_are_bounded_and_new_clients_go_first() -> None:
    rooms, client = room(), Sender(proven=True)
    for _ in range(4):
        rooms.take(Sender().ticket, FRAME, 100, 0.0)
    rooms.take(client.ticket, FRAME, 64 * 1024, 0.0)
    waiting = [Sender() for _ in range(1_000)]
    for peer in waiting:
        rooms.take(peer.ticket, FRAME, 64 * 1024, 0.0)
        assert rooms.waiting_bytes <= rooms.max_waiting_bytes
    assert any(peer.ended for peer in waiting)
    assert not client.ended


def test_leaving_twice_gives_back_once() -> None:
    rooms, one = room(), Sender()
    rooms.take(one.ticket, FRAME, 100, 0.0)
    rooms.leave(one.ticket, 0.1)
    rooms.leave(one.ticket, 0.1)
    assert rooms.used_bytes == 0
