"""The CBOR header of our own programs."""

from __future__ import annotations

import cbor2
import pytest

from commitlog.errors import LocalProtocolError, RemoteProtocolError
from remoting.protocol.cbor_header import decode_cbor_header, encode_cbor_header
from remoting.protocol.command import RemotingCommand, SerializeType, request


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
def test_what_is_no_header_is_refused(header: bytes) -> None:
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
