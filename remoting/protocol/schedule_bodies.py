"""Bodies of requests about repeated schedules: 51120 to 51123.

JSON; the body of a message is base64 in it. Times are milliseconds since 1970.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from typing import Final, Self

import msgspec
from typing_extensions import Buffer

from dledger.remoting.errors import BadRequestError

DRY_RUN_FIELD: Final = "dryRun"
"""Of PUT_SCHEDULE: `true`, everything is checked and nothing stored."""
PAUSED_FIELD: Final = "paused"
"""Of PAUSE_SCHEDULE: `true` or `false`."""
NAME_FIELD: Final = "name"

COMING_SHOWN: Final = 5
"""Instants that the answer to PUT_SCHEDULE has."""


class _Json(msgspec.Struct, rename="camel"):
    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """Read what `encode` made.

        Raises:
            BadRequestError: It is no such thing.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequestError(f"the body cannot be read: {error}") from error


class ScheduleBody(_Json):
    """PUT_SCHEDULE; its name and topic are fields of the request.

    Attributes:
        expression: Five fields of cron, or ``@every 30s``.
        queue_id: -1: by message group where one is given, else one after the other.
        begin_ms, end_ms: 0: none.
    """

    expression: str
    body: bytes
    properties: dict[str, str] = {}
    queue_id: int = -1
    time_zone: str = "UTC"
    begin_ms: int = 0
    end_ms: int = 0
    paused: bool = False


class ComingInstants(_Json):
    """Answer to PUT_SCHEDULE: when it is due next."""

    coming_ms: list[int] = []


class ScheduleInfo(_Json):
    """A schedule, and how far it is.

    Attributes:
        body: Empty in a list; there is `body_bytes`.
        body_bytes: Size of the body of each message.
        last_ms: Newest instant that a message was sent for; 0: none yet.
        next_ms: First instant to come; 0: there is none, or it is paused.
        fired: Messages sent.
        missed: Instants that passed without a message of their own.
        held: Why nothing is sent although it may be due; empty: it is not held.
    """

    name: str
    topic: str
    expression: str
    time_zone: str
    queue_id: int = -1
    properties: dict[str, str] = {}
    body: bytes = b""
    body_bytes: int = 0
    begin_ms: int = 0
    end_ms: int = 0
    paused: bool = False
    last_ms: int = 0
    next_ms: int = 0
    fired: int = 0
    missed: int = 0
    held: str = ""


class ScheduleList(_Json):
    """Answer to LIST_SCHEDULES."""

    schedules: list[ScheduleInfo] = []
