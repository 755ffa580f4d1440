"""Administration of a cluster, of single brokers and of NameServers.

Messages looked up, and dead letters given back.
"""

import zlib

import msgspec
import pytest

from dledger.client.admin.admin import Admin, judge_group
from dledger.client.admin.messages import resend_copy
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ConfirmationNeededError,
    DamagedAnswerError,
    MessageIllegalError,
    NoNameServerError,
    NoRouteError,
    RequestFailedError,
)
from dledger.client.core.message import MAX_BODY_BYTES, Message, encode_message_properties
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.client.trace import TraceBean, TraceContext, TraceType, encode
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.properties import decode_properties, encode_properties
from dledger.commitlog.record import decode_record, encode_record
from dledger.remoting.protocol.bodies import (
    ConsumeStats,
    KVTable,
    OffsetWrapper,
    QueryConsumeQueueResponseBody,
    SubscriptionGroupConfig,
    TopicConfig,
)
from dledger.remoting.protocol.bodies import MessageQueue as WireQueue
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.own_fields import CONFIRMED_FIELD, GIVES_UP_FIELD, GivenUp
from dledger.remoting.protocol.topic_names import TRACE_TOPIC
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import Broker, Group, World, open_world


async def test_a_topic_is_created_seen_and_deleted(world: World, client: ClientInstance) -> None:
    admin = Admin(client)
    assert await admin.create_topic("new", queue_nums=3, attributes={"message.type": "FIFO"}) == [
        "g"
    ]
    assert "new" in await admin.topic_list()
    assert len((await admin.topic_route("new")).publish_queues) == 3
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_TOPIC]
    assert asked["attributes"] == "+message.type=FIFO"
    await admin.update_topic("new", queue_nums=5, attributes={"retention.ms": None, "a": "b"})
    asked = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_TOPIC][-1]
    assert asked["attributes"] == "-retention.ms,+a=b"
    assert world.group.topics["new"] == 5
    assert await admin.delete_topic("new") == ["g"]
    assert "new" not in await admin.topic_list()
    with pytest.raises(NoRouteError):
        await admin.topic_route("new")


async def test_a_topic_goes_from_each_name_server_that_answers() -> None:
    async with open_world(name_servers=3) as world, world.client() as client:
        admin = Admin(client)
        await admin.create_topic("new")
        silent = world.name_servers[1]
        await silent.kill()
        with pytest.raises(NoNameServerError, match=f"new is deleted in g, .*{silent.address}"):
            await admin.delete_topic("new")
        asked = [server.count(RequestCode.DELETE_TOPIC_IN_NAMESRV) for server in world.name_servers]
        assert asked == [1, 0, 1]
        assert "new" not in world.group.topics
        assert client.routes.table.get("new") is None


async def test_a_topic_that_no_name_server_shows_is_created(
    world: World, client: ClientInstance
) -> None:
    (server,) = world.name_servers
    server.intercept = lambda asked: (
        response_to(asked, 1, "name server not ready")
        if asked.code == RequestCode.GET_ROUTEINFO_BY_TOPIC
        else None
    )
    assert await Admin(client).create_topic("new") == ["g"]
    assert "new" in world.group.topics


async def test_changes_follow_the_leader(world: World, client: ClientInstance) -> None:
    world.group.elect(2, register=False)
    await Admin(client).create_topic("new")
    assert world.group.brokers[2].count(RequestCode.UPDATE_AND_CREATE_TOPIC) == 1


async def test_health_names_what_is_wrong(world: World, client: ClientInstance) -> None:
    admin = Admin(client)
    health = (await admin.cluster_health())["g"]
    assert health.healthy
    assert health.leader == "10.0.0.1:10911"
    assert health.term == 1
    await world.group.brokers[1].kill()
    health = (await admin.cluster_health())["g"]
    assert not health.healthy
    assert health.reasons == ("10.0.0.1:10912 does not answer",)


def test_a_leader_of_an_old_term_does_not_count() -> None:
    health = judge_group(
        "g", {"a:1": {"serving": True, "term": 1}, "b:1": {"serving": False, "term": 2}}
    )
    assert health.leader is None
    assert health.reasons == ("no leader",)


async def test_messages_are_viewed_by_offset_message_id(client: ClientInstance) -> None:
    async with Producer(client, "p") as producer:
        await producer.send(Message("T", b"1"))
        result = await producer.send(Message("T", b"2"))
    admin = Admin(client)
    message = await admin.view_message(result.offset_message_id)
    assert message.body_bytes == b"2"
    assert message.message_id == result.message_id
    with pytest.raises(MessageIllegalError):
        await admin.view_message("nonsense")
    with pytest.raises(RequestFailedError):
        await admin.view_message_at("10.0.0.1:10911", 999999)


