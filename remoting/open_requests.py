"""Requests of one peer from their arrival to their answer, and the limits of them.

::

    admit ──► OPEN ── finish ──► answered once; a second answer finds nothing
      │         └──── end_all ─► the connection has ended, no answer is written
      └─► the sentence of a refusal
"""

from __future__ import annotations

from typing import NamedTuple

from dledger.remoting.connection_limits import ConnectionLimits
from dledger.remoting.processor import Limiter
from dledger.remoting.protocol.command import RemotingCommand


class OpenRequest(NamedTuple):
    """A request that is not answered yet; ``arrived_s`` is on trio's clock."""

    asked: RemotingCommand
    limiter: Limiter
    size_bytes: int
    arrived_s: float


class OpenRequests:
    """Requests of one connection that are open.

    Attributes:
        size_bytes: Their bodies together.
    """

    __slots__ = ("_by_identity", "_limits", "size_bytes")

    def __init__(self, limits: ConnectionLimits) -> None:
        """Hold none."""
        self._limits = limits
        # A peer may use an opaque again: requests differ by identity.
        self._by_identity: dict[int, OpenRequest] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    def admit(self, asked: RemotingCommand, limiter: Limiter, now_s: float) -> str | None:
        """Hold a request, and a place of *limiter*, until it ends.

        Returns:
            None; or, where nothing is held, why it is refused. A request that is larger than the
            limit is admitted alone.
        """
        body = asked.body
        size = len(body) if type(body) is bytes else memoryview(body).nbytes
        limits, requests = self._limits, self._by_identity
        if requests and (
            len(requests) >= limits.max_in_flight
            or self.size_bytes + size > limits.max_in_flight_bytes
        ):
            return "[OVERLOAD]too many requests of this connection"
        if not limiter.try_acquire():
            return f"[OVERLOAD]{limiter.max_concurrent} requests of kind {limiter.name} are open"
        requests[id(asked)] = OpenRequest(asked, limiter, size, now_s)
        self.size_bytes += size
        return None

    def get(self, asked: RemotingCommand) -> OpenRequest | None:
        """Return what is held of a request; None where it is not open."""
        return self._by_identity.get(id(asked))

    def finish(self, asked: RemotingCommand) -> OpenRequest | None:
        """Give back what a request held; None where it is not open."""
        request = self._by_identity.pop(id(asked), None)
        if request is not None:
            request.limiter.release()
            self.size_bytes -= request.size_bytes
        return request

    def end_all(self) -> None:
        """Give back what all of them held."""
        for request in self._by_identity.values():
            request.limiter.release()
        self._by_identity.clear()
        self.size_bytes = 0
