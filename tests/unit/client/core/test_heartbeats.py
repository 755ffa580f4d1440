"""What brokers know of a client's groups, and what is announced again."""

from __future__ import annotations

import pytest
import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.heartbeats import AGAIN_S
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BusyError
from dledger.remoting.protocol.bodies import ConsumerData, HeartbeatData
from dledger.remoting.protocol.codes import RequestCode
from tests.unit.client.fake_cluster import World


async def test_a_refused_heartbeat_is_sent_again_soon(world: World, client: ClientInstance) -> None:
    group = world.groups["g"]
    refusals = [2]

    def heard(_connection: Connection, _data: HeartbeatData) -> None:
        if refusals[0]:
            refusals[0] -= 1
            raise BusyError("too many heartbeats")

    group.brokers[1].heard = heard
    await client.route("T")
    client.heartbeats.add_sharing_consumer(ConsumerData(group_name="c"), lambda: None)
    await trio.sleep(0.5)
    assert [list(broker.consumers.get("c", {})) == [] for broker in group.brokers] == [
        False,
        True,
        False,
    ]
    await trio.sleep(2 * (AGAIN_S + 0.5))
    assert refusals == [0]
    assert list(group.brokers[1].consumers["c"].values()) == [client.client_id]
    assert await client.heartbeats.send()


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_group_that_comes_back_is_announced_again(
    world: World, client: ClientInstance, is_asked: bool
) -> None:
    leader = world.groups["g"].brokers[0]
    await client.route("T")
    heartbeats = client.heartbeats
    for add, remove in (
        (heartbeats.add_producer, heartbeats.remove_producer),
        (heartbeats.add_consumer, heartbeats.remove_consumer),
    ):
        add("group")
        await heartbeats.introduce("group", ["g"])
        await remove("group")
        add("group")
        if is_asked and add == heartbeats.add_producer:
            await heartbeats.introduce("group", ["g"])
        else:
            await trio.sleep(1.0)
        codes = [seen.code for seen in leader.seen]
        backwards = codes[::-1]
        assert RequestCode.HEART_BEAT in backwards[: backwards.index(RequestCode.UNREGISTER_CLIENT)]
        await remove("group")
