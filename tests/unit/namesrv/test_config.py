"""NameServer settings: every source, its precedence, and one clear line for what is wrong."""

from __future__ import annotations

import os.path
from dataclasses import fields

import pytest

from commitlog.errors import ConfigError
from namesrv.config import IGNORED_ROCKETMQ_KEYS, SETTINGS, NamesrvConfig, resolve_config

ROCKETMQ_FILE = b"""
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


def test_the_defaults_are_rocketmq_s() -> None:
    config = resolve_config().config
    assert (config.listen_host, config.listen_port) == ("127.0.0.1", 9876)
    assert (config.broker_expiry_ms, config.scan_interval_ms) == (120_000, 10_000)
    assert config.first_scan_delay_ms == 5_000
    assert config.order_message_enable is False
    assert config.return_order_topic_config_to_broker is True
    assert config.support_acting_master is False
    assert config.delete_topic_with_broker_registration is False
    assert config.need_wait_for_service is False
    assert config.kv_config_path == os.path.expanduser("~/namesrv/kvConfig.json")


def test_an_unchanged_rocketmq_file_is_understood_and_its_foreign_keys_are_named() -> None:
    resolved = resolve_config(path="/etc/namesrv.conf", content=ROCKETMQ_FILE)
    config = resolved.config
    assert (config.listen_port, config.kv_config_path) == (9877, "/data/kvConfig.json")
    assert (config.order_message_enable, config.return_order_topic_config_to_broker) == (
        True,
        False,
    )
    assert (config.scan_interval_ms, config.idle_timeout_s) == (5_000, 60)
    assert resolved.sources["listen_port"] == "/etc/namesrv.conf"
    assert resolved.sources["listen_host"] == "default"
    assert resolved.warnings == (
        "rocketmqHome has no meaning here and is ignored",
        "serverWorkerThreads has no meaning here and is ignored",
    )


def test_a_toml_file_sets_the_same_things() -> None:
    content = (
        b'[server]\nlisten_port = 0\n[namesrv]\nbroker_expiry_ms = 3000\nkv_config_path="/k"\n'
    )
    config = resolve_config(path="ns.toml", content=content).config
    assert config == NamesrvConfig(listen_port=0, broker_expiry_ms=3000, kv_config_path="/k")


def test_the_command_line_wins_over_the_file_and_an_option_not_given_does_not() -> None:
    resolved = resolve_config(
        path="ns.toml",
        content=b'[server]\nlisten_port = 1000\nlisten_host = "0.0.0.0"\n',
        command_line={"listen_port": 2000, "listen_host": None},
    )
    assert (resolved.config.listen_port, resolved.config.listen_host) == (2000, "0.0.0.0")
    assert resolved.sources["listen_port"] == "command line"
    assert resolved.sources["listen_host"] == "ns.toml"


@pytest.mark.parametrize(
    ("path", "content", "line"),
    [
        ("n.toml", b"[server]\nport = 1\n", "n.toml:2: unknown setting 'port' in [server]"),
        (
            "n.toml",
            b"[namesrv]\nlisten_port = 1\n",
            "n.toml:2: unknown setting 'listen_port' in [namesrv]",
        ),
        (
            "n.toml",
            b"[broker]\n",
            "n.toml:1: unknown setting 'broker'; tables are [server] and [namesrv]",
        ),
        (
            "n.toml",
            b'[server]\nlisten_port = "9876"\n',
            "n.toml:2: [server] listen_port = '9876': a whole number is needed",
        ),
        (
            "n.toml",
            b"[server]\nlisten_port = true\n",
            "n.toml:2: [server] listen_port = True: a whole number is needed",
        ),
        ("n.conf", b"listenprot=1\n", "n.conf:1: unknown setting 'listenprot'"),
        ("n.conf", b"listenPort=x\n", "n.conf:1: listenPort = 'x': a whole number is needed"),
        (
            "n.conf",
            b"listenPort=65536\n",
            "n.conf:1: listenPort = 65536: must be between 0 and 65535",
        ),
        (
            "n.conf",
            b"orderMessageEnable=yes\n",
            "n.conf:1: orderMessageEnable = 'yes': true or false is needed",
        ),
        (
            "n.conf",
            b"tls.server.mode=on\n",
            "n.conf:1: tls.server.mode = 'on': must be one of disabled, permissive, enforcing",
        ),
        ("n.conf", b"kvConfigPath=\n", "n.conf:1: kvConfigPath must not be empty"),
        ("n.conf", b"\nlistenPort\n", "n.conf:2: listenPort = '': a whole number is needed"),
    ],
)
def test_what_is_wrong_is_one_line_naming_it(path: str, content: bytes, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(path=path, content=content)
    assert str(caught.value) == line


def test_every_mistake_is_told_at_once_with_its_line() -> None:
    content = b"listenPort=x\nserverWorkerThreads=8\n\nlistenprot=1\n=9\n"
    with pytest.raises(ConfigError) as caught:
        resolve_config(path="n.conf", content=content)
    assert str(caught.value).splitlines() == [
        "n.conf:1: listenPort = 'x': a whole number is needed",
        "n.conf:4: unknown setting 'listenprot'",
        "n.conf:5: a key is needed before the value '9'",
    ]


@pytest.mark.parametrize("key", sorted(IGNORED_ROCKETMQ_KEYS))
def test_a_key_without_meaning_here_is_a_warning(key: str) -> None:
    resolved = resolve_config(path="n.conf", content=f"{key}=17\nlistenPort=9877\n".encode())
    assert resolved.warnings == (f"{key} has no meaning here and is ignored",)
    assert resolved.config == resolve_config(command_line={"listen_port": 9877}).config


def test_the_settings_that_are_not_defaults_are_few() -> None:
    resolved = resolve_config(path="n.conf", content=b"listenPort=9877\norderMessageEnable=false\n")
    names = {name: (value, source) for name, value, source in resolved.changed_settings()}
    assert names.pop("listen_port") == ("9877", "n.conf")
    assert set(names) == {"kv_config_path"}, "the home folder stands in it"


@pytest.mark.parametrize("content", [b"[server\n", b"\xff"])
def test_a_file_that_is_not_toml_is_named(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^n\.toml: cannot be read: "):
        resolve_config(path="n.toml", content=content)


def test_a_bad_command_line_value_is_named_as_the_option_is_spelled() -> None:
    with pytest.raises(ConfigError, match=r"^--listen-port = 70000: must be between 0 and 65535$"):
        resolve_config(command_line={"listen_port": 70_000})


def test_tls_without_a_certificate_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="tls_mode = 'enforcing' needs tls_cert_file"):
        resolve_config(path="n.conf", content=b"tls.server.mode=enforcing\n")


def test_every_setting_is_printed_with_its_source() -> None:
    lines = resolve_config(command_line={"listen_port": 1}).lines()
    assert len(lines) == len(SETTINGS) == len(fields(NamesrvConfig))
    by_name = {line.split(" = ")[0]: line for line in lines}
    assert by_name["listen_port"].split() == ["listen_port", "=", "1", "#", "command", "line"]
    assert by_name["listen_host"].split() == ["listen_host", "=", '"127.0.0.1"', "#", "default"]
    assert by_name["order_message_enable"].split()[2] == "false"


def test_a_comment_behind_a_value_gets_a_hint() -> None:
    content = b"listenPort=9876 # of clients"
    with pytest.raises(ConfigError) as raised:
        resolve_config(path="namesrv.properties", content=content)
    assert "'# of clients' is taken as part of the value" in str(raised.value)
