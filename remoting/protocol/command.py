"""One request or response, apart from how its header is encoded.

Spec: docs/internals/protocol/remoting.md, sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from typing_extensions import Buffer

FLAG_RESPONSE: Final = 1
FLAG_ONEWAY: Final = 2

# What our programs say of themselves. The version decides what clients believe this broker can do
# (4.9.7: standard JSON routes, SQL filter registration, no 5.x-only requests).
OUR_LANGUAGE: Final = "PYTHON"
OUR_VERSION: Final = 407
# From here on a client reads route bodies in standard JSON.
STANDARD_JSON_VERSION: Final = 401

LANGUAGES: Final = (
    "JAVA",
    "CPP",
    "DOTNET",
    "PYTHON",
    "DELPHI",
    "ERLANG",
    "RUBY",
    "OTHER",
    "HTTP",
    "GO",
    "PHP",
    "OMS",
    "RUST",
    "NODE_JS",
)
LANGUAGE_CODES: Final[Mapping[str, int]] = {name: code for code, name in enumerate(LANGUAGES)}
OTHER_LANGUAGE: Final = LANGUAGE_CODES["OTHER"]

# Strings everywhere, except that a CBOR header may carry integers, bytes and lists.
ExtFields = dict[str, Any]

_EMPTY: Final = b""


class SerializeType(IntEnum):
    """How the header of a frame is encoded; the high byte of the frame's mark."""

    JSON = 0
    ROCKETMQ = 1
    CBOR = 2


class RemotingCommand:
    """A request or a response.

    Attributes:
        code: Request code or response code.
        opaque: Request id, signed 32 bit; a response carries its request's.
        flag: Bit 0 response, bit 1 one-way.
        ext: The "custom header". Owned by the command; empty when the frame had none.
        body: Bytes after the header; empty when there are none. May be a view of a receive buffer
            that no other code writes to.
        version: Ordinal of the sender's version.
        serialize: How the header came, or is to be sent. A response uses its request's.
    """

    __slots__ = (
        "body",
        "code",
        "ext",
        "flag",
        "language",
        "opaque",
        "remark",
        "serialize",
        "version",
    )

    def __init__(
        self,
        code: int,
        opaque: int = 0,
        flag: int = 0,
        remark: str | None = None,
        ext: ExtFields | None = None,
        body: Buffer = _EMPTY,
        language: str = OUR_LANGUAGE,
        version: int = OUR_VERSION,
        serialize: SerializeType = SerializeType.JSON,
    ) -> None:
        self.code = code
        self.opaque = opaque
        self.flag = flag
        self.remark = remark
        self.ext: ExtFields = {} if ext is None else ext
        self.body = body
        self.language = language
        self.version = version
        self.serialize = serialize

    @property
    def is_response(self) -> bool:
        """Whether this answers a request."""
        return self.flag & FLAG_RESPONSE != 0

    @property
    def is_oneway(self) -> bool:
        """Whether no answer is expected."""
        return self.flag & FLAG_ONEWAY != 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemotingCommand):
            return NotImplemented
        return all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__ if name != "body"
        ) and bytes(self.body) == bytes(other.body)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        kind = "response" if self.is_response else "oneway" if self.is_oneway else "request"
        return (
            f"<{kind} code={self.code} opaque={self.opaque} remark={self.remark!r} "
            f"ext={_shown(self.ext)!r} body={memoryview(self.body).nbytes} bytes>"
        )


_SECRETS: Final = frozenset(("Signature", "SecurityToken"))


def _shown(ext: ExtFields) -> ExtFields:
    """Return *ext* as logs and errors may show it."""
    return {name: "..." if name in _SECRETS else value for name, value in ext.items()}


def request(
    code: int,
    ext: ExtFields | None = None,
    body: Buffer = _EMPTY,
    *,
    serialize: SerializeType = SerializeType.JSON,
    oneway: bool = False,
) -> RemotingCommand:
    """Return a request of ours. The connection gives it its opaque when it is sent.

    Args:
        ext: Custom header; the command owns it from now on.
        body: Not copied; must not change until the request is answered.
    """
    return RemotingCommand(
        code, 0, FLAG_ONEWAY if oneway else 0, None, ext, body, serialize=serialize
    )


def response_to(
    asked: RemotingCommand,
    code: int = 0,
    remark: str | None = None,
    ext: ExtFields | None = None,
    body: Buffer = _EMPTY,
) -> RemotingCommand:
    """Return an answer of ours to *asked*: its opaque, its header encoding."""
    return RemotingCommand(
        code, asked.opaque, FLAG_RESPONSE, remark, ext, body, serialize=asked.serialize
    )
