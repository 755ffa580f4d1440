"""SEND_REPLY_MESSAGE: 324 and 325. A reply is pushed to the client that waits for it, by 326.

Only the leader pushes: repliers send to it, and every client has sent it heartbeats, also while it
still followed. What the requester has confirmed is kept in the reply topic, for people; nothing
reads it, and a reply that could not be kept has arrived all the same.

Spec: docs/internals/protocol/remoting.md, sections 7.1 and 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from dledger.commitlog.entry import Run
from dledger.commitlog.errors import MQError
from dledger.commitlog.message_id import encode_offset_message_id
from dledger.commitlog.properties import (
    OWNED_NAMES,
    PROPERTY_PUSH_REPLY_TIME,
    PROPERTY_REPLY_TO_CLIENT,
    decode_properties,
    encode_properties,
)
from dledger.commitlog.record import (
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_TYPE_MASK,
    encode_record,
)
from dledger.group_api import BrokerGroup, Proposed
from dledger.processors.answers import (
    TRACED,
    RefusedError,
    bad_request,
    born_host_of,
    refusal,
    require_leader,
)
from dledger.processors.client_table import Client, ClientTable
from dledger.processors.destination import Destinations, body_refused, check_room
from dledger.processors.handles import Limit, handles, replies
from dledger.remoting.addresses import join_address
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Answered, Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import ReplyMessageHeader, SendMessageHeader
from dledger.remoting.protocol.outcome import REASON_FIELD, Condition, answer
from dledger.remoting.seams import Clock
from dledger.settings.parts import BrokerSettings
from dledger.waiting import Future

PUSH_WITHIN_S: Final = 2.5
"""How long a requester may take: less than the 3 s that repliers wait for their answer."""

KEPT_SYS_FLAGS: Final = SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_TYPE_MASK
"""What a replier may set; the other bits are the broker's."""

logger = structlog.get_logger(__name__)


class _RequesterAwayError(RefusedError):
    """The requester is not connected here, or did not accept the reply."""

    answer_fields: Final = {REASON_FIELD: Condition.REQUESTER_AWAY.value}

    def __init__(self, remark: str) -> None:
        super().__init__(Condition.REQUESTER_AWAY, remark)


class _Reply(NamedTuple):
    """A reply that passed all checks."""

    header: SendMessageHeader
    queue_id: int
    properties: dict[str, str]
    body: bytes
    born_host: bytes
    born_at: str
    """``ip:port`` of the replier."""


