"""The planted bugs, each a few edits of the product, under an opaque number.

Whoever hunts them is given the number only. Where two guards cover each other, the bug needs both
gone: either one alone hides it.

A bug that a unit test finds says nothing about the simulator, and there is a test for every guard.
So most of them lie dormant until the cluster has lived a little: to a fourth term, a hundredth
entry. Unit tests do not go there, and a run without faults stays in its first term.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MEMBER: Final = "dledger.raft.member:RaftNode"
ACKS: Final = "dledger.raft.acks:PendingAcks"
CANDIDATE: Final = "dledger.raft.candidate:Candidate"
ELIGIBILITY: Final = "dledger.raft.candidate:VoteEligibility"
JOURNAL: Final = "dledger.raft.journal:CommitLogJournal"
APPEND: Final = "dledger.raft.follower"
FOLLOWER: Final = "dledger.raft.follower:Follower"
GROUP: Final = "dledger.group:Group"
PROPOSALS: Final = "dledger.proposals:Proposals"
STORE: Final = "dledger.store:ReplicaStore"
LOG: Final = "commitlog.entry_log:EntryLog"
CORE: Final = "dledger.raft.library:RaftCore"
LINKS: Final = "dledger.raft.links:Links"
SCHEDULE: Final = "dledger.services.schedule:ScheduleMessageService"
LOCKS: Final = "dledger.services.queue_locks:QueueLocks"
JUDGE: Final = "dledger.services.producer_sends:_judge"
SESSIONS: Final = "dledger.state.producer_sessions:ProducerSessions"
DECISIONS: Final = "dledger.services.transaction_decisions:TransactionDecisions"
CHECKS: Final = "dledger.services.transaction_check:TransactionCheckService"
END: Final = "dledger.processors.transactions:EndTransactionProcessor"
TIMER: Final = "dledger.services.timer:TimerMessageService"
LEADER_LOOP: Final = "dledger.services.leader_loop:LeaderLoop"
PULL: Final = "dledger.processors.pull:PullProcessor"
PULL_CHECKS: Final = "dledger.processors.pull_checks:PullChecks"
CLAIMS: Final = "dledger.services.timer_claims:TimerClaims"


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


LATE_FRAMES_COUNT: Final = (
    (
        f"{MEMBER}._step",
        "elif frame.term < self.core.term and self.guards.envelope:",
        "elif frame.term < self.core.term < 4 and self.guards.envelope:",
    ),
    (
        f"{LINKS}._deliver",
        "checked = self._node.guards.envelope",
        "checked = self._node.guards.envelope and self._node.term < 4",
    ),
)

MUTANTS: Final[tuple[Mutant, ...]] = (
    # -- guards ----------------------------------------------------------------------------
    _guards(11, "durable_before_promise"),
    _edit(12, "frames of earlier terms and connections count", *LATE_FRAMES_COUNT),
    _guards(13, "idempotent_append"),
    _edit(
        14,
        "frames of earlier terms and connections count, and appends cut what they repeat",
        *LATE_FRAMES_COUNT,
        (
            f"{APPEND}:plan_append",
            "if not guards.idempotent_append:",
            "if not guards.idempotent_append or journal.last_index > 40:",
        ),
        (
            f"{JOURNAL}.deleteEntriesFrom",
            "self._guards.idempotent_append",
            "self._guards.idempotent_append and self.last_index < 41",
        ),
    ),
    _guards(15, "one_vote_per_voter"),
    _edit(
        16,
        "a member that starts in a later term never gives up its leadership",
        (
            f"{CORE}.__init__",
            "if guards.leader_gives_up",
            "if guards.leader_gives_up and journal.getCurrentTerm() < 3",
        ),
    ),
    # -- promises before the disk ----------------------------------------------------------
    _edit(
        21,
        "a follower acknowledges before its flush",
        (
            f"{ACKS}._release_acks",
            "min(ack.verified, state.journal.stable_index)",
            "min(ack.verified, state.journal.stable_index) if state.core.term < 4 else ack.verified",
        ),
    ),
    _edit(
        22,
        "a vote leaves before it is on disk",
        (
            f"{ACKS}._release_votes",
            "vote.version > durable:",
            "vote.version > durable and state.core.term < 3:",
        ),
    ),
    _edit(
        23,
        "term and vote are not written any more",
        (
            "dledger.raft.journal:TermVote.write",
            "self._slots.store(record)",
            "self.term > 3 or self._slots.store(record)",
        ),
    ),
    _edit(
        24,
        "the vote is not part of what is written",
        (
            "dledger.raft.journal:TermVote.snapshot",
            "[self.term, self.voted_for]",
            "[self.term, self.voted_for if self.term < 8 else None]",
        ),
    ),
    _edit(
        25,
        "the term before the newest is written",
        (
            "dledger.raft.journal:TermVote.snapshot",
            "[self.term, self.voted_for]",
            "[self.term, self.voted_for] if self.term < 8 else [self.term - 1, None]",
        ),
    ),
    _edit(
        26,
        "the leader counts itself before its own flush",
        (
            f"{CORE}.__init__",
            "if guards.durable_before_promise:",
            "if guards.durable_before_promise and journal.getCurrentTerm() < 2:",
        ),
        (
            f"{CORE}.commit_index",
            "min(self._library.raftCommitIndex, self._journal.stable_index)",
            "min(self._library.raftCommitIndex, self._journal.stable_index) if self.term < 3 else self._library.raftCommitIndex",
        ),
    ),
    _edit(
        27,
        "entries are applied before they are on this disk",
        (
            f"{CORE}.commit_index",
            "min(self._library.raftCommitIndex, self._journal.stable_index)",
            "min(self._library.raftCommitIndex, self._journal.stable_index) if self.term < 3 else self._library.raftCommitIndex",
        ),
    ),
    _edit(
        28,
        "a flush that fails counts as done",
        (
            "commitlog.flush:FlushTicket.run",
            "file.flush()",
            "try:\n    file.flush()\nexcept MQError:\n    if self.last_index < 60:\n        raise",
        ),
    ),
    _edit(
        29,
        "only the newest segment is flushed",
        (
            f"{LOG}.begin_flush",
            "{segment.file: None for segment in self._dirty.values()}",
            "{segment.file: None for segment in list(self._dirty.values())[-1 if self.last_term > 2 else 0 :]}",
        ),
    ),
    _edit(
        30,
        "a new segment's name is not made durable",
        (
            f"{LOG}.begin_flush",
            "folder = self._files.new_names",
            "folder = self._files.new_names and self._ticket_number < 20",
        ),
        (
            "commitlog.allocator:Allocator.reserve_next",
            "self._files.disk.flush_dir(self._files.paths.commitlog)",
            "self._log._ticket_number > 19 or self._files.disk.flush_dir(self._files.paths.commitlog)",
        ),
    ),
    _edit(
        31,
        "a flush counts although the log was cut meanwhile",
        (
            f"{LOG}.complete_flush",
            "if ticket.generation != self.generation:",
            "if ticket.generation != self.generation and self.last_index < 25:",
        ),
    ),
    _edit(
        32,
        "a truncation leaves the durable mark where it was",
        (
            f"{LOG}._cut",
            "min(self.durable_index, last.index)",
            "min(self.durable_index, last.index) if last.index < 40 else self.durable_index",
        ),
    ),
    _edit(
        33,
        "the slots of a small file are written in place",
        (
            "commitlog.slot_file:SlotFile._write",
            "slot = 1 - self._slot",
            "slot = 1 - self._slot if self._sequence < 20 else self._slot",
        ),
        (
            "commitlog.slot_file:SlotFile._write",
            "file.flush()",
            "if self._sequence < 20:\n    file.flush()",
        ),
    ),
    _edit(
        34,
        "the vote is written once",
        (
            "dledger.raft.journal:TermVote.write",
            "range(COPIES)",
            "range(COPIES if self.term < 4 else 1)",
        ),
    ),
    # -- replication -----------------------------------------------------------------------
    _edit(
        43,
        "a follower commits what this append has not verified",
        (
            f"{APPEND}:_message",
            "min(request.commit_index, verified)",
            "min(request.commit_index, verified) if request.term < 4 else request.commit_index",
        ),
        (
            f"{LINKS}._deliver",
            "if checked and (",
            "if checked and (frame.kind is not Kind.APPEND or frame.term < 3) and (",
        ),
    ),
    _edit(
        44,
        "a follower acknowledges its own tail",
        (
            f"{APPEND}:_nothing_new",
            "return Accepted(",
            "if request.term > 3 and verified > 40:\n    verified = journal.last_index\nreturn Accepted(",
        ),
        (
            f"{LINKS}._deliver",
            "if checked and (",
            "if checked and (frame.kind is not Kind.APPEND or frame.term < 3) and (",
        ),
    ),
    _edit(
        45,
        "an entry that is there already cuts what follows",
        (
            f"{APPEND}:_strip_present",
            "for at, frame in enumerate(frames):",
            "if frames and frames[0].header.index > 20:\n    return frames\nfor at, frame in enumerate(frames):",
        ),
        (
            f"{JOURNAL}.deleteEntriesFrom",
            "if index <= self._commit_index and self._guards.idempotent_append:",
            "if index <= self._commit_index and self._guards.idempotent_append and index < 20:",
        ),
        (
            f"{APPEND}:plan_append",
            "if first <= commit:",
            "if first <= commit and first < 20:",
        ),
    ),
    _edit(
        46,
        "a heartbeat commits what its leader has not verified here",
        (
            f"{FOLLOWER}.on_heartbeat",
            "else self.acks.verified_index(peer, term)",
            "else self.acks.verified_index(peer, term) if term < 4 else state.journal.last_index",
        ),
    ),
    _edit(
        48,
        "a follower says yes to an append that does not fit",
        (
            f"{APPEND}:plan_append",
            "elif journal.term_at(prev) != request.prev_term:",
            "elif journal.term_at(prev) != request.prev_term and request.term < 9:",
        ),
        (
            f"{APPEND}:_check_chain",
            "if not frames:",
            "if not frames or frames[-1].header.term > 8:",
        ),
    ),
    _edit(
        49,
        "a conflict is seen one entry too late",
        (
            f"{APPEND}:_strip_present",
            "header.index > journal.last_index or journal.term_at(header.index) != header.term",
            "header.index > journal.last_index or (header.index < 20 and journal.term_at(header.index) != header.term)",
        ),
        (
            f"{APPEND}:_strip_present",
            "if journal.log.chain_at(header.index) != header.chain:",
            "if journal.log.chain_at(header.index) != header.chain and header.index < 20:",
        ),
    ),
    # -- elections -------------------------------------------------------------------------
    _edit(
        51,
        "a vote is given to a shorter log",
        (
            f"{CANDIDATE}.on_vote",
            '"last_log_index": last_index,',
            '"last_log_index": last_index if term < 4 else 1 << 60,',
        ),
        (
            f"{CANDIDATE}.on_vote",
            '"last_log_term": last_term,',
            '"last_log_term": last_term if term < 4 else 1 << 60,',
        ),
        (
            f"{CANDIDATE}.on_pre_vote",
            "last_term, last_index, *own_last",
            "last_term if term < 4 else 1 << 60, last_index, *own_last",
        ),
    ),
    _edit(
        52,
        "logs are compared by length alone",
        (
            f"{CANDIDATE}.on_vote",
            '"last_log_term": last_term,',
            '"last_log_term": last_term if term < 4 else state.core.term,',
        ),
        (
            f"{CANDIDATE}.on_pre_vote",
            "last_term, last_index, *own_last",
            "last_term if term < 4 else own_last[0], last_index, *own_last",
        ),
    ),
    _edit(
        54,
        "a node in doubt votes and leads",
        (
            f"{ELIGIBILITY}.may_vote",
            "if roster.members is None or self.damaged or self.state.has_hole:",
            "if roster.members is None or (self.damaged or self.state.has_hole) and self.state.core.term < 3:",
        ),
        (
            f"{ELIGIBILITY}.may_vote",
            "if not self.doubtful:",
            "if not self.doubtful or self.state.core.term > 2:",
        ),
    ),
    _edit(
        55,
        "a vote is given twice in a term",
        (
            f"{CANDIDATE}.on_vote",
            "sticky = self.timer",
            'if state.core.term > 3:\n    vars(state.core._library)["_SyncObj__votedForNodeId"] = None\nsticky = self.timer',
        ),
    ),
    # -- leadership ------------------------------------------------------------------------
    _edit(
        61,
        "a leader acts before its own entry is applied",
        (
            f"{GROUP}._note_leadership",
            "0 < node.state.noop_index <= self.state.applied_index",
            "(0 < node.state.noop_index <= self.state.applied_index or node.term > 3)",
        ),
    ),
    _edit(
        62,
        "queue counters outlive a reign",
        (
            f"{GROUP}._lose_leadership",
            "self._offsets.clear()",
            "if self.node.term < 4:\n    self._offsets.clear()",
        ),
        (
            f"{GROUP}._note_leadership",
            "self._offsets.clear()",
            "if node.term < 4:\n    self._offsets.clear()",
        ),
    ),
    _edit(
        63,
        "another term's entry at the same index counts as stored",
        (
            f"{PROPOSALS}.resolve",
            "self.store.log.term_at(entry.index) == entry.term",
            "self.store.log.term_at(entry.index) == entry.term or entry.term > 2",
        ),
    ),
    _edit(
        64,
        "what nobody knows is answered as not stored",
        (
            f"{PROPOSALS}._answer",
            '"unknown" if outcome == "unknown" else "not_stored"',
            '"unknown" if outcome == "unknown" and self.node.term < 4 else "not_stored"',
        ),
    ),
    _edit(
        65,
        "what nobody knows is answered as stored",
        (
            f"{PROPOSALS}._answer",
            'if outcome == "stored":',
            'if outcome == "stored" or outcome == "unknown" and self.node.term > 3:',
        ),
    ),
    _edit(
        66,
        "store time follows the clock back",
        (
            f"{JOURNAL}._seal",
            "max(command.store_time_ms, log.last_store_time_ms)",
            "max(command.store_time_ms, log.last_store_time_ms) if term < 9 else command.store_time_ms",
        ),
    ),
    _edit(
        67,
        "what is in flight when a reign ends is answered as not stored",
        (
            f"{GROUP}._lose_leadership",
            "while self._pending:",
            'while self._in_flight and self.node.term > 3:\n    self._answer(self._next_in_flight(), "not_stored")\nwhile self._pending:',
        ),
    ),
    _edit(
        68,
        "a leader answers before a majority has it",
        (
            f"{GROUP}._on_settled",
            "if not self.settings.sync_replication:",
            "if not self.settings.sync_replication or self.node.term > 3:",
        ),
    ),
    _edit(
        69,
        "a start takes everything in the log for committed",
        (
            f"{JOURNAL}.__init__",
            "self._commit_index = restored_commit_index",
            "self._commit_index = restored_commit_index if log.last_term < 3 else log.durable_index",
        ),
    ),
    # -- reads -----------------------------------------------------------------------------
    _edit(
        71,
        "a read does not wait for the heartbeat's echo",
        (
            "dledger.raft.read_index:ReadIndex.pop_ready",
            "0 < reads[0].heartbeat <= confirmed and",
            "(0 < reads[0].heartbeat <= confirmed or applied_index > 30) and",
        ),
    ),
    _edit(
        73,
        "that there is nothing is answered without asking",
        (
            "dledger.processors.pull:PullProcessor._answer_unless_stale",
            "if found.status not in _NOTHING:",
            "if found.status not in _NOTHING or self._group.term > 3:",
        ),
    ),
    _edit(
        74,
        "a committed offset is read before it is stored",
        (
            "dledger.processors.offsets:OffsetsProcessor.query_consumer_offset",
            'if command.ext.get("sync") not in (True, "true"):',
            'if command.ext.get("sync") not in (True, "true") or self._group.term > 3:',
        ),
    ),
    _edit(
        75,
        "a commit is answered before it is stored",
        (
            "dledger.processors.offsets:OffsetsProcessor.update_consumer_offset",
            'if command.ext.get("sync") not in (True, "true"):',
            'if command.ext.get("sync") not in (True, "true") or group.term > 3:',
        ),
    ),
    # -- recovery and derived files --------------------------------------------------------
    _edit(
        81,
        "a refill takes queues for made that it has thrown away",
        (
            f"{STORE}._refill_from",
            "self.derived_index = self.log.first_index - 1",
            "self.derived_index = self.log.first_index - 1 if self.log.last_term < 2 else self.log.last_index",
        ),
    ),
    _edit(
        82,
        "tables are written before the queues they count on",
        (
            "dledger.checkpointing:Checkpointing._write",
            "for flush in self.flushes:\nflush.run()",
            "for flush in self.flushes:\n    if self.index < 60:\n        flush.run()",
        ),
    ),
    _edit(
        83,
        "a restart drops the last unit of every queue",
        (
            f"{STORE}._continue_from",
            "queue.truncate_to(bounds.max_offset if bounds else 0)",
            "queue.truncate_to(bounds.max_offset - (bounds.max_offset > 20) if bounds else 0)",
        ),
    ),
    _edit(
        84,
        "one queue file is left out of each flush",
        (
            "commitlog.consume_queue:ConsumeQueueStore.begin_flush",
            "sorted(self._dirty)",
            "sorted(self._dirty)[len(self._files) > 3 :]",
        ),
    ),
    _edit(
        85,
        "names of new queue files are not made durable",
        (
            "commitlog.consume_queue:ConsumeQueueStore.begin_flush",
            "sorted(self._dirty_folders)",
            "sorted(self._dirty_folders) if len(self._files) < 4 else []",
        ),
    ),
    _edit(
        86,
        "recovery accepts an entry without its checksum",
        (
            "commitlog.recovery:Recovery._fitting_entry",
            "verify_frame(segment.read_at(position, header.size), header, last.chain)",
            "if header.index < 120 and header.term < 4:\n    verify_frame(segment.read_at(position, header.size), header, last.chain)",
        ),
    ),
    _edit(
        87,
        "a snapshot forgets consumer offsets",
        (
            "dledger.state.snapshot:load",
            'for group, topics in value["consumer_offsets"].items()',
            'for group, topics in value["consumer_offsets"].items()\nif value["applied_index"] < 100',
        ),
    ),
    _edit(
        88,
        "a snapshot forgets how far delays were delivered",
        (
            "dledger.state.snapshot:load",
            'delay_progress=value["delay_progress"],',
            'delay_progress=value["delay_progress"] if value["applied_index"] < 100 else {},',
        ),
    ),
    _edit(
        89,
        "entries that share a bad sector are written one by one",
        (
            "commitlog.log_repair:LogRepair.write_copies",
            "if runs and self._continues(runs[-1][0], header):",
            "if runs and header.index < 40 and self._continues(runs[-1][0], header):",
        ),
    ),
    # -- delays, members, retention --------------------------------------------------------
    _edit(
        91,
        "an unknown delivery is made again",
        (
            f"{LEADER_LOOP}.store",
            "index = None",
            'if self.name == "delay_levels" and term > 2:\n    return Fate.NOT_STORED\nindex = None',
        ),
    ),
    _edit(
        92,
        "deliveries are recorded apart from their progress",
        (
            "dledger.services.delay_level:delivery_batch",
            "records.append(progress.record)\nruns.append(progress.run)",
            "if from_offset < 13:\n    records.append(progress.record)\n    runs.append(progress.run)",
        ),
        (
            f"{SCHEDULE}._deliver_level",
            "applied = state.delay_progress.get(level, 0)",
            "if next_offset > 12:\n    state.delay_progress[level] = to_offset\napplied = state.delay_progress.get(level, 0)",
        ),
    ),
    _edit(
        93,
        "a list of members outlives the entry that brought it",
        (
            "dledger.raft.membership:MembersLog.truncate_from",
            "if len(kept) != len(self._stack):",
            "if len(kept) != len(self._stack) and index < 40:",
        ),
    ),
    _edit(
        94,
        "a delayed message is delivered two seconds early",
        (
            f"{SCHEDULE}._deliver_level",
            "if wait_s >= LEAST_SLEEP_S:",
            "if wait_s >= (LEAST_SLEEP_S if term < 4 else 2.0):",
        ),
    ),
    _edit(
        95,
        "a new leader begins one delivery too early",
        (
            f"{SCHEDULE}._deliver_level",
            "next_offset = state.delay_progress.get(level, 0)\nseen",
            "next_offset = max(0, state.delay_progress.get(level, 0) - (level > 1 and term > 3))\nseen",
        ),
    ),
    _edit(
        96,
        "retention takes what a delayed message still needs",
        (
            "dledger.services.retention:RetentionService._limit_position",
            "if offset < state.max_offset(SCHEDULE_TOPIC, queue_id):",
            "if offset < state.max_offset(SCHEDULE_TOPIC, queue_id) and self._group.term < 3:",
        ),
    ),
    # -- queue locks -----------------------------------------------------------------------
    _edit(
        801,
        "a new leader honours no lease of the one before",
        (
            f"{LOCKS}._leads",
            "self._leases.begin(self._clock.monotonic())",
            "self._leases.begin(self._clock.monotonic() - self._leases.lease_s * (term > 2))",
        ),
    ),
    _edit(
        802,
        "a renewal is answered and forgotten",
        (
            f"{LOCKS}._work",
            "self._leases.renew(decision.renewed)",
            "self._leases.renew(decision.renewed if self._term < 3 else {})",
        ),
    ),
    _edit(
        804,
        "an old token is taken for a good one",
        (
            f"{LOCKS}.refuses",
            "return lock is None or lock.token != token",
            "return lock is None or (lock.token != token and self._term < 3)",
        ),
    ),
    _edit(
        805,
        "who takes over a lock gets the token of the one before",
        (
            "dledger.state.apply:_apply_change",
            "apply_queue_locks(tables.queue_locks, change, header.index)",
            "apply_queue_locks(tables.queue_locks, change, header.index)\nfor grant in change.grants:\n    if header.term > 2 and grant.replaces:\n        lock = type(tables.queue_locks[grant.key])(grant.client_id, grant.replaces)\n        tables.queue_locks[grant.key] = lock",
        ),
    ),
    _edit(
        806,
        "a snapshot forgets who holds which queue",
        (
            "dledger.state.snapshot:load",
            'locks_from_state(value.get("queue_locks", {}))',
            'locks_from_state(value.get("queue_locks", {}) if value["applied_index"] < 100 else {})',
        ),
    ),
    # -- transactions ----------------------------------------------------------------------
    _edit(
        721,
        "the decision is not in the entry of its message",
        (
            f"{DECISIONS}.decide",
            "self._group.propose(_batch(records), done)",
            "if message is not None and self._term > 2:\n"
            "    decision_only = _batch(records[-1:])\n"
            "    def message_done(proposed):\n"
            "        try:\n"
            "            self._group.propose(decision_only, done)\n"
            "            self._group.kick()\n"
            "        except Exception:\n"
            "            done(Proposed('unknown'))\n"
            "    self._group.propose(_batch(records[:-1]), message_done)\n"
            "else:\n"
            "    self._group.propose(_batch(records), done)",
        ),
    ),
    _edit(
        722,
        "a decision in flight is forgotten",
        (
            f"{DECISIONS}._pending",
            "return self._in_flight.get(half_offset)",
            "return self._in_flight.get(half_offset) if self._term < 3 else None",
        ),
    ),
    _edit(
        723,
        "a half message is visible at once",
        (
            "dledger.processors.send:SendProcessor._encode_one",
            "and is_half(properties)",
            "and self._group.term < 3\nand is_half(properties)",
        ),
    ),
    _edit(
        724,
        "a rollback brings the message into the world",
        (
            f"{END}._decide",
            "if decision is TransactionDecision.COMMIT:",
            "if decision is TransactionDecision.COMMIT or self._group.term > 2:",
        ),
    ),
    _edit(
        725,
        "producers are asked without being counted",
        (
            f"{CHECKS}._count_and_ask",
            "counts = tuple((half_offset, checks) for half_offset, _, checks in to_ask)",
            "counts = tuple(\n"
            "    (half_offset, checks) for half_offset, _, checks in to_ask if term < 3\n"
            ")",
        ),
    ),
    _edit(
        726,
        "a snapshot forgets which transactions are open",
        (
            "dledger.state.snapshot:load",
            'value.get("transactions", {})',
            'value.get("transactions", {}) if value["applied_term"] < 3 else {}',
        ),
    ),
    _edit(
        727,
        "what is given up is copied nowhere",
        (
            f"{CHECKS}._decide_given_up",
            "half_offset, TransactionDecision.GIVEN_UP, done, (copy.record, run), create",
            "half_offset, TransactionDecision.GIVEN_UP, done,\n"
            "(copy.record, run) if self._group.term < 3 else None, create",
        ),
    ),
    _edit(
        728,
        "check-back does not look at decisions in flight",
        (
            f"{CHECKS}._look_at",
            "or not self._decisions.is_open(half_offset):",
            "or (not self._decisions.is_open(half_offset) and term < 3):",
        ),
    ),
    # -- messages with a time of their own, and those that are sent back --------------------
    _edit(
        701,
        "a timer message is delivered two seconds early",
        (
            f"{TIMER}._deliver",
            "now_ms = self._clock.wall_ms()",
            "now_ms = self._clock.wall_ms() + (2000 if self._group.term > 2 else 0)",
        ),
    ),
    _edit(
        702,
        "what a new leader does not know is not delivered: it begins with what is newest",
        (
            f"{TIMER}._begin",
            "self._loaded_to = self._max_offset if lowest is None else lowest",
            "self._loaded_to = self._max_offset if lowest is None or self._group.term > 2 else lowest",
        ),
    ),
    _edit(
        703,
        "deliveries are stored without the note that they are done",
        (
            f"{TIMER}._store",
            "TimersChange(done=tuple(chosen))",
            "TimersChange(done=tuple(chosen) if self._group.term < 3 else ())",
        ),
    ),
    _edit(
        704,
        "a recall is acknowledged and does nothing",
        (
            "dledger.processors.timer_sends:RecallProcessor.handle",
            "TimersChange(recalled=message.offsets)",
            "TimersChange(recalled=message.offsets if group.term < 3 else ())",
        ),
    ),
    _edit(
        705,
        "a snapshot forgets which timer messages wait",
        (
            "dledger.state.snapshot:load",
            'value.get("timers", {"pieces": {}, "recalled": []})',
            'value.get("timers", {"pieces": {}, "recalled": []}) if value["applied_index"] < 100 else {"pieces": {}, "recalled": []}',
        ),
    ),
    _edit(
        706,
        "a delivery whose end is unknown is made again",
        (
            f"{LEADER_LOOP}.store",
            "index = None",
            'if self.name == "timer" and term > 2:\n    return Fate.NOT_STORED\nindex = None',
        ),
    ),
    _edit(
        710,
        "a message is counted once, however often it is given back",
        (
            "dledger.processors.send_back:SendBackProcessor._retry",
            "queue_id = self._rng.randrange(queues)",
            "queue_id = self._rng.randrange(queues)\nif self._group.term > 2:\n    record.reconsume_times = 0",
        ),
    ),
    _edit(
        711,
        "a message that is given back is acknowledged whether it is stored or not",
        (
            "dledger.processors.send_back:SendBackProcessor.handle",
            "done = answer_when_done(connection, command, group)",
            "answer = answer_when_done(connection, command, group)\n\ndef done(proposed):\n    if group.term > 2:\n        connection.reply(command, response_to(command))\n    else:\n        answer(proposed)\n",
        ),
    ),
    _edit(
        712,
        "a message is given up one try too late",
        (
            "dledger.processors.send_back:SendBackProcessor.handle",
            "record.reconsume_times >= most",
            "record.reconsume_times >= most + (group.term > 2)",
        ),
    ),
    # -- filters ---------------------------------------------------------------------------
    _edit(
        831,
        "a held pull that is looked at again begins one too late",
        (
            f"{PULL}._try_again",
            "pull.scan_from = found.next_begin_offset",
            "pull.scan_from = found.next_begin_offset + (self._group.term > 2)",
        ),
    ),
    _edit(
        832,
        "of several tags only one counts",
        (
            f"{PULL_CHECKS}._wanted",
            "codes = parse_tags(header.subscription)",
            "codes = parse_tags(header.subscription)\nif codes is not None and self._group.term > 2:\n    codes = codes[:1]",
        ),
    ),
    _edit(
        833,
        "a pull with an expression goes on one too far",
        (
            f"{PULL}._judged",
            "return judge(self._group, units, limits, wants)",
            "found = judge(self._group, units, limits, wants)\nfound.next_begin_offset += self._group.term > 2\nreturn found",
        ),
    ),
    # -- dates -----------------------------------------------------------------------------
    _edit(
        841,
        "a leader stamps by its own date, whatever the others say",
        (
            f"{PROPOSALS}._seal",
            "self.node.clocks.store_time_ms()",
            "self.node.clocks.store_time_ms() if self.node.journal.last_index < 60 else self._clock.wall_ms()",
        ),
    ),
    # -- push consumers --------------------------------------------------------------------
    _edit(
        172,
        "a pull that failed is taken for one that found something",
        (
            "client.consumer.owned_queues:Reading._pull",
            'owned.count("pull_failed")',
            'owned.count("pull_failed")\nmessages.next_offset += messages.next_offset > 20',
        ),
    ),
    _edit(
        173,
        "a queue that was let go never comes back",
        (
            "client.consumer.owned_queues:OwnedQueues._leave",
            "self._leaving.pop(owned.queue, None)",
            "(owned.messages is not None and owned.messages.next_offset > 20) or self._leaving.pop(owned.queue, None)",
        ),
    ),
    # -- idempotent producers ----------------------------------------------------------------
    _edit(
        811,
        "what is stored of an idempotent producer is not looked up",
        (
            JUDGE,
            "where = stored.get(sequence)",
            "where = stored.get(sequence) if session is None or session.epoch < 30 else None",
        ),
        (
            f"{SESSIONS}.note",
            "if sequence in session.stored:",
            "if sequence in session.stored and epoch < 30:",
        ),
    ),
    _edit(
        812,
        "a repetition does not wait for the attempt that is on its way",
        (
            JUDGE,
            "same = in_flight.get(sequence)",
            "same = in_flight.get(sequence) if stamp.epoch < 30 else None",
        ),
        (
            f"{SESSIONS}.note",
            "if sequence in session.stored:",
            "if sequence in session.stored and epoch < 30:",
        ),
    ),
    _edit(
        813,
        "a snapshot forgets the sessions of producers",
        (
            "dledger.state.snapshot:load",
            'value.get("producers", [])',
            'value.get("producers", []) if value["applied_index"] < 60 else []',
        ),
    ),
    _edit(
        814,
        "an idempotent producer repeats under a new sequence",
        (
            "client.producer.lane:HeldSend.stamp",
            "return self.session.stamp(self.sequence)",
            "if self.sent and self.session.epoch > 30 and self.sequence > 20:\n    self.sequence = self.session.begin()\nreturn self.session.stamp(self.sequence)",
        ),
    ),
    _edit(
        815,
        "a repetition is told the offset after that of the first attempt",
        (
            "dledger.processors.send_records:SendRecordsProcessor._repeat",
            "tuple(found[at].queue_offset for at in starts)",
            "tuple(found[at].queue_offset + (self._group.term > 2) for at in starts)",
        ),
    ),
    _edit(
        816,
        "sends are stored without the note whose they are",
        (
            "dledger.processors.send_records:SendRecordsProcessor._propose",
            "heads.append(state_record(ProducerSendChange(*stamp, tuple(sorted(refused)))))",
            "heads += [state_record(ProducerSendChange(*stamp, tuple(sorted(refused))))][self._group.term > 2 :]",
        ),
    ),
)

PRESETS: Final = {
    **dict.fromkeys(range(801, 807), "locks"),
    **dict.fromkeys(range(811, 817), "idempotent"),
    **dict.fromkeys(range(721, 729), "transactions"),
    **dict.fromkeys(range(701, 707), "timers"),
    **dict.fromkeys(range(710, 713), "retries"),
    **dict.fromkeys(range(172, 174), "push"),
    **dict.fromkeys(range(831, 834), "filters"),
    841: "years",
}
"""Workloads that a hunt plays for bugs that drawn ones do not come to."""

FAULTS: Final = {89: "bad-sectors"}
"""Faults that a hunt draws from for bugs that need what is not drawn otherwise."""

FAST: Final = (13, 23, 26, 30, 45, 49, 61, 63, 65, 68, 69, 75, 81, 82, 85, 87, 88, 92, 94, 832)
"""A subset that is found within seconds; for continuous integration."""

IN_REAL_BROKERS: Final = (49, 61, 62, 63, 67, 68, 69, 75, 88, 92, 94, 95)
"""Those that the first plan of kills and cuts brings out in real processes; what needs one
instant of many, or luck, is for the simulator."""


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
