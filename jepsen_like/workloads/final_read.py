"""What a replica holds when a run is over, read from its own queues and log, not over the wire."""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import Protocol

from commitlog.consume_queue_store import ConsumeQueueStore
from commitlog.entry_log import EntryLog
from commitlog.errors import MQError
from commitlog.record import decode_record
from dledger.state.snapshot import snapshot
from dledger.state.tables import StateTables
from jepsen_like.checkers.verdict import Violation
from jepsen_like.history.operation import NOTHING, History, ReplicaRead, ReplicaState
from jepsen_like.workloads.floor_rows import TOPICS, final_rows
from jepsen_like.workloads.recorder import value_of

CHECKER = "final_read"
UNREADABLE = "replica cannot be read"


class Replica(Protocol):
    """Log, queues and tables of one replica: a `dledger.group.Group`, or a store that is open."""

    @property
    def tables(self) -> StateTables:
        """The state tables."""

    @property
    def queues(self) -> ConsumeQueueStore:
        """The consume queues."""

    @property
    def log(self) -> EntryLog:
        """The log."""


def read_replica(
    name: str, replica: Replica | None, history: History, now_ns: int
) -> list[Violation]:
    """Add to *history* what the replica *name* holds; return what could not be read.

    Every unit must name a record of that queue and offset, with a right checksum.

    Args:
        replica: None when it does not run, which is a violation, too.
    """
    if replica is None:
        return [Violation(UNREADABLE, name, "it does not run", checker=CHECKER)]
    tables = replica.tables
    digest = blake2b(snapshot(tables), digest_size=16).hexdigest()
    history.replica_states.append(
        ReplicaState(now_ns, name, tables.applied_index, tables.applied_chain, digest)
    )
    found: list[Violation] = []
    with suppress(MQError):  # what cannot be read here another replica has
        known = {move.index for move in history.floors} - {0}
        history.floors += final_rows(replica.log, tables, known, node=name, at_ns=now_ns)
    for (topic, queue_id), bounds in sorted(tables.queues.items()):
        if topic not in TOPICS:
            continue
        low, high = bounds.min_offset, bounds.max_offset
        values: list[int] = []
        subject = f"{name} {topic}/{queue_id}"
        units = replica.queues.queue(topic, queue_id).read(low, high - low)
        if len(units) != high - low:
            text = f"the consume queue has {len(units)} units for {low} … {high}"
            found.append(Violation(UNREADABLE, subject, text, checker=CHECKER, at_ns=now_ns))
        for place, (phy_offset, size, _) in enumerate(units.tolist()):
            at = low + place
            try:
                record = decode_record(replica.log.record_at(phy_offset))
            except MQError as error:
                text = f"offset {at} at {phy_offset}: {type(error).__name__}: {error}"
                found.append(Violation(UNREADABLE, subject, text, checker=CHECKER, at_ns=now_ns))
                values.append(NOTHING)
                continue
            right = (topic, queue_id, at, size)
            there = (record.topic, record.queue_id, record.queue_offset, record.size)
            if there != right:
                text = f"the unit of {right} leads to {there}"
                found.append(Violation(UNREADABLE, subject, text, checker=CHECKER, at_ns=now_ns))
            values.append(value_of(record.body))
        history.replica_reads.append(ReplicaRead(now_ns, name, topic, queue_id, low, tuple(values)))
    return found[:8]
