"""What a leader counts stands on disks: at each commit, on those of a majority of the voters.

The bytes of an entry are compared with the simulated disks of the voters, whatever processes run
on them: a power cut at this instant must leave them. Groups that acknowledge before their flushes
are held to the pages they wrote.

===================  =======================================================================
counted              at a commit a majority of the voters' disks hold the entry
belief               no leader takes a member for further than that member's disk is
===================  =======================================================================
"""

from __future__ import annotations

from typing import Final

from commitlog.errors import MQError
from commitlog.segment import segment_base
from dledger.group import Group
from jepsen_like.simulation.checked_world import CheckedWorld
from jepsen_like.simulation.node import BrokerNode

ENTRIES_MAX: Final = 16
"""Newest entries of one commit that are looked for."""

HARMED_S: Final = 60.0
"""A disk that a plan has harmed held what its member acknowledged; so long after that it counts as
if it held it. Longer than any pause of a leader with an acknowledgement in hand."""


class DiskCopies:
    """Copies of the entries of one broker group."""

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world

    def counted(self, node: BrokerNode, group: Group, seen: int, commit: int) -> None:
        """Look at a commit index that a leader has moved from *seen* to *commit*."""
        for index in range(max(seen + 1, commit - ENTRIES_MAX + 1), commit + 1):
            if not self._is_on_a_majority(node, group, index):
                return
        self._check_beliefs(node, group)

    def _is_on_a_majority(self, node: BrokerNode, group: Group, index: int) -> bool:
        members = group.node.roster.members
        lists = [node.seen_voters, () if members is None else members.voter_names]
        names = {name for voters in lists for name in voters}
        holding = {name for name in names if self._holds(name, group, index)}
        # A list is in force as soon as it is written: it may be newer than what was counted.
        if any(2 * len(holding.intersection(voters)) > len(voters) for voters in lists if voters):
            return True
        if any(lists):
            self._world.violate(
                "counted_not_on_disks",
                f"{node.name} commits {index}; of {sorted(names)} only {sorted(holding)} hold it",
            )
        return False

    def _check_beliefs(self, node: BrokerNode, group: Group) -> None:
        raft = group.node
        if not raft.is_leader:
            return
        for name, progress in raft.replicator.peers.items():
            other = self._world.brokers.get(name)
            index = progress.match_index
            if other is None or other.group is None or index < group.store.log.first_index:
                continue
            there = other.group
            # A later leader may have cut it, and a replica may have dropped it by right.
            if there.term > raft.term or index < there.store.log.first_index:
                continue
            if not there.store.refilling and not self._holds(name, group, index):
                self._world.violate(
                    "belief",
                    f"{node.name} takes {name} for having {index}, which is not on its disk",
                )

    def _holds(self, name: str, group: Group, index: int) -> bool:
        """Whether a power cut now leaves the entry on a member's disk."""
        other = self._world.brokers.get(name)
        log = group.store.log
        if other is None:
            return False
        if self._world.elapsed_s - other.harmed_s < HARMED_S:
            return True
        try:
            frame, position = bytes(log.frame(index)), log.position_at(index)
        except (MQError, OSError):
            return True  # not to be read here: there is nothing to compare with
        base = segment_base(position, group.store.settings.segment_bytes)
        path = group.store.paths.segment(base)
        inode = other.disk.names.get(path)
        start, end = position - base, position - base + len(frame)
        if inode is None or bytes(inode.content[start:end]) != frame:
            return False
        if not group.node.settings.sync_flush:
            return True
        return other.disk.first_doubtful(path, start, end) is None
