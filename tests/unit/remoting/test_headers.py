"""Typed custom headers."""

from __future__ import annotations

from typing import Any

import pytest

from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import (
    CreateTopicHeader,
    Header,
    PullMessageHeader,
    RegisterBrokerHeader,
    SendMessageHeader,
    SendMessageResponseHeader,
    UnregisterClientHeader,
)

SEND = SendMessageHeader(
    producer_group="g", topic="T", default_topic="TBW102", default_topic_queue_nums=4, queue_id=-1,
    sys_flag=0, born_timestamp=1_795_147_871_927, flag=3, properties="TAGS\x01a\x02",
    reconsume_times=0, unit_mode=False, max_reconsume_times=None, batch=False, bname="b",
)  # fmt: skip
LONG = {
    "producerGroup": "g", "topic": "T", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
    "queueId": "-1", "sysFlag": "0", "bornTimestamp": "1795147871927", "flag": "3",
    "properties": "TAGS\x01a\x02", "reconsumeTimes": "0", "unitMode": "false", "batch": "false",
    "bname": "b",
}  # fmt: skip
SHORT = dict(zip("abcdefghijkmn", LONG.values(), strict=True))


def test_send_header_under_long_names() -> None:
    assert SEND.encode() == LONG
    assert SendMessageHeader.decode(LONG) == SEND


def test_send_header_under_one_letter_names() -> None:
    assert SEND.encode_v2() == SHORT
    assert SendMessageHeader.decode_v2(SHORT) == SEND


@pytest.mark.parametrize("code", [10, 310, 324, 325])
def test_code_decides_which_names_are_read(code: int) -> None:
    ext = SHORT if code in (310, 325) else LONG
    assert SendMessageHeader.of(request(code, dict(ext))) == SEND


def test_batch_code_is_a_batch_without_its_flag() -> None:
    assert SendMessageHeader.of(request(RequestCode.SEND_BATCH_MESSAGE, dict(SHORT))).batch is True


@pytest.mark.parametrize(
    ("value", "batch"), [("1", True), ("TRUE", True), ("0", False), ("yes", False)]
)
def test_cpp_marks_batches_with_one(value: str, batch: bool) -> None:
    assert SendMessageHeader.decode({**LONG, "batch": value}).batch is batch
    assert SendMessageHeader.decode_v2({**SHORT, "m": value}).batch is batch


@pytest.mark.parametrize(("value", "truth"), [("True", True), ("1", False), ("0", False)])
def test_other_booleans_are_true_only_when_they_say_true(value: str, truth: bool) -> None:
    assert SendMessageHeader.decode({**LONG, "unitMode": value}).unit_mode is truth
    assert SendMessageHeader.decode_v2({**SHORT, "k": value}).unit_mode is truth


@pytest.mark.parametrize("name", [name for name in LONG if SEND.wire_name("x") != name][:8])
def test_missing_required_field_is_named(name: str) -> None:
    long = {key: value for key, value in LONG.items() if key != name}
    with pytest.raises(BadRequestError) as raised:
        SendMessageHeader.decode(long)
    assert str(raised.value) == f"the custom field {name} is null"
    letter = list(SHORT)[list(LONG).index(name)]
    short = {key: value for key, value in SHORT.items() if key != letter}
    with pytest.raises(BadRequestError) as raised:
        SendMessageHeader.decode_v2(short)
    assert str(raised.value) == f"the custom field {letter} is null"


@pytest.mark.parametrize(
    ("letter", "value"),
    [
        ("e", "2147483648"),
        ("d", "x"),
        ("g", "9223372036854775808"),
        ("h", ""),
        ("j", "1e3"),
        ("l", str(1 << 31)),
    ],
)
def test_numbers_out_of_range_or_shape_are_refused(letter: str, value: str) -> None:
    with pytest.raises(BadRequestError, match=f"custom field {letter} "):
        SendMessageHeader.decode_v2({**SHORT, letter: value})


def test_cbor_values_keep_their_kind() -> None:
    ext = {**SHORT, "d": 4, "e": -1, "f": 0, "g": 1_795_147_871_927, "h": 3, "j": 0, "m": False}
    assert SendMessageHeader.decode_v2(ext) == SEND


@pytest.mark.parametrize("letter", "abcin")
@pytest.mark.parametrize("value", [b"T", [1]])
def test_what_is_no_text_is_refused(letter: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=f"custom field {letter} is not text"):
        SendMessageHeader.decode_v2({**SHORT, letter: value})


def test_unknown_fields_are_passed_over() -> None:
    ext = {**SHORT, "AccessKey": "", "Signature": "x", "ns": "y"}
    assert SendMessageHeader.decode_v2(ext) == SEND


def test_send_response_has_region_and_tracing() -> None:
    assert SendMessageResponseHeader("id", 1, 2).encode() == {
        "msgId": "id", "queueId": "1", "queueOffset": "2", "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }  # fmt: skip


def test_names_that_do_not_follow_the_rule() -> None:
    assert UnregisterClientHeader("c", consumer_group="").encode() == {
        "clientID": "c",
        "consumerGroup": "",
    }
    pull = PullMessageHeader("g", "T", 0, 1, 32, 6, 0, 15000, 0, proxy_forward_client_id="p")
    assert pull.encode()["proxyFrowardClientId"] == "p"
    register = RegisterBrokerHeader("b", "a:1", "c", "a:2", 0, body_crc32=5).encode()
    assert register["bodyCrc32"] == "5"
    assert register["haServerAddr"] == "a:2"


def test_create_topic_requires_its_flags() -> None:
    with pytest.raises(BadRequestError, match="the custom field perm is null"):
        CreateTopicHeader.decode(
            {"topic": "T", "defaultTopic": "D", "readQueueNums": "1", "writeQueueNums": "1"}
        )


def test_every_header_has_fields_the_codec_knows() -> None:
    kinds = Header.__subclasses__()
    assert len(kinds) > 40
    for kind in kinds:
        try:
            assert kind.decode({}) == kind()
        except BadRequestError as error:
            assert str(error).endswith("is null")  # noqa: PT017  # either way is right
