"""Pulls with SQL92 expressions: what comes, what is answered, what waits."""

from collections.abc import Awaitable
from typing import Any

import pytest
import trio

from dledger.commitlog.properties import encode_properties
from dledger.filters import property_filter
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from tests.harness import pulls
from tests.harness.beside import beside
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup
from tests.harness.pulls import SUBSCRIPTION, SUSPEND, found


def ext(sql: str = "n > 4", **changes: Any) -> dict[str, str]:
    return pulls.ext(**{"subscription": sql, "expressionType": "SQL92", **changes})


def pull(broker: Broker, sql: str = "n > 4", **changes: Any) -> RemotingCommand:
    return broker.call(RequestCode.PULL_MESSAGE, ext(sql, **changes))


def put(broker: Broker, *numbers: int, topic: str = "T", **more: str) -> None:
    for n in numbers:
        properties = encode_properties({"n": str(n), **more})
        broker.group.put(topic, 0, b"m%d" % n, properties=properties)


def heartbeat(broker: Broker, *subscriptions: SubscriptionData) -> None:
    body = HeartbeatData(
        client_id="c1",
        consumer_data_set=[ConsumerData("g", subscription_data_set=list(subscriptions))],
    )
    broker.make_group("g")
    assert broker.call(RequestCode.HEART_BEAT, {}, body.encode()).code == 0
    broker.group.settle()


def sql_of(topic: str, text: str, version: int = 1) -> SubscriptionData:
    return SubscriptionData(topic, text, sub_version=version, expression_type="SQL92")


@pytest.fixture
def filled(broker: Broker) -> Broker:
    broker.make_topic("T", 4)
    put(broker, *range(10))
    return broker


# ------------------------------------------------------------------------------ finding


def test_what_matches_comes_as_the_bytes_of_the_log(filled: Broker) -> None:
    response = pull(filled, "n BETWEEN 2 AND 3 OR n = 7")
    assert (response.code, response.remark) == (0, "FOUND")
    assert found(response) == [b"m2", b"m3", b"m7"]
    assert response.ext["nextBeginOffset"] == "10"
    assert response.ext["maxOffset"] == "10"


def test_a_pull_that_is_full_goes_on_behind_its_last_message(filled: Broker) -> None:
    response = pull(filled, "n > 2", maxMsgNums=3)
    assert found(response) == [b"m3", b"m4", b"m5"]
    assert response.ext["nextBeginOffset"] == "6"
    assert found(pull(filled, "n > 2", queueOffset=6)) == [b"m6", b"m7", b"m8", b"m9"]


def test_bytes_are_limited_but_one_message_always_comes(filled: Broker) -> None:
    response = pull(filled, "n > 2", maxMsgBytes=1)
    assert found(response) == [b"m3"]
    assert response.ext["nextBeginOffset"] == "4"


def test_nothing_matches_so_the_consumer_goes_on_behind_it(filled: Broker) -> None:
    response = pull(filled, "n > 10", sysFlag=SUBSCRIPTION | SUSPEND)
    assert (response.code, response.remark) == (20, "NO_MATCHED_MESSAGE")
    assert response.ext["nextBeginOffset"] == "10"
    assert not response.body


def test_the_bulk_pull_of_our_sdk_filters_too(filled: Broker) -> None:
    response = filled.call(RequestCode.BULK_PULL, ext("n < 2", maxMsgNums=1000))
    assert found(response) == [b"m0", b"m1"]


# ------------------------------------------------------------------------------ whose expression


def test_heartbeat_carries_the_subscription(filled: Broker) -> None:
    heartbeat(filled, sql_of("T", "n = 3"))
    asked: dict[str, Any] = {
        "sysFlag": 0,
        "subscription": None,
        "expressionType": None,
        "subVersion": 1,
    }
    assert found(pull(filled, **asked)) == [b"m3"]
    heartbeat(filled, sql_of("T", "n = 4", version=2))
    assert found(pull(filled, **asked)) == [b"m4"]
    assert pull(filled, **{**asked, "subVersion": 3}).code == 25


def test_pull_reports_an_unparsed_heartbeat(filled: Broker) -> None:
    heartbeat(filled, sql_of("T", "n = "))
    response = pull(filled, sysFlag=0, subscription=None, expressionType=None)
    assert response.code == 23
    assert "ends too early" in (response.remark or "")
    assert response.ext["outcome"] == "not_stored"


def test_it_can_be_switched_off(group: FakeGroup) -> None:
    broker = Broker(group, enable_property_filter=False)
    broker.make_topic("T", 4)
    put(broker, 5)
    heartbeat(broker, sql_of("T", "n = 5"))
    switched: tuple[dict[str, Any], ...] = (
        {},
        {"sysFlag": 0, "subscription": None, "expressionType": None},
    )
    for changes in switched:
        response = pull(broker, **changes)
        assert response.code == 1
        assert "does not support" in (response.remark or "")
    assert found(pull(broker, "*", expressionType="TAG")) == [b"m5"]


