"""Java properties as RocketMQ's broker.conf uses them."""

from __future__ import annotations

import pytest

from commitlog.errors import ConfigError
from dledger.java_properties import parse_properties


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("listenPort=10911", [(1, "listenPort", "10911")]),
        ("brokerClusterName = RaftCluster ", [(1, "brokerClusterName", "RaftCluster")]),
        ("a: b\nc d\ne", [(1, "a", "b"), (2, "c", "d"), (3, "e", "")]),
        ("# note\n! note\n\n  \nk=v", [(5, "k", "v")]),
        ("k=a=b:c", [(1, "k", "a=b:c")]),
        ("k=a;\\\n   b;\\\n   c\nl=1", [(1, "k", "a;b;c"), (4, "l", "1")]),
        ("k=a\\\\\nl=1", [(1, "k", "a\\"), (2, "l", "1")]),
        ("k=C\\:\\\\store\\u0041\\tx", [(1, "k", "C:\\storeA\tx")]),
        ("a\\ b=c", [(1, "a b", "c")]),
        ("k=1\nk=2", [(1, "k", "1"), (2, "k", "2")]),
        ("k=a\\", [(1, "k", "a")]),
        ("k=a\\\n# part of the value", [(1, "k", "a# part of the value")]),
        ("k=v\r\nl=w\r\n", [(1, "k", "v"), (2, "l", "w")]),
    ],
)
def test_a_line_is_read_as_java_does(text: str, expected: list[tuple[int, str, str]]) -> None:
    assert parse_properties(text) == expected


def test_a_bad_unicode_escape_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"line 2: bad \\u escape '00g1'"):
        parse_properties("a=1\nb=\\u00g1")
