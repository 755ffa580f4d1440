"""What handlers of requests may return, and how many requests of a kind may be open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final, Literal, TypeAlias

from dledger.commitlog.errors import ConfigError
from dledger.remoting.protocol.command import RemotingCommand


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
