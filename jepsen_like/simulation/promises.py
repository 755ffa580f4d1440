"""What members acknowledge, count and take for durable, against their disks and frames.

A crash shows a broken claim only when it comes at the wrong instant; the disk of the simulation
can be asked at any: which bytes could a power cut still change, because they are written and not
flushed, flushed by work that is not over, or lost by a flush that failed? A vote and an
acknowledgement are guarantees (Raft, figure 2: "updated on stable storage before responding"). They
are read off the frames as they leave, not off what the product believes of itself.

===================  =======================================================================
recovered log        what a start keeps of the log is whole, checksum and chain
stable entries       what a member counts as stable is on its disk, name of the file and all
commit               nothing is committed here that is not stable here
acknowledgement      what it acknowledges is on its disk when the frame leaves
vote                 so are term and vote
one vote             a member votes for one candidate per term, whatever happens to it between
whole vote           the log of a member that votes, for itself too, is no older than the newest
                     entry it has acknowledged or shown as committed: it keeps others from leading
                     (Raft, §5.4.1); unless most voters began uncertain of theirs: they elect the
                     best of all. A wiped folder is another member
kept vote            a process that starts again knows term and vote that it had sent
kept log             … and holds the entry it had acknowledged, unless a leader cut it since
true acknowledgement an acknowledged entry is the one that the leader of that term has there
counted              at a commit a majority of the voters' disks hold the entry, whatever
                     processes run on them: a power cut at this instant must leave it
belief               no leader takes a member for further than that member's disk is, from the
                     step on that raises it
covered              what is removed of a log is in the tables of a checkpoint: a start needs them
===================  =======================================================================

Groups that acknowledge before their flushes (`sync_flush` off) claim nothing but votes, and
are held to the pages they wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import cbor2

from dledger.commitlog.entry import parse_header, verify_frame
from dledger.commitlog.entry_log import Drop, EntryLog
from dledger.commitlog.errors import CorruptEntryError, MQError
from dledger.commitlog.mark import SLOT_STRIDE_BYTES, decode_slot
from dledger.commitlog.segment import segment_base
from dledger.commitlog.store_paths import StorePaths
from dledger.group import Group
from dledger.jepsen_like.simulation.node import BrokerNode, CheckedWorld
from dledger.jepsen_like.simulation.sim_disk import SimDisk
from dledger.raft.wire import Kind

RECOVERED_ENTRIES: Final = 64
"""Of a log that was kept at a start; what a crash tears is at its end."""

_SLOT_BYTES: Final = 512
_NO_VOTE: Final = (0, "")


def check_recovered(world: CheckedWorld, node: BrokerNode, group: Group) -> None:
    """Look at the end of the log of a start on a disk that has lost nothing that was flushed."""
    log = group.store.log
    first = max(log.first_index, log.last_index - RECOVERED_ENTRIES + 1)
    for index in range(first, log.last_index + 1):
        frame = log.frame(index)
        try:
            verify_frame(frame, parse_header(frame), log.chain_at(index - 1))
        except CorruptEntryError as error:
            world.violate("recovered", f"{node.name} came back with a bad entry: {error}")
            return


def check_stable(world: CheckedWorld, node: BrokerNode, group: Group) -> None:
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
    return is_doubtful(
        node.disk, store.paths, store.log, store.settings.mapped_file_size_commit_log, begin, end
    )


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


_HEAD_LENGTH: Final = struct.Struct(">H")
_LENGTH: Final = struct.Struct(">I")
_HEAD_LENGTH_AT: Final = 8
_HEAD_AT: Final = 10
_KIND_AT: Final = 11
"""A head of CBOR is an array of fewer than 24 items; its first is the kind, one byte."""

_CBOR_ARRAY: Final = 0x80
"""Heads that begin below have a fixed form, and the kind is their first byte."""

_REPLY: Final = struct.Struct(">5Q")
"""Term, epoch, sequence, whether it was taken, index: behind the kind of an acknowledgement."""

_PROMISING: Final = frozenset({int(Kind.VOTE), int(Kind.VOTE_REPLY)})


class Promises:
    """Votes and acknowledgements of one broker group."""

    def __init__(self, world: CheckedWorld, leaders: Mapping[int, str]) -> None:
        self._world = world
        self._leaders = leaders
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
        kept = certain_vote(node, group)
        if kept[0] < term or (kept[0] == term and kept[1] != candidate):
            self._world.violate(
                "promise_before_disk",
                f"{node.name} votes for {candidate} in term {term}; on its disk is {kept}",
            )
        self._check_whole(node, group, term, candidate)
        node.promised_vote = max(node.promised_vote, (term, candidate))

    def _check_whole(self, node: BrokerNode, group: Group, term: int, candidate: str) -> None:
        journal = group.node.journal
        end = (journal.last_term, journal.last_index)
        if end < node.promised_entry[:2] and not self._are_doubtful(group):
            self._world.violate(
                "hollow_vote",
                f"{node.name} votes for {candidate} in term {term} with a log up to term and index "
                f"{end}; it had acknowledged, or shown as committed, {node.promised_entry[:2]}",
            )

    def _are_doubtful(self, group: Group) -> bool:
        """Whether most voters began uncertain, so that the best log of all is what is left."""
        members = group.node.roster.members
        names = () if members is None else members.voter_names
        nodes = [node for name in names if (node := self._world.brokers.get(name)) is not None]
        return 2 * sum(node.began_doubtful for node in nodes) > len(names)

    def _acknowledged(self, node: BrokerNode, group: Group, term: int, index: int) -> None:
        journal = group.node.journal
        if term != group.node.term or index > journal.last_index:
            return  # made in an earlier term: what it was about may be removed by right
        begin, end = node.seen_durable_end, journal.end_position_of(index)
        is_claimed = group.node.settings.sync_flush and end > begin
        if is_claimed and _is_doubtful(node, group, begin, end):
            self._world.violate(
                "promise_before_disk",
                f"{node.name} acknowledges {index}, which a power cut can undo",
            )
        chain = self.promise(node, group, index)
        leader = self._leader_of(term)
        if leader is None or leader is node or leader.group is None or chain is None:
            return
        self._compare(node, leader, leader.group, index, chain)

    def promise(self, node: BrokerNode, group: Group, index: int) -> int | None:
        """Note that a member has all up to *index*; return the chain there, if it is kept."""
        journal = group.node.journal
        try:
            entry = (journal.term_at(index), index, journal.log.chain_at(index))
        except MQError:
            return None
        if entry[:2] >= node.promised_entry[:2]:
            node.promised_entry = entry
        return entry[2]

    def _leader_of(self, term: int) -> BrokerNode | None:
        name = self._leaders.get(term)
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
        node.began_doubtful = group.node.eligibility.doubtful
        cut = journal.deleteEntriesFrom

        def delete(entryFrom: int) -> None:  # noqa: N803 - the library's name
            first = journal.anchor_index + entryFrom
            if first <= node.promised_entry[1]:
                node.promised_entry = (0, 0, 0)
                self.promise(node, group, first - 1)
            if first <= journal.last_index:
                kept = journal.end_position_of(first - 1)
                node.seen_durable_end = min(node.seen_durable_end, kept)
            cut(entryFrom)

        journal.deleteEntriesFrom = delete  # type: ignore[method-assign]
        detach = group.store.detach

        def detach_and_look(drop: Drop) -> None:
            detach(drop)
            if node.group is group:
                self._check_covered(node, group)

        group.store.detach = detach_and_look  # type: ignore[method-assign]

    def _check_covered(self, node: BrokerNode, group: Group) -> None:
        first, saved = group.store.log.first_index, group.store.saved_index
        if first > saved + 1:
            self._world.violate(
                "removed_before_checkpoint",
                f"{node.name} has its log from {first} on, and a checkpoint of {saved}",
            )

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
        _, index, chain = node.promised_entry
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
    """Yield kind and head of the votes and acknowledgements in *data*."""
    at, end = 0, len(data)
    while at + _KIND_AT < end:
        if data[at + _HEAD_AT] == Kind.APPEND_REPLY:
            head = [Kind.APPEND_REPLY, *_REPLY.unpack_from(data, at + _KIND_AT)]
            yield head[0], head
        elif data[at + _HEAD_AT] >= _CBOR_ARRAY and data[at + _KIND_AT] in _PROMISING:
            (size,) = _HEAD_LENGTH.unpack_from(data, at + _HEAD_LENGTH_AT)
            head = cbor2.loads(bytes(data[at + _HEAD_AT : at + _HEAD_AT + size]))
            yield head[0], head
        at += 4 + _LENGTH.unpack_from(data, at)[0]


ENTRIES_MAX: Final = 16
"""Newest entries of one commit that are looked for."""

HARMED_S: Final = 60.0
"""A disk that a plan has harmed held what its member acknowledged; so long after that it counts as
if it held it. Longer than any pause of a leader with an acknowledgement in hand."""


class DiskCopies:
    """Copies of the entries of one broker group."""

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self._matched: dict[str, tuple[int, dict[str, int]]] = {}
        """By leader: its term, and by member the index that it was seen to take for there."""

    def counted(self, node: BrokerNode, group: Group, seen: int, commit: int) -> None:
        """Look at a commit index that a leader has moved from *seen* to *commit*."""
        for index in range(max(seen + 1, commit - ENTRIES_MAX + 1), commit + 1):
            if not self._is_on_a_majority(node, group, index):
                return

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

    def after_step(self, node: BrokerNode, group: Group) -> None:
        """Look at what a leader takes members for having, where that has changed."""
        raft = group.node
        if not raft.is_leader:
            return
        term, matched = self._matched.get(node.name, (0, {}))
        if term != raft.term:
            matched = {}
        self._matched[node.name] = (raft.term, matched)
        for name, progress in raft.replicator.peers.items():
            other = self._world.brokers.get(name)
            index, before = progress.match_index, matched.get(name)
            matched[name] = index
            if index == before or other is None or other.group is None:
                continue
            if index < group.store.log.first_index:
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
        base = segment_base(position, group.store.settings.mapped_file_size_commit_log)
        path = group.store.paths.segment(base)
        inode = other.disk.names.get(path)
        start, end = position - base, position - base + len(frame)
        if inode is None or bytes(inode.content[start:end]) != frame:
            return False
        if not group.node.settings.sync_flush:
            return True
        return other.disk.first_doubtful(path, start, end) is None
