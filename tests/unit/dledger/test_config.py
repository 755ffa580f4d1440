"""Configuration: every key, every source."""

from pathlib import Path

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.settings.config import ROCKETMQ_KEYS, SCHEMA, SETTINGS, load_config
from dledger.settings.schema import ConfigFile, SettingsReader
from dledger.settings.text import (
    IGNORED_KEYS,
    MASTER_AND_SLAVE_KEYS,
    REFUSED,
    Peer,
    parse_delay_levels,
)
from tests.harness.configs import THREE_PEERS, another_value, conf, toml
from tests.harness.settings_page import PAGES, with_settings

ROOT = Path(__file__).parents[3]

SPELLINGS = [
    ("namesrvAddr", "10.0.0.1:9876;ns2:9877", ("10.0.0.1:9876", "ns2:9877")),
    ("deleteWhen", "04;16", (4, 16)),
    ("diskSpaceCleanForciblyRatio", "0.95", 95),
    ("messageDelayLevel", "1s  2h", "1s 2h"),
    ("metricsExporterType", "2", "PROM"),
    ("dLegerPeers", "n0-h:1", (Peer("n0", "h", 1),)),
]
OTHERS = ROCKETMQ_KEYS.keys() - {key for key, _, _ in SPELLINGS}


def read(file: ConfigFile) -> SettingsReader:
    reader = SettingsReader(SCHEMA, ignored=IGNORED_KEYS)
    reader.read_files([file])
    assert reader.mistakes == []
    return reader


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [*SPELLINGS, *((key, *another_value(SETTINGS[ROCKETMQ_KEYS[key]])) for key in sorted(OTHERS))],
)
def test_config_takes_a_rocketmq_key_in_any_file(key: str, text: str, value: object) -> None:
    path = ROCKETMQ_KEYS[key]
    reader = read(ConfigFile("broker.conf", f"{key}={text}"))
    assert reader.values[path] == value != SETTINGS[path].default
    assert reader.sources[path] == "broker.conf"
    table = path.partition(".")[0]
    assert read(ConfigFile("n0.toml", f'[{table}]\n"{key}" = "{text}"')).values[path] == value


def test_config_key_has_one_meaning() -> None:
    kinds = (ROCKETMQ_KEYS, IGNORED_KEYS, REFUSED, MASTER_AND_SLAVE_KEYS)
    assert len({key for kind in kinds for key in kind}) == sum(map(len, kinds))


@pytest.mark.parametrize("path", list(SETTINGS))
def test_config_default_is_read_back_from_its_text(path: str) -> None:
    text = SETTINGS[path].default_text
    assert SETTINGS[path].parse(text) == SETTINGS[path].default
    assert SETTINGS[path].show(SETTINGS[path].default) == text


@pytest.mark.parametrize("key", sorted(IGNORED_KEYS))
def test_config_warns_once_of_an_ignored_key(key: str) -> None:
    config = conf(f"{key}=7\n{key}=8")
    (warning,) = config.warnings
    assert warning.startswith(f"broker.conf: {key} is accepted and changes nothing: ")
    assert config.settings() == load_config().settings()


SLAVES = [
    "brokerRole=SLAVE",
    "brokerId=1",
    "brokerId=3\nbrokerRole=SYNC_MASTER",
    "haMasterAddress=10.0.0.1:10912",
    "haMasterAddressList=10.0.0.1:10912",
    "enableControllerMode=true",
]