@dataclass(eq=False, repr=False)
class ReplyProcessor:
    """Brings replies to requesters."""

    _group: BrokerGroup
    _clients: ClientTable[Connection]
    _settings: BrokerSettings
    _destinations: Destinations
    _clock: Clock

    @handles(
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
        limit=Limit.REPLY,
        rule=replies,
    )
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 324 and 325: refusals at once, else when the requester has confirmed the reply."""
        try:
            reply = self._checked(connection, command)
            client = self._requester(reply)
        except MQError as error:
            return self._with_region(refusal(command, error))
        return self._push(command, reply, client)

    def _with_region(self, response: RemotingCommand) -> RemotingCommand:
        response.ext.update(TRACED)
        return response

    # ------------------------------------------------------------------------------ checks

    def _checked(self, connection: Connection, command: RemotingCommand) -> _Reply:
        require_leader(self._group)
        header = SendMessageHeader.of(command)
        queue_id = header.queue_id
        config, _ = self._destinations.check(header.topic, queue_id)
        if queue_id < 0:
            queue_id = self._destinations.any_queue(config)
        size, most = memoryview(command.body).nbytes, self._settings.store.max_message_size
        if not 0 < size <= most:
            raise body_refused(size, most)
        properties = {
            name: value
            for name, value in decode_properties(header.properties or "").items()
            if name not in OWNED_NAMES
        }
        check_room(encode_properties(properties))  # refused here if it cannot be done later
        return _Reply(
            header,
            queue_id,
            properties,
            bytes(command.body),  # outlives the buffer it was received in
            born_host_of(connection),
            join_address(*connection.peer_address),
        )

    def _requester(self, reply: _Reply) -> Client[Connection]:
        client_id = reply.properties.get(PROPERTY_REPLY_TO_CLIENT)
        if client_id is None:
            raise bad_request(f"reply message properties[{PROPERTY_REPLY_TO_CLIENT}] is null")
        client = self._clients.producer(client_id)
        if client is None:
            raise _RequesterAwayError(
                f"push reply message fail, channel of <{client_id}> not found."
            )
        return client

    # ------------------------------------------------------------------------------ push

    async def _push(
        self, command: RemotingCommand, reply: _Reply, client: Client[Connection]
    ) -> Answered:
        failed = f"push reply message to {client.client_id} fail."
        try:
            confirmed = await client.channel.invoke(self._pushed(reply), PUSH_WITHIN_S)
        except MQError as error:
            logger.info("reply_not_pushed", client=client.client_id, reason=str(error))
            if error.outcome != "unknown":
                return self._with_region(refusal(command, _RequesterAwayError(failed)))
            return self._with_region(answer(command, Condition.REPLY_UNCONFIRMED, failed))
        if confirmed.code != ResponseCode.SUCCESS:
            logger.info("reply_refused", client=client.client_id, remark=confirmed.remark)
            return self._with_region(refusal(command, _RequesterAwayError(failed)))
        message_id, queue_offset = await self._keep(reply)
        ext = {
            "msgId": message_id,
            "queueId": str(reply.queue_id),
            "queueOffset": str(queue_offset),
        }
        return self._with_region(response_to(command, ext=ext))

    def _pushed(self, reply: _Reply) -> RemotingCommand:
        header, now_ms = reply.header, self._clock.wall_ms()
        properties = {**reply.properties, PROPERTY_PUSH_REPLY_TIME: str(now_ms)}
        pushed = ReplyMessageHeader(
            producer_group=header.producer_group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queue_nums=header.default_topic_queue_nums,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            flag=header.flag,
            properties=encode_properties(properties).decode(),
            reconsume_times=header.reconsume_times,
            unit_mode=bool(header.unit_mode),
            born_host=reply.born_at,
            store_host=self._settings.address,
            store_timestamp=now_ms,
        )
        return request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, dict(pushed.encode()), reply.body)

    # ------------------------------------------------------------------------------ keep

    async def _keep(self, reply: _Reply) -> tuple[str, int]:
        """Store the reply; return its id and offset, or what RocketMQ answers for one not kept."""
        not_kept = ("0", 0)
        if not self._settings.broker.store_reply_message_enable:
            return not_kept
        done = Future[Proposed]()
        try:
            if self._destinations.space.is_full:
                raise self._destinations.space.full_error()
            record = self._record(reply)
            target = Run(reply.header.topic, reply.queue_id, 1)
            self._destinations.propose(None, [record], target, done)
        except MQError as error:
            logger.info("reply_not_kept", topic=reply.header.topic, reason=str(error))
            return not_kept
        placed = await done.wait()
        if placed.outcome != "stored":
            logger.info("reply_not_kept", topic=reply.header.topic, reason=placed.outcome)
            return not_kept
        message_id = encode_offset_message_id(self._settings.store_host, placed.phy_offset)
        return message_id, placed.first_offsets[-1]

    def _record(self, reply: _Reply) -> bytes:
        header = reply.header
        return encode_record(
            topic=header.topic,
            queue_id=reply.queue_id,
            body=reply.body,
            properties=encode_properties(reply.properties),
            flag=header.flag,
            sys_flag=header.sys_flag & KEPT_SYS_FLAGS,
            born_timestamp_ms=header.born_timestamp,
            born_host=reply.born_host,
            reconsume_times=header.reconsume_times or 0,
        )
