"""Damaged bytes: decoders raise RemoteProtocolError and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dledger.commitlog.errors import RemoteProtocolError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol import fastjson
from dledger.remoting.protocol.bodies import HeartbeatData, RegisterBrokerBody, ResetOffsetBody
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request
from dledger.remoting.protocol.frame import FrameDecoder, decode_binary_header, encode_command
from dledger.remoting.protocol.header_codec import decode_cbor_header, decode_json_header
from dledger.remoting.protocol.headers import Header, PullMessageHeader, SendMessageHeader
from tests.harness.extent import EXTENT
from tests.property.strategies_remoting import commands, cuts, mutated

FRAMES = 20_000 * EXTENT
DECODERS = {
    SerializeType.JSON: decode_json_header,
    SerializeType.ROCKETMQ: decode_binary_header,
    SerializeType.CBOR: decode_cbor_header,
}
HEADERS: list[type[Header]] = [SendMessageHeader, PullMessageHeader]
EXAMPLES = [
    b'{"offsetTable":{{"brokerName":"b","queueId":1,"topic":"T"}:5}}',
    b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":1,"messageModel":1,'
    b'"subscriptionDataSet":[{"topic":"T","codeSet":["2598919"],"subVersion":"1"}]}]}',
    b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{"topicName":"T","perm":6}},'
    b'"dataVersion":{"timestamp":1,"counter":2}},"filterServerList":[]}',
    b'{a:{\'b\':[{"x":1L}]},c:{"$ref":"$.a.b[0]"},0:\'y\'}',
]


def feed_all(pieces: list[bytes]) -> list[RemotingCommand]:
    decoder = FrameDecoder()
    heard: list[RemotingCommand] = []
    for piece in pieces:
        try:
            heard += decoder.feed(piece)
        except RemoteProtocolError:
            assert decoder.error is not None
            break
    return heard


@given(data=st.data(), sent=st.lists(commands(), min_size=1, max_size=3))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_damaged_stream_gives_commands_or_a_protocol_error(
    data: st.DataObject, sent: list[RemotingCommand]
) -> None:
    stream = data.draw(mutated(b"".join(encode_command(command) for command in sent)))
    whole = feed_all([stream])
    assert feed_all(data.draw(cuts(stream))) == whole
    for command in whole:
        again = FrameDecoder().feed(encode_command(command))
        assert again[0].code == command.code
        for header in HEADERS:
            try:
                header.decode(command.ext)
                SendMessageHeader.of(command)
            except BadRequestError:
                pass


@pytest.mark.parametrize("kind", list(SerializeType))
@given(data=st.data())
def test_damaged_header(kind: SerializeType, data: st.DataObject) -> None:
    frame = encode_command(data.draw(commands(kind)))
    header = frame[8 : 8 + int.from_bytes(frame[5:8], "big")]
    try:
        DECODERS[kind](data.draw(mutated(header) | st.binary(max_size=60)))
    except RemoteProtocolError:
        pass


@given(data=st.data())
def test_damaged_body(data: st.DataObject) -> None:
    body = data.draw(mutated(data.draw(st.sampled_from(EXAMPLES))))
    readers: list[Any] = [
        fastjson.loads,
        HeartbeatData.decode,
        RegisterBrokerBody.decode,
        ResetOffsetBody.decode,
    ]
    for reader in readers:
        try:
            reader(body)
        except BadRequestError:
            pass


@given(text=st.text("{}[]:,'\"\\$ref.@0a-1eL ", max_size=40))
def test_reader_meets_any_text(text: str) -> None:
    try:
        fastjson.loads(text.encode())
    except BadRequestError:
        pass


LENGTHS = [0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01000000, 0x02000010]


def damage(rng: random.Random, data: bytes) -> bytes:
    """A plain, quick sibling of the `mutated` strategy."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(6):
            case 0 if at < len(result):
                result[at] ^= 1 << rng.randrange(8)
            case 1:
                del result[at:]
            case 2:
                del result[at : at + rng.randint(1, 8)]
            case 3:
                result[at:at] = rng.randbytes(rng.randint(1, 8))
            case 4:
                result[at:at] = result[at : at + rng.randint(1, 40)]
            case _:
                result[at : at + 4] = rng.choice(LENGTHS).to_bytes(4, "big")
    return bytes(result)


@pytest.mark.slow
def test_damaged_frames_of_each_encoding_are_decoded_or_refused() -> None:
    rng = random.Random(20_260)
    ext = SendMessageHeader("g", "T", "TBW102", 4, 0, 0, 1, 0, "TAGS\x01a\x02").encode_v2()
    refused = 0
    for kind in SerializeType:
        frame = encode_command(request(310, dict(ext), EXAMPLES[1], serialize=kind))
        for _ in range(FRAMES):
            stream = damage(rng, frame)
            decoder = FrameDecoder()
            try:
                heard = decoder.feed(stream)
            except RemoteProtocolError:
                refused += 1
                continue
            assert decoder.pending_bytes <= len(stream)
            for command in heard:
                try:
                    SendMessageHeader.of(command)
                    HeartbeatData.decode(command.body)
                except BadRequestError:
                    refused += 1
    assert refused > FRAMES
