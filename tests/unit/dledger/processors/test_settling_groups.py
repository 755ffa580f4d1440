"""For how long a new leader does not say who is in a group."""

from __future__ import annotations

from dledger.processors.clients import SETTLE_S, SettlingGroups


def test_groups_that_were_there_before_settle_for_a_heartbeat_period() -> None:
    settling = SettlingGroups()
    settling.begin(100.0, ["old"])
    assert settling.until_s == 100.0 + SETTLE_S
    assert settling.holds("old", 100.0 + SETTLE_S - 0.001)
    assert not settling.holds("old", 100.0 + SETTLE_S)
    assert not settling.holds("new", 100.0)


def test_who_was_held_is_owed_a_call_once() -> None:
    settling = SettlingGroups()
    settling.begin(0.0, ["a", "b", "c"])
    for group in ("b", "a", "b"):
        assert settling.holds(group, 1.0)
    assert settling.pop_settled(SETTLE_S - 0.001) == []
    assert settling.pop_settled(SETTLE_S) == ["b", "a"]
    assert settling.pop_settled(SETTLE_S) == []
    assert settling.until_s is None


def test_nothing_settles_without_groups_or_without_a_reign() -> None:
    settling = SettlingGroups()
    settling.begin(0.0, [])
    assert settling.until_s is None
    settling.begin(0.0, ["a"])
    assert settling.holds("a", 1.0)
    settling.end()
    assert not settling.holds("a", 1.0)
    assert settling.pop_settled(1000.0) == []