async def test_offsets_of_every_queue() -> None:
    async with open_world() as world, world.client() as client:
        async with Producer(client, "p") as producer:
            for _ in range(8):
                await producer.send(Message("T", b"1"))
        offsets = await Admin(client).offsets("T")
    assert offsets == {MessageQueue("T", "g", i): (0, 2) for i in range(4)}


def answer_with(world: World, code: RequestCode, body: bytes = b"", **ext: str) -> None:
    """Let the leader of each group answer *code*, the others that they do not lead."""
    for broker in [broker for group in world.groups.values() for broker in group.brokers]:

        def answer(asked: RemotingCommand, broker: Broker = broker) -> RemotingCommand:
            answer = broker._led(asked, dict(ext))
            if answer.code == 0:
                answer.body = body
            return answer

        broker.on(code, answer)


async def test_change_topic_keeps_the_rest(world: World, client: ClientInstance) -> None:
    config = TopicConfig(topic_name="T", read_queue_nums=3, write_queue_nums=2, perm=4)
    answer_with(world, RequestCode.GET_TOPIC_CONFIG, config.encode())
    await Admin(client).topic_route("T")
    await Admin(client).change_topic("T", "g", {"perm": "6", "attributes": "+retention.ms=1"})
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_TOPIC]
    assert asked == {
        **asked,
        "readQueueNums": "3",
        "writeQueueNums": "2",
        "perm": "6",
        "attributes": "+retention.ms=1",
    }
    assert CONFIRMED_FIELD not in asked


async def test_change_that_gives_up_messages_is_confirmed(
    world: World, client: ClientInstance
) -> None:
    lost = GivenUp(change="T: retention.ms = 1", messages={"T": 7})

    def refuse(asked: RemotingCommand) -> RemotingCommand:
        if asked.ext.get(CONFIRMED_FIELD) == "true":
            return response_to(asked, 0, "until it stops")
        return response_to(asked, 1, "gives up", {GIVES_UP_FIELD: lost.encode()})

    broker = world.group.brokers[0]
    broker.on(RequestCode.UPDATE_BROKER_CONFIG, refuse)
    admin = Admin(client)
    with pytest.raises(ConfirmationNeededError) as refused:
        await admin.change_broker_settings(broker.address, {"a": "b"})
    assert refused.value.given_up == lost
    said = await admin.change_broker_settings(broker.address, {"a": "b"}, gives_up_messages=True)
    assert said == "until it stops"


