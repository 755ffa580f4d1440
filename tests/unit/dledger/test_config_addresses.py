"""Configuration of a broker's names, peers and addresses, and what guards them."""

from __future__ import annotations

from socket import AF_INET, AF_INET6

import pytest
import trio

from dledger.cli import broker_command
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.record import pack_host
from dledger.remoting.addresses import join_address
from dledger.settings.config import load_config
from dledger.settings.parts import packed_address
from dledger.settings.schema import ConfigFile
from tests.harness.configs import THREE_PEERS, conf, toml

THREE = "dLegerPeers=n0-{0}:1;n1-{0}:2;n2-{0}:3"


@pytest.mark.parametrize(
    "peers",
    [
        f'"{THREE_PEERS}"',
        '["n0-127.0.0.1:40911", "n1-127.0.0.1:40912", "n2-127.0.0.1:40913"]',
        '{n0 = "127.0.0.1:40911", n1 = "127.0.0.1:40912", n2 = "127.0.0.1:40913"}',
    ],
)
def test_config_takes_peers_as_text_list_or_table(peers: str) -> None:
    config = toml(f'[raft]\npeers = {peers}\nself_id = "n1"')
    assert config.shown("raft.peers") == THREE_PEERS
    assert config.self_peer.address == "127.0.0.1:40912"
    assert config.self_number == 1


def test_config_takes_peer_hosts_with_dashes_and_ipv6() -> None:
    config = conf(
        "dLegerPeers=n0-my-host-1:40911;n1-[::1]:40912;n2-h:3\ndLegerSelfId=n0\nraftSecretFile=/s"
    )
    assert [(p.id, p.host, p.port) for p in config.raft.peers] == [
        ("n0", "my-host-1", 40911),
        ("n1", "::1", 40912),
        ("n2", "h", 3),
    ]
    assert config.raft.peers[1].address == "[::1]:40912"


def test_config_without_peers_is_a_group_of_one() -> None:
    config = load_config()
    assert config.shown("raft.peers") == "n0-127.0.0.1:20911"
    assert config.advertised_address == "127.0.0.1:10911"


def test_config_without_dledger_is_a_group_of_one() -> None:
    config = conf(f"enableDLegerCommitLog=false\ndLegerPeers={THREE_PEERS}\ndLegerSelfId=n2")
    assert config.shown("raft.peers") == "n2-127.0.0.1:40913"
    assert config.sources["raft.peers"] == "from raft.enable_dledger_commit_log"


@pytest.mark.parametrize(
    ("text", "bound", "advertised"),
    [
        ("", "127.0.0.1", "127.0.0.1"),
        ("brokerIP1=192.0.2.1", "0.0.0.0", "192.0.2.1"),
        ("dLegerPeers=n0-10.1.1.1:40911", "0.0.0.0", "10.1.1.1"),
        ("bindAddress=0.0.0.0", "0.0.0.0", "0.0.0.0"),
        ("bindAddress=10.1.1.2\nbrokerIP1=192.0.2.1", "10.1.1.2", "192.0.2.1"),
        (THREE.format("127.0.0.1"), "127.0.0.1", "127.0.0.1"),
        (THREE.format("[::1]"), "::1", "::1"),
        ("bindAddress=[::1]", "::1", "::1"),
        ("brokerIP1=[2001:db8::1]", "::", "2001:db8::1"),
        ("dLegerPeers=n0-[2001:db8::1]:40911", "::", "2001:db8::1"),
    ],
)
def test_config_derives_bind_and_advertised_host(text: str, bound: str, advertised: str) -> None:
    config = conf(text)
    assert (config.server.listen_host, config.broker.broker_ip1) == (bound, advertised)
    assert config.advertised_address == join_address(advertised, 10911)
    assert packed_address(config) == pack_host(advertised, 10911)


