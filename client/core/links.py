"""Connections to brokers, what each broker understands, and the group it belongs to.

A NameServer of ours states with a route which group each broker name belongs to; a broker of ours
states its own. Where both do and differ, nothing is sent: an acknowledgement of another group is
worth nothing. NameServers and brokers of RocketMQ state no group and are trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from remoting.connection import Connection
from remoting.protocol.command import SerializeType

_log = structlog.get_logger()


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


KEPT_S: Final = 150.0
"""An identity holds for so long after the NameServers have stopped to state it: after they were
started again, a stranger may be registered under the name before the group is."""

NAMES_MAX: Final = 10_000
"""Broker names with an identity; a NameServer knows no more brokers."""


@dataclass(slots=True)
class _Known:
    identity: str
    without: frozenset[str]
    """Addresses of members that are of an older release, and say nothing of their group."""
    unsaid_since_s: float | None = None


class GroupIdentities:
    """Broker name → identity of its group, as the NameServers state it."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def take(self, stated: Mapping[str, list[str]], names: Iterable[str], now_s: float) -> None:
        """Take what came with a route.

        Args:
            stated: Broker name to its identity, followed by the addresses of members that name
                none.
            names: All broker names of the route.
        """
        for name in names:
            words = stated.get(name)
            known = self._known.get(name)
            if words:
                identity, *without = words
                if known is not None and known.identity != identity:
                    _log.warning(
                        "group_replaced", broker=name, was=known.identity, identity=identity
                    )
                if known is not None or len(self._known) < NAMES_MAX:
                    self._known[name] = _Known(identity, frozenset(without))
            elif known is None:
                continue
            elif known.unsaid_since_s is None:
                known.unsaid_since_s = now_s
            elif now_s - known.unsaid_since_s > KEPT_S:
                del self._known[name]

    def refusal(self, broker_name: str, address: str, identity: str) -> str:
        """Return why nothing may be sent to *address* for that broker name; empty: it may.

        Args:
            identity: What the broker there says; empty: nothing.
        """
        known = self._known.get(broker_name)
        if known is None or identity == known.identity:
            return ""
        if not identity and address in known.without:
            return ""
        said = f"is of the group {identity}" if identity else "names no group"
        return f"it {said}, and {broker_name} is the group {known.identity}; nothing was sent"


def stated_identities(text: object) -> dict[str, list[str]]:
    """Return what a NameServer's field says; nothing when it is none, or cannot be read."""
    if not isinstance(text, str):
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, list[str]])
    except msgspec.DecodeError:
        return {}
