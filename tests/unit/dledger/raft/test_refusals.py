"""Refused peers dial again many times a second; the log hears of each reason once a minute."""

from __future__ import annotations

from dledger.raft.refusals import REASONS_MAX, REPEAT_S, Refusals

NEWER = "n2 speaks version 2, newest known here is 1"


def test_a_reason_gets_one_line_however_often_it_comes() -> None:
    refusals = Refusals()
    assert refusals.note(NEWER, 5.0) == 1
    assert [refusals.note(NEWER, 5.0 + 0.1 * n) for n in range(100)] == [None] * 100
    assert refusals.note("a peer frame with a wrong CRC", 6.0) == 1


def test_the_next_line_tells_how_often_it_happened_since() -> None:
    refusals = Refusals()
    refusals.note(NEWER, 0.0)
    for n in range(7):
        assert refusals.note(NEWER, 1.0 + n) is None
    assert refusals.note(NEWER, REPEAT_S) == 8
    assert refusals.note(NEWER, REPEAT_S + 1.0) is None
    assert refusals.note(NEWER, 2 * REPEAT_S) == 2


def test_a_stranger_with_ever_new_reasons_fills_no_memory_and_hides_nobody_recent() -> None:
    refusals = Refusals()
    for n in range(10 * REASONS_MAX):
        assert refusals.note(f"a peer frame of {n} bytes", 1.0) == 1
    last = 10 * REASONS_MAX - 1
    assert refusals.note(f"a peer frame of {last} bytes", 2.0) is None
    assert refusals.note(f"a peer frame of {last - REASONS_MAX + 1} bytes", 2.0) is None
    assert refusals.note(f"a peer frame of {last - REASONS_MAX} bytes", 2.0) == 1
