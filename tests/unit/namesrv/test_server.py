"""A running NameServer: disconnects, expiry, restart; over memory and over real sockets."""

import socket
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from dledger.commitlog.disk import OsDisk
from dledger.namesrv.server import serve_namesrv
from dledger.remoting.connection import Connection
from dledger.remoting.machine import SystemRng, TrioClock
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.tcp import TcpNetwork
from tests.harness.metrics_page import MetricsPage
from tests.harness.present import present
from tests.unit.namesrv.world import config_in, register, register_body, route, running_namesrv

A, B = "10.0.0.1:10911", "10.0.0.2:10911"


@pytest.mark.real_time
async def test_prometheus_shows_brokers_and_refusals(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free_port = taken.getsockname()[1]
    network = TcpNetwork()
    async with trio.open_nursery() as nursery:
        host, port = await nursery.start(
            partial(
                serve_namesrv,
                config_in(tmp_path, listen_port=0, metrics_listen_port=free_port),
                clock=TrioClock(),
                rng=SystemRng(),
                network=network,
                disk=OsDisk(),
            )
        )
        connection = Connection(await network.connect(host, port, timeout_s=5), ProcessorTable())
        nursery.start_soon(connection.run)
        assert (await register(connection, A, 0)).code == 0
        stream = await network.connect(host, free_port, timeout_s=5)
        await stream.send_all(b"GET /metrics HTTP/1.1\r\n\r\n")
        received = bytearray()
        while part := bytes(await stream.receive_some(65_536)):
            received += part
        await stream.aclose()
        nursery.cancel_scope.cancel()
    head, _, text = received.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    page = MetricsPage.read(text)
    assert page.value("dledger_namesrv_brokers") == 1
    assert page.value("dledger_namesrv_topics") == 2
    assert page.value("dledger_connections") == 1
    assert page.value("dledger_registrations_refused_total") == 0
    assert page.value("dledger_access_refused_total") == 0
    assert page.labels("dledger_connections")[0]["node_type"] == "namesrv"


async def test_a_broker_that_reconnected_outlives_its_old_connection(tmp_path: Path) -> None:
    async with running_namesrv(config_in(tmp_path, listen_port=0)) as world:
        old, new, client = [await world.connect() for _ in range(3)]
        await register(old, A, 0)
        await register(new, A, 0)
        old.close("half open")
        await trio.testing.wait_all_tasks_blocked()
        assert await route(client) is not None
        new.close("dead")
        await trio.testing.wait_all_tasks_blocked()
        assert await route(client) is None


async def test_a_silent_broker_expires_and_its_connection_is_closed(tmp_path: Path) -> None:
    async with running_namesrv(config_in(tmp_path, listen_port=0, idle_timeout_s=3600)) as world:
        broker, client = await world.connect(), await world.connect()
        start = trio.current_time()
        await register(broker, A, 0)
        await trio.sleep(119)
        assert await route(client) is not None
        while await route(client) is not None:
            await trio.sleep(1)
        # 5 s, then every 10 s: the scan at 125 s is the first after the expiry.
        assert trio.current_time() - start == pytest.approx(125, abs=1)
        await trio.testing.wait_all_tasks_blocked()
        assert broker.is_closed
        assert not client.is_closed


async def test_a_connection_that_still_serves_a_living_broker_is_kept(tmp_path: Path) -> None:
    async with running_namesrv(config_in(tmp_path, listen_port=0)) as world:
        shared = await world.connect()
        await register(shared, A, 0)
        await register(shared, B, 1, heartbeatTimeoutMillis="1000")
        await trio.sleep(6)
        found = present(await route(shared))
        assert found.broker_datas[0].broker_addrs == {0: A}


async def test_routes_are_served_between_registrations(tmp_path: Path) -> None:
    async with running_namesrv(config_in(tmp_path, listen_port=0)) as world:
        client = await world.connect()
        await register(client, A, 0)
        served = 0

        async def keep_registering(number: int) -> None:
            connection = await world.connect()
            for counter in range(20):
                answer = await register(
                    connection, f"10.0.1.{number}:1", number, register_body(counter=counter)
                )
                assert answer.code == 0

        async with trio.open_nursery() as nursery:
            for number in range(1, 6):
                nursery.start_soon(keep_registering, number)
            for _ in range(50):
                found = present(await route(client))
                assert found.broker_datas[0].broker_addrs[0] == A
                served += 1
        assert served == 50
