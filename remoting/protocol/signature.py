"""Signed requests: what RocketMQ's ACL 1.0 signs, and the form of our own processes.

A signed request carries ``AccessKey``, perhaps ``SecurityToken``, and ``Signature``: the base64 of
HMAC-SHA1, under the secret key, of the values of all ext fields but the signature, one after the
other in the order of their names, and then the body. Java orders names by UTF-16 code units.

Between our own processes a signature covers the whole request, and counts once: the server gives
each connection a random challenge. A request on it carries, in ext fields, the form, a sequence
that grows with each request, and the time since the challenge; its signature is the base64 of
HMAC-SHA256, under the secret key, of

    the domain, the challenge, code, opaque, one-way bit, number of fields,
    each field in the order of its name: name and value, each behind its length,
    the length of the body and the body.

Spec: docs/internals/protocol/semantics.md, section 9.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from dledger.remoting.protocol.command import ExtFields, RemotingCommand
from dledger.remoting.protocol.header_codec import text_of

# ---------------------------------------------------------------------------------- RocketMQ's form


ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
SECURITY_TOKEN: Final = "SecurityToken"
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"

UNSIGNED_UNIQUE_KEY_VERSION: Final = 399
"""Clients up to 4.9.3 add `_UNIQUE_KEY_QUERY` after they have signed."""


JOINED_BYTES_MAX: Final = 64 * 1024
"""A body up to this is copied behind the values: one call then is cheaper than three."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The account a client claims, and what proves it. The secrets are not in its repr."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)

    def sign(self, command: RemotingCommand) -> None:
        """Put name and signature into the ext fields of *command*, in place of older ones."""
        ext = command.ext
        ext[ACCESS_KEY] = self.access_key
        if self.security_token is not None:
            ext[SECURITY_TOKEN] = self.security_token
        ext[SIGNATURE] = signature_of(command, self.secret_key).decode()


def signature_of(
    command: RemotingCommand, secret_key: str, *, left_out: Iterable[str] = ()
) -> bytes:
    """Return the base64 signature of a request under *secret_key*."""
    ext = command.ext
    skipped = {SIGNATURE, *left_out}
    names = sorted(ext) if all(map(str.isascii, ext)) else sorted(ext, key=_utf16)
    values = [_signed_value(ext[name]) for name in names if name not in skipped]
    key, body = secret_key.encode(errors="replace"), memoryview(command.body)
    if body.nbytes <= JOINED_BYTES_MAX:
        digest = hmac.digest(key, b"".join((*values, body)), "sha1")
    else:
        mac = hmac.new(key, b"".join(values), hashlib.sha1)
        mac.update(body)
        digest = mac.digest()
    return base64.b64encode(digest)


def is_signed_by(command: RemotingCommand, secret_key: str) -> bool:
    """Whether the signature in *command* is one under *secret_key*; compared in constant time.

    Senders disagree about `_UNIQUE_KEY_QUERY`: one signature with it or without it is enough, the
    one the sender's version announces is tried first.
    """
    given = command.ext.get(SIGNATURE)
    if not isinstance(given, str):
        return False
    claimed = given.encode(errors="replace")
    for left_out in _left_out(command):
        if hmac.compare_digest(signature_of(command, secret_key, left_out=left_out), claimed):
            return True
    return False


def _left_out(command: RemotingCommand) -> tuple[tuple[str, ...], ...]:
    if UNIQUE_KEY_QUERY not in command.ext:
        return ((),)
    if command.version <= UNSIGNED_UNIQUE_KEY_VERSION:
        return ((UNIQUE_KEY_QUERY,), ())
    return ((), (UNIQUE_KEY_QUERY,))


def _signed_value(value: Any) -> bytes:
    if type(value) is str:
        return value.encode(errors="replace")  # a lone surrogate is "?", as in Java
    if value is None:
        return b""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, bytes):
        return value
    if isinstance(value, list | tuple):
        # Only in headers of ours: a list has no form in a header of strings.
        return b"[" + b",".join(map(_signed_value, value)) + b"]"
    return str(value).encode()


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be", errors="surrogatepass")


# ---------------------------------------------------------------------------------- the fresh form


FORM: Final = "SignatureForm"
SEQUENCE: Final = "SignatureSequence"
AGE_MS: Final = "SignatureAgeMs"
FRESH_FORM: Final = "2"

CHALLENGE: Final = "challenge"
"""Ext field of the answer that brings the challenge."""
CHALLENGE_BYTES: Final = 16
"""Random: no two connections of a server process get the same one."""

SKEW_MAX_MS: Final = 15 * 60 * 1000
"""How far the sender's count of time since the challenge may be from ours. It bounds how long a
request may be held back on its way; two clocks that differ by 0.01 % come so far apart only after
104 days, and then the connection is made again."""

