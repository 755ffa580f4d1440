"""Configuration of a broker's names, peers and addresses, and what guards them."""

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


# -- configuration with mistakes: each is one line with its place


SIX_PEERS = ";".join(f"n{number}-localhost:{number + 1}" for number in range(6))


HINT = "('# {}' is taken as part of the value: give a comment a line of its own)"


@pytest.mark.parametrize(
    ("text", "comment"),
    [
        ("brokerId=0 # 0 means master", "0 means master"),
        ("brokerRole=ASYNC_MASTER  # or SYNC_MASTER", "or SYNC_MASTER"),
        ("listenPort=10911\t# of clients", "of clients"),
        ("brokerName=broker-a # the first", "the first"),
        ("rejectPullConsumerEnable=false # default", "default"),
        ("minInSyncReplicas=1 # default", "default"),
    ],
)
def test_config_hints_at_a_comment_behind_a_value(text: str, comment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        conf(text)
    assert HINT.format(comment) in str(raised.value)


def test_config_warns_of_a_comment_behind_any_text() -> None:
    config = conf("storePathRootDir=/data # here")
    assert config.store.path_root_dir == "/data # here"
    (warning,) = config.warnings
    assert warning.startswith("broker.conf: storePathRootDir = '/data # here'")
    assert warning.endswith(HINT.format("here"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listenPrt=1", "broker.conf:1: unknown setting listenPrt (did you mean listenPort?)"),
        ("zzz=1", "broker.conf:1: unknown setting zzz"),
        ("listenPort", "broker.conf:1: listenPort = '': expected a whole number"),
        ("listenPort=ten", "broker.conf:1: listenPort = 'ten': expected a whole number"),
        (
            "listenPort=65536",
            "broker.conf:1: listenPort = '65536': expected a whole number <= 65535",
        ),
        (
            "autoCreateTopicEnable=maybe",
            "broker.conf:1: autoCreateTopicEnable = 'maybe': expected true or false",
        ),
        ("flushDiskType=SYNC", "broker.conf:1: flushDiskType = 'SYNC': Invalid enum value 'SYNC'"),
        ("brokerRole=MASTER", "broker.conf:1: brokerRole = 'MASTER': Invalid enum value 'MASTER'"),
        ("deleteWhen=24", "broker.conf:1: deleteWhen = '24': '24' is not an hour from 00 to 23"),
        (
            "namesrvAddr=::1",
            "broker.conf:1: namesrvAddr = '::1': '::1' is not host:port or [IPv6]:port",
        ),
        (
            "messageDelayLevel=1s 5x",
            "broker.conf:1: messageDelayLevel = '1s 5x': '5x' is not a delay such as 10s, 5m, 2h"
            " or 1d",
        ),
        (
            "dLegerPeers=n0:40911",
            "broker.conf:1: dLegerPeers = 'n0:40911': 'n0:40911' is not a peer such as"
            " n0-127.0.0.1:20911",
        ),
        (
            f"dLegerPeers={THREE_PEERS}\ndLegerSelfId=n7",
            "broker.conf:2: raft.self_id = n7: not one of the peers n0, n1, n2",
        ),
        (
            "dLegerPeers=n0-localhost:1;n0-localhost:2",
            "broker.conf:1: raft.peers = n0-localhost:1;n0-localhost:2: an id stands there twice",
        ),
        (
            "dLegerPeers=n0-localhost:1;n1-localhost:1",
            "broker.conf:1: raft.peers = n0-localhost:1;n1-localhost:1: an address stands there"
            " twice",
        ),
        (
            f"dLegerPeers={SIX_PEERS}",
            f"broker.conf:1: raft.peers = {SIX_PEERS}: a group has at most 5 members",
        ),
        (
            "listenPort=20911",
            "broker.conf:1: server.listen_port = 20911: a port of this host in raft.peers",
        ),
        (
            "mappedFileSizeConsumeQueue=30",
            "broker.conf:1: mappedFileSizeConsumeQueue = '30': expected a whole number that's a"
            " multiple of 20",
        ),
        (
            "maxMessageSize=16777216",
            "broker.conf:1: store.max_message_size = 16777216: an entry of raft.max_entry_bytes ="
            " 8388608 must hold the largest message and 40960 bytes more",
        ),
        (
            "maxTransferBytesOnMessageInMemory=13000000",
            "broker.conf:1: store.max_transfer_bytes_in_memory = 13000000: an answer may hold"
            " 13000000 bytes and one message of store.max_message_size = 4194304; brokers and"
            " clients take frames of 16777216 bytes",
        ),
        (
            "brokerName=a/b",
            "broker.conf:1: broker.broker_name = a/b: letters, digits, %, |, -, _ and . only",
        ),
        (
            "tls.server.mode=enforcing",
            "broker.conf:1: server.tls_mode = enforcing: needs server.tls_cert_file and"
            " server.tls_key_file",
        ),
        ("a=\\u12", "broker.conf: line 1: bad \\u escape '12'"),
    ],
)
def test_config_mistake_in_broker_conf_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        conf(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[borker]\n", "n0.toml:1: unknown setting [borker] (did you mean [broker]?)"),
        ("broker = 1", "n0.toml:1: broker: expected a table [broker]"),
        (
            "[server]\nlisten_prt = 1",
            "n0.toml:2: unknown setting server.listen_prt (did you mean server.listen_port?)",
        ),
        (
            "[server]\nlisten_port = '1x'",
            "n0.toml:2: server.listen_port = '1x': expected a whole number",
        ),
        (
            "[server]\nlisten_port = true",
            "n0.toml:2: server.listen_port = True: expected a whole number, got bool",
        ),
        (
            "[server]\nlisten_port = 1.5",
            "n0.toml:2: server.listen_port = 1.5: expected a whole number",
        ),
        (
            "[raft]\nheartbeat_interval_ms = 400",
            "n0.toml:2: raft.heartbeat_interval_ms = 400: at most a third of"
            " raft.election_timeout_ms = 800",
        ),
        (
            "[raft]\nmax_pending_bytes = '1MiB'",
            "n0.toml:2: raft.max_pending_bytes = 1048576: less than one entry of"
            " raft.max_entry_bytes",
        ),
        (
            '[broker]\nleader_hook = "ip \'addr"',
            'n0.toml:2: broker.leader_hook = "ip \'addr": No closing quotation',
        ),
    ],
)
def test_config_mistake_in_toml_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        toml(text)
    assert str(caught.value) == message


