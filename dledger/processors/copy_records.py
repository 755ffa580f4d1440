"""COPY_RECORDS (51112) and BEGIN_QUEUE (51113): a queue as it stands in another cluster.

COPY_RECORDS. Request: CBOR header with ``topic``, ``queue_id``, ``offset`` and ``count``; body as
of SEND_RECORDS. The records come as a pull returned them: the broker checks them, and writes
only what is its own to write: position, store time, store host. They are appended at
``offset`` or not at all, so that copies of one queue, however many run, become one copy. Answer:
``offset``, the next one.

BEGIN_QUEUE. Request: ``topic``, ``queue_id``, ``offset``. A queue that never had a message gets its
first one at ``offset``: the other cluster has given up what was before.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

import structlog

from dledger.broker_settings import BrokerSettings
from dledger.commitlog.entry import Run
from dledger.commitlog.errors import CorruptRecordError
from dledger.commitlog.message_batch import verify_copied_records
from dledger.commitlog.record import iter_records
from dledger.filters.expiry import EXPIRE_MARK, marked, may_expire
from dledger.group_api import BrokerGroup, ExpectedOffset, OnDone, Proposed
from dledger.processors.answers import (
    RefusedError,
    answer_when_done,
    asked_by,
    check_sendable,
    require_leader,
)
from dledger.processors.destination import check_accepts
from dledger.processors.handles import COPIES, Limit, handles
from dledger.processors.send_records import TakenRecords, split_records
from dledger.remoting.access.accounts import ADMIN
from dledger.remoting.connection import Connection
from dledger.remoting.processor import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.own_fields import (
    OFFSET_FIELD,
    QueuePlace,
    copied_count_of,
    queue_place_of,
)
from dledger.services.limits import DiskSpace
from dledger.services.pending_configs import TopicView
from dledger.state.state_record import QueueFloorsChange, state_batch
from dledger.state.topics import TopicConfig, is_of_copies

_log = structlog.get_logger(__name__)


class CopyRecordsProcessor:
    """Turns records of another cluster into proposals for the same place."""

    def __init__(
        self, group: BrokerGroup, topics: TopicView, settings: BrokerSettings, space: DiskSpace
    ) -> None:
        self._group = group
        self._topics = topics
        self._settings = settings
        self._space = space

    @handles(RequestCode.COPY_RECORDS, limit=Limit.SEND, rule=COPIES, appends=True)
    def copy(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51112 when the records are stored at their offsets."""
        place = self._place(command)
        count = copied_count_of(command.ext)
        if self._space.is_full:
            raise self._space.full_error()
        records, sizes = split_records(command, count)
        run = Run(place.topic, place.queue_id, count)
        most = self._settings.store.max_message_size
        try:
            verify_copied_records(records, sizes, run, place.offset, max_body_bytes=most)
        except CorruptRecordError as error:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, str(error)) from error

        def stored(_: Proposed) -> RemotingCommand:
            return response_to(command, 0, None, {OFFSET_FIELD: place.offset + count})

        create = self._mark(place.topic, records)
        taken = TakenRecords((run,), records, sizes, create, {})
        batch, _, _ = taken.batch_behind((), None)
        answer = answer_when_done(connection, command, self._group, stored)
        made: list[OnDone] = []

        def done(proposed: Proposed) -> None:
            for note in made:
                note(proposed)
            answer(proposed)

        self._group.propose(batch, done, is_applied=bool(create), expected=ExpectedOffset(*place))
        made += [self._topics.pending.put(name, config) for name, config in create.items()]
        return DEFERRED

    def _mark(self, topic: str, records: bytes) -> dict[str, TopicConfig]:
        """Return the topic as it has to be put, by name, where it first gets what expires.

        The other cluster's topic may have been marked since topics were compared.
        """
        config = self._topics.config(topic)
        put = None if config is None or EXPIRE_MARK not in records else marked(config)
        if put is None or is_of_copies(topic):
            return {}
        found = any(may_expire(record.properties) for record in iter_records(records))
        return {topic: put} if found else {}

    @handles(RequestCode.BEGIN_QUEUE, limit=Limit.ADMIN, rule=ADMIN)
    def begin(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51113 when the queue begins at the offset."""
        place = self._place(command)
        requester = asked_by(connection)
        _log.info("queue_begins", **place._asdict(), asked_by=requester)
        self._group.propose(
            state_batch(QueueFloorsChange((), begins=(place,))),
            answer_when_done(connection, command, self._group),
            expected=ExpectedOffset(place.topic, place.queue_id, 0, begins_at=place.offset),
        )
        return DEFERRED

    def _place(self, command: RemotingCommand) -> QueuePlace:
        """Return the queue and offset of a request that this broker may carry out.

        A topic without the right to write takes copies: the right is that of producers.

        Raises:
            RefusedError: It accepts no messages, the topic is its own, or there is no such queue.
        """
        require_leader(self._group)
        check_accepts(self._settings)
        place = queue_place_of(command.ext)
        topic = place.topic
        check_sendable(topic)
        if topic in self._group.state.builtin_topics:
            raise RefusedError(
                Condition.NO_PERMISSION, f"{topic} is a topic of this broker; nothing was stored"
            )
        config = self._topics.config(topic)
        if config is None:
            raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        if place.queue_id >= config.queue_nums:
            raise RefusedError(
                Condition.INVALID_QUEUE,
                f"queueId[{place.queue_id}] is illegal, {topic} has {config.queue_nums} queues",
            )
        return place
