"""What waits for a topic or a consumer group meets no other of its name."""

from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.topic_names import RETRY_PREFIX, SET_ASIDE_TOPIC
from tests.harness.leader_services import DAY_S, LeaderServices

RETRY = RETRY_PREFIX + "g"
DAYS = 3 * DAY_S - 60

LEVEL = "DELAY\x013\x02"
SOON = "TIMER_DELAY_SEC\x019\x02"
LATE = f"TIMER_DELAY_SEC\x01{DAYS}\x02"  # rolled once, after two days


def delete_topic(world: LeaderServices) -> None:
    assert world.broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0


def make_topic(world: LeaderServices) -> None:
    world.broker.make_topic("T", 1)


def remake_topic(world: LeaderServices) -> None:
    delete_topic(world)
    make_topic(world)


def change_topic(world: LeaderServices) -> None:
    world.broker.make_topic("T", 2)


def delete_group(world: LeaderServices) -> None:
    assert world.broker.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}).code == 0


def begin_to_delete_group(world: LeaderServices) -> None:
    world.broker.processors.topics.pending_groups.put("g", None)


def remake_group(world: LeaderServices) -> None:
    delete_group(world)
    world.broker.make_group("g")


@pytest.fixture
async def world(tmp_path: Path) -> LeaderServices:
    world = LeaderServices(tmp_path)
    world.broker.make_group("g")
    return world


@pytest.mark.parametrize(
    ("step", "properties", "after_s", "due_s"),
    [
        (delete_topic, LEVEL, 1, 20),
        (remake_topic, LEVEL, 1, 20),
        (delete_topic, SOON, 1, 20),
        (remake_topic, SOON, 1, 20),
        (remake_topic, LATE, DAY_S, DAYS + 60),
        (remake_topic, LATE, 2.5 * DAY_S, DAYS + 60),
    ],
)
async def test_message_for_a_deleted_topic_is_set_aside(
    world: LeaderServices,
    nursery: trio.Nursery,
    step: Any,
    properties: str,
    after_s: float,
    due_s: float,
) -> None:
    nursery.start_soon(world.serve)
    assert world.send(properties, b"old").code == 0
    await trio.sleep(after_s)
    step(world)
    if step is remake_topic:
        assert world.send(properties, b"new").code == 0
    await trio.sleep(due_s)
    world.group.settle()
    assert world.bodies() == ([b"new"] if step is remake_topic else [])
    assert world.bodies(SET_ASIDE_TOPIC) == [b"old"]


@pytest.mark.parametrize("properties", [LEVEL, LATE])
async def test_message_for_a_changed_topic_comes(
    world: LeaderServices, nursery: trio.Nursery, properties: str
) -> None:
    nursery.start_soon(world.serve)
    assert world.send(properties, b"a").code == 0
    await trio.sleep(1)
    change_topic(world)
    await trio.sleep(DAYS + 120)
    assert world.bodies() == [b"a"]


@pytest.mark.parametrize(
    ("step", "retried", "aside"),
    [
        (change_topic, 1, 0),
        (delete_group, 0, 1),
        (remake_group, 0, 1),
        (begin_to_delete_group, 0, 0),
    ],
)
async def test_retry_meets_the_group_that_asked_for_it(
    world: LeaderServices, nursery: trio.Nursery, step: Any, retried: int, aside: int
) -> None:
    nursery.start_soon(world.serve)
    assert world.send("", b"a").code == 0
    (record,) = world.read()
    back = {"offset": str(record.phy_offset), "group": "g", "delayLevel": "3"}
    assert world.broker.call(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
    assert world.group.state.max_offset(SCHEDULE_TOPIC, 2) == 1
    await trio.sleep(1)
    step(world)
    await trio.sleep(20)
    assert len(world.read(RETRY)) == retried
    assert len(world.read(SET_ASIDE_TOPIC)) == aside
