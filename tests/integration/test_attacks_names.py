"""Processes that are no members are after a group's name at its NameServer, while it is in use.

Real processes and sockets. Every acknowledged send stands in a record of the test's own, and is
looked for in the group in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from dledger.cli.commands import open_admin
from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.ports import free_ports
from dledger.client.connect import connect
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.nemesis.strangers import FOREIGN_TOPIC, NameThief, Wanted
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.bodies import TopicRouteData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.tcp import TcpNetwork
from tests.harness.cluster_questions import ask, create_topic
from tests.harness.eventually import all_statuses, eventually
from tests.harness.load import missing_in
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import bodies_by_place

pytestmark = pytest.mark.slow

SECOND_GROUP = "e1" * 16
PAUSE_S = 0.01
SENDS_PER_CLIENT = 20
"""Then another client begins: it knows of the group what the NameServer reports."""
ATTACKS = 4
"""So often each stranger tries everything before a leader is killed, and after it again."""


@dataclass
class Sender:
    """Sends without end, and knows what was acknowledged."""

    namesrvs: list[str]
    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    failed: int = 0

    async def run(self) -> None:
        number = 0
        while True:
            async with connect(self.namesrvs) as client, Producer(client, "p") as producer:
                for _ in range(SENDS_PER_CLIENT):
                    body = b"message %d" % number
                    number += 1
                    try:
                        result = await producer.send(Message("T", body))
                    except ClientError:
                        self.failed += 1
                    else:
                        place = (result.message_queue.queue_id, result.queue_offset)
                        self.acknowledged[place] = body
                    await trio.sleep(PAUSE_S)


async def addresses_in_the_route(cluster: LocalCluster) -> dict[int, str]:
    answer = await ask(cluster.namesrv_address, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "T"})
    assert answer.code == 0, answer.remark
    (broker,) = TopicRouteData.decode(answer.body).broker_datas
    return dict(broker.broker_addrs)


async def test_name_server_gives_strangers_no_place_and_no_message(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        namesrvs = [cluster.namesrv_address]
        await cluster.wait_healthy()
        await create_topic(namesrvs, "T", queues=4)
        sender = Sender(namesrvs)
        thieves = [
            NameThief(
                TcpNetwork(),
                TrioClock(),
                Wanted("DefaultCluster", "broker-a", f"127.0.0.1:{port}", ("T",), identity),
                namesrvs,
            )
            for port, identity in zip(free_ports(2), ("", SECOND_GROUP), strict=True)
        ]

        async def tried(rounds: int, acknowledged: int) -> bool:
            enough = all(thief.seen["register_refused"] >= rounds for thief in thieves)
            return enough and len(sender.acknowledged) >= acknowledged

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run)
            for thief in thieves:
                await nursery.start(thief.run)
            await eventually("strangers try", lambda: tried(ATTACKS, 100))
            killed = await cluster.leader()
            assert killed is not None
            await cluster.kill(killed)
            before = len(sender.acknowledged)
            await eventually("strangers try again", lambda: tried(2 * ATTACKS, before + 100))
            await cluster.start(killed)
            await cluster.wait_healthy()
            async with open_admin(cluster.namesrv_address) as admin:
                _, refused = await admin.name_server_view(cluster.namesrv_address)
            nursery.cancel_scope.cancel()

        for thief in thieves:
            assert thief.seen["unregister_refused"] >= ATTACKS
            assert thief.seen["topic_refused"] >= ATTACKS
            for taken in ("registered", "unregistered", "topic_entered", "taken"):
                assert not thief.seen[taken], thief.seen
        stored = await bodies_by_place(cluster.namesrv_address, "T")
        assert missing_in(stored, sender.acknowledged) == []
        statuses = await all_statuses(cluster)
        (identity,) = {str(status["group_identity"]) for status in statuses.values()}
        assert len(refused) == 2
        assert all(f"it belongs to the group {identity}" in sentence for sentence in refused)
        assert any(SECOND_GROUP in sentence for sentence in refused)
        members = {node.address for node in cluster.brokers.values()}

        async def is_whole() -> bool:
            leader = await cluster.leader()
            route = await addresses_in_the_route(cluster)
            return (
                leader is not None
                and route[0] == cluster.brokers[leader].address
                and set(route.values()) == members
            )

        await eventually("the route names the members and their leader", is_whole)
        answer = await ask(
            cluster.namesrv_address, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": FOREIGN_TOPIC}
        )
        assert answer.code == 17
