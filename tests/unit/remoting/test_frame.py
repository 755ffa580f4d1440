"""Frames against the protocol facts, byte by byte.

RocketMQ's binary header.
"""

import struct

import pytest

from dledger.commitlog.errors import LocalProtocolError, RemoteProtocolError
from dledger.remoting.protocol.command import (
    FLAG_RESPONSE,
    RemotingCommand,
    SerializeType,
    request,
    response_to,
)
from dledger.remoting.protocol.frame import (
    FrameDecoder,
    decode_binary_header,
    encode_binary_header,
    encode_command,
    encode_command_parts,
)

# total = 4 + 86 + 2, mark = type 0 and header length 86.
JSON_HEADER = (
    b'{"code":310,"extFields":{"a":"g"},"flag":0,"language":"JAVA","opaque":7,"version":407}'
)
JSON_FRAME = b"\x00\x00\x00\x5c" + b"\x00\x00\x00\x56" + JSON_HEADER + b"hi"

# code 10, GO, version 317, opaque -2, flag 1, remark "no", one ext field.
BINARY_FRAME = bytes.fromhex(
    "00000024"  # 4 + 32 header bytes + 0 body bytes
    "01000020"  # ROCKETMQ, 32
    "000a 09 013d fffffffe 00000001"
    "00000002 6e6f"
    "00000009 0001 62 00000002 543c"
)

CBOR_HEADER = bytes.fromhex(
    "a4"  # map of 4
    "00 19c79d"  # code 51101
    "01 05"  # opaque 5
    "03 a2 61 62 61 54 61 65 18 2a"  # ext {"b": "T", "e": 42}
    "04 62 6f6b"  # remark "ok"
)
CBOR_FRAME = struct.pack(">iI", 4 + len(CBOR_HEADER) + 1, 2 << 24 | len(CBOR_HEADER))
CBOR_FRAME += CBOR_HEADER + b"\xff"

JSON_COMMAND = RemotingCommand(310, 7, 0, None, {"a": "g"}, b"hi", "JAVA", 407)
BINARY_COMMAND = RemotingCommand(
    10, -2, FLAG_RESPONSE, "no", {"b": "T<"}, b"", "GO", 317, SerializeType.ROCKETMQ
)
CBOR_COMMAND = RemotingCommand(
    51101, 5, 0, "ok", {"b": "T", "e": 42}, b"\xff", serialize=SerializeType.CBOR
)

GOLDEN = [
    pytest.param(JSON_FRAME, JSON_COMMAND, id="json"),
    pytest.param(BINARY_FRAME, BINARY_COMMAND, id="binary"),
    pytest.param(CBOR_FRAME, CBOR_COMMAND, id="cbor"),
]


@pytest.mark.parametrize(("frame", "command"), GOLDEN)
def test_golden_frame_decodes_to_its_command(frame: bytes, command: RemotingCommand) -> None:
    assert FrameDecoder().feed(frame) == [command]


@pytest.mark.parametrize(("frame", "command"), GOLDEN)
def test_command_encodes_to_its_golden_frame(frame: bytes, command: RemotingCommand) -> None:
    assert encode_command(command) == frame


@pytest.mark.parametrize(("frame", "command"), GOLDEN)
def test_frame_may_arrive_byte_by_byte(frame: bytes, command: RemotingCommand) -> None:
    decoder = FrameDecoder()
    commands = []
    for at in range(len(frame)):
        if at >= 8:
            assert decoder.bytes_needed == len(frame) - at
        commands += decoder.feed(frame[at : at + 1])
        assert (at + 1 == len(frame)) == bool(commands)
    assert commands == [command]
    assert decoder.bytes_needed == 0
    assert decoder.pending_bytes == 0


def test_input_may_be_any_buffer_and_may_be_reused() -> None:
    chunk = bytearray(JSON_FRAME)
    [command] = FrameDecoder().feed(memoryview(chunk))
    chunk[:] = b"\0" * len(chunk)
    assert command == JSON_COMMAND


def test_large_body_in_pieces_is_a_view_of_the_receive_buffer() -> None:
    body = bytes(range(256)) * 1024
    frame = encode_command(request(10, {"k": "v"}, body))
    decoder = FrameDecoder()
    assert decoder.feed(frame[:1000]) == []
    [command] = decoder.feed(frame[1000:])
    assert isinstance(command.body, memoryview)
    assert command.body.readonly
    assert bytes(command.body) == body


