"""What is written is what is read, however it is cut."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dledger.remoting.protocol import fastjson
from dledger.remoting.protocol.bodies import BrokerData, MessageQueue, ResetOffsetBody
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.fastjson import Dialect
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.protocol.headers import SendMessageHeader
from tests.property.strategies_remoting import (
    I32,
    I64,
    JSON_VALUES,
    SEND_HEADERS,
    TEXT,
    commands,
    cuts,
)


@given(command=commands())
def test_command_survives_its_frame(command: RemotingCommand) -> None:
    assert FrameDecoder().feed(encode_command(command)) == [command]


@given(data=st.data(), sent=st.lists(commands(), min_size=1, max_size=4))
def test_stream_of_frames_may_be_cut_anywhere(
    data: st.DataObject, sent: list[RemotingCommand]
) -> None:
    stream = b"".join(encode_command(command) for command in sent)
    decoder = FrameDecoder()
    heard: list[RemotingCommand] = []
    arrived = 0
    for piece in data.draw(cuts(stream)):
        heard += decoder.feed(piece)
        arrived += len(piece)
        assert decoder.pending_bytes <= arrived
    assert heard == sent
    assert decoder.bytes_needed == 0


@given(header=SEND_HEADERS)
def test_send_header_survives_both_namings(header: SendMessageHeader) -> None:
    assert SendMessageHeader.decode(header.encode()) == header
    assert SendMessageHeader.decode_v2(header.encode_v2()) == header


@given(header=SEND_HEADERS, command=commands())
def test_short_and_long_names_say_the_same(
    header: SendMessageHeader, command: RemotingCommand
) -> None:
    junk = {f"x-{key}": value for key, value in command.ext.items()}
    assert SendMessageHeader.decode_v2({**junk, **header.encode_v2()}) == SendMessageHeader.decode(
        {**junk, **header.encode()}
    )


@given(value=JSON_VALUES, dialect=st.sampled_from(Dialect))
def test_dialect_is_read_back_without_its_nulls(value: Any, dialect: Dialect) -> None:
    assert fastjson.loads(fastjson.dumps(value, dialect)) == fastjson.without_nulls(value)


@given(value=JSON_VALUES)
def test_own_reader_agrees_with_the_standard_one(value: Any) -> None:
    text = fastjson.dumps(value)
    assert fastjson._read_dialect(text) == fastjson.loads(text)


@given(
    offsets=st.dictionaries(st.builds(MessageQueue, TEXT, TEXT, I32), I64, max_size=5),
    dialect=st.sampled_from(Dialect),
)
def test_tables_of_message_queues_survive(
    offsets: dict[MessageQueue, int], dialect: Dialect
) -> None:
    body = ResetOffsetBody(offsets)
    assert ResetOffsetBody.decode(body.encode(dialect)) == body


@given(addresses=st.dictionaries(I64, TEXT, max_size=5), dialect=st.sampled_from(Dialect))
def test_tables_of_numbers_survive(addresses: dict[int, str], dialect: Dialect) -> None:
    body = BrokerData("c", "b", addresses)
    assert BrokerData.decode(body.encode(dialect)) == body
