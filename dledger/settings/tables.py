"""Every setting of a broker: its table, name, type, default, RocketMQ key and what it is for.

The structs below are the only list. Files, the command line, ``-p`` and
``docs/reference/configuration.md`` are all read off their fields. Names are RocketMQ's keys in
snake_case where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dledger.settings.schema import parse_address, parse_addresses, parse_host, parse_words, setting
from dledger.settings.text import (
    Peer,
    delay_text,
    parse_delay_levels,
    parse_exporter,
    parse_hours,
    parse_peers,
    percent,
    show_hours,
)

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


BrokerRole = Literal["SYNC_MASTER", "ASYNC_MASTER"]
FlushDiskType = Literal["SYNC_FLUSH", "ASYNC_FLUSH"]
TlsModeName = Literal["disabled", "permissive", "enforcing"]
MetricsExporterType = Literal["", "PROM", "DISABLE"]


@dataclass(kw_only=True, slots=True)
class BrokerTable:
    """``[broker]``: identity of this broker and what it offers."""

    cluster_name: str = setting(
        "DefaultCluster", "Cluster this broker registers in.", "brokerClusterName", min_length=1
    )
    broker_name: str = setting(
        "", "Name of the broker group as clients see it; empty: `raft.group`.", "brokerName"
    )
    broker_role: BrokerRole = setting(
        "SYNC_MASTER",
        "`SYNC_MASTER`: an acknowledgement means a majority. `ASYNC_MASTER`: the leader alone;"
        " a fail-over may lose the unreplicated tail. `SLAVE` is taken as `SYNC_MASTER` with a"
        " warning: roles are elected.",
        "brokerRole",
    )
    broker_ip1: str = setting(
        "",
        "Host that clients get, apart from the bind address; empty: the bind address, or"
        " this node's host in `raft.peers`. Of a name, its IPv4 address, else that of IPv6.",
        "brokerIP1",
        parse=parse_host,
    )
    advertised_port: int = setting(
        0,
        "Port that clients get, where it is not the one that is bound (behind a proxy, in"
        " a container); 0: `server.listen_port`.",
        within=(0, 65_535),
    )
    leader_address: str = setting(
        "",
        "`host:port` that NameServers give to clients as the leader's, the same on each member: of"
        " a load balancer that asks `GET /leader`, or one that moves with the leadership; empty:"
        " the leader's own.",
        parse=parse_address,
    )
    leader_address_listen: bool = setting(
        False,
        "The member that leads listens at `leader_address` by itself, beside its own port. The"
        " address is one of its machine, or a hook or another program adds it.",
    )
    leader_hook: str = setting(
        "",
        "Command that moves `leader_address`; it gets `gain` or `loss` and the address as"
        " arguments: `gain` when this member begins to lead, `loss` when it ends, and at each"
        " start. A loss that fails ends the member.",
        parse=parse_words,
    )
    leader_hook_timeout_ms: int = setting(
        2_000, "What `leader_hook` may take; then it is killed and has failed.", within=(1, 60_000)
    )
    namesrv_addr: tuple[str, ...] = setting(
        (f"127.0.0.1:{DEFAULT_NAMESRV_PORT}",),
        "NameServers, `host:port;host:port`.",
        "namesrvAddr",
        parse=parse_addresses,
    )
    broker_permission: int = setting(
        6,
        "Permission bits: 4 read, 2 write.",
        "brokerPermission",
        within=(0, 15),
        live="sends and pulls are refused without their bit",
    )
    auto_create_topic_enable: bool = setting(
        True,
        "Create an unknown topic at the first send.",
        "autoCreateTopicEnable",
        live="unknown topics are refused, or made again; only a broker started with it turns it on",
    )
    auto_create_subscription_group: bool = setting(
        True,
        "Create an unknown consumer group at first use.",
        "autoCreateSubscriptionGroup",
        live="unknown groups are refused, or made again",
    )
    default_topic_queue_nums: int = setting(
        8, "Queues of an auto-created topic, at most.", "defaultTopicQueueNums", within=(1, 1024)
    )
    trace_topic_enable: bool = setting(
        False, "Have a topic for message trace, of one queue, from the start.", "traceTopicEnable"
    )
    msg_trace_topic_name: str = setting(
        "RMQ_SYS_TRACE_TOPIC", "Its name.", "msgTraceTopicName", min_length=1
    )
    slave_read_enable: bool = setting(
        True,
        "Followers answer pulls from what they applied.",
        "slaveReadEnable",
        live="the next pull",
    )
    long_polling_enable: bool = setting(
        True,
        "Hold a pull that finds nothing until it does.",
        "longPollingEnable",
        live="the next pull",
    )
    enable_property_filter: bool = setting(
        True,
        "Filter with SQL92 expressions over properties; RocketMQ's default is `false`.",
        "enablePropertyFilter",
        live="the next pull or heartbeat",
    )
    filter_support_retry: bool = setting(
        True,
        "Match retries against the expression of the topic they come from; RocketMQ's default"
        " is `false`.",
        "filterSupportRetry",
        live="the next pull or heartbeat",
    )
    short_polling_time_ms: int = setting(
        1_000,
        "How long a pull is held without long polling.",
        "shortPollingTimeMills",
        within=(0, 60_000),
        live="the next pull",
    )
    flush_consumer_offset_interval_ms: int = setting(
        1_000,
        "One-way consumer offset commits are proposed together at least this often.",
        "flushConsumerOffsetInterval",
        ge=10,
        live="after the pause that runs now",
    )
    reject_transaction_message: bool = setting(
        False,
        "Refuse transactional messages.",
        "rejectTransactionMessage",
        live="the next half message",
    )
    store_reply_message_enable: bool = setting(
        True,
        "Keep replies that requesters have got in the topic `<cluster>_REPLY_TOPIC`.",
        "storeReplyMessageEnable",
        live="the next reply",
    )
    transaction_timeout_ms: int = setting(
        6_000,
        "How long a half message waits for its decision before its producers are asked.",
        "transactionTimeOut",
        ge=0,
        live="the next look at a half message",
    )
    transaction_check_interval_ms: int = setting(
        30_000,
        "How long after that, and after each question, they are asked again.",
        "transactionCheckInterval",
        ge=100,
        live="the next look at a half message",
    )
    transaction_check_max: int = setting(
        15,
        "Questions about one half message; after the last one it is given up and moved to"
        " `TRANS_CHECK_MAX_TIME_TOPIC`.",
        "transactionCheckMax",
        ge=1,
        live="the next look at a half message",
    )
    lock_lease_ms: int = setting(
        60_000,
        "How long a queue stays locked for a client that does not renew it; RocketMQ's clients"
        " count on more than 30 s.",
        within=(1_000, 3_600_000),
    )
    max_topics: int = setting(
        50_000,
        "Topics, those of retries and dead letters included; one more is refused. Each stands"
        " in the tables of every member and in registrations.",
        ge=100,
    )
    max_groups: int = setting(
        20_000, "Consumer groups; one more is refused, or works with defaults.", ge=10
    )
    max_group_topics: int = setting(
        200_000,
        "Pairs of a consumer group and a topic with offsets of it; a commit that makes one more"
        " is refused. An offset of each queue stands in it.",
        ge=10,
    )
    max_topics_per_group: int = setting(20_000, "Of these, pairs of one consumer group.", ge=10)
    max_clients: int = setting(
        100_000,
        "Connected clients, each once for every producer or consumer group it is in; the"
        " heartbeat of one more is refused.",
        ge=10,
    )
    max_clients_per_group: int = setting(
        10_000, "Of these, clients of one group: each of its clients is notified of all.", ge=10
    )
    max_topics_per_account: int = setting(
        10_000,
        "With `acl_enable`: topics one account made that are there, as far as this leader saw"
        " it. Administrators are not counted.",
        ge=10,
    )
    max_groups_per_account: int = setting(5_000, "Consumer groups, likewise.", ge=10)
    max_group_topics_per_account: int = setting(
        50_000, "Pairs of a consumer group and a topic with offsets, likewise.", ge=10
    )
    max_clients_per_account: int = setting(
        25_000, "Of `max_clients`, those connected as one account, likewise.", ge=10
    )


@dataclass(kw_only=True, slots=True)
class ServerTable:
    """``[server]``: the port clients talk to and its limits."""

    listen_host: str = setting(
        "",
        "Address to bind; empty: a loopback one, or all (`0.0.0.0`, for IPv6 `::`) when"
        " `broker_ip1` or this node's peer address is not a loopback one.",
        "bindAddress",
        parse=parse_host,
    )
    listen_port: int = setting(
        DEFAULT_LISTEN_PORT, "Port for clients and NameServers.", "listenPort", within=(0, 65_535)
    )
    fast_listen_port: int = setting(
        -1,
        "Port for old clients' VIP channel, which answers all requests but pulls; -1:"
        " `listen_port` - 2, 0: none. One that is taken is left out with a warning.",
        "fastListenPort",
        within=(-1, 65_535),
    )
    max_connections: int = setting(
        4_096,
        "Open client connections; for one more the idlest gives way, and where none is idle"
        " it is closed itself. At most half of the hard limit of open files.",
        ge=1,
    )
    reserved_connections: int = setting(
        32,
        "Of `max_connections`, places that only administration may take when the others are"
        " in use; at most a quarter of them.",
        ge=0,
    )
    memory_budget_bytes: int = setting(
        0,
        "Requests in work and unsent answers of all connections; beyond it requests are"
        " refused as busy, and the connection that leaves most unread is closed. 0: a"
        " quarter of the memory that the process may use.",
        ge=0,
    )
    max_unfinished_bytes: int = setting(
        32 * MIB,
        "Frames of all connections of which a part has come; beyond it a large frame is read on"
        " later, and one that stalls is closed. At least a third more than the largest frame.",
        ge=MIB,
    )
    max_in_flight_bytes: int = setting(
        16 * MIB,
        "Bodies of one connection's open requests; beyond it they are refused as busy, so that"
        " one client does not take all of `raft.max_pending_bytes`.",
        ge=64 * KIB,
    )
    max_in_flight: int = setting(
        4_096, "Requests of one connection in work; beyond it they are refused as busy.", ge=1
    )
    max_frame_bytes: int = setting(
        16 * MIB, "Largest frame; a larger one closes the connection.", ge=64 * KIB
    )
    max_write_buffer_bytes: int = setting(
        64 * MIB,
        "Answers waiting for one connection; beyond it reading that connection pauses.",
        "writeBufferHighWaterMark",
        ge=64 * KIB,
    )
    idle_timeout_s: int = setting(
        120, "A connection silent for this long is closed.", "serverChannelMaxIdleTimeSeconds", ge=1
    )
    shutdown_timeout_ms: int = setting(
        5_000, "On SIGTERM, how long requests in work may take to end.", ge=0, live="the next stop"
    )
    drain_timeout_ms: int = setting(
        30_000,
        "On SIGTERM, how long a member serves clients of RocketMQ that are still connected, and"
        " carries their requests to the leader; they read their routes every 30 seconds.",
        ge=0,
        live="the next stop",
    )
    tls_mode: TlsModeName = setting(
        "disabled",
        "`disabled`, `permissive` (plain and TLS on one port) or `enforcing`.",
        "tls.server.mode",
    )
    tls_cert_file: str = setting("", "PEM certificate chain.", "tls.server.certPath")
    tls_key_file: str = setting("", "PEM private key.", "tls.server.keyPath")
    tls_ca_file: str = setting(
        "", "Authorities that clients' certificates must come from.", "tls.server.trustCertPath"
    )

    acl_enable: bool = setting(
        False,
        "Every request must be signed by an account of `acl_file` that may do what it asks.",
        "aclEnable",
    )
    acl_file: str = setting(
        "",
        "Accounts: TOML, or RocketMQ's `plain_acl.yml`. A change of the file counts within a"
        " second; a broken one keeps the accounts there were.",
    )
    open_admin: bool = setting(
        False,
        "Without `acl_enable`: take requests that erase data or change members or settings"
        " from every machine, as RocketMQ does; off: from this machine alone.",
        "openAdmin",
    )


@dataclass(kw_only=True, slots=True)
class ClientTable:
    """``[client]``: this broker as a client of the NameServers."""

    register_interval_ms: int = setting(
        30_000,
        "Heartbeat to every NameServer.",
        "registerNameServerPeriod",
        within=(1_000, 60_000),
        live="after the pause that runs now",
    )
    register_timeout_ms: int = setting(
        6_000,
        "Wait for one NameServer's answer.",
        "registerBrokerTimeoutMills",
        ge=100,
        live="after the pause that runs now",
    )
    connect_timeout_ms: int = setting(
        3_000, "Wait for a connection.", "connectTimeoutMillis", ge=10
    )
    address_server: str = setting(
        "",
        "URL that lists the NameServers, read again every 120 s; empty: none.",
        "rmqAddressServerDomain",
    )
    credentials_file: str = setting(
        "",
        "Account of this broker for NameServers that check it: a file with `access_key` and"
        " `secret_key`, or RocketMQ's `tools.yml`; empty: it does not sign.",
    )
    tls_enable: bool = setting(False, "Talk TLS to NameServers.", "tls.enable", "useTLS")
    tls_ca_file: str = setting(
        "", "Authorities that servers' certificates must come from.", "tls.client.trustCertPath"
    )
    tls_cert_file: str = setting("", "PEM certificate chain.", "tls.client.certPath")
    tls_key_file: str = setting("", "PEM private key.", "tls.client.keyPath")


@dataclass(kw_only=True, slots=True)
class StoreTable:
    """``[store]``: the log on disk."""

    path_root_dir: str = setting(
        "~/store",
        "Data folder of this node; `~` is the home folder.",
        "storePathRootDir",
        min_length=1,
    )
    flush_disk_type: FlushDiskType = setting(
        "SYNC_FLUSH",
        "`SYNC_FLUSH`: nothing is acknowledged before it is on disk. `ASYNC_FLUSH`: every"
        " `flush_interval_ms`.",
        "flushDiskType",
    )
    flush_interval_ms: int = setting(
        500, "Flush interval of `ASYNC_FLUSH`.", "flushIntervalCommitLog", ge=1
    )
    mapped_file_size_commit_log: int = setting(
        GIB,
        "Bytes of one log segment. Where it is not set, a store keeps those it was made with.",
        "mappedFileSizeCommitLog",
        "mapedFileSizeCommitLog",
        within=(64 * KIB, 2 * GIB),
    )
    mapped_file_size_consume_queue: int = setting(
        6_000_000,
        "Bytes of one consume queue file, a multiple of 20.",
        "mappedFileSizeConsumeQueue",
        "mapedFileSizeConsumeQueue",
        ge=CONSUME_QUEUE_UNIT_BYTES,
        multiple_of=CONSUME_QUEUE_UNIT_BYTES,
    )
    max_message_size: int = setting(
        4 * MIB,
        "Largest message body in bytes.",
        "maxMessageSize",
        ge=1,
        live="the next send; at most what an entry holds",
    )
    message_delay_level: str = setting(
        DEFAULT_DELAY_LEVELS,
        "Delays of the levels 1, 2, …; units s m h d.",
        "messageDelayLevel",
        parse=delay_text,
    )
    timer_wheel_enable: bool = setting(
        True,
        "Take messages with a time of their own; off: such a send is refused.",
        "timerWheelEnable",
    )
    timer_max_delay_sec: int = setting(
        3 * 24 * 3600,
        "Seconds that a message's time may be away. Retention keeps what waits.",
        "timerMaxDelaySec",
        within=(1, 366 * 24 * 3600),
    )
    timer_roll_window_slot: int = setting(
        2 * 24 * 3600,
        "Seconds after which a message that still waits is stored again at the end of the log,"
        " so that old segments can go.",
        "timerRollWindowSlot",
        ge=60,
    )
    timer_pending_max: int = setting(
        10_000_000,
        "Messages with a time of their own that may wait; beyond it such a send is refused."
        " A leader needs 12 to 20 bytes of memory for each.",
        ge=1,
    )
    max_transfer_bytes_in_memory: int = setting(
        256 * KIB,
        "Bytes of one pull from recent data.",
        "maxTransferBytesOnMessageInMemory",
        ge=1,
        live="the next pull",
    )
    max_transfer_count_in_memory: int = setting(
        32,
        "Messages of one pull from recent data.",
        "maxTransferCountOnMessageInMemory",
        ge=1,
        live="the next pull",
    )
    max_transfer_bytes_in_disk: int = setting(
        64 * KIB,
        "Bytes of one pull from old data.",
        "maxTransferBytesOnMessageInDisk",
        ge=1,
        live="the next pull",
    )
    max_transfer_count_in_disk: int = setting(
        8,
        "Messages of one pull from old data.",
        "maxTransferCountOnMessageInDisk",
        ge=1,
        live="the next pull",
    )
    access_message_in_memory_max_ratio: int = setting(
        40,
        "Part of the machine's memory, in percent, that recent messages are taken to be in;"
        " a reader further back is sent to a follower.",
        "accessMessageInMemoryMaxRatio",
        within=(0, 100),
    )
    keep_bytes: int = setting(
        0,
        "Bytes of the commit log that are kept at most, in whole segments; 0: no limit but"
        " time and disk.",
        ge=0,
        live="the next look for old segments",
    )
    scrub_bytes_per_s: int = setting(
        0,
        "How fast the log is read again in search of damage; 0: all of it about once a day.",
        ge=0,
    )
    retention_interval_ms: int = setting(
        10_000,
        "How often old segments are looked for.",
        "cleanResourceInterval",
        ge=100,
        live="after the pause that runs now",
    )
    delete_when: tuple[int, ...] = setting(
        (4,),
        "Hours of the day, in the machine's local time (`TZ`), for removing old segments while"
        " the disk is not full.",
        "deleteWhen",
        parse=parse_hours,
        show=show_hours,
        live="the next look for old segments",
    )
    disk_max_used_space_ratio: int = setting(
        75,
        "Percent of the disk from which expired segments go at any hour.",
        "diskMaxUsedSpaceRatio",
        within=(10, 95),
        parse=percent,
        live="the next look for old segments",
    )
    disk_space_clean_forcibly_ratio: int = setting(
        85,
        "Percent of the disk from which the oldest segment goes although it has not expired,"
        " where `clean_file_forcibly_enable` allows it; `0.85` is 85.",
        "diskSpaceCleanForciblyRatio",
        within=(30, 95),
        parse=percent,
        live="the next look for old segments",
    )
    clean_file_forcibly_enable: bool = setting(
        False,
        "true: on a full disk of the leader the oldest segment of the whole group goes,"
        " although its messages have not expired and may be unread, one at a time. false: sends"
        " are refused instead; RocketMQ's default is `true`.",
        "cleanFileForciblyEnable",
        live="the next look for old segments",
    )
    disk_space_warning_level_ratio: int = setting(
        90,
        "Percent of the disk from which sends are refused, until there is space again; `0.90`"
        " is 90.",
        "diskSpaceWarningLevelRatio",
        within=(35, 99),
        parse=percent,
        live="the next send",
    )
    file_reserved_time: int = setting(
        72,
        "Hours that segments are kept, unless `keep_bytes` or `clean_file_forcibly_enable` sets"
        " another limit.",
        "fileReservedTime",
        ge=1,
        live="the next look for old segments",
    )

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Delay of level 1, 2, …"""
        return parse_delay_levels(self.message_delay_level)

    @property
    def sync_flush(self) -> bool:
        """Nothing is acknowledged before it is on disk."""
        return self.flush_disk_type == "SYNC_FLUSH"


