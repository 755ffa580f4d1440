"""Report of one segment: plain data, so that it can come from another process."""

from __future__ import annotations

from typing import Literal

import msgspec

from spark_jobs.audit.finding import Finding

SuspectKind = Literal["zeros", "damaged", "fork", "blank"]


class Suspect(msgspec.Struct, kw_only=True):
    """Bytes of one replica that are not those which stand there.

    Whether that is damage, a log that ends here or an entry that was never committed depends on
    what the rest of the log has.

    Attributes:
        index: Of the entry that should be there; of the entry before, for a blank; -1: unknown.
        byte: The first wrong byte, counted in the log.
        count: Wrong bytes.
        certain: Whether another replica holds the entry whole.
        tied: Whether nothing shows which of two whole entries is the right one.
    """

    replica: str
    kind: SuspectKind
    position: int
    end: int
    index: int
    byte: int
    count: int
    entries: int = 1
    certain: bool = True
    tied: bool = False


class Edge(msgspec.Struct, frozen=True):
    """The first or last whole entry of a segment, to be joined with its neighbour."""

    index: int
    term: int
    chain: int
    store_time_ms: int
    position: int
    end_position: int
    holder: str


class QueueRun(msgspec.Struct):
    """Messages of one queue that follow one another, as the log has them.

    Attributes:
        position: Of the first of them, in the log.
    """

    topic: str
    queue_id: int
    first: int
    end: int
    position: int


class QueueMismatch(msgspec.Struct):
    """Units of one replica that are not those of the log; a topic deleted later explains them.

    Attributes:
        position: Of the last of them, in the log.
    """

    replica: str
    topic: str
    queue_id: int
    first: int
    count: int
    position: int
    file: str
    byte: int
    missing: bool
    detail: str


class SegmentReport(msgspec.Struct, kw_only=True):
    """Report of one segment.

    Attributes:
        equal_ends: Per replica: up to where, and up to which entry, it was last equal.
        deleted: Topics, and where in the log they were deleted.
        alone: Entries that one replica alone holds.
    """

    base: int
    entries: int = 0
    records: int = 0
    units: int = 0
    keys: int = 0
    first: Edge | None = None
    last: Edge | None = None
    suspects: list[Suspect] = []
    suspects_left: int = 0
    findings: list[Finding] = []
    equal_ends: dict[str, tuple[int, int]] = {}
    runs: list[QueueRun] = []
    mismatches: list[QueueMismatch] = []
    mismatches_left: int = 0
    deleted: list[tuple[str, int]] = []
    alone: int = 0
