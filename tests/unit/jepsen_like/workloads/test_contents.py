"""A message that is read is compared with what was sent under its value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from client.core.message import Message
from jepsen_like.checkers.contents import BODY, BORN, PROPERTIES
from jepsen_like.workloads.contents import BORN_WITHIN_MS, Contents

NOW_MS = 1_000_000
SENT = Message("t", b"12345678....", tags="a", keys="k l", properties={"own": "1"})


class Seen(msgspec.Struct, frozen=True):
    body: bytes = b"12345678...."
    tags: str = "a"
    keys: str = "k l"
    properties: dict[str, str] = msgspec.field(
        default_factory=lambda: {"own": "1", "UNIQ_KEY": "added"}
    )
    born_timestamp_ms: int = NOW_MS + 5


def noted(*, is_hostile: bool = False) -> Contents:
    contents = Contents()
    contents.note(7, SENT, NOW_MS, is_hostile=is_hostile)
    return contents


@pytest.mark.parametrize(
    ("change", "anomaly"),
    [
        ({}, ""),
        ({"body": b"12345678..."}, BODY),
        ({"body": b"12345678...,"}, BODY),
        ({"tags": ""}, PROPERTIES),
        ({"keys": "k"}, PROPERTIES),
        ({"properties": {"UNIQ_KEY": "added"}}, PROPERTIES),
        ({"properties": {"own": "2"}}, PROPERTIES),
        ({"born_timestamp_ms": NOW_MS - 1}, BORN),
        ({"born_timestamp_ms": NOW_MS + BORN_WITHIN_MS + 1}, BORN),
    ],
)
def test_what_was_altered_is_named(change: dict[str, Any], anomaly: str) -> None:
    assert noted().difference(7, msgspec.structs.replace(Seen(), **change)) == anomaly


def test_a_later_read_has_the_time_of_birth_of_the_first() -> None:
    contents = noted()
    assert contents.difference(7, Seen()) == ""
    assert contents.difference(7, Seen(born_timestamp_ms=NOW_MS + 6)) == BORN
    assert contents.difference(7, Seen()) == ""


def test_reserved_properties_may_change_and_unknown_values_too() -> None:
    assert noted(is_hostile=True).difference(7, Seen(properties={})) == ""
    assert noted().difference(8, Seen(body=b"other")) == ""
