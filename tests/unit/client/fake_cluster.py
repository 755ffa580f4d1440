"""NameServers and broker groups in memory, behind the real remoting server."""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import trio
import trio.testing

from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.commitlog.message_id import encode_offset_message_id
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import Record, decode_record, encode_record, pack_host
from dledger.commitlog.record_batch import decode_batch
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Handled
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.bodies import (
    BrokerData,
    ClusterInfo,
    ConsumerIdList,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
    QueueData,
    TopicList,
    TopicOffset,
    TopicRouteData,
    TopicStatsTable,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import SendMessageHeader
from tests.harness.fake_nodes import Node, NodeWorld


class NameServer(Node):
    world: World

    def __init__(self, world: World, address: str) -> None:
        super().__init__(world, address)
        # Called with each question first; None: it is answered as always.
        self.intercept: Callable[[RemotingCommand], RemotingCommand | None] = lambda _: None
        self.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, lambda a: self.intercept(a) or self._route(a))
        self.on(
            RequestCode.GET_BROKER_CLUSTER_INFO, lambda a: self.intercept(a) or self._cluster(a)
        )
        self.on(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, self._topics)
        self.on(RequestCode.DELETE_TOPIC_IN_NAMESRV, response_to)

    def _route(self, asked: RemotingCommand) -> RemotingCommand:
        topic = asked.ext["topic"]
        groups = [g for g in self.world.groups.values() if topic in g.topics]
        if not groups:
            return response_to(asked, ResponseCode.TOPIC_NOT_EXIST, f"No topic route info: {topic}")
        data = TopicRouteData(
            queue_datas=[
                QueueData(
                    broker_name=g.name,
                    read_queue_nums=g.topics[topic],
                    write_queue_nums=g.topics[topic],
                    perm=7 if topic == "TBW102" else 6,
                )
                for g in groups
            ],
            broker_datas=[
                BrokerData(cluster="c", broker_name=g.name, broker_addrs=g.registered)
                for g in groups
            ],
        )
        stated = {g.name: g.stated for g in groups if g.stated}
        ext = {"groupIdentities": msgspec.json.encode(stated).decode()}
        wanted = asked.ext.get("groupIdentities") == "true"
        return response_to(asked, 0, None, ext if stated and wanted else None, data.encode())

    def _cluster(self, asked: RemotingCommand) -> RemotingCommand:
        info = ClusterInfo(
            broker_addr_table={
                g.name: BrokerData(cluster="c", broker_name=g.name, broker_addrs=g.registered)
                for g in self.world.groups.values()
            },
            cluster_addr_table={"c": list(self.world.groups)},
        )
        return response_to(asked, 0, None, None, info.encode())

    def _topics(self, asked: RemotingCommand) -> RemotingCommand:
        topics = sorted({t for g in self.world.groups.values() for t in g.topics})
        return response_to(asked, 0, None, None, TopicList(topic_list=topics).encode())


