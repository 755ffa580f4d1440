"""Pulls: order of checks, what is found, what is answered, what waits."""

from collections.abc import Awaitable
from typing import Any

import pytest

from dledger.commitlog.java_hash import tags_code
from dledger.processors.client_table import SETTLE_S
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import MessageModel, SubscriptionData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import SerializeType, request
from dledger.state.state_record import SubscriptionGroupsChange, state_batch
from dledger.state.topics import SubscriptionGroupConfig
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup
from tests.harness.pulls import COMMIT, SUBSCRIPTION, command, ext, found, heartbeat, hold, pull

SMALL_COLD_PULLS = {"max_transfer_count_in_disk": 3, "max_transfer_bytes_in_disk": 100_000}


# ------------------------------------------------------------------------------ finding


def test_messages_come_as_the_bytes_of_the_log(filled: Broker) -> None:
    response = pull(filled, queueOffset=3, maxMsgNums=4)
    assert response.code == 0
    assert response.remark == "FOUND"
    assert found(response) == [b"m3", b"m4", b"m5", b"m6"]
    assert response.ext == {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": "7",
        "minOffset": "0",
        "maxOffset": "10",
    }
    position = int(filled.group.queues.queue("T", 0).read(3, 1)["phy_offset"][0])
    size = memoryview(response.body).nbytes
    assert bytes(response.body) == bytes(filled.group.log.read(position, size))


def test_messages_of_several_entries_are_joined(broker: Broker) -> None:
    broker.make_topic("T", 4)
    for i in range(6):
        broker.group.put("T", 0, b"a%d" % i, b"b%d" % i)
        broker.group.put("T", 1, b"between")
    assert found(pull(broker, queueOffset=1, maxMsgNums=6)) == [
        b"b0", b"a1", b"b1", b"a2", b"b2", b"a3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("offset", "queue", "code", "remark", "next_offset"),
    [
        (10, 0, 19, "OFFSET_OVERFLOW_ONE", 10),
        (11, 0, 21, "OFFSET_OVERFLOW_BADLY", 10),
        (-1, 0, 21, "OFFSET_TOO_SMALL", 0),
        (0, 1, 19, "NO_MESSAGE_IN_QUEUE", 0),
        (5, 1, 21, "NO_MESSAGE_IN_QUEUE", 0),
    ],
)
def test_offsets_outside_the_queue_are_answered(
    filled: Broker, offset: int, queue: int, code: int, remark: str, next_offset: int
) -> None:
    response = pull(filled, queueOffset=offset, queueId=queue)
    assert (response.code, response.remark) == (code, remark)
    assert response.ext["nextBeginOffset"] == str(next_offset)
    assert not response.body


def test_offset_below_the_first_kept_is_answered(filled: Broker) -> None:
    filled.group.state.queues["T", 0].min_offset = 4
    response = pull(filled, queueOffset=2)
    assert (response.code, response.ext["nextBeginOffset"]) == (21, "4")
    assert response.ext["minOffset"] == "4"


def test_sizes_are_limited_but_one_message_always_comes(filled: Broker) -> None:
    size = int(filled.group.queues.queue("T", 0).read(0, 1)["size"][0])
    assert len(found(pull(filled, maxMsgBytes=3 * size))) == 3
    assert len(found(pull(filled, maxMsgBytes=4 * size - 1))) == 3
    response = pull(filled, maxMsgBytes=1)
    assert found(response) == [b"m0"]
    assert response.ext["nextBeginOffset"] == "1"


def test_the_brokers_own_limits_hold(group: FakeGroup) -> None:
    broker = Broker(group, max_transfer_count_in_memory=2, max_transfer_bytes_in_memory=100_000)
    broker.make_topic("T")
    group.put("T", 0, *([b"x"] * 5))
    assert len(found(pull(broker))) == 2
    assert len(found(pull(broker, RequestCode.LITE_PULL_MESSAGE))) == 2
    assert len(found(pull(broker, RequestCode.BULK_PULL, maxMsgNums=1000))) == 5
    assert len(found(pull(broker, RequestCode.BULK_PULL, maxMsgNums=4))) == 4


