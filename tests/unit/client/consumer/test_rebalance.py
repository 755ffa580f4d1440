"""Half of the brokers that answer decide who is in a group."""

from __future__ import annotations

import pytest

from client.consumer.rebalance import known_members


@pytest.mark.parametrize(
    ("answers", "members"),
    [
        ([["a", "b"]], ["a", "b"]),
        ([["b", "a"], ["a", "b"], []], ["a", "b"]),  # one broker has just started
        ([["a"], ["a"], ["a", "b"]], ["a"]),  # one has not noticed the end of b
        ([["a", "b"], ["a"]], ["a", "b"]),  # of two, nobody can tell which is right
        ([["a"], [], []], []),
        ([["a", "a"], [], []], []),
        ([[]], []),
    ],
)
def test_members(answers: list[list[str]], members: list[str]) -> None:
    assert known_members(answers) == members
