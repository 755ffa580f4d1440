"""Which handler answers which request code, and how many requests of a kind may be open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from commitlog.errors import ConfigError
from remoting.protocol.command import RemotingCommand

if TYPE_CHECKING:
    from remoting.connection import Connection


REFUSALS_OPEN_MAX: Final = 1024
"""Refusals open at a time; they are answered before their handler returns, so one is the most."""


class _Deferred(Enum):
    DEFERRED = "deferred"


# Returned by a handler that will answer later with `connection.reply(request, response)`.
DEFERRED: Final = _Deferred.DEFERRED

# A handler runs on the reader's task: it must not block. It returns the answer; or None when
# there is none to give (one-way); or DEFERRED; or an awaitable, which gets a task of its own and
# is cancelled when the connection ends.
Answered: TypeAlias = RemotingCommand | Literal[_Deferred.DEFERRED] | None
Handled: TypeAlias = Answered | Awaitable[Answered]
Handler: TypeAlias = Callable[["Connection", RemotingCommand], Handled]


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


class Processor(NamedTuple):
    """A handler and the limiter its requests count against."""

    handler: Handler
    limiter: Limiter


class ProcessorTable:
    """Request code → processor. Both ends of a connection have one."""

    def __init__(self, guard: Callable[[int, Handler], Handler] | None = None) -> None:
        """Make an empty table.

        Args:
            guard: Gets code and handler of everything that is registered and returns the handler
                that is called instead; None: handlers are called as they are.
        """
        self._processors: dict[int, Processor] = {}
        self._guard = guard

    def register(self, code: int, handler: Handler, limiter: Limiter) -> None:
        """Let *handler* answer requests with *code*.

        Raises:
            ConfigError: The code has a handler already.
        """
        if self._guard is not None:
            handler = self._guard(int(code), handler)
        self.register_free(code, handler, limiter)

    def register_free(self, code: int, handler: Handler, limiter: Limiter) -> None:
        """Let *handler* answer requests with *code* without the guard: anyone may ask.

        Raises:
            ConfigError: The code has a handler already.
        """
        if code in self._processors:
            raise ConfigError(f"request code {code} has a handler already")
        self._processors[int(code)] = Processor(handler, limiter)

    def get(self, code: int) -> Processor | None:
        """Return the processor for *code*, None when the code is not supported."""
        return self._processors.get(code)

    def without(self, codes: Collection[int]) -> ProcessorTable:
        """Return a table of the same processors but those of *codes*; limits are shared."""
        table = ProcessorTable()
        table._processors = {
            code: processor for code, processor in self._processors.items() if code not in codes
        }
        return table

    def only(self, codes: Collection[int], otherwise: Handler) -> ProcessorTable:
        """Return a table of the same processors for *codes*; others go to *otherwise*."""
        table = ProcessorTable()
        limiter = Limiter("refused", REFUSALS_OPEN_MAX)
        table._processors = {
            code: processor if code in codes else Processor(otherwise, limiter)
            for code, processor in self._processors.items()
        }
        return table

    def codes(self) -> frozenset[int]:
        """Return the codes that have a handler."""
        return frozenset(self._processors)
