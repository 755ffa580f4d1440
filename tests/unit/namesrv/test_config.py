"""NameServer settings: every source, its precedence, and one clear line for what is wrong."""

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.namesrv.config import IGNORED_KEYS, SCHEMA, NamesrvConfig
from dledger.settings.schema import ConfigFile

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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tls.server.mode=enforcing", "server.tls_mode = enforcing: needs server.tls_cert_file"),
        ("aclEnable=true", "server.acl_enable = true: needs server.acl_file"),
        ("listenPort=65536", "listenPort = '65536': expected a whole number <= 65535"),
        ("kvConfigPath=", "kvConfigPath = '': expected text of length >= 1"),
        ("zzz=1", "unknown setting zzz"),
    ],
)
def test_config_mistake_is_one_line_with_file_and_key(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("n.conf", text)
    assert str(caught.value).startswith(f"n.conf:1: {line}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", list(SCHEMA.settings))
def test_config_default_is_read_back_from_its_text(path: str) -> None:
    setting = SCHEMA.settings[path]
    assert setting.parse(setting.default_text) == setting.default
    assert len(setting.keys) == 1, "RocketMQ's tools ask by key"
