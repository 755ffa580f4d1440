"""Typed custom headers.

The JSON header: strict out, lenient in.
The code tables.
"""

from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import LocalProtocolError, RemoteProtocolError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import OWN_CODES, RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request, response_to
from dledger.remoting.protocol.header_codec import (
    decode_cbor_header,
    decode_json_header,
    encode_cbor_header,
    encode_json_header,
)
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


def test_request_is_compact_sorted_and_without_nulls() -> None:
    assert (
        encode_json_header(request(105, {"topic": "T", "a": "ü"}))
        == (
            '{"code":105,"extFields":{"a":"ü","topic":"T"},"flag":0,"language":"PYTHON","opaque":0,'
            '"serializeTypeCurrentRPC":"JSON","version":407}'
        ).encode()
    )


def test_response_always_carries_ext_fields() -> None:
    asked = RemotingCommand(15, 9, language="JAVA")
    assert encode_json_header(response_to(asked, 1, "why")) == (
        b'{"code":1,"extFields":{},"flag":1,"language":"PYTHON","opaque":9,"remark":"why",'
        b'"serializeTypeCurrentRPC":"JSON","version":407}'
    )


def test_request_without_fields_has_no_ext_fields() -> None:
    assert b"extFields" not in encode_json_header(request(106))


def test_json_header_writes_values_as_java_does() -> None:
    ext = {"n": 5, "t": True, "f": False, "s": "x", "none": None}
    written = encode_json_header(request(10, ext))
    assert b'"extFields":{"f":"false","n":"5","s":"x","t":"true"}' in written


def test_bytes_cannot_be_written() -> None:
    with pytest.raises(LocalProtocolError):
        encode_json_header(request(10, {"raw": b"\x00"}))


@pytest.mark.parametrize(
    ("header", "ext", "remark"),
    [
        pytest.param(b'{"code":10,"opaque":3}\n', {}, None, id="trailing newline of C++"),
        pytest.param(
            b'{"code":10,"opaque":3,"extFields":{"queueId":0,"k":false,"m":true,"x":null}}',
            {"queueId": "0", "k": "false", "m": "true"},
            None,
            id="numbers and booleans of JS",
        ),
        pytest.param(
            b'{"code":10,"opaque":3,"extFields":null,"remark":""}', {}, None, id="null and empty"
        ),
        pytest.param(
            b'{"nice":[1,{"a":{}}],"remark":"r","opaque":3,"code":"10","extFields":{"a":"b"}}',
            {"a": "b"},
            "r",
            id="unknown keys, any order, numbers as strings",
        ),
    ],
)
def test_lenient_reading(header: bytes, ext: dict[str, str], remark: str | None) -> None:
    command = decode_json_header(header)
    assert (command.code, command.opaque, command.flag) == (10, 3, 0)
    assert command.ext == ext
    assert command.remark == remark


def test_unknown_language_is_kept_and_a_missing_one_is_other() -> None:
    assert decode_json_header(b'{"code":1,"language":"COBOL"}').language == "COBOL"
    assert decode_json_header(b'{"code":1}').language == "OTHER"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"code":null}',
        b'{"code":1',
        b'{"code":1}x',
        b'{"code":1,"remark":"\xff"}',
        b'{"code":1.5}',
        b'{"code":99999999999}',
        b'{"code":1,"opaque":2147483648}',
        b'{"code":1,"extFields":[]}',
        b'{"code":1,"extFields":{"a":"\\ud800"}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_json_header(header)


def test_fields_at_their_default_are_left_out() -> None:
    assert encode_cbor_header(request(34)).hex() == "a200182201" + "00"


def test_ext_values_keep_their_kind() -> None:
    ext = {"n": -5, "raw": b"\x00\xff", "t": True, "runs": [["T", 0, 3], ["U", 1, 2]], "none": None}
    command = decode_cbor_header(encode_cbor_header(request(51101, ext)))
    del ext["none"]
    assert command.ext == ext
    assert command.ext["t"] is True


