"""What brokers know of a client's groups, and what is announced again."""

from __future__ import annotations

import trio

from client.core.client_instance import ClientInstance
from client.core.heartbeats import AGAIN_S
from remoting.connection import Connection
from remoting.errors import BusyError
from remoting.protocol.bodies import ConsumerData, HeartbeatData
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
