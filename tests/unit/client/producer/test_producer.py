"""Producer against a cluster in memory."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from client.core.client_instance import ClientInstance
from client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    MessageIllegalError,
    NoNameServerError,
    NoRouteError,
    UnknownOutcomeError,
)
from client.core.message import Message
from client.core.message_ext import CompressionType, MessageExt, SendResult, SendStatus, decompress
from client.core.route import MessageQueue
from client.producer.config import ProducerConfig
from client.producer.producer import Producer
from client.producer.queue_selection import LEADER_POLL_S
from commitlog.errors import ConfigError
from commitlog.record import decode_record
from jepsen_like.seeded_rng import rng_stream
from remoting.processor import DEFERRED, Handled
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, SerializeType, response_to
from tests.unit.client.fake_cluster import World, open_world

pytestmark = pytest.mark.usefixtures("autojump_clock")


async def test_send_returns_where_the_message_is() -> None:
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        result = await producer.send(Message("T", b"hello", tags="A", keys=("k1", "k2")))
        group = world.groups["g"]
        stored = decode_record(group.queue("T", result.message_queue.queue_id)[result.queue_offset])
    assert result.status is SendStatus.SEND_OK
    assert stored.body == b"hello"
    assert stored.property_map == {
        "UNIQ_KEY": result.message_id,
        "TAGS": "A",
        "KEYS": "k1 k2",
    }
    assert len(result.message_id) == 32
    assert result.offset_message_id == "0A000001" + "00002A9F" + "0" * 16


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
    group = world.groups["g"]
    group.brokers[0].delay_s = 0.5

    async def one(i: int) -> None:
        result = await producer.send(Message("T", b"body-%d" % i))
        results[i] = (result.message_queue, result.queue_offset, result.phy_offset)

    await producer.send(Message("T", b"first"))
    async with trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(one, i)
    assert group.brokers[0].count(RequestCode.SEND_RECORDS) <= 3
    for i, (queue, offset, position) in results.items():
        record = decode_record(group.queue("T", queue.queue_id)[offset])
        assert record.body == b"body-%d" % i
        assert record.phy_offset == position


async def test_a_refused_queue_fails_only_its_own_sends() -> None:
    outcomes: dict[int, list[str]] = {}
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        group = world.groups["g"]
        group.refused_queues["T", 2] = 16

        async def one(i: int) -> None:
            queue = MessageQueue("T", "g", i % 4)
            try:
                result = await producer.send_to(queue, Message("T", b"%d" % i))
            except BrokerRefusedError as error:
                outcomes.setdefault(i % 4, []).append(f"refused {error.code} {error.outcome}")
            else:
                stored = decode_record(group.queue("T", i % 4)[result.queue_offset])
                assert stored.body == b"%d" % i
                assert stored.phy_offset == result.phy_offset
                outcomes.setdefault(i % 4, []).append("stored")

        async with trio.open_nursery() as nursery:
            for i in range(20):
                nursery.start_soon(one, i)
    assert outcomes[2] == ["refused 16 not_stored"] * 5
    assert {q: set(o) for q, o in outcomes.items() if q != 2} == {
        0: {"stored"},
        1: {"stored"},
        3: {"stored"},
    }


async def test_refusal_names_the_queue_of_every_refused_run(
    world: World, producer: Producer
) -> None:
    world.groups["g"].refused_queues["T", 1] = 13
    with pytest.raises(MessageIllegalError, match="refused"):
        await producer.send_to(MessageQueue("T", "g", 1), Message("T", b"x"))


async def test_a_cancelled_send_does_not_disturb_the_others(
    world: World, producer: Producer
) -> None:
    stored = 0
    group = world.groups["g"]
    await producer.send(Message("T", b"warm"))
    group.brokers[0].delay_s = 1.0
    scopes: list[trio.CancelScope] = []

    async def one(i: int) -> None:
        nonlocal stored
        with trio.CancelScope() as scope:
            scopes.append(scope)
            result = await producer.send(Message("T", b"%d" % i))
            queue = group.queue("T", result.message_queue.queue_id)
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
    group = world.groups["g"]
    await producer.send(Message("T", b"1"))
    routes = client.counters.route_refreshes
    group.elect(2, register=False)
    began = trio.current_time()
    await producer.send(Message("T", b"2"))
    assert trio.current_time() == began
    assert client.counters.redirects_by_hint == 1
    assert client.counters.route_refreshes == routes
    assert group.brokers[0].count(RequestCode.SEND_RECORDS) == 2
    assert group.brokers[2].count(RequestCode.SEND_RECORDS) == 1
    await producer.send(Message("T", b"3"))
    assert group.brokers[2].count(RequestCode.SEND_RECORDS) == 2
    assert client.counters.redirects_by_hint == 1


async def test_a_new_leader_that_is_not_ready_is_asked_again_soon(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    group = world.groups["g"]
    await producer.send(Message("T", b"1"))
    group.elect(1, register=False)
    refusals = 2

    def intercept(asked: RemotingCommand) -> Handled:
        nonlocal refusals
        refusals -= 1
        ext = {"outcome": "not_stored", "term": "2", "leaderAddr": group.brokers[1].address}
        return response_to(asked, 14, "not yet", ext) if refusals >= 0 else None

    group.brokers[1].intercept = intercept
    began = trio.current_time()
    await producer.send(Message("T", b"2"))
    assert trio.current_time() - began == pytest.approx(0.02 + 0.04)
    assert client.counters.leader_searches == 0
    assert group.brokers[1].count(RequestCode.SEND_RECORDS) == 3


async def test_ten_leader_changes_are_ten_hints(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    group = world.groups["g"]
    await producer.send(Message("T", b"0"))
    for i in range(1, 11):
        group.elect(i % 3, register=False)
        await producer.send(Message("T", b"%d" % i))
    assert client.counters.redirects_by_hint == 10
    assert client.counters.route_refreshes == 1
    assert sorted(group.bodies()) == sorted(b"%d" % i for i in range(11))


async def test_a_send_survives_the_death_of_the_leader(world: World, producer: Producer) -> None:
    group = world.groups["g"]
    await producer.send(Message("T", b"before"))

    async def fail_over() -> None:
        await group.brokers[0].kill()
        group.leader = None
        await trio.sleep(1.0)
        group.elect(1, register=False)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_over)
        await trio.testing.wait_all_tasks_blocked()
        results = []

        async def one(i: int) -> None:
            results.append(await producer.send(Message("T", b"%d" % i)))

        for i in range(20):
            nursery.start_soon(one, i)
    took = trio.current_time() - began
    assert 1.0 <= took < 1.6
    assert len(results) == 20
    assert sorted(group.bodies()) == sorted([b"before", *(b"%d" % i for i in range(20))])


async def test_a_request_cut_off_by_a_dying_leader_is_sent_again(
    world: World, producer: Producer
) -> None:
    group = world.groups["g"]
    await producer.send(Message("T", b"before"))
    group.brokers[0].intercept = lambda asked: DEFERRED
    results = []
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            results.append(await producer.send(Message("T", b"x")))

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        group.elect(1)
        await group.brokers[0].kill()
    assert len(results) == 1
    assert group.bodies().count(b"x") == 1
    assert producer.counters.retries == 1


async def test_without_retry_an_unknown_outcome_surfaces_at_once(
    world: World, client: ClientInstance
) -> None:
    config = ProducerConfig(retry_unknown=False)
    async with Producer(client, "p", config) as producer:
        group = world.groups["g"]
        await producer.send(Message("T", b"before"))
        group.brokers[0].intercept = lambda asked: response_to(
            asked, 1, "lost leadership", {"outcome": "unknown"}
        )
        began = trio.current_time()
        with pytest.raises(UnknownOutcomeError) as caught:
            await producer.send(Message("T", b"x"))
        assert caught.value.outcome == "unknown"
        assert trio.current_time() == began


async def test_an_unknown_attempt_is_never_reported_as_not_stored(
    world: World, producer: Producer
) -> None:
    """First attempt unknown, then refused for good: the message may be stored all the same."""
    group = world.groups["g"]
    await producer.send(Message("T", b"before"))
    answers = iter(
        [
            (1, {"outcome": "unknown"}),
            (13, {"outcome": "not_stored"}),
        ]
    )

    def intercept(asked: RemotingCommand) -> Handled:
        code, ext = next(answers)
        return response_to(asked, code, "no", dict(ext))

    group.brokers[0].intercept = intercept
    with pytest.raises(UnknownOutcomeError):
        await producer.send(Message("T", b"x"))


async def test_send_to_a_silent_broker_is_unknown_at_its_deadline(
    world: World, producer: Producer
) -> None:
    group = world.groups["g"]
    await producer.send(Message("T", b"before"))
    group.brokers[0].intercept = lambda asked: DEFERRED
    began = trio.current_time()
    with pytest.raises(UnknownOutcomeError):
        await producer.send(Message("T", b"x"), timeout_s=0.7)
    assert trio.current_time() - began == pytest.approx(0.7)


async def test_send_to_a_dead_group_is_not_stored_at_its_deadline(
    world: World, producer: Producer
) -> None:
    group = world.groups["g"]
    await producer.send(Message("T", b"before"))
    for broker in group.brokers:
        await broker.kill()
    began = trio.current_time()
    with pytest.raises(BrokerUnreachableError) as caught:
        await producer.send(Message("T", b"x"), timeout_s=2.0)
    assert caught.value.outcome == "not_stored"
    assert trio.current_time() - began <= 2.01


async def test_busy_is_retried_until_it_is_not(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    group = world.groups["g"]
    broker = group.brokers[0]
    refusals = 6

    def intercept(asked: RemotingCommand) -> Handled:
        nonlocal refusals
        refusals -= 1
        return response_to(asked, 2, "busy", {"outcome": "not_stored"}) if refusals >= 0 else None

    broker.intercept = intercept
    await producer.send(Message("T", b"x"))
    assert group.bodies() == [b"x"]
    assert broker.count(RequestCode.SEND_RECORDS) == 7
    assert client.counters.leader_searches == 0


async def test_busy_broker_gets_no_more_single_sends_and_reads(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    broker = world.groups["g"].brokers[0]
    refusals = 3

    def intercept(asked: RemotingCommand) -> Handled:
        nonlocal refusals
        refusals -= 1
        return response_to(asked, 2, "busy", {"outcome": "not_stored"}) if refusals >= 0 else None

    broker.intercept = intercept
    await producer.send(Message("T", b"x", delay_level=1))
    assert broker.count(RequestCode.SEND_MESSAGE_V2) == 4
    assert client.counters.leader_searches == 0


async def test_a_failed_broker_is_avoided_while_latency_faults_are_on() -> None:
    config = ProducerConfig(latency_fault_enable=True)
    async with open_world(members=1) as world:
        await world.add_group("h", 1, 10950)
        async with world.client() as client, Producer(client, "p", config) as producer:
            await producer.publish_queues("T")
            broker = world.groups["g"].brokers[0]
            broker.intercept = lambda asked: response_to(asked, 2, "busy", {})
            for i in range(16):
                await producer.send(Message("T", b"%d" % i))
            assert broker.count(RequestCode.SEND_RECORDS) == 1
            await trio.sleep(31)
            broker.intercept = None
            for i in range(16):
                await producer.send(Message("T", b"%d" % i))
            assert broker.count(RequestCode.SEND_RECORDS) > 1


@pytest.mark.parametrize(("body_bytes", "overlap"), [(40_000, True), (40, False)])
async def test_requests_overlap_only_when_much_is_waiting(
    world: World, client: ClientInstance, body_bytes: int, overlap: bool
) -> None:
    """Thirty sends in requests of five at most, each answered after a second."""
    config = ProducerConfig(compress_over_bytes=None, max_request_records=5)
    async with Producer(client, "p", config) as producer:
        await producer.send(Message("T", b"first"))
        world.groups["g"].brokers[0].delay_s = 1.0
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for i in range(30):
                nursery.start_soon(producer.send, Message("T", b"%d" % i + bytes(body_bytes)))
        took_s = trio.current_time() - began
        assert took_s < 5.0 if overlap else took_s >= 6.0


async def test_send_moves_to_another_group_when_its_own_is_dead() -> None:
    async with open_world(members=1) as world:
        other = await world.add_group("h", 1, 10950)
        async with world.client() as client, Producer(client, "p") as producer:
            await producer.publish_queues("T")
            await world.groups["g"].brokers[0].kill()
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
        world.groups["g"].leader = None
        began = trio.current_time()
        results = [await producer.send(Message("T", b"%d" % i)) for i in range(8)]
        assert {r.message_queue.broker_name for r in results} == {"h"}
        assert sorted(other.bodies()) == [b"%d" % i for i in range(8)]
        assert world.groups["g"].bodies() == []
        assert trio.current_time() - began >= 3.0
        with pytest.raises(BrokerBusyError):
            await producer.send_to(
                MessageQueue("T", "g", 0), Message("T", b"pinned"), timeout_s=5.0
            )


async def test_a_real_rocketmq_gets_json_and_310() -> None:
    async with (
        open_world(members=1, rocketmq=True) as world,
        world.client() as client,
        Producer(client, "p") as producer,
    ):
        first = await producer.send(Message("T", b"one", tags="A"))
        second = await producer.send(Message("T", b"two"))
        batch = await producer.send_batch([Message("T", b"b%d" % i) for i in range(3)])
        broker = world.groups["g"].brokers[0]
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
        broker = world.groups["g"].brokers[0]
        (sent,) = [s.command for s in broker.seen if s.code == 310]
        assert broker.count(RequestCode.SEND_RECORDS) == 0
    assert "DELAY\x013\x02" in sent.ext["i"]
    assert result.message_id in sent.ext["i"]


async def test_a_delayed_message_follows_the_hint_too(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    group = world.groups["g"]
    await producer.publish_queues("T")
    group.elect(1, register=False)
    await producer.send(Message("T", b"later", delay_level=1))
    assert client.counters.redirects_by_hint == 1
    assert group.bodies() == [b"later"]


async def test_oneway_does_not_wait_for_an_answer(world: World, producer: Producer) -> None:
    broker = world.groups["g"].brokers[0]
    broker.intercept = lambda asked: DEFERRED
    began = trio.current_time()
    await producer.send_oneway(Message("T", b"x"))
    assert trio.current_time() == began
    await trio.testing.wait_all_tasks_blocked()
    (sent,) = [s.command for s in broker.seen if s.code == 310]
    assert sent.is_oneway


async def test_a_batch_is_one_run_with_consecutive_offsets(
    world: World, producer: Producer
) -> None:
    group = world.groups["g"]
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


async def test_an_asynchronous_send_brings_its_result_later(
    world: World, producer: Producer
) -> None:
    world.groups["g"].brokers[0].delay_s = 0.2
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
    world.groups["g"].brokers[0].delay_s = 0.5
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
            raw = world.groups["g"].queue("T", result.message_queue.queue_id)[result.queue_offset]
            stored = decode_record(raw)
            assert stored.sys_flag == 1 | kind.value << 8
            assert len(stored.body) < 200
            assert decompress(stored.body, stored.sys_flag) == body
            assert MessageExt(memoryview(raw), 0).body == body


async def test_a_body_that_gets_no_smaller_goes_as_it_is(world: World, producer: Producer) -> None:
    body = rng_stream(1).randbytes(5000)
    result = await producer.send(Message("T", body))
    raw = world.groups["g"].queue("T", result.message_queue.queue_id)[result.queue_offset]
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


async def test_an_unknown_topic_is_sent_to_where_it_would_be_created(
    world: World, producer: Producer
) -> None:
    results = [await producer.send(Message("new", b"x")) for _ in range(4)]
    assert sorted(r.message_queue.queue_id for r in results) == [0, 1, 2, 3]
    (first, *_) = [s.command for s in world.seen if s.code == 51101]
    assert first.ext["default_topic_queue_nums"] == 4


async def test_send_to_a_topic_that_cannot_exist_has_no_route(
    world: World, producer: Producer
) -> None:
    del world.groups["g"].topics["TBW102"]
    with pytest.raises(NoRouteError):
        await producer.send(Message("new", b"x"))
    with pytest.raises(NoRouteError):
        producer.send_nowait(Message("new", b"x"))


@pytest.mark.parametrize("topic", ["T", "new"])
async def test_first_sends_wait_for_an_election_and_ask_together(
    world: World, producer: Producer, topic: str
) -> None:
    group = world.groups["g"]
    group.leader = None
    group.register()
    results: list[SendResult] = []

    async def one(i: int) -> None:
        results.append(await producer.send(Message(topic, b"%d" % i), timeout_s=20))

    async with trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(one, i)
        await trio.sleep(2)
        assert not results
        group.elect(1)
        began = trio.current_time()
    assert trio.current_time() - began < 0.5
    stored = sorted(int(body) for body in group.bodies(topic))
    assert stored == list(range(50))
    firsts, polls = 2 * 50, 2 * 2.5 / LEADER_POLL_S
    assert world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) <= firsts + polls


async def test_first_send_without_a_leader_ends_with_its_budget(
    world: World, producer: Producer
) -> None:
    group = world.groups["g"]
    group.leader = None
    group.register()
    began = trio.current_time()
    with pytest.raises(NoRouteError, match=r"no broker with a leader .* within 1\.5 s") as caught:
        await producer.send(Message("T", b"x"), timeout_s=1.5)
    assert 1.5 <= trio.current_time() - began < 1.7
    assert caught.value.outcome == "not_stored"
    assert caught.value.retriable


async def test_wait_for_a_route_counts_for_the_budget_of_a_send(
    world: World, producer: Producer
) -> None:
    group = world.groups["g"]
    group.leader = None
    group.register()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _elect() -> None:
            await trio.sleep(2)
            group.elect(1)
            group.brokers[1].delay_s = 100.0

        with pytest.raises(UnknownOutcomeError):
            await producer.send(Message("T", b"x"), timeout_s=3)
    assert 3 <= trio.current_time() - began < 3.2


async def test_with_all_name_servers_down_a_running_producer_goes_on() -> None:
    async with (
        open_world(name_servers=2) as world,
        world.client() as client,
        Producer(client, "p") as producer,
    ):
        await producer.send(Message("T", b"1"))
        for name_server in world.name_servers:
            await name_server.kill()
        await trio.sleep(100)
        await producer.send(Message("T", b"2"))
        world.groups["g"].elect(1)
        await producer.send(Message("T", b"3"))
        with pytest.raises(NoNameServerError, match=r"9876.*9877|9877.*9876"):
            await producer.send(Message("other", b"x"))


async def test_a_new_client_without_name_servers_gets_one_clear_error() -> None:
    async with open_world(name_servers=2) as world:
        for name_server in world.name_servers:
            await name_server.kill()
        async with world.client() as client, Producer(client, "p") as producer:
            with pytest.raises(NoNameServerError, match="no NameServer answers") as caught:
                await producer.send(Message("T", b"1"))
            assert caught.value.outcome == "not_stored"
            assert caught.value.retriable


async def test_send_waits_while_the_lane_is_full(world: World, client: ClientInstance) -> None:
    config = ProducerConfig(max_waiting_bytes=2000)
    async with Producer(client, "p", config) as producer:
        world.groups["g"].brokers[0].delay_s = 0.1
        done = 0

        async def one(i: int) -> None:
            nonlocal done
            await producer.send(Message("T", b"%d" % i))
            done += 1

        most = 0
        async with trio.open_nursery() as nursery:
            for i in range(30):
                nursery.start_soon(one, i)
            while done < 30:
                await trio.sleep(0.01)
                lane = producer._engine._lanes.get("g")
                most = max(most, lane.line.waiting_bytes if lane else 0)
        assert 0 < most <= 2000 + 1000


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_wait_for_space_counts_as_time_of_a_send(
    world: World, client: ClientInstance, is_async: bool
) -> None:
    config = ProducerConfig(max_waiting_bytes=1000, attempt_timeout_s=3.0)
    message = Message("T", b"y")
    async with Producer(client, "p", config) as producer:
        await producer.send(Message("T", b"first"))
        world.groups["g"].brokers[0].delay_s = 1e6
        for _ in range(2):
            future = await producer.send_async(Message("T", b"x" * 1000), timeout_s=4.0)
        begin_s = trio.current_time()

        async def send() -> SendResult:
            if is_async:
                return await (await producer.send_async(message, timeout_s=6.0)).result()
            return await producer.send(message, timeout_s=6.0)

        with pytest.raises(ClientError):
            await send()
        assert trio.current_time() - begin_s == pytest.approx(6.0, abs=0.1)
        with pytest.raises(ClientError):
            await future.result()


async def test_a_send_that_waits_for_space_ends_with_the_producer(
    world: World, client: ClientInstance
) -> None:
    config = ProducerConfig(max_waiting_bytes=1000)
    ended_s: list[float] = []

    async def wait_for_space(producer: Producer) -> None:
        with pytest.raises(ClientClosedError, match="closed before the send"):
            await producer.send(Message("T", b"y"))
        ended_s.append(trio.current_time())

    async def work(nursery: trio.Nursery) -> None:
        async with Producer(client, "p", config) as producer:
            await producer.send(Message("T", b"first"))
            world.groups["g"].brokers[0].delay_s = 1e6
            for _ in range(2):
                await producer.send_async(Message("T", b"x" * 1000))
            nursery.start_soon(wait_for_space, producer)
            await trio.sleep(1.0)
            raise KeyError

    async with trio.open_nursery() as nursery:
        with pytest.raises(KeyError):
            await work(nursery)
    assert ended_s == [pytest.approx(1.0, abs=0.1)]


async def test_a_producer_that_closes_waits_for_sends_without_space(
    world: World, client: ClientInstance
) -> None:
    config = ProducerConfig(max_waiting_bytes=1000)
    async with trio.open_nursery() as nursery:
        async with Producer(client, "p", config) as producer:
            await producer.send(Message("T", b"first"))
            world.groups["g"].brokers[0].delay_s = 0.5
            for _ in range(2):
                await producer.send_async(Message("T", b"x" * 1000))
            for body in (b"y" * 1000, b"z" * 1000, b"0"):
                nursery.start_soon(producer.send, Message("T", body))
            await trio.sleep(0.1)
        assert len(world.groups["g"].bodies()) == 6


async def test_leader_change_with_another_seed_keeps_order_per_queue(
    world: World, producer: Producer
) -> None:
    """Asynchronous sends to one queue keep their order over a redirect."""
    group = world.groups["g"]
    queue = (await producer.publish_queues("T"))[0]
    futures = []
    for i in range(30):
        futures.append(await producer.send_async(Message("T", b"%02d" % i), queue=queue))
        if i % 10 == 5:
            group.elect((i // 10 + 1) % 3, register=False)
        await trio.lowlevel.checkpoint()
    for future in futures:
        await future.result()
    assert group.bodies() == [b"%02d" % i for i in range(30)]
