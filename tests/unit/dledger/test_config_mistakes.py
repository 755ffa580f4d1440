"""Configuration with mistakes: each is one line with its place."""

from __future__ import annotations

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.settings.config import load_config
from dledger.settings.schema import ConfigFile
from tests.harness.configs import THREE_PEERS, conf, toml

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


def test_config_refuses_an_unknown_option() -> None:
    with pytest.raises(ConfigError, match=r"^command line: unknown setting store\.path"):
        load_config(options={"store.path": "/x"})
