"""A flood is split over processes and made smaller where descriptors run out."""

from __future__ import annotations

import socket

import pytest

from dledger.jepsen_like.chaos.limits import (
    HOLDERS_MAX,
    OWN_FILES,
    PER_HOLDER,
    Flood,
    kept_of,
    shares,
    source_for,
)


@pytest.mark.parametrize(
    ("number", "files_max", "expected"),
    [
        (10_000, 20_000, [5_000, 5_000]),
        (10_001, 20_000, [3_334, 3_334, 3_333]),
        (10, 20_000, [10]),
        (10_000, 1_024, [960] * HOLDERS_MAX),
        (1_000, 1_024, [500, 500]),
        (10_000, OWN_FILES, []),
        (0, 20_000, []),
    ],
)
def test_a_flood_is_split_so_that_no_holder_runs_out(
    number: int, files_max: int, expected: list[int]
) -> None:
    found = shares(number, files_max)
    assert found == expected
    assert all(share <= min(PER_HOLDER, files_max - OWN_FILES) for share in found)


def test_holders_have_loopback_addresses_of_their_own() -> None:
    assert len({source_for("127.0.0.1", place) for place in range(HOLDERS_MAX)}) == HOLDERS_MAX
    assert source_for("10.9.0.2", 0) == ""


def test_flood_reports_when_it_was_made_smaller() -> None:
    assert str(Flood(10, 10, 10, 4)) == "10 of 10 connections, 6 closed by the broker"
    assert str(Flood(10_000, 7_680, 7_000, 7_000)) == (
        "7000 of 7680 connections instead of 10000 (descriptors), 0 closed by the broker"
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


def test_flood_states_what_a_dead_holder_had_as_unknown() -> None:
    assert str(Flood(10, 10, 10, kept=4, lost=5)) == (
        "10 of 10 connections, 1 closed by the broker, 5 lost with their process"
    )
