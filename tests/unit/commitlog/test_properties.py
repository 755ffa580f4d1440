"""What brokers write is theirs, and has space beside what clients write."""

import pytest

from dledger.commitlog.errors import LocalProtocolError
from dledger.commitlog.properties import (
    ADDED_BYTES,
    MAX_CLIENT_PROPERTIES_BYTES,
    MAX_PROPERTIES_BYTES,
    OWNED_NAMES,
    RESERVED_BYTES,
    decode_properties,
    encode_properties,
    get_property,
    has_owned,
    leaves_space,
    may_have_owned,
    with_properties,
    without_owned,
    without_properties,
)


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


@pytest.mark.parametrize("name", OWNED_NAMES)
def test_owned_names_are_removed_anywhere(name: str) -> None:
    owned = b"%b\x01v\x02" % name.encode()
    assert may_have_owned(owned)
    assert "_" in name, "what a batch of records is looked through for"
    for before, after in ((b"", b""), (b"A\x01b\x02", b""), (b"A\x01b\x02", b"C\x01d\x02")):
        assert has_owned(before + owned + after)
        assert without_owned(before + owned + owned + after) == before + after


@pytest.mark.parametrize(
    "properties",
    [
        b"",
        b"XREAL_TOPIC\x01v\x02",
        b"A\x01REAL_TOPIC\x02",
        b"REAL_TOPICS\x01v\x02",
        b"TIMER_DELAY_SEC\x015\x02TIMER_DEL_UNIQKEY\x01K\x02",
        b"TRAN_MSG\x01true\x02__transactionId__\x01x\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x015\x02",
        b"RETRY_TOPIC\x01T\x02ORIGIN_MESSAGE_ID\x01x\x02DELAY\x013\x02KEYS\x01a b\x02",
        b"WAIT\x01true\x02",
    ],
)
def test_what_clients_may_write_stays_byte_by_byte(properties: bytes) -> None:
    assert without_owned(properties) is properties


def test_reserve_is_the_space_of_all_additions() -> None:
    everything = {name: "v" * size for name, size in ADDED_BYTES.items()}
    assert len(with_properties(b"", everything)) == RESERVED_BYTES
    assert MAX_CLIENT_PROPERTIES_BYTES + RESERVED_BYTES == MAX_PROPERTIES_BYTES
    assert set(OWNED_NAMES) - set(ADDED_BYTES) == {"POP_CK"}, "which is never added here"


def test_present_additions_need_no_more_space() -> None:
    mine = b"F\x01%b\x02" % (b"x" * (MAX_CLIENT_PROPERTIES_BYTES - 3))
    assert leaves_space(mine)
    assert not leaves_space(mine + b"G\x01h\x02")
    assert leaves_space(mine + b"RETRY_TOPIC\x01T\x02")
    assert not leaves_space(mine + b"RETRY_TOPIC\x01%b\x02" % (b"x" * RESERVED_BYTES))


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (b"A\x01b\x02N\x01v\x02C\x01d\x02", b"A\x01b\x02C\x01d\x02"),
        (b"N\x01v", b""),
        (b"A\x01b\x01c\x02N\x01v\x02", b"A\x01b\x01c\x02"),
        (b"A\x01\xff\x02N\x01\xfe\x02", b"A\x01\xff\x02"),
        (b"\x02\x02odd\x02N\x02", b"odd\x02"),
    ],
)
def test_properties_are_taken_out_of_any_bytes(raw: bytes, kept: bytes) -> None:
    assert without_properties(raw, {b"N"}) == kept
    assert with_properties(raw, {"N": "new"}) == kept + b"N\x01new\x02"
