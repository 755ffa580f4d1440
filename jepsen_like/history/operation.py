"""The rows of a history: every attempt of a client, every fault, every look at a replica.

All stamps are integer nanoseconds of one monotonic clock. A call is stamped before its bytes are
handed to the network, a return after the answer is parsed; equal stamps count as overlapping. An
operation that ended in no answer has no return: `NEVER`.

A history is a CBOR sequence, appended and flushed row by row. A writer of a real run writes an
operation or a fault when it begins and again when it has ended, so that its own death loses
nothing; `LatestRows` keeps the later row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum, unique
from io import BytesIO
from typing import Any, Final

import cbor2
import msgspec
from typing_extensions import Buffer

from dledger.commitlog.errors import MQError

# ---------------------------------------------------------------------------------- rows


NEVER: Final = (1 << 63) - 1
"""Return stamp of an operation whose answer never came; also "no bound" in the checkers."""

NOTHING: Final = -1
"""An integer field without a value."""

CLIENT_BITS: Final = 40
"""A value is ``client << CLIENT_BITS | counter``: unique per attempt within a run."""


@unique
class F(IntEnum):
    """What an operation asked for."""

    SEND = 0
    PULL = 1
    MAX_OFFSET = 2
    MIN_OFFSET = 3
    COMMIT = 4
    FETCH_COMMIT = 5
    LOCK = 6
    UNLOCK = 7
    HALF = 8
    END_TRANSACTION = 9
    CHECK = 10
    NEMESIS = 11
    RECALL = 12
    SEND_BACK = 13
    RETURNED = 14
    """A copy that was found, at the end, where messages go that were given back."""
    FILTERED = 15
    """A pull with an expression: it passed the offsets from *off* to *max_off*."""
    RECEIVE = 16
    """A message received by POP, *cnt* times now, with the receipt *txn* for *status* ms."""
    ACK = 17
    """Of a message received with the receipt *txn*."""
    CHANGE_TIME = 18
    """As `ACK`: out for *status* ms from now on, with the receipt *min_off*."""
    STEP = 19
    """Messages from *min_off* to *max_off*, worked off in one step that began at *off*."""
    STEP_FOUND = 20
    """What step *txn* made of the message at *off*, found at the end; see `checkers.steps`."""
    GIVEN_UP = 21
    """A copy found, at the end, in the dead letter topic of a group that receives by POP: *value*,
    handed out *cnt* times."""
    PERISHABLE = 22
    """A send of *value* with a time to live of *cnt* ms."""
    LIVING = 23
    """A read that found *value* of such messages, by POP where it has a *group*; see
    `checkers.lifetimes`."""


@unique
class Outcome(IntEnum):
    """How an operation ended, as its caller may rely on it."""

    OK = 0
    INFO = 1
    """It may or may not have happened, then or later."""
    FAIL = 2
    """It certainly did not happen and never will."""


@unique
class Level(IntEnum):
    """What a read guarantees."""

    LINEARIZABLE = 0
    LOCAL = 1
    """A follower's or otherwise old answer: values must agree, times prove nothing."""


@unique
class Decision(IntEnum):
    """What the end of a transaction decided."""

    UNKNOWN = 0
    COMMIT = 1
    ROLLBACK = 2


class Operation(msgspec.Struct, array_like=True, tag=1, gc=False):
    """One attempt of one client.

    Attributes:
        op_id: Unique within the run, in the order of the calls.
        parent_op_id: The logical operation this is an attempt of; its own id when it is the first.
        process: Logical client. One that saw an `INFO` outcome is retired.
        node: Broker addressed, `NOTHING` when the SDK chose.
        call_ns: Before the request left.
        ret_ns: After the answer was parsed; `NEVER` for `INFO`.
        off: Offset returned by a send, asked for by a pull, committed or fetched.
        cnt: Messages a pull found; 1 of a fetched offset at which its consumer goes on.
        max_off: One past the last offset, as the answer names it.
        min_off: First offset kept, as the answer names it.
        value: What a send sent; in all rows of a transaction, what its half message holds.
        values: What a pull found at *off* and on, without a gap.
        token: Fencing token of a lock: granted by a lock, shown by what is done under it.
        due_ns: When a delayed message is due, counted from its call.
        txn: Transaction, the offset of its half message as the half's acknowledgement named it.
        decision: Of a transaction, see `Decision`.
        status: Status of the answer as it came, for another classification later; of a filtered
            pull the number of its filter.
        err: Class of the error as it came.
        range_hash: Hash of *values* where they are not kept.
    """

    op_id: int
    parent_op_id: int
    process: int
    node: int
    f: int
    outcome: int
    call_ns: int
    ret_ns: int
    topic: str = ""
    queue: int = NOTHING
    off: int = NOTHING
    cnt: int = 0
    max_off: int = NOTHING
    min_off: int = NOTHING
    value: int = NOTHING
    values: tuple[int, ...] = ()
    group: str = ""
    token: int = NOTHING
    due_ns: int = NOTHING
    txn: int = NOTHING
    decision: int = NOTHING
    status: int = NOTHING
    err: str = ""
    level: int = 0
    range_hash: int = 0

    @property
    def place(self) -> str:
        """Its queue, as violations name it."""
        return f"{self.topic}/{self.queue}"

    @property
    def slot(self) -> str:
        """Its queue with the group whose it is."""
        return f"{self.group}@{self.place}"


