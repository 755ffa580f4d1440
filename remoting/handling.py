"""Gives the requests of one connection to their handlers, and sends what these answer.

::

    admit ──► OPEN ── finish ──► answered once; a second answer finds nothing
      │         └──── end_all ─► the connection has ended, no answer is written
      └─► the sentence of a refusal
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import trio

from dledger.commitlog.errors import ConfigError, InvariantBroken, LocalProtocolError, MQError
from dledger.remoting.connection_limits import ConnectionLimits
from dledger.remoting.errors import AccessRefusedError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.codes import ResponseCode, not_supported
from dledger.remoting.protocol.command import FLAG_ONEWAY, FLAG_RESPONSE, RemotingCommand
from dledger.remoting.protocol.outcome import GO_AWAY_FIELD, Condition, answer, answer_error


class _Deferred(Enum):
    DEFERRED = "deferred"


# Returned by a handler that will answer later with `connection.reply(request, response)`.
DEFERRED: Final = _Deferred.DEFERRED

# A handler runs on the reader's task: it must not block. It returns the answer; or None when
# there is none to give (one-way); or DEFERRED; or an awaitable, which gets a task of its own and
# is cancelled when the connection ends.
Answered: TypeAlias = RemotingCommand | Literal[_Deferred.DEFERRED] | None
Handled: TypeAlias = Answered | Awaitable[Answered]


class Limiter:
    """How many requests of one kind may be open at a time, over all connections.

    A request is open from its arrival until it is answered. Over the limit it is refused at once
    with SYSTEM_BUSY: waiting in a queue of ours would only move the time-out to the client.
    """

    __slots__ = ("in_use", "max_concurrent", "name", "refused")

    def __init__(self, name: str, max_concurrent: int) -> None:
        if max_concurrent < 1:
            raise ConfigError(f"limiter {name}: at least 1 request must be allowed")
        self.name = name
        self.max_concurrent = max_concurrent
        self.in_use = 0
        self.refused = 0

    def try_acquire(self) -> bool:
        """Take a place; False, and counted as refused, when there is none."""
        if self.in_use >= self.max_concurrent:
            self.refused += 1
            return False
        self.in_use += 1
        return True

    def release(self) -> None:
        """Give a place back."""
        self.in_use -= 1


OnAnswer: TypeAlias = Callable[[int, int, float], None]
"""Gets request code, response code and seconds."""

OnResponse: TypeAlias = Callable[[RemotingCommand], None]
"""Gets the answer to one request."""


class OpenRequest(NamedTuple):
    """A request that is not answered yet; ``arrived_s`` is on trio's clock."""

    asked: RemotingCommand
    limiter: Limiter
    size_bytes: int
    arrived_s: float


class OpenRequests:
    """Requests of one connection that are open; *size_bytes*: their bodies together."""

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


_log = get_logger(__name__)

SHUTS_DOWN: Final = "shutting down"
"""Why requests are refused."""


class Peer(Protocol):
    """What the handling of requests sees of a connection."""

    @property
    def is_closed(self) -> bool:
        """Whether it has ended; no answer is read any more."""

    @property
    def is_proven(self) -> bool:
        """Whether a whole, valid request came over it."""


PeerT = TypeVar("PeerT", bound=Peer)
AskedT = TypeVar("AskedT", contravariant=True)


class Processors(Protocol[AskedT]):
    """What answers requests; `dledger.remoting.processor_table.ProcessorTable` is one."""

    def get(
        self, code: int, /
    ) -> tuple[Callable[[AskedT, RemotingCommand], Handled], Limiter] | None:
        """Return handler and limiter for *code*, None when the code is not supported."""


Carry: TypeAlias = Callable[[PeerT, RemotingCommand, RemotingCommand], bool]


