"""The key-value configuration on the real disk: durable, RocketMQ's form, never silently lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typing_extensions import Buffer

from commitlog.disk import OsDisk
from commitlog.errors import ConfigError, DiskFullError
from namesrv import kv_config
from namesrv.errors import KvConfigFullError
from namesrv.kv_config import ORDER_TOPIC_CONFIG, KvConfigManager


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
    monkeypatch.setattr(kv_config, "MAX_KV_CONFIG_BYTES", 200)
    path = str(tmp_path / "kvConfig.json")
    table = KvConfigManager.load(OsDisk(), path)
    table.put("ns", "k", "short")
    with pytest.raises(KvConfigFullError, match="the limit is 200"):
        table.put("ns", "k", "x" * 200)
    assert table.get("ns", "k") == "short"
    assert KvConfigManager.load(OsDisk(), path).get("ns", "k") == "short"
