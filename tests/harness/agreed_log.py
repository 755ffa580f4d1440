"""What a group has agreed on, written down by hand: entries, queues and keys, one list each.

The lists are made from the documents alone (docs/reference/formats.md, docs/internals/state.md):
records are decoded one by one. Snapshots, and tables to compare with, are those of a leader's own
store, which never stops.
"""

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path

from dledger.commitlog.entry import KIND_RECORDS, parse_header, record_starts
from dledger.commitlog.mark import Anchor
from dledger.commitlog.properties import get_property
from dledger.commitlog.record import checked_body, decode_record
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.snapshot import snapshot
from dledger.state.state_record import (
    FloorChange,
    QueueFloorsChange,
    TopicsChange,
    decode_change,
    state_batch,
)
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.expired import EXPIRED
from tests.harness.replica_folders import Writer
from tests.harness.replica_folders import settings as small

Key = tuple[str, int]
"""Topic and queue id."""


class LeaderLog(Writer):
    """The log of whichever member leads; another leader continues from an earlier entry."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.states: dict[int, dict[str, object]] = {}
        self.floors = {0: 1}
        self.note()

    def note(self) -> None:
        """Remember the end of the log, to be able to come back to it."""
        kept = ("term", "index", "chain", "end", "time_ms")
        self.states[self.index] = {name: getattr(self, name) for name in kept}
        self.states[self.index]["offsets"] = dict(self.offsets)

    def cut_to(self, index: int) -> None:
        """Continue as a leader that has only the entries up to *index*."""
        for name, value in copy.deepcopy(self.states[index]).items():
            setattr(self, name, value)
        del self.frames[index:]
        self.floors = {at: first for at, first in self.floors.items() if at <= index}

    @property
    def floor_index(self) -> int:
        """First entry kept by the newest floor in the log."""
        return self.floors[max(self.floors)]

    def anchor_at(self, first: int) -> Anchor:
        """Return the anchor of a log that begins with entry *first*."""
        before, header = parse_header(self.frames[first - 2]), parse_header(self.frames[first - 1])
        return Anchor(first, header.position, before.term, before.chain, before.store_time_ms)

    def move_floor(self, first: int) -> None:
        """Add the entry by which all replicas give up what stands before entry *first*."""
        self.batch(state_batch(FloorChange(self.anchor_at(first), EXPIRED)))
        self.floors[self.index] = first

    def begin_later(self, topic: str, queue_id: int, offset: int) -> None:
        """Add the entry by which a queue begins at *offset*."""
        self.batch(state_batch(QueueFloorsChange(((topic, queue_id, offset),))))


@dataclass
class Queue:
    """A queue: where it begins, and (position, size) of its messages from offset 0 on."""

    low: int = 0
    messages: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Agreed:
    """What follows from the entries up to *index*."""

    index: int = 0
    queues: dict[Key, Queue] = field(default_factory=dict)
    keys: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Topic and key to the positions of records with it, in the order of the log."""

    def apply(self, frame: bytes) -> None:
        """Take in the next entry."""
        header = parse_header(frame)
        assert header.index == self.index + 1
        self.index = header.index
        if header.kind != KIND_RECORDS:
            return
        bodies: list[tuple[int, bytes]] = []
        for start in record_starts(frame, header).tolist():
            record = decode_record(frame, start)
            queue = self.queues.setdefault((record.topic, record.queue_id), Queue())
            assert record.queue_offset == len(queue.messages)
            queue.messages.append((record.phy_offset, record.size))
            words = (get_property(record.properties, b"KEYS") or b"").decode().split()
            for word in words:
                self.keys.setdefault((record.topic, word), []).append(record.phy_offset)
            if record.topic == STATE_TOPIC:
                bodies.append((record.queue_id, bytes(checked_body(frame, start)[0])))
        for queue_id, body in bodies:
            self._change(queue_id, body)

    def _change(self, queue_id: int, body: bytes) -> None:
        change = decode_change(queue_id, body)
        if isinstance(change, TopicsChange):
            self.queues = {k: q for k, q in self.queues.items() if k[0] not in change.delete}
        elif isinstance(change, QueueFloorsChange):
            for topic, at, offset in change.floors:
                self.queues[topic, at].low = max(self.queues[topic, at].low, offset)
        elif isinstance(change, FloorChange):
            for queue in self.queues.values():
                kept = [position >= change.floor.position for position, _ in queue.messages]
                first = kept.index(True) if True in kept else len(kept)
                queue.low = max(queue.low, first)


TOPICS = ("T", "T", "U", "SCHEDULE_TOPIC_XXXX")


class Group:
    """The other members: a leader's log, how much of it is committed, and a replica beside it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.log = LeaderLog(seed=rng.randrange(1 << 30))
        self.commit = 0
        self.store = ReplicaStore(CrashDisk(), small(Path("/leader")), StateTables)
        self.tables = {0: snapshot(self.store.tables)}
        self.snapshots: list[tuple[int, bytes]] = []
        self.first_index = 1
        self.log.no_op()
        self.log.note()

    def grow(self) -> None:
        log, rng = self.log, self.rng
        for _ in range(rng.choice((1, 1, 3, 12))):
            draw = rng.random()
            queues = [key for key in log.offsets if key[0] in ("T", "U")]
            if draw < 0.04:
                log.topics(delete=["U"])
            elif draw < 0.12 and self.commit > log.floor_index + 1:
                log.move_floor(rng.randint(log.floor_index + 1, self.commit))
            elif draw < 0.17 and queues:
                key = rng.choice(queues)
                log.begin_later(*key, rng.randint(0, log.offsets[key]))
            else:
                topic = rng.choice(TOPICS)
                queue_id = 0 if topic.startswith("SCHEDULE") else rng.randrange(3)
                log.messages(topic, queue_id, rng.choice((1, 2, 5, 9)))
            log.note()

    def go_on(self, often: bool) -> None:
        """Do what a group does meanwhile, more of it while the replica is away."""
        for _ in range(3 if often else 1):
            self.grow()
            if self.rng.random() < 0.5:
                self.agree()
            if self.rng.random() < 0.4:
                self.save()
            if self.rng.random() < 0.35:
                self.elect()

    def elect(self) -> None:
        """Let another member lead, which has what is committed and perhaps more."""
        term = self.log.term
        self.log.cut_to(self.rng.randint(self.commit, self.log.index))
        self.log.term = term + 1
        self.log.no_op()
        self.log.note()

    def agree(self) -> None:
        """Commit some more; the leader's own replica applies it."""
        self.commit = self.rng.randint(self.commit, self.log.index)
        for index in range(self.store.log.last_index + 1, self.commit + 1):
            frame = self.log.frames[index - 1]
            self.store.log.append(frame)
            self.store.log.flush()
            self.store.apply(index)
            self.tables[index] = snapshot(self.store.tables)

    def agreed_at(self, index: int) -> Agreed:
        """Return what follows from the entries up to *index*."""
        found = Agreed()
        for frame in self.log.frames[:index]:
            found.apply(frame)
        return found

    def save(self) -> None:
        """Write the leader's checkpoint; it may give up the log before the floor now."""
        taken = self.store.begin_checkpoint(self.commit)
        if taken is not None:
            taken.write()
            assert self.store.image.saved is not None
            self.snapshots.append(self.store.image.saved)
            self.first_index = taken.floor.first_index