def test_names_may_stand_for_the_short_keys() -> None:
    header = cbor2.dumps({"code": 51100, "opaque": -1, "ext": {"a": 1}, "language": "GO"})
    assert decode_cbor_header(header) == RemotingCommand(
        51100, -1, ext={"a": 1}, language="GO", serialize=SerializeType.CBOR
    )


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xa0", id="no code"),
        pytest.param(b"\xa1\x00\x0a\x00", id="a byte left over"),
        pytest.param(b"\xa2\x00\x0a", id="cut short"),
        pytest.param(b"\x82\x00\x0a", id="not a map"),
        pytest.param(b"\xbf\x00\x0a\xff", id="indefinite length"),
        pytest.param(b"\xa2\x00\x0a\x00\x0b", id="twice the same key"),
        pytest.param(cbor2.dumps({0: 10, "code": 11}), id="key and its name"),
        pytest.param(cbor2.dumps({0: 10, 9: 1}), id="unknown key"),
        pytest.param(cbor2.dumps({0: 10, True: 1}), id="boolean key"),
        pytest.param(cbor2.dumps({0: "10"}), id="code as text"),
        pytest.param(cbor2.dumps({0: True}), id="code as boolean"),
        pytest.param(cbor2.dumps({0: 1 << 31}), id="code over 32 bits"),
        pytest.param(cbor2.dumps({0: 10, 1: 1 << 80}), id="bignum"),
        pytest.param(cbor2.dumps({0: 10, 4: 5}), id="remark as number"),
        pytest.param(cbor2.dumps({0: 10, 3: []}), id="ext as list"),
        pytest.param(cbor2.dumps({0: 10, 3: {1: "a"}}), id="ext key as number"),
        pytest.param(cbor2.dumps({0: 10, 3: {"a": {}}}), id="map inside ext"),
        pytest.param(cbor2.dumps({0: 10, 3: {"a": [None]}}), id="null inside a list"),
        pytest.param(cbor2.dumps({0: 10, 3: {"a": [[[[1]]]]}}), id="too deep"),
        pytest.param(b"\x81" * 100_000, id="far too deep"),
        pytest.param(b"\xa1\x00\xc4\x82\x1a\x7f\xff\xff\xff\x01", id="decimal tag"),
        pytest.param(b"\xa1\x00\xd8\x23\x61(", id="regular expression tag"),
        pytest.param(b"\xa1\x00\xd9\x12\x34\x01", id="unknown tag"),
        pytest.param(b"\xbb\xff\xff\xff\xff\xff\xff\xff\xff", id="huge map"),
        pytest.param(b"\xa1\x00\x61\xff", id="not UTF-8"),
    ],
)
def test_what_is_no_cbor_header_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_cbor_header(header)


def test_every_prefix_is_refused() -> None:
    header = encode_cbor_header(request(51101, {"a": [1, b"x"], "b": "T"}))
    for end in range(len(header)):
        with pytest.raises(RemoteProtocolError):
            decode_cbor_header(header[:end])


def test_cbor_header_refuses_what_it_cannot_carry() -> None:
    with pytest.raises(LocalProtocolError):
        encode_cbor_header(request(51101, {"a": object()}))


def test_codes_are_those_of_rocketmq() -> None:
    known = {
        10: "SEND_MESSAGE",
        11: "PULL_MESSAGE",
        34: "HEART_BEAT",
        103: "REGISTER_BROKER",
        105: "GET_ROUTEINFO_BY_TOPIC",
        215: "DELETE_TOPIC_IN_BROKER",
        310: "SEND_MESSAGE_V2",
        320: "SEND_BATCH_MESSAGE",
        361: "LITE_PULL_MESSAGE",
        370: "RECALL_MESSAGE",
        904: "BROKER_HEARTBEAT",
        1013: "CONTROLLER_APPLY_BROKER_ID",
        3010: "AUTH_LIST_ACL",
        200151: "BATCH_ACK_MESSAGE",
    }
    assert {code: RequestCode(code).name for code in known} == known
    assert len(RequestCode) > 130
    assert (ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.INVALID_PARAMETER) == (14, 29)


def test_our_own_codes_stay_in_their_range() -> None:
    ours = {code for code in RequestCode if code in OWN_CODES}
    assert {code.name for code in ours} >= {"CAPABILITIES", "SEND_RECORDS", "RAFT_STATUS"}
    rocketmqs = {5001, 5002, 5003}  # timer engine and lists of topics and groups, since 5.2
    assert {code for code in RequestCode if 3010 < code < 200_000} - ours == rocketmqs