@dataclass(eq=False, repr=False)
class Handling(Generic[PeerT]):
    """Gives the requests of one connection to their handlers, and answers each of them once.

    Attributes:
        nursery: Of the connection that is served; its handlers that wait run in it.
        carry: Called with a request and the answer that another member may serve it; returns
            whether it answers the request later. None: nothing does.
        last_request_s: When one with a handler came last, on trio's clock; -inf: none came, or what
            came proves nothing.
        when_answered: By identity of a request: the request, and what is called with its answer.

    *send* writes an answer, and raises LocalProtocolError where it cannot be written; *finished* is
    called with each request that is open no longer; *on_answer* with each answer.
    """

    _connection: PeerT
    processors: Processors[PeerT]
    _open: OpenRequests
    _send: Callable[[RemotingCommand], None]
    _finished: Callable[[OpenRequest], None]
    _on_answer: OnAnswer | None

    def __post_init__(self) -> None:
        self.nursery: trio.Nursery | None = None
        self.is_leaving = False
        self.carry: Carry[PeerT] | None = None
        self.last_request_s = -math.inf
        self.when_answered: dict[int, tuple[RemotingCommand, OnResponse]] = {}

    def take(self, asked: RemotingCommand) -> None:
        """Give a request that has come to its handler, or refuse it.

        Raises InvariantBroken: from the handler; everything else that it raises becomes the answer.
        """
        processor = self.processors.get(asked.code)
        if processor is None:
            self.refuse(asked, Condition.NOT_SUPPORTED, not_supported(asked.code))
            return
        self.last_request_s = trio.current_time()
        if self.is_leaving:
            self.refuse(asked, Condition.SHUTTING_DOWN, SHUTS_DOWN, **{GO_AWAY_FIELD: "true"})
            return
        handler, limiter = processor
        refusal = self._open.admit(asked, limiter, self.last_request_s)
        if refusal is not None:
            self.refuse(asked, Condition.BUSY, refusal)
            return
        handled: Handled
        try:
            handled = handler(self._connection, asked)
        except InvariantBroken:
            raise
        except Exception as error:  # noqa: BLE001  # becomes the answer
            handled = self._failed(asked, error)
        if isinstance(handled, RemotingCommand):
            self.reply(asked, handled)
        elif handled is None:
            self._finish(asked)
        elif handled is not DEFERRED:
            assert self.nursery is not None
            self.nursery.start_soon(self._finish_later, asked, handled)

    def refuse(
        self, asked: RemotingCommand, condition: Condition, remark: str, **fields: object
    ) -> None:
        """Answer a request that no handler gets."""
        if not asked.flag & FLAG_ONEWAY:
            self._answer(asked, answer(asked, condition, remark, **fields))

    def reply(self, asked: RemotingCommand, response: RemotingCommand) -> bool:
        """Answer an open request. Never blocks.

        Returns:
            False when it will not be read: the connection has ended, the request was one-way, or
            has been answered already.
        """
        if (
            response.code == ResponseCode.SERVICE_NOT_AVAILABLE
            and self.carry is not None
            and self.carry(self._connection, asked, response)
        ):
            return True
        if self.when_answered and (noted := self.when_answered.pop(id(asked), None)):
            noted[1](response)
        if self._on_answer is not None and (request := self._open.get(asked)) is not None:
            self._on_answer(asked.code, response.code, trio.current_time() - request.arrived_s)
        if not self._finish(asked) or asked.flag & FLAG_ONEWAY:
            return False
        self._answer(asked, response)
        return not self._connection.is_closed

    def _answer(self, asked: RemotingCommand, response: RemotingCommand) -> None:
        response.opaque = asked.opaque
        response.flag = response.flag & ~FLAG_ONEWAY | FLAG_RESPONSE
        response.serialize = asked.serialize
        try:
            self._send(response)
        except LocalProtocolError as error:
            # The handler has done its work: what it did is not ours to deny.
            _log.warning("answer_unsendable", code=asked.code, error=str(error))
            self._send(answer(asked, Condition.INTERNAL_ERROR, str(error)))

    def _finish(self, asked: RemotingCommand) -> bool:
        request = self._open.finish(asked)
        if request is None:
            return False
        self._finished(request)
        return True

    async def _finish_later(self, asked: RemotingCommand, handling: Awaitable[Answered]) -> None:
        handled: Answered
        try:
            handled = await handling
        except InvariantBroken:
            raise
        except Exception as error:  # noqa: BLE001  # becomes the answer
            handled = self._failed(asked, error)
        if isinstance(handled, RemotingCommand):
            self.reply(asked, handled)
        elif handled is not DEFERRED:
            self._finish(asked)

    def _failed(self, asked: RemotingCommand, error: Exception) -> RemotingCommand:
        if isinstance(error, AccessRefusedError) and not self._connection.is_proven:
            self.last_request_s = -math.inf  # a request that anybody can make proves nothing
        if isinstance(error, MQError):
            _log.debug("request_refused", code=asked.code, error=str(error))
        else:
            _log.error("handler_failed", code=asked.code, exc_info=error)
        return answer_error(asked, error)