@dataclass(kw_only=True, slots=True)
class RaftTable:
    """``[raft]``: the group this node is a member of."""

    enable_dledger_commit_log: bool = setting(
        True, "false: a group of this node alone, whatever `peers` has.", "enableDLegerCommitLog"
    )
    group: str = setting(
        "",
        "Name of the Raft group; empty: `broker.broker_name`, then `DEFAULT_BROKER`.",
        "dLegerGroup",
    )
    self_id: str = setting(
        "n0", "This node in `peers`, `n0` and so on.", "dLegerSelfId", min_length=1
    )
    peers: tuple[Peer, ...] = setting(
        (),
        "All members, `n0-host:port;n1-host:port`; empty: this node alone on port 20911.",
        "dLegerPeers",
        parse=parse_peers,
    )
    listen_port: int = setting(
        0,
        "Port to bind for the other members, where it is not the one they get (behind a"
        " proxy, in a container); 0: the one in `peers`.",
        within=(0, 65_535),
    )
    secret_file: str = setting(
        "",
        "A file of a secret that all members share, at least 16 bytes, as `dledger raft secret`"
        " makes one: a process that cannot prove that it knows it is no peer. Empty: none; then"
        " all peers must be on loopback, or have certificates.",
        "raftSecretFile",
    )
    tls_cert_file: str = setting(
        "",
        "PEM certificate chain of this member; set, the members talk TLS and each must have"
        " one of `tls_ca_file`.",
        "raftTlsCertFile",
    )
    tls_key_file: str = setting("", "PEM private key of `tls_cert_file`.", "raftTlsKeyFile")
    tls_ca_file: str = setting(
        "", "Authorities that the members' certificates must come from.", "raftTlsCaFile"
    )
    election_timeout_ms: int = setting(
        800,
        "Silence of the leader before a follower asks for votes; each node draws between"
        " this and twice this.",
        ge=50,
    )
    heartbeat_interval_ms: int = setting(100, "Heartbeat of the leader.", ge=5)
    window_bytes: int = setting(
        8 * MIB, "Unacknowledged bytes on the way to one peer.", ge=64 * KIB
    )
    append_bytes: int = setting(
        MIB,
        "Bytes of one append to a peer, at least one entry: large enough to catch up fast,"
        " small enough to share a link.",
        ge=4 * KIB,
    )
    max_entry_bytes: int = setting(8 * MIB, "Largest Raft entry: one group commit.", ge=64 * KIB)
    max_pending_bytes: int = setting(
        64 * MIB,
        "Proposed and not yet committed; beyond it sends are refused as busy.",
        ge=64 * KIB,
        live="the next send",
    )
    checkpoint_interval_ms: int = setting(
        3_000,
        "How often the state tables are saved to bound replay at start.",
        ge=10,
        live="after the pause that runs now",
    )
    propose_timeout_ms: int = setting(
        5_000,
        "Wait for a majority; beyond it the answer is `outcome=unknown`.",
        "syncFlushTimeout",
        ge=10,
        live="the next send",
    )


@dataclass(kw_only=True, slots=True)
class MetricsTable:
    """``[metrics]``: a page for Prometheus."""

    listen_port: int = setting(
        0,
        "Port that answers `GET /metrics`; 0: none. One that is taken is left out with a warning.",
        "metricsPromExporterPort",
        within=(0, 65_535),
    )
    listen_host: str = setting(
        "127.0.0.1",
        "Address to bind for it; empty: 127.0.0.1, where RocketMQ takes `brokerIP1`. There"
        " is no access control there.",
        "metricsPromExporterHost",
        parse=parse_host,
    )
    exporter_type: MetricsExporterType = setting(
        "",
        "Empty: `listen_port` alone decides. `PROM`: without a port it is 5557. `DISABLE`: no"
        " page, whatever the port. `OTLP_GRPC` and `LOG` are not built: taken as `DISABLE`"
        " with a warning.",
        "metricsExporterType",
        parse=parse_exporter,
    )
