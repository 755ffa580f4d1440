"""What members promise each other on the wire, and that their disks keep it.

A vote and an acknowledgement are promises (Raft, figure 2: "updated on stable storage before
responding"). They are read off the frames as they leave, so the product is taken at its word and
not at what it believes of itself.

===================  =======================================================================
one vote             a member votes for one candidate per term, whatever happens to it between
whole vote           who votes, for itself too, holds all it has ever shown as committed: the
                     voter's log keeps others from leading (Raft, §5.4.1). A wiped folder is
                     another life, which has shown nothing
kept vote            a process that starts again knows term and vote it had told
kept log             … and holds the entry it had acknowledged, unless a leader cut it since
true acknowledgement an acknowledged entry is the one that the leader of that term has there
===================  =======================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import cbor2

from commitlog.errors import MQError
from dledger.group import Group
from dledger.raft.wire import Kind
from jepsen_like.simulation.claims import check_acknowledged, check_voted

if TYPE_CHECKING:
    from jepsen_like.simulation.node import BrokerNode
    from jepsen_like.simulation.world import World

_HEAD_LENGTH: Final = struct.Struct(">H")
_LENGTH: Final = struct.Struct(">I")
_HEAD_LENGTH_AT: Final = 8
_HEAD_AT: Final = 10
_KIND_AT: Final = 11
"""The head is a CBOR array of fewer than 24 items; its first is the kind, one byte."""

_PROMISING: Final = frozenset({int(Kind.VOTE), int(Kind.VOTE_REPLY), int(Kind.APPEND_REPLY)})


class Promises:
    """Votes and acknowledgements of one broker group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.votes: dict[tuple[str, str, int], str] = {}
        """Voter, its incarnation and term, to the candidate."""

    # -- what leaves -----------------------------------------------------------------------

    def frames_left(self, source: str, target: str, data: Any) -> None:
        """Look at bytes of the members' protocol that *source* sends to *target*."""
        for kind, head in _promises_in(data):
            node = self._world.brokers.get(source)
            if node is None or node.group is None:
                continue
            if kind == Kind.VOTE:
                self._check_whole(node, node.group, head[1], source)
            elif kind == Kind.VOTE_REPLY:
                self._voted(node, node.group, head[1], target)
            elif head[4]:
                self._acknowledged(node, node.group, head[1], head[5])

    def _voted(self, node: BrokerNode, group: Group, term: int, candidate: str) -> None:
        incarnation = group.node.identity.incarnation
        first = self.votes.setdefault((node.name, incarnation, term), candidate)
        if first != candidate:
            self._world.violate(
                "two_votes", f"{node.name} voted for {first} and {candidate} in term {term}"
            )
        check_voted(self._world, node, group, term, candidate)
        self._check_whole(node, group, term, candidate)
        node.promised_vote = max(node.promised_vote, (term, candidate))

    def _check_whole(self, node: BrokerNode, group: Group, term: int, candidate: str) -> None:
        end = group.node.journal.last_index
        if end < node.shown_commit and group.node.settings.sync_flush:
            self._world.violate(
                "hollow_vote",
                f"{node.name} votes for {candidate} in term {term} with a log up to {end}; it had "
                f"shown {node.shown_commit} as committed",
            )

    def _acknowledged(self, node: BrokerNode, group: Group, term: int, index: int) -> None:
        journal = group.node.journal
        if term != group.node.term or index > journal.last_index:
            return  # made in an earlier term: what it was about may be gone by right
        try:
            chain = journal.log.chain_at(index)
        except MQError:
            return  # below the first kept entry
        check_acknowledged(self._world, node, group, index)
        if index >= node.promised_entry[0]:
            node.promised_entry = (index, chain)
        leader = self._leader_of(term)
        if leader is not None and leader is not node and leader.group is not None:
            self._compare(node, leader, leader.group, index, chain)

    def _leader_of(self, term: int) -> BrokerNode | None:
        name = self._world.checks.leaders.get(term)
        leader = None if name is None else self._world.brokers[name]
        if leader is None or leader.group is None:
            return None
        return leader if leader.leads and leader.group.term == term else None

    def _compare(
        self, node: BrokerNode, leader: BrokerNode, group: Group, index: int, chain: int
    ) -> None:
        there = group.node.journal
        try:
            same = index <= there.last_index and there.log.chain_at(index) == chain
        except MQError:
            return
        if not same:
            self._world.violate(
                "false_acknowledgement",
                f"{node.name} acknowledged {index}, which is another entry at {leader.name}",
            )

    # -- what stays ------------------------------------------------------------------------

    def watch(self, node: BrokerNode, group: Group) -> None:
        """See that a process that has just started remembers; let it off what is cut by right."""
        if node.is_trusted and group.node.settings.sync_flush:
            self._check_vote(node, group)
            self._check_log(node, group)
        journal = group.node.journal
        cut = journal.deleteEntriesFrom

        def delete(entryFrom: int) -> None:  # noqa: N803 - the library's name
            first = journal.anchor_index + entryFrom
            if first <= node.promised_entry[0]:
                node.promised_entry = (0, 0)
            if first <= journal.last_index:
                kept = journal.end_position_of(first - 1)
                node.seen_durable_end = min(node.seen_durable_end, kept)
            cut(entryFrom)

        journal.deleteEntriesFrom = delete  # type: ignore[method-assign]

    def _check_vote(self, node: BrokerNode, group: Group) -> None:
        term, candidate = node.promised_vote
        if not term:
            return
        kept = group.node.journal.term_vote
        if kept.term < term or (kept.term == term and kept.voted_for != candidate):
            self._world.violate(
                "vote_forgotten",
                f"{node.name} voted for {candidate} in term {term} and came back with "
                f"{kept.voted_for} in {kept.term}",
            )

    def _check_log(self, node: BrokerNode, group: Group) -> None:
        index, chain = node.promised_entry
        journal = group.node.journal
        if not index or index < journal.log.first_index:
            return
        if index > journal.last_index or journal.log.chain_at(index) != chain:
            self._world.violate(
                "acknowledgement_forgotten",
                f"{node.name} had acknowledged {index} and came back with a log up to "
                f"{journal.last_index} without it",
            )


def _promises_in(data: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield kind and head of the frames in *data* that promise something."""
    at, end = 0, len(data)
    while at + _KIND_AT < end:
        if data[at + _KIND_AT] in _PROMISING:
            (size,) = _HEAD_LENGTH.unpack_from(data, at + _HEAD_LENGTH_AT)
            head = cbor2.loads(bytes(data[at + _HEAD_AT : at + _HEAD_AT + size]))
            yield head[0], head
        at += 4 + _LENGTH.unpack_from(data, at)[0]