async def test_group_is_paused_where_it_was_not(world: World, client: ClientInstance) -> None:
    (await world.add_group("h", 1, 11_000)).register()
    before = SubscriptionGroupConfig("G", retry_max_times=3, consume_message_orderly=True)
    answer_with(world, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, before.encode())
    answer_with(world, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    admin = Admin(client)
    assert await admin.set_group_enabled("G", True) == []
    assert await admin.set_group_enabled("G", False) == ["g", "h"]
    asked = [
        s.command for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    ]
    paused = msgspec.structs.replace(before, consume_enable=False)
    assert [SubscriptionGroupConfig.decode(one.body) for one in asked] == [paused, paused]


async def test_broker_in_the_place_of_a_name_server_is_named(
    world: World, client: ClientInstance
) -> None:
    (server,) = world.name_servers
    server.intercept = fixed(3, " request type 106 not supported")
    with pytest.raises(ConfigError, match=f"{server.address} is no NameServer"):
        await Admin(client).cluster_info()


async def test_write_permission_changes_in_every_name_server(
    world: World, client: ClientInstance
) -> None:
    (server,) = world.name_servers
    counts = {"wipeTopicCount": "2", "addTopicCount": "2"}
    for code in (RequestCode.WIPE_WRITE_PERM_OF_BROKER, RequestCode.ADD_WRITE_PERM_OF_BROKER):
        server.on(code, fixed(ext=counts))
    admin = Admin(client)
    assert await admin.set_write_perm("g", False) == {server.address: 2}
    assert await admin.set_write_perm("g", True) == {server.address: 2}


QUEUE = MessageQueue("T", "g", 0)
LEADER = "10.0.0.1:10911"


async def test_figures_and_settings_of_one_broker(world: World, client: ClientInstance) -> None:
    broker = world.group.brokers[0]
    table = KVTable(table={"raftTerm": "7"}).encode()
    broker.on(RequestCode.GET_BROKER_RUNTIME_INFO, fixed(body=table))
    broker.on(RequestCode.GET_BROKER_CONFIG, fixed(body=b"brokerName=g\naclEnable=true\n"))
    admin = Admin(client)
    assert await admin.runtime_info(LEADER) == {"raftTerm": "7"}
    assert await admin.broker_settings(LEADER) == {"brokerName": "g", "aclEnable": "true"}


async def test_settings_that_are_refused_carry_the_code(
    world: World, client: ClientInstance
) -> None:
    world.group.brokers[0].on(RequestCode.GET_BROKER_CONFIG, fixed(16, "no permission"))
    with pytest.raises(RequestFailedError) as refused:
        await Admin(client).broker_settings(LEADER)
    assert refused.value.code == 16


async def test_name_servers_are_asked_one_by_one(world: World, client: ClientInstance) -> None:
    admin = Admin(client)
    (name_server,) = world.name_servers

    def settings(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {}, b"listenPort=9876\n")

    name_server.on(RequestCode.GET_NAMESRV_CONFIG, settings)
    assert await admin.name_server_settings(name_server.address) == {"listenPort": "9876"}
    views = await admin.name_server_views()
    view = views[name_server.address]
    assert view is not None
    assert view.broker_addr_table["g"].broker_addrs[0] == LEADER
    name_server.intercept = fixed(body=b"[1")
    assert await admin.name_server_views() == {name_server.address: None}
    await name_server.kill()
    assert await admin.name_server_views() == {name_server.address: None}
    with pytest.raises(NoNameServerError):
        await admin.name_server_settings(name_server.address)


async def test_a_queue_is_read_where_it_is_asked_for(
    client: ClientInstance, producer: Producer
) -> None:
    for number in range(5):
        await producer.send_to(QUEUE, Message("T", b"%d" % number))
    admin = Admin(client)
    bodies = [message.body_bytes for message in await admin.read_queue(QUEUE, 1, 2)]
    assert bodies == [b"1", b"2"]
    assert [m.queue_offset for m in await admin.read_queue(QUEUE, 4, 9)] == [4]
    assert await admin.read_queue(QUEUE, 5, 9) == []


async def test_messages_outside_the_span_are_left_out(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    for number in range(3):
        await producer.send_to(QUEUE, Message("T", b"%d" % number))
    admin = Admin(client)
    stored = [m.store_timestamp_ms for m in await admin.read_queue(QUEUE, 0, 9)]
    # The cluster in memory answers every search by time with offset 1.
    found = await admin.messages_by_time("T", stored[0], stored[-1] + 1, 9)
    assert [message.body_bytes for message in found] == [b"1", b"2"]
    assert await admin.messages_by_time("T", stored[-1] + 1, stored[-1] + 9, 9) == []
    assert len(await admin.messages_by_time("T", 0, stored[-1] + 1, 1)) == 1


async def test_trace_of_other_messages_is_left_out(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    steps = [
        TraceContext(TraceType.PUB, 5, (TraceBean(name, "T", keys="order-1"),), "r", "p", 3)
        for name in ("A", "B")
    ]
    await producer.send(
        Message(TRACE_TOPIC, "".join(map(encode, steps)).encode(), keys="A B order-1")
    )
    records = b"".join(world.group.by_position.values())
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=records))
    admin = Admin(client)
    assert [step.beans[0].msg_id for step in await admin.message_trace("A")] == ["A"]
    assert len(await admin.message_trace("order-1")) == 2


def all_records(group: Group) -> bytes:
    """Answer as RocketMQ does: with everything that has the same hash."""
    return b"".join(group.by_position.values())


async def test_other_keys_of_the_same_hash_are_left_out(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    for keys in ("Aa x", "BB", "x Aa", "AaBB"):
        await producer.send_to(QUEUE, Message("T", keys.encode(), keys=keys))
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=all_records(world.group)))
    admin = Admin(client)
    found = await admin.query_messages("T", "Aa", begin_ms=5, end_ms=9)
    assert [message.body_bytes for message in found] == [b"Aa x", b"x Aa"]
    assert [message.broker_name for message in found] == ["g", "g"]
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.QUERY_MESSAGE]
    assert (asked["key"], asked["topic"], asked["maxNum"]) == ("Aa", "T", "64")
    assert (asked["beginTimestamp"], asked["endTimestamp"]) == ("5", "9")
    newest = await admin.query_messages("T", "Aa", max_messages=1)
    assert [message.body_bytes for message in newest] == [b"x Aa"]


async def test_a_message_is_found_by_its_id(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    sent = [await producer.send_to(QUEUE, Message("T", b"%d" % i)) for i in range(3)]
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=all_records(world.group)))
    (found,) = await Admin(client).query_unique_key("T", sent[1].message_id)
    assert found.body_bytes == b"1"
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.QUERY_MESSAGE]
    assert asked["_UNIQUE_KEY_QUERY"] in (True, "true")


async def test_nothing_found_is_an_empty_list(world: World, client: ClientInstance) -> None:
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(ResponseCode.QUERY_NOT_FOUND, "no"))
    assert await Admin(client).query_messages("T", "k") == []


async def test_a_refusal_is_an_error(world: World, client: ClientInstance) -> None:
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(ResponseCode.NO_PERMISSION, "no"))
    with pytest.raises(RequestFailedError, match="messages of T with key k on g"):
        await Admin(client).query_messages("T", "k")


