"""RocketMQ's binary header."""

from __future__ import annotations

import pytest

from commitlog.errors import LocalProtocolError, RemoteProtocolError
from remoting.protocol.command import SerializeType, request
from remoting.protocol.frame import decode_binary_header, encode_binary_header

EMPTY = bytes.fromhex("0022 00 0197 00000001 00000002 00000000 00000000".replace(" ", ""))


def test_header_without_remark_and_fields() -> None:
    command = decode_binary_header(EMPTY)
    assert (command.code, command.language, command.version) == (34, "JAVA", 407)
    assert (command.opaque, command.flag, command.remark, command.ext) == (1, 2, None, {})
    assert command.serialize is SerializeType.ROCKETMQ


def test_unknown_language_is_other() -> None:
    assert decode_binary_header(EMPTY[:2] + b"\x63" + EMPTY[3:]).language == "OTHER"


def test_null_values_are_left_out_and_numbers_written_as_text() -> None:
    command = request(10, {"a": None, "b": 7, "c": True}, serialize=SerializeType.ROCKETMQ)
    assert decode_binary_header(encode_binary_header(command)).ext == {"b": "7", "c": "true"}


def test_code_over_16_bits_is_refused_before_anything_is_sent() -> None:
    for code in (32768, 51100, 200050):
        with pytest.raises(LocalProtocolError, match=str(code)):
            encode_binary_header(request(code))


def test_key_over_16_bits_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        encode_binary_header(request(10, {"k" * 40_000: ""}))


@pytest.mark.parametrize(
    "header",
    [
        EMPTY[:16],
        EMPTY[:-1],
        EMPTY + b"\x00",
        EMPTY[:13] + bytes.fromhex("ffffffff00000000"),
        EMPTY[:13] + bytes.fromhex("0000000500000000"),
        EMPTY[:17] + bytes.fromhex("7fffffff"),
        EMPTY[:17] + bytes.fromhex("ffffffff"),
        EMPTY[:17] + bytes.fromhex("00000003 ffff61".replace(" ", "")),
        EMPTY[:17] + bytes.fromhex("00000008 0001 61 7fffffff 62".replace(" ", "")),
        EMPTY[:17] + bytes.fromhex("00000008 0001 61 ffffffff 62".replace(" ", "")),
        EMPTY[:17] + bytes.fromhex("00000008 0001 ff 00000001 62".replace(" ", "")),
        EMPTY[:17] + bytes.fromhex("00000003 0001 61".replace(" ", "")),
    ],
)
def test_lengths_that_point_elsewhere_are_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_binary_header(header)