@pytest.mark.parametrize("text", SLAVES)
def test_config_refuses_a_slave_without_members(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        conf(f"brokerName=broker-a\n{text}")
    message = str(raised.value)
    key, _, value = text.partition("\n")[0].partition("=")
    assert message.startswith(
        f"broker.conf:2: {key} = {value}: this broker would be a group of its"
    )
    assert "dLegerGroup=broker-a, dLegerPeers=n0-HOST0:20911;n1-HOST1:20911" in message
    assert "docs/operate/from-master-slave.md" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", SLAVES)
def test_config_makes_a_slave_among_members_a_member(text: str) -> None:
    config = conf(f"{text}\ndLegerPeers={THREE_PEERS}\ndLegerSelfId=n1")
    assert config.broker.broker_role == "SYNC_MASTER"
    assert len(config.raft.peers) == 3
    (warning,) = config.warnings
    assert warning.endswith("roles are elected")


def test_config_refuses_a_slave_with_members_switched_off() -> None:
    with pytest.raises(ConfigError, match="a group of its own"):
        conf(f"brokerId=1\nenableDLegerCommitLog=false\ndLegerPeers={THREE_PEERS}")


def test_config_refuses_a_slave_in_toml() -> None:
    with pytest.raises(
        ConfigError, match=r"n0\.toml:2: broker\.broker_role = SLAVE: this broker would"
    ):
        toml('[broker]\nbroker_role = "SLAVE"')


def test_config_takes_a_master_alone_without_warning() -> None:
    assert conf("brokerId=0\nbrokerRole=SYNC_MASTER\nenableControllerMode=false").warnings == ()


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ("namesrvAddr=10.0.0.9:9876", True),
        ("namesrvAddr=127.0.0.1:9876;ns.example:9876", True),
        ("namesrvAddr=localhost:9876", False),
        (f"namesrvAddr=10.0.0.9:9876\ndLegerPeers={THREE_PEERS}\ndLegerSelfId=n1", False),
    ],
)
def test_config_warns_of_a_group_of_one_registered_elsewhere(text: str, warns: bool) -> None:
    found = [w for w in conf(text).warnings if w.startswith("raft.peers: a group of one")]
    assert bool(found) == warns


@pytest.mark.parametrize("key", ["inSyncReplicas", "minInSyncReplicas"])
def test_config_refuses_more_replicas_than_a_majority(key: str) -> None:
    three = f"dLegerPeers={THREE_PEERS}\ndLegerSelfId=n1"
    with pytest.raises(ConfigError, match=f"{key} = 3: an acknowledgement means 2 of the 3"):
        conf(f"{three}\n{key}=3")
    (warning,) = conf(f"{three}\n{key}=2").warnings
    assert f"{key} is accepted and changes nothing: an acknowledgement means 2 of the 3" in warning
    assert conf(f"{three}\n{key}=1").warnings == ()
    with pytest.raises(ConfigError, match=f"{key} = 2: an acknowledgement means 1 of the 1"):
        conf(f"{key}=2")


def test_config_lists_settings_that_are_not_defaults() -> None:
    changed = conf("brokerName=b\nlistenPort=10911\nflushDiskType=ASYNC_FLUSH\n").changed_settings()
    assert ("broker.broker_name", "b", "broker.conf") in changed
    assert ("store.flush_disk_type", "ASYNC_FLUSH", "broker.conf") in changed
    assert not [row for row in changed if row[0] == "server.listen_port"], "it is the default"
    assert len(changed) < 10


def test_config_prefers_the_later_source() -> None:
    files = [
        ConfigFile("b.conf", "namesrvAddr=conf:1\nbrokerName=conf\nlistenPort=2\n"),
        ConfigFile(
            "a.toml",
            "[broker]\nbroker_name = 'toml'\ncluster_name = 'toml'\nnamesrv_addr = ['toml:1']\n"
            "[server]\nlisten_port = 1\n",
        ),
    ]
    config = load_config(
        files,
        environment={"NAMESRV_ADDR": "env:1", "LISTEN_PORT": "9"},
        options={"server.listen_port": 3},
    )
    paths = (
        "broker.cluster_name",
        "broker.broker_name",
        "broker.namesrv_addr",
        "server.listen_port",
        "broker.broker_role",
    )
    assert [(config.get(path), config.sources[path]) for path in paths] == [
        ("toml", "a.toml"),
        ("conf", "b.conf"),
        (("env:1",), "environment NAMESRV_ADDR"),
        (3, "command line"),
        ("SYNC_MASTER", "default"),
    ]


