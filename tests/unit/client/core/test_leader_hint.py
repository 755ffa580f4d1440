"""Who is taken for the leader."""

from __future__ import annotations

from client.core.leaders import LeaderTable


def test_a_hint_wins_over_the_route_until_the_route_changes() -> None:
    leaders = LeaderTable()
    leaders.take_route("g", "a:1")
    assert leaders.learn("g", "b:1", 2)
    leaders.take_route("g", "a:1")
    assert leaders.address("g") == "b:1"
    leaders.take_route("g", "c:1")
    assert leaders.address("g") == "c:1"


def test_a_hint_of_a_lower_term_is_stale() -> None:
    leaders = LeaderTable()
    assert leaders.learn("g", "b:1", 5)
    assert not leaders.learn("g", "c:1", 4)
    assert leaders.address("g") == "b:1"
    assert leaders.term("g") == 5


def test_the_supposed_leader_itself_may_name_a_lower_term() -> None:
    leaders = LeaderTable()
    leaders.learn("g", "b:1", 5)
    assert leaders.learn("g", "c:1", 1, told_by="b:1")
    assert leaders.address("g") == "c:1"


def test_a_failed_hint_gives_way_to_the_route() -> None:
    leaders = LeaderTable()
    leaders.take_route("g", "a:1")
    leaders.learn("g", "b:1", 2)
    leaders.suspect("g", "x:1")
    assert leaders.address("g") == "b:1"
    leaders.suspect("g", "b:1")
    assert leaders.address("g") == "a:1"


def test_nobody_leads_an_unknown_group() -> None:
    leaders = LeaderTable()
    assert leaders.address("g") is None
    assert leaders.term("g") == -1
    leaders.suspect("g", "a:1")


def test_a_route_without_a_leader_keeps_the_hint() -> None:
    leaders = LeaderTable()
    leaders.take_route("g", "a:1")
    leaders.learn("g", "b:1", 2)
    leaders.take_route("g", None)
    assert leaders.address("g") == "b:1"
