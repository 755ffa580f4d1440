"""Messages by key (12), by position (33), and the units of a queue (321).

The key index names candidates by a hash, between two positions; each candidate is read and checked,
so that every message in an answer has the key, was stored in the requested time, and is still in
its queue. Where the key is a message's own id, an older message is better than none.

Spec: docs/internals/protocol/remoting.md, section 9; docs/internals/protocol/store.md, section 8.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import trio

from dledger.commitlog.entry import ENTRY_HEADER_BYTES, parse_header
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.key_index import FOREVER, MAX_QUERY_RESULTS
from dledger.commitlog.properties import (
    KEY_SEPARATOR,
    PROPERTY_KEYS,
    PROPERTY_UNIQ_KEY,
    get_property,
)
from dledger.commitlog.record import MIN_RECORD_BYTES, Record, decode_record, record_properties
from dledger.derived_files import KEYS_ARE_MISSING
from dledger.filters.errors import DamagedMessageError
from dledger.group_api import BrokerGroup
from dledger.processors.answers import (
    RefusedError,
    bad_request,
    check_readable,
    not_leader,
    require_leader,
    until_current,
)
from dledger.processors.client_table import ClientTable, Subscription
from dledger.processors.get_message import MessageRange, PropertyFilters, read_units
from dledger.processors.handles import SUB, Limit, handles, message_at, needs
from dledger.remoting.access.accounts import SIGNED
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.bodies import ConsumeQueueData, QueryConsumeQueueResponseBody
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import (
    QueryConsumeQueueHeader,
    QueryMessageHeader,
    ViewMessageHeader,
)
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.seams import Executor

MAX_UNIQUE_MESSAGES: Final = 32
"""RocketMQ's limit where the key is a message's own id."""

ENTRIES_AT_A_TIME: Final = 64
"""Index entries read before other requests are served: a few milliseconds if each is of a file of
its own, else much less."""

MAX_ENTRIES: Final = 1_000_000
"""Index entries read in one query; a longer chain belongs to a key that selects nothing."""

RECORDS_AT_A_TIME: Final = 64
"""Candidates read in one go by the worker."""

MAX_RECORDS: Final = 4_096
"""Candidates read in one query: other keys of the same hash, and messages that were removed."""

MAX_ANSWER_BYTES: Final = 8 * 1024 * 1024
"""Half of the largest frame; one message always fits."""

READ_KIND: Final = "cold_read"

_UNIQ_KEY: Final = PROPERTY_UNIQ_KEY.encode()
_KEYS: Final = PROPERTY_KEYS.encode()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a message must have."""

    topic: str
    key: str
    is_unique: bool
    begin_ms: int
    end_ms: int
    count: int

    def admits(self, record: Record) -> bool:
        if record.topic != self.topic:
            return False
        if not self.begin_ms <= record.store_timestamp_ms <= self.end_ms:
            return False
        if _text(get_property(record.properties, _UNIQ_KEY)) == self.key:
            return True
        keys = _text(get_property(record.properties, _KEYS)) or ""
        return not self.is_unique and self.key in keys.split(KEY_SEPARATOR)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class _Found:
    """A record that has the key."""

    position: int
    queue_id: int
    queue_offset: int
    data: bytes