def test_config_expands_the_home_folder() -> None:
    assert load_config(home="/home/mq").store.path_root_dir == "/home/mq/store"


def test_config_warns_of_a_log_folder_elsewhere() -> None:
    assert conf("storePathRootDir=/d/n0\nstorePathCommitLog=/d/n0/commitlog/").warnings == ()
    (warning,) = conf("storePathCommitLog=/fast/n0\nstorePathRootDir=/d/n0").warnings
    assert "storePathCommitLog" in warning


def test_config_takes_sizes_with_units() -> None:
    config = toml('[store]\nmapped_file_size_commit_log = "64 MiB"\nmax_message_size = "1KiB"')
    assert config.store.mapped_file_size_commit_log == 64 << 20
    assert config.store.max_message_size == 1024


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            "dLegerPeers=n0-127.0.0.1:1;n1-127.0.0.1:2",
            "raft.peers: a group of 2 survives no more failures",
        ),
        ("flushDiskType=ASYNC_FLUSH", "store.flush_disk_type = ASYNC_FLUSH: a power cut may"),
        ("brokerRole=ASYNC_MASTER", "broker.broker_role = ASYNC_MASTER: a fail-over may lose"),
    ],
)
def test_config_warns_of_weaker_acknowledgements(text: str, warning: str) -> None:
    (found,) = conf(text).warnings
    assert found.startswith(warning)


def test_config_refuses_access_control_without_accounts() -> None:
    with pytest.raises(ConfigError, match=r"server\.acl_enable = true: needs server\.acl_file"):
        conf("aclEnable=true")
    config = load_config(
        [ConfigFile("broker.conf", "aclEnable=true")], options={"server.acl_file": "/accounts"}
    )
    assert config.server.acl_enable


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_config_refuses_protection_that_is_not_built(key: str) -> None:
    asked = "false" if "true" in REFUSED[key].harmless else "something"
    with pytest.raises(ConfigError) as raised:
        conf(f"{key}={asked}")
    assert str(raised.value) == f"broker.conf:1: {key}: {REFUSED[key].reason}"
    for harmless in REFUSED[key].harmless:
        assert conf(f"{key}={harmless}").warnings == ()


def test_config_error_does_not_show_a_secret() -> None:
    with pytest.raises(ConfigError) as raised:
        conf('initAuthenticationUser={"username":"me","password":"do-not-show-me"}')
    assert "do-not-show-me" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["tls.server.need.client.auth=require", "tls.server.authClient=true"]
)
def test_config_refuses_client_auth_without_an_authority(text: str) -> None:
    with pytest.raises(ConfigError, match=r"needs tls\.server\.trustCertPath"):
        conf(text)
    (warning,) = conf(f"{text}\ntls.server.trustCertPath=/ca.pem").warnings
    assert "when `tls.server.trustCertPath` is set" in warning


def test_config_delay_levels_are_those_of_rocketmq() -> None:
    levels = load_config().store.delay_levels_ms
    assert len(levels) == 18
    assert (levels[0], levels[4], levels[17]) == (1_000, 60_000, 7_200_000)
    assert parse_delay_levels("1d") == (86_400_000,)
    with pytest.raises(ValueError, match="expected 1 to 64 delays, got 65"):
        parse_delay_levels("1s " * 65)


@pytest.mark.parametrize("node", ["n0", "n1", "n2"])
def test_config_samples_describe_one_group(node: str) -> None:
    for name in (f"rocketmq-dledger/broker-{node}.conf", f"three-nodes/{node}.toml"):
        path = ROOT / "examples" / name
        config = load_config([ConfigFile(name, path.read_text())])
        assert config.raft.self_id == node
        assert [peer.id for peer in config.raft.peers] == ["n0", "n1", "n2"]
        assert config.sources["store.path_root_dir"] == name


