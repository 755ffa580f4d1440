"""Requests of ours that wait for their answer: the response table of one connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.remoting.errors import ConnectionLostError, RequestTimedOutError
from dledger.remoting.protocol.command import RemotingCommand

OPAQUE_MAX: Final = 0x7FFFFFFF
"""After the largest request id the smallest follows: it has 32 bits and a sign."""


class Call:
    """A request of ours on its way.

    Attributes:
        starts_at: Position of its first byte in everything its connection was given to send.
        lost: Why the connection ended before; empty while it has not.
        was_handed: With *lost*: whether a byte of it may have left.
    """

    __slots__ = ("code", "ended", "lost", "opaque", "response", "starts_at", "was_handed")

    def __init__(
        self, opaque: int, code: int, starts_at: int, ended: Callable[[Call], None]
    ) -> None:
        """Call *ended* once, with this call, when `response` or `lost` is set.

        It is dropped then: no circle of a call and its request waits for the garbage collector.
        """
        self.opaque = opaque
        self.code = code
        self.starts_at = starts_at
        self.response: RemotingCommand | None = None
        self.lost = ""
        self.was_handed = False
        self.ended = ended

    def end(self, response: RemotingCommand | None, lost: str, *, was_handed: bool) -> None:
        """Take the answer, or why the connection ended."""
        self.response, self.lost, self.was_handed = response, lost, was_handed
        ended, self.ended = self.ended, _pass_over
        ended(self)

    def result(self, peer: str, timeout_s: float) -> RemotingCommand:
        """Return the answer.

        Raises:
            ConnectionLostError: The connection ended; `sent`: whether the request had left.
            RequestTimedOutError: There is no answer yet.
        """
        if self.response is not None:
            return self.response
        if self.lost:
            raise ConnectionLostError(
                f"connection to {peer} ended ({self.lost}) before the answer to request "
                f"{self.code}",
                sent=self.was_handed,
            )
        raise RequestTimedOutError(
            f"no answer from {peer} to request {self.code} within {timeout_s} s"
        )


class CallTable:
    """Calls by the opaque of their request."""

    __slots__ = ("_calls", "_next_opaque")

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._next_opaque = 0

    def __len__(self) -> int:
        return len(self._calls)

    def new_opaque(self) -> int:
        """Return a request id that no waiting call has."""
        opaque = self._next_opaque
        while opaque in self._calls:
            opaque = _after(opaque)
        self._next_opaque = _after(opaque)
        return opaque

    def add(self, call: Call) -> None:
        """Let *call* wait."""
        self._calls[call.opaque] = call

    def forget(self, call: Call) -> bool:
        """Let *call* wait no longer; return whether it did."""
        call.ended = _pass_over
        if self._calls.get(call.opaque) is not call:
            return False
        del self._calls[call.opaque]
        return True

    def take(self, response: RemotingCommand) -> None:
        """Give *response* to the call that waits for it."""
        call = self._calls.pop(response.opaque, None)
        if call is not None:
            call.end(response, "", was_handed=True)

    def waiting(self) -> frozenset[int]:
        """Return the opaques of those that wait."""
        return frozenset(self._calls)

    def end_all(self, reason: str, handed_total: int) -> None:
        """End every call: the connection has ended."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(None, reason, was_handed=handed_total > call.starts_at)


def _pass_over(_call: Call) -> None:
    pass


def _after(opaque: int) -> int:
    return opaque + 1 if opaque < OPAQUE_MAX else -OPAQUE_MAX - 1
