"""Every setting of a broker: its table, name, type, default, RocketMQ key and what it is for.

The structs below are the only list. Files, the command line, ``-p`` and ``docs/configuration.md``
are all read off their fields. Names are RocketMQ's keys in snake_case where it has one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

CONSUME_QUEUE_UNIT_BYTES = 20
DEFAULT_DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
DEFAULT_NAMESRV_PORT = 9876
DEFAULT_LISTEN_PORT = 10911
DEFAULT_PEER_PORT = 20911
"""Below the ports that Linux gives to outgoing connections, 32768 to 60999."""
DEFAULT_METRICS_PORT = 5557


def _about(text: str, *rocketmq_keys: str, **limits: Any) -> Meta:
    return Meta(description=text, extra={"keys": rocketmq_keys}, **limits)


BrokerRole = Literal["SYNC_MASTER", "ASYNC_MASTER"]
FlushDiskType = Literal["SYNC_FLUSH", "ASYNC_FLUSH"]
TlsModeName = Literal["disabled", "permissive", "enforcing"]
MetricsExporterType = Literal["", "PROM", "DISABLE"]


class Peer(Struct, frozen=True):
    """One member of a broker group: its id and where its peers reach it."""

    id: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port`` of the peer connection."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.id}-{self.address}"


class BrokerTable(Struct, frozen=True, kw_only=True):
    """``[broker]``: who this broker is and what it offers."""

    cluster_name: Annotated[
        str, _about("Cluster this broker registers in.", "brokerClusterName", min_length=1)
    ] = "DefaultCluster"
    broker_name: Annotated[
        str,
        _about("Name of the broker group as clients see it; empty: `raft.group`.", "brokerName"),
    ] = ""
    broker_role: Annotated[
        BrokerRole,
        _about(
            "`SYNC_MASTER`: an acknowledgement means a majority. `ASYNC_MASTER`: the leader alone;"
            " a fail-over may lose the unreplicated tail. `SLAVE` is taken as `SYNC_MASTER` with a"
            " warning: roles are elected.",
            "brokerRole",
        ),
    ] = "SYNC_MASTER"
    broker_ip1: Annotated[
        str,
        _about(
            "Host that clients are told, apart from the bind address; empty: the bind address, or"
            " this node's host in `raft.peers`.",
            "brokerIP1",
        ),
    ] = ""
    advertised_port: Annotated[
        int,
        _about(
            "Port that clients are told, where it is not the one that is bound (behind a proxy, in"
            " a container); 0: `server.listen_port`.",
            ge=0,
            le=65_535,
        ),
    ] = 0
    namesrv_addr: Annotated[
        tuple[str, ...],
        _about("NameServers, `host:port;host:port`.", "namesrvAddr"),
    ] = (f"127.0.0.1:{DEFAULT_NAMESRV_PORT}",)
    broker_permission: Annotated[
        int, _about("Permission bits: 4 read, 2 write.", "brokerPermission", ge=0, le=15)
    ] = 6
    auto_create_topic_enable: Annotated[
        bool, _about("Create an unknown topic at the first send.", "autoCreateTopicEnable")
    ] = True
    auto_create_subscription_group: Annotated[
        bool,
        _about("Create an unknown consumer group at first use.", "autoCreateSubscriptionGroup"),
    ] = True
    default_topic_queue_nums: Annotated[
        int,
        _about("Queues of an auto-created topic, at most.", "defaultTopicQueueNums", ge=1, le=1024),
    ] = 8
    trace_topic_enable: Annotated[
        bool,
        _about("Have a topic for message trace, of one queue, from the start.", "traceTopicEnable"),
    ] = False
    msg_trace_topic_name: Annotated[str, _about("Its name.", "msgTraceTopicName", min_length=1)] = (
        "RMQ_SYS_TRACE_TOPIC"
    )
    slave_read_enable: Annotated[
        bool, _about("Followers answer pulls from what they applied.", "slaveReadEnable")
    ] = True
    long_polling_enable: Annotated[
        bool, _about("Hold a pull that finds nothing until it does.", "longPollingEnable")
    ] = True
    enable_property_filter: Annotated[
        bool,
        _about(
            "Filter with SQL92 expressions over properties; RocketMQ's default is `false`.",
            "enablePropertyFilter",
        ),
    ] = True
    filter_support_retry: Annotated[
        bool,
        _about(
            "Match retries against the expression of the topic they come from; RocketMQ's default"
            " is `false`.",
            "filterSupportRetry",
        ),
    ] = True
    short_polling_time_ms: Annotated[
        int,
        _about(
            "How long a pull is held without long polling.",
            "shortPollingTimeMills",
            ge=0,
            le=60_000,
        ),
    ] = 1_000
    flush_consumer_offset_interval_ms: Annotated[
        int,
        _about(
            "One-way consumer offset commits are proposed together at least this often.",
            "flushConsumerOffsetInterval",
            ge=10,
        ),
    ] = 1_000
    reject_transaction_message: Annotated[
        bool, _about("Refuse transactional messages.", "rejectTransactionMessage")
    ] = False
    store_reply_message_enable: Annotated[
        bool,
        _about(
            "Keep replies that requesters have got in the topic `<cluster>_REPLY_TOPIC`.",
            "storeReplyMessageEnable",
        ),
    ] = True
    transaction_timeout_ms: Annotated[
        int,
        _about(
            "How long a half message waits for its decision before its producers are asked.",
            "transactionTimeOut",
            ge=0,
        ),
    ] = 6_000
    transaction_check_interval_ms: Annotated[
        int,
        _about(
            "How long after that, and after each question, they are asked again.",
            "transactionCheckInterval",
            ge=100,
        ),
    ] = 30_000
    transaction_check_max: Annotated[
        int,
        _about(
            "Questions about one half message; after the last one it is given up and moved to"
            " `TRANS_CHECK_MAX_TIME_TOPIC`.",
            "transactionCheckMax",
            ge=1,
        ),
    ] = 15
    lock_lease_ms: Annotated[
        int,
        _about(
            "How long a queue stays locked for a client that does not renew it; RocketMQ's clients"
            " count on more than 30 s.",
            ge=1_000,
            le=3_600_000,
        ),
    ] = 60_000
    max_topics: Annotated[
        int,
        _about(
            "Topics, those of retries and dead letters included; one more is refused. Each stands"
            " in the tables of every member and in registrations.",
            ge=100,
        ),
    ] = 50_000
    max_groups: Annotated[
        int,
        _about("Consumer groups; one more is refused, or works with defaults.", ge=10),
    ] = 20_000
    max_group_topics: Annotated[
        int,
        _about(
            "Pairs of a consumer group and a topic with offsets of it; a commit that makes one more"
            " is refused. An offset of each queue stands in it.",
            ge=10,
        ),
    ] = 200_000
    max_topics_per_group: Annotated[
        int,
        _about("Of these, pairs of one consumer group.", ge=10),
    ] = 20_000
    max_clients: Annotated[
        int,
        _about(
            "Connected clients, each once for every producer or consumer group it is in; the"
            " heartbeat of one more is refused.",
            ge=10,
        ),
    ] = 100_000
    max_clients_per_group: Annotated[
        int,
        _about(
            "Of these, clients of one group: each of its clients is told of all.",
            ge=10,
        ),
    ] = 10_000
    max_topics_per_account: Annotated[
        int,
        _about(
            "With `acl_enable`: topics one account made that are there, as far as this leader saw"
            " it. Administrators are not counted.",
            ge=10,
        ),
    ] = 10_000
    max_groups_per_account: Annotated[int, _about("Consumer groups, likewise.", ge=10)] = 5_000
    max_group_topics_per_account: Annotated[
        int, _about("Pairs of a consumer group and a topic with offsets, likewise.", ge=10)
    ] = 50_000
    max_clients_per_account: Annotated[
        int, _about("Of `max_clients`, those connected as one account, likewise.", ge=10)
    ] = 25_000


class ServerTable(Struct, frozen=True, kw_only=True):
    """``[server]``: the port clients talk to and its limits."""

    listen_host: Annotated[
        str,
        _about(
            "Address to bind; empty: 127.0.0.1, or 0.0.0.0 when `broker_ip1` or this node's peer"
            " address is not a loopback one.",
            "bindAddress",
        ),
    ] = ""
    listen_port: Annotated[
        int, _about("Port for clients and NameServers.", "listenPort", ge=0, le=65_535)
    ] = DEFAULT_LISTEN_PORT
    fast_listen_port: Annotated[
        int,
        _about(
            "Port for old clients' VIP channel, which answers all requests but pulls; -1:"
            " `listen_port` - 2, 0: none. One that is taken is left out with a warning.",
            "fastListenPort",
            ge=-1,
            le=65_535,
        ),
    ] = -1
    max_connections: Annotated[
        int,
        _about(
            "Open client connections; for one more the idlest gives way, and where none is idle"
            " it is closed itself. At most half of the hard limit of open files.",
            ge=1,
        ),
    ] = 4_096
    reserved_connections: Annotated[
        int,
        _about(
            "Of `max_connections`, places that only administration may take when the others are"
            " in use; at most a quarter of them.",
            ge=0,
        ),
    ] = 32
    memory_budget_bytes: Annotated[
        int,
        _about(
            "Requests in work and unsent answers of all connections; beyond it requests are"
            " refused as busy, and who leaves most unread is closed. 0: a quarter of the memory"
            " that the process may use.",
            ge=0,
        ),
    ] = 0
    max_unfinished_bytes: Annotated[
        int,
        _about(
            "Frames of all connections of which a part has come; beyond it a large frame is read"
            " on later, and one that stalls is closed. At least a third more than the largest"
            " frame.",
            ge=MIB,
        ),
    ] = 32 * MIB
    max_in_flight_bytes: Annotated[
        int,
        _about(
            "Bodies of one connection's open requests; beyond it they are refused as busy, so that"
            " one client does not take all of `raft.max_pending_bytes`.",
            ge=64 * KIB,
        ),
    ] = 16 * MIB
    max_in_flight: Annotated[
        int,
        _about("Requests of one connection in work; beyond it they are refused as busy.", ge=1),
    ] = 4_096
    max_frame_bytes: Annotated[
        int, _about("Largest frame; a larger one closes the connection.", ge=64 * KIB)
    ] = 16 * MIB
    max_write_buffer_bytes: Annotated[
        int,
        _about(
            "Answers waiting for one connection; beyond it reading that connection pauses.",
            "writeBufferHighWaterMark",
            ge=64 * KIB,
        ),
    ] = 64 * MIB
    idle_timeout_s: Annotated[
        int,
        _about(
            "A connection silent for this long is closed.", "serverChannelMaxIdleTimeSeconds", ge=1
        ),
    ] = 120
    shutdown_timeout_ms: Annotated[
        int, _about("On SIGTERM, how long requests in work may take to end.", ge=0)
    ] = 5_000
    tls_mode: Annotated[
        TlsModeName,
        _about(
            "`disabled`, `permissive` (plain and TLS on one port) or `enforcing`.",
            "tls.server.mode",
        ),
    ] = "disabled"
    tls_cert_file: Annotated[str, _about("PEM certificate chain.", "tls.server.certPath")] = ""
    tls_key_file: Annotated[str, _about("PEM private key.", "tls.server.keyPath")] = ""
    tls_ca_file: Annotated[
        str,
        _about(
            "Authorities that clients' certificates must come from.", "tls.server.trustCertPath"
        ),
    ] = ""

    acl_enable: Annotated[
        bool,
        _about(
            "Every request must be signed by an account of `acl_file` that may do what it asks.",
            "aclEnable",
        ),
    ] = False
    acl_file: Annotated[
        str,
        _about(
            "Accounts: TOML, or RocketMQ's `plain_acl.yml`. A change of the file counts within a"
            " second; a broken one keeps the accounts there were."
        ),
    ] = ""
    open_admin: Annotated[
        bool,
        _about(
            "Without `acl_enable`: take requests that erase data or change members or settings"
            " from every machine, as RocketMQ does; off: from this machine alone.",
            "openAdmin",
        ),
    ] = False


class ClientTable(Struct, frozen=True, kw_only=True):
    """``[client]``: this broker as a client of the NameServers."""

    register_interval_ms: Annotated[
        int,
        _about("Heartbeat to every NameServer.", "registerNameServerPeriod", ge=1_000, le=60_000),
    ] = 30_000
    register_timeout_ms: Annotated[
        int,
        _about("Wait for one NameServer's answer.", "registerBrokerTimeoutMills", ge=100),
    ] = 6_000
    connect_timeout_ms: Annotated[
        int, _about("Wait for a connection.", "connectTimeoutMillis", ge=10)
    ] = 3_000
    address_server: Annotated[
        str,
        _about(
            "URL that lists the NameServers, read again every 120 s; empty: none.",
            "rmqAddressServerDomain",
        ),
    ] = ""
    credentials_file: Annotated[
        str,
        _about(
            "Who this broker is for NameServers that check it: a file with `access_key` and"
            " `secret_key`, or RocketMQ's `tools.yml`; empty: it does not sign."
        ),
    ] = ""
    tls_enable: Annotated[bool, _about("Talk TLS to NameServers.", "tls.enable", "useTLS")] = False
    tls_ca_file: Annotated[
        str,
        _about(
            "Authorities that servers' certificates must come from.", "tls.client.trustCertPath"
        ),
    ] = ""
    tls_cert_file: Annotated[str, _about("PEM certificate chain.", "tls.client.certPath")] = ""
    tls_key_file: Annotated[str, _about("PEM private key.", "tls.client.keyPath")] = ""


class StoreTable(Struct, frozen=True, kw_only=True):
    """``[store]``: the log on disk."""

    path_root_dir: Annotated[
        str,
        _about(
            "Data folder of this node; `~` is the home folder.", "storePathRootDir", min_length=1
        ),
    ] = "~/store"
    flush_disk_type: Annotated[
        FlushDiskType,
        _about(
            "`SYNC_FLUSH`: nothing is promised before it is on disk. `ASYNC_FLUSH`: every"
            " `flush_interval_ms`.",
            "flushDiskType",
        ),
    ] = "SYNC_FLUSH"
    flush_interval_ms: Annotated[
        int, _about("Flush interval of `ASYNC_FLUSH`.", "flushIntervalCommitLog", ge=1)
    ] = 500
    mapped_file_size_commit_log: Annotated[
        int,
        _about(
            "Bytes of one log segment.",
            "mappedFileSizeCommitLog",
            "mapedFileSizeCommitLog",
            ge=64 * KIB,
            le=2 * GIB,
        ),
    ] = GIB
    mapped_file_size_consume_queue: Annotated[
        int,
        _about(
            "Bytes of one consume queue file, a multiple of 20.",
            "mappedFileSizeConsumeQueue",
            "mapedFileSizeConsumeQueue",
            ge=CONSUME_QUEUE_UNIT_BYTES,
            multiple_of=CONSUME_QUEUE_UNIT_BYTES,
        ),
    ] = 6_000_000
    max_message_size: Annotated[
        int, _about("Largest message body in bytes.", "maxMessageSize", ge=1)
    ] = 4 * MIB
    message_delay_level: Annotated[
        str, _about("Delays of the levels 1, 2, …; units s m h d.", "messageDelayLevel")
    ] = DEFAULT_DELAY_LEVELS
    timer_wheel_enable: Annotated[
        bool,
        _about(
            "Take messages with a time of their own; off: such a send is refused.",
            "timerWheelEnable",
        ),
    ] = True
    timer_max_delay_sec: Annotated[
        int,
        _about(
            "Seconds that a message's time may be away. Retention keeps what waits.",
            "timerMaxDelaySec",
            ge=1,
            le=366 * 24 * 3600,
        ),
    ] = 3 * 24 * 3600
    timer_roll_window_slot: Annotated[
        int,
        _about(
            "Seconds after which a message that still waits is stored anew at the end of the log,"
            " so that old segments can go.",
            "timerRollWindowSlot",
            ge=60,
        ),
    ] = 2 * 24 * 3600
    timer_pending_max: Annotated[
        int,
        _about(
            "Messages with a time of their own that may wait; beyond it such a send is refused."
            " A leader needs 12 to 20 bytes of memory for each.",
            ge=1,
        ),
    ] = 10_000_000
    max_hash_slot_num: Annotated[
        int, _about("Slots of one key index file.", "maxHashSlotNum", ge=1)
    ] = 5_000_000
    max_index_num: Annotated[int, _about("Entries of one key index file.", "maxIndexNum", ge=2)] = (
        20_000_000
    )
    max_transfer_bytes_in_memory: Annotated[
        int,
        _about("Bytes of one pull from recent data.", "maxTransferBytesOnMessageInMemory", ge=1),
    ] = 256 * KIB
    max_transfer_count_in_memory: Annotated[
        int,
        _about("Messages of one pull from recent data.", "maxTransferCountOnMessageInMemory", ge=1),
    ] = 32
    max_transfer_bytes_in_disk: Annotated[
        int, _about("Bytes of one pull from old data.", "maxTransferBytesOnMessageInDisk", ge=1)
    ] = 64 * KIB
    max_transfer_count_in_disk: Annotated[
        int, _about("Messages of one pull from old data.", "maxTransferCountOnMessageInDisk", ge=1)
    ] = 8
    access_message_in_memory_max_ratio: Annotated[
        int,
        _about(
            "Part of the machine's memory, in percent, that recent messages are taken to be in;"
            " who reads further back is sent to a follower.",
            "accessMessageInMemoryMaxRatio",
            ge=0,
            le=100,
        ),
    ] = 40
    keep_bytes: Annotated[
        int,
        _about(
            "Bytes of the commit log that are kept at most, in whole segments; 0: no limit but"
            " time and disk.",
            ge=0,
        ),
    ] = 0
    scrub_bytes_per_s: Annotated[
        int,
        _about(
            "How fast the log is read again in search of damage; 0: all of it about once a day.",
            ge=0,
        ),
    ] = 0
    retention_interval_ms: Annotated[
        int, _about("How often old segments are looked for.", "cleanResourceInterval", ge=100)
    ] = 10_000
    delete_when: Annotated[
        tuple[int, ...],
        _about(
            "Hours of the day, in the machine's local time (`TZ`), for removing old segments while"
            " the disk is not full.",
            "deleteWhen",
        ),
    ] = (4,)
    disk_max_used_space_ratio: Annotated[
        int,
        _about(
            "Percent of the disk from which expired segments go at any hour.",
            "diskMaxUsedSpaceRatio",
            ge=10,
            le=95,
        ),
    ] = 75
    disk_space_clean_forcibly_ratio: Annotated[
        int,
        _about(
            "Percent of the disk from which the oldest segment goes although it has not expired,"
            " where `clean_file_forcibly_enable` allows it; `0.85` is 85.",
            "diskSpaceCleanForciblyRatio",
            ge=30,
            le=95,
        ),
    ] = 85
    clean_file_forcibly_enable: Annotated[
        bool,
        _about(
            "true: on a full disk of the leader the oldest segment of the whole group goes,"
            " although its messages have not expired and may be unread, one at a time. false: sends"
            " are refused instead; RocketMQ's default is `true`.",
            "cleanFileForciblyEnable",
        ),
    ] = False
    disk_space_warning_level_ratio: Annotated[
        int,
        _about(
            "Percent of the disk from which sends are refused, until there is room again; `0.90`"
            " is 90.",
            "diskSpaceWarningLevelRatio",
            ge=35,
            le=99,
        ),
    ] = 90
    file_reserved_time: Annotated[
        int,
        _about(
            "Hours that segments are kept, unless `keep_bytes` or `clean_file_forcibly_enable` says"
            " otherwise.",
            "fileReservedTime",
            ge=1,
        ),
    ] = 72


class RaftTable(Struct, frozen=True, kw_only=True):
    """``[raft]``: the group this node is a member of."""

    enable_dledger_commit_log: Annotated[
        bool,
        _about(
            "false: a group of this node alone, whatever `peers` says.", "enableDLegerCommitLog"
        ),
    ] = True
    group: Annotated[
        str,
        _about(
            "Name of the Raft group; empty: `broker.broker_name`, then `DEFAULT_BROKER`.",
            "dLegerGroup",
        ),
    ] = ""
    self_id: Annotated[
        str, _about("This node in `peers`, `n0` and so on.", "dLegerSelfId", min_length=1)
    ] = "n0"
    peers: Annotated[
        tuple[Peer, ...],
        _about(
            "All members, `n0-host:port;n1-host:port`; empty: this node alone on port 20911.",
            "dLegerPeers",
        ),
    ] = ()
    listen_port: Annotated[
        int,
        _about(
            "Port to bind for the other members, where it is not the one they are told (behind a"
            " proxy, in a container); 0: the one in `peers`.",
            ge=0,
            le=65_535,
        ),
    ] = 0
    secret_file: Annotated[
        str,
        _about(
            "A file of a secret that all members share, at least 16 bytes, as `dledger raft secret`"
            " makes one: who cannot prove that it knows it is no peer. Empty: none; then all peers"
            " must be on loopback, or have certificates.",
            "raftSecretFile",
        ),
    ] = ""
    tls_cert_file: Annotated[
        str,
        _about(
            "PEM certificate chain of this member; set, the members talk TLS and each must have"
            " one of `tls_ca_file`.",
            "raftTlsCertFile",
        ),
    ] = ""
    tls_key_file: Annotated[
        str, _about("PEM private key of `tls_cert_file`.", "raftTlsKeyFile")
    ] = ""
    tls_ca_file: Annotated[
        str, _about("Authorities that the members' certificates must come from.", "raftTlsCaFile")
    ] = ""
    election_timeout_ms: Annotated[
        int,
        _about(
            "Silence of the leader before a follower asks for votes; each node draws between"
            " this and twice this.",
            ge=50,
        ),
    ] = 800
    heartbeat_interval_ms: Annotated[int, _about("Heartbeat of the leader.", ge=5)] = 100
    window_bytes: Annotated[
        int, _about("Unacknowledged bytes on the way to one peer.", ge=64 * KIB)
    ] = 8 * MIB
    append_bytes: Annotated[
        int,
        _about(
            "Bytes of one append to a peer, at least one entry: large enough to catch up fast,"
            " small enough to share a link.",
            ge=4 * KIB,
        ),
    ] = MIB
    max_entry_bytes: Annotated[
        int, _about("Largest Raft entry: one group commit.", ge=64 * KIB)
    ] = 8 * MIB
    max_pending_bytes: Annotated[
        int,
        _about("Proposed and not yet committed; beyond it sends are refused as busy.", ge=64 * KIB),
    ] = 64 * MIB
    checkpoint_interval_ms: Annotated[
        int, _about("How often the state tables are saved to bound replay at start.", ge=10)
    ] = 3_000
    propose_timeout_ms: Annotated[
        int,
        _about(
            "Wait for a majority; beyond it the answer is `outcome=unknown`.",
            "syncFlushTimeout",
            ge=10,
        ),
    ] = 5_000


class MetricsTable(Struct, frozen=True, kw_only=True):
    """``[metrics]``: a page for Prometheus."""

    listen_port: Annotated[
        int,
        _about(
            "Port that answers `GET /metrics`; 0: none. One that is taken is left out with a"
            " warning.",
            "metricsPromExporterPort",
            ge=0,
            le=65_535,
        ),
    ] = 0
    listen_host: Annotated[
        str,
        _about(
            "Address to bind for it; empty: 127.0.0.1, where RocketMQ takes `brokerIP1`. Nobody is"
            " asked who he is there.",
            "metricsPromExporterHost",
        ),
    ] = "127.0.0.1"
    exporter_type: Annotated[
        MetricsExporterType,
        _about(
            "Empty: `listen_port` alone decides. `PROM`: without a port it is 5557. `DISABLE`: no"
            " page, whatever the port. `OTLP_GRPC` and `LOG` are not built: taken as `DISABLE`"
            " with a warning.",
            "metricsExporterType",
        ),
    ] = ""


TABLES: dict[str, type[Struct]] = {
    "broker": BrokerTable,
    "server": ServerTable,
    "client": ClientTable,
    "store": StoreTable,
    "raft": RaftTable,
    "metrics": MetricsTable,
}


class Setting(Struct, frozen=True, kw_only=True):
    """One setting, as files and documentation see it."""

    path: str
    type: Any
    default: Any
    about: str
    keys: tuple[str, ...]

    @property
    def table(self) -> str:
        """Name of the TOML table."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Name inside the table."""
        return self.path.partition(".")[2]


def _settings() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for table, struct in TABLES.items():
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            annotated = hints[field.name]
            meta: Meta = get_args(annotated)[1]
            path = f"{table}.{field.name}"
            found[path] = Setting(
                path=path,
                type=annotated,
                default=field.default,
                about=meta.description or "",
                keys=tuple((meta.extra or {})["keys"]),
            )
    return found


SETTINGS: dict[str, Setting] = _settings()
"""Path ``table.name`` to setting, in the order of the tables."""

ROCKETMQ_KEYS: dict[str, str] = {
    key: setting.path for setting in SETTINGS.values() for key in setting.keys
}
"""RocketMQ key to path."""
