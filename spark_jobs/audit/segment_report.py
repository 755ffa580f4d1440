"""Findings of an audit, and the report of one segment.

Plain data, so that they can come from another process.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

Verdict = Literal["equal", "parted", "unknown"]

FINDINGS_MAX: Final = 1_000
"""Findings kept of one piece of work: more of them say nothing new, and the count goes on."""

ENTRY: Final = "entry damaged"
FORK: Final = "other entry"
BLANK: Final = "blank damaged"
LOST: Final = "entry lost"
MARK: Final = "commit mark"
ANCHOR: Final = "anchor"
ENTRY_INDEX: Final = "entry index"
QUEUE_UNIT: Final = "queue unit"
KEY_INDEX: Final = "key index"
OFFSETS: Final = "queue offsets"
DERIVED: Final = frozenset({ENTRY_INDEX, QUEUE_UNIT, KEY_INDEX})
"""Made from the log: they can be made again, the log stands."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One place at which a replica is wrong, or at which it is not known which one is.

    Attributes:
        replica: The wrong one; empty: it is the same in all, or not known.
        file: Below the replica's folder; empty where it is no file.
        byte: The first wrong byte in that file; -1: no single one.
        index: Raft index of the entry; -1: none.
        position: Byte in the log; -1: none.
        count: Bytes (of entries), units or keys that are wrong.
    """

    replica: str
    kind: str
    file: str = ""
    byte: int = -1
    index: int = -1
    position: int = -1
    count: int = 1
    detail: str = ""


class Note(msgspec.Struct, frozen=True, order=True):
    """What is not wrong and worth knowing."""

    replica: str
    text: str


class Audited(msgspec.Struct, kw_only=True):
    """What was looked at in one replica."""

    replica: str
    running: bool
    clean_stop: bool
    first_index: int
    last_index: int
    commit_index: int
    end_position: int


class Report(msgspec.Struct, kw_only=True):
    """The answer of an audit."""

    verdict: Verdict
    reason: str = ""
    commit_index: int = 0
    commit_position: int = 0
    entries: int = 0
    records: int = 0
    units: int = 0
    keys: int = 0
    finding_count: int = 0
    findings: list[Finding] = []
    notes: list[Note] = []
    replicas: list[Audited] = []

    @property
    def digest(self) -> str:
        """The same for the same folders, wherever and in whatever order the work was done."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


SuspectKind = Literal["zeros", "damaged", "fork", "blank"]


class Suspect(msgspec.Struct, kw_only=True):
    """Bytes of one replica that are not those which stand there.

    Attributes:
        index: Of the entry that should be there; of the entry before, for a blank; -1: unknown.
        byte: The first wrong byte, counted in the log.
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
    """Messages of one queue that follow one another, as the log has them."""

    topic: str
    queue_id: int
    first: int
    end: int
    position: int


class QueueMismatch(msgspec.Struct):
    """Units of one replica that are not those of the log; a topic deleted later explains them."""

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
