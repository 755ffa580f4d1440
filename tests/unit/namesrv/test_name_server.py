"""Route answers are encoded once per topic and dialect, and never outlive the route.

The key-value configuration on the real disk: durable, RocketMQ's form, never silently lost.
"""

import json
from pathlib import Path

import pytest
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
from dledger.raft.identity import GroupSecret
from dledger.remoting.protocol.bodies import BrokerData, TopicRouteData
from dledger.remoting.protocol.fastjson import Dialect
from tests.harness.present import present
from tests.unit.namesrv.world import config_in


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
