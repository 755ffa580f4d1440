"""SEND_RECORDS (51101): a batch of our SDK whose records are in record layout already.

Request: CBOR header with ``group``, ``runs`` = [[topic, queue id, count], …],
``default_topic_queue_nums``, ``timeout_ms`` and, of an idempotent producer, ``producer``; body =
one u32 size for each record, then the records with offsets, store time and hosts zero. The broker
checks and patches, it never parses message by message. Answer: ``results`` = one [code, first
queue offset, remark?] for each run, ``phy_offset`` of the first stored record, ``store_host`` (8 or
20 bytes), ``store_time_ms``, and ``grown_bytes`` by which each record is longer in the log: 12 for
each IPv6 host. Accepted runs stand in the log one behind the other.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dledger.broker_errors import SequenceReusedError
from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.errors import CorruptRecordError
from dledger.commitlog.properties import (
    MAX_CLIENT_PROPERTIES_BYTES,
    OWNED_NAMES,
    PROPERTY_DELAY,
    PROPERTY_EXPIRE_AFTER_MS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_UNIQ_KEY,
    get_property,
    without_owned,
)
from dledger.commitlog.record import (
    IPV4_HOST_BYTES,
    encode_record,
    iter_records,
    pack_host,
    record_properties,
)
from dledger.commitlog.record_batch import verify_record_layout
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.processors.answers import RefusedError, answer_when_done, born_host_of, not_leader
from dledger.processors.destination import Destinations, check_accepts, check_room
from dledger.processors.handles import SENDS_RECORDS, Limit, handles
from dledger.processors.idempotent_sends import (
    ProducerSends,
    SendInFlight,
    first_records,
    identities,
)
from dledger.remoting.access.gate import limited_account
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import ANSWERS, Condition
from dledger.remoting.protocol.own_fields import ProducerStamp, stamp_of_field
from dledger.remoting.protocol.topic_names import AUTO_CREATE_TOPIC_KEY_TOPIC
from dledger.services.pending_configs import TopicView, noting
from dledger.settings.parts import BrokerSettings
from dledger.state.producer_sessions import StoredSend
from dledger.state.state_record import (
    ProducerSendChange,
    StateRecord,
    TopicsChange,
    behind_heads,
    state_record,
)
from dledger.state.topics import TopicConfig

MAX_RUNS = 4096
"""Runs of one request: a queue each is what a producer has open."""

SIZE_FIELD_BYTES = 4

# Properties that ask for more than an append: such messages are sent with 310.
_NOT_PLAIN = tuple(
    name.encode()
    for name in (
        PROPERTY_DELAY,
        PROPERTY_TRANSACTION_PREPARED,
        PROPERTY_TIMER_DELAY_SEC,
        PROPERTY_TIMER_DELAY_MS,
        PROPERTY_TIMER_DELIVER_MS,
        PROPERTY_EXPIRE_AFTER_MS,
    )
)
# Whole names: the longer they are, the quicker is the search.
_MARKS = tuple(name.encode() + b"\x01" for name in OWNED_NAMES) + tuple(
    name + b"\x01" for name in _NOT_PLAIN
)
_DELAY_MARK = PROPERTY_DELAY.encode() + b"\x01"
# By the number that two characters make: does one of them end so?
_ENDS_A_MARK = np.zeros(1 << 16, bool)
_ENDS_A_MARK[[int.from_bytes(mark[-3:-1], "little") for mark in _MARKS]] = True
SEARCHED_BYTES = 2048
"""From this size on it is quicker to find where a name ends than to search every name."""
_UNIQ_KEY_MARK = PROPERTY_UNIQ_KEY.encode() + b"\x01"


@dataclass(frozen=True, slots=True)
class TakenRecords:
    """The records of a request that may be appended.

    Attributes:
        runs: Of the records; none: nothing may.
        records, sizes: As they came, without properties that only brokers write.
        refused: Why the others may not, by the number of the run in the request.
    """

    runs: tuple[Run, ...]
    records: bytes
    sizes: npt.NDArray[np.uint32]
    create: dict[str, TopicConfig]
    refused: dict[int, RefusedError]

    @property
    def made(self) -> TopicsChange | None:
        """What makes the topics to make; None: there are none."""
        return TopicsChange(put=tuple(self.create.values())) if self.create else None

    def batch_behind(self, heads: Sequence[StateRecord], born_host: bytes) -> RecordBatch:
        """Return them, from the client *born_host*, behind the topics to make and *heads*."""
        first = [] if self.made is None else [state_record(self.made)]
        sent = RecordBatch(self.records, self.sizes, self.runs, born_host)
        return behind_heads([*first, *heads], sent)


@dataclass(eq=False, repr=False)
class SendRecordsProcessor:
    """Turns a batch in record layout into one proposal."""

    _group: BrokerGroup
    _topics: TopicView
    _settings: BrokerSettings
    _destinations: Destinations
    _sends: ProducerSends

    @handles(RequestCode.SEND_RECORDS, limit=Limit.SEND, rule=SENDS_RECORDS, appends=True)
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51101: refusals at once, everything else when its outcome is known."""
        runs, default_queue_nums, records, sizes = self._verified(command)
        stamp = stamp_of_field(command.ext)
        if stamp is not None:
            # Before any check that may refuse as "not stored" what is stored.
            first = self._sends.judge(stamp)
            if first is not None:
                return self._repeat(connection, command, first, runs, records, sizes)
        taken = self._checked(connection, runs, default_queue_nums, records, sizes)
        if not taken.runs:
            results = _results(len(runs), taken.refused, ())
            return response_to(command, ext={"results": results})
        self._propose(connection, command, len(runs), taken, stamp)
        return DEFERRED

    def take(self, connection: Connection, command: RemotingCommand) -> TakenRecords:
        """Return the records of a request, all of which may be appended.

        Raises MQError: what refuses the request or one of its runs; nothing was stored.
        """
        if command.ext.get("runs") == [] and not memoryview(command.body).nbytes:
            if self._group.leadership is None:
                raise not_leader(self._group)
            return TakenRecords((), b"", np.empty(0, np.uint32), {}, {})
        taken = self._checked(connection, *self._verified(command))
        for error in taken.refused.values():
            raise error
        return taken

    def _verified(
        self, command: RemotingCommand
    ) -> tuple[tuple[Run, ...], int, bytes, npt.NDArray[np.uint32]]:
        """Return the runs, how many queues a topic to make has, the records and their sizes."""
        group = self._group
        if group.leadership is None:
            raise not_leader(group)
        check_accepts(self._settings)
        runs, default_queue_nums = _runs_of(command)
        records, sizes = split_records(command, sum(run.count for run in runs))
        try:
            verify_record_layout(
                records, sizes, runs, max_body_bytes=self._settings.store.max_message_size
            )
        except CorruptRecordError as error:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, str(error)) from error
        return runs, default_queue_nums, records, sizes

    def _checked(
        self,
        connection: Connection,
        runs: tuple[Run, ...],
        default_queue_nums: int,
        records: bytes,
        sizes: npt.NDArray[np.uint32],
    ) -> TakenRecords:
        """Return what may be appended, and why the other runs may not."""
        if self._destinations.space.is_full:
            raise self._destinations.space.full_error()
        account = limited_account(connection)
        create: dict[str, TopicConfig] = {}
        refused: dict[int, RefusedError] = {}
        for number, run in enumerate(runs):
            try:
                _, made = self._destinations.check(
                    run.topic,
                    run.queue_id,
                    AUTO_CREATE_TOPIC_KEY_TOPIC,
                    default_queue_nums,
                    account,
                    planned=create.get(run.topic),
                )
                if made is not None:
                    create[run.topic] = made
            except RefusedError as error:
                refused[number] = error
        if _may_be_marked(records, runs):
            _refuse_not_plain(records, sizes, runs, refused)
            records, sizes = _without_owned(records, sizes)
        if int(sizes.max()) > MAX_CLIENT_PROPERTIES_BYTES:
            _refuse_without_space(records, sizes, runs, refused)
        accepted = runs
        if refused:
            accepted = tuple(run for i, run in enumerate(runs) if i not in refused)
            if accepted:
                records, sizes = _without_refused(records, sizes, runs, refused)
            topics = {run.topic for run in accepted}
            create = {name: config for name, config in create.items() if name in topics}
        return TakenRecords(accepted, records, sizes, create, refused)

    def _repeat(
        self,
        connection: Connection,
        command: RemotingCommand,
        first: StoredSend | SendInFlight,
        runs: tuple[Run, ...],
        records: bytes,
        sizes: npt.NDArray[np.uint32],
    ) -> Handled:
        """Answer what the first attempt was answered, or will be."""
        if any(number >= len(runs) for number in first.refused):
            raise SequenceReusedError("this sequence was a request with more runs")
        refused = {number: _refused_before() for number in first.refused}
        accepted = tuple(run for i, run in enumerate(runs) if i not in refused)
        if refused:
            records, sizes = _without_refused(records, sizes, runs, refused)
        found = first_records(self._group, first, identities(records))
        if isinstance(first, SendInFlight):
            first.join(self.answering(connection, command, len(runs), refused))
            return DEFERRED
        starts = np.cumsum([0, *(run.count for run in accepted)])[:-1].tolist()
        if any(
            (found[at].topic, found[at].queue_id) != (run.topic, run.queue_id)
            for at, run in zip(starts, accepted, strict=True)
        ):
            raise SequenceReusedError("under this sequence it was sent to other queues")
        return _stored(
            command,
            _results(len(runs), refused, tuple(found[at].queue_offset for at in starts)),
            first.position,
            found[0].store_timestamp_ms,
            pack_host(*found[0].store_host),
            pack_host(*found[0].born_host),
        )

    def answering(
        self,
        connection: Connection,
        command: RemotingCommand,
        runs: int,
        refused: dict[int, RefusedError],
    ) -> OnDone:
        """Return what answers the request once its proposal is done."""

        def stored(placed: Proposed) -> RemotingCommand:
            return _stored(
                command,
                _results(runs, refused, placed.first_offsets),
                placed.phy_offset,
                placed.store_time_ms,
                self._settings.store_host,
                born_host_of(connection),
            )

        return answer_when_done(connection, command, self._group, stored)

    def _propose(
        self,
        connection: Connection,
        command: RemotingCommand,
        runs: int,
        taken: TakenRecords,
        stamp: ProducerStamp | None,
    ) -> None:
        refused = taken.refused
        heads: list[StateRecord] = []
        if stamp is not None:
            heads.append(state_record(ProducerSendChange(*stamp, tuple(sorted(refused)))))
        batch = taken.batch_behind(heads, born_host_of(connection))
        answer = self.answering(connection, command, runs, refused)
        flight: SendInFlight | None = None
        with noting((self._topics.pending, taken.made)) as settled:
            if stamp is not None:
                flight = SendInFlight(stamp, taken.records, tuple(sorted(refused)), [answer])
                answer = flight.answered
                settled.append(partial(self._sends.settled, flight))
            self._group.propose(batch, answer, is_applied=bool(taken.create), settled=settled)
        if flight is not None:
            self._sends.add(flight)


