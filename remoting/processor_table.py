"""Which handler answers which request code."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple, TypeAlias

from dledger.commitlog.errors import ConfigError
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Handled, Limiter
from dledger.remoting.protocol.command import RemotingCommand

REFUSALS_OPEN_MAX: Final = 1024
"""Refusals open at a time; they are answered before their handler returns, so one is the most."""

Handler: TypeAlias = Callable[[Connection, RemotingCommand], Handled]


class Processor(NamedTuple):
    """A handler and the limiter its requests count against."""

    handler: Handler
    limiter: Limiter


class ProcessorTable:
    """Request code → processor. Both ends of a connection have one."""

    def __init__(self, guard: Callable[[int, Handler], Handler] | None = None) -> None:
        """Make an empty table."""
        self._processors: dict[int, Processor] = {}
        self._guard = guard

    def register(self, code: int, handler: Handler, limiter: Limiter) -> None:
        """Let *handler* answer requests with *code*.

        Raises ConfigError: the code has a handler already.
        """
        if self._guard is not None:
            handler = self._guard(int(code), handler)
        self.register_free(code, handler, limiter)

    def register_free(self, code: int, handler: Handler, limiter: Limiter) -> None:
        """Let *handler* answer requests with *code* without the guard: anyone may ask.

        Raises ConfigError: the code has a handler already.
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