class KeyQueryProcessor:
    """Answers 12: the leader all there is, a follower what it has applied."""

    def __init__(self, group: BrokerGroup, executor: Executor) -> None:
        self._group = group
        self._executor = executor

    @handles(
        RequestCode.QUERY_MESSAGE, limit=Limit.ADMIN, rule=needs(SUB, topic="topic"), reads=True
    )
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return the newest messages with the key, in the order of the log; 22 when none has it."""
        header = QueryMessageHeader.decode(command.ext)
        most = MAX_UNIQUE_MESSAGES if header.unique_key_query else header.max_num
        wanted = _Wanted(
            header.topic,
            header.key,
            bool(header.unique_key_query),
            header.begin_timestamp,
            header.end_timestamp,
            min(most, MAX_QUERY_RESULTS),
        )
        return self._answer(command, wanted)

    async def _answer(self, command: RemotingCommand, wanted: _Wanted) -> RemotingCommand:
        group = self._group
        leading = group.leadership is not None
        try:
            if leading:
                await until_current(group)
            found = await self._search(wanted)
            if not found and wanted.is_unique and wanted.begin_ms > 0:
                # Tools guess the time from the key, by a month and a time zone of their own, or
                # search three days back. The key alone identifies the message.
                found = await self._search(replace(wanted, begin_ms=0))
            if not found and not leading:
                # It may be there and not have come to this node yet.
                raise not_leader(group)
            if not found and group.key_index.is_behind:
                raise RefusedError(Condition.BUSY, KEYS_ARE_MISSING)
        except DamagedMessageError as error:
            group.report_damage(error.position, error.size)
            raise
        if not found:
            return answer(
                command, Condition.NOT_FOUND, "can not find message, maybe time range not correct"
            )
        return response_to(
            command,
            ext={
                "indexLastUpdateTimestamp": str(group.state.last_store_time_ms),
                "indexLastUpdatePhyoffset": str(group.state.applied_end_position),
            },
            body=b"".join(item.data for item in reversed(found)),
        )

    async def _search(self, wanted: _Wanted) -> list[_Found]:
        """Return what is wanted, newest first."""
        found: list[_Found] = []
        if wanted.count <= 0:
            return found
        records = 0
        waiting: list[int] = []
        low, high = await self._executor.run(partial(self._bounds, wanted), kind=READ_KIND)
        candidates = self._group.key_index.candidates(wanted.topic, wanted.key, low, high)
        for entries, position in enumerate(candidates, 1):
            if position is not None:
                waiting.append(position)
            if len(waiting) == RECORDS_AT_A_TIME:
                records += len(waiting)
                is_full = await self._collect(wanted, waiting, found)
                waiting = []
                if is_full:
                    return found
            if entries % ENTRIES_AT_A_TIME == 0:
                await trio.lowlevel.checkpoint()
            if records >= MAX_RECORDS or entries >= MAX_ENTRIES:
                break
        else:
            await self._collect(wanted, waiting, found)
            return found
        if await self._collect(wanted, waiting, found) or found:
            return found
        raise bad_request(
            f"nothing among the newest {entries} entries of the index that look like key "
            f"{wanted.key!r} of {wanted.topic}, and there are more: end the time range earlier"
        )

    def _bounds(self, wanted: _Wanted) -> tuple[int, int]:
        """Return between which positions the log has the messages of these times."""
        low = self._position_at(wanted.begin_ms, 0)
        return low, self._position_at(wanted.end_ms + 1, FOREVER)

    def _position_at(self, time_ms: int, otherwise: int) -> int:
        """Return where the first entry begins that was stored at *time_ms* or later.

        *otherwise*: the answer where every entry was, or where one cannot be read.
        """
        log, state = self._group.log, self._group.state
        if time_ms <= 0 or time_ms > state.last_store_time_ms:
            return otherwise if time_ms <= 0 else FOREVER

        def stored_at(index: int) -> int:
            return parse_header(log.read(log.position_at(index), ENTRY_HEADER_BYTES)).store_time_ms

        indexes = range(log.first_index, state.applied_index + 1)
        try:
            return log.position_at(indexes[bisect_left(indexes, time_ms, key=stored_at)])
        except (CorruptEntryError, OffsetOutOfRangeError, IndexError):
            return otherwise

    async def _collect(
        self, wanted: _Wanted, positions: Sequence[int], found: list[_Found]
    ) -> bool:
        """Add to *found* what is wanted of *positions*; return whether that is enough."""
        if not positions:
            return False

        def read() -> list[_Found]:
            return [item for at in positions if (item := self._read(wanted, at)) is not None]

        size = sum(len(item.data) for item in found)
        for item in await self._executor.run(read, kind=READ_KIND):
            if not self._is_in_its_queue(wanted.topic, item):
                continue
            size += len(item.data)
            if found and size > MAX_ANSWER_BYTES:
                return True
            found.append(item)
            if len(found) >= wanted.count:
                return True
        return False

    def _read(self, wanted: _Wanted, position: int) -> _Found | None:
        try:
            data = bytes(self._group.log.record_at(position))
            record = decode_record(data)
        except OffsetOutOfRangeError:
            return None  # removed with its segment
        except CorruptRecordError as error:
            raise DamagedMessageError(str(error), position, MIN_RECORD_BYTES) from error
        if not wanted.admits(record):
            return None
        return _Found(position, record.queue_id, record.queue_offset, data)

    def _is_in_its_queue(self, topic: str, item: _Found) -> bool:
        """Return whether a consumer could read it: not if its topic was deleted, or made again."""
        bounds = self._group.state.queues.get((topic, item.queue_id))
        if bounds is None or not bounds.min_offset <= item.queue_offset < bounds.max_offset:
            return False
        units = self._group.queues.queue(topic, item.queue_id).read(item.queue_offset, 1)
        return bool(units["phy_offset"][0] == item.position)


class MessageViewProcessor:
    """Answers 33, from applied entries only."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group

    @handles(
        RequestCode.VIEW_MESSAGE_BY_ID,
        limit=Limit.CLIENT,
        rule=message_at("offset", SUB),
        reads=True,
    )
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return the record that begins at the offset asked for."""
        header = ViewMessageHeader.decode(command.ext)
        if 0 <= header.offset < self._group.state.applied_end_position:
            try:
                record = self._group.log.record_at(header.offset)
                check_readable(record)
                return response_to(command, body=record)
            except (OffsetOutOfRangeError, CorruptRecordError):
                pass  # no record begins there: refused below
        raise bad_request(f"can not find message by the offset, {header.offset}")


MAX_UNITS: Final = 500
"""Units shown in one answer; a tool asks again for more."""


@dataclass(eq=False, repr=False)
class ConsumeQueueViewProcessor:
    """Answers 321, on the leader."""

    _group: BrokerGroup
    _clients: ClientTable[Connection]
    _filters: PropertyFilters

    @handles(RequestCode.QUERY_CONSUME_QUEUE, limit=Limit.ADMIN, rule=SIGNED, reads=True)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return units from an offset on."""
        body = self._view(QueryConsumeQueueHeader.decode(command.ext))
        return response_to(command, body=body.encode())

    def _view(self, header: QueryConsumeQueueHeader) -> QueryConsumeQueueResponseBody:
        group = self._group
        require_leader(group)
        bounds = group.state.queues.get((header.topic, header.queue_id))
        if bounds is None:
            raise bad_request(f"{header.queue_id}@{header.topic} is not exist!")
        subscription = self._subscription(header)
        body = QueryConsumeQueueResponseBody(
            subscription_data=subscription.data if subscription is not None else None,
            min_queue_index=bounds.min_offset,
            max_queue_index=bounds.max_offset,
        )
        if subscription is not None and not subscription.is_tag_type:
            body.filter_data = subscription.data.sub_string
        first = max(header.index, bounds.min_offset)
        found = read_units(
            group, header.topic, header.queue_id, first, max(0, min(header.count, MAX_UNITS))
        )
        if isinstance(found, MessageRange):
            return body
        for position, size, code in found.units.tolist():
            shown = ConsumeQueueData(physic_offset=position, physic_size=size, tags_code=code)
            if subscription is not None:
                self._judge(shown, subscription)
            body.queue_data.append(shown)
        return body

    def _subscription(self, header: QueryConsumeQueueHeader) -> Subscription | None:
        if not header.consumer_group:
            return None
        consumers = self._clients.consumer_group(header.consumer_group)
        return None if consumers is None else consumers.subscriptions.get(header.topic)

    def _judge(self, shown: ConsumeQueueData, subscription: Subscription) -> None:
        if subscription.is_tag_type:
            codes = subscription.codes
            shown.eval = codes is None or bool((codes == shown.tags_code).any())
            return
        try:
            expression = self._filters.of_subscription(subscription)
            record = self._group.log.read(shown.physic_offset, shown.physic_size)
            shown.eval = expression.matches(record_properties(record))
        except MQError as error:
            shown.eval, shown.msg = False, str(error)
