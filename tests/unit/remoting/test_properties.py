"""Java properties as RocketMQ's configuration files and requests use them."""

from __future__ import annotations

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.remoting.properties import format_properties, parse_properties, read_properties


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
def test_properties_line_is_read_as_in_java(
    text: str, expected: list[tuple[int, str, str]]
) -> None:
    assert parse_properties(text) == expected


def test_properties_bad_escape_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"line 2: bad \\u escape '00g1'"):
        parse_properties("a=1\nb=\\u00g1")


def test_properties_later_line_wins() -> None:
    text = "! c\n# c\na=1\n b : x=y \nlong=one,\\\n   two\nk\\=ey=v\\\\w\na=2\nempty=\n"
    assert read_properties(text) == {
        "a": "2",
        "b": "x=y",
        "long": "one,two",
        "k=ey": "v\\w",
        "empty": "",
    }


def test_properties_value_without_a_key_names_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2: a key is needed before the value '9'"):
        read_properties("a=1\n=9")


def test_properties_are_written_as_in_java() -> None:
    values = {"a": True, "b": 3, "c": "x", "d": "C:\\store\nnext"}
    text = format_properties(values)
    assert text == "a=true\nb=3\nc=x\nd=C:\\\\store\\nnext\n"
    assert read_properties(text) == {"a": "true", "b": "3", "c": "x", "d": "C:\\store\nnext"}
