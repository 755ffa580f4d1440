"""What a broker's parts know of it: its number in the group, sizes and places of its files, limits.

The leader of a group is always registered as number 0.

Spec: docs/internals/protocol/semantics.md, section 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from dledger.commitlog.consume_queue_store import MAX_OPEN_FILES
from dledger.commitlog.seams import UtcOffset, utc
from dledger.settings_tables import MIB, BrokerTable, StoreTable

# ------------------------------------------------------------------------------- numbers of members


LEADER_ID: Final = 0

_DIGITS: Final = frozenset("0123456789")


def number_in(member: str) -> int | None:
    """Return the digits of a member's id as a number; None when it has none."""
    digits = "".join(char for char in member if char in _DIGITS)
    return int(digits) if digits else None


def member_numbers(members: Iterable[str]) -> dict[str, int]:
    """Return the number of each member: that in its id, else the next ones behind these, by name.

    A follower registers under its number + 1.
    """
    found = {member: number_in(member) for member in sorted(members)}
    last = max((number for number in found.values() if number is not None), default=-1)
    following = count(last + 1)
    return {
        member: next(following) if number is None else number for member, number in found.items()
    }


# ---------------------------------------------------------------------------------- the store


MAX_DELAY_LEVELS: Final = 64
"""More levels than a configuration may name."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Sizes and places of a replica's files."""

    root: str
    segment_bytes: int = 1 << 30
    queue_file_units: int = 300_000
    index_slots: int = 5_000_000
    index_entries_max: int = 20_000_000
    delay_levels_ms: tuple[int, ...] = ()
    pid: int = 0
    sync_flush: bool = True
    """Off: after an unclean stop acknowledgements may be lost, and that is remembered."""
    queue_files_max: int = MAX_OPEN_FILES
    """Consume queue files that may be open."""
    utc_offset: UtcOffset = utc
    """Local time, for names of key index files."""


def delays_of_levels(levels_ms: Sequence[int]) -> dict[int, int]:
    """Return the delay of every level there can be; one not configured any more waits longest."""
    longest = max(levels_ms, default=0)
    delays = dict.fromkeys(range(1, MAX_DELAY_LEVELS + 1), longest) if levels_ms else {}
    delays.update(enumerate(levels_ms, start=1))
    return delays


# ---------------------------------------------------------------------------------- the processors


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much one pull may carry; at least one message always fits."""

    max_messages: int
    max_bytes: int


BULK_PULL: Final = ReadLimits(8192, 4 * MIB)
"""One pull of our own SDK: a quarter of the largest frame."""


@dataclass(slots=True)
class BrokerSettings:
    """Read for every request; `dledger.live_settings` alone replaces the tables."""

    address: str
    """Advertised ``ip:port`` of this node."""
    store_host: bytes
    """The same, packed: 8 bytes."""
    broker: BrokerTable = field(default_factory=BrokerTable)
    store: StoreTable = field(default_factory=StoreTable)
    delay_levels_ms: tuple[int, ...] = ()
    msg_region: str = "DefaultRegion"
    trace_on: bool = True
    bulk_pull_limits: ReadLimits = BULK_PULL
    recent_bytes: int = 1024 * MIB
    """Data this near to the end of the log is taken to be in memory."""
    follower_id: int = 1
    """The broker id of this node while it does not lead."""
    follower_ids: Mapping[str, int] = field(default_factory=dict)
    """That of each member that this node's file names."""
    max_held_pulls: int = 100_000
    """Pulls waiting in long polling; one more is answered "nothing there" at once."""