@pytest.mark.parametrize(
    ("text", "name", "group"),
    [
        ("", "DEFAULT_BROKER", "DEFAULT_BROKER"),
        ("brokerName=a", "a", "a"),
        ("dLegerGroup=g", "g", "g"),
        ("brokerName=a\ndLegerGroup=g", "a", "g"),
    ],
)
def test_config_derives_name_and_group_from_each_other(text: str, name: str, group: str) -> None:
    config = conf(text)
    assert (config.broker.broker_name, config.raft.group) == (name, group)


GUARDS: list[dict[str, object]] = [
    {"raft.secret_file": "/s"},
    {"raft.tls_cert_file": "c", "raft.tls_key_file": "k", "raft.tls_ca_file": "a"},
]


@pytest.mark.parametrize("host", ["10.0.0.1", "broker.example", "127.evil.example", "0.0.0.0"])
def test_config_refuses_unguarded_peers(host: str) -> None:
    text = THREE.format(host)
    with pytest.raises(ConfigError, match=r"dledger raft secret FILE") as raised:
        conf(text)
    assert str(raised.value).startswith("broker.conf:1: raft.peers = ")
    for guard in GUARDS:
        config = load_config([ConfigFile("broker.conf", text)], options=guard)
        assert config.has_guarded_peers
    assert conf(f"{text}\nraftSecretFile=/s").raft.secret_file == "/s"


def test_config_takes_peer_certificates_in_a_conf_file() -> None:
    files = "raftTlsCertFile=/c\nraftTlsKeyFile=/k\nraftTlsCaFile=/a"
    raft = conf(f"{THREE.format('10.0.0.1')}\n{files}").raft
    assert (raft.tls_cert_file, raft.tls_key_file, raft.tls_ca_file) == ("/c", "/k", "/a")


def test_config_refuses_one_unguarded_peer() -> None:
    with pytest.raises(ConfigError, match=r"that reaches 10\.0\.0\.2:2 could pass for a member"):
        conf("dLegerPeers=n0-127.0.0.1:1;n1-10.0.0.2:2;n2-127.0.0.1:3")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "[::1]"])
def test_config_takes_loopback_peers_without_a_secret(host: str) -> None:
    assert not conf(THREE.format(host)).has_guarded_peers


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "-ü-"])
def test_config_refuses_a_peer_host_that_is_none(host: str) -> None:
    with pytest.raises(ConfigError, match="no address that a member can be found at"):
        conf(f"dLegerPeers=n0-127.0.0.1:1;n1-{host}:2;n2-127.0.0.1:3")


def test_config_takes_a_single_member_without_warning() -> None:
    assert conf("brokerIP1=10.0.0.1").warnings == ()


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("", 10909),
        ("listenPort=30911", 30909),
        ("fastListenPort=10999", 10999),
        ("fastListenPort=0", 0),
        ("listenPort=0", 0),
        ("listenPort=2", 0),
    ],
)
def test_config_puts_the_vip_channel_two_ports_below(text: str, port: int) -> None:
    assert conf(text).fast_listen_port == port


def test_config_refuses_peer_tls_without_all_files() -> None:
    with pytest.raises(ConfigError, match="go together"):
        load_config(options={"raft.tls_cert_file": "c", "raft.tls_key_file": "k"})


@pytest.mark.parametrize(
    ("found", "taken"), [(["::1", "10.0.0.1"], "10.0.0.1"), (["2001:db8::1"], "2001:db8::1")]
)
async def test_broker_has_the_ipv4_address_of_its_name_or_ipv6(
    monkeypatch: pytest.MonkeyPatch, found: list[str], taken: str
) -> None:
    async def addresses(*_: object, **__: object) -> list[object]:
        return [(AF_INET6 if ":" in each else AF_INET, 0, 0, "", (each, 0)) for each in found]

    monkeypatch.setattr(trio.socket, "getaddrinfo", addresses)
    config = await broker_command._with_addresses(conf("brokerIP1=a.broker"))
    assert config.advertised_address == join_address(taken, 10911)