def test_config_names_all_mistakes_with_their_lines() -> None:
    first = "[server]\nlisten_prt = 1\n\n[raft]\nself_id = 'n7'\nheartbeat_interval_ms = 'x'\n"
    second = "# as it was\nbrokerName=b\nflushDiskType=SYNC\n\nzzz=1\n"
    with pytest.raises(ConfigError) as caught:
        load_config(
            [ConfigFile("a/n0.toml", first), ConfigFile("broker.conf", second)],
            environment={"NAMESRV_ADDR": "ns"},
            options={"store.path": "/data"},
        )
    assert [line.partition(": ")[0::2] for line in str(caught.value).splitlines()] == [
        ("a/n0.toml:2", "unknown setting server.listen_prt (did you mean server.listen_port?)"),
        ("a/n0.toml:6", "raft.heartbeat_interval_ms = 'x': expected a whole number"),
        ("broker.conf:3", "flushDiskType = 'SYNC': Invalid enum value 'SYNC'"),
        ("broker.conf:5", "unknown setting zzz"),
        ("environment NAMESRV_ADDR", "NAMESRV_ADDR = 'ns': 'ns' is not host:port or [IPv6]:port"),
        ("command line", "unknown setting store.path (did you mean store.path_root_dir?)"),
    ]


def test_config_names_all_contradictions() -> None:
    with pytest.raises(ConfigError) as caught:
        conf(
            f"brokerName=a/b\ntls.server.mode=enforcing\ndLegerSelfId=n7\n"
            f"dLegerPeers={THREE_PEERS}\naclEnable=true\ninSyncReplicas=3\n"
        )
    places = [line.partition(": ")[0] for line in str(caught.value).splitlines()]
    assert places == [f"broker.conf:{number}" for number in (6, 3, 1, 2, 5)]


def test_config_names_a_file_that_is_not_toml() -> None:
    with pytest.raises(ConfigError, match=r"^n0\.toml: not TOML: Expected .*end of document"):
        toml("[broker")
