"""The planted bugs, each a few edits of the product, under an opaque number.

Whoever hunts them is given the number only. Where two guards cover each other, the bug needs both
gone: either one alone hides it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

NODE: Final = "dledger.raft.node:RaftNode"
JOURNAL: Final = "dledger.raft.journal:CommitLogJournal"
APPEND: Final = "dledger.raft.append"
GROUP: Final = "dledger.group:Group"
STORE: Final = "dledger.store:ReplicaStore"
LOG: Final = "commitlog.entry_log:EntryLog"
LIBRARY: Final = "pysyncobj.syncobj:SyncObj"


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace *old* by *new* in the function *target*."""

    target: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug.

    Attributes:
        number: All that a hunter is told.
        name: What is wrong.
        edits: Changes of functions.
        guards_off: Guards of `dledger.raft.guards` that are switched off.
    """

    number: int
    name: str
    edits: tuple[Edit, ...] = ()
    guards_off: tuple[str, ...] = ()


def _edit(number: int, name: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(number, name, tuple(Edit(*edit) for edit in edits))


def _guards(number: int, *names: str) -> Mutant:
    return Mutant(number, "guard off: " + " and ".join(names), guards_off=names)


MUTANTS: Final[tuple[Mutant, ...]] = (
    # -- guards, alone and in pairs ---------------------------------------------------------
    _guards(11, "durable_before_promise"),
    _guards(12, "envelope"),
    _guards(13, "idempotent_append"),
    _guards(14, "envelope", "idempotent_append"),
    _guards(15, "one_vote_per_voter"),
    _guards(16, "leader_gives_up"),
    _guards(17, "envelope", "one_vote_per_voter"),
    _guards(18, "envelope", "idempotent_append", "next_index_never_back"),
    # -- promises before the disk -----------------------------------------------------------
    _edit(
        21,
        "a follower acknowledges before its flush",
        (
            f"{NODE}._release_acks",
            "min(owed.verified, self.journal.stable_index)",
            "owed.verified",
        ),
    ),
    _edit(
        22,
        "a vote leaves before it is on disk",
        (
            f"{NODE}._release_held",
            "if self.guards.durable_before_promise and held.version > durable:",
            "if False:",
        ),
    ),
    _edit(
        23,
        "term and vote are never written",
        ("dledger.raft.term_vote:TermVote.write", "self._slots.store(record)", "pass"),
    ),
    _edit(
        24,
        "the vote is not part of what is written",
        (
            "dledger.raft.term_vote:TermVote.snapshot",
            "[self.term, self.voted_for]",
            "[self.term, None]",
        ),
    ),
    _edit(
        25,
        "the term before the newest is written",
        (
            "dledger.raft.term_vote:TermVote.snapshot",
            "[self.term, self.voted_for]",
            "[max(0, self.term - 1), None]",
        ),
    ),
    _edit(
        26,
        "the leader counts itself before its own flush",
        (
            "dledger.raft.core:RaftCore.__init__",
            "if guards.durable_before_promise:",
            "if False:",
        ),
        (
            "dledger.raft.core:RaftCore.commit_index",
            "min(self._library.raftCommitIndex, self._journal.stable_index)",
            "self._library.raftCommitIndex",
        ),
    ),
    _edit(
        27,
        "entries are applied before they are on this disk",
        (
            "dledger.raft.core:RaftCore.commit_index",
            "min(self._library.raftCommitIndex, self._journal.stable_index)",
            "self._library.raftCommitIndex",
        ),
    ),
    _edit(
        28,
        "a flush that fails counts as done",
        (
            "commitlog.entry_log:FlushTicket.run",
            "file.flush()",
            "try:\n    file.flush()\nexcept MQError:\n    pass",
        ),
    ),
    _edit(
        29,
        "only the newest segment is flushed",
        (
            f"{LOG}.begin_flush",
            "{segment.file: None for segment in self._dirty.values()}",
            "{segment.file: None for segment in list(self._dirty.values())[-1:]}",
        ),
    ),
    _edit(
        30,
        "a new segment's name is not made durable",
        (f"{LOG}.begin_flush", "folder = self._new_names", "folder = False"),
        (f"{LOG}.reserve_next", "flush_dir", "exists"),
    ),
    _edit(
        31,
        "a flush counts although the log was cut meanwhile",
        (
            f"{LOG}.complete_flush",
            "if ticket.generation != self.generation:",
            "if False:",
        ),
    ),
    _edit(
        32,
        "a truncation leaves the durable mark where it was",
        (
            f"{LOG}._cut",
            "min(self.durable_index, last.index)",
            "self.durable_index",
        ),
    ),
    _edit(
        33,
        "the slots of a small file are written in place",
        ("commitlog.slot_file:SlotFile._write", "slot = 1 - self._slot", "slot = self._slot"),
        ("commitlog.slot_file:SlotFile._write", "file.flush()", "pass"),
    ),
    # -- replication ------------------------------------------------------------------------
    _edit(
        41,
        "an acknowledgement survives a truncation",
        (
            f"{NODE}._release_acks",
            "if owed.term != self.term or owed.generation != self.journal.log.generation:",
            "if owed.term != self.term:",
        ),
        (
            f"{NODE}._release_acks",
            "min(owed.verified, self.journal.stable_index)",
            "owed.verified",
        ),
    ),
    _edit(
        42,
        "an acknowledgement of an earlier reign is counted",
        (
            f"{NODE}.receive",
            "elif frame.term < self.term and self.guards.envelope:",
            "elif frame.term < self.term and frame.kind is not Kind.APPEND_REPLY:",
        ),
    ),
    _edit(
        43,
        "a follower commits what this append has not verified",
        (f"{APPEND}:_message", "min(request.commit_index, verified)", "request.commit_index"),
    ),
    _edit(
        44,
        "a follower acknowledges its own tail",
        (
            f"{APPEND}:_nothing_new",
            "return Accepted(_message(journal, request, journal.last_index, (), verified), "
            "verified)",
            "return Accepted(_message(journal, request, journal.last_index, (), "
            "journal.last_index), journal.last_index)",
        ),
    ),
    _edit(
        45,
        "an entry that is there already cuts what follows",
        (
            f"{APPEND}:_strip_present",
            "for at, frame in enumerate(frames):",
            "return frames\nfor at, frame in enumerate(frames):",
        ),
        (
            f"{JOURNAL}.deleteEntriesFrom",
            "if index <= self._commit_index and self._guards.idempotent_append:",
            "if False:",
        ),
        (f"{APPEND}:plan_append", "if first <= commit:", "if False:"),
    ),
    _edit(
        46,
        "entries of old terms are committed by counting",
        (LIBRARY + "._onTick", "if commitTerm != self.__raftCurrentTerm:", "if False:"),
    ),
    _edit(
        47,
        "a refusal counts as an acknowledgement",
        (
            f"{NODE}._on_append_reply",
            "if not matched:",
            "if not matched and index > self.journal.last_index:",
        ),
    ),
    _edit(
        48,
        "a follower says yes to an append that does not fit",
        (
            f"{APPEND}:plan_append",
            "elif journal.term_at(prev) != request.prev_term:",
            "elif False:",
        ),
        (
            f"{APPEND}:_check_chain",
            "if not frames:",
            "if True:",
        ),
    ),
    _edit(
        49,
        "a conflict is seen one entry too late",
        (
            f"{APPEND}:_strip_present",
            "header.index > journal.last_index or journal.term_at(header.index) != header.term",
            "header.index > journal.last_index",
        ),
        (
            f"{APPEND}:_strip_present",
            "if journal.log.chain_at(header.index) != header.chain:",
            "if False:",
        ),
    ),
    # -- elections --------------------------------------------------------------------------
    _edit(
        51,
        "a vote is given to a shorter log",
        (f"{NODE}._on_vote", '"last_log_index": last_index,', '"last_log_index": 1 << 60,'),
        (f"{NODE}._on_vote", '"last_log_term": last_term,', '"last_log_term": 1 << 60,'),
        (
            f"{NODE}._on_pre_vote",
            "and is_up_to_date(",
            "and last_index >= 0 or is_up_to_date(",
        ),
    ),
    _edit(
        52,
        "logs are compared by length alone",
        (f"{NODE}._on_vote", '"last_log_term": last_term,', '"last_log_term": self.term,'),
        (
            "dledger.raft.election:is_up_to_date",
            "(last_term, last_index) >= (own_last_term, own_last_index)",
            "last_index >= own_last_index",
        ),
    ),
    _edit(
        53,
        "a majority is one too few",
        ("dledger.raft.election:majority", "voters // 2 + 1", "voters // 2"),
    ),
    _edit(
        54,
        "a node in doubt votes and leads",
        (
            f"{NODE}._may_vote",
            "if self.roster.members is None or self.damaged or self.has_hole:\n"
            "return False\n"
            "if not self.doubtful:",
            "if self.roster.members is None:\n    return False\nif True:",
        ),
    ),
    _edit(
        55,
        "a vote is given twice in a term",
        (
            LIBRARY + "._SyncObj__onMessageReceived",
            "if self.__votedForNodeId is not None:",
            "if False:",
        ),
    ),
    _edit(
        56,
        "a wiped member counts under its old name",
        (
            "dledger.raft.roster:Roster.member",
            "return members.find(name, hello.incarnation)",
            "return members.voter(name) or members.learner(name)",
        ),
        (
            "dledger.raft.roster:Roster.is_self_voter",
            "members.is_voter(self.self_id, self.identity.incarnation)",
            "members.voter(self.self_id) is not None",
        ),
    ),
    # -- leadership -------------------------------------------------------------------------
    _edit(
        61,
        "a leader acts before its own entry is applied",
        (
            f"{GROUP}._note_leadership",
            "0 < node.noop_index <= self.state.applied_index",
            "0 < node.noop_index",
        ),
    ),
    _edit(
        62,
        "queue counters outlive a reign",
        (f"{GROUP}._lose_leadership", "self._counters.clear()", "pass"),
        (f"{GROUP}._note_leadership", "self._counters.clear()", "pass"),
    ),
    _edit(
        63,
        "another term's entry at the same index counts as stored",
        (
            f"{GROUP}._resolve",
            "self.store.log.term_at(entry.index) == entry.term",
            "True",
        ),
    ),
    _edit(
        64,
        "what nobody knows is answered as not stored",
        (
            f"{GROUP}._answer",
            '"unknown" if outcome == "unknown" else "not_stored"',
            '"not_stored"',
        ),
    ),
    _edit(
        65,
        "what nobody knows is answered as stored",
        (f"{GROUP}._answer", 'if outcome == "stored":', 'if outcome != "not_stored":'),
    ),
    _edit(
        66,
        "store time follows the clock back",
        (
            f"{JOURNAL}._seal",
            "max(command.store_time_ms, log.last_store_time_ms)",
            "command.store_time_ms",
        ),
    ),
    # -- reads ------------------------------------------------------------------------------
    _edit(
        71,
        "a read does not wait for the heartbeat's echo",
        (
            "dledger.raft.barrier:ReadBarrier.take_ready",
            "0 < reads[0].beat <= confirmed and reads[0].index <= applied_index",
            "reads[0].index <= applied_index",
        ),
    ),
    _edit(
        72,
        "a read counts on a heartbeat that left before it",
        (
            "dledger.raft.barrier:ReadBarrier.ask",
            "self._reads.append(_Read(index, deadline_s, on_done))",
            "self._reads.append(_Read(index, deadline_s, on_done, max(1, self._newest_beat)))",
        ),
    ),
    _edit(
        73,
        "that there is nothing is answered without asking",
        (
            "dledger.processors.pull:PullProcessor._answer_unless_stale",
            "if found.status not in _NOTHING:",
            "if True:",
        ),
    ),
    _edit(
        74,
        "a committed offset is read before it is stored",
        (
            "dledger.processors.offsets:OffsetsProcessor.query_consumer_offset",
            'if command.ext.get("sync") not in (True, "true"):',
            "if True:",
        ),
    ),
    _edit(
        75,
        "a commit is answered before it is stored",
        (
            "dledger.processors.offsets:OffsetsProcessor._update",
            'if command.ext.get("sync") not in (True, "true"):',
            "if True:",
        ),
    ),
    # -- recovery and derived files ---------------------------------------------------------
    _edit(
        81,
        "the commit mark is believed without its chain",
        (
            f"{STORE}.__init__",
            "mark.index if mark and self.log.mark_valid else 0",
            "mark.index if mark else 0",
        ),
        (
            f"{STORE}.__init__",
            "min(committed, self.log.last_index)",
            "committed",
        ),
    ),
    _edit(
        82,
        "tables are written before the queues they count on",
        (
            "dledger.store:Checkpointing.write",
            "for flush in self.flushes:\nflush.run()",
            "",
        ),
    ),
    _edit(
        83,
        "a restart drops the last unit of every queue",
        (
            f"{STORE}._continue_from",
            "queue.truncate_to(bounds.max_offset if bounds else 0)",
            "queue.truncate_to(max(0, bounds.max_offset - 1) if bounds else 0)",
        ),
    ),
    _edit(
        84,
        "one queue file is left out of each flush",
        (
            "commitlog.consume_queue:ConsumeQueueStore.begin_flush",
            "sorted(self._dirty)",
            "sorted(self._dirty)[1:]",
        ),
    ),
    _edit(
        85,
        "names of new queue files are not made durable",
        (
            "commitlog.consume_queue:ConsumeQueueStore.begin_flush",
            "sorted(self._dirty_folders)",
            "[]",
        ),
    ),
    _edit(
        86,
        "recovery accepts an entry without its checksum",
        (
            "commitlog.recovery:Recovery._fitting_entry",
            "verify_frame(view[at : at + header.size], header, last.chain)",
            "pass",
        ),
    ),
    _edit(
        87,
        "a snapshot forgets consumer offsets",
        (
            "dledger.state.snapshot:load",
            'for group, topics in value["consumer_offsets"].items()',
            "for group, topics in ()",
        ),
    ),
    _edit(
        88,
        "a snapshot forgets how far delays were delivered",
        (
            "dledger.state.snapshot:load",
            'delay_progress=value["delay_progress"],',
            "delay_progress={},",
        ),
    ),
    # -- delays, members --------------------------------------------------------------------
    _edit(
        91,
        "an unknown delivery is made again",
        (
            "dledger.services.schedule:ScheduleMessageService._deliver_level",
            "while self._leads(term) and state.delay_progress.get(level, 0) == next_offset:\n"
            "await self._applied.wait()\n"
            "if not self._leads(term):\n"
            "return",
            "continue",
        ),
    ),
    _edit(
        92,
        "deliveries are recorded apart from their progress",
        (
            "dledger.services.delay_level:delivery_batch",
            "records.append(progress.record)\nruns.append(progress.run)",
            "",
        ),
        (
            "dledger.services.schedule:ScheduleMessageService._deliver_level",
            "applied = state.delay_progress.get(level, 0)",
            "applied = state.delay_progress[level] = to_offset",
        ),
    ),
    _edit(
        93,
        "a list of members outlives the entry that brought it",
        (
            "dledger.raft.membership:MembersLog.truncate_from",
            "if len(kept) != len(self._stack):",
            "if False:",
        ),
    ),
)

FAST: Final = (45, 51, 61, 62, 63, 66, 75, 82, 84, 85, 87, 88, 92)
"""A subset that is found within seconds; for continuous integration."""


def numbers() -> tuple[int, ...]:
    """Return the numbers of all planted bugs."""
    return tuple(mutant.number for mutant in MUTANTS)


def by_number(number: int) -> Mutant:
    """Return a planted bug.

    Raises:
        KeyError: There is none of that number.
    """
    return {mutant.number: mutant for mutant in MUTANTS}[number]


def names(chosen: Iterable[int]) -> dict[int, str]:
    """Return what is wrong with each; for the table after the hunt."""
    return {number: by_number(number).name for number in chosen}