SIGNED_TOO_LONG_AGO: Final = "it was signed too long ago: connect again"

_DOMAIN: Final = b"dledger request signature 2\n"
_LENGTH: Final = struct.Struct(">Q")
_HEAD: Final = struct.Struct(">qq?Q")
_COUNT_DIGITS_MAX: Final = 19
"""Of a sequence or an age: what 63 bits need."""


@dataclass(slots=True)
class RequestSigner:
    """Signs the requests of one connection, in RocketMQ's form until it has a challenge."""

    credentials: Credentials
    now_s: Callable[[], float]
    _challenge: bytes = b""
    _since_s: float = 0.0
    _sequence: int = 0

    def take_challenge(self, ext: ExtFields) -> bool:
        """Sign in the fresh form from now on if *ext*, of the server's answer, has a challenge."""
        text = ext.get(CHALLENGE)
        if not isinstance(text, str) or not text:
            return False
        self._challenge, self._since_s = text.encode(errors="replace"), self.now_s()
        return True

    def sign(self, command: RemotingCommand) -> None:
        """Put name and signature into *command*; requests leave in the order they are signed."""
        if not self._challenge:
            self.credentials.sign(command)
            return
        ext = command.ext
        self._sequence += 1
        ext[ACCESS_KEY] = self.credentials.access_key
        if self.credentials.security_token is not None:
            ext[SECURITY_TOKEN] = self.credentials.security_token
        ext[FORM] = FRESH_FORM
        ext[SEQUENCE] = str(self._sequence)
        ext[AGE_MS] = str(int((self.now_s() - self._since_s) * 1000))
        ext[SIGNATURE] = fresh_signature(
            command, self.credentials.secret_key, self._challenge
        ).decode()


@dataclass(slots=True)
class Freshness:
    """What a server remembers of a connection that it gave a challenge."""

    challenge: bytes = field(repr=False)
    issued_at_s: float
    _last_sequence: int = 0

    def fault_of(self, command: RemotingCommand, secret_key: str, now_s: float) -> str:
        """Return why *command* does not count as signed and new; empty when it does.

        A sequence is used up only by a request that counts.
        """
        ext = command.ext
        given, sequence, age_ms = (
            ext.get(SIGNATURE),
            _count(ext.get(SEQUENCE)),
            _count(ext.get(AGE_MS)),
        )
        if not isinstance(given, str) or sequence is None or age_ms is None:
            return "its signature is incomplete"
        claimed = given.encode(errors="replace")
        if not hmac.compare_digest(fresh_signature(command, secret_key, self.challenge), claimed):
            return "its signature is wrong"
        if sequence <= self._last_sequence:
            return "it came before on this connection"
        if abs((now_s - self.issued_at_s) * 1000 - age_ms) > SKEW_MAX_MS:
            return SIGNED_TOO_LONG_AGO
        self._last_sequence = sequence
        return ""


def is_fresh_form(command: RemotingCommand) -> bool:
    """Whether *command* is signed in the form of this module."""
    return FORM in command.ext


def fresh_signature(command: RemotingCommand, secret_key: str, challenge: bytes) -> bytes:
    """Return the base64 signature of *command* for the connection that has *challenge*."""
    fields = sorted(
        (name.encode(errors="surrogatepass"), _signed_bytes(value))
        for name, value in command.ext.items()
        if name != SIGNATURE and value is not None
    )
    head = _HEAD.pack(int(command.code), command.opaque, command.is_oneway, len(fields))
    parts = [_DOMAIN, *_with_length(challenge), head]
    for name, value in fields:
        parts += (*_with_length(name), *_with_length(value))
    body = memoryview(command.body)
    parts.append(_LENGTH.pack(body.nbytes))
    mac = hmac.new(secret_key.encode(errors="replace"), b"".join(parts), hashlib.sha256)
    mac.update(body)
    return base64.b64encode(mac.digest())


def _with_length(content: bytes) -> tuple[bytes, bytes]:
    return _LENGTH.pack(len(content)), content


def _signed_bytes(value: Any) -> bytes:
    """Return a value in a form that is the same in each header encoding and of no other value."""
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, list | tuple):
        items = [part for item in value for part in _with_length(_signed_bytes(item))]
        return b"l" + b"".join(items)
    return b"t" + text_of(value).encode(errors="surrogatepass")


def _count(value: object) -> int | None:
    # In a CBOR header too it travels as text: one form for all.
    if isinstance(value, str) and len(value) <= _COUNT_DIGITS_MAX and value.isascii():
        return int(value) if value.isdigit() else None
    return None
