"""Damaged registrations are refused with one kind of error, whatever the damage."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from dledger.namesrv.errors import BadRegisterBodyError
from dledger.namesrv.registration import decode_register_body
from dledger.remoting.protocol.bodies import RegisterBrokerBody
from tests.harness.registrations import encode_compressed
from tests.unit.namesrv.world import register_body

SAMPLE = register_body(["T1", "T2"], counter=5, filters=["f:1"])
PLAIN = SAMPLE.encode()
INFLATED = zlib.decompress(encode_compressed(SAMPLE))

edits = st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6)), min_size=1, max_size=4)


def damaged(data: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    for place, piece in changes:
        at = place % (len(data) + 1)
        data = data[:at] + piece + data[at + len(piece) // 2 :]
    return data


@given(edits)
def test_damaged_json_is_read_or_refused(changes: list[tuple[int, bytes]]) -> None:
    read_or_refused(damaged(PLAIN, changes), compressed=False)


@given(edits, st.booleans())
def test_damaged_compressed_bodies_are_read_or_refused(
    changes: list[tuple[int, bytes]], inside: bool
) -> None:
    if inside:
        read_or_refused(zlib.compress(damaged(INFLATED, changes)), compressed=True)
    else:
        read_or_refused(damaged(zlib.compress(INFLATED), changes), compressed=True)


def read_or_refused(data: bytes, *, compressed: bool) -> None:
    try:
        body = decode_register_body(data, compressed=compressed, crc=0)
    except BadRegisterBodyError as error:
        assert "registration cannot be read" in str(error)  # noqa: PT017
    else:
        assert isinstance(body, RegisterBrokerBody)
