"""A deployment on IPv6 alone: real processes on `::1`, nothing of it on an IPv4 address."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import trio
from hypercorn.config import Config

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.ports import free_ports, is_free
from dledger.client.admin.admin import Admin
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.console.command import serve
from dledger.console.console import ConsoleSettings
from dledger.proxy import messaging_pb2 as pb
from tests.harness.cluster_questions import create_topic
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import bodies_at
from tests.integration.test_access import listening
from tests.integration.test_proxy import TOPIC, called, message
from tests.integration.test_watch import read

pytestmark = pytest.mark.slow

HOST = "::1"


async def shown_by(*command: str) -> str:
    """Return what a command of the command line prints."""
    arguments = [sys.executable, "-m", "dledger", *command]
    done = await trio.run_process(arguments, capture_stdout=True, capture_stderr=True)
    return done.stdout.decode()


async def stored_and_found(cluster: LocalCluster, body: str) -> None:
    """Send a message and a batch; each is found by its id, from and at an IPv6 address."""
    async with connect(cluster.namesrv_address) as client, Producer(client, "p") as producer:
        bodies = [f"{body}{number}".encode() for number in range(3)]
        one = await producer.send(Message("Orders", bodies[0]))
        rest = await producer.send_batch([Message("Orders", each) for each in bodies[1:]])
        for result, sent in zip([one, *rest], bodies, strict=True):
            assert len(result.offset_message_id) == 56
            found = await Admin(client).view_message(result.offset_message_id)
            assert (found.body, found.born_host[0], found.store_host[0]) == (sent, HOST, HOST)


@pytest.mark.skipif(not is_free(0, HOST), reason="this machine has no ::1")
async def test_a_deployment_stands_on_ipv6_alone(tmp_path: Path) -> None:
    metrics_port, proxy_port, console_port = free_ports(3)
    settings = {**SMALL_FILES, "metrics.listen_host": HOST, "metrics.listen_port": metrics_port}
    config = Config()
    config.bind = [f"[{HOST}]:{console_port}"]
    async with (
        local_cluster(tmp_path, host=HOST, settings=settings, proxies=[proxy_port]) as cluster,
        trio.open_nursery() as nursery,
    ):
        names = cluster.namesrv_address
        await nursery.start(partial(serve, names, ConsoleSettings(), config, ()))
        await create_topic([names], "Orders", queues=1)
        await stored_and_found(cluster, "before")
        pages = ((metrics_port, "/metrics", "dledger_"), (console_port, "/cluster", "broker-a"))
        for port, path, part in pages:
            text = await trio.to_thread.run_sync(read, f"http://[{HOST}]:{port}{path}")
            assert part in text
        # One of the three has the port of the page, the others serve without it.
        logs = [node.log_path.read_text() for node in cluster.brokers.values()]
        assert sum("metrics_port_left_out" in log for log in logs) == 2
        first = await cluster.wait_leader()
        await cluster.kill(first)
        second = await cluster.wait_leader(other_than=first)
        await stored_and_found(cluster, "after")
        with called(cluster.proxies["proxy0"].address) as proxy:
            route = await proxy.call("QueryRoute", pb.QueryRouteRequest(topic=TOPIC))
            [queue] = route.message_queues
            assert queue.broker.endpoints.scheme == pb.IPv6
            assert [(each.host, each.port) for each in queue.broker.endpoints.addresses] == [
                (HOST, proxy_port)
            ]
            assert (await proxy.send(message("by proxy"))).status.code == pb.OK
        sent = [b"%b%d" % (when, number) for when in (b"before", b"after") for number in range(3)]
        assert await bodies_at(names, "Orders") == [*sent, b"by proxy"]
        shown = await shown_by("cluster", "ls", "--namesrv", names)
        assert cluster.brokers[second].address in shown
        assert "leader" in await shown_by("raft", "status", "--namesrv", names)
        pids = {node.pid or 0 for node in cluster.nodes if node.running}
        assert not any(listening(pid, ("tcp",)) for pid in {os.getpid(), *pids})
        nursery.cancel_scope.cancel()
