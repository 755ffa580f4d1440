"""NameServer settings: every source, its precedence, and one clear line for what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.namesrv.config import IGNORED_KEYS, SCHEMA, NamesrvConfig
from dledger.remoting.settings import ConfigFile, settings_text

ROCKETMQ_FILE = """
# namesrv.conf as it comes from an existing installation
rocketmqHome=/opt/rocketmq
listenPort=9877
kvConfigPath = /data/kvConfig.json
orderMessageEnable=true
returnOrderTopicConfigToBroker=FALSE
scanNotActiveBrokerInterval:5000
serverChannelMaxIdleTimeSeconds=60
serverWorkerThreads=8
"""


def config_of(name: str, text: str) -> NamesrvConfig:
    return NamesrvConfig.load([ConfigFile(name, text)])


def test_config_defaults_are_those_of_rocketmq() -> None:
    config = NamesrvConfig.load(home="/home/mq")
    server, namesrv = config.server, config.namesrv
    assert (server.listen_host, server.listen_port) == ("127.0.0.1", 9876)
    assert (namesrv.broker_expiry_ms, namesrv.scan_interval_ms) == (120_000, 10_000)
    assert namesrv.first_scan_delay_ms == 5_000
    assert namesrv.order_message_enable is False
    assert namesrv.return_order_topic_config_to_broker is True
    assert namesrv.support_acting_master is False
    assert namesrv.delete_topic_with_broker_registration is False
    assert namesrv.need_wait_for_service is False
    assert namesrv.kv_config_path == "/home/mq/namesrv/kvConfig.json"


def test_config_reads_a_rocketmq_file_unchanged() -> None:
    config = config_of("/etc/namesrv.conf", ROCKETMQ_FILE)
    server, namesrv = config.server, config.namesrv
    assert (server.listen_port, namesrv.kv_config_path) == (9877, "/data/kvConfig.json")
    assert (namesrv.order_message_enable, namesrv.return_order_topic_config_to_broker) == (
        True,
        False,
    )
    assert (namesrv.scan_interval_ms, server.idle_timeout_s) == (5_000, 60)
    assert config.sources["server.listen_port"] == "/etc/namesrv.conf"
    assert config.sources["server.listen_host"] == "default"
    why = "is accepted and changes nothing: a NameServer does without it"
    assert config.warnings == (
        f"/etc/namesrv.conf: rocketmqHome {why}",
        f"/etc/namesrv.conf: serverWorkerThreads {why}",
    )


def test_config_reads_a_toml_file() -> None:
    config = config_of(
        "ns.toml",
        '[server]\nlisten_port = 0\n[namesrv]\nbroker_expiry_ms = 3000\nkv_config_path="/k"\n',
    )
    default = NamesrvConfig()
    assert config.server == replace(default.server, listen_port=0)
    assert config.namesrv == replace(default.namesrv, broker_expiry_ms=3000, kv_config_path="/k")


def test_config_prefers_options_to_files() -> None:
    text = '[server]\nlisten_port = 1000\nlisten_host = "0.0.0.0"\n'
    config = NamesrvConfig.load([ConfigFile("ns.toml", text)], options={"server.listen_port": 2000})
    assert (config.server.listen_port, config.server.listen_host) == (2000, "0.0.0.0")
    assert config.sources["server.listen_port"] == "command line"
    assert config.sources["server.listen_host"] == "ns.toml"


@pytest.mark.parametrize(
    ("path", "text", "line"),
    [
        ("n.toml", "[server]\nzzz = 1\n", "n.toml:2: unknown setting server.zzz"),
        (
            "n.toml",
            "[namesrv]\nlisten_port = 1\n",
            "n.toml:2: unknown setting namesrv.listen_port (did you mean server.listen_port?)",
        ),
        ("n.toml", "[broker]\n", "n.toml:1: unknown setting [broker] (did you mean [server]?)"),
        (
            "n.toml",
            "[server]\nlisten_port = '98x'\n",
            "n.toml:2: server.listen_port = '98x': expected a whole number",
        ),
        (
            "n.toml",
            "[server]\nlisten_port = true\n",
            "n.toml:2: server.listen_port = True: expected a whole number, got bool",
        ),
        (
            "n.conf",
            "listenprot=1\n",
            "n.conf:1: unknown setting listenprot (did you mean listenPort?)",
        ),
        ("n.conf", "listenPort=x\n", "n.conf:1: listenPort = 'x': expected a whole number"),
        (
            "n.conf",
            "listenPort=65536\n",
            "n.conf:1: listenPort = '65536': expected a whole number <= 65535",
        ),
        (
            "n.conf",
            "orderMessageEnable=yes\n",
            "n.conf:1: orderMessageEnable = 'yes': expected true or false",
        ),
        (
            "n.conf",
            "tls.server.mode=on\n",
            "n.conf:1: tls.server.mode = 'on': Invalid enum value 'on'",
        ),
        ("n.conf", "kvConfigPath=\n", "n.conf:1: kvConfigPath = '': expected text of length >= 1"),
        ("n.conf", "\nlistenPort\n", "n.conf:2: listenPort = '': expected a whole number"),
        ("n.toml", "[server\n", "n.toml: not TOML: Expected ']' at the end of a table declaration"),
    ],
)
def test_config_mistake_is_one_line_with_file_and_key(path: str, text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(path, text)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_config_names_all_mistakes_with_their_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("n.conf", "listenPort=x\nserverWorkerThreads=8\n\nlistenprot=1\n=9\n")
    assert str(caught.value).splitlines() == [
        "n.conf:1: listenPort = 'x': expected a whole number",
        "n.conf:4: unknown setting listenprot (did you mean listenPort?)",
        "n.conf:5: a key is needed before the value '9'",
    ]


@pytest.mark.parametrize("key", sorted(IGNORED_KEYS))
def test_config_warns_of_a_key_that_changes_nothing(key: str) -> None:
    config = config_of("n.conf", f"{key}=17\nlistenPort=9877\n")
    (warning,) = config.warnings
    assert warning.startswith(f"n.conf: {key} is accepted and changes nothing: ")
    assert config.server == NamesrvConfig.load(options={"server.listen_port": 9877}).server


def test_config_key_is_known_or_ignored() -> None:
    assert not IGNORED_KEYS.keys() & SCHEMA.keys.keys()


def test_config_lists_settings_that_are_not_defaults() -> None:
    text = "listenPort=9877\norderMessageEnable=false\n"
    config = NamesrvConfig.load([ConfigFile("n.conf", text)], home="/home/mq")
    found = {path: (value, source) for path, value, source in config.changed_settings()}
    assert found.pop("server.listen_port") == ("9877", "n.conf")
    assert set(found) == {"namesrv.kv_config_path"}, "the home folder stands in it"


def test_config_names_a_bad_option() -> None:
    why = r"^command line: server\.listen_port = 70000: expected a whole number <= 65535$"
    with pytest.raises(ConfigError, match=why):
        NamesrvConfig.load(options={"server.listen_port": 70_000})


def test_config_refuses_tls_without_a_certificate() -> None:
    why = r"^n\.conf:1: server\.tls_mode = enforcing: needs server\.tls_cert_file"
    with pytest.raises(ConfigError, match=why):
        config_of("n.conf", "tls.server.mode=enforcing\n")


def test_config_prints_every_setting_with_its_source() -> None:
    config = NamesrvConfig.load(options={"server.listen_port": 1})
    lines = settings_text(config.settings()).splitlines()
    by_path = {line.split()[0]: line.split()[2:] for line in lines}
    assert list(by_path) == list(SCHEMA.settings)
    assert by_path["server.listen_port"] == ["1", "#", "command", "line"]
    assert by_path["server.listen_host"] == ["127.0.0.1", "#", "default"]
    assert by_path["namesrv.order_message_enable"][0] == "false"


@pytest.mark.parametrize("path", list(SCHEMA.settings))
def test_config_default_is_read_back_from_its_text(path: str) -> None:
    setting = SCHEMA.settings[path]
    assert setting.parse(setting.default_text) == setting.default
    assert len(setting.keys) == 1, "RocketMQ's tools ask by key"


def test_config_hints_at_a_comment_behind_a_value() -> None:
    with pytest.raises(ConfigError) as raised:
        config_of("namesrv.properties", "listenPort=9876 # of clients")
    assert "'# of clients' is taken as part of the value" in str(raised.value)
