"""Producer against a cluster in memory: what is sent, and how.

Producer where leaders change, brokers are busy or away: what became of each send.
"""

import pytest
import trio
import trio.testing

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerUnreachableError,
    ClientClosedError,
    MessageIllegalError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import CompressionType, MessageExt, SendStatus, decompress
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.record import decode_record
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, response_to
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import World, open_world


async def test_send_returns_where_the_message_is() -> None:
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        result = await producer.send(Message("T", b"hello", tags="A", keys=("k1", "k2")))
        group = world.group
        stored = decode_record(group.queue("T", result.message_queue.queue_id)[result.queue_offset])
    assert result.status is SendStatus.SEND_OK
    assert stored.body == b"hello"
    assert stored.property_map == {"UNIQ_KEY": result.message_id, "TAGS": "A", "KEYS": "k1 k2"}
    assert len(result.message_id) == 32
    assert result.offset_message_id == "0A000001" + "00002A9F" + "0" * 16


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
async def test_a_budget_that_is_no_time_is_refused(timeout_s: float) -> None:
    batch = [Message("T", b"a"), Message("T", b"b")]
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        for _ in ("route not known", "route known"):
            with pytest.raises(MessageIllegalError, match=r"timeout_s is .*; it must be above 0"):
                await producer.send(Message("T", b"x"), timeout_s=timeout_s)
            with pytest.raises(MessageIllegalError, match="it must be above 0"):
                await producer.send_batch(batch, timeout_s=timeout_s)
            with pytest.raises(MessageIllegalError, match="it must be above 0"):
                await producer.recall("handle", timeout_s=timeout_s)
            await producer.publish_queues("T")
        assert world.group.bodies() == []
        await producer.send(Message("T", b"x"), timeout_s=None)
    assert world.group.bodies() == [b"x"]


async def test_sends_go_round_all_queues() -> None:
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        queues = [(await producer.send(Message("T", b"x"))).message_queue for _ in range(8)]
    assert sorted(q.queue_id for q in queues) == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_many_senders_that_begin_at_once_ask_for_the_route_once(
    world: World, producer: Producer
) -> None:
    async with trio.open_nursery() as nursery:
        for i in range(20):
            nursery.start_soon(producer.send, Message("T", b"%d" % i))
    assert world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == 1
    assert world.count(RequestCode.CAPABILITIES) == 1


async def test_sends_that_wait_leave_together_with_a_result_each(
    world: World, producer: Producer
) -> None:
    results: dict[int, tuple[MessageQueue, int, int]] = {}
    world.group.brokers[0].delay_s = 0.5

    async def one(i: int) -> None:
        result = await producer.send(Message("T", b"body-%d" % i))
        results[i] = (result.message_queue, result.queue_offset, result.phy_offset)

    await producer.send(Message("T", b"first"))
    async with trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(one, i)
    assert world.group.brokers[0].count(RequestCode.SEND_RECORDS) <= 3
    for i, (queue, offset, position) in results.items():
        record = decode_record(world.group.queue("T", queue.queue_id)[offset])
        assert record.body == b"body-%d" % i
        assert record.phy_offset == position


async def test_a_real_rocketmq_gets_json_and_310() -> None:
    async with (
        open_world(members=1, rocketmq=True) as world,
        world.client() as client,
        Producer(client, "p") as producer,
    ):
        first = await producer.send(Message("T", b"one", tags="A"))
        second = await producer.send(Message("T", b"two"))
        batch = await producer.send_batch([Message("T", b"b%d" % i) for i in range(3)])
        broker = world.group.brokers[0]
        sends = [s.command for s in broker.seen if s.code in (310, 320)]
    assert [c.code for c in sends] == [310, 310, 320]
    assert {s.command.serialize for s in broker.seen} == {SerializeType.JSON}
    assert sends[0].ext["b"] == "T"
    assert sends[0].ext["c"] == "TBW102"
    assert sends[0].ext["i"] == f"UNIQ_KEY\x01{first.message_id}\x02TAGS\x01A\x02"
    assert sends[2].ext["m"] == "true"
    assert first.offset_message_id == "0A000001" + "00002A9F" + "0" * 16
    assert second.queue_offset == 0
    assert [r.queue_offset for r in batch] == [0, 1, 2]
    assert len({r.offset_message_id for r in batch}) == 3
    assert len({r.message_id for r in batch}) == 3


