"""A connection to a broker, with what is known of the broker behind it."""

from __future__ import annotations

from dataclasses import dataclass

from remoting.connection import Connection
from remoting.protocol.command import SerializeType


@dataclass(slots=True)
class Link:
    """A broker connection and what the broker behind it understands.

    Attributes:
        address: ``host:port``.
        connection: Live when it was handed out.
        cbor: It reads CBOR headers.
        records: It takes SEND_RECORDS.
        bulk_pull: It may take BULK_PULL; cleared when it says no.
        idempotent: It tells a repeated send from a new one.
        identity: Of the broker's group, as it says itself; empty: it says nothing.
        heard: The newest heartbeat it has answered.
        told: The producer groups of this client that were in it.
    """

    address: str
    connection: Connection
    cbor: bool
    records: bool
    bulk_pull: bool
    idempotent: bool = False
    identity: str = ""
    heard: bytes = b""
    told: frozenset[str] = frozenset()

    @property
    def serialize(self) -> SerializeType:
        """Header encoding for requests over it."""
        return SerializeType.CBOR if self.cbor else SerializeType.JSON


def truth(value: object) -> bool:
    """Return whether a header field says yes, in either encoding."""
    return value is True or (isinstance(value, str) and value.lower() == "true")
