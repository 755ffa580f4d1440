"""QUERY_ASSIGNMENT (400), SET_MESSAGE_REQUEST_MODE (401), GET_ALL_MESSAGE_REQUEST_MODE (402).

A client that leaves the assignment of queues to the broker asks for its queues of a topic. With
POP it gets one that stands for all: any consumer may receive from any queue.

Spec: docs/internals/protocol/remoting.md, section 14.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup
from dledger.processors.answers import (
    RefusedError,
    bad_request,
    check_group_name,
    refusal,
    require_leader,
)
from dledger.processors.client_table import ClientTable
from dledger.processors.handles import Limit, handles
from dledger.remoting.access.accounts import (
    ADMIN,
    Permission,
    Right,
    Rule,
    group_right,
    topic_right,
)
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Answered, Handled
from dledger.remoting.protocol.bodies import MessageModel, MessageQueue
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.fastjson import member
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.pop_requests import (
    MessageQueueAssignment,
    MessageRequestModes,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
)
from dledger.remoting.protocol.topic_names import RETRY_PREFIX
from dledger.services.pending_configs import TopicView
from dledger.services.pop_grants import PopGrants
from dledger.services.pop_lines import PopAsk
from dledger.settings.parts import BrokerSettings
from dledger.state.pop import MAX_REQUEST_MODES, POP_MODE, PULL_MODE, RequestMode
from dledger.waiting import joined_in_turns

AVERAGELY: Final = "AVG"
"""RocketMQ's default strategy; the one that is known here."""

ANY_QUEUE: Final = -1
"""The queue of a POP consumer."""


def _asks(command: RemotingCommand) -> Sequence[Right]:
    body = QueryAssignmentRequestBody.decode(command.body)
    return (topic_right(body.topic, Permission.SUB), group_right(body.consumer_group))


ASKS: Final = Rule(rights=_asks)
"""The rights to the topic and the group in the body."""


def averagely(queues: Sequence[int], clients: Collection[str], client_id: str) -> Sequence[int]:
    """Return the queues of one client: neighbours, as many as of any other, or one more."""
    if client_id not in clients:
        return []
    place, count = sum(each < client_id for each in clients), len(clients)
    share, more = divmod(len(queues), count)
    first = place * share + min(place, more)
    return queues[first : first + share + (place < more)]


def _subject_of_mode(command: RemotingCommand) -> dict[str, str]:
    asked = SetMessageRequestModeRequestBody.decode(command.body)
    return {"topic": asked.topic, "group": asked.consumer_group}


@dataclass(eq=False, repr=False)
class AssignmentProcessor:
    """Assigns queues, and keeps which groups consume which topics by POP."""

    _group: BrokerGroup
    _settings: BrokerSettings
    _topics: TopicView
    _clients: ClientTable[Connection]
    _pops: PopGrants

    @handles(RequestCode.QUERY_ASSIGNMENT, limit=Limit.CLIENT, rule=ASKS)
    async def query(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 400: the queues of one consumer, and its mode."""
        require_leader(self._group)
        asked = QueryAssignmentRequestBody.decode(command.body)
        config = self._topics.config(asked.topic)
        mode = self._mode(asked.topic, asked.consumer_group)
        queues: Sequence[int] = ()
        if config is not None and config.readable:
            queues = range(config.read_queue_nums)
        if asked.message_model is MessageModel.CLUSTERING and queues:
            if mode == POP_MODE:
                queues = [ANY_QUEUE]
            else:
                queues = averagely(queues, self._client_ids(asked), asked.client_id)
        broker_name = self._settings.broker.broker_name
        assigned = (
            MessageQueueAssignment(MessageQueue(asked.topic, broker_name, queue_id), mode).encode()
            for queue_id in queues
        )
        encoded = await joined_in_turns(assigned, b"[]")
        return response_to(command, body=QueryAssignmentResponseBody(encoded).encode())

    def _mode(self, topic: str, group: str) -> str:
        mode = self._group.state.request_modes.get((topic, group))
        return PULL_MODE if mode is None else mode.mode

    def _client_ids(self, asked: QueryAssignmentRequestBody) -> Collection[str]:
        if asked.strategy_name not in ("", AVERAGELY):
            raise bad_request(
                f"the strategy {asked.strategy_name} is not known here; leave `clientRebalance` at"
                f" its default, true, or use {AVERAGELY}"
            )
        consumers = self._clients.consumer_group(asked.consumer_group)
        return () if consumers is None else consumers.client_ids

    @handles(
        RequestCode.SET_MESSAGE_REQUEST_MODE,
        limit=Limit.ADMIN,
        rule=ADMIN,
        subject=_subject_of_mode,
    )
    def set_mode(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 401 when the mode is in the log."""
        asked = SetMessageRequestModeRequestBody.decode(command.body)
        require_leader(self._group)
        check_group_name(asked.consumer_group)
        modes = self._group.state.request_modes
        if asked.mode not in (POP_MODE, PULL_MODE):
            raise bad_request(f"no mode is called {asked.mode}")
        if asked.topic.startswith(RETRY_PREFIX):
            raise bad_request("retry topics are consumed by pulls")
        if self._topics.config(asked.topic) is None:
            raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{asked.topic}] not exist")
        if (asked.topic, asked.consumer_group) not in modes and len(modes) >= MAX_REQUEST_MODES:
            raise RefusedError(
                Condition.TABLE_FULL, f"{MAX_REQUEST_MODES} modes are set; nothing was changed"
            )
        share = max(0, asked.pop_share_queue_num)
        mode = RequestMode(asked.consumer_group, asked.topic, asked.mode, share)

        def done(_ask: PopAsk, error: MQError | None) -> None:
            response = response_to(command) if error is None else refusal(command, error)
            connection.reply(command, response)

        self._pops.ask(PopAsk(on_done=done, modes=(mode,)))
        return DEFERRED

    @handles(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, limit=Limit.ADMIN, rule=ADMIN, shows=True)
    async def modes(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 402: every mode that was set."""
        modes = self._group.state.request_modes
        topics = {}
        for topic in list(modes.keys_of[0]):
            await trio.lowlevel.checkpoint()
            of_topic = [modes[key] for key in modes.keys_with(0, topic)]
            rows = (
                member(group, SetMessageRequestModeRequestBody(topic, group, mode, share))
                for group, topic, mode, share in of_topic
            )
            topics[topic] = await joined_in_turns(rows, b"{}")
        return response_to(command, body=MessageRequestModes(topics).encode())
