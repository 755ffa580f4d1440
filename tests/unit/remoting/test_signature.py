"""What is signed, byte by byte, against an independent computation."""

import base64
import hashlib
import hmac

import pytest

from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request
from dledger.remoting.protocol.signature import Credentials, is_signed_by, signature_of

SECRET = "12345678"


def independent(content: bytes, secret: str = SECRET) -> str:
    return base64.b64encode(hmac.digest(secret.encode(), content, hashlib.sha1)).decode()


def signed(command: RemotingCommand, content: bytes) -> RemotingCommand:
    command.ext["Signature"] = independent(content)
    return command


def test_signature_covers_values_by_name_then_the_body() -> None:
    command = request(10, {"topic": "T", "AccessKey": "rocket", "a": "1", "Z": "last?"}, b"body")
    Credentials("rocket", SECRET).sign(command)
    # Capital letters come first: AccessKey, Z, a, topic.
    assert command.ext["Signature"] == independent(b"rocket" + b"last?" + b"1" + b"T" + b"body")


def test_a_known_signature() -> None:
    """``printf RocketMQT | openssl dgst -sha1 -hmac 12345678 -binary | base64``."""
    command = request(105, {"topic": "T"})
    Credentials("RocketMQ", SECRET).sign(command)
    assert command.ext == {
        "topic": "T",
        "AccessKey": "RocketMQ",
        "Signature": "qij/uwizWhQy5fp70E15Y7+y++Q=",
    }


def test_names_are_ordered_as_java_orders_them() -> None:
    # U+1F600 is a surrogate pair, D83D DE00, and so stands before U+FF5E; by code points behind.
    command = request(10, {"\uff5e": "tilde", "\U0001f600": "smile"})
    assert signature_of(command, SECRET).decode() == independent(b"smiletilde")


def test_signature_covers_the_token_and_replaces_an_old_one() -> None:
    command = request(10, {"Signature": "old", "SecurityToken": "old", "b": "2"})
    Credentials("rocket", SECRET, "token").sign(command)
    assert command.ext["SecurityToken"] == "token"
    assert command.ext["Signature"] == independent(b"rocket" + b"token" + b"2")


def test_signature_covers_values_as_their_text() -> None:
    ext = {"a": 1, "b": True, "c": False, "d": None, "e": b"\x00\xff", "f": [["T", 0, 2]]}
    command = request(51101, ext, serialize=SerializeType.CBOR)
    expected = b"1" + b"true" + b"false" + b"" + b"\x00\xff" + b"[[T,0,2]]"
    assert signature_of(command, SECRET).decode() == independent(expected)


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 1_000_000])
def test_signature_covers_the_whole_body(size: int) -> None:
    body = bytes(size)
    view = memoryview(bytearray(size + 2))[1:-1]
    for given in (body, view):
        command = request(10, {"a": "1"}, given)
        assert signature_of(command, SECRET).decode() == independent(b"1" + body)


def test_a_lone_surrogate_is_a_question_mark_as_in_java() -> None:
    command = request(10, {"a": "\ud800"})
    assert signature_of(command, SECRET).decode() == independent(b"?")


@pytest.mark.parametrize("version", [399, 401, 407, 477])
@pytest.mark.parametrize("with_flag", [True, False])
def test_the_unique_key_mark_may_be_signed_or_not(version: int, with_flag: bool) -> None:
    command = request(12, {"_UNIQUE_KEY_QUERY": "true", "key": "k"})
    command.version = version
    assert is_signed_by(signed(command, (b"true" if with_flag else b"") + b"k"), SECRET)


def test_a_mark_that_is_not_there_changes_nothing() -> None:
    command = signed(request(12, {"key": "k", "other": "o"}), b"k")
    assert not is_signed_by(command, SECRET)


@pytest.mark.parametrize(
    "change", [{"topic": "U"}, {"queueId": "1"}, {"extra": "x"}, {"AccessKey": "someone"}]
)
def test_any_change_of_a_field_breaks_the_signature(change: dict[str, str]) -> None:
    command = request(10, {"topic": "T", "queueId": "0"}, b"body")
    Credentials("rocket", SECRET).sign(command)
    assert is_signed_by(command, SECRET)
    command.ext.update(change)
    assert not is_signed_by(command, SECRET)


def test_signature_breaks_with_another_body_or_secret() -> None:
    command = request(10, {"topic": "T"}, b"body")
    Credentials("rocket", SECRET).sign(command)
    assert not is_signed_by(command, "another one")
    command.body = b"bodY"
    assert not is_signed_by(command, SECRET)


@pytest.mark.parametrize("given", [None, "", "x", 7, b"bytes", ["list"], "\ud800", "é" * 28])
def test_what_is_no_signature_is_refused(given: object) -> None:
    command = request(10, {"topic": "T"})
    if given is not None:
        command.ext["Signature"] = given
    assert not is_signed_by(command, SECRET)


def test_secrets_are_not_shown() -> None:
    credentials = Credentials("rocket", "the secret", "the token")
    command = request(10, {"topic": "T"})
    credentials.sign(command)
    for shown in (repr(credentials), str(credentials), repr(command)):
        assert "the secret" not in shown
        assert "the token" not in shown
        assert command.ext["Signature"] not in shown
    assert "'topic': 'T'" in repr(command)


def test_signatures_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return True

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert is_signed_by(request(10, {"Signature": "anything"}), SECRET)
    assert compared == [(signature_of(request(10), SECRET), b"anything")]
