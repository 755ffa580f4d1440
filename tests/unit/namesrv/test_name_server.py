"""Route answers are encoded once per topic and dialect, and never outlive the route.

The key-value configuration on the real disk: durable, RocketMQ's form, never silently lost.

A running NameServer: disconnects, expiry, restart; over memory and over real sockets.
"""

import json
import socket
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from typing_extensions import Buffer

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError, DiskFullError
from dledger.namesrv import name_server
from dledger.namesrv.errors import KvConfigFullError
from dledger.namesrv.name_server import (
    ORDER_TOPIC_CONFIG,
    KvConfigManager,
    RouteCache,
    route_dialect,
)
from dledger.namesrv.server import serve_namesrv
from dledger.raft.identity import GroupSecret
from dledger.remoting.connection import Connection
from dledger.remoting.machine import SystemRng, TrioClock
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.bodies import BrokerData, TopicRouteData
from dledger.remoting.protocol.fastjson import Dialect
from dledger.remoting.tcp import TcpNetwork
from tests.harness.metrics_page import MetricsPage
from tests.harness.present import present
from tests.unit.namesrv.world import config_in, register, register_body, route, running_namesrv


class Routes:
    def __init__(self) -> None:
        self.addr = "h:1"
        self.built: list[str] = []

    def build(self, topic: str) -> TopicRouteData | None:
        self.built.append(topic)
        if topic == "absent":
            return None
        return TopicRouteData(broker_datas=[BrokerData("c", "b", {0: self.addr})])


def test_an_answer_is_encoded_once_per_dialect() -> None:
    routes = Routes()
    cache = RouteCache(routes.build)
    first = present(cache.body("T", Dialect.STANDARD))
    assert b'{"0":"h:1"}' in first
    assert cache.body("T", Dialect.STANDARD) is first
    other = present(cache.body("T", Dialect.FASTJSON))
    assert b'{0:"h:1"}' in other
    assert cache.body("T", Dialect.FASTJSON) is other
    assert routes.built == ["T", "T"]


@pytest.mark.parametrize("everything", [True, False])
def test_changed_route_is_encoded_in_both_dialects(everything: bool) -> None:
    routes = Routes()
    cache = RouteCache(routes.build)
    for dialect in Dialect:
        cache.body("T", dialect)
    routes.addr = "h:2"
    if everything:
        cache.clear()
    else:
        cache.invalidate(iter(["T", "unknown"]))
    for dialect in Dialect:
        body = present(cache.body("T", dialect))
        assert b"h:2" in body


def test_unserved_topics_are_not_cached() -> None:
    routes = Routes()
    cache = RouteCache(routes.build)
    assert cache.body("absent", Dialect.STANDARD) is None
    assert cache.body("absent", Dialect.STANDARD) is None
    assert routes.built == ["absent", "absent"]
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("version", "standard_only", "dialect"),
    [
        (400, False, Dialect.FASTJSON),
        (401, False, Dialect.STANDARD),
        (63, True, Dialect.STANDARD),
        (0, False, Dialect.FASTJSON),
    ],
)
def test_dialect_follows_the_client(version: int, standard_only: bool, dialect: Dialect) -> None:
    assert route_dialect(version, accept_standard_json_only=standard_only) is dialect


class FullDisk(OsDisk):
    """A disk on which nothing can be replaced any more."""

    def replace(self, path: str, data: Buffer) -> None:
        raise DiskFullError(f"no space for {path}")


def test_a_missing_file_is_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "namesrv" / "kvConfig.json"
    table = KvConfigManager.load(OsDisk(), str(path))
    assert table.get(ORDER_TOPIC_CONFIG, "T") is None
    assert table.table(ORDER_TOPIC_CONFIG) is None
    assert not path.exists()


def test_values_survive_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "namesrv" / "kvConfig.json")
    table = KvConfigManager.load(OsDisk(), path)
    table.put(ORDER_TOPIC_CONFIG, "T", "broker-a:4;broker-b:4")
    table.put("other", "ключ", "wert = 1")
    again = KvConfigManager.load(OsDisk(), path)
    assert again.table(ORDER_TOPIC_CONFIG) == {"T": "broker-a:4;broker-b:4"}
    assert again.get("other", "ключ") == "wert = 1"


def test_the_file_has_rocketmq_s_form(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"
    KvConfigManager.load(OsDisk(), str(path)).put("ns", "k", "v")
    assert json.loads(path.read_text()) == {"configTable": {"ns": {"k": "v"}}}


def test_a_file_written_by_rocketmq_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_text('{\n\t"configTable":{"ORDER_TOPIC_CONFIG":{"T":"broker-a:8"}\n\t}\n}')
    assert KvConfigManager.load(OsDisk(), str(path)).get(ORDER_TOPIC_CONFIG, "T") == "broker-a:8"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"configTable":{"ns":{"k"',
        b'{"configTable":{"ns":{"k":1}}}',
        b"{}",
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_stops_the_start_and_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"kvConfig\.json is damaged .*repair or remove it"):
        KvConfigManager.load(OsDisk(), str(path))
    assert path.read_bytes() == content


def test_deleted_value_removes_its_empty_namespace(tmp_path: Path) -> None:
    path = str(tmp_path / "kvConfig.json")
    table = KvConfigManager.load(OsDisk(), path)
    table.put("ns", "a", "1")
    table.put("ns", "b", "2")
    table.delete("ns", "a")
    assert KvConfigManager.load(OsDisk(), path).table("ns") == {"b": "2"}
    table.delete("ns", "b")
    table.delete("ns", "never there")
    assert table.table("ns") is None
    assert KvConfigManager.load(OsDisk(), path).table("ns") is None


def test_full_disk_leaves_the_old_values(tmp_path: Path) -> None:
    path = str(tmp_path / "kvConfig.json")
    KvConfigManager.load(OsDisk(), path).put("ns", "k", "old")
    table = KvConfigManager.load(FullDisk(), path)
    with pytest.raises(DiskFullError):
        table.put("ns", "k", "new")
    with pytest.raises(DiskFullError):
        table.delete("ns", "k")
    assert table.get("ns", "k") == "old"
    assert KvConfigManager.load(OsDisk(), path).get("ns", "k") == "old"


def test_table_over_its_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_server, "MAX_KV_CONFIG_BYTES", 200)
    path = str(tmp_path / "kvConfig.json")
    table = KvConfigManager.load(OsDisk(), path)
    table.put("ns", "k", "short")
    with pytest.raises(KvConfigFullError, match="the limit is 200"):
        table.put("ns", "k", "x" * 200)
    assert table.get("ns", "k") == "short"
    assert KvConfigManager.load(OsDisk(), path).get("ns", "k") == "short"


SECRET = b"a secret of all groups"


def test_secret_of_the_groups_is_read_or_nothing_starts(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    config = config_in(tmp_path, group_secret_file=str(file))
    for content, why in ((None, "No such file"), (b"short", "at least 16")):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            name_server.NameServer(config, OsDisk())
    file.write_bytes(SECRET + b"\n")
    secret = present(name_server.NameServer(config, OsDisk()).routes.secret)
    assert secret.membership_proof("a") == GroupSecret(b"a secret of all groups").membership_proof(
        "a"
    )


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
