"""Requests and replies for the groups in memory: brokers push what repliers send."""

from functools import partial

from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.properties import decode_properties, encode_properties
from dledger.commitlog.record import encode_record
from dledger.remoting.connection import Connection
from dledger.remoting.errors import RemotingError
from dledger.remoting.handling import Answered, Handled
from dledger.remoting.protocol.bodies import HeartbeatData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import ReplyMessageHeader, SendMessageHeader
from dledger.remoting.protocol.outcome import Condition, answer
from tests.unit.client.fake_cluster import Broker, Group

REPLY_TOPIC = "c_REPLY_TOPIC"


class FakeReplies:
    """What a group does with requests and replies.

    Attributes:
        requests: Each that was stored, as a consumer gets it.
        known: Address of a broker to the clients that registered with it, with their groups.
        pushed: What clients answered to 326.
        refuse: Answers to 325 before any push, first come first served.
    """

    def __init__(self, group: Group) -> None:
        group.topics[REPLY_TOPIC] = 1
        self.group = group
        self.requests: list[MessageExt] = []
        self.known: dict[str, dict[str, tuple[Connection, list[str]]]] = {}
        self.pushed: list[RemotingCommand] = []
        self.refuse: list[Condition] = []
        for broker in group.brokers:
            broker.intercept = self._sent
            broker.on(RequestCode.SEND_REPLY_MESSAGE_V2, partial(self._reply, broker))
            broker.heard = partial(self._heard, broker)

    def _heard(self, broker: Broker, connection: Connection, data: HeartbeatData) -> None:
        groups = [producer.group_name for producer in data.producer_data_set]
        self.known.setdefault(broker.address, {})[data.client_id] = (connection, groups)

    def _sent(self, asked: RemotingCommand) -> Handled:
        if asked.code == RequestCode.SEND_MESSAGE_V2:
            header = SendMessageHeader.of(asked)
            properties = {**decode_properties(header.properties or ""), "CLUSTER": "c"}
            if "CORRELATION_ID" in properties:
                record = encode_record(
                    topic=header.topic,
                    queue_id=header.queue_id,
                    body=bytes(asked.body),
                    properties=encode_properties(properties),
                )
                self.requests.append(MessageExt(memoryview(record), 0))
        return None

    def _reply(self, broker: Broker, asked: RemotingCommand) -> Handled:
        if not broker.leads:
            return broker._not_leader(asked)
        if self.refuse:
            condition = self.refuse.pop(0)
            return answer(asked, condition, "refused", reason=condition.value)
        header = SendMessageHeader.of(asked)
        client_id = decode_properties(header.properties or "")["REPLY_TO_CLIENT"]
        known = self.known.get(broker.address, {}).get(client_id)
        if known is None or known[0].is_closed:
            away = Condition.REQUESTER_AWAY
            return answer(asked, away, "not connected", reason=away.value)
        return self._push(asked, header, known[0])

    async def _push(
        self, asked: RemotingCommand, header: SendMessageHeader, connection: Connection
    ) -> Answered:
        try:
            self.pushed.append(await push(connection, header, bytes(asked.body)))
        except RemotingError as error:
            return answer(asked, Condition.REPLY_UNCONFIRMED, str(error))
        ext = {"msgId": "0", "queueId": str(header.queue_id), "queueOffset": "0"}
        return response_to(asked, 0, None, ext)


async def push(connection: Connection, header: SendMessageHeader, body: bytes) -> RemotingCommand:
    """Send 326 as RocketMQ does and return the client's answer."""
    pushed = ReplyMessageHeader(
        header.producer_group,
        header.topic,
        header.default_topic,
        header.default_topic_queue_nums,
        header.queue_id,
        header.sys_flag,
        header.born_timestamp,
        header.flag,
        (header.properties or "") + "PUSH_REPLY_TIME\x0117\x02",
        header.reconsume_times,
        born_host="10.0.0.7:4711",
        store_host="10.0.0.1:10911",
        store_timestamp=18,
    )
    code = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
    return await connection.invoke(request(code, dict(pushed.encode()), body), 3.0)
