"""CONSUME_STEP (51111): messages and a consumer group's offsets in one entry, all or nothing.

The step is appended only where the group stands at the offsets that the step begins at: at most one
step leaves each offset; any other is refused with the offset that the group has, and stores
nothing.

Request: CBOR header as of SEND_RECORDS, where ``runs`` may be empty, and ``consumer_group``,
``commits`` = [[topic, queue id, offset before, offset behind], ...]. Answer: as of SEND_RECORDS,
when the step is applied.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from dledger.group_api import BrokerGroup, OffsetCommit
from dledger.processors.answers import RefusedError, born_host_of, check_group_name
from dledger.processors.handles import CONSUMES_AND_SENDS, Limit, handles
from dledger.processors.send_records import SendRecordsProcessor
from dledger.remoting.access.gate import limited_account
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.own_fields import step_commits_of
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView, noting
from dledger.state.state_record import ConsumerOffsetsChange, state_record


@dataclass(eq=False, repr=False)
class ConsumeStepProcessor:
    """Turns a step into one proposal."""

    _group: BrokerGroup
    _topics: TopicView
    _offsets: OffsetCommits
    _records: SendRecordsProcessor

    @handles(RequestCode.CONSUME_STEP, limit=Limit.SEND, rule=CONSUMES_AND_SENDS, appends=True)
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51111: refusals at once, everything else when the step is applied."""
        consumer_group = command.ext.get("consumer_group")
        if not isinstance(consumer_group, str):
            raise BadRequestError("consumer_group is not text")
        taken = self._records.take(connection, command)
        commits = self._commits(connection, command, consumer_group)
        offsets = tuple((each.group, each.topic, each.queue_id, each.offset) for each in commits)
        head = state_record(ConsumerOffsetsChange.of(offsets))
        batch = taken.batch_behind([head], born_host_of(connection))
        answer = self._records.answering(connection, command, len(taken.runs), {})
        with noting((self._topics.pending, taken.made)) as settled:
            self._offsets.commit_step(batch, commits, answer, settled)
        return DEFERRED

    def _commits(
        self, connection: Connection, command: RemotingCommand, consumer_group: str
    ) -> tuple[OffsetCommit, ...]:
        """Return the offsets of the step.

        Raises:
            RefusedError: The group, a topic or a queue does not exist; nothing was stored.
            TableFullError: The group may have no offsets in another topic.
        """
        check_group_name(consumer_group)
        if self._topics.subscription_group_or_default(consumer_group) is None:
            raise RefusedError(Condition.GROUP_NOT_EXIST, f"Group {consumer_group} not exist!")
        account = limited_account(connection)
        found = []
        for topic, queue_id, expected, offset in step_commits_of(command.ext):
            config = self._topics.config(topic)
            if config is None:
                raise RefusedError(Condition.TOPIC_NOT_EXIST, f"Topic {topic} not exist!")
            if queue_id >= config.queue_nums:
                raise RefusedError(
                    Condition.INVALID_QUEUE,
                    f"queueId[{queue_id}] is illegal, {topic} has {config.queue_nums} queues",
                )
            self._offsets.check_room(consumer_group, topic, account)
            found.append(OffsetCommit(consumer_group, topic, queue_id, offset, expected))
        return tuple(found)
