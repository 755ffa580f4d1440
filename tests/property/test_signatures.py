"""Signatures against an independent computation, through every header encoding; hostile headers."""

import base64
import hashlib
import hmac
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.errors import MQError
from dledger.processors.wiring import broker_rules
from dledger.remoting.access.accounts import Account
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.protocol.signature import Credentials, is_signed_by, signature_of

TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
NAMES = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12)
EXT = st.dictionaries(NAMES, TEXT, max_size=8)
CREDENTIALS = st.builds(
    Credentials,
    st.text("abcXYZ09", min_size=1, max_size=12),
    TEXT.filter(bool),
    st.none() | TEXT.filter(bool),
)


def independent(ext: dict[str, str], body: bytes, secret: str) -> str:
    """The signature by another way: code units one by one, all bytes at once."""

    def code_units(name: str) -> list[int]:
        raw = name.encode("utf-16-le")
        return [raw[at] | raw[at + 1] << 8 for at in range(0, len(raw), 2)]

    ordered = sorted(((code_units(name), value) for name, value in ext.items()))
    content = b"".join(value.encode() for _, value in ordered) + body
    key = secret.encode()
    block = (hashlib.sha1(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    inner = hashlib.sha1(bytes(b ^ 0x36 for b in block) + content).digest()
    return base64.b64encode(hashlib.sha1(bytes(b ^ 0x5C for b in block) + inner).digest()).decode()


@given(EXT, st.binary(max_size=200), CREDENTIALS, st.sampled_from(SerializeType))
def test_signature_equals_the_independent_one(
    ext: dict[str, str], body: bytes, credentials: Credentials, serialize: SerializeType
) -> None:
    command = request(10, {k: v for k, v in ext.items() if v}, body, serialize=serialize)
    credentials.sign(command)
    (received,) = FrameDecoder().feed(encode_command(command))
    assert is_signed_by(received, credentials.secret_key)
    signed = {name: value for name, value in received.ext.items() if name != "Signature"}
    assert received.ext["Signature"] == independent(signed, body, credentials.secret_key)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6), st.binary(max_size=50))
def test_any_header_is_signed_or_not_and_never_an_error(ext: dict[str, Any], body: bytes) -> None:
    command = RemotingCommand(12, ext=ext, body=body)
    signature = signature_of(command, "secret")
    assert len(base64.b64decode(signature)) == 20
    assert not is_signed_by(command, "secret") or hmac.compare_digest(
        signature.decode(), str(ext.get("Signature"))
    )


FIELDS = st.sampled_from(
    ["topic", "b", "consumerGroup", "group", "runs", "offset", "commitLogOffset", "a"]
)


@given(
    st.sampled_from(sorted(broker_rules(lambda _: "T", "Default"))),
    st.dictionaries(FIELDS, VALUES | st.just("%RETRY%"), max_size=5),
    st.binary(max_size=80) | st.just(b'{"consumerDataSet":[{"groupName":"g"}]}'),
)
def test_account_without_rights_passes_no_rule(code: int, ext: dict[str, Any], body: bytes) -> None:
    rule = broker_rules(lambda _: "T", "Default")[code]
    nobody = Account("nobody", "secret-key")
    asked = RemotingCommand(code, ext=ext, body=body)
    if rule.rights is None:
        return
    try:
        rights = list(rule.rights(asked))
    except MQError:
        return
    assert all(not nobody.allows(right) for right in rights)