class Event(msgspec.Struct, array_like=True, tag=2, gc=False):
    """A fault, its healing, a change of role, an end of a process.

    Attributes:
        kind: What was done, e.g. ``power_cut``.
        node: What that was at that moment, e.g. ``n1``.
    """

    at_ns: int
    end_ns: int
    kind: str
    target: str = ""
    node: str = ""
    detail: str = ""


class ReplicaRead(msgspec.Struct, array_like=True, tag=3, gc=False):
    """One queue as one replica holds it, read from its own files when the run was over.

    Attributes:
        min_off: First offset kept.
        values: From *min_off* on, without a gap; `NOTHING` for a message that is no workload's.
    """

    at_ns: int
    node: str
    topic: str
    queue: int
    min_off: int
    values: tuple[int, ...]


class ReplicaState(msgspec.Struct, array_like=True, tag=4, gc=False):
    """How far a replica is and what its log and tables are, by checksum.

    Attributes:
        chain: Chain checksum of the log at the last entry applied.
        tables: Digest of the state tables there.
    """

    at_ns: int
    node: str
    applied_index: int
    chain: int
    tables: str


class FloorMove(msgspec.Struct, array_like=True, tag=5, gc=False):
    """Retention let a log begin later, and with it a queue.

    A move has one row of no topic, and one for each queue that it let begin later. What is measured
    is read from the log itself, not from the record that moved the floor.

    Attributes:
        index: Entry that moved the floor; 0: none did, the log has its beginning.
        min_off: First offset of the queue that stands in the log from *position* on, its end where
            none does.
        position: Byte where the kept log begins.
        end_position: Byte where the entry stands: the log ended there or before.
        newest_ms: Store time of the newest message that was removed.
        stored_ms: Store time of the entry.
        keep_bytes: Setting in force, as the entry has it; 0: no limit.
    """

    at_ns: int
    node: str
    index: int = 0
    topic: str = ""
    queue: int = NOTHING
    min_off: int = 0
    cause: str = ""
    position: int = 0
    end_position: int = 0
    newest_ms: int = 0
    stored_ms: int = 0
    keep_bytes: int = 0
    keep_ms: int = 0


class Sample(msgspec.Struct, gc=False):
    """What one broker reported of itself at one moment; *is_up*: it answered."""

    at_ns: int
    node: str
    role: str = ""
    term: int = 0
    commit_index: int = 0
    last_index: int = 0
    is_up: bool = True


def sightings(history: History) -> Iterator[tuple[int, tuple[str, int, int], int, int]]:
    """Yield what pulls found, then what replicas hold: value, place, when, operation."""
    for op in history.operations:
        if op.f == F.PULL and op.outcome == Outcome.OK:
            for at, value in enumerate(op.values):
                yield value, (op.topic, op.queue, op.off + at), op.ret_ns, op.op_id
    for read in history.replica_reads:
        for at, value in enumerate(read.values):
            yield value, (read.topic, read.queue, read.min_off + at), read.at_ns, NOTHING


def cut_queues(reads: Iterable[ReplicaRead]) -> set[tuple[str, int]]:
    """Return the queues of which a replica has not the beginning: retention took it."""
    begins: dict[tuple[str, str, int], int] = {}
    for read in reads:
        key = (read.node, read.topic, read.queue)
        begins[key] = min(begins.get(key, read.min_off), read.min_off)
    return {(topic, queue) for (_, topic, queue), begin in begins.items() if begin > 0}


