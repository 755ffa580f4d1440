"""The JSON header: strict out, lenient in.

The CBOR header of our own programs.
"""

from __future__ import annotations

import cbor2
import pytest

from dledger.commitlog.errors import LocalProtocolError, RemoteProtocolError
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request, response_to
from dledger.remoting.protocol.header_codec import (
    decode_cbor_header,
    decode_json_header,
    encode_cbor_header,
    encode_json_header,
)


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
