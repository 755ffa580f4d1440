from __future__ import annotations

import pytest

from commitlog.errors import LocalProtocolError
from commitlog.properties import decode_properties, encode_properties, get_property


def test_pairs_are_written_with_separators() -> None:
    assert encode_properties({"TAGS": "TagA", "KEYS": "ключ"}) == (
        b"TAGS\x01TagA\x02KEYS\x01" + "ключ".encode() + b"\x02"
    )


def test_pairs_with_an_empty_side_are_left_out() -> None:
    assert encode_properties({"a": "", "": "b", "c": "d"}) == b"c\x01d\x02"


@pytest.mark.parametrize("bad", [{"a\x01": "b"}, {"a": "b\x02c"}, {"a": "\ud800"}])
def test_what_cannot_be_written_is_refused(bad: dict[str, str]) -> None:
    with pytest.raises(LocalProtocolError):
        encode_properties(bad)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"", {}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01b\x02\x02a\x01c\x02", {"a": "c"}),
        (b"a\x02b\x01\x02\x01c\x02d\x01e\x02", {"d": "e"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_reading_is_lenient(raw: bytes, found: dict[str, str]) -> None:
    assert decode_properties(raw) == found


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"", None),
        (b"TAGS\x01x", b"x"),
        (b"MYTAGS\x01x\x02", None),
        (b"MYTAGS\x01x\x02TAGS\x01y\x02", b"y"),
        (b"TAGS\x01x\x02TAGS\x01y\x02", b"y"),
        (b"TAGS\x01x\x02TAGS\x01\x02", b"x"),
        (b"a\x01TAGS\x01x\x02", None),
        (b"TAGS\x01\x02", None),
    ],
)
def test_one_property_is_found_by_its_whole_name(raw: bytes, value: bytes | None) -> None:
    assert get_property(raw, b"TAGS") == value