# ------------------------------------------------------------------------------ filters


def tagged(broker: Broker, *tags: str) -> None:
    broker.make_topic("T")
    for number, tag in enumerate(tags):
        properties = f"TAGS\x01{tag}\x02".encode() if tag else b""
        broker.group.put("T", 0, b"%d%s" % (number, tag.encode()), properties=properties)


def test_tags_select_messages(broker: Broker) -> None:
    tagged(broker, "A", "B", "", "A", "C")
    assert found(pull(broker, subscription="A")) == [b"0A", b"3A"]
    assert found(pull(broker, subscription=" A || C ")) == [b"0A", b"3A", b"4C"]
    assert len(found(pull(broker, subscription=""))) == 5


def test_the_next_offset_is_behind_what_was_looked_at(broker: Broker) -> None:
    tagged(broker, "A", "B", "A", "B", "B")
    assert pull(broker, subscription="A").ext["nextBeginOffset"] == "5"
    limited = pull(broker, subscription="A", maxMsgNums=1)
    assert found(limited) == [b"0A"]
    assert limited.ext["nextBeginOffset"] == "1"
    size = int(broker.group.queues.queue("T", 0).read(0, 1)["size"][0])
    by_size = pull(broker, subscription="A", maxMsgBytes=size)
    assert found(by_size) == [b"0A"]
    assert by_size.ext["nextBeginOffset"] == "1"


def test_a_filter_that_matches_nothing_moves_on(broker: Broker) -> None:
    tagged(broker, *"BBBB")
    response = pull(broker, subscription="A")
    assert (response.code, response.remark) == (20, "NO_MATCHED_MESSAGE")
    assert response.ext["nextBeginOffset"] == "4"


def test_a_scan_that_matches_nothing_is_bounded(broker: Broker) -> None:
    broker.make_topic("T")
    broker.group.put("T", 0, *([b"x"] * 900))
    response = pull(broker, subscription="A", maxMsgNums=1)
    assert response.ext["nextBeginOffset"] == "800"
    response = pull(broker, subscription="A", maxMsgNums=32, queueOffset=800)
    assert response.ext["nextBeginOffset"] == "900"


def test_the_heartbeat_subscription_counts_without_bit_4(broker: Broker) -> None:
    tagged(broker, "A", "B")
    data = SubscriptionData("T", "A", code_set=[tags_code("A")], sub_version=7)
    heartbeat(broker, data)
    assert found(pull(broker, sysFlag=0, subVersion=7, subscription=None)) == [b"0A"]


def test_codes_are_read_as_java_hashes_whatever_their_width(broker: Broker) -> None:
    tagged(broker, "A", "B")
    data = SubscriptionData("T", "A", code_set=[tags_code("A") + (1 << 70)])
    heartbeat(broker, data)
    assert found(pull(broker, sysFlag=0, subscription=None)) == [b"0A"]


def test_subscription_without_codes_is_parsed(broker: Broker) -> None:
    tagged(broker, "A", "B")
    heartbeat(broker, SubscriptionData("T", "B || X"))
    assert found(pull(broker, sysFlag=0, subscription=None)) == [b"1B"]


@pytest.mark.parametrize(
    ("expression", "others", "age_s", "code"),
    [
        ("TAG", None, SETTLE_S, 0),
        ("SQL92", None, 0, 24),
        (None, None, 0, 24),
        ("TAG", "Other", SETTLE_S - 1, 0),
        ("TAG", "Other", SETTLE_S, 24),
    ],
)
def test_tags_without_a_subscription_are_left_to_the_client(
    broker: Broker,
    clock: ManualClock,
    expression: str | None,
    others: str | None,
    age_s: float,
    code: int,
) -> None:
    """Another member of the group subscribes to *others*."""
    tagged(broker, "A", "B")
    if others is not None:
        heartbeat(broker, SubscriptionData(others))
    clock.now_s += age_s
    response = pull(broker, sysFlag=0, subscription=None, expressionType=expression)
    assert response.code == code
    assert found(response) == ([b"0A", b"1B"] if code == 0 else [])


