"""What a member takes for durable is on its disk, at the moment it begins to count on it.

A crash shows a broken claim only when it comes at the wrong instant; the disk of the simulation
can be asked at any. Asked are the bytes a power cut could still change: written and not flushed,
flushed by work that is not over, lost by a flush that failed.

===================  =======================================================================
recovered log        what a start keeps of the log is whole, checksum and chain
stable entries       what a member counts as stable is on its disk, name of the file and all
commit               nothing is committed here that is not stable here
acknowledgement      what it acknowledges is on its disk when the frame leaves
vote                 so are term and vote
===================  =======================================================================

Groups that acknowledge before their flushes (`sync_flush` off) claim nothing but votes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import cbor2

from commitlog.entry import parse_header, verify_frame
from commitlog.errors import CorruptEntryError
from commitlog.segment import segment_base
from commitlog.slot_file import SLOT_STRIDE_BYTES, decode_slot
from dledger.group import Group

if TYPE_CHECKING:
    from commitlog.entry_log import EntryLog
    from commitlog.store_paths import StorePaths
    from jepsen_like.simulation.node import BrokerNode
    from jepsen_like.simulation.sim_disk import SimDisk
    from jepsen_like.simulation.world import World

CLAIMS: Final = frozenset({"recovered", "claim", "commit_not_stable", "promise_before_disk"})
"""Names of what is found here: it needs no fault, and nobody but the simulator can see it."""

RECOVERED_ENTRIES: Final = 64
"""Of a log that was kept at a start; what a crash tears is at its end."""

_SLOT_BYTES: Final = 512
_NO_VOTE: Final = (0, "")


def check_recovered(world: World, node: BrokerNode, group: Group) -> None:
    """Look at the end of the log a process has started with; its disk has broken no promise."""
    log = group.store.log
    first = max(log.first_index, log.last_index - RECOVERED_ENTRIES + 1)
    for index in range(first, log.last_index + 1):
        frame = log.frame(index)
        try:
            verify_frame(frame, parse_header(frame), log.chain_at(index - 1))
        except CorruptEntryError as error:
            world.violate("recovered", f"{node.name} came back with a bad entry: {error}")
            return


def check_stable(world: World, node: BrokerNode, group: Group) -> None:
    """Look at what a member counts as stable, when that has changed."""
    journal = group.node.journal
    stable = journal.stable_index
    claim = (stable, journal.log.generation)
    if claim == node.seen_claim:
        return
    node.seen_claim = claim
    if not group.node.settings.sync_flush:
        return
    if journal.log is not node.seen_log:  # at a start, and when a snapshot was installed
        node.seen_log, node.seen_durable_end = journal.log, 0
    if stable > journal.last_index:
        world.violate(
            "claim", f"{node.name} counts {stable} as stable, its log ends at {journal.last_index}"
        )
        return
    begin, end = node.seen_durable_end, journal.end_position_of(stable)
    if _is_doubtful(node, group, begin, end):
        world.violate("claim", f"{node.name} counts {stable} as stable, which a power cut can undo")
    node.seen_durable_end = end


def check_commit(world: World, node: BrokerNode, group: Group, commit: int) -> None:
    """Look at a commit index that has moved."""
    stable = group.node.journal.stable_index
    if commit > stable:
        world.violate(
            "commit_not_stable",
            f"{node.name} shows {commit} as committed, stable here is {stable}",
        )


def check_acknowledged(world: World, node: BrokerNode, group: Group, index: int) -> None:
    """Look at an acknowledgement of everything up to *index* that is leaving."""
    if not group.node.settings.sync_flush:
        return
    end = group.node.journal.end_position_of(index)
    if end > node.seen_durable_end and _is_doubtful(node, group, node.seen_durable_end, end):
        world.violate(
            "promise_before_disk",
            f"{node.name} acknowledges {index}, which a power cut can undo",
        )


def check_voted(world: World, node: BrokerNode, group: Group, term: int, candidate: str) -> None:
    """Look at a vote that is leaving."""
    kept = certain_vote(node, group)
    if kept[0] < term or (kept[0] == term and kept[1] != candidate):
        world.violate(
            "promise_before_disk",
            f"{node.name} votes for {candidate} in term {term}; on its disk is {kept}",
        )


def certain_vote(node: BrokerNode, group: Group) -> tuple[int, str | None]:
    """Return term and vote that a node would find after a power cut now, at the worst."""
    content = node.disk.certain(group.store.paths.vote)
    if content is None:
        return _NO_VOTE
    slots = [content[at : at + _SLOT_BYTES] for at in (0, SLOT_STRIDE_BYTES)]
    whole: list[tuple[int, bytes]] = [found for slot in slots if (found := decode_slot(slot))]
    if not whole:
        return _NO_VOTE
    record: Any = cbor2.loads(max(whole)[1])
    return record[0], record[1]


def _is_doubtful(node: BrokerNode, group: Group, begin: int, end: int) -> bool:
    store = group.store
    return is_doubtful(node.disk, store.paths, store.log, store.settings.segment_bytes, begin, end)


def is_doubtful(
    disk: SimDisk, paths: StorePaths, log: EntryLog, segment_bytes: int, begin: int, end: int
) -> bool:
    """Return whether a power cut might change an entry in bytes *begin* to *end* of a log.

    Entries that are known to be damaged do not count: the member claims nothing of them until
    their copies are flushed.
    """
    begin = max(begin, log.first_position)
    for index in log.damaged.indexes:
        start, stop = log.damaged.span(index)
        if begin < min(start, end) and _is_part_doubtful(
            disk, paths, segment_bytes, begin, min(start, end)
        ):
            return True
        begin = max(begin, stop)
    return _is_part_doubtful(disk, paths, segment_bytes, begin, end)


def _is_part_doubtful(
    disk: SimDisk, paths: StorePaths, segment_bytes: int, begin: int, end: int
) -> bool:
    while begin < end:
        base = segment_base(begin, segment_bytes)
        stop = min(end, base + segment_bytes)
        if disk.first_doubtful(paths.segment(base), begin - base, stop - base) is not None:
            return True
        begin = stop
    return False
