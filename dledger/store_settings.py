"""Sizes and places of the files of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from commitlog.consume_queue_store import MAX_OPEN_FILES
from commitlog.seams import UtcOffset, utc

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
    """Return the delay of every level there can be; one that is configured no more waits longest.

    Messages of such a level may be there, from before; none of them is to be early.
    """
    longest = max(levels_ms, default=0)
    delays = dict.fromkeys(range(1, MAX_DELAY_LEVELS + 1), longest) if levels_ms else {}
    delays.update(enumerate(levels_ms, start=1))
    return delays
