"""CLONE_GROUP_OFFSET (314): a consumer group begins where another one stands.

Spec: remoting fact sheet, section 10.
"""

from __future__ import annotations

from collections.abc import Iterator

from commitlog.errors import MQError
from dledger.group_api import BrokerGroup, Proposed
from dledger.processors.client_table import ClientTable
from dledger.processors.names_check import check_group_name
from dledger.processors.refusal import RefusedError, failed_proposal, not_leader, refusal
from dledger.services.offset_commits import MAX_OFFSETS_PER_RECORD, OffsetCommits, OffsetSlot
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import CloneGroupOffsetHeader
from remoting.protocol.outcome import Condition


class CloneOffsetsProcessor:
    """Answers 314 when the offsets are in the log, all of them in one entry."""

    def __init__(
        self, group: BrokerGroup, clients: ClientTable[Connection], offsets: OffsetCommits
    ) -> None:
        self._group = group
        self._clients = clients
        self._offsets = offsets

    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Copy the offsets; success when there are none."""
        try:
            return self._clone(connection, command)
        except MQError as error:
            return refusal(command, error)

    def _clone(self, connection: Connection, command: RemotingCommand) -> Handled:
        header = CloneGroupOffsetHeader.decode(command.ext)
        group = self._group
        if group.leadership is None:
            raise not_leader(group)
        check_group_name(header.dest_group)
        items = list(self._copies(header))
        if not items:
            return response_to(command)
        if len(items) > MAX_OFFSETS_PER_RECORD:
            raise RefusedError(
                Condition.BAD_REQUEST,
                f"{len(items)} offsets are more than {MAX_OFFSETS_PER_RECORD}: clone the group"
                " topic by topic",
            )

        def done(proposed: Proposed) -> None:
            stored = proposed.outcome == "stored"
            connection.reply(
                command,
                response_to(command) if stored else failed_proposal(command, proposed, group),
            )

        self._offsets.commit_all_now(items, done)
        return DEFERRED

    def _copies(self, header: CloneGroupOffsetHeader) -> Iterator[tuple[OffsetSlot, int]]:
        source, target = header.src_group, header.dest_group
        consumers = self._clients.consumer_group(source)
        subscribed = consumers.subscriptions if consumers is not None else {}
        for topic in [header.topic] if header.topic else self._offsets.topics_of(source):
            config = self._group.state.topic_config(topic)
            left_behind = subscribed and topic not in subscribed and not header.offline
            if config is None or left_behind:
                continue
            for queue_id in range(config.queue_nums):
                offset = self._offsets.offset(source, topic, queue_id)
                if offset is not None:
                    yield (target, topic, queue_id), offset
