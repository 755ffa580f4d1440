"""What the messages of a run hold, so that whatever reads one can compare all of it.

A value stands in the first bytes of a body. Beside it a message has the rest of its body, a tag,
keys, properties and the time at which it was born: readers compare these with what was sent. What
brokers and clients add to properties is left out, and so are all properties of a message with some
that are reserved.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from client.core.message import Message
from jepsen_like.checkers.contents import BODY, BORN, PROPERTIES

CONTENT_PROPERTY: Final = "own"
"""Property of messages that have none of their own: a lost one is seen."""
CONTENT_BODY_BYTES_MIN: Final = 64
"""Shorter bodies have no such property: they stay as short as they are to be."""
BORN_WITHIN_MS: Final = 60_000
"""A producer sends a message this soon after it has made it."""


class Seen(Protocol):
    """A message as a client read it: a `MessageExt`."""

    @property
    def body(self) -> bytes:
        """The body."""

    @property
    def tags(self) -> str:
        """Its tag."""

    @property
    def keys(self) -> str:
        """Its keys."""

    @property
    def properties(self) -> dict[str, str]:
        """All properties."""

    @property
    def born_timestamp_ms(self) -> int:
        """When it was sent, by its producer."""


class _Sent(NamedTuple):
    body: bytes
    tags: str
    keys: str
    properties: Mapping[str, str]
    born_from_ms: int
    born_to_ms: int


class Contents:
    """What was sent under each value, by digest of the body."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}

    def note(self, value: int, message: Message, now_ms: int, *, is_hostile: bool) -> None:
        """Take note of a message that is about to be sent.

        Args:
            now_ms: The date of the producer's machine.
            is_hostile: It has properties that brokers may change.
        """
        keys = message.keys if isinstance(message.keys, str) else " ".join(message.keys)
        properties = {} if is_hostile else dict(message.properties or {})
        self._sent[value] = _Sent(
            _digest(message.body), message.tags, keys, properties, now_ms, now_ms + BORN_WITHIN_MS
        )

    def difference(self, value: int, seen: Seen) -> str:
        """Return what *seen* has otherwise than what was sent, by its anomaly; empty: nothing.

        A value that was never sent has no content to compare. The first time of birth that is seen
        of a value is the one that later reads are compared with.
        """
        sent = self._sent.get(value)
        if sent is None:
            return ""
        if _digest(seen.body) != sent.body:
            return BODY
        if (seen.tags, seen.keys) != (sent.tags, sent.keys):
            return PROPERTIES
        there = seen.properties
        if any(there.get(name) != text for name, text in sent.properties.items()):
            return PROPERTIES
        born_ms = seen.born_timestamp_ms
        if not sent.born_from_ms <= born_ms <= sent.born_to_ms:
            return BORN
        self._sent[value] = sent._replace(born_from_ms=born_ms, born_to_ms=born_ms)
        return ""


def _digest(body: Any) -> bytes:
    return blake2b(body, digest_size=8).digest()
