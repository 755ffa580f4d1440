"""What an operator asks of a client through its broker: 307, 309 and 223.

The broker passes the request on over the client's own connection and gives its answer back.

Spec: remoting fact sheet, sections 10 and 11.
"""

from __future__ import annotations

from typing import Final

import structlog
import trio

from commitlog.errors import (
    CorruptRecordError,
    LocalProtocolError,
    MQError,
    OffsetOutOfRangeError,
)
from commitlog.message_id import decode_offset_message_id
from dledger.group_api import BrokerGroup
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.client_table import Client, ClientTable
from dledger.processors.refusal import RefusedError, refusal
from remoting.connection import Connection
from remoting.errors import RemotingError, RequestTimedOutError
from remoting.processor import Answered, Handled
from remoting.protocol import bodies
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, request, response_to
from remoting.protocol.headers import (
    ConsumeDirectlyHeader,
    ConsumerClientHeader,
    ConsumerStatusHeader,
)
from remoting.protocol.outcome import Condition, answer

CLIENT_ANSWERS_WITHIN_S: Final = 10.0
"""RocketMQ's, for a client that is asked through its broker."""

STATUS_WITHIN_S: Final = 5.0
"""All clients of a group together, when each is asked how far it is."""

MIN_VERSION: Final = 62
"""V3_1_8_SNAPSHOT: older clients do not know what is passed on to them."""

logger = structlog.get_logger(__name__)


class ClientCallsProcessor:
    """Passes requests on to clients."""

    def __init__(
        self,
        group: BrokerGroup,
        clients: ClientTable[Connection],
        settings: BrokerSettings,
    ) -> None:
        self._group = group
        self._clients = clients
        self._settings = settings

    def running_info(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 307 with what the client says of itself."""
        try:
            header = ConsumerClientHeader.decode(command.ext)
            client = self._client(header.consumer_group, header.client_id)
        except MQError as error:
            return refusal(command, error)
        return self._pass_on(command, client, request(command.code, dict(command.ext)))

    def consume_directly(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 309 with what came of it: the client consumes one stored message now."""
        try:
            header = ConsumeDirectlyHeader.decode(command.ext)
            client = self._client(header.consumer_group, header.client_id)
            record = self._record(header.msg_id)
        except MQError as error:
            return refusal(command, error)
        ext = {**command.ext, "brokerName": self._settings.broker_name}
        return self._pass_on(command, client, request(command.code, ext, record))

    def consumer_status(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 223: how far each client of a group is in a topic, by its own account."""
        try:
            header = ConsumerStatusHeader.decode(command.ext)
            group = self._clients.consumer_group(header.group)
            clients = [] if group is None else list(group.clients.values())
            if header.client_addr:
                clients = [client for client in clients if client.client_id == header.client_addr]
            if not clients:
                raise RefusedError(
                    Condition.CONSUMER_NOT_ONLINE,
                    f"No Any Consumer online in the consumer group: [{header.group}]",
                )
        except MQError as error:
            return refusal(command, error)
        return self._ask_all(command, header, clients)

    # ------------------------------------------------------------------------------ clients

    def _client(self, group_name: str, client_id: str | None) -> Client[Connection]:
        group = self._clients.consumer_group(group_name)
        for client in () if group is None else group.clients.values():
            if client_id is None or client.client_id == client_id:
                if client.version < MIN_VERSION:
                    raise RefusedError(
                        Condition.BAD_REQUEST,
                        f"The Consumer <{client.client_id}> Version <{client.version}> too low to "
                        "finish, please upgrade it to V3_1_8_SNAPSHOT",
                    )
                return client
        raise RefusedError(
            Condition.BAD_REQUEST, f"The Consumer <{group_name}> <{client_id}> not online"
        )

    async def _pass_on(
        self, command: RemotingCommand, client: Client[Connection], passed: RemotingCommand
    ) -> Answered:
        try:
            told = await client.channel.invoke(passed, CLIENT_ANSWERS_WITHIN_S)
        except RequestTimedOutError as error:
            return answer(
                command,
                Condition.CLIENT_SILENT,
                f"consumer <{client.client_id}> did not answer: {error}",
            )
        except RemotingError as error:
            return refusal(command, error)
        return response_to(command, told.code, told.remark, dict(told.ext), told.body)

    async def _ask_all(
        self,
        command: RemotingCommand,
        header: ConsumerStatusHeader,
        clients: list[Client[Connection]],
    ) -> Answered:
        table: dict[str, dict[bodies.MessageQueue, int]] = {}
        ext = {"topic": header.topic, "group": header.group}

        async def ask(client: Client[Connection]) -> None:
            asked = request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, dict(ext))
            try:
                told = await client.channel.invoke(asked, STATUS_WITHIN_S)
                if told.code == ResponseCode.SUCCESS:
                    status = bodies.GetConsumerStatusBody.decode(told.body)
                    table[client.client_id] = status.message_queue_table
            except MQError as error:
                # It is missing in the answer, which says what the others said.
                logger.info("no_consumer_status", client=client.client_id, reason=str(error))

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(ask, client)
        ordered = {client_id: table[client_id] for client_id in sorted(table)}
        body = bodies.GetConsumerStatusBody(consumer_table=ordered)
        return response_to(command, 0, None, None, body.encode())

    # ------------------------------------------------------------------------------ log

    def _record(self, msg_id: str) -> bytes:
        try:
            _, _, phy_offset = decode_offset_message_id(msg_id)
            if 0 <= phy_offset < self._group.state.applied_end_position:
                return bytes(self._group.log.record_at(phy_offset))
        except (LocalProtocolError, OffsetOutOfRangeError, CorruptRecordError) as error:
            raise _no_message(msg_id) from error
        raise _no_message(msg_id)


def _no_message(msg_id: str) -> RefusedError:
    return RefusedError(
        Condition.BAD_REQUEST, f"can not find message by the offset in the id {msg_id}"
    )