@pytest.mark.parametrize("folder", ["rocketmq-dledger", "three-nodes"])
def test_config_samples_share_no_port_or_folder(folder: str) -> None:
    configs = [
        load_config([ConfigFile(path.name, path.read_text())])
        for path in sorted((ROOT / "examples" / folder).glob("*n[0-2].*"))
    ]
    assert len(configs) == 3
    assert len({config.raft.peers for config in configs}) == 1
    ports = {config.server.listen_port for config in configs}
    assert len(ports | {peer.port for peer in configs[0].raft.peers}) == 6
    # RocketMQ clients may try a port two below the one they were given.
    assert not {port - 2 for port in ports} & ports
    assert len({config.store.path_root_dir for config in configs}) == 3


def test_config_sample_of_slaves_is_two_groups_of_three() -> None:
    folder = ROOT / "examples" / "two-masters-two-slaves"
    configs = [
        load_config([ConfigFile(path.name, path.read_text())]) for path in sorted(folder.iterdir())
    ]
    assert [(c.broker.broker_name, c.raft.self_id) for c in configs] == [
        (name, node) for name in ("broker-a", "broker-b") for node in ("n0", "n1", "n2")
    ]
    assert [config.warnings for config in configs] == [()] * 6
    assert all(config.store.sync_flush and config.sync_replication for config in configs)
    ports = [config.server.listen_port for config in configs]
    peers = {peer.port for config in configs for peer in config.raft.peers}
    assert len({*ports, *peers}) == 12
    assert not {port - 2 for port in ports} & set(ports)
    assert len({config.store.path_root_dir for config in configs}) == 6


def test_config_page_lists_every_setting() -> None:
    for page in PAGES:
        assert page.read_text() == with_settings(page), (
            "run: .venv/bin/python -m tests.harness.settings_page"
        )


def test_config_serves_no_metrics_by_default() -> None:
    assert load_config().metrics_address is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("metricsPromExporterPort=5558", ("127.0.0.1", 5558)),
        ("metricsPromExporterPort=5558\nmetricsPromExporterHost=", ("127.0.0.1", 5558)),
        ("metricsPromExporterPort=5558\nmetricsPromExporterHost=10.0.0.7", ("10.0.0.7", 5558)),
        ("metricsExporterType=PROM", ("127.0.0.1", 5557)),
        ("metricsExporterType=2", ("127.0.0.1", 5557)),
        ("metricsExporterType=prom\nmetricsPromExporterPort=5558", ("127.0.0.1", 5558)),
        ("metricsExporterType=DISABLE\nmetricsPromExporterPort=5558", None),
        ("metricsExporterType=0\nmetricsPromExporterPort=5558", None),
        ("metricsExporterType=\nmetricsPromExporterPort=5558", ("127.0.0.1", 5558)),
    ],
)
def test_config_serves_metrics_where_rocketmq_keys_name(
    text: str, address: tuple[str, int] | None
) -> None:
    config = conf(text)
    assert config.metrics_address == address
    assert config.warnings == ()


@pytest.mark.parametrize("exporter", ["OTLP_GRPC", "otlp_grpc", "LOG", "1", "3"])
def test_config_warns_of_an_exporter_that_is_not_built(exporter: str) -> None:
    config = conf(f"metricsExporterType={exporter}\nmetricsPromExporterPort=5558")
    assert config.metrics_address is None
    assert config.warnings == (
        f"broker.conf: metricsExporterType = {exporter} is taken as DISABLE: only PROM is built,"
        " nothing is exported",
    )


def test_config_refuses_an_unknown_exporter() -> None:
    with pytest.raises(ConfigError, match=r"metricsExporterType = 'STATSD'"):
        conf("metricsExporterType=STATSD")
