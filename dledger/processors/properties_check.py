"""Whether the properties of a message leave the room that the broker needs later."""

from __future__ import annotations

from commitlog.reserved_properties import MAX_CLIENT_PROPERTIES_BYTES, leaves_room
from dledger.processors.refusal import RefusedError
from remoting.protocol.outcome import Condition


def check_room(properties: bytes) -> None:
    """Let a message's encoded properties pass, which are free of what only brokers write.

    Raises:
        RefusedError: They are too long; nothing was stored.
    """
    if len(properties) > MAX_CLIENT_PROPERTIES_BYTES and not leaves_room(properties):
        raise properties_too_long(len(properties))


def properties_too_long(size_bytes: int) -> RefusedError:
    """Return the refusal of properties of that size."""
    return RefusedError(
        Condition.MESSAGE_ILLEGAL,
        f"the properties have {size_bytes} bytes, at most {MAX_CLIENT_PROPERTIES_BYTES}: the rest "
        "of a record's room for them is the broker's; nothing was stored",
    )