async def test_a_delayed_message_goes_alone_with_310() -> None:
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        result = await producer.send(Message("T", b"later", delay_level=3))
        broker = world.group.brokers[0]
        (sent,) = [s.command for s in broker.seen if s.code == 310]
        assert broker.count(RequestCode.SEND_RECORDS) == 0
    assert "DELAY\x013\x02" in sent.ext["i"]
    assert result.message_id in sent.ext["i"]


async def test_a_delayed_message_follows_the_hint_too(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await producer.publish_queues("T")
    world.group.elect(1, register=False)
    await producer.send(Message("T", b"later", delay_level=1))
    assert client.counters.redirects_by_hint == 1
    assert world.group.bodies() == [b"later"]


async def test_oneway_does_not_wait_for_an_answer(world: World, producer: Producer) -> None:
    broker = world.group.brokers[0]
    broker.intercept = lambda asked: DEFERRED
    began = trio.current_time()
    await producer.send_oneway(Message("T", b"x"))
    assert trio.current_time() == began
    await trio.testing.wait_all_tasks_blocked()
    (sent,) = [s.command for s in broker.seen if s.code == 310]
    assert sent.is_oneway


async def test_batch_is_one_run_with_consecutive_offsets(world: World, producer: Producer) -> None:
    group = world.group
    results = await producer.send_batch([Message("T", b"b%d" % i) for i in range(100)])
    (sent,) = [s.command for s in group.brokers[0].seen if s.code == 51101]
    assert sent.ext["runs"] == [["T", results.message_queue.queue_id, 100]]
    assert sent.ext["group"] == "p"
    assert sent.serialize is SerializeType.CBOR
    for i, result in enumerate(results):
        stored = decode_record(group.queue("T", result.message_queue.queue_id)[result.queue_offset])
        assert stored.body == b"b%d" % i
        assert stored.phy_offset == result.phy_offset
        assert stored.property_map["UNIQ_KEY"] == result.message_id
    assert results[-1].queue_offset == 99


async def test_a_selector_chooses_the_queue() -> None:
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        results = [
            await producer.send(
                Message("T", b"%d" % i),
                selector=lambda queues, message, key: queues[key % len(queues)],
                selector_arg=6,
            )
            for i in range(3)
        ]
    assert [(r.message_queue.queue_id, r.queue_offset) for r in results] == [(2, 0), (2, 1), (2, 2)]


async def test_asynchronous_send_brings_its_result_later(world: World, producer: Producer) -> None:
    world.group.brokers[0].delay_s = 0.2
    future = await producer.send_async(Message("T", b"1"))
    second = producer.send_nowait(Message("T", b"2"))
    assert not future.done
    result = await future.result()
    assert future.done
    assert (await future.result()).message_id == result.message_id
    assert (await second.result()).message_id != result.message_id


async def test_leaving_the_block_waits_for_sends_under_way(
    world: World, client: ClientInstance
) -> None:
    world.group.brokers[0].delay_s = 0.5
    async with Producer(client, "p") as producer:
        future = await producer.send_async(Message("T", b"1"))
    assert future.done
    assert (await future.result()).queue_offset == 0
    with pytest.raises(ClientClosedError):
        await producer.send(Message("T", b"2"))


@pytest.mark.parametrize("kind", CompressionType)
async def test_a_large_body_is_compressed_and_read_back(
    world: World, client: ClientInstance, kind: CompressionType
) -> None:
    body = b"abc" * 5000
    config = ProducerConfig(compress_type=kind)
    async with Producer(client, "p", config) as producer:
        for message in (Message("T", body), Message("T", body, delay_level=1)):
            result = await producer.send(message)
            raw = world.group.queue("T", result.message_queue.queue_id)[result.queue_offset]
            stored = decode_record(raw)
            assert stored.sys_flag == 1 | kind.value << 8
            assert len(stored.body) < 200
            assert decompress(stored.body, stored.sys_flag) == body
            assert MessageExt(memoryview(raw), 0).body == body


async def test_a_body_that_gets_no_smaller_goes_as_it_is(world: World, producer: Producer) -> None:
    body = rng_stream(1).randbytes(5000)
    result = await producer.send(Message("T", body))
    raw = world.group.queue("T", result.message_queue.queue_id)[result.queue_offset]
    assert (decode_record(raw).sys_flag, decode_record(raw).body) == (0, body)


def test_a_level_the_compression_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="compress_level is 0; ZSTD has 1 to 22"):
        ProducerConfig(compress_type=CompressionType.ZSTD, compress_level=0)
    with pytest.raises(ConfigError, match="compress_level is 10; ZLIB has 0 to 9"):
        ProducerConfig(compress_level=10)
    ProducerConfig(compress_type=CompressionType.LZ4, compress_level=-1)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Message("", b"x"), "topic is empty"),
        (Message("a b", b"x"), "holds ' '"),
        (Message("t" * 128, b"x"), "128 characters"),
        (Message("SCHEDULE_TOPIC_XXXX", b"x"), "brokers' own"),
        (Message("T", b""), "body is empty"),
        (Message("T", bytes(4 * 1024 * 1024 + 1)), "4194305 bytes"),
        (Message("T", b"x", tags="a\x01b"), "cannot hold"),
        (Message("T", b"x", keys=("a", "b\x02")), "cannot hold"),
        (Message("T", b"x", properties={"UNIQ_KEY": "1"}), "fields of their own"),
        (Message("T", b"x", properties={"k": "v" * 40000}), "properties have"),
        (Message("T", b"", delay_level=2), "body is empty"),
        (Message("T", b"x", flag=1 << 40), "does not fit"),
    ],
)
async def test_an_illegal_message_is_refused_before_sending(
    world: World, producer: Producer, message: Message, why: str
) -> None:
    with pytest.raises(MessageIllegalError, match=why):
        await producer.send(message)
    assert world.count(RequestCode.SEND_RECORDS) == 0
    assert world.count(RequestCode.SEND_MESSAGE_V2) == 0


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "batch is empty"),
        ([Message("T", b"1"), Message("U", b"2")], "mixes topics"),
        ([Message("T", b"1", delay_level=1)], "delayed"),
        ([Message("T", b"1", properties={"TRAN_MSG": "true"})], "delayed or transactional"),
        ([Message("T", bytes(3 << 20)), Message("T", bytes(3 << 20))], "body bytes"),
        ([Message("T", b"1")] * 4097, "4097 messages"),
    ],
)
async def test_an_illegal_batch_is_refused_before_sending(
    world: World, producer: Producer, messages: list[Message], why: str
) -> None:
    with pytest.raises(MessageIllegalError, match=why):
        await producer.send_batch(messages)
    assert world.count(RequestCode.SEND_RECORDS) == 0