# ------------------------------------------------------------------------------ checks


CHECKS: list[tuple[dict[str, Any], int, str]] = [
    ({"consumerGroup": "closed"}, 16, "not allowed to consume"),
    ({"consumerGroup": "a/b"}, 1, "illegal characters"),
    ({"topic": "Nowhere"}, 17, "not exist"),
    ({"topic": "WriteOnly"}, 16, "forbidden"),
    ({"queueId": 4}, 29, "illegal"),
    ({"queueId": -1}, 29, "illegal"),
    ({"subscription": "||"}, 23, "parse"),
    ({"expressionType": "JAVA", "subscription": "a > 1"}, 1, "filter message by JAVA"),
    ({"expressionType": "SQL92", "subscription": "a >"}, 23, "ends too early"),
    ({"sysFlag": 0, "consumerGroup": "unknown"}, 24, "group info not exist"),
    ({"sysFlag": 0, "topic": "Other"}, 24, "subscription not exist"),
    ({"sysFlag": 0, "subVersion": 8}, 25, "not latest"),
]


@pytest.fixture
def checked(filled: Broker) -> Broker:
    filled.make_topic("WriteOnly", perm=2)
    filled.make_topic("Other")
    closed = SubscriptionGroupConfig("closed", consume_enable=False)
    filled.group.propose(state_batch(SubscriptionGroupsChange(put=(closed,))), lambda _: None)
    heartbeat(filled, SubscriptionData("T", "*", sub_version=7))
    return filled


@pytest.mark.parametrize(("changes", "code", "remark"), CHECKS)
def test_refused_pull_names_its_reason(
    checked: Broker, changes: dict[str, Any], code: int, remark: str
) -> None:
    response = pull(checked, **changes)
    assert response.code == code
    assert remark in (response.remark or "")


ORDER: list[tuple[dict[str, Any], int]] = [
    ({"consumerGroup": "closed", "topic": "Nowhere", "queueId": 9, "subscription": "||"}, 16),
    ({"topic": "Nowhere", "queueId": 9, "subscription": "||"}, 17),
    ({"topic": "WriteOnly", "queueId": 9, "subscription": "||"}, 16),
    ({"queueId": 9, "subscription": "||"}, 29),
    ({"subscription": "||"}, 23),
]


@pytest.mark.parametrize(("changes", "code"), ORDER)
def test_checks_come_in_rocketmq_order(checked: Broker, changes: dict[str, Any], code: int) -> None:
    assert pull(checked, **changes).code == code


def test_broadcasting_may_be_forbidden(filled: Broker) -> None:
    config = SubscriptionGroupConfig("g", consume_broadcast_enable=False)
    filled.group.store(SubscriptionGroupsChange(put=(config,)))
    heartbeat(filled, SubscriptionData("T"), message_model=MessageModel.BROADCASTING)
    assert pull(filled, sysFlag=0).code == 16


def test_a_broker_without_read_permission_refuses(group: FakeGroup) -> None:
    assert pull(Broker(group, broker_permission=2)).code == 16


def test_an_unknown_group_is_made_by_its_first_pull_once(filled: Broker) -> None:
    before = filled.group.log.last_index
    pull(filled, consumerGroup="fresh")
    pull(filled, consumerGroup="fresh")
    assert filled.group.waiting == 1
    filled.group.settle()
    assert filled.group.log.last_index == before + 1
    assert filled.group.state.subscription_group("fresh") is not None


def test_without_auto_creation_an_unknown_group_is_refused(group: FakeGroup) -> None:
    broker = Broker(group, auto_create_subscription_group=False)
    broker.make_topic("T")
    assert pull(broker).code == 26


def test_an_offset_comes_with_the_pull_on_the_leader(filled: Broker) -> None:
    pull(filled, sysFlag=SUBSCRIPTION | COMMIT, commitOffset=6, queueOffset=8)
    assert filled.processors.offsets.offset("g", "T", 0) == 6
    pull(filled, sysFlag=SUBSCRIPTION, commitOffset=9)
    assert filled.processors.offsets.offset("g", "T", 0) == 6


# ------------------------------------------------------------------------------ followers


