"""Requests of one peer from their arrival to their answer, and the limits of them.

::

    admit ──► OPEN ── finish ──► answered once; a second answer finds nothing
      │         └──── end_all ─► the connection has ended, no answer is written
      └─► the sentence of a refusal
"""

from __future__ import annotations

import math
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
        held: Of requests whose answer is not to leave at once, by identity, when it may. None: it
            was given, and waits.
    """

    __slots__ = ("_by_identity", "_limits", "held", "size_bytes")

    def __init__(self, limits: ConnectionLimits) -> None:
        """Hold none."""
        self._limits = limits
        # A peer may use an opaque again: requests differ by identity.
        self._by_identity: dict[int, OpenRequest] = {}
        self.size_bytes = 0
        self.held: dict[int, float | None] = {}

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

    def hold(self, asked: RemotingCommand, at_s: float) -> None:
        """Let the answer to an open request leave no earlier than *at_s*."""
        if id(asked) in self._by_identity:
            self.held[id(asked)] = at_s

    def answer_at_s(self, asked: RemotingCommand) -> float | None:
        """Return when the answer that is given now may leave; None where one was given before."""
        at_s = self.held.get(id(asked), -math.inf)
        if id(asked) in self.held:
            self.held[id(asked)] = None
        return at_s

    def finish(self, asked: RemotingCommand) -> OpenRequest | None:
        """Give back what a request held; None where it is not open."""
        request = self._by_identity.pop(id(asked), None)
        if request is not None:
            request.limiter.release()
            self.size_bytes -= request.size_bytes
            if self.held:
                self.held.pop(id(asked), None)
        return request

    def end_all(self) -> None:
        """Give back what all of them held."""
        for request in self._by_identity.values():
            request.limiter.release()
        self._by_identity.clear()
        self.held.clear()
        self.size_bytes = 0