async def test_cancelled_send_does_not_disturb_the_others(world: World, producer: Producer) -> None:
    stored = 0
    await producer.send(Message("T", b"warm"))
    world.group.brokers[0].delay_s = 1.0
    scopes: list[trio.CancelScope] = []

    async def one(i: int) -> None:
        nonlocal stored
        with trio.CancelScope() as scope:
            scopes.append(scope)
            result = await producer.send(Message("T", b"%d" % i))
            queue = world.group.queue("T", result.message_queue.queue_id)
            assert decode_record(queue[result.queue_offset]).body == b"%d" % i
            stored += 1

    async with trio.open_nursery() as nursery:
        for i in range(10):
            nursery.start_soon(one, i)
        await trio.testing.wait_all_tasks_blocked()
        for scope in scopes[::2]:
            scope.cancel()
    assert stored == 5
    assert (await producer.send(Message("T", b"after"))).queue_offset >= 0


async def test_not_leader_is_followed_within_one_round_trip(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await producer.send(Message("T", b"1"))
    routes = client.counters.route_refreshes
    world.group.elect(2, register=False)
    began = trio.current_time()
    await producer.send(Message("T", b"2"))
    assert trio.current_time() == began
    assert client.counters.redirects_by_hint == 1
    assert client.counters.route_refreshes == routes
    assert world.group.brokers[0].count(RequestCode.SEND_RECORDS) == 2
    assert world.group.brokers[2].count(RequestCode.SEND_RECORDS) == 1
    await producer.send(Message("T", b"3"))
    assert world.group.brokers[2].count(RequestCode.SEND_RECORDS) == 2
    assert client.counters.redirects_by_hint == 1


async def test_a_new_leader_that_is_not_ready_is_asked_again_soon(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await producer.send(Message("T", b"1"))
    world.group.elect(1, register=False)
    refusals = 2

    def intercept(asked: RemotingCommand) -> Handled:
        nonlocal refusals
        refusals -= 1
        ext = {"outcome": "not_stored", "term": "2", "leaderAddr": world.group.brokers[1].address}
        return response_to(asked, 14, "not yet", ext) if refusals >= 0 else None

    world.group.brokers[1].intercept = intercept
    began = trio.current_time()
    await producer.send(Message("T", b"2"))
    assert trio.current_time() - began == pytest.approx(0.02 + 0.04)
    assert client.counters.leader_searches == 0
    assert world.group.brokers[1].count(RequestCode.SEND_RECORDS) == 3


async def test_without_retry_an_unknown_outcome_surfaces_at_once(
    world: World, client: ClientInstance
) -> None:
    config = ProducerConfig(retry_unknown=False)
    async with Producer(client, "p", config) as producer:
        await producer.send(Message("T", b"before"))
        world.group.brokers[0].intercept = lambda asked: response_to(
            asked, 1, "lost leadership", {"outcome": "unknown"}
        )
        began = trio.current_time()
        with pytest.raises(UnknownOutcomeError) as caught:
            await producer.send(Message("T", b"x"))
        assert caught.value.outcome == "unknown"
        assert trio.current_time() == began


async def test_send_to_a_silent_broker_is_unknown_at_its_deadline(
    world: World, producer: Producer
) -> None:
    await producer.send(Message("T", b"before"))
    world.group.brokers[0].intercept = lambda asked: DEFERRED
    began = trio.current_time()
    with pytest.raises(UnknownOutcomeError):
        await producer.send(Message("T", b"x"), timeout_s=0.7)
    assert trio.current_time() - began == pytest.approx(0.7)


async def test_send_to_a_dead_group_is_not_stored_at_its_deadline(
    world: World, producer: Producer
) -> None:
    await producer.send(Message("T", b"before"))
    for broker in world.group.brokers:
        await broker.kill()
    began = trio.current_time()
    with pytest.raises(BrokerUnreachableError) as caught:
        await producer.send(Message("T", b"x"), timeout_s=2.0)
    assert caught.value.outcome == "not_stored"
    assert trio.current_time() - began <= 2.01


async def test_a_failed_broker_is_avoided_while_latency_faults_are_on() -> None:
    config = ProducerConfig(latency_fault_enable=True)
    async with open_world(members=1) as world:
        await world.add_group("h", 1, 10950)
        async with world.client() as client, Producer(client, "p", config) as producer:
            await producer.publish_queues("T")
            broker = world.group.brokers[0]
            broker.intercept = fixed(2, "busy")
            for i in range(16):
                await producer.send(Message("T", b"%d" % i))
            assert broker.count(RequestCode.SEND_RECORDS) == 1
            await trio.sleep(31)
            broker.intercept = None
            for i in range(16):
                await producer.send(Message("T", b"%d" % i))
            assert broker.count(RequestCode.SEND_RECORDS) > 1


async def test_send_moves_to_another_group_when_its_own_is_dead() -> None:
    async with open_world(members=1) as world:
        other = await world.add_group("h", 1, 10950)
        async with world.client() as client, Producer(client, "p") as producer:
            await producer.publish_queues("T")
            await world.group.brokers[0].kill()
            results = [await producer.send(Message("T", b"%d" % i)) for i in range(8)]
            assert {r.message_queue.broker_name for r in results} == {"h"}
            assert sorted(other.bodies()) == [b"%d" % i for i in range(8)]
            for result in results:
                record = decode_record(
                    other.queue("T", result.message_queue.queue_id)[result.queue_offset]
                )
                assert record.queue_id == result.message_queue.queue_id
            with pytest.raises(BrokerUnreachableError):
                await producer.send_to(
                    MessageQueue("T", "g", 0), Message("T", b"pinned"), timeout_s=1.0
                )


async def test_send_leaves_a_group_without_a_leader(world: World) -> None:
    """Its members answer and the NameServers still list a leader: only time shows it."""
    other = await world.add_group("h", 1, 10950)
    async with world.client() as client, Producer(client, "p") as producer:
        await producer.publish_queues("T")
        world.group.leader = None
        began = trio.current_time()
        results = [await producer.send(Message("T", b"%d" % i)) for i in range(8)]
        assert {r.message_queue.broker_name for r in results} == {"h"}
        assert sorted(other.bodies()) == [b"%d" % i for i in range(8)]
        assert world.group.bodies() == []
        assert trio.current_time() - began >= 3.0
        with pytest.raises(BrokerBusyError):
            await producer.send_to(
                MessageQueue("T", "g", 0), Message("T", b"pinned"), timeout_s=5.0
            )
