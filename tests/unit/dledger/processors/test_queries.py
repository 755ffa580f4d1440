"""Messages by key and by position, the units of a queue; small requests of the broker."""

import json
from typing import Any

import pytest
import trio
import trio.testing

from dledger.commitlog.entry import ENTRY_HEADER_BYTES, Run
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import decode_record, encode_record, iter_records
from dledger.processors import queries
from dledger.remoting.protocol.bodies import (
    ConsumerData,
    HeartbeatData,
    KVTable,
    QueryConsumeQueueResponseBody,
    SubscriptionData,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.state.state_record import TopicsChange
from dledger.testing.doubles import EPOCH_MS, ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import batch_of

NEVER = (1 << 63) - 1


async def query(broker: Broker, key: str = "k", **changes: Any) -> RemotingCommand:
    ext = {
        "topic": "T",
        "key": key,
        "maxNum": "32",
        "beginTimestamp": "0",
        "endTimestamp": str(NEVER),
        **{name: str(value) for name, value in changes.items()},
    }
    answer = await broker.handle(request(RequestCode.QUERY_MESSAGE, ext))
    assert isinstance(answer, RemotingCommand)
    return answer


def bodies(answer: RemotingCommand) -> list[bytes]:
    assert answer.code == 0, answer.remark
    return [bytes(record.body) for record in iter_records(bytes(answer.body))]


def put(broker: Broker, body: bytes, keys: str = "", uniq: str = "", topic: str = "T") -> None:
    properties = encode_properties({"UNIQ_KEY": uniq, "KEYS": keys})
    broker.group.put(topic, 0, body, properties=properties)


def clock_of(broker: Broker) -> ManualClock:
    assert isinstance(broker.clock, ManualClock)
    return broker.clock


@pytest.fixture
def filled(broker: Broker) -> Broker:
    broker.make_topic("T", 4)
    broker.make_topic("U", 4)
    for i in range(5):
        put(broker, b"m%d" % i, keys="k other" if i % 2 else "other k", uniq=f"id{i}")
        clock_of(broker).now_s += 10
    put(broker, b"else", keys="kk", uniq="k5")
    put(broker, b"other topic", keys="k", topic="U")
    return broker


async def test_all_with_the_key_come_in_the_order_of_the_log(filled: Broker) -> None:
    answer = await query(filled)
    assert bodies(answer) == [b"m0", b"m1", b"m2", b"m3", b"m4"]
    state = filled.group.state
    assert answer.ext == {
        "indexLastUpdateTimestamp": str(state.last_store_time_ms),
        "indexLastUpdatePhyoffset": str(state.applied_end_position),
    }


async def test_the_newest_are_kept_when_there_are_more(filled: Broker) -> None:
    assert bodies(await query(filled, maxNum=2)) == [b"m3", b"m4"]


async def test_empty_query_is_answered(filled: Broker) -> None:
    for answer in (
        await query(filled, "x"),
        await query(filled, topic="V"),
        await query(filled, maxNum=0),
        await query(filled, maxNum=-1),
        await query(filled, beginTimestamp=5, endTimestamp=4),
    ):
        assert (answer.code, answer.ext["outcome"]) == (22, "not_stored")


async def test_the_time_counts_to_the_millisecond(filled: Broker) -> None:
    second = EPOCH_MS + 10_000
    assert bodies(await query(filled, beginTimestamp=second, endTimestamp=second)) == [b"m1"]
    assert (await query(filled, beginTimestamp=second + 1, endTimestamp=second + 999)).code == 22
    clock_of(filled).skew_ms = 700
    put(filled, b"later", keys="k")
    stored = EPOCH_MS + 50_700
    assert bodies(await query(filled, beginTimestamp=stored, endTimestamp=stored)) == [b"later"]
    assert (await query(filled, beginTimestamp=stored + 1)).code == 22


async def test_a_message_is_found_by_its_id(filled: Broker) -> None:
    assert bodies(await query(filled, "id3")) == [b"m3"]
    unique = {"_UNIQUE_KEY_QUERY": "true"}
    assert bodies(await query(filled, "id3", maxNum=0, **unique)) == [b"m3"]
    assert (await query(filled, "k", **unique)).code == 22, "a key of the user's is no id"


@pytest.mark.parametrize(
    ("guessed_ms", "more"),
    [
        # mqadmin 4.9: the time in the id, one second before; the sender's clock was ahead, or the
        # tool stands in another time zone, or the message is of last month.
        (EPOCH_MS + 31_000 + 5_000 - 1_000, {}),
        (EPOCH_MS + 31_000 + 5 * 3_600_000, {}),
        (EPOCH_MS + 31_000 + 31 * 24 * 3_600_000, {}),
        # mqadmin 5: three days back, and it names the kind of index it means.
        (EPOCH_MS + 31_000 + 24 * 3_600_000, {"indexType": "U"}),
        (0, {"indexType": "U"}),
    ],
)
async def test_mqadmin_finds_an_id_whatever_time_it_guesses(
    filled: Broker, guessed_ms: int, more: dict[str, str]
) -> None:
    answer = await query(
        filled, "id3", beginTimestamp=guessed_ms, **{"_UNIQUE_KEY_QUERY": "true", **more}
    )
    assert bodies(answer) == [b"m3"]


async def test_of_repeated_sends_the_time_asked_for_chooses(filled: Broker) -> None:
    put(filled, b"m3 again", uniq="id3")
    unique = {"_UNIQUE_KEY_QUERY": "true"}
    assert bodies(await query(filled, "id3", **unique)) == [b"m3", b"m3 again"]
    later = await query(filled, "id3", beginTimestamp=EPOCH_MS + 40_000, **unique)
    assert bodies(later) == [b"m3 again"]
    early = await query(filled, "id3", endTimestamp=EPOCH_MS + 40_000, **unique)
    assert bodies(early) == [b"m3"]


async def test_another_key_of_the_same_hash_is_left_out(filled: Broker) -> None:
    assert index_key_hash("T", "Aa") == index_key_hash("T", "BB")
    for i in range(3):
        put(filled, b"a%d" % i, keys="Aa")
        put(filled, b"b%d" % i, keys="BB")
    assert bodies(await query(filled, "Aa", maxNum=2)) == [b"a1", b"a2"]
    assert bodies(await query(filled, "BB")) == [b"b0", b"b1", b"b2"]


async def test_many_of_another_key_hide_none(filled: Broker) -> None:
    put(filled, b"the one", keys="Aa")
    for _ in range(150):
        put(filled, b"b", keys="BB")
    assert bodies(await query(filled, "Aa")) == [b"the one"]


async def test_unbounded_search_is_reported(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_RECORDS", 64)
    put(filled, b"the one", keys="Aa")
    for _ in range(150):
        put(filled, b"b", keys="BB")
    answer = await query(filled, "Aa")
    assert answer.code == 1
    assert "end the time range earlier" in (answer.remark or "")
    put(filled, b"the newest", keys="Aa")
    assert bodies(await query(filled, "Aa")) == [b"the newest"]


async def test_long_chain_lets_others_work(filled: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "ENTRIES_AT_A_TIME", 2)
    for i in range(100):
        put(filled, b"x", keys=f"key{i}")
    assert len(bodies(await query(filled))) == 5


async def test_what_is_not_committed_is_not_found(filled: Broker) -> None:
    group = filled.group
    record = encode_record(topic="T", queue_id=0, body=b"x", properties=b"KEYS\x01new\x02")
    group.propose(batch_of([record], Run("T", 0, 1)), lambda _: None)
    group.append()
    assert (await query(filled, "new")).code == 22
    group.apply()
    assert bodies(await query(filled, "new")) == [b"x"]


async def test_messages_of_a_deleted_topic_are_not_found(filled: Broker) -> None:
    filled.group.store(TopicsChange(delete=("T",)))
    assert (await query(filled)).code == 22
    filled.make_topic("T", 4)
    put(filled, b"new", keys="k")
    assert bodies(await query(filled)) == [b"new"], "the old ones have offsets of the new queue"


async def test_messages_below_the_floor_are_not_found(filled: Broker) -> None:
    filled.group.state.queues["T", 0].min_offset = 3
    assert bodies(await query(filled)) == [b"m3", b"m4"]


async def test_an_answer_is_limited_but_one_message_always_comes(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_ANSWER_BYTES", 1)
    assert bodies(await query(filled)) == [b"m4"]


async def test_damaged_message_refuses_the_query_for_now(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = filled.group.log.read

    def bad_read(position: int, size: int) -> memoryview:
        return memoryview(bytes(read(position, size)).replace(b"m2", b"m!"))

    monkeypatch.setattr(filled.group.log, "read", bad_read)
    answer = await query(filled)
    assert (answer.code, answer.ext["retriable"]) == (14, "true")
    place = int(filled.group.queues.queue("T", 0).read(2, 1)["phy_offset"][0])
    assert [at for at, _ in filled.group.damage_reports] == [place]


async def test_the_leader_answers_behind_the_read_barrier(filled: Broker) -> None:
    filled.group.barriers_pass = False
    answers: list[RemotingCommand] = []

    async def ask() -> None:
        answers.append(await query(filled))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        filled.group.pass_barriers()
    assert len(bodies(answers[0])) == 5


async def test_follower_answers_what_it_has_never_nothing(filled: Broker) -> None:
    filled.group.step_down("10.0.0.2:10911")
    assert len(bodies(await query(filled))) == 5
    answer = await query(filled, "x")
    assert (answer.code, answer.ext["leaderAddr"]) == (14, "10.0.0.2:10911")


def view(broker: Broker, **changes: Any) -> QueryConsumeQueueResponseBody:
    ext = {"topic": "T", "queueId": "0", "index": "0", "count": "10", **changes}
    answer = broker.call(RequestCode.QUERY_CONSUME_QUEUE, ext)
    assert answer.code == 0, answer.remark
    return QueryConsumeQueueResponseBody.decode(answer.body)


def subscribe(broker: Broker, data: SubscriptionData) -> None:
    body = HeartbeatData(
        client_id="c", consumer_data_set=[ConsumerData("g", subscription_data_set=[data])]
    )
    assert broker.call(RequestCode.HEART_BEAT, {}, body.encode()).code == 0
    broker.group.settle()


@pytest.fixture
def queued(broker: Broker) -> Broker:
    broker.make_topic("T", 4)
    for i in range(5):
        properties = encode_properties({"n": str(i), "TAGS": "AB"[i % 2]})
        broker.group.put("T", 0, b"m%d" % i, properties=properties)
    return broker


def test_units_are_shown_as_they_stand(queued: Broker) -> None:
    body = view(queued, index="1", count="2")
    units = queued.group.queues.queue("T", 0).read(1, 2)
    assert [(u.physic_offset, u.physic_size, u.tags_code) for u in body.queue_data] == [
        tuple(unit) for unit in units.tolist()
    ]
    assert (body.min_queue_index, body.max_queue_index) == (0, 5)
    assert body.subscription_data is None
    assert all(unit.eval for unit in body.queue_data)


def test_ranges_outside_the_queue_give_what_there_is(queued: Broker) -> None:
    assert len(view(queued, index="-5", count="100").queue_data) == 5
    assert view(queued, index="5").queue_data == []
    assert view(queued, index="9").queue_data == []
    assert view(queued, count="0").queue_data == []
    assert view(queued, count="-1").queue_data == []


def test_the_number_of_units_is_limited(queued: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_UNITS", 3)
    assert len(view(queued).queue_data) == 3


def test_a_group_with_tags_is_asked(queued: Broker) -> None:
    subscribe(queued, SubscriptionData("T", "A"))
    body = view(queued, consumerGroup="g")
    assert [unit.eval for unit in body.queue_data] == [True, False, True, False, True]
    assert body.subscription_data is not None
    assert body.subscription_data.sub_string == "A"
    assert body.filter_data is None


def test_a_group_with_an_expression_is_asked(queued: Broker) -> None:
    subscribe(queued, SubscriptionData("T", "n > 2", expression_type="SQL92"))
    body = view(queued, consumerGroup="g")
    assert [unit.eval for unit in body.queue_data] == [False, False, False, True, True]
    assert body.filter_data == "n > 2"


def test_bad_expression_is_reported_with_each_unit(queued: Broker) -> None:
    subscribe(queued, SubscriptionData("T", "n >", expression_type="SQL92"))
    body = view(queued, consumerGroup="g")
    assert [unit.eval for unit in body.queue_data] == [False] * 5
    assert "ends too early" in (body.queue_data[0].msg or "")


def test_the_body_is_rocketmqs(queued: Broker) -> None:
    ext = {"topic": "T", "queueId": "0", "index": "0", "count": "1"}
    body = json.loads(bytes(queued.call(RequestCode.QUERY_CONSUME_QUEUE, ext).body))
    assert set(body) == {"queueData", "minQueueIndex", "maxQueueIndex"}
    assert set(body["queueData"][0]) == {"physicOffset", "physicSize", "tagsCode", "eval"}


def test_unknown_queue_is_answered_with_its_reason(queued: Broker) -> None:
    ext = {"topic": "T", "queueId": "3", "index": "0", "count": "1"}
    answer = queued.call(RequestCode.QUERY_CONSUME_QUEUE, ext)
    assert (answer.code, answer.remark) == (1, "3@T is not exist!")
    queued.group.step_down("10.0.0.2:10911")
    answer = queued.call(RequestCode.QUERY_CONSUME_QUEUE, ext)
    assert (answer.code, answer.ext["leaderAddr"]) == (14, "10.0.0.2:10911")


def test_a_message_is_seen_by_its_position(broker: Broker) -> None:
    broker.group.put("T", 0, b"a", b"b")
    position = int(broker.group.queues.queue("T", 0).read(1, 1)["phy_offset"][0])
    response = broker.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(position)})
    assert response.code == 0
    assert bytes(decode_record(response.body).body) == b"b"


@pytest.mark.parametrize("offset", [-(1 << 63), -1, 0, 5, 73, 1 << 20, (1 << 63) - 1])
def test_position_without_a_record_is_answered(broker: Broker, offset: int) -> None:
    broker.group.put("T", 0, b"a")
    response = broker.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
    assert response.code == 1
    assert response.remark == f"can not find message by the offset, {offset}"


def test_a_message_that_is_not_applied_is_not_seen(broker: Broker) -> None:
    record = encode_record(topic="T", queue_id=0, body=b"x", properties=b"")
    broker.group.propose(batch_of([record], Run("T", 0, 1)), lambda _: None)
    broker.group.append()
    position = ENTRY_HEADER_BYTES + 4
    view = {"offset": str(position)}
    assert bytes(broker.group.log.record_at(position)), "it is in the log"
    assert broker.call(RequestCode.VIEW_MESSAGE_BY_ID, view).code == 1
    broker.group.apply()
    assert broker.call(RequestCode.VIEW_MESSAGE_BY_ID, view).code == 0


def test_our_sdk_learns_what_this_broker_can(broker: Broker) -> None:
    response = broker.call(RequestCode.CAPABILITIES)
    assert response.code == 0
    assert response.ext["cbor"] == "true"
    assert response.ext["records"] == "true"
    assert response.ext["version"]


def test_raft_status_is_json(broker: Broker) -> None:
    response = broker.call(RequestCode.RAFT_STATUS)
    status = json.loads(bytes(response.body))
    assert status["brokerName"] == "broker-a"
    assert status["role"] == "leader"
    assert status["term"] == 1


def test_runtime_info_has_what_mqadmin_reads(broker: Broker) -> None:
    broker.group.put("T", 0, b"a")
    broker.clock.now_s = 10.0  # type: ignore[union-attr]  # it is the manual clock
    response = broker.call(RequestCode.GET_BROKER_RUNTIME_INFO)
    table = KVTable.decode(response.body).table
    for key in ("putTps", "getTransferedTps", "getTransferredTps", "getTotalTps"):
        assert len([float(number) for number in table[key].split()]) == 3
    assert float(table["putTps"].split()[0]) == pytest.approx(0.1)
    assert 0 <= float(table["commitLogDiskRatio"]) <= 1
    assert int(table["earliestMessageTimeStamp"]) == EPOCH_MS
    assert int(table["commitLogMaxOffset"]) == broker.group.state.applied_end_position
    assert table["scheduleMessageOffset_3"] == "0,0"
    assert table["brokerVersionDesc"] == "V4_9_7"


def test_an_empty_broker_has_no_earliest_message(broker: Broker) -> None:
    response = broker.call(RequestCode.GET_BROKER_RUNTIME_INFO)
    assert KVTable.decode(response.body).table["earliestMessageTimeStamp"] == "-1"