async def test_a_damaged_answer_is_an_error(world: World, client: ClientInstance) -> None:
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=b"x" * 200))
    with pytest.raises(DamagedAnswerError, match="are damaged"):
        await Admin(client).query_messages("T", "k")


async def test_a_groups_progress_comes_by_queue(world: World, client: ClientInstance) -> None:
    table = {WireQueue("T", "g", 0): OffsetWrapper(broker_offset=5, consumer_offset=3)}
    body = ConsumeStats(offset_table=table).encode()
    world.group.on(RequestCode.GET_CONSUME_STATS, fixed(body=body))
    stats = await Admin(client).consume_stats("c", "T")
    assert list(stats) == [QUEUE]
    assert (stats[QUEUE].broker_offset, stats[QUEUE].consumer_offset) == (5, 3)


async def test_units_of_a_queue_come_as_the_broker_has_them(
    world: World, client: ClientInstance
) -> None:
    body = QueryConsumeQueueResponseBody(min_queue_index=1, max_queue_index=9)
    world.group.on(RequestCode.QUERY_CONSUME_QUEUE, fixed(body=body.encode()))
    admin = Admin(client)
    await admin.topic_route("T")
    found = await admin.query_consume_queue(QUEUE, 3, 4, group="c")
    assert (found.min_queue_index, found.max_queue_index) == (1, 9)
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.QUERY_CONSUME_QUEUE]
    assert (asked["index"], asked["count"], asked["consumerGroup"]) == ("3", "4", "c")


async def test_a_search_by_time_has_two_sides(world: World, client: ClientInstance) -> None:
    async with PullConsumer(client, "c") as consumer:
        await consumer.search_offset(QUEUE, 7)
        await consumer.search_offset(QUEUE, 7, upper=True)
        code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        sides = [s.command.ext.get("boundaryType") for s in world.seen if s.code == code]
        assert sides == [None, "UPPER"]


def letter(**properties: str) -> MessageExt:
    record = encode_record(
        topic="%DLQ%billing",
        queue_id=0,
        body=b"order",
        properties=encode_properties(properties),
        flag=7,
        reconsume_times=17,
    )
    return MessageExt(memoryview(record), 0)


def test_resend_copies_user_properties_to_the_retry_topic() -> None:
    names = {"UNIQ_KEY": "K", "TAGS": "A", "KEYS": "k1 k2", "colour": "red", "CLUSTER": "c"}
    origin = {"RETRY_TOPIC": "orders", "DLQ_ORIGIN_TOPIC": "orders", "DLQ_ORIGIN_MESSAGE_ID": "0A"}
    way = {
        "ORIGIN_MESSAGE_ID": "0A",
        "WAIT": "false",
        "TIMER_DELAY_MS": "5",
        "RECONSUME_TIME": "16",
    }
    copy = resend_copy(letter(**names, **origin, **way), "billing")
    assert (copy.topic, copy.body, copy.tags, copy.keys, copy.flag) == (
        "%RETRY%billing", b"order", "A", "k1 k2", 7,
    )  # fmt: skip
    assert copy.properties == {"colour": "red", "RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "0A"}
    assert not copy.is_delayed
    stored = decode_properties(encode_message_properties(copy, "new"))
    assert (copy.message_id, stored["TAGS"], stored["KEYS"]) == ("K", "A", "k1 k2")


def test_the_topic_it_came_from_is_named_by_either_property() -> None:
    for found in ({"DLQ_ORIGIN_TOPIC": "orders"}, {"RETRY_TOPIC": "orders"}):
        copy = resend_copy(letter(**found), "g")
        assert copy.properties == {"RETRY_TOPIC": "orders"}
    assert resend_copy(letter(colour="red"), "g").properties == {"colour": "red"}


async def test_letter_that_cannot_be_sent_holds_back_no_other(
    world: World, client: ClientInstance
) -> None:
    world.group.topics |= {"%DLQ%c": 1, "%RETRY%c": 1}
    packed = zlib.compress(bytes(MAX_BODY_BYTES + 1))
    for body, sys_flag in ((b"a", 0), (packed, 0x301), (b"no zlib", 0x301), (b"b", 0)):
        record = encode_record(
            topic="%DLQ%c", queue_id=0, body=body, properties=b"", sys_flag=sys_flag
        )
        world.group.store("%DLQ%c", 0, decode_record(record))
    with pytest.raises(MessageIllegalError, match=r"2 dead letters .* 2 were .* offset 1"):
        await Admin(client).resend_dead_letters("c")
    sent = [bytes(decode_record(each).body) for each in world.group.queue("%RETRY%c", 0)]
    assert sent == [b"a", b"b"]
    assert await Admin(client).resend_dead_letters("c") == 0