def _stored(
    command: RemotingCommand,
    results: list[list[int | str]],
    phy_offset: int,
    store_time_ms: int,
    store_host: bytes,
    born_host: bytes,
) -> RemotingCommand:
    """Return the answer of records that are stored, each longer by what IPv6 hosts take."""
    ext = {
        "results": results,
        "phy_offset": phy_offset,
        "store_host": store_host,
        "store_time_ms": store_time_ms,
        "grown_bytes": len(store_host) + len(born_host) - 2 * IPV4_HOST_BYTES,
    }
    return response_to(command, ext=ext)


def _runs_of(command: RemotingCommand) -> tuple[tuple[Run, ...], int]:
    value = command.ext.get("runs")
    if not isinstance(value, list) or not 0 < len(value) <= MAX_RUNS:
        raise BadRequestError(f"runs must be a list of 1 to {MAX_RUNS}")
    runs = []
    for item in value:
        if not isinstance(item, list) or len(item) != 3:
            raise BadRequestError("a run is [topic, queue id, count]")
        topic, queue_id, count = item
        if type(topic) is not str or type(queue_id) is not int or type(count) is not int:
            raise BadRequestError("a run is [topic, queue id, count]")
        if count <= 0 or not 0 <= queue_id <= 0x7FFFFFFF:
            raise BadRequestError(f"a run of {count} records in queue {queue_id}")
        runs.append(Run(topic, queue_id, count))
    queue_nums = command.ext.get("default_topic_queue_nums", 4)
    if type(queue_nums) is not int:
        raise BadRequestError("default_topic_queue_nums is not a number")
    return tuple(runs), queue_nums


