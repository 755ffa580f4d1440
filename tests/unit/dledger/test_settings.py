"""Settings read from files and options, for a daemon of two tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.settings.schema import (
    Config,
    ConfigFile,
    Place,
    SettingsReader,
    parse_addresses,
    setting,
    toml_lines,
)

TEXT = """alone = 1
[server]  # of clients
listen_port = 1
  "quoted" = 2

[ raft ]
peers = '''
listen_port = none of this
'''
self_id="n0"
"""


def test_toml_lines_of_tables_and_keys() -> None:
    assert toml_lines(TEXT) == {
        ("", "alone"): 1,
        ("server", ""): 2,
        ("server", "listen_port"): 3,
        ("server", "quoted"): 4,
        ("raft", ""): 6,
        ("raft", "peers"): 7,
        ("raft", "listen_port"): 8,
        ("raft", "self_id"): 10,
    }


@dataclass(kw_only=True, slots=True)
class PortTable:
    """``[listener]``: a port."""

    port: int = setting(1, "Port.", "listenPort", "oldListenPort", ge=1, live="the next bind")
    names: tuple[str, ...] = setting(("a:1",), "Addresses.", "names", parse=parse_addresses)


@dataclass(kw_only=True, slots=True)
class FlagTable:
    """``[flag]``: one flag."""

    on: bool = setting(False, "Whether it is on.")


@dataclass(frozen=True, slots=True)
class PortConfig(Config):
    listener: PortTable = field(default_factory=PortTable)
    flag: FlagTable = field(default_factory=FlagTable)


SCHEMA = PortConfig.schema()


def reader_of(*files: ConfigFile, options: Mapping[str, object] | None = None) -> SettingsReader:
    reader = SettingsReader(SCHEMA, ignored={"threads": "there are none"})
    reader.read_files(files)
    reader.read_options(options or {})
    return reader


def test_schema_lists_settings_keys_and_limits() -> None:
    assert list(SCHEMA.settings) == ["listener.port", "listener.names", "flag.on"]
    assert SCHEMA.keys == {
        "listenPort": "listener.port",
        "oldListenPort": "listener.port",
        "names": "listener.names",
    }
    port = SCHEMA.settings["listener.port"]
    assert (port.table, port.name, port.about, port.live) == (
        "listener",
        "port",
        "Port.",
        "the next bind",
    )
    with pytest.raises(ValueError, match="expected a whole number >= 1"):
        port.parse("0")
    assert port.parse("8 KiB") == 8192
    assert SCHEMA.settings["flag.on"].show(True) == "true"


def test_reader_takes_toml_before_properties() -> None:
    conf = ConfigFile("d.conf", "listenPort=3\nthreads=9\n")
    toml = ConfigFile("d.toml", "[listener]\nport = 2\nnames = 'b:2;c:3'\n")
    reader = reader_of(conf, toml, options={"flag.on": "true"})
    assert reader.values == {"listener.port": 3, "listener.names": ("b:2", "c:3"), "flag.on": True}
    assert reader.sources == {
        "listener.port": "d.conf",
        "listener.names": "d.toml",
        "flag.on": "command line",
    }
    assert reader.places["listener.port"] == Place("d.conf", 1)
    assert reader.warnings == ("d.conf: threads is accepted and changes nothing: there are none",)
    assert reader.mistakes == []


def test_reader_collects_every_mistake() -> None:
    conf = ConfigFile("d.conf", "listenPort=x\n\nlisenPort=1\n=2\n")
    reader = reader_of(conf, options={"listener.names": "a"})
    assert reader.mistakes == [
        "d.conf:1: listenPort = 'x': expected a whole number",
        "d.conf:3: unknown setting lisenPort (did you mean listenPort?)",
        "d.conf:4: a key is needed before the value '2'",
        "command line: listener.names = 'a': 'a' is not host:port or [IPv6]:port",
    ]


def test_reader_derives_and_expands() -> None:
    reader = SettingsReader(SCHEMA, ignored={})
    reader.derive("listener.names", ("~/x",), "listener.port")
    assert reader.sources["listener.names"] == "from listener.port"
    reader.values["listener.names"] = "~/x"
    reader.expand_home("listener.names", "")
    assert reader.values["listener.names"] == "~/x"
    reader.expand_home("listener.names", "/home/mq")
    assert reader.values["listener.names"] == "/home/mq/x"


def test_config_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    with pytest.raises(ConfigError, match=r"d\.toml: cannot be read: No such file or directory"):
        ConfigFile.read(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"d\.toml: cannot be read: not UTF-8 text"):
        ConfigFile.read(path)


def path_of(key: str) -> str:
    return SCHEMA.keys.get(key, key)


def test_config_changes_are_the_differences() -> None:
    config = PortConfig()
    values, _ = config.changes({"listenPort": "7", "flag.on": "false"}, path_of=path_of, daemon="d")
    assert values == {"listener.port": 7}
    changed = config.with_values(values, "by hand")
    assert changed.changed_settings() == [("listener.port", "7", "by hand")]
    assert config.listener.port == 1


def test_config_change_reaches_all_that_have_the_table() -> None:
    config = PortConfig()
    table, copy = config.listener, config.copied()
    config.change({"listener.port": 7}, "by hand")
    assert (table.port, config.sources["listener.port"]) == (7, "by hand")
    assert (copy.listener.port, copy.sources) == (1, {})


def test_config_refuses_a_change_that_needs_a_start() -> None:
    with pytest.raises(ConfigError, match=r"flag\.on cannot change while the listener runs"):
        PortConfig().changes({"flag.on": "true"}, path_of=path_of, daemon="listener")
    with pytest.raises(ConfigError, match="listenPort = '0': expected a whole number >= 1"):
        PortConfig().changes({"listenPort": "0"}, path_of=path_of, daemon="listener")
