"""A history survives the crash of its writer: whole rows, and a torn last one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.jepsen_like.history.operation import (
    NEVER,
    CorruptHistoryError,
    Event,
    F,
    FloorMove,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    ReplicaState,
    RunHeader,
    encode_history,
    encode_row,
    read_history,
)

HISTORY = History(
    RunHeader("r1", 7, "{}", {"python": "3.11"}),
    [
        Operation(0, 0, 3, 1, F.SEND, Outcome.OK, 1, 2, "orders", 4, 5, value=6),
        Operation(1, 0, 4, -1, F.PULL, Outcome.INFO, 3, NEVER, "orders", values=(6, 7), err="é"),
    ],
    [Event(1, 2, "power_cut", "leader", "n1")],
    [ReplicaRead(9, "n0", "orders", 4, 0, (1, 2, 3))],
    [ReplicaState(9, "n0", 12, (1 << 64) - 1, "ab")],
    [FloorMove(9, "n0", 4, "orders", 4, 1, "size", 6, 7, 8, 9, 10, 11)],
)


def test_what_was_written_is_read() -> None:
    assert read_history(encode_history(HISTORY)) == (HISTORY, 0)


@given(st.integers(0, len(encode_history(HISTORY))))
def test_a_torn_end_costs_the_last_row_only(end: int) -> None:
    whole = encode_history(HISTORY)
    history, torn = read_history(whole[:end])
    kept = encode_history(history) if end - torn else b""
    assert whole[: end - torn] == kept
    assert torn < 200


def test_damage_in_the_middle_is_no_torn_end() -> None:
    rows = [encode_row(HISTORY.header), *map(encode_row, HISTORY.operations)]
    with pytest.raises(CorruptHistoryError, match=f"at byte {len(rows[0])}"):
        read_history(rows[0] + b"\x83\x09\x01\x02" + rows[1])
    with pytest.raises(CorruptHistoryError):
        read_history(rows[0] + b"\xff" + rows[1])
