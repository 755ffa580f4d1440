"""What checks ask of an engine: judged queues, and the few rows that a question wants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from dledger.jepsen_like.checkers.kernel.home import Home
from dledger.jepsen_like.checkers.kernel.judge import Judged
from dledger.jepsen_like.history.operation import Operation

Queue = tuple[str, int]


class Want(msgspec.Struct, frozen=True):
    """Rows of a table: any that one of these is true of."""

    among: tuple[tuple[str, tuple[int, ...] | tuple[str, ...]], ...] = ()
    other_than: tuple[tuple[str, int | str], ...] = ()
    queue: Queue | None = None


class Replicas(msgspec.Struct, frozen=True):
    """Which replicas were read, and from where on each has each queue.

    Attributes:
        begins: By queue: number of the replica → first offset, in the order of the reads.
        chosen: The replica whose messages count in the multiset algebra; -1: none was read.
    """

    names: tuple[str, ...] = ()
    begins: dict[Queue, tuple[tuple[int, int], ...]] = {}
    chosen: int = -1


class QueueReport(msgspec.Struct):
    """One queue, judged."""

    topic: str
    queue: int
    judged: Judged
    home: Home

    @property
    def key(self) -> Queue:
        """Topic and queue id."""
        return self.topic, self.queue


class Source(Protocol):
    """An engine over the tables of one run."""

    def prepare(
        self, ops: tuple[Want, ...], obs: tuple[Want, ...] = (), replicas: Replicas | None = None
    ) -> None:
        """Say which rows are asked for next: they may come from one scan."""
        ...

    def nodes(self) -> Any:
        """Return the table `nodes`, whole."""
        ...

    def events(self) -> Any:
        """Return the table `events`, whole."""
        ...

    def ops(self, want: Want, rows_max: int) -> Any:
        """Return rows of `ops` as an Arrow table.

        Raises TooManyRowsError: there are more than *rows_max*.
        """
        ...

    def obs(self, want: Want, rows_max: int) -> Any:
        """Return rows of `obs` as an Arrow table.

        Raises TooManyRowsError: there are more than *rows_max*.
        """
        ...

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        """Judge every queue that clients used."""
        ...


class TooManyRowsError(Exception):
    """A check that cannot be split wants more rows than fit; its verdict is unknown."""

    def __init__(self, rows_max: int) -> None:
        super().__init__(f"it needs more than {rows_max:,} rows at once, and they cannot be split")