# ------------------------------------------------------------------------------ retries


RETRY = "%RETRY%g"


def with_retries(broker: Broker) -> None:
    heartbeat(broker, sql_of("T", "n > 4"), SubscriptionData(RETRY), SubscriptionData("U"))
    put(broker, 3, 5, topic=RETRY, RETRY_TOPIC="T")
    put(broker, 1, topic=RETRY, RETRY_TOPIC="U")
    put(broker, 2, topic=RETRY)


ASKED: dict[str, Any] = {"topic": RETRY, "expressionType": None}


@pytest.mark.parametrize("flag", [0, SUBSCRIPTION])
def test_retries_are_judged_by_the_topic_they_come_from(filled: Broker, flag: int) -> None:
    with_retries(filled)
    assert found(pull(filled, "*", sysFlag=flag, **ASKED)) == [b"m5", b"m1", b"m2"]


def test_retries_are_not_judged_where_that_is_switched_off(group: FakeGroup) -> None:
    broker = Broker(group, filter_support_retry=False)
    broker.make_topic("T", 4)
    with_retries(broker)
    assert found(pull(broker, "*", sysFlag=0, **ASKED)) == [b"m3", b"m5", b"m1", b"m2"]


# ------------------------------------------------------------------------------ waiting


def hold(broker: Broker, sql: str = "n > 4", **changes: Any) -> FakeConnection:
    connection = FakeConnection()
    asked = request(RequestCode.PULL_MESSAGE, ext(sql, sysFlag=SUBSCRIPTION | SUSPEND, **changes))
    assert broker.handle(asked, connection) is DEFERRED
    return connection


def test_a_held_pull_is_answered_by_what_matches_only(filled: Broker) -> None:
    connection = hold(filled, "n > 100", queueOffset=10)
    put(filled, 1, 2)
    assert connection.replies == []
    put(filled, 101)
    assert found(connection.reply_) == [b"m101"]
    assert connection.reply_.ext["nextBeginOffset"] == "13"


def test_many_new_messages_are_checked_in_turns(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(property_filter, "MAX_SCAN_COST", 44)
    connection = hold(filled, "n > 100", queueOffset=10)
    properties = encode_properties({"n": "1"})
    filled.group.put("T", 0, *([b"x"] * 6), properties=properties)
    assert (connection.reply_.code, connection.reply_.ext["nextBeginOffset"]) == (20, "14")


async def test_held_pull_reports_its_progress(virtual: Broker) -> None:
    virtual.make_topic("T", 4)
    put(virtual, *range(10))
    async with beside(virtual.processors.run):
        connection = hold(virtual, "n > 100", queueOffset=10)
        await trio.sleep(1)
        put(virtual, 1, 2, 3)
        await trio.sleep(20)
    assert (connection.reply_.code, connection.reply_.ext["nextBeginOffset"]) == (20, "13")


# ------------------------------------------------------------------------------ old and bad data


async def answered(handled: Awaitable[RemotingCommand]) -> RemotingCommand:
    return await handled


async def test_old_messages_are_judged_in_a_worker_thread(group: FakeGroup) -> None:
    broker = Broker(
        group, recent_bytes=0, max_transfer_count_in_disk=2, max_transfer_bytes_in_disk=1 << 20
    )
    broker.make_topic("T", 4)
    put(broker, *range(10))
    command = request(RequestCode.PULL_MESSAGE, ext("n > 4"))
    response = await answered(broker.handle(command))
    assert found(response) == [b"m5", b"m6"]
    assert response.ext["nextBeginOffset"] == "7"
    assert broker.executor.runs.keys() == {"cold_read"}
    command = request(RequestCode.PULL_MESSAGE, ext("n > 40"))
    response = await answered(broker.handle(command))
    assert (response.code, response.ext["nextBeginOffset"]) == (20, "10")


def damage(broker: Broker, offset: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    unit = broker.group.queues.queue("T", 0).read(offset, 1)
    place = int(unit["phy_offset"][0]), int(unit["size"][0])
    read = broker.group.log.read

    def bad_read(position: int, size: int) -> memoryview:
        data = bytearray(read(position, size))
        if (position, size) == place:
            data[84:88] = b"\xff\xff\xff\xff"
        return memoryview(data)

    monkeypatch.setattr(broker.group.log, "read", bad_read)
    return place


@pytest.mark.parametrize("recent", [0, 1 << 30])
async def test_damaged_message_refuses_the_pull_for_now(
    group: FakeGroup, recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(group, recent_bytes=recent)
    broker.make_topic("T", 4)
    put(broker, *range(10))
    place = damage(broker, 3, monkeypatch)
    handled = broker.handle(request(RequestCode.PULL_MESSAGE, ext("n > 40")))
    response = handled if isinstance(handled, RemotingCommand) else await answered(handled)
    assert (response.code, response.ext["retriable"]) == (14, "true")
    assert broker.group.damage_reports == [place]