def test_a_follower_serves_what_it_applied(filled: Broker) -> None:
    filled.group.step_down("elsewhere:1")
    assert len(found(pull(filled))) == 10


@pytest.mark.parametrize(("offset", "queue_id"), [(10, 0), (15, 0), (0, 1)])
def test_only_the_leader_answers_no_new_message(filled: Broker, offset: int, queue_id: int) -> None:
    filled.group.step_down("elsewhere:1")
    asked = command(queueOffset=offset, queueId=queue_id)
    asked.serialize = SerializeType.CBOR
    response = filled.handle(asked)
    assert (response.code, response.ext["leaderAddr"]) == (14, "elsewhere:1")


@pytest.mark.parametrize(
    "there", [{"topic": "new"}, {"topic": "T", "queueId": 99}], ids=["topic", "queue"]
)
def test_follower_behind_a_queue_sends_to_the_leader(filled: Broker, there: dict[str, Any]) -> None:
    filled.group.step_down("elsewhere:1")
    asked = command(**there)
    asked.serialize = SerializeType.CBOR
    response = filled.handle(asked)
    assert (response.code, response.ext["leaderAddr"]) == (14, "elsewhere:1")
    assert filled.handle(command(**there)) is DEFERRED
    for expired in filled.processors.pull._held.take_expired(float("inf")):
        filled.processors.pull._answer_held(expired)
    response = filled.connection.reply_
    assert (response.code, response.ext["suggestWhichBrokerId"]) == (20, "0")
    assert response.ext["nextBeginOffset"] == "0"


@pytest.mark.parametrize(("offset", "queue_id"), [(10, 0), (15, 0), (0, 1), (5, 1)])
def test_follower_sends_foreign_clients_to_the_leader(
    filled: Broker, clock: ManualClock, offset: int, queue_id: int
) -> None:
    filled.group.step_down("elsewhere:1")
    assert filled.handle(command(queueOffset=offset, queueId=queue_id)) is DEFERRED
    held = filled.processors.pull._held
    clock.now_s += 0.999
    assert list(held.take_expired(clock.monotonic())) == []
    clock.now_s += 0.002
    for expired in held.take_expired(clock.monotonic()):
        filled.processors.pull._answer_held(expired)
    response = filled.connection.reply_
    assert (response.code, response.ext["suggestWhichBrokerId"]) == (20, "0")
    assert response.ext["nextBeginOffset"] == str(offset)


def test_a_follower_leads_on_behind_what_did_not_match(filled: Broker, clock: ManualClock) -> None:
    filled.group.step_down("elsewhere:1")
    hold(filled, queueOffset=10, subscription="A", suspendTimeoutMillis=5000)
    filled.group.lead()
    filled.group.put("T", 0, b"m10", properties=b"TAGS\x01B\x02")
    filled.group.step_down("elsewhere:1")
    clock.now_s += 5.001
    for expired in filled.processors.pull._held.take_expired(clock.monotonic()):
        filled.processors.pull._answer_held(expired)
    response = filled.connection.reply_
    assert (response.code, response.ext["nextBeginOffset"]) == (20, "11")


async def suggested(broker: Broker, offset: int) -> str:
    handled = broker.handle(command(queueOffset=offset, maxMsgNums=1))
    answer = await handled if isinstance(handled, Awaitable) else handled
    assert len(found(answer)) == 1
    return str(answer.ext["suggestWhichBrokerId"])


@pytest.mark.parametrize(
    ("member", "follower"), [("n4", "5"), ("near", "3"), ("a1-2", "13"), ("unknown", "0")]
)
async def test_slow_reader_gets_a_follower_suggested(
    group: FakeGroup, member: str, follower: str
) -> None:
    broker = Broker(group, recent_bytes=300, follower_id=7, follower_ids={"near": 3})
    broker.make_topic("T", 4)
    group.put("T", 0, *(b"m%d" % i for i in range(10)))
    alive = {
        "connected": True,
        "voter": True,
        "match_index": group.log.last_index,
        "acked_ms_ago": 5,
    }
    group.status = lambda: {"peers": {member: alive}}  # type: ignore[method-assign]  # what the test is about
    assert [await suggested(broker, offset) for offset in (0, 9)] == [follower, "0"]
    group.step_down("elsewhere:1")
    assert [await suggested(broker, offset) for offset in (0, 9)] == ["7", "0"]


