"""What a copy of queues asks of the two clusters: tables, bounds, stored records, offsets.

Records are read as they are stored and appended as they are: properties, keys, tags, born time and
host, and bodies, compressed or not, are not looked at on the way. Both clusters ask for an
administrator where they check accounts. The cluster that is written to must be one of ours; the
other one may be.

Spec: docs/reference/own-requests.md, COPY_RECORDS.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from typing_extensions import Buffer

from dledger.client.admin.groups import ASK_TIMEOUT_S, checked
from dledger.client.admin.messages import READING_GROUP
from dledger.client.consumer.pull_consumer import DRAIN_MESSAGES, PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    NoNameServerError,
    NoRouteError,
    OffsetNotExpectedError,
    RequestFailedError,
    RequestTimedOutError,
)
from dledger.client.core.links import Link
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import (
    NO_HOST,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_OFFSET,
    SYS_FLAG_STORE_HOST_V6,
    decode_record,
    encode_record,
    pack_host,
)
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand, request
from dledger.remoting.protocol.headers import TopicHeader, UpdateConsumerOffsetHeader
from dledger.remoting.protocol.outcome import NEXT_OFFSET_FIELD, outcome_of
from dledger.remoting.protocol.own_fields import (
    COUNT_FIELD,
    OFFSET_FIELD,
    ONLY_FORWARD_FIELD,
    QUEUE_ID_FIELD,
)

APPEND_TIMEOUT_S: Final = 30.0
"""Over all attempts: an election takes a second or two, and a link to another site is slow."""
APPEND_ATTEMPT_S: Final = 10.0
"""A majority that does not take it is answered after 3 s; the rest is for the way."""

ROUTE_WAIT_S: Final = 5.0
"""For the routes of topics that were made; one that comes later is no failure."""
ROUTE_POLL_S: Final = 0.02

ANY_TOPIC: Final = "TBW102"
"""Its route is refreshed when a leader is lost and the request is about no topic."""

Bounds = tuple[int, int]
"""First offset that a queue holds, and one past the last."""


class ClusterCopies:
    """One cluster of a copy, through a client instance. Holds nothing open of its own."""

    def __init__(self, instance: ClientInstance) -> None:
        """Use *instance*, which must be open."""
        self._instance = instance
        # Not opened: what only reads is no member of the group, and brokers keep nothing of it.
        self._reader = PullConsumer(instance, READING_GROUP)

    # ------------------------------------------------------------------------------ tables

    async def broker_names(self) -> list[str]:
        """Return the broker groups of the cluster, by name.

        Raises:
            NoNameServerError: None answers.
        """
        answer = await self._instance.name_servers.invoke(
            request(RequestCode.GET_BROKER_CLUSTER_INFO)
        )
        checked(answer, "groups of the cluster")
        table = bodies.ClusterInfo.decode(answer.body).broker_addr_table
        for name, group in table.items():
            self._instance.routes.add_members(name, dict(group.broker_addrs))
        return sorted(table)

    async def topics(self, broker_name: str) -> dict[str, bodies.TopicConfig]:
        """Return the topics of one broker group but those that it has by itself.

        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        answer = await self._ask(broker_name, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
        own = set(bodies.TopicList.decode(answer.body).topic_list)
        answer = await self._ask(broker_name, RequestCode.GET_ALL_TOPIC_CONFIG)
        table = bodies.TopicConfigSerializeWrapper.decode(answer.body).topic_config_table
        return {name: config for name, config in table.items() if name not in own}

    async def put_topics(self, broker_name: str, configs: Sequence[bodies.TopicConfig]) -> None:
        """Create these topics, or change them, together; wait for a route of each.

        Raises:
            RequestFailedError: Refused, also where messages would be given up; nothing changed.
            BrokerUnreachableError: No leader answers.
        """
        body = bodies.TopicConfigList(topic_config_list=list(configs)).encode()
        await self._ask(broker_name, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)
        clock = self._instance.clock
        until_s = clock.monotonic() + ROUTE_WAIT_S
        for config in configs:
            while clock.monotonic() < until_s:
                try:
                    await self._instance.routes.refresh(config.topic_name)
                    break
                except (NoRouteError, NoNameServerError):
                    await clock.sleep(ROUTE_POLL_S)

    async def groups(self, broker_name: str) -> dict[str, bodies.SubscriptionGroupConfig]:
        """Return the consumer groups of one broker group; errors as `topics`."""
        answer = await self._ask(broker_name, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
        return dict(bodies.SubscriptionGroupWrapper.decode(answer.body).subscription_group_table)

    async def put_groups(
        self, broker_name: str, configs: Sequence[bodies.SubscriptionGroupConfig]
    ) -> None:
        """Create these consumer groups, or change them, together; errors as `put_topics`."""
        body = bodies.SubscriptionGroupConfigList(group_config_list=list(configs)).encode()
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
        await self._ask(broker_name, code, body=body)

    # ------------------------------------------------------------------------------ queues

    async def all_bounds(self, broker_name: str, config: bodies.TopicConfig) -> dict[int, Bounds]:
        """Return the bounds of each queue of a topic, as its leader has applied them.

        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        topic = config.topic_name
        ext = dict(TopicHeader(topic).encode())
        answer = await self._ask(broker_name, RequestCode.GET_TOPIC_STATS_INFO, ext)
        table = bodies.TopicStatsTable.decode(answer.body).offset_table
        found = {queue.queue_id: (at.min_offset, at.max_offset) for queue, at in table.items()}
        # It shows the queues for writing; those that are only read may hold messages, too.
        for queue_id in range(config.write_queue_nums, config.read_queue_nums):
            found[queue_id] = await self.bounds(MessageQueue(topic, broker_name, queue_id))
        return found

    async def bounds(self, queue: MessageQueue) -> Bounds:
        """Return the bounds of a queue; its end counts all that was stored before the question.

        Raises:
            RequestFailedError, BrokerUnreachableError, NoRouteError: No leader answers.
        """
        return await self._reader.min_offset(queue), await self._reader.max_offset(queue)

    async def read(
        self, queue: MessageQueue, offset: int, max_bytes: int, max_messages: int = DRAIN_MESSAGES
    ) -> list[memoryview]:
        """Return stored records from *offset* on, as they are stored; none at the end of the queue.

        Raises:
            OffsetIllegalError: The queue does not hold *offset*.
            DamagedAnswerError: Bytes went bad; reading again may help.
            RequestFailedError, BrokerUnreachableError, NoRouteError: No leader answers.
        """
        result = await self._reader.pull(
            queue,
            offset,
            max_messages=max_messages,
            max_bytes=max_bytes,
            timeout_s=0,
            with_expired=True,
        )
        return [message.stored for message in result.messages]

    async def append(self, queue: MessageQueue, offset: int, records: Sequence[Buffer]) -> int:
        """Append records that have the offsets from *offset* on; return the queue's next one.

        Raises:
            OffsetNotExpectedError: The queue's next offset is another one; nothing was stored.
            RequestTimedOutError: They may be stored.
            RequestFailedError: Refused; nothing was stored.
            BrokerUnreachableError: No leader answers; nothing was stored.
        Cancellation: They may be stored.
        """
        sent = [with_ipv4_store_host(record) for record in records]
        sizes = b"".join(memoryview(record).nbytes.to_bytes(4, "big") for record in sent)
        ext = {**_place(queue, offset), COUNT_FIELD: len(sent)}
        code = RequestCode.COPY_RECORDS
        answer = await self._change(queue, code, ext, b"".join((sizes, *sent)))
        return int(answer.ext[OFFSET_FIELD])

    async def begin(self, queue: MessageQueue, offset: int) -> None:
        """Let a queue that never had a message begin at *offset*.

        Raises:
            OffsetNotExpectedError: It has had one, or begins elsewhere already.
            RequestTimedOutError: It may begin there.
            RequestFailedError, BrokerUnreachableError: It does not.
        """
        await self._change(queue, RequestCode.BEGIN_QUEUE, _place(queue, offset), b"")

    # ------------------------------------------------------------------------------ groups

    async def committed(self, broker_name: str) -> dict[tuple[str, str], dict[int, int]]:
        """Return (consumer group, topic) → queue id → committed offset of one broker group.

        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        answer = await self._ask(broker_name, RequestCode.GET_ALL_CONSUMER_OFFSET)
        table = bodies.ConsumerOffsetSerializeWrapper.decode(answer.body).offset_table
        found: dict[tuple[str, str], dict[int, int]] = {}
        for key, offsets in table.items():
            topic, _, group = key.partition("@")
            found[group, topic] = dict(offsets)
        return found

    async def commit(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Commit for *group*, unless it stands there or further by now.

        Raises:
            RequestTimedOutError: It may be stored or not; committing again is harmless.
            RequestFailedError, BrokerUnreachableError: It is not.
        """
        header = UpdateConsumerOffsetHeader(group, queue.topic, queue.queue_id, offset)
        ext = {**header.encode(), "sync": "true", ONLY_FORWARD_FIELD: "true"}
        await self._change(queue, RequestCode.UPDATE_CONSUMER_OFFSET, ext, b"")

    # ------------------------------------------------------------------------------ inside

    async def _ask(
        self,
        broker_name: str,
        code: RequestCode,
        ext: ExtFields | None = None,
        body: bytes = b"",
    ) -> RemotingCommand:
        answer = await self._instance.ask_leader(
            broker_name, code, ext, body, topic=ANY_TOPIC, timeout_s=ASK_TIMEOUT_S
        )
        return checked(answer, f"{code.name} on {broker_name}")

    async def _change(
        self, queue: MessageQueue, code: RequestCode, ext: ExtFields, body: bytes
    ) -> RemotingCommand:
        def known(link: Link) -> int:
            if not link.copies:
                raise RequestFailedError(
                    f"the broker {link.address} takes no records of another cluster: it is of an"
                    " older release, or RocketMQ's; nothing was sent",
                    code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                )
            return code

        answer = await self._instance.ask_leader(
            queue.broker_name,
            code,
            ext,
            body,
            topic=queue.topic,
            timeout_s=APPEND_TIMEOUT_S,
            attempt_timeout_s=APPEND_ATTEMPT_S,
            adapt=known,
            changes=True,
        )
        if answer.code == ResponseCode.SUCCESS:
            return answer
        remark = answer.remark or ""
        text = f"{code.name} to {queue}: refused with code {answer.code}: {remark}"
        if answer.code == ResponseCode.OFFSET_NOT_EXPECTED:
            raise OffsetNotExpectedError(
                text,
                code=answer.code,
                remark=remark,
                next_offset=int(answer.ext[NEXT_OFFSET_FIELD]),
            )
        kind = RequestTimedOutError if outcome_of(answer) == "unknown" else RequestFailedError
        raise kind(text, code=answer.code, remark=remark)


def _place(queue: MessageQueue, offset: int) -> ExtFields:
    return {"topic": queue.topic, QUEUE_ID_FIELD: queue.queue_id, OFFSET_FIELD: offset}


def with_ipv4_store_host(record: Buffer) -> Buffer:
    """Return a record with space for an IPv4 store host: the one that it has is written over."""
    view = memoryview(record)
    if (
        not int.from_bytes(view[SYS_FLAG_OFFSET : SYS_FLAG_OFFSET + 4], "big")
        & SYS_FLAG_STORE_HOST_V6
    ):
        return record
    return without_store(view)


def without_store(stored: Buffer) -> bytes:
    """Return a record without position, store time and store host: what its copies share.

    Raises:
        CorruptRecordError: It is none.
    """
    record = decode_record(stored)
    return encode_record(
        topic=record.topic,
        queue_id=record.queue_id,
        body=record.body,
        properties=record.properties,
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_timestamp_ms=record.born_timestamp_ms,
        born_host=pack_host(*record.born_host),
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.prepared_transaction_offset,
        queue_offset=record.queue_offset,
        store_host=NO_HOST,
    )


def offsets_of(records: Collection[memoryview]) -> list[int]:
    """Return the queue offset of each stored record."""
    at, end = QUEUE_OFFSET_OFFSET, QUEUE_OFFSET_OFFSET + 8
    return [int.from_bytes(record[at:end], "big", signed=True) for record in records]
