"""What a producer needs to recall a message: topic, broker, time and key in one word. Pure.

Format: URL-safe base64 of ``v1 <topic> <brokerName> <time, ms> <UNIQ_KEY>``.

Spec: docs/internals/protocol/remoting.md, section 7.2.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from typing import Final

from remoting.errors import BadRequestError

VERSION: Final = "v1"
MAX_HANDLE_CHARS: Final = 2048
"""Longer than any topic, name and key make it."""


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """A message that can be recalled."""

    topic: str
    broker_name: str
    due_ms: int
    uniq_key: str

    def encode(self) -> str:
        """Return the handle as clients carry it."""
        text = f"{VERSION} {self.topic} {self.broker_name} {self.due_ms} {self.uniq_key}"
        return urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def decode(cls, handle: str) -> RecallHandle:
        """Read what `encode` made; padding may be missing.

        Raises:
            BadRequestError: It is no handle.
        """
        try:
            if len(handle) > MAX_HANDLE_CHARS:
                raise ValueError("too long")
            padded = handle + "=" * (-len(handle) % 4)
            version, topic, broker, due, key = urlsafe_b64decode(padded).decode().split(" ")
            if version != VERSION:
                raise ValueError(f"version {version}")
            return cls(topic, broker, int(due), key)
        except (ValueError, binascii.Error) as error:
            raise BadRequestError(f"recall failed, the recall handle is invalid: {error}") from None
