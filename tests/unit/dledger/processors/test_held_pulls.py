"""Pulls that wait: what wakes them, and when they end."""

import pytest
import trio

from dledger.state.state_record import SubscriptionGroupsChange, TopicsChange, state_batch
from dledger.state.topics import SubscriptionGroupConfig
from dledger.testing.doubles import VirtualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup
from tests.harness.pulls import SUBSCRIPTION, SUSPEND, found, hold, pull


def test_a_held_pull_is_answered_by_the_next_message(filled: Broker) -> None:
    hold(filled, queueOffset=10)
    assert filled.processors.pull.held_count == 1
    filled.group.put("T", 1, b"another queue")
    assert filled.connection.replies == []
    filled.group.put("T", 0, b"m10")
    response = filled.connection.reply_
    assert (response.code, found(response)) == (0, [b"m10"])
    assert response.ext["nextBeginOffset"] == "11"
    assert filled.processors.pull.held_count == 0


def test_a_held_pull_of_a_paused_group_is_refused(filled: Broker) -> None:
    connection = FakeConnection()
    hold(filled, connection, queueOffset=10, consumerGroup="paused")
    paused = SubscriptionGroupConfig("paused", consume_enable=False)
    filled.group.propose(state_batch(SubscriptionGroupsChange(put=(paused,))), lambda _: None)
    filled.group.put("T", 0, b"new")
    response = connection.reply_
    assert response.code == 16
    assert "paused is not allowed to consume" in (response.remark or "")
    assert filled.processors.pull.held_count == 0


def test_a_pull_of_an_empty_queue_is_held_from_its_begin(filled: Broker) -> None:
    hold(filled, queueId=2)
    filled.group.put("T", 2, b"first")
    assert found(filled.connection.reply_) == [b"first"]


def test_messages_of_other_tags_do_not_wake(filled: Broker) -> None:
    hold(filled, queueOffset=10, subscription="A")
    filled.group.put("T", 0, b"b", properties=b"TAGS\x01B\x02")
    assert filled.connection.replies == []
    filled.group.put("T", 0, b"a", properties=b"TAGS\x01A\x02")
    response = filled.connection.reply_
    assert found(response) == [b"a"]
    assert response.ext["nextBeginOffset"] == "12"


def test_a_closed_connection_takes_its_pulls_along(filled: Broker) -> None:
    gone, other = FakeConnection(), FakeConnection()
    hold(filled, gone, queueOffset=10)
    hold(filled, gone, queueId=1)
    hold(filled, other, queueOffset=10)
    gone.close()
    assert filled.processors.pull.held_count == 1
    filled.group.put("T", 0, b"m10")
    assert gone.replies == []
    assert len(other.replies) == 1


def test_too_many_held_pulls_are_answered_at_once(filled: Broker) -> None:
    for _ in range(10):
        hold(filled, queueOffset=10)
    response = pull(filled, sysFlag=SUBSCRIPTION | SUSPEND, queueOffset=10)
    assert response.code == 19


def test_a_deleted_topic_answers_its_held_pulls(filled: Broker) -> None:
    hold(filled, queueOffset=10)
    filled.group.store(TopicsChange(delete=("T",)))
    trio.run(filled.processors.pull.sweep)
    assert filled.connection.reply_.code == 21


@pytest.fixture
async def served(request: pytest.FixtureRequest, group: FakeGroup, nursery: trio.Nursery) -> Broker:
    group.clock = VirtualClock()
    broker = Broker(group, **getattr(request, "param", {}))
    broker.make_topic("T")
    nursery.start_soon(broker.processors.pull.run)
    return broker


@pytest.mark.parametrize(
    ("served", "after_s"), [({}, 15.0), ({"long_polling_enable": False}, 1.0)], indirect=["served"]
)
async def test_held_pull_ends_at_the_clients_time(served: Broker, after_s: float) -> None:
    await trio.sleep(2.5)
    began = trio.current_time()
    hold(served, FakeConnection(), queueId=1, suspendTimeoutMillis=40_000)
    hold(served)
    while not served.connection.replies:
        await trio.sleep(0.01)
    assert trio.current_time() - began == pytest.approx(after_s, abs=0.02)
    response = served.connection.reply_
    assert (response.code, response.ext["nextBeginOffset"]) == (19, "0")


async def test_timed_out_pull_moves_behind_unmatched_messages(served: Broker) -> None:
    hold(served, subscription="A")
    served.group.put("T", 0, b"x", b"y")
    await trio.sleep(15.1)
    response = served.connection.reply_
    assert (response.code, response.ext["nextBeginOffset"]) == (20, "2")


async def test_the_sweep_answers_a_pull_that_nothing_woke(served: Broker) -> None:
    served.group.on_applied.remove(served.processors.pull.on_applied)
    hold(served)
    served.group.put("T", 0, b"x")
    await trio.sleep(5.1)
    assert found(served.connection.reply_) == [b"x"]


async def test_held_pull_passes_the_barrier_at_its_end(served: Broker) -> None:
    served.group.barriers_pass = False
    hold(served)
    await trio.sleep(14)
    assert served.group.barriers == []
    await trio.sleep(2)
    assert (len(served.group.barriers), served.connection.replies) == (1, [])
    served.group.pass_barriers()
    assert served.connection.reply_.code == 19