class RunHeader(msgspec.Struct, array_like=True, tag=0):
    """The first record of a history file; *plan* is JSON."""

    run_id: str
    seed: int = 0
    plan: str = ""
    versions: dict[str, str] = {}


Row = RunHeader | Operation | Event | ReplicaRead | ReplicaState | FloorMove


class History(msgspec.Struct):
    """A whole history in memory."""

    header: RunHeader
    operations: list[Operation] = []
    events: list[Event] = []
    replica_reads: list[ReplicaRead] = []
    replica_states: list[ReplicaState] = []
    floors: list[FloorMove] = []

    def add(self, row: Row) -> None:
        """Put *row* where it belongs."""
        match row:
            case Operation():
                self.operations.append(row)
            case Event():
                self.events.append(row)
            case ReplicaRead():
                self.replica_reads.append(row)
            case ReplicaState():
                self.replica_states.append(row)
            case FloorMove():
                self.floors.append(row)
            case RunHeader():
                self.header = row


# ------------------------------------------------------------------------------ their CBOR sequence


_DECODE_ERRORS = (cbor2.CBORDecodeError, ValueError, TypeError, OverflowError, RecursionError)


class CorruptHistoryError(MQError):
    """A record in the middle of a history is damaged; what was before it is good."""


def encode_row(row: Row) -> bytes:
    """Return *row* as one CBOR data item."""
    encoded: bytes = cbor2.dumps(msgspec.to_builtins(row))
    return encoded


def encode_history(history: History) -> bytes:
    """Return a whole history as a CBOR sequence."""
    rows: Iterable[Row] = (
        history.header,
        *history.operations,
        *history.events,
        *history.replica_reads,
        *history.replica_states,
        *history.floors,
    )
    return b"".join(map(encode_row, rows))


def iter_rows(data: Buffer) -> Iterator[tuple[Row, int]]:
    """Yield each row and the byte after it, up to a torn last record.

    Raises CorruptHistoryError: a record in the middle is damaged; the rows before it were yielded.
    """
    raw = bytes(data)
    source = BytesIO(raw)
    decoder = cbor2.CBORDecoder(source, read_size=1)
    start = 0
    while start < len(raw):
        try:
            item: Any = decoder.decode()
        except cbor2.CBORDecodeEOF:
            return
        except _DECODE_ERRORS as error:
            raise CorruptHistoryError(f"no record at byte {start}: {error}") from error
        try:
            row: Row = msgspec.convert(item, type=Row)
        except msgspec.ValidationError as error:
            raise CorruptHistoryError(f"no row at byte {start}: {error}") from error
        start = source.tell()
        yield row, start


class LatestRows:
    """Takes rows in the order in which they were written."""

    def __init__(self) -> None:
        self._rest = History(RunHeader(run_id=""))
        self._operations: dict[int, Operation] = {}
        self._events: dict[tuple[int, str, str], Event] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Take *rows*; one that was there already takes the place of the earlier one."""
        for row in rows:
            if isinstance(row, Operation):
                self._operations[row.op_id] = row
            elif isinstance(row, Event):
                # Which node a target was is known only later; a change of role has no target.
                self._events[row.at_ns, row.kind, row.target or row.node] = row
            else:
                self._rest.add(row)

    def history(self) -> History:
        """Return what there is, each row once, in the order in which they came first."""
        self._rest.operations = list(self._operations.values())
        self._rest.events = list(self._events.values())
        return self._rest


PUSH_RECORD: Final = "push_group.json"
"""What is known of a push group when a run is over, so that it can be judged again."""


def read_samples(data: bytes) -> tuple[list[Sample], str]:
    """Return the samples in *data* up to the first that is none, and why it is none.

    A piece at the end is left out: one sample more or less proves nothing.
    """
    decoder = cbor2.CBORDecoder(BytesIO(data))
    samples: list[Sample] = []
    try:
        while True:
            samples.append(msgspec.convert(decoder.decode(), type=Sample, strict=False))
    except cbor2.CBORDecodeEOF:
        return samples, ""
    except (*_DECODE_ERRORS, msgspec.ValidationError) as error:
        return samples, str(error)