def test_zero_length_body_and_no_ext_are_the_same_as_absent() -> None:
    header = b'{"code":34,"opaque":1}'
    frame = struct.pack(">ii", 4 + len(header), len(header)) + header
    [command] = FrameDecoder().feed(frame)
    assert command.body == b""
    assert command.ext == {}
    assert command.remark is None


@pytest.mark.parametrize(
    ("start", "what"),
    [
        pytest.param(b"\xff\xff\xff\xff", "frame of -1 bytes", id="negative length"),
        pytest.param(b"\x00\x00\x00\x03", "frame of 3 bytes", id="shorter than its mark"),
        pytest.param(b"\x00\xff\xff\xfd", "limit is 16777216", id="one byte too large"),
        pytest.param(b"\x00\x00\x00\x10\x00\x00\x00\x0d", "header of 13", id="header too long"),
        pytest.param(b"\x00\x00\x00\x04\x03\x00\x00\x00", "serialize type 3", id="unknown type"),
        pytest.param(b"\x00\x00\x00\x04\x00\x00\x00\x00", "undecodable JSON", id="empty header"),
        pytest.param(b"\x16\x03\x01\x02", "frame of", id="TLS hello"),
        pytest.param(b"GET / HTTP/1.1\r\n", "frame of", id="HTTP"),
    ],
)
def test_bad_frame_is_refused_as_soon_as_it_shows(start: bytes, what: str) -> None:
    whole = FrameDecoder()
    with pytest.raises(RemoteProtocolError, match=what):
        whole.feed(start)
    trickled = FrameDecoder()

    def trickle() -> None:
        for at in range(len(start)):
            trickled.feed(start[at : at + 1])

    with pytest.raises(RemoteProtocolError, match=what):
        trickle()


def test_largest_frame_is_accepted() -> None:
    decoder = FrameDecoder(max_frame_bytes=len(JSON_FRAME))
    assert decoder.feed(JSON_FRAME) == [JSON_COMMAND]
    with pytest.raises(RemoteProtocolError):
        FrameDecoder(max_frame_bytes=len(JSON_FRAME) - 1).feed(JSON_FRAME)


def test_feeding_after_an_error_raises_again() -> None:
    decoder = FrameDecoder()
    with pytest.raises(RemoteProtocolError):
        decoder.feed(b"\xff\xff\xff\xff")
    with pytest.raises(RemoteProtocolError):
        decoder.feed(JSON_FRAME)


def test_commands_before_the_bad_frame_are_not_lost() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(JSON_FRAME + b"\xff\xff\xff\xff") == [JSON_COMMAND]
    assert decoder.error is not None
    with pytest.raises(RemoteProtocolError):
        decoder.feed(b"")


def test_announced_length_takes_no_memory() -> None:
    decoder = FrameDecoder()
    decoder.feed(b"\x00\xff\x00\x00\x00\x00\x00\x10")
    assert decoder.pending_bytes == 8
    assert decoder.bytes_needed == 0xFF0000 + 4 - 8


def test_frame_over_the_limit_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="limit is 1000"):
        encode_command_parts(request(10, {}, b"x" * 1000), max_frame_bytes=1000)


def test_body_is_not_copied_by_the_parts() -> None:
    body = bytearray(b"x" * 100)
    head, sent = encode_command_parts(request(10, {}, body))
    assert sent is body
    assert FrameDecoder().feed(head + body)[0].body == body


@pytest.mark.parametrize("serialize", list(SerializeType))
def test_response_uses_opaque_and_header_encoding_of_its_request(serialize: SerializeType) -> None:
    asked = request(11, {}, serialize=serialize)
    asked.opaque = -7
    [heard] = FrameDecoder().feed(encode_command(response_to(asked, 19, "PULL_NOT_FOUND")))
    assert (heard.serialize, heard.opaque, heard.code) == (serialize, -7, 19)
    assert heard.is_response
    assert not heard.is_oneway


@pytest.mark.parametrize("serialize", list(SerializeType))
def test_half_a_character_is_refused_before_anything_is_sent(serialize: SerializeType) -> None:
    with pytest.raises(LocalProtocolError):
        encode_command(request(10, {"topic": "\ud800"}, serialize=serialize))


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