def split_records(command: RemotingCommand, count: int) -> tuple[bytes, npt.NDArray[np.uint32]]:
    """Return the records in a request's body, and the size of each.

    Raises BadRequestError: it cannot hold *count* of them.
    """
    view = memoryview(command.body).cast("B")
    table_bytes = count * SIZE_FIELD_BYTES
    if table_bytes > view.nbytes:
        raise BadRequestError(f"a body of {view.nbytes} bytes cannot hold {count} records")
    sizes = np.frombuffer(view, ">u4", count).astype(np.uint32)
    # One copy lets the receive buffer go and makes searching quick.
    return bytes(view[table_bytes:]), sizes


def _may_be_marked(records: bytes, runs: tuple[Run, ...]) -> bool:
    """Return whether a property that is not plain, or only the broker's, may be in *records*."""
    # All of them but one have an underscore, as has the one property that each record has.
    expected = sum(run.topic.count("_") * run.count for run in runs)
    if records.count(b"_") == expected + records.count(_UNIQ_KEY_MARK):
        return _DELAY_MARK in records
    if len(records) > SEARCHED_BYTES and not _may_end_a_mark(records):
        return False
    return any(mark in records for mark in _MARKS)


def _may_end_a_mark(records: bytes) -> bool:
    """Return whether a name that ends as one of the marks may be in *records*."""
    data = np.frombuffer(records, np.uint8)
    # No record begins with a separator, so two bytes are before each.
    ends = np.flatnonzero(data == 1)
    ends = ends[ends >= 2]
    pairs = data[ends - 2] | data[ends - 1].astype(np.uint16) << 8
    return bool(_ENDS_A_MARK[pairs].any())


