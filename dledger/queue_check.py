"""Units of consume queues are compared with the log they were made from: they have no checksum.

A bit that flips in a unit lets a pull get bytes that are no message, or lets a tag match nothing.
The scrub reads every entry anyway: what follows from an entry is compared with what the files of
its queues have, and a file that differs is given up, as one that the disk does not give back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from commitlog.derive import SCHEDULE_TOPIC
from commitlog.errors import MQError, OffsetOutOfRangeError
from commitlog.record import decode_record

if TYPE_CHECKING:
    import numpy.typing as npt

    from commitlog.consume_queue import ConsumeQueue
    from commitlog.consume_queue_store import ConsumeQueueStore
    from commitlog.derive import Derived
    from commitlog.entry_log import EntryLog
    from commitlog.queue_unit import Units
    from dledger.state.tables import QueueBounds, StateTables


def give_up_differing(
    queues: ConsumeQueueStore, tables: StateTables, entry_log: EntryLog, derived: Derived
) -> int:
    """Compare the units of applied entries; return how many files were given up.

    Files that are being put again are left alone. Units of the schedule topic are compared without
    their times, which follow the levels that were set when they were written.

    Raises:
        FlushFailedError, OSError: It could not be noted; the node must stop.
    """
    given_up = 0
    for topic, queue_id, where in derived.groups:
        bounds = tables.queues.get((topic, queue_id))
        offsets, units = derived.queue_offset[where], derived.units[where]
        if bounds is None or not len(offsets):
            continue
        queue = queues.queue(topic, queue_id)
        # A topic that was deleted and made again counts from 0 on.
        ends = [*(np.flatnonzero(np.diff(offsets) != 1) + 1).tolist(), len(offsets)]
        for begin, end in pairwise([0, *ends]):
            first = int(offsets[begin])
            given_up += _compare_run(queue, bounds, entry_log, first, units[begin:end])
    return given_up


def _compare_run(
    queue: ConsumeQueue, bounds: QueueBounds, entry_log: EntryLog, begin: int, wanted: Units
) -> int:
    """Compare units that follow each other from *begin* on; return how many files were given up."""
    first = max(begin, bounds.min_offset)
    last = min(begin + len(wanted), bounds.max_offset)
    if first >= last:
        return 0
    wanted = wanted[first - begin : last - begin]
    try:
        found = queue.read(first, last - first)
    except (OSError, OffsetOutOfRangeError):
        return 0  # the queue has noted that it cannot be read
    given_up = 0
    for at in np.flatnonzero(_differ(found, wanted, queue.topic)).tolist():
        if not _is_newer(entry_log, queue, first + at, found[at], wanted[at]):
            given_up += queue.give_up(first + at)
    return given_up


def _differ(found: Units, wanted: Units, topic: str) -> npt.NDArray[np.bool_]:
    differ: npt.NDArray[np.bool_] = found["phy_offset"] != wanted["phy_offset"]
    differ |= found["size"] != wanted["size"]
    if topic != SCHEDULE_TOPIC:
        differ |= found["tags_code"] != wanted["tags_code"]
    return differ


def _is_newer(
    entry_log: EntryLog, queue: ConsumeQueue, offset: int, found: Units, wanted: Units
) -> bool:
    """Whether a later message has that offset: its topic was deleted and made again."""
    if int(found["phy_offset"]) <= int(wanted["phy_offset"]):
        return False
    return points_to(entry_log, found, queue.topic, queue.queue_id, offset)


def points_to(entry_log: EntryLog, unit: Units, topic: str, queue_id: int, offset: int) -> bool:
    """Whether the log has, where *unit* points to, the message of that queue and offset."""
    position, size = int(unit["phy_offset"]), int(unit["size"])
    try:
        record = decode_record(entry_log.read(position, size))
    except (MQError, OSError):
        return False
    place = (record.topic, record.queue_id, record.queue_offset, record.phy_offset, record.size)
    return place == (topic, queue_id, offset, position, size)
