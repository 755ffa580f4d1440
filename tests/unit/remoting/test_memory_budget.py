"""The budget of requests in work and unsent answers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from remoting.memory_budget import (
    LOOK_EVERY_S,
    NOTED_BYTES,
    BudgetLimits,
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
        hold(counted, peer, NOTED_BYTES, at * LOOK_EVERY_S)
    assert counted.is_met
    assert not any(peer.ended for peer in peers)


@pytest.mark.parametrize(("configured", "expected"), [(0, 250), (7, 7)])
def test_the_budget_is_a_quarter_of_the_memory_unless_set(configured: int, expected: int) -> None:
    assert budget_bytes(configured, 1_000) == expected
