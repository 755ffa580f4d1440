"""Schedules through Admin: which group is asked, what is sent, what never leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trio.testing import MockClock

from dledger.client.admin.admin import Admin
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    MessageIllegalError,
    NoRouteError,
    RequestFailedError,
    RequestTimedOutError,
)
from dledger.client.core.message import Message
from dledger.remoting.processor import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.schedule_bodies import (
    ComingInstants,
    ScheduleBody,
    ScheduleInfo,
    ScheduleList,
)
from tests.unit.client.fake_cluster import World, open_world

CODE = RequestCode


class Schedules:
    """What one group has, and was asked."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.asked: list[tuple[int, dict[str, object], bytes]] = []

    def __call__(self, command: RemotingCommand) -> RemotingCommand:
        body = bytes(command.body)
        if command.code == CODE.LIST_SCHEDULES:
            wanted = command.ext.get("name")
            found = [
                ScheduleInfo(name=name, topic="T", expression="@daily", time_zone="UTC")
                for name in self.names
                if wanted in (None, name)
            ]
            return response_to(command, 0, None, None, ScheduleList(schedules=found).encode())
        self.asked.append((command.code, dict(command.ext), body))
        return response_to(command, 0, None, None, ComingInstants(coming_ms=[5, 6]).encode())


@pytest.fixture
def groups(world: World) -> Callable[..., Schedules]:
    def answer(name: str, *schedules: str) -> Schedules:
        kept = Schedules(*schedules)
        for broker in world.groups[name].brokers:
            for code in (
                CODE.LIST_SCHEDULES,
                CODE.PUT_SCHEDULE,
                CODE.DELETE_SCHEDULE,
                CODE.PAUSE_SCHEDULE,
            ):
                broker.on(code, kept)
        return kept

    return answer


async def test_a_schedule_goes_to_the_first_group_with_its_topic(
    client: ClientInstance, groups: Callable[..., Schedules]
) -> None:
    kept = groups("g")
    message = Message("T", b"\xff", tags="a", keys=["k", "l"], properties={"p": "q"})
    put = await Admin(client).put_schedule(
        "s", "@daily", message, message_group="m", end_ms=9, dry_run=True
    )
    assert (put.broker_name, put.coming_ms) == ("g", (5, 6))
    ((code, ext, body),) = kept.asked
    assert code == CODE.PUT_SCHEDULE
    assert {name: ext[name] for name in ("name", "topic", "dryRun")} == {
        "name": "s",
        "topic": "T",
        "dryRun": "true",
    }
    properties = {"p": "q", "KEYS": "k l", "TAGS": "a", "__SHARDINGKEY": "m"}
    assert ScheduleBody.decode(body) == ScheduleBody(
        expression="@daily", body=b"\xff", properties=properties, end_ms=9
    )
    with pytest.raises(NoRouteError):
        await Admin(client).put_schedule("s", "@daily", Message("not-there", b"b"))


async def test_a_change_goes_to_the_group_that_has_the_schedule(
    world: World, client: ClientInstance, groups: Callable[..., Schedules]
) -> None:
    await world.add_group("h", 1, 10950)
    first, second = groups("g", "other"), groups("h", "s")
    admin = Admin(client)
    assert (await admin.put_schedule("s", "@daily", Message("T", b"b"))).broker_name == "h"
    assert await admin.pause_schedule("s") == "h"
    assert await admin.resume_schedule("s") == "h"
    assert await admin.delete_schedule("s") == "h"
    assert [code for code, _, _ in second.asked] == [
        CODE.PUT_SCHEDULE,
        CODE.PAUSE_SCHEDULE,
        CODE.PAUSE_SCHEDULE,
        CODE.DELETE_SCHEDULE,
    ]
    assert [ext.get("paused") for _, ext, _ in second.asked[1:3]] == ["true", "false"]
    assert first.asked == []
    found = await admin.schedules()
    assert {name: [info.name for info in infos] for name, infos in found.items()} == {
        "g": ["other"],
        "h": ["s"],
    }
    with pytest.raises(RequestFailedError, match="no broker group has a schedule absent"):
        await admin.delete_schedule("absent")


async def test_a_group_of_an_earlier_release_has_no_schedules(
    world: World, client: ClientInstance
) -> None:
    for broker in world.groups["g"].brokers:
        for code in (CODE.LIST_SCHEDULES, CODE.PUT_SCHEDULE):
            broker.on(
                code,
                lambda asked: response_to(
                    asked, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "not supported"
                ),
            )
    assert await Admin(client).schedules() == {"g": []}
    with pytest.raises(RequestFailedError, match="code 3"):
        await Admin(client).put_schedule("s", "@daily", Message("T", b"b"))


async def test_schedules_of_no_registered_group_are_not_known(
    world: World, client: ClientInstance
) -> None:
    """A NameServer that has just started knows no group; the schedule may go on all the same."""
    world.groups.clear()
    admin = Admin(client)
    for asked in (admin.delete_schedule("s"), admin.pause_schedule("s"), admin.schedules()):
        with pytest.raises(NoRouteError, match="no broker group has registered"):
            await asked


@pytest.mark.parametrize(
    "message",
    [
        Message("T", b"b", delay_level=1),
        Message("T", b"b", ttl_ms=1),
        Message("T", b"b", message_id="x"),
        Message("T", b""),
        Message("SCHEDULE_TOPIC_XXXX", b"b"),
        Message("T", b"b", properties={"TAGS": "x"}),
    ],
)
async def test_a_message_that_no_schedule_may_have_never_leaves(
    world: World, client: ClientInstance, message: Message
) -> None:
    with pytest.raises(MessageIllegalError):
        await Admin(client).put_schedule("s", "@daily", message, broker_name="g")
    assert world.count(CODE.PUT_SCHEDULE) == 0


async def test_change_refused_after_an_unanswered_one_is_unknown(
    autojump_clock: MockClock,
) -> None:
    """The first attempt may have deleted the schedule that the second does not find."""
    async with open_world() as world, world.client() as client:
        group, kept = world.groups["g"], Schedules("s")

        def silent(_: RemotingCommand) -> Handled:
            group.elect(1)
            return DEFERRED

        def gone(asked: RemotingCommand) -> Handled:
            return response_to(asked, ResponseCode.QUERY_NOT_FOUND, "no schedule s")

        for broker, answer in ((group.brokers[0], silent), (group.brokers[1], gone)):
            broker.on(CODE.LIST_SCHEDULES, kept)
            broker.on(CODE.DELETE_SCHEDULE, answer)
        with pytest.raises(RequestTimedOutError):
            await Admin(client).delete_schedule("s")
        with pytest.raises(RequestFailedError, match="no schedule s"):
            await Admin(client).delete_schedule("s")
