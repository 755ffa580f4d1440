"""The last resort: one replica continues alone when a majority of the voters is lost.

What the lost members had acknowledged beyond this replica's log is unknown, so an operator decides.
Then this replica gets a new incarnation and a new term, and its log one more entry, the list of
members with this one alone. Old members that return are refused (see `dledger.raft.channel`).
Offline and synchronous: the broker must not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import cbor2

from dledger.broker_errors import ChangeRefusedError
from dledger.commitlog.entry import ENTRY_HEADER_BYTES, seal_config
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptStoreError
from dledger.commitlog.mark import Mark, SlotFile
from dledger.commitlog.seams import Disk
from dledger.commitlog.segment import read_format
from dledger.commitlog.store_paths import StorePaths
from dledger.raft.identity import Identity, owner_of
from dledger.raft.journal import COPIES, TermVote, members_in, parse_term_vote
from dledger.raft.membership import Member, Members, MembersLog
from dledger.raft.wire import TERM_MAX
from dledger.remoting.seams import Rng
from dledger.state.snapshot import load

REPAIRED_TERM_STEP: Final = 1 << 20
"""How far above the log's newest term a repaired one is: a million elections without an entry."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """What one replica has."""

    cluster: str
    group: str
    name: str
    first_index: int
    last_index: int
    last_term: int
    last_store_time_ms: int
    chain: str
    commit_index: int
    """The newest entry that this replica certainly knew to be committed."""
    members: tuple[Member, ...]

    def rows(self) -> dict[str, Any]:
        """Return the facts for people and JSON."""
        return {
            "cluster": self.cluster,
            "group": self.group,
            "member": self.name,
            "first_index": self.first_index,
            "last_index": self.last_index,
            "last_term": self.last_term,
            "last_store_time_ms": self.last_store_time_ms,
            "chain": self.chain,
            "commit_index": self.commit_index,
            "members": [f"{member.name} ({member.standing.value})" for member in self.members],
        }


class Recovery:
    """A stopped replica's folder, opened to read it and perhaps to continue with it alone."""

    def __init__(self, disk: Disk, root: str) -> None:
        """Open and lock the folder; only a torn tail is cut, as at any start.

        Raises:
            StoreLockedError: Its broker runs.
            CorruptStoreError: It is no replica's folder, or its log is damaged: another replica
                is the better choice.
            ChangeRefusedError: Its log is being refilled from a leader: it has less than it seems.
        """
        self._disk = disk
        self._paths = paths = StorePaths(root)
        if not disk.exists(paths.identity) or not disk.exists(paths.format):
            raise CorruptStoreError(f"{root} is no data folder of a broker")
        self._owner = owner_of(disk, paths.identity)
        self._lock = disk.lock(paths.lock)
        try:
            slots = SlotFile(disk, paths.commit_mark)
            recorded = slots.load()
            slots.close()
            mark = None if recorded is None else Mark.decode(recorded)
            segment_bytes = read_format(disk, paths).segment_bytes
            self._log = EntryLog.open(disk, root, segment_bytes=segment_bytes, trusted=mark)
            self._vote_slots = SlotFile(disk, paths.vote)
            self._members = self._find_members()
        except BaseException:
            self._lock.release()
            raise
        if mark is not None and not self._log.mark_valid:
            self.close()
            raise CorruptStoreError(
                f"the log of {root} ends below what it had committed, entry {mark.index}"
            )
        log, (cluster, group, name) = self._log, self._owner
        members = self._members.members
        self.survivor = Survivor(
            cluster=cluster,
            group=group,
            name=name,
            first_index=log.first_index,
            last_index=log.last_index,
            last_term=log.last_term,
            last_store_time_ms=log.last_store_time_ms,
            chain=f"{log.last_chain:016x}",
            commit_index=0 if mark is None else mark.index,
            members=() if members is None else members.members,
        )

    def _find_members(self) -> MembersLog:
        if not self._disk.exists(self._paths.snapshot):
            return members_in(self._log)
        tables = load(self._disk.read(self._paths.snapshot))
        if tables.applied_index > self._log.last_index:
            raise ChangeRefusedError(
                f"this replica was being refilled: it knows of entry {tables.applied_index} and "
                f"has entries up to {self._log.last_index}; nothing was changed"
            )
        known = Members.decode(tables.members_body) if tables.members_index else None
        return members_in(
            self._log, after=tables.applied_index, index=tables.members_index, members=known
        )

    def repair_term(self) -> tuple[str, int] | None:
        """Write a term that this member has not voted in, if none or one out of range is stored.

        It is so far above the log's that no election of the group can have been there. Returns what
        was wrong, and the new term; None: nothing was wrong, nothing was changed.

        Raises:
            CorruptStoreError: The log itself holds a term out of range, or both copies of the
            record are damaged: nothing can repair that.
            FlushFailedError: It may or may not be written; do it again.
        """
        payload = self._vote_slots.load()
        try:
            if payload is None:
                raise CorruptStoreError("the term and vote record is missing")
            parse_term_vote(payload)
        except CorruptStoreError as error:
            return str(error), self._write_term(self._log.last_term + REPAIRED_TERM_STEP)
        return None

    def _write_term(self, term: int) -> int:
        if term > TERM_MAX:
            raise CorruptStoreError(f"the log ends in term {self._log.last_term}")
        record = cbor2.dumps([term, None])
        for _ in range(COPIES):
            self._vote_slots.store(record)
        return term

    def go_on_alone(self, rng: Rng) -> int:
        """Make this replica the only member and return the index of the entry with that list.

        Interrupted, it can be done again.

        Raises DiskFullError, FlushFailedError: nothing that matters was changed; do it again.
        """
        log, name = self._log, self._owner[2]
        incarnation = rng.randbytes(16).hex()
        Identity.refound(self._disk, self._paths.identity, incarnation)
        self.repair_term()
        term_vote = TermVote(self._vote_slots)
        term = max(term_vote.term, log.last_term) + 1
        members = self._members.members
        before = None if members is None else members.voter(name) or members.learner(name)
        alone = Member(
            name,
            incarnation,
            before.host if before else "",
            before.port if before else 0,
            before.client_address if before else "",
        )
        if log.allocator.needs_reserve:
            log.allocator.reserve_next()
        body = Members.of([alone]).encode()
        index = log.last_index + 1
        log.append(
            seal_config(
                body,
                index=index,
                term=term,
                position=log.place(ENTRY_HEADER_BYTES + len(body)),
                prev_chain=log.last_chain,
                store_time_ms=log.last_store_time_ms,
            ),
            sealed_here=True,
        )
        ticket = log.begin_flush()
        if ticket is not None:
            ticket.run()
            log.complete_flush(ticket)
        term_vote.set(term, None)
        term_vote.write(term_vote.snapshot()[1])
        if self._disk.exists(self._paths.doubt):
            # No other member is left that could replace what this replica may have lost.
            self._disk.unlink(self._paths.doubt)
            self._disk.flush_dir(self._paths.raft)
        return index

    def close(self) -> None:
        """Close the files and release the folder."""
        self._log.close()
        self._vote_slots.close()
        self._lock.release()
