"""A broker group of one node without consensus: real log, real queues, real apply, on command."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

from dledger.broker_errors import NotLeaderError, UnknownOutcomeError
from dledger.commitlog.consume_queue_store import ConsumeQueueStore
from dledger.commitlog.derive import DEFAULT_DELAY_MS, derive
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import (
    ENTRY_HEADER_BYTES,
    SIZE_FIELD_BYTES,
    RecordBatch,
    Run,
    parse_header,
    seal_entry,
)
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import LocalProtocolError, MQError
from dledger.commitlog.key_index import KeyIndex
from dledger.commitlog.record import encode_record, pack_host
from dledger.commitlog.store_paths import StorePaths
from dledger.group_api import (
    AppliedListener,
    OffsetCommit,
    OnBarrier,
    OnDone,
    Proposed,
    ServiceCounts,
)
from dledger.proposals import PendingCommits, PendingQueueOffsets
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.state.apply import Applied, apply_entry
from dledger.state.state_record import state_batch, with_hosts
from dledger.state.table import StateChange
from dledger.state.tables import StateTables
from dledger.state.topics import builtin_groups, builtin_topics
from dledger.testing.doubles import ManualClock, VirtualClock
from dledger.waiting import Future, Turns

SEGMENT_BYTES = 1 << 20
STORE_HOST = pack_host("127.0.0.1", 10911)
LEADER = "127.0.0.1:10911"
CLUSTER, BROKER = "DefaultCluster", "broker-a"
GROUP_IDENTITY = "0123456789abcdef" * 2


@dataclass
class Term:
    """A leadership."""

    term: int


@dataclass
class _Waiting:
    batch: RecordBatch
    on_done: OnDone
    is_applied: bool
    settled: Sequence[OnDone]
    commits: Sequence[OffsetCommit]

    @property
    def is_conditional(self) -> bool:
        return any(commit.expected is not None for commit in self.commits)

    def end(self, error: MQError | None = None) -> None:
        """Let it end as not stored."""
        for each in (*self.settled, self.on_done):
            each(Proposed("not_stored", error=error))


@dataclass
class _Appended:
    index: int
    proposals: list[tuple[OnDone, Proposed]] = field(default_factory=list)
    settled: list[OnDone] = field(default_factory=list)


def empty_tables() -> StateTables:
    """Return the tables of a group that has applied nothing."""
    return StateTables(
        builtin_topics=builtin_topics(CLUSTER, BROKER), builtin_groups=builtin_groups()
    )


class FakeGroup:
    """Implements `dledger.group_api.BrokerGroup`.

    Proposals wait until `settle` appends and applies them, all in one entry. A test may append
    without applying, or end the leadership in between.
    """

    def __init__(
        self,
        root: Path,
        clock: ManualClock | VirtualClock,
        *,
        delay_ms: Mapping[int, int] = DEFAULT_DELAY_MS,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        disk = OsDisk()
        paths = StorePaths(str(root))
        self.log = EntryLog.open(disk, str(root), segment_bytes=segment_bytes)
        self.queues = ConsumeQueueStore(disk, paths.consumequeue, units_per_file=4096)
        self.key_index = KeyIndex(disk, paths.index)
        self.state = empty_tables()
        self.clock = clock
        self.delay_ms = delay_ms
        self.leadership: Term | None = Term(1)
        self.leader_address: str | None = LEADER
        self.store_host = STORE_HOST
        self.group_identity = GROUP_IDENTITY
        self.membership_proof = ""
        self.term = 1
        self.readable = True
        self.service_counts = ServiceCounts()
        self.has_other_members = True
        self.on_applied: list[AppliedListener] = []
        self.waiting_reads: list[Callable[[], int]] = []
        self.turns = Turns(self.kick)
        self.refuse: MQError | None = None
        self.commit_latency_s = 0.001
        # As with ASYNC_MASTER: answers that need no apply come when appended.
        self.answers_early = False
        # No majority answers: what is appended stays unapplied until the test lets it apply.
        self.stalled = False
        self.kicks = 0
        self.damage_reports: list[tuple[int, int]] = []
        # Off: barriers wait for `pass_barriers` or the end of the leadership.
        self.barriers_pass = True
        self.barriers: list[OnBarrier] = []
        self.applied: list[Applied] = []
        self._offsets = PendingQueueOffsets(self.state)
        self._commits = PendingCommits(self.state)
        self._waiting: list[_Waiting] = []
        self._appended: list[_Appended] = []

    @property
    def store_time_ms(self) -> int:
        return max(self.clock.wall_ms(), self.log.last_store_time_ms)

    def status(self) -> Mapping[str, Any]:
        return {"role": "leader" if self.leadership else "follower", "term": self.term}

    @property
    def waiting(self) -> int:
        """How many proposals are not appended yet."""
        return len(self._waiting)

    def catch_up(self) -> None:
        """Nothing: applying is left to the test."""

    def propose(
        self,
        batch: RecordBatch,
        on_done: OnDone,
        *,
        is_applied: bool = True,
        settled: Sequence[OnDone] = (),
        commits: Sequence[OffsetCommit] = (),
    ) -> None:
        if self.leadership is None:
            raise NotLeaderError(self.leader_address, self.term)
        if self.refuse is not None:
            raise self.refuse
        batch = with_hosts(batch, self.store_host)
        size = len(memoryview(batch.records)) + SIZE_FIELD_BYTES * len(batch.sizes)
        if size + ENTRY_HEADER_BYTES > self.log.max_entry_bytes:
            raise LocalProtocolError(f"a batch of {size} bytes fits no entry")
        self._waiting.append(_Waiting(batch, on_done, is_applied, settled, commits))

    def report_damage(self, position: int, size: int) -> None:
        self.damage_reports.append((position, size))

    def read_barrier(self, on_done: OnBarrier) -> None:
        if self.leadership is None:
            raise NotLeaderError(self.leader_address, self.term)
        if self.barriers_pass:
            on_done(None)
        else:
            self.barriers.append(on_done)

    def pass_barriers(self, error: NotLeaderError | None = None) -> None:
        """Let reads that wait go on, or fail."""
        barriers, self.barriers = self.barriers, []
        for on_done in barriers:
            on_done(error)

    def kick(self) -> None:
        self.kicks += 1

    async def submit(self, batch: RecordBatch, settled: Sequence[OnDone] = ()) -> Proposed:
        done = Future[Proposed]()
        self.propose(batch, done, settled=settled)
        await trio.sleep(self.commit_latency_s)
        self.append()
        if not self.stalled:
            self.apply()
        proposed = await done.wait()
        if proposed.outcome == "unknown":
            raise UnknownOutcomeError("unknown")
        if proposed.outcome == "not_stored":
            raise NotLeaderError(self.leader_address, self.term)
        return proposed

    def settle(self) -> None:
        """Append everything that waits as one entry, apply it, answer."""
        self.append()
        self.apply()

    def append(self) -> None:
        """Append everything that waits as one entry; what expects a commit begins another one."""
        waiting: list[_Waiting] = []
        while self._waiting and not (waiting and self._waiting[0].is_conditional):
            item = self._waiting.pop(0)
            error = self._commits.refusal_of(item.commits)
            if error is None:
                waiting.append(item)
            else:
                item.end(error)
        if not waiting:
            return
        batches = [item.batch for item in waiting]
        runs = [run for batch in batches for run in batch.runs]
        offsets, following = self._offsets.plan(runs)
        self._offsets.keep(following)
        sizes = [int(size) for batch in batches for size in batch.sizes]
        frame_bytes = ENTRY_HEADER_BYTES + 4 * len(sizes) + sum(sizes)
        position = self.log.place(frame_bytes)
        store_time_ms = max(self.log.last_store_time_ms, self.clock.wall_ms())
        frame = seal_entry(
            batches,
            offsets,
            index=self.log.last_index + 1,
            term=self.term,
            position=position,
            prev_chain=self.log.last_chain,
            store_time_ms=store_time_ms,
            store_host=self.store_host,
        )
        header = self.log.append(frame)
        self._commits.keep(header.index, [commit for item in waiting for commit in item.commits])
        entry, early = _Appended(header.index), list[tuple[OnDone, Proposed]]()
        at = header.position + header.body_start
        run_number = 0
        for item in waiting:
            count, heads = len(item.batch.runs), item.batch.heads
            proposed = Proposed(
                "stored",
                tuple(offsets[run_number + heads : run_number + count]),
                at + int(item.batch.sizes[:heads].sum()),
                store_time_ms,
                header.index,
                self.term,
            )
            entry.settled += item.settled
            waits = item.is_applied or not self.answers_early
            (entry.proposals if waits else early).append((item.on_done, proposed))
            run_number += count
            at += int(item.batch.sizes.sum())
        self._appended.append(entry)
        for on_done, proposed in early:
            on_done(proposed)
        self.append()

    def apply(self) -> None:
        """Apply every appended entry and answer its proposers."""
        for index in range(self.state.applied_index + 1, self.log.last_index + 1):
            frame = self.log.frame(index)
            header = parse_header(frame)
            derived = derive(frame, header, delay_ms=self.delay_ms)
            applied = apply_entry(self.state, frame, header, derived)
            self.key_index.put(index, derived.key_hashes, derived.key_phy_offsets)
            for item in applied.units:
                self.queues.queue(item.topic, item.queue_id).put(item.first, item.units)
            for topic in applied.deleted_topics:
                self.queues.delete_topic(topic)
            self._offsets.forget_topics(applied.deleted_topics)
            self._commits.applied(index)
            self.applied.append(applied)
            while self._appended and self._appended[0].index <= index:
                entry = self._appended.pop(0)
                for settled in entry.settled:
                    settled(Proposed("stored"))
                for on_done, proposed in entry.proposals:
                    on_done(proposed)
            for listener in list(self.on_applied):
                listener(applied.touched)

    def time_out(self) -> None:
        """Let proposers of appended entries give up waiting while the leadership goes on."""
        for entry in self._appended:
            proposals, entry.proposals = entry.proposals, []
            for on_done, _ in proposals:
                on_done(Proposed("unknown"))

    def fail_waiting(self, error: MQError) -> None:
        """Let what is not appended yet end as not stored, while the leadership goes on."""
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            item.end(error)

    def step_down(self, leader: str | None = None) -> None:
        """End the leadership: what waits is not stored, what is appended is unknown."""
        self.leadership = None
        self.leader_address = leader
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            item.end()
        self.time_out()
        self.pass_barriers(NotLeaderError(leader, self.term))

    def lead(self) -> None:
        """Win a new term; what was appended, and is in the log still, turns out to be committed."""
        self.apply()
        lost, self._appended = self._appended, []
        for settled in (each for entry in lost for each in entry.settled):
            settled(Proposed("not_stored"))
        self.term += 1
        self.leadership = Term(self.term)
        self.leader_address = LEADER
        self._offsets = PendingQueueOffsets(self.state)

    def store(self, *changes: StateChange) -> None:
        """Let changes of the state be in the log and applied, in one entry."""
        self.propose(state_batch(*changes), lambda _: None)
        self.settle()

    def put(self, topic: str, queue_id: int, *bodies: bytes, properties: bytes = b"") -> None:
        """Store messages at once, whatever processors would say."""
        records = [
            encode_record(topic=topic, queue_id=queue_id, body=body, properties=properties)
            for body in bodies
        ]
        self.propose(batch_of(records, Run(topic, queue_id, len(records))), lambda _: None)
        self.settle()

    def close(self) -> None:
        """Give the files back."""
        self.queues.close()
        self.log.close()


def batch_of(records: list[bytes], *runs: Run) -> RecordBatch:
    """Return encoded records as a batch."""
    return RecordBatch(
        b"".join(records), np.array([len(record) for record in records], np.uint32), runs
    )


@dataclass(eq=False)
class FakeConnection:
    """Stands for a client's connection; keeps what was answered and asked."""

    peer_address: tuple[str, int] = ("10.1.2.3", 4567)
    attributes: dict[str, Any] = field(default_factory=dict)
    on_close: list[Callable[[Any], None]] = field(default_factory=list)
    replies: list[tuple[RemotingCommand, RemotingCommand]] = field(default_factory=list)
    asked: list[RemotingCommand] = field(default_factory=list)
    closed: str = ""
    heartbeats: int = 0
    when_answered_: dict[int, tuple[RemotingCommand, Callable[[RemotingCommand], None]]] = field(
        default_factory=dict
    )

    def note_heartbeat(self) -> None:
        self.heartbeats += 1

    def when_answered(
        self, asked: RemotingCommand, on_response: Callable[[RemotingCommand], None]
    ) -> None:
        self.when_answered_[id(asked)] = (asked, on_response)

    def answered(self, asked: RemotingCommand, response: RemotingCommand) -> None:
        """Let those know that wait for the answer."""
        if noted := self.when_answered_.pop(id(asked), None):
            noted[1](response)

    def reply(self, asked: RemotingCommand, response: RemotingCommand) -> bool:
        self.answered(asked, response)
        self.replies.append((asked, response))
        return True

    def invoke_oneway(self, command: RemotingCommand) -> None:
        self.asked.append(command)

    def close(self, reason: str = "closed") -> None:
        self.closed = reason
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            callback(self)

    @property
    def reply_(self) -> RemotingCommand:
        """The only answer so far."""
        ((_, response),) = self.replies
        return response


def over_the_wire(command: RemotingCommand) -> RemotingCommand:
    """Return *command* as the other side reads it."""
    command.flag &= ~1
    (received,) = FrameDecoder().feed(encode_command(command))
    return received
