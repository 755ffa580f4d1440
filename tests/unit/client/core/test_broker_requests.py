"""What brokers ask of consumers: 220, 221, 307 and 309, with the bytes of the answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.process_queue import RollingSum
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.record import encode_record
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.bodies import ConsumerRunningInfo, MessageModel
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from tests.unit.client.consumer.consuming import Heard, committed, send, settled
from tests.unit.client.fake_cluster import World, open_world

FIRST = PushConfig(consume_from=FROM_FIRST)


def channel(world: World) -> Connection:
    """Return the connection by which the leader reaches the one consumer of "c"."""
    (connection,) = world.group.brokers[0].consumers["c"]
    return connection


async def ask(
    world: World, code: RequestCode, ext: dict[str, str], body: bytes = b""
) -> RemotingCommand:
    """Ask that consumer, as its broker does."""
    return await channel(world).invoke(request(code, dict(ext), body), 10)


def tell_reset(
    world: World, offsets: dict[int, int], topic: str = "T", *, of: str = "", **more: str
) -> None:
    """Send 220 as RocketMQ's brokers do: bean keys without quotes, and one-way.

    Args:
        of: Topic of the reset, where the table holds queues of another one.
    """
    table = ",".join(
        f'{{"brokerName":"g","queueId":{queue_id},"topic":"{topic}"}}:{offset}'
        for queue_id, offset in offsets.items()
    )
    ext = {"topic": of or topic, "group": "c", "timestamp": "-1", "isForce": "true", **more}
    channel(world).invoke_oneway(
        request(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, f'{{"offsetTable":{{{table}}}}}'.encode()
        )
    )


@asynccontextmanager
async def consuming(
    heard: Heard, config: PushConfig = FIRST, *, orderly: bool = False
) -> AsyncIterator[tuple[World, PushConsumer, Producer, ClientInstance]]:
    """Give a cluster, one consumer "c" of its topic T with all four queues, and a producer."""
    async with (
        open_world() as world,
        world.client(instance_name="one") as client,
        Producer(client, "p") as producer,
        PushConsumer(client, "c", heard, {"T": "*"}, config, orderly=orderly) as consumer,
    ):
        await settled(consumer)
        yield world, consumer, producer, client


# -------------------------------------------------------------------------------- 220


@pytest.mark.parametrize("orderly", [False, True])
async def test_reset_repeats_its_offsets_and_is_stored_at_once(orderly: bool) -> None:
    heard = Heard()
    async with consuming(heard, orderly=orderly) as (world, _, producer, _):
        await send(producer, 20)
        await heard.wait_for(20)
        await trio.sleep(6)
        assert committed(world.group) == dict.fromkeys(range(4), 5)
        tell_reset(world, {0: 2, 1: 5, 3: 4})
        await trio.sleep(1)
        assert sorted(heard.bodies[20:]) == [b"12", b"16", b"19", b"8"]
        await trio.sleep(6)
        assert committed(world.group) == dict.fromkeys(range(4), 5)


async def test_a_reset_forward_skips_what_was_pulled_and_what_was_not() -> None:
    heard = Heard()
    heard.delay_s = 2.0
    config = PushConfig(consume_from=FROM_FIRST, consume_tasks=1)
    async with consuming(heard, config) as (world, _, producer, _):
        await send(producer, 40)
        await heard.wait_for(2)
        tell_reset(world, dict.fromkeys(range(4), 10))
        await trio.sleep(0.1)
        assert committed(world.group) == dict.fromkeys(range(4), 10)
        await trio.sleep(30)
        assert len(heard.bodies) == 2
        assert committed(world.group) == dict.fromkeys(range(4), 10)
        later = await send(producer, 4, first=40)
        await heard.wait_for(6)
        assert sorted(heard.bodies[2:]) == later


async def test_old_messages_hold_new_ones_back_for_ten_seconds() -> None:
    heard = Heard()
    heard.delay_s = 60.0
    async with consuming(heard) as (world, _, producer, _):
        await send(producer, 1)
        await heard.wait_for(1)
        began = trio.current_time()
        tell_reset(world, {0: 0})
        await heard.wait_for(2)
        assert heard.bodies == [b"0", b"0"]
        assert 9.9 < trio.current_time() - began < 10.5
        # The listener of the old message ends first; the new one is what counts.
        await trio.sleep(55)
        assert committed(world.group)[0] == 0
        await trio.sleep(20)
        assert committed(world.group)[0] == 1


async def test_a_consumer_that_is_suspended_stays_so() -> None:
    heard = Heard()
    async with consuming(heard) as (world, consumer, producer, _):
        await send(producer, 4)
        await heard.wait_for(4)
        consumer.suspend()
        tell_reset(world, dict.fromkeys(range(4), 0))
        await trio.sleep(30)
        assert len(heard.bodies) == 4
        assert committed(world.group) == dict.fromkeys(range(4), 0)
        consumer.resume()
        await heard.wait_for(8)


async def test_a_reset_that_cannot_be_stored_is_stored_later() -> None:
    heard = Heard()
    async with consuming(heard) as (world, _, producer, _):
        await send(producer, 4)
        await heard.wait_for(4)
        await trio.sleep(6)
        leader, world.group.leader = world.group.leader, None
        tell_reset(world, {2: 0})
        await trio.sleep(4)
        assert committed(world.group)[2] == 1
        world.group.leader = leader
        await heard.wait_for(5)
        assert heard.bodies[4] == b"2"


async def test_resets_of_others_and_of_other_topics_change_nothing() -> None:
    heard = Heard()
    async with consuming(heard) as (world, _, producer, _):
        await send(producer, 4)
        await heard.wait_for(4)
        tell_reset(world, {0: 0}, group="other")
        tell_reset(world, {0: 0}, topic="U")
        tell_reset(world, {0: 0}, of="U")
        tell_reset(world, {7: 0})
        await trio.sleep(20)
        assert len(heard.bodies) == 4


# -------------------------------------------------------------------------------- 221


async def test_the_status_is_how_far_each_queue_is() -> None:
    heard = Heard()
    async with consuming(heard) as (world, _, producer, _):
        await send(producer, 6)
        await heard.wait_for(6)
        code = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
        answer = await ask(world, code, {"topic": "T", "group": "c"})
        assert answer.code == 0
        assert bytes(answer.body) == (
            b'{"consumerTable":{},"messageQueueTable":{'
            b'{"brokerName":"g","queueId":0,"topic":"T"}:2,'
            b'{"brokerName":"g","queueId":1,"topic":"T"}:2,'
            b'{"brokerName":"g","queueId":2,"topic":"T"}:1,'
            b'{"brokerName":"g","queueId":3,"topic":"T"}:1}}'
        )
        for topic, group in (("U", "c"), ("T", "other")):
            answer = await ask(world, code, {"topic": topic, "group": group})
            assert answer.code == 0
            assert bytes(answer.body) == b'{"consumerTable":{},"messageQueueTable":{}}'


# -------------------------------------------------------------------------------- 307


async def test_the_running_info_has_the_form_of_rocketmqs_client() -> None:
    heard = Heard()
    heard.answer = lambda message, _: (
        ConsumeStatus.RECONSUME_LATER if message.body_bytes == b"1" else None
    )
    heard.delay_s = 0.5
    async with consuming(heard) as (world, _, producer, client):
        await send(producer, 3, queues=1)
        await heard.wait_for(3)
        await trio.sleep(0.1)
        ext = {"consumerGroup": "c", "clientId": client.client_id, "jstackEnable": "false"}
        answer = await ask(world, RequestCode.GET_CONSUMER_RUNNING_INFO, ext)
        assert answer.code == 0
        text = bytes(answer.body).decode()
        assert text.startswith('{"mqPopTable":{},"mqTable":{{"brokerName":"g","queueId":0,')
        assert '"userConsumerInfo":{}}' in text
        assert '"cachedMsgSizeInMiB":0,"commitOffset":0,"droped":false,' in text
        info = ConsumerRunningInfo.decode(answer.body)
        assert info.jstack is None
        properties = info.properties
        started_ms = int(properties["PROP_CONSUMER_START_TIMESTAMP"])
        assert {name: properties[name] for name in properties if name.startswith("PROP_")} == {
            "PROP_NAMESERVER_ADDR": "10.0.0.2:9876",
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            "PROP_CLIENT_VERSION": "V4_9_7",
            "PROP_CONSUMEORDERLY": "false",
            "PROP_THREADPOOL_CORE_SIZE": "20",
            "PROP_CONSUMER_START_TIMESTAMP": str(started_ms),
        }
        assert [(s.topic, s.sub_string, sorted(s.tags_set)) for s in info.subscription_set] == [
            ("%RETRY%c", "*", []),
            ("T", "*", []),
        ]
        queue = next(i for q, i in info.mq_table.items() if (q.topic, q.queue_id) == ("T", 0))
        assert (queue.cached_msg_count, queue.cached_msg_min_offset) == (3, 0)
        assert queue.cached_msg_max_offset == 2
        assert started_ms <= queue.last_pull_timestamp
        assert started_ms <= queue.last_consume_timestamp
        await trio.sleep(1)
        answer = await ask(world, RequestCode.GET_CONSUMER_RUNNING_INFO, ext)
        status = ConsumerRunningInfo.decode(answer.body).status_table["T"]
        assert status.consume_rt == pytest.approx(500, abs=1)
        assert status.consume_ok_tps == pytest.approx(2 / 60)
        assert status.consume_failed_tps == pytest.approx(1 / 60)
        assert status.consume_failed_msgs == 1
        assert status.pull_tps == pytest.approx(3 / 60)


async def test_the_running_info_of_an_orderly_consumer_knows_its_locks() -> None:
    heard = Heard()
    heard.delay_s = 5.0
    config = PushConfig(consume_from=FROM_FIRST, consume_message_batch_max_size=2)
    async with consuming(heard, config, orderly=True) as (world, _, producer, client):
        await trio.sleep(1)
        await send(producer, 5, queues=1)
        await heard.wait_for(1)
        ext = {"consumerGroup": "c", "clientId": client.client_id, "jstackEnable": "true"}
        answer = await ask(world, RequestCode.GET_CONSUMER_RUNNING_INFO, ext)
        info = ConsumerRunningInfo.decode(answer.body)
        assert info.properties["PROP_CONSUMEORDERLY"] == "true"
        queue = next(i for q, i in info.mq_table.items() if (q.topic, q.queue_id) == ("T", 0))
        assert queue.locked
        assert queue.last_lock_timestamp > 0
        assert queue.transaction_msg_count == len(heard.bodies)
        assert queue.transaction_msg_min_offset == 0
        assert queue.transaction_msg_max_offset == len(heard.bodies) - 1
        assert info.jstack is not None
        assert "in _consume_next" in info.jstack


async def test_a_group_that_is_not_here_is_an_error_in_rocketmqs_words() -> None:
    async with consuming(Heard()) as (world, _, _, _):
        ext = {"consumerGroup": "other", "clientId": "x", "msgId": "y"}
        for code in (RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY):
            answer = await ask(world, code, ext)
            assert answer.code == 1
            assert answer.remark == "The Consumer Group <other> not exist in this consumer"


# -------------------------------------------------------------------------------- 309

RECORD = encode_record(
    topic="%RETRY%c",
    queue_id=3,
    body=b"once more",
    properties=b"RETRY_TOPIC\x01T\x02TAGS\x01a\x02",
    queue_offset=9,
    reconsume_times=2,
)


def strange(_message: DeliveredMessage, _context: ConsumeContext) -> ConsumeStatus:
    raise ValueError("cannot be")


@pytest.mark.parametrize(
    ("orderly", "status", "expected"),
    [
        (False, None, b'{"autoCommit":true,"consumeResult":"CR_SUCCESS","order":false,'),
        (
            False,
            ConsumeStatus.RECONSUME_LATER,
            b'{"autoCommit":true,"consumeResult":"CR_LATER","order":false,',
        ),
        (
            True,
            ConsumeStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT,
            b'{"autoCommit":true,"consumeResult":"CR_LATER","order":true,',
        ),
    ],
)
async def test_one_message_is_consumed_now_and_moves_no_offset(
    orderly: bool, status: ConsumeStatus | None, expected: bytes
) -> None:
    heard = Heard()
    heard.delay_s = 1.5
    heard.answer = lambda _message, _context: status
    async with consuming(heard, orderly=orderly) as (world, _, _, _):
        await trio.sleep(6)
        before = dict(world.group.committed)
        answer = await ask(
            world,
            RequestCode.CONSUME_MESSAGE_DIRECTLY,
            {"consumerGroup": "c", "msgId": "0A000001000034", "brokerName": "g"},
            RECORD,
        )
        assert answer.code == 0
        assert bytes(answer.body).startswith(expected)
        assert 1490 < msgspec.json.decode(answer.body)["spentTimeMills"] < 1510
        (message,) = heard.messages
        assert (message.topic, message.queue_id, message.queue_offset) == ("T", 3, 9)
        assert (message.reconsume_times, message.tags, message.broker_name) == (2, "a", "g")
        await trio.sleep(6)
        assert world.group.committed == before


async def test_an_error_of_the_listener_is_an_answer() -> None:
    heard = Heard()
    heard.answer = strange
    async with consuming(heard) as (world, _, _, _):
        ext = {"consumerGroup": "c", "msgId": "0A", "brokerName": "g"}
        answer = await ask(world, RequestCode.CONSUME_MESSAGE_DIRECTLY, ext, RECORD)
        assert bytes(answer.body) == (
            b'{"autoCommit":true,"consumeResult":"CR_THROW_EXCEPTION","order":false,'
            b'"remark":"ValueError: cannot be","spentTimeMills":0}'
        )


# -------------------------------------------------------------------------------- around


async def test_closed_consumer_answers_no_more(client: ClientInstance) -> None:
    broadcasting = PushConfig(message_model=MessageModel.BROADCASTING)
    for _ in range(2):
        async with PushConsumer(client, "c", Heard(), {"T": "*"}, broadcasting):
            with pytest.raises(ConfigError, match="in use"):
                client.consumer_calls.add("c", client.consumer_calls._consumers["c"])
    assert client.consumer_calls._consumers == {}


def test_a_rolling_sum_forgets_what_is_older_than_its_window() -> None:
    rolling = RollingSum(60)
    for second in range(180):
        rolling.add(second, 1, 2.0)
        assert len(rolling._slots) <= 60
    assert rolling.sums(179) == (60, 120.0)
    assert rolling.sums(179 + 30) == (30, 60.0)
    assert rolling.sums(1000) == (0, 0)
