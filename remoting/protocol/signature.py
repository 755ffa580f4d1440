"""Signed requests: what RocketMQ's ACL 1.0 signs, and how.

A signed request carries ``AccessKey``, perhaps ``SecurityToken``, and ``Signature``: the base64
of HMAC-SHA1, under the secret key, of the values of all ext fields but the signature, one after
the other in the order of their names, and then the body. Values are text as they travel in a
header of strings. Java orders names by UTF-16 code units.

Spec: docs/internals/protocol/semantics.md, section 9.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from remoting.protocol.command import RemotingCommand

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
    """Return the base64 signature of a request under *secret_key*.

    Args:
        left_out: Ext fields that the sender did not sign, beside the signature.
    """
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