class Broker(Node):
    """One member of a group."""

    def __init__(self, world: World, group: Group, address: str) -> None:
        super().__init__(world, address)
        self.group = group
        # Called with each SEND_RECORDS or 310 when this node leads; returns an answer instead.
        self.intercept: Callable[[RemotingCommand], Handled] | None = None
        # What it reports of its group; None: nothing, as RocketMQ.
        self.identity: str | None = None
        # Codes with which the next questions for its capabilities are refused.
        self.not_now: list[int] = []
        self.says_not_now: dict[str, str] = {}
        self.not_now_remark = "not now"
        self.delay_s = 0.0
        # Called for each heartbeat.
        self.heard: Callable[[Connection, HeartbeatData], None] = lambda _, data: None
        if not group.rocketmq:
            self.on(RequestCode.CAPABILITIES, self._capabilities)
            self.on(RequestCode.SEND_RECORDS, self._send_records)
            self.on(RequestCode.RAFT_STATUS, self._raft_status)
            self.on(RequestCode.OPEN_PRODUCER, self._open_producer)
            if group.bulk:
                self.on(RequestCode.BULK_PULL, self._pull)
        self.on(RequestCode.SEND_MESSAGE_V2, self._send)
        self.on(RequestCode.SEND_BATCH_MESSAGE, self._send)
        self.on(RequestCode.PULL_MESSAGE, self._pull)
        # Consumer group → connection → client id; each broker knows what it received itself.
        self.consumers: dict[str, dict[Connection, str]] = {}
        self.on_from(RequestCode.HEART_BEAT, self._heartbeat)
        self.on_from(RequestCode.UNREGISTER_CLIENT, self._unregister)
        self.on(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self._consumer_list)
        self.on(RequestCode.LOCK_BATCH_MQ, self._lock)
        self.on(RequestCode.UNLOCK_BATCH_MQ, self._unlock)
        self.on(RequestCode.CONSUMER_SEND_MSG_BACK, self._send_back)
        self.on(RequestCode.GET_MAX_OFFSET, self._max_offset)
        self.on(RequestCode.GET_TOPIC_STATS_INFO, self._topic_stats)
        self.on(RequestCode.GET_MIN_OFFSET, lambda a: self._led(a, {"offset": "0"}))
        self.on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, lambda a: self._led(a, {"offset": "1"}))
        self.on(RequestCode.UPDATE_CONSUMER_OFFSET, self._commit)
        self.on(RequestCode.QUERY_CONSUMER_OFFSET, self._committed)
        self.on(RequestCode.UPDATE_AND_CREATE_TOPIC, self._create_topic)
        self.on(RequestCode.DELETE_TOPIC_IN_BROKER, self._delete_topic)
        self.on(RequestCode.VIEW_MESSAGE_BY_ID, self._view)

    @property
    def leads(self) -> bool:
        return self.group.leader == self.address

    def _not_leader(self, asked: RemotingCommand) -> RemotingCommand:
        ext = {"term": str(self.group.term), "outcome": "not_stored"}
        if self.group.leader is not None:
            ext["leaderAddr"] = self.group.leader
        return response_to(asked, ResponseCode.SERVICE_NOT_AVAILABLE, "not the leader", ext)

    def _led(self, asked: RemotingCommand, ext: dict[str, str]) -> RemotingCommand:
        return response_to(asked, 0, None, dict(ext)) if self.leads else self._not_leader(asked)

    def _capabilities(self, asked: RemotingCommand) -> RemotingCommand:
        if self.not_now:
            said = dict(self.says_not_now)
            return response_to(asked, self.not_now.pop(), self.not_now_remark, said)
        ext = {"cbor": "true", "records": "true"}
        if self.group.idempotent:
            ext["idempotent"] = "true"
        if self.group.names_stale:
            ext["staleReceipts"] = "true"
        if self.identity is not None:
            ext["groupIdentity"] = self.identity
        return response_to(asked, 0, None, ext)

    def _open_producer(self, asked: RemotingCommand) -> RemotingCommand:
        if not self.leads:
            return self._not_leader(asked)
        self.group.epoch += 1
        return response_to(asked, 0, None, {"producerEpoch": str(self.group.epoch)})

    def _raft_status(self, asked: RemotingCommand) -> RemotingCommand:
        body = {
            "role": "leader" if self.leads else "follower",
            "term": self.group.term,
            "leader_address": self.group.leader,
            "serving": self.leads,
        }
        return response_to(asked, 0, None, None, msgspec.json.encode(body))

    def _later(self, answer: RemotingCommand) -> Handled:
        if not self.delay_s:
            return answer

        async def wait() -> RemotingCommand:
            await trio.sleep(self.delay_s)
            return answer

        return wait()

    def _send_records(self, asked: RemotingCommand) -> Handled:
        if not self.leads:
            return self._not_leader(asked)
        if self.intercept is not None:
            handled = self.intercept(asked)
            if handled is not None:
                return handled
        return self._later(self.store_records(asked))

    def store_records(self, asked: RemotingCommand) -> RemotingCommand:
        """Store what *asked* brings, run by run, and return the answer."""
        group = self.group
        count = sum(run[2] for run in asked.ext["runs"])
        view = memoryview(asked.body)
        sizes = struct.unpack_from(f">{count}I", view)
        at, number = 4 * count, 0
        results: list[list[object]] = []
        first = -1
        for topic, queue_id, records in asked.ext["runs"]:
            refusal = group.refused_queues.get((topic, queue_id))
            base = len(group.queue(topic, queue_id))
            for _ in range(records):
                record = decode_record(view[at : at + sizes[number]])
                assert record.topic == topic
                assert record.queue_id == queue_id
                assert record.properties.startswith(b"UNIQ_KEY\x01")
                at += sizes[number]
                if refusal is None:
                    if first < 0:
                        first = group.end_position
                    group.store(topic, queue_id, record)
                number += 1
            results.append([0, base] if refusal is None else [refusal, -1, "refused"])
        assert at == view.nbytes
        ext: dict[str, object] = {"results": results}
        if first >= 0:
            host, port = self.address.split(":")
            ext |= {
                "phy_offset": first,
                "store_host": pack_host(host, int(port)),
                "store_time_ms": 1,
            }
        return response_to(asked, 0, None, ext)

    def _send(self, asked: RemotingCommand) -> Handled:
        header = SendMessageHeader.of(asked)
        if not self.leads:
            return self._not_leader(asked)
        if self.intercept is not None:
            handled = self.intercept(asked)
            if handled is not None:
                return handled
        group = self.group
        base = len(group.queue(header.topic, header.queue_id))
        host, port = self.address.split(":")
        ids = []
        items = (
            [(bytes(i.body), i.properties) for i in decode_batch(asked.body)]
            if asked.code == RequestCode.SEND_BATCH_MESSAGE
            else [(bytes(asked.body), (header.properties or "").encode())]
        )
        for body, properties in items:
            record = decode_record(
                encode_record(
                    topic=header.topic,
                    queue_id=max(0, header.queue_id),
                    body=body,
                    properties=properties,
                    sys_flag=header.sys_flag,
                )
            )
            ids.append(encode_offset_message_id(pack_host(host, int(port)), group.end_position))
            topic = header.topic
            times, most = header.reconsume_times or 0, header.max_reconsume_times
            if topic.startswith("%RETRY%") and most is not None and times > most:
                topic = topic.replace("%RETRY%", "%DLQ%")
            group.store(topic, max(0, header.queue_id), record, reconsume_times=times)
        return self._later(
            response_to(
                asked,
                0,
                None,
                {"msgId": ",".join(ids), "queueId": str(header.queue_id), "queueOffset": str(base)},
            )
        )

    def _pull(self, asked: RemotingCommand) -> Handled:
        if not self.leads:
            return self._not_leader(asked)
        topic, queue_id = asked.ext["topic"], int(asked.ext["queueId"])
        offset, count = int(asked.ext["queueOffset"]), int(asked.ext["maxMsgNums"])
        if asked.code == RequestCode.PULL_MESSAGE:
            count = min(count, 32)
        queue = self.group.queue(topic, queue_id)
        ext = {
            "suggestWhichBrokerId": "0",
            "nextBeginOffset": str(offset),
            "minOffset": "0",
            "maxOffset": str(len(queue)),
        }
        if offset > len(queue):
            ext["nextBeginOffset"] = str(len(queue))
            return response_to(asked, ResponseCode.PULL_OFFSET_MOVED, None, ext)
        found = queue[offset : offset + count]
        if found:
            ext["nextBeginOffset"] = str(offset + len(found))
            return response_to(asked, 0, None, ext, b"".join(found))
        if int(asked.ext["sysFlag"]) & 2 and int(asked.ext["suspendTimeoutMillis"]):
            return self._hold(asked, topic, queue_id, offset, ext)
        return response_to(asked, ResponseCode.PULL_NOT_FOUND, None, ext)

    async def _hold(
        self, asked: RemotingCommand, topic: str, queue_id: int, offset: int, ext: dict[str, str]
    ) -> RemotingCommand:
        with trio.move_on_after(int(asked.ext["suspendTimeoutMillis"]) / 1000):
            while len(self.group.queue(topic, queue_id)) <= offset:
                await self.group.arrived.park()
            found = self.group.queue(topic, queue_id)[offset:]
            ext |= {
                "nextBeginOffset": str(offset + len(found)),
                "maxOffset": str(offset + len(found)),
            }
            return response_to(asked, 0, None, ext, b"".join(found))
        return response_to(asked, ResponseCode.PULL_NOT_FOUND, None, ext)

    def _heartbeat(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        data = HeartbeatData.decode(asked.body)
        self.heard(connection, data)
        for consumer in data.consumer_data_set:
            members = self.consumers.setdefault(consumer.group_name, {})
            if self.group.makes_retry_topics and consumer.consume_type == "CONSUME_PASSIVELY":
                self.group.topics.setdefault(f"%RETRY%{consumer.group_name}", 1)
            if connection not in members:
                members[connection] = data.client_id
                connection.on_close.append(self._gone)
                self._notify(consumer.group_name)
        return response_to(asked)

    def _gone(self, connection: Connection) -> None:
        for group, members in self.consumers.items():
            if members.pop(connection, None) is not None:
                self._notify(group)

    def _unregister(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        group = asked.ext.get("consumerGroup")
        if group and self.consumers.get(group, {}).pop(connection, None) is not None:
            self._notify(group)
        return response_to(asked)

    def _notify(self, group: str) -> None:
        if self.group.notifies:
            for connection in list(self.consumers[group]):
                code = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
                if not connection.is_closed:
                    connection.invoke_oneway(request(code, {"consumerGroup": group}))

    def _consumer_list(self, asked: RemotingCommand) -> RemotingCommand:
        members = self.consumers.get(asked.ext["consumerGroup"])
        if not members:
            return response_to(asked, 1, "no consumer for this group")
        body = ConsumerIdList(consumer_id_list=sorted(set(members.values()))).encode()
        return response_to(asked, 0, None, None, body)

    def _lock(self, asked: RemotingCommand) -> RemotingCommand:
        if not self.leads:
            return self._not_leader(asked)
        body = LockBatchRequestBody.decode(asked.body)
        now = trio.current_time()
        granted = []
        for queue in body.mq_set:
            holder, since = self.group.locks.get((body.consumer_group, queue), ("", -1000.0))
            if holder in ("", body.client_id) or now - since > 60:
                self.group.locks[body.consumer_group, queue] = (body.client_id, now)
                granted.append(queue)
        return response_to(
            asked, 0, None, None, LockBatchResponseBody(lock_ok_mq_set=granted).encode()
        )

    def _unlock(self, asked: RemotingCommand) -> RemotingCommand:
        body = LockBatchRequestBody.decode(asked.body)
        for queue in body.mq_set:
            holder, _ = self.group.locks.get((body.consumer_group, queue), ("", 0.0))
            if holder == body.client_id:
                del self.group.locks[body.consumer_group, queue]
        return self._led(asked, {})

    def _send_back(self, asked: RemotingCommand) -> Handled:
        if not self.leads:
            return self._not_leader(asked)
        record = decode_record(self.group.by_position[int(asked.ext["offset"])])
        topic = f"%RETRY%{asked.ext['group']}"
        if record.reconsume_times >= int(asked.ext["maxReconsumeTimes"]):
            topic = f"%DLQ%{asked.ext['group']}"
        properties = {"RETRY_TOPIC": record.topic, **record.property_map}
        self.group.store(
            topic,
            0,
            record,
            properties=encode_properties(properties),
            reconsume_times=record.reconsume_times + 1,
        )
        return response_to(asked)

    def _max_offset(self, asked: RemotingCommand) -> RemotingCommand:
        queue = self.group.queue(asked.ext["topic"], int(asked.ext["queueId"]))
        return self._led(asked, {"offset": str(len(queue))})

    def _commit(self, asked: RemotingCommand) -> Handled:
        if self.leads:
            key = (asked.ext["consumerGroup"], asked.ext["topic"], int(asked.ext["queueId"]))
            self.group.committed[key] = int(asked.ext["commitOffset"])
        return self._led(asked, {})

    def _committed(self, asked: RemotingCommand) -> Handled:
        key = (asked.ext["consumerGroup"], asked.ext["topic"], int(asked.ext["queueId"]))
        offset = self.group.committed.get(key)
        if offset is None and self.leads:
            return response_to(asked, ResponseCode.QUERY_NOT_FOUND, "not found")
        return self._led(asked, {"offset": str(offset)})

    def _topic_stats(self, asked: RemotingCommand) -> RemotingCommand:
        topic = asked.ext["topic"]
        table = {
            MessageQueue(topic, self.group.name, queue_id): TopicOffset(
                max_offset=len(self.group.queue(topic, queue_id))
            )
            for queue_id in range(self.group.topics[topic])
        }
        answer = self._led(asked, {})
        answer.body = TopicStatsTable(offset_table=table).encode()
        return answer

    def _create_topic(self, asked: RemotingCommand) -> RemotingCommand:
        if self.leads:
            self.group.topics[asked.ext["topic"]] = int(asked.ext["writeQueueNums"])
        return self._led(asked, {})

    def _delete_topic(self, asked: RemotingCommand) -> RemotingCommand:
        if self.leads:
            self.group.topics.pop(asked.ext["topic"], None)
        return self._led(asked, {})

    def _view(self, asked: RemotingCommand) -> RemotingCommand:
        record = self.group.by_position.get(int(asked.ext["offset"]))
        if record is None:
            return response_to(asked, 1, "can not find message by the offset")
        return response_to(asked, 0, None, None, record)


class Group:
    """A broker group with one log."""

    def __init__(
        self,
        world: World,
        name: str,
        members: int,
        first_port: int,
        *,
        rocketmq: bool = False,
        bulk: bool = True,
        idempotent: bool = False,
    ) -> None:
        self.name = name
        self.idempotent = idempotent
        self.epoch = 100
        self.rocketmq = rocketmq
        self.bulk = bulk
        self.topics: dict[str, int] = {"T": 4, "TBW102": 8}
        self.term = 1
        self.end_position = 0
        self.queues: dict[tuple[str, int], list[bytes]] = {}
        self.by_position: dict[int, bytes] = {}
        self.refused_queues: dict[tuple[str, int], int] = {}
        self.committed: dict[tuple[str, str, int], int] = {}
        self.locks: dict[tuple[str, MessageQueue], tuple[str, float]] = {}
        self.makes_retry_topics = True
        # Whether its members name the stale receipts of a batch.
        self.names_stale = False
        self.notifies = True
        self.arrived = trio.lowlevel.ParkingLot()
        self.brokers = [Broker(world, self, f"10.0.0.1:{first_port + i}") for i in range(members)]
        self.leader: str | None = self.brokers[0].address
        self.registered: dict[int, str] = {}
        # What NameServers report of it: its identity, and the members that name none.
        self.stated = ""
        self.register()

    def on(self, code: RequestCode, handler: Callable[[RemotingCommand], Handled]) -> None:
        """Answer *code* by *handler* at every member from now on."""
        self.on_each(code, lambda _, asked: handler(asked))

    def on_each(
        self, code: RequestCode, handler: Callable[[Broker, RemotingCommand], Handled]
    ) -> None:
        """As `on`; *handler* also gets the member."""
        for broker in self.brokers:
            broker.on(code, partial(handler, broker))

    def intercept(self, handler: Callable[[RemotingCommand], Handled] | None) -> None:
        """Let *handler* answer sends; where it returns None, they are stored."""
        for broker in self.brokers:
            broker.intercept = handler

    def identify(self, identity: str) -> None:
        """Give the group an identity that NameServers and members know."""
        self.stated = identity
        for broker in self.brokers:
            broker.identity = identity

    def let_nobody_in(self) -> None:
        """Refuse every client that connects from now on, as where its account is not known."""
        self.identify("0f" * 16)
        for broker in self.brokers:
            broker.not_now = [ResponseCode.SYSTEM_ERROR] * 1_000
            broker.says_not_now = {"outcome": "not_stored"}

    def register(self) -> None:
        """Let the NameServers know the leader."""
        others = [b.address for b in self.brokers if b.address != self.leader]
        self.registered = {i + 1: address for i, address in enumerate(others)}
        if self.leader is not None:
            self.registered[0] = self.leader

    def elect(self, number: int, *, register: bool = True) -> None:
        """Make a member the leader of the next term."""
        self.term += 1
        self.leader = self.brokers[number].address
        if register:
            self.register()

    def queue(self, topic: str, queue_id: int) -> list[bytes]:
        return self.queues.setdefault((topic, queue_id), [])

    def store(
        self,
        topic: str,
        queue_id: int,
        record: Record,
        *,
        properties: bytes | None = None,
        reconsume_times: int = 0,
    ) -> None:
        queue = self.queue(topic, queue_id)
        stored = encode_record(
            topic=topic,
            queue_id=queue_id,
            body=record.body,
            properties=record.properties if properties is None else properties,
            reconsume_times=reconsume_times,
            flag=record.flag,
            sys_flag=record.sys_flag,
            born_timestamp_ms=record.born_timestamp_ms,
            queue_offset=len(queue),
            phy_offset=self.end_position,
            store_timestamp_ms=1,
            store_host=pack_host("10.0.0.1", 10911),
        )
        self.topics.setdefault(topic, 1 if topic.startswith("%") else 4)
        queue.append(stored)
        self.by_position[self.end_position] = stored
        self.end_position += len(stored)
        self.arrived.unpark_all()

    def bodies(self, topic: str = "T") -> list[bytes]:
        """Return the bodies stored for *topic*, queue by queue."""
        return [
            bytes(decode_record(record).body)
            for (name, _), records in sorted(self.queues.items())
            if name == topic
            for record in records
        ]


@dataclass
class World(NodeWorld):
    """Everything a client meets."""

    name_servers: list[NameServer] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    seed: int = 1

    @property
    def group(self) -> Group:
        """The group that each world has."""
        return self.groups["g"]

    def client(self, **settings: object) -> ClientInstance:
        """Return a client that knows the NameServers; not open yet."""
        config = ClientConfig(
            name_servers=tuple(n.address for n in self.name_servers),
            client_ip="10.0.0.9",
            pid=7,
            **settings,  # type: ignore[arg-type]  # whatever the test wants
        )
        self.seed += 1
        return ClientInstance(
            config, clock=TrioClock(), network=self.network, rng=random.Random(self.seed)
        )

    async def add_group(self, name: str, members: int, first_port: int, **how: bool) -> Group:
        group = self.groups[name] = Group(self, name, members, first_port, **how)
        for broker in group.brokers:
            await broker.start()
        return group


@asynccontextmanager
async def open_world(
    *, name_servers: int = 1, members: int = 3, **how: bool
) -> AsyncIterator[World]:
    """Give a cluster with one group "g"; everything in it ends with the block."""
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        for i in range(name_servers):
            world.name_servers.append(NameServer(world, f"10.0.0.2:{9876 + i}"))
            await world.name_servers[-1].start()
        await world.add_group("g", members, 10911, **how)
        yield world
        nursery.cancel_scope.cancel()
