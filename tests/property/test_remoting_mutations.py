"""Damaged bytes: decoders raise RemoteProtocolError and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dledger.commitlog.errors import RemoteProtocolError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol import fastjson
from dledger.remoting.protocol.bodies import HeartbeatData, RegisterBrokerBody, ResetOffsetBody
from dledger.remoting.protocol.command import RemotingCommand, SerializeType
from dledger.remoting.protocol.frame import FrameDecoder, decode_binary_header, encode_command
from dledger.remoting.protocol.header_codec import decode_cbor_header, decode_json_header
from dledger.remoting.protocol.headers import Header, PullMessageHeader, SendMessageHeader
from tests.property.strategies_remoting import commands, cuts, mutated

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
        *(fastjson.loads, HeartbeatData.decode, RegisterBrokerBody.decode, ResetOffsetBody.decode),
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