@pytest.mark.parametrize(("offset", "queue_id", "code"), [(10, 0, 19), (15, 0, 21), (0, 1, 19)])
def test_leader_confirms_itself_before_no_new_message(
    filled: Broker, offset: int, queue_id: int, code: int
) -> None:
    filled.group.barriers_pass = False
    asked = command(queueOffset=offset, queueId=queue_id)
    assert filled.handle(asked) is DEFERRED
    assert filled.connection.replies == []
    filled.group.pass_barriers()
    assert filled.connection.reply_.code == code


def test_what_was_stored_meanwhile_is_found_behind_the_barrier(filled: Broker) -> None:
    filled.group.barriers_pass = False
    assert filled.handle(command(queueOffset=10)) is DEFERRED
    filled.group.put("T", 0, b"m10")
    filled.group.pass_barriers()
    assert found(filled.connection.reply_) == [b"m10"]


def test_deposed_leader_never_answers_no_new_message(filled: Broker) -> None:
    filled.group.barriers_pass = False
    assert filled.handle(command(queueOffset=10)) is DEFERRED
    filled.group.step_down("elsewhere:1")
    assert filled.connection.reply_.code == 14
    assert filled.connection.reply_.ext["leaderAddr"] == "elsewhere:1"


def test_found_messages_are_answered_at_once(filled: Broker) -> None:
    filled.group.barriers_pass = False
    assert len(found(pull(filled))) == 10
    assert filled.group.barriers == []


def test_a_follower_holds_a_pull_that_is_ahead_of_it(filled: Broker) -> None:
    filled.group.step_down("elsewhere:1")
    hold(filled, queueOffset=11)
    filled.group.lead()
    filled.group.put("T", 0, b"m10")
    assert filled.connection.replies == []
    filled.group.put("T", 0, b"m11")
    assert found(filled.connection.reply_) == [b"m11"]


def test_followers_may_be_closed_for_reading(group: FakeGroup) -> None:
    broker = Broker(group, slave_read_enable=False)
    broker.make_topic("T")
    group.step_down("elsewhere:1")
    assert pull(broker).code == 14


# ------------------------------------------------------------------------------ old data


async def test_old_data_is_read_in_a_worker_and_in_smaller_pieces(tmp_path: Any) -> None:
    clock = ManualClock()
    group = FakeGroup(tmp_path, clock)
    broker = Broker(group, recent_bytes=300, **SMALL_COLD_PULLS)
    broker.make_topic("T")
    group.put("T", 0, *(b"m%d" % i for i in range(10)))
    handled = broker.handle(request(RequestCode.PULL_MESSAGE, ext()))
    assert isinstance(handled, Awaitable)
    response = await handled
    assert found(response) == [b"m0", b"m1", b"m2"]
    assert response.ext["nextBeginOffset"] == "3"
    assert broker.executor.runs == {"cold_read": 1}
    assert found(pull(broker, queueOffset=8)) == [b"m8", b"m9"]
    group.close()


async def test_damaged_old_messages_are_not_sent(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(group, recent_bytes=300, **SMALL_COLD_PULLS)
    broker.make_topic("T")
    for number in range(10):
        group.put("T", 0, b"m%d" % number * 20)
    read = group.log.read

    def bad_read(position: int, size: int) -> memoryview:
        return memoryview(bytes(read(position, size)).replace(b"m1m1", b"m1m0"))

    monkeypatch.setattr(group.log, "read", bad_read)
    handled = broker.handle(command())
    assert isinstance(handled, Awaitable)
    response = await handled
    assert (response.code, response.ext["retriable"], response.body) == (14, "true", b"")
    unit = group.queues.queue("T", 0).read(1, 1)[0]
    position, size = int(unit["phy_offset"]), int(unit["size"])
    assert any(at <= position < at + length for at, length in group.damage_reports)
    assert size