def _each(
    records: bytes, sizes: npt.NDArray[np.uint32], runs: tuple[Run, ...]
) -> Iterator[tuple[int, bytes]]:
    """Yield for each record the number of its run, and its properties."""
    view = memoryview(records)
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    record_number = 0
    for number, run in enumerate(runs):
        for i in range(record_number, record_number + run.count):
            yield number, record_properties(view[ends[i - 1] if i else 0 : ends[i]])
        record_number += run.count


def _refuse_not_plain(
    records: bytes,
    sizes: npt.NDArray[np.uint32],
    runs: tuple[Run, ...],
    refused: dict[int, RefusedError],
) -> None:
    for number, properties in _each(records, sizes, runs):
        for name in _NOT_PLAIN:
            if get_property(properties, name) is not None and number not in refused:
                refused[number] = RefusedError(
                    Condition.MESSAGE_ILLEGAL,
                    f"a message with {name.decode()} is sent on its own, with request 310",
                )


def _refuse_without_space(
    records: bytes,
    sizes: npt.NDArray[np.uint32],
    runs: tuple[Run, ...],
    refused: dict[int, RefusedError],
) -> None:
    for number, properties in _each(records, sizes, runs):
        if number not in refused:
            try:
                check_room(properties)
            except RefusedError as error:
                refused[number] = error


def _without_owned(
    records: bytes, sizes: npt.NDArray[np.uint32]
) -> tuple[bytes, npt.NDArray[np.uint32]]:
    """Return the records without properties that only brokers write; rare, so one by one."""
    found = []
    for record in iter_records(records):
        kept = without_owned(record.properties)
        found.append(
            encode_record(
                topic=record.topic,
                queue_id=record.queue_id,
                body=record.body,
                properties=kept,
                flag=record.flag,
                sys_flag=record.sys_flag,
                born_timestamp_ms=record.born_timestamp_ms,
                reconsume_times=record.reconsume_times,
                prepared_transaction_offset=record.prepared_transaction_offset,
            )
        )
    return b"".join(found), np.array([len(record) for record in found], np.uint32)


def _without_refused(
    records: bytes,
    sizes: npt.NDArray[np.uint32],
    runs: tuple[Run, ...],
    refused: dict[int, RefusedError],
) -> tuple[bytes, npt.NDArray[np.uint32]]:
    ends = np.cumsum(sizes, dtype=np.int64)
    parts, kept = [], []
    first = 0
    for number, run in enumerate(runs):
        last = first + run.count
        if number not in refused:
            start = int(ends[first - 1]) if first else 0
            parts.append(records[start : int(ends[last - 1])])
            kept.append(sizes[first:last])
        first = last
    return b"".join(parts), np.concatenate(kept)


def _results(
    count: int, refused: dict[int, RefusedError], offsets: tuple[int, ...]
) -> list[list[Any]]:
    if not refused:
        return [[0, offset] for offset in offsets]
    stored = iter(offsets)
    return [
        [int(ANSWERS[refused[i].condition].code), -1, str(refused[i])]
        if i in refused
        else [0, next(stored)]
        for i in range(count)
    ]


def _refused_before() -> RefusedError:
    return RefusedError(
        Condition.BUSY, "refused at the first attempt and not stored; send it again on its own"
    )
