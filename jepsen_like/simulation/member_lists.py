"""What a leader may do with the list of members, and which members may lead, beside Raft's basics.

===================  =======================================================================
one change           a leader writes a list only when the list before it is committed, and an
                     entry of its own term (Raft thesis §4.1, and its correction)
majority there       of the voters of a list that it writes more than half are connected, as it
                     knows: one that cannot be committed is in force all the same
caught up            a learner gets its vote only when it holds, on its disk, what was
                     committed when this leader saw it first (thesis §4.2.1)
whole leader         a leader that finds damage in its log, which another voter may have, leads
                     no longer from that step on
no loss, no damage   a start on a disk that has lost nothing finds no acknowledged entry lost
===================  =======================================================================

The first list of a group is none of these: it was agreed at bootstrap.
"""

from __future__ import annotations

from dledger.group import Group
from dledger.jepsen_like.simulation.node import BrokerNode, CheckedWorld
from dledger.raft.membership import Members


class MemberLists:
    """The lists of one broker group, as its leaders write them."""

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self._lists: dict[str, int] = {}
        """By member: index of the list that it follows."""
        self._seen: dict[str, tuple[int, dict[tuple[str, str], int]]] = {}
        """By leader: its term, and by learner what was committed when it saw that one first."""
        self._first: dict[str, tuple[int, dict[tuple[str, str], int]]] = {}
        """Likewise of all members that it has seen in that term, those that left among them."""
        self._whole: dict[str, int] = {}
        """By leader: the term in which it led when its log was last seen to be whole."""

    def watch(self, node: BrokerNode, group: Group) -> None:
        """Look at a process that has just started."""
        self._lists.pop(node.name, None)
        self._seen.pop(node.name, None)
        self._first.pop(node.name, None)
        self._whole.pop(node.name, None)
        self._world.sometimes["started_while_refilling"] += group.store.refilling
        if node.is_trusted and group.store.damaged and group.node.settings.sync_flush:
            self._world.violate(
                "damaged_without_loss",
                f"{node.name} takes acknowledged entries for lost; its disk has lost nothing",
            )

    def after_step(self, node: BrokerNode, group: Group) -> None:
        """Look at one replica."""
        raft = group.node
        if not raft.is_leader:
            self._whole.pop(node.name, None)
            self._seen.pop(node.name, None)
            self._lists[node.name] = raft.roster.log.index
            return
        self._check_hole(node, group)
        index, members = raft.roster.log.index, raft.roster.members
        before = self._lists.get(node.name, index)
        self._lists[node.name] = index
        if members is None:
            return
        if index > before > 0 and raft.journal.term_at(index) == raft.term:
            self._check_order(node, group, before, index)
            self._check_there(node, group, members)
            self._check_promoted(node, group, members)
        self._note_learners(node, group, members)

    def _check_hole(self, node: BrokerNode, group: Group) -> None:
        term, damaged = group.node.term, group.log.damaged.indexes
        if not damaged:
            self._whole[node.name] = term
        elif group.node.state.has_hole and self._whole.get(node.name) == term:
            self._world.violate(
                "leads_with_hole",
                f"{node.name} has found entries {list(damaged)[:4]} damaged and leads term {term} "
                "on",
            )

    def _check_order(self, node: BrokerNode, group: Group, before: int, index: int) -> None:
        raft = group.node
        commit = raft.commit_index
        if before > commit:
            self._world.violate(
                "change_too_early",
                f"{node.name} writes list {index}; list {before} is not committed, only {commit}",
            )
        elif raft.journal.term_at(commit) != raft.term:
            self._world.violate(
                "change_too_early",
                f"{node.name} writes list {index} in term {raft.term}, of which nothing is "
                f"committed; {commit} is",
            )

    def _check_there(self, node: BrokerNode, group: Group, members: Members) -> None:
        raft, voters = group.node, members.voter_names
        peers = raft.state.peers
        away = [name for name in voters if name in peers and not peers[name].is_connected]
        there = len(voters) - len(away) + (node.name not in voters)
        if 2 * there <= len(voters):
            self._world.violate(
                "list_without_majority",
                f"{node.name} writes a list of {list(voters)} and is not connected with {away}",
            )

    def _check_promoted(self, node: BrokerNode, group: Group, members: Members) -> None:
        term, learners = self._seen.get(node.name, (0, {}))
        if term != group.node.term:
            return
        for member in members.members:
            commit = learners.get(member.key)
            other = self._world.brokers.get(member.name)
            if not member.is_voter or commit is None or other is None or other.group is None:
                continue
            there = other.group
            if there.node.identity.incarnation != member.incarnation:
                continue  # wiped meanwhile: it is another member
            if there.store.log.durable_index < commit and not there.store.installing:
                self._world.violate(
                    "vote_before_caught_up",
                    f"{node.name} gives {member.name} its vote, which holds entries up to "
                    f"{there.store.log.durable_index}; {commit} was committed when it came",
                )

    def _note_learners(self, node: BrokerNode, group: Group, members: Members) -> None:
        term = group.node.term
        since, first = self._first.get(node.name, (0, {}))
        if since != term:
            first = {}
        self._first[node.name] = (term, first)
        for member in members.members:
            # One that left and came back has been followed since it was seen first.
            first.setdefault(member.key, group.node.commit_index)
        learners = [member.key for member in members.members if not member.is_voter]
        self._seen[node.name] = (term, {key: first[key] for key in learners})
