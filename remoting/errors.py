"""Errors of the wire. They extend the tree of :mod:`dledger.commitlog.errors`.

::

    MQError
    ├── ProtocolError
    │   ├── LocalProtocolError
    │   └── RemoteProtocolError
    │       └── BadRequestError     a request lacks a field or has a bad one; the connection stays
    ├── RemotingError               a call over the network did not bring an answer
    │   ├── ConnectFailedError      no connection was made; nothing was sent
    │   ├── ConnectionLostError     the connection ended; `sent`: whether the request had left
    │   ├── RequestTimedOutError    the deadline passed with the request handed to the socket
    │   └── TooManyInFlightError    a named limit of this side was reached; nothing was sent
    ├── BusyError                   a named limit of the server was reached; nothing was stored
    └── AccessRefusedError          the account has no right; nothing was done
"""

from __future__ import annotations

from dledger.commitlog.errors import (
    LocalProtocolError,
    MQError,
    Outcome,
    ProtocolError,
    RemoteProtocolError,
)

__all__ = [
    "AccessRefusedError",
    "BadRequestError",
    "BusyError",
    "ConnectFailedError",
    "ConnectionLostError",
    "LocalProtocolError",
    "ProtocolError",
    "RemoteProtocolError",
    "RemotingError",
    "RequestTimedOutError",
    "TooManyInFlightError",
]


class BadRequestError(RemoteProtocolError):
    """A frame arrived whole but its fields or body do not fit its code. Nothing was done.

    Unlike other errors of its branch it costs the peer only this request, not its connection.
    """

    outcome = "not_stored"  # type: ignore[assignment]  # the branch has unknown


class RemotingError(MQError):
    """A call over the network brought no answer."""

    retriable = True
    refresh_route = True


class ConnectFailedError(RemotingError):
    """No connection could be made in time; nothing was sent."""


class ConnectionLostError(RemotingError):
    """The connection ended before the answer came.

    Attributes:
        sent: Whether the request had been handed to the connection. If so, it is not known
            what became of it.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent
        self._outcome: Outcome = "unknown" if sent else "not_stored"

    @property
    def outcome(self) -> Outcome:  # type: ignore[override]  # depends on how far the request got
        """What certainly happened to the message: unknown once the request was sent."""
        return self._outcome


class RequestTimedOutError(RemotingError):
    """The deadline passed while the request was with the peer; a late answer is ignored."""

    outcome = "unknown"


class TooManyInFlightError(RemotingError):
    """A named limit of this side was reached; nothing was sent. Retry when answers have come."""

    refresh_route = False


class BusyError(MQError):
    """A named limit of the server was reached; nothing was stored. Retry later."""

    retriable = True


class AccessRefusedError(MQError):
    """The requester's account is not proved, or has no right. Nothing was done or stored.

    The text is what RocketMQ answers: its clients and people know it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"org.apache.rocketmq.acl.common.AclException: {reason}")
