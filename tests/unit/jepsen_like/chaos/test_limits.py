"""A flood states what became of its connections."""

from __future__ import annotations

import socket

from dledger.jepsen_like.chaos.limits import Flood, kept_of, source_for


def test_a_holder_has_a_loopback_address_of_its_own() -> None:
    assert source_for("127.0.0.1").startswith("127.7.")
    assert source_for("10.9.0.2") == ""


def test_flood_reports_when_it_was_made_smaller() -> None:
    assert str(Flood(10, 10, 10, 4)) == "10 of 10 connections, 6 closed by the broker"
    assert str(Flood(10_000, 960, 900, 900)) == (
        "900 of 960 connections instead of 10000, 0 closed by the broker"
    )


def test_a_connection_that_the_other_side_closed_is_not_kept() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        ours = [pair[0] for pair in pairs]
        assert kept_of(ours) == 3
        pairs[1][1].close()
        assert kept_of(ours) == 2
    finally:
        for one, other in pairs:
            one.close()
            other.close()


def test_flood_states_when_its_holder_ended() -> None:
    assert str(Flood(10, 10, 10)) == "10 of 10 connections, their process ended"
