"""Header and body of requests about quotas: CHANGE_QUOTA (51114) and LIST_QUOTAS (51115).

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from dledger.remoting.protocol.bodies import Body
from dledger.remoting.protocol.headers import I64, Header

PUT: Final = "put"
DELETE: Final = "delete"


@dataclass(slots=True)
class QuotaHeader(Header):
    """CHANGE_QUOTA (51114).

    Attributes:
        op: ``put`` or ``delete``.
        kind: ``account`` or ``client``.
        name: None: the default of that kind.
    """

    op: str
    kind: str
    name: str | None = None
    sent_messages_per_s: I64 | None = None
    sent_bytes_per_s: I64 | None = None
    received_messages_per_s: I64 | None = None
    received_bytes_per_s: I64 | None = None
    connections: I64 | None = None


class QuotaInfo(Body):
    """A quota, and what one broker did because of it.

    Attributes:
        kind: ``account`` or ``client``.
        name: Empty: the default of that kind.
        throttled_ms: For so long requests and answers were held, all together, since the start of
            that broker. These three are 0 for a default, which is not counted as one.
        refused: Requests and connections refused.
        open_connections: Connections that are open; counted where there is a limit of them.
    """

    kind: str = ""
    name: str = ""
    sent_messages_per_s: int | None = None
    sent_bytes_per_s: int | None = None
    received_messages_per_s: int | None = None
    received_bytes_per_s: int | None = None
    connections: int | None = None
    throttled_ms: int = 0
    refused: int = 0
    open_connections: int = 0


class QuotaList(Body):
    """Answer of LIST_QUOTAS (51115)."""

    quotas: list[QuotaInfo] = msgspec.field(default_factory=list)
