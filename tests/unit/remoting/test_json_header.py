"""The JSON header: strict out, lenient in."""

from __future__ import annotations

import pytest

from commitlog.errors import LocalProtocolError, RemoteProtocolError
from remoting.protocol.command import RemotingCommand, request, response_to
from remoting.protocol.json_header import decode_json_header, encode_json_header


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
