"""Every setting of a broker: its table, name, type, default, RocketMQ key and what it is for.

The structs below are the only list. Files, the command line, ``-p`` and
``docs/reference/configuration.md`` are all read off their fields. Names are RocketMQ's keys in
snake_case where it has one.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Struct

from dledger.remoting.settings import Schema, parse_addresses, setting
from dledger.settings_text import (
    Peer,
    delay_text,
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


class BrokerTable(Struct, frozen=True, kw_only=True):
    """``[broker]``: identity of this broker and what it offers."""

    cluster_name: Annotated[
        str, setting("Cluster this broker registers in.", "brokerClusterName", min_length=1)
    ] = "DefaultCluster"
    broker_name: Annotated[
        str,
        setting("Name of the broker group as clients see it; empty: `raft.group`.", "brokerName"),
    ] = ""
    broker_role: Annotated[
        BrokerRole,
        setting(
            "`SYNC_MASTER`: an acknowledgement means a majority. `ASYNC_MASTER`: the leader alone;"
            " a fail-over may lose the unreplicated tail. `SLAVE` is taken as `SYNC_MASTER` with a"
            " warning: roles are elected.",
            "brokerRole",
        ),
    ] = "SYNC_MASTER"
    broker_ip1: Annotated[
        str,
        setting(
            "Host that clients get, apart from the bind address; empty: the bind address, or"
            " this node's host in `raft.peers`.",
            "brokerIP1",
        ),
    ] = ""
    advertised_port: Annotated[
        int,
        setting(
            "Port that clients get, where it is not the one that is bound (behind a proxy, in"
            " a container); 0: `server.listen_port`.",
            ge=0,
            le=65_535,
        ),
    ] = 0
    namesrv_addr: Annotated[
        tuple[str, ...],
        setting("NameServers, `host:port;host:port`.", "namesrvAddr", parse=parse_addresses),
    ] = (f"127.0.0.1:{DEFAULT_NAMESRV_PORT}",)
    broker_permission: Annotated[
        int,
        setting("Permission bits: 4 read, 2 write.", "brokerPermission", ge=0, le=15, is_live=True),
    ] = 6
    auto_create_topic_enable: Annotated[
        bool,
        setting(
            "Create an unknown topic at the first send.", "autoCreateTopicEnable", is_live=True
        ),
    ] = True
    auto_create_subscription_group: Annotated[
        bool,
        setting(
            "Create an unknown consumer group at first use.",
            "autoCreateSubscriptionGroup",
            is_live=True,
        ),
    ] = True
    default_topic_queue_nums: Annotated[
        int,
        setting(
            "Queues of an auto-created topic, at most.", "defaultTopicQueueNums", ge=1, le=1024
        ),
    ] = 8
    trace_topic_enable: Annotated[
        bool,
        setting(
            "Have a topic for message trace, of one queue, from the start.", "traceTopicEnable"
        ),
    ] = False
    msg_trace_topic_name: Annotated[
        str, setting("Its name.", "msgTraceTopicName", min_length=1)
    ] = "RMQ_SYS_TRACE_TOPIC"
    slave_read_enable: Annotated[
        bool,
        setting("Followers answer pulls from what they applied.", "slaveReadEnable", is_live=True),
    ] = True
    long_polling_enable: Annotated[
        bool,
        setting("Hold a pull that finds nothing until it does.", "longPollingEnable", is_live=True),
    ] = True
    enable_property_filter: Annotated[
        bool,
        setting(
            "Filter with SQL92 expressions over properties; RocketMQ's default is `false`.",
            "enablePropertyFilter",
            is_live=True,
        ),
    ] = True
    filter_support_retry: Annotated[
        bool,
        setting(
            "Match retries against the expression of the topic they come from; RocketMQ's default"
            " is `false`.",
            "filterSupportRetry",
            is_live=True,
        ),
    ] = True
    short_polling_time_ms: Annotated[
        int,
        setting(
            "How long a pull is held without long polling.",
            "shortPollingTimeMills",
            ge=0,
            le=60_000,
            is_live=True,
        ),
    ] = 1_000
    flush_consumer_offset_interval_ms: Annotated[
        int,
        setting(
            "One-way consumer offset commits are proposed together at least this often.",
            "flushConsumerOffsetInterval",
            ge=10,
            is_live=True,
        ),
    ] = 1_000
    reject_transaction_message: Annotated[
        bool, setting("Refuse transactional messages.", "rejectTransactionMessage", is_live=True)
    ] = False
    store_reply_message_enable: Annotated[
        bool,
        setting(
            "Keep replies that requesters have got in the topic `<cluster>_REPLY_TOPIC`.",
            "storeReplyMessageEnable",
            is_live=True,
        ),
    ] = True
    transaction_timeout_ms: Annotated[
        int,
        setting(
            "How long a half message waits for its decision before its producers are asked.",
            "transactionTimeOut",
            ge=0,
            is_live=True,
        ),
    ] = 6_000
    transaction_check_interval_ms: Annotated[
        int,
        setting(
            "How long after that, and after each question, they are asked again.",
            "transactionCheckInterval",
            ge=100,
            is_live=True,
        ),
    ] = 30_000
    transaction_check_max: Annotated[
        int,
        setting(
            "Questions about one half message; after the last one it is given up and moved to"
            " `TRANS_CHECK_MAX_TIME_TOPIC`.",
            "transactionCheckMax",
            ge=1,
            is_live=True,
        ),
    ] = 15
    lock_lease_ms: Annotated[
        int,
        setting(
            "How long a queue stays locked for a client that does not renew it; RocketMQ's clients"
            " count on more than 30 s.",
            ge=1_000,
            le=3_600_000,
        ),
    ] = 60_000
    max_topics: Annotated[
        int,
        setting(
            "Topics, those of retries and dead letters included; one more is refused. Each stands"
            " in the tables of every member and in registrations.",
            ge=100,
        ),
    ] = 50_000
    max_groups: Annotated[
        int,
        setting("Consumer groups; one more is refused, or works with defaults.", ge=10),
    ] = 20_000
    max_group_topics: Annotated[
        int,
        setting(
            "Pairs of a consumer group and a topic with offsets of it; a commit that makes one more"
            " is refused. An offset of each queue stands in it.",
            ge=10,
        ),
    ] = 200_000
    max_topics_per_group: Annotated[
        int,
        setting("Of these, pairs of one consumer group.", ge=10),
    ] = 20_000
    max_clients: Annotated[
        int,
        setting(
            "Connected clients, each once for every producer or consumer group it is in; the"
            " heartbeat of one more is refused.",
            ge=10,
        ),
    ] = 100_000
    max_clients_per_group: Annotated[
        int,
        setting(
            "Of these, clients of one group: each of its clients is notified of all.",
            ge=10,
        ),
    ] = 10_000
    max_topics_per_account: Annotated[
        int,
        setting(
            "With `acl_enable`: topics one account made that are there, as far as this leader saw"
            " it. Administrators are not counted.",
            ge=10,
        ),
    ] = 10_000
    max_groups_per_account: Annotated[int, setting("Consumer groups, likewise.", ge=10)] = 5_000
    max_group_topics_per_account: Annotated[
        int, setting("Pairs of a consumer group and a topic with offsets, likewise.", ge=10)
    ] = 50_000
    max_clients_per_account: Annotated[
        int, setting("Of `max_clients`, those connected as one account, likewise.", ge=10)
    ] = 25_000


class ServerTable(Struct, frozen=True, kw_only=True):
    """``[server]``: the port clients talk to and its limits."""

    listen_host: Annotated[
        str,
        setting(
            "Address to bind; empty: 127.0.0.1, or 0.0.0.0 when `broker_ip1` or this node's peer"
            " address is not a loopback one.",
            "bindAddress",
        ),
    ] = ""
    listen_port: Annotated[
        int, setting("Port for clients and NameServers.", "listenPort", ge=0, le=65_535)
    ] = DEFAULT_LISTEN_PORT
    fast_listen_port: Annotated[
        int,
        setting(
            "Port for old clients' VIP channel, which answers all requests but pulls; -1:"
            " `listen_port` - 2, 0: none. One that is taken is left out with a warning.",
            "fastListenPort",
            ge=-1,
            le=65_535,
        ),
    ] = -1
    max_connections: Annotated[
        int,
        setting(
            "Open client connections; for one more the idlest gives way, and where none is idle"
            " it is closed itself. At most half of the hard limit of open files.",
            ge=1,
        ),
    ] = 4_096
    reserved_connections: Annotated[
        int,
        setting(
            "Of `max_connections`, places that only administration may take when the others are"
            " in use; at most a quarter of them.",
            ge=0,
        ),
    ] = 32
    memory_budget_bytes: Annotated[
        int,
        setting(
            "Requests in work and unsent answers of all connections; beyond it requests are"
            " refused as busy, and the connection that leaves most unread is closed. 0: a"
            " quarter of the memory that the process may use.",
            ge=0,
        ),
    ] = 0
    max_unfinished_bytes: Annotated[
        int,
        setting(
            "Frames of all connections of which a part has come; beyond it a large frame is read"
            " on later, and one that stalls is closed. At least a third more than the largest"
            " frame.",
            ge=MIB,
        ),
    ] = 32 * MIB
    max_in_flight_bytes: Annotated[
        int,
        setting(
            "Bodies of one connection's open requests; beyond it they are refused as busy, so that"
            " one client does not take all of `raft.max_pending_bytes`.",
            ge=64 * KIB,
        ),
    ] = 16 * MIB
    max_in_flight: Annotated[
        int,
        setting("Requests of one connection in work; beyond it they are refused as busy.", ge=1),
    ] = 4_096
    max_frame_bytes: Annotated[
        int, setting("Largest frame; a larger one closes the connection.", ge=64 * KIB)
    ] = 16 * MIB
    max_write_buffer_bytes: Annotated[
        int,
        setting(
            "Answers waiting for one connection; beyond it reading that connection pauses.",
            "writeBufferHighWaterMark",
            ge=64 * KIB,
        ),
    ] = 64 * MIB
    idle_timeout_s: Annotated[
        int,
        setting(
            "A connection silent for this long is closed.", "serverChannelMaxIdleTimeSeconds", ge=1
        ),
    ] = 120
    shutdown_timeout_ms: Annotated[
        int, setting("On SIGTERM, how long requests in work may take to end.", ge=0, is_live=True)
    ] = 5_000
    tls_mode: Annotated[
        TlsModeName,
        setting(
            "`disabled`, `permissive` (plain and TLS on one port) or `enforcing`.",
            "tls.server.mode",
        ),
    ] = "disabled"
    tls_cert_file: Annotated[str, setting("PEM certificate chain.", "tls.server.certPath")] = ""
    tls_key_file: Annotated[str, setting("PEM private key.", "tls.server.keyPath")] = ""
    tls_ca_file: Annotated[
        str,
        setting(
            "Authorities that clients' certificates must come from.", "tls.server.trustCertPath"
        ),
    ] = ""

    acl_enable: Annotated[
        bool,
        setting(
            "Every request must be signed by an account of `acl_file` that may do what it asks.",
            "aclEnable",
        ),
    ] = False
    acl_file: Annotated[
        str,
        setting(
            "Accounts: TOML, or RocketMQ's `plain_acl.yml`. A change of the file counts within a"
            " second; a broken one keeps the accounts there were."
        ),
    ] = ""
    open_admin: Annotated[
        bool,
        setting(
            "Without `acl_enable`: take requests that erase data or change members or settings"
            " from every machine, as RocketMQ does; off: from this machine alone.",
            "openAdmin",
        ),
    ] = False


class ClientTable(Struct, frozen=True, kw_only=True):
    """``[client]``: this broker as a client of the NameServers."""

    register_interval_ms: Annotated[
        int,
        setting(
            "Heartbeat to every NameServer.",
            "registerNameServerPeriod",
            ge=1_000,
            le=60_000,
            is_live=True,
        ),
    ] = 30_000
    register_timeout_ms: Annotated[
        int,
        setting(
            "Wait for one NameServer's answer.", "registerBrokerTimeoutMills", ge=100, is_live=True
        ),
    ] = 6_000
    connect_timeout_ms: Annotated[
        int, setting("Wait for a connection.", "connectTimeoutMillis", ge=10)
    ] = 3_000
    address_server: Annotated[
        str,
        setting(
            "URL that lists the NameServers, read again every 120 s; empty: none.",
            "rmqAddressServerDomain",
        ),
    ] = ""
    credentials_file: Annotated[
        str,
        setting(
            "Account of this broker for NameServers that check it: a file with `access_key` and"
            " `secret_key`, or RocketMQ's `tools.yml`; empty: it does not sign."
        ),
    ] = ""
    tls_enable: Annotated[bool, setting("Talk TLS to NameServers.", "tls.enable", "useTLS")] = False
    tls_ca_file: Annotated[
        str,
        setting(
            "Authorities that servers' certificates must come from.", "tls.client.trustCertPath"
        ),
    ] = ""
    tls_cert_file: Annotated[str, setting("PEM certificate chain.", "tls.client.certPath")] = ""
    tls_key_file: Annotated[str, setting("PEM private key.", "tls.client.keyPath")] = ""


class StoreTable(Struct, frozen=True, kw_only=True):
    """``[store]``: the log on disk."""

    path_root_dir: Annotated[
        str,
        setting(
            "Data folder of this node; `~` is the home folder.", "storePathRootDir", min_length=1
        ),
    ] = "~/store"
    flush_disk_type: Annotated[
        FlushDiskType,
        setting(
            "`SYNC_FLUSH`: nothing is acknowledged before it is on disk. `ASYNC_FLUSH`: every"
            " `flush_interval_ms`.",
            "flushDiskType",
        ),
    ] = "SYNC_FLUSH"
    flush_interval_ms: Annotated[
        int, setting("Flush interval of `ASYNC_FLUSH`.", "flushIntervalCommitLog", ge=1)
    ] = 500
    mapped_file_size_commit_log: Annotated[
        int,
        setting(
            "Bytes of one log segment.",
            "mappedFileSizeCommitLog",
            "mapedFileSizeCommitLog",
            ge=64 * KIB,
            le=2 * GIB,
        ),
    ] = GIB
    mapped_file_size_consume_queue: Annotated[
        int,
        setting(
            "Bytes of one consume queue file, a multiple of 20.",
            "mappedFileSizeConsumeQueue",
            "mapedFileSizeConsumeQueue",
            ge=CONSUME_QUEUE_UNIT_BYTES,
            multiple_of=CONSUME_QUEUE_UNIT_BYTES,
        ),
    ] = 6_000_000
    max_message_size: Annotated[
        int, setting("Largest message body in bytes.", "maxMessageSize", ge=1, is_live=True)
    ] = 4 * MIB
    message_delay_level: Annotated[
        str,
        setting(
            "Delays of the levels 1, 2, …; units s m h d.", "messageDelayLevel", parse=delay_text
        ),
    ] = DEFAULT_DELAY_LEVELS
    timer_wheel_enable: Annotated[
        bool,
        setting(
            "Take messages with a time of their own; off: such a send is refused.",
            "timerWheelEnable",
        ),
    ] = True
    timer_max_delay_sec: Annotated[
        int,
        setting(
            "Seconds that a message's time may be away. Retention keeps what waits.",
            "timerMaxDelaySec",
            ge=1,
            le=366 * 24 * 3600,
        ),
    ] = 3 * 24 * 3600
    timer_roll_window_slot: Annotated[
        int,
        setting(
            "Seconds after which a message that still waits is stored again at the end of the log,"
            " so that old segments can go.",
            "timerRollWindowSlot",
            ge=60,
        ),
    ] = 2 * 24 * 3600
    timer_pending_max: Annotated[
        int,
        setting(
            "Messages with a time of their own that may wait; beyond it such a send is refused."
            " A leader needs 12 to 20 bytes of memory for each.",
            ge=1,
        ),
    ] = 10_000_000
    max_hash_slot_num: Annotated[
        int, setting("Slots of one key index file.", "maxHashSlotNum", ge=1)
    ] = 5_000_000
    max_index_num: Annotated[
        int, setting("Entries of one key index file.", "maxIndexNum", ge=2)
    ] = 20_000_000
    max_transfer_bytes_in_memory: Annotated[
        int,
        setting(
            "Bytes of one pull from recent data.",
            "maxTransferBytesOnMessageInMemory",
            ge=1,
            is_live=True,
        ),
    ] = 256 * KIB
    max_transfer_count_in_memory: Annotated[
        int,
        setting(
            "Messages of one pull from recent data.",
            "maxTransferCountOnMessageInMemory",
            ge=1,
            is_live=True,
        ),
    ] = 32
    max_transfer_bytes_in_disk: Annotated[
        int,
        setting(
            "Bytes of one pull from old data.",
            "maxTransferBytesOnMessageInDisk",
            ge=1,
            is_live=True,
        ),
    ] = 64 * KIB
    max_transfer_count_in_disk: Annotated[
        int,
        setting(
            "Messages of one pull from old data.",
            "maxTransferCountOnMessageInDisk",
            ge=1,
            is_live=True,
        ),
    ] = 8
    access_message_in_memory_max_ratio: Annotated[
        int,
        setting(
            "Part of the machine's memory, in percent, that recent messages are taken to be in;"
            " a reader further back is sent to a follower.",
            "accessMessageInMemoryMaxRatio",
            ge=0,
            le=100,
        ),
    ] = 40
    keep_bytes: Annotated[
        int,
        setting(
            "Bytes of the commit log that are kept at most, in whole segments; 0: no limit but"
            " time and disk.",
            ge=0,
            is_live=True,
        ),
    ] = 0
    scrub_bytes_per_s: Annotated[
        int,
        setting(
            "How fast the log is read again in search of damage; 0: all of it about once a day.",
            ge=0,
        ),
    ] = 0
    retention_interval_ms: Annotated[
        int,
        setting(
            "How often old segments are looked for.", "cleanResourceInterval", ge=100, is_live=True
        ),
    ] = 10_000
    delete_when: Annotated[
        tuple[int, ...],
        setting(
            "Hours of the day, in the machine's local time (`TZ`), for removing old segments while"
            " the disk is not full.",
            "deleteWhen",
            parse=parse_hours,
            show=show_hours,
            is_live=True,
        ),
    ] = (4,)
    disk_max_used_space_ratio: Annotated[
        int,
        setting(
            "Percent of the disk from which expired segments go at any hour.",
            "diskMaxUsedSpaceRatio",
            ge=10,
            le=95,
            parse=percent,
            is_live=True,
        ),
    ] = 75
    disk_space_clean_forcibly_ratio: Annotated[
        int,
        setting(
            "Percent of the disk from which the oldest segment goes although it has not expired,"
            " where `clean_file_forcibly_enable` allows it; `0.85` is 85.",
            "diskSpaceCleanForciblyRatio",
            ge=30,
            le=95,
            parse=percent,
            is_live=True,
        ),
    ] = 85
    clean_file_forcibly_enable: Annotated[
        bool,
        setting(
            "true: on a full disk of the leader the oldest segment of the whole group goes,"
            " although its messages have not expired and may be unread, one at a time. false: sends"
            " are refused instead; RocketMQ's default is `true`.",
            "cleanFileForciblyEnable",
            is_live=True,
        ),
    ] = False
    disk_space_warning_level_ratio: Annotated[
        int,
        setting(
            "Percent of the disk from which sends are refused, until there is space again; `0.90`"
            " is 90.",
            "diskSpaceWarningLevelRatio",
            ge=35,
            le=99,
            parse=percent,
            is_live=True,
        ),
    ] = 90
    file_reserved_time: Annotated[
        int,
        setting(
            "Hours that segments are kept, unless `keep_bytes` or `clean_file_forcibly_enable` sets"
            " another limit.",
            "fileReservedTime",
            ge=1,
            is_live=True,
        ),
    ] = 72


class RaftTable(Struct, frozen=True, kw_only=True):
    """``[raft]``: the group this node is a member of."""

    enable_dledger_commit_log: Annotated[
        bool,
        setting(
            "false: a group of this node alone, whatever `peers` has.", "enableDLegerCommitLog"
        ),
    ] = True
    group: Annotated[
        str,
        setting(
            "Name of the Raft group; empty: `broker.broker_name`, then `DEFAULT_BROKER`.",
            "dLegerGroup",
        ),
    ] = ""
    self_id: Annotated[
        str, setting("This node in `peers`, `n0` and so on.", "dLegerSelfId", min_length=1)
    ] = "n0"
    peers: Annotated[
        tuple[Peer, ...],
        setting(
            "All members, `n0-host:port;n1-host:port`; empty: this node alone on port 20911.",
            "dLegerPeers",
            parse=parse_peers,
        ),
    ] = ()
    listen_port: Annotated[
        int,
        setting(
            "Port to bind for the other members, where it is not the one they get (behind a"
            " proxy, in a container); 0: the one in `peers`.",
            ge=0,
            le=65_535,
        ),
    ] = 0
    secret_file: Annotated[
        str,
        setting(
            "A file of a secret that all members share, at least 16 bytes, as `dledger raft secret`"
            " makes one: a process that cannot prove that it knows it is no peer. Empty: none; then"
            " all peers must be on loopback, or have certificates.",
            "raftSecretFile",
        ),
    ] = ""
    tls_cert_file: Annotated[
        str,
        setting(
            "PEM certificate chain of this member; set, the members talk TLS and each must have"
            " one of `tls_ca_file`.",
            "raftTlsCertFile",
        ),
    ] = ""
    tls_key_file: Annotated[
        str, setting("PEM private key of `tls_cert_file`.", "raftTlsKeyFile")
    ] = ""
    tls_ca_file: Annotated[
        str, setting("Authorities that the members' certificates must come from.", "raftTlsCaFile")
    ] = ""
    election_timeout_ms: Annotated[
        int,
        setting(
            "Silence of the leader before a follower asks for votes; each node draws between"
            " this and twice this.",
            ge=50,
        ),
    ] = 800
    heartbeat_interval_ms: Annotated[int, setting("Heartbeat of the leader.", ge=5)] = 100
    window_bytes: Annotated[
        int, setting("Unacknowledged bytes on the way to one peer.", ge=64 * KIB)
    ] = 8 * MIB
    append_bytes: Annotated[
        int,
        setting(
            "Bytes of one append to a peer, at least one entry: large enough to catch up fast,"
            " small enough to share a link.",
            ge=4 * KIB,
        ),
    ] = MIB
    max_entry_bytes: Annotated[
        int, setting("Largest Raft entry: one group commit.", ge=64 * KIB)
    ] = 8 * MIB
    max_pending_bytes: Annotated[
        int,
        setting(
            "Proposed and not yet committed; beyond it sends are refused as busy.",
            ge=64 * KIB,
            is_live=True,
        ),
    ] = 64 * MIB
    checkpoint_interval_ms: Annotated[
        int,
        setting(
            "How often the state tables are saved to bound replay at start.", ge=10, is_live=True
        ),
    ] = 3_000
    propose_timeout_ms: Annotated[
        int,
        setting(
            "Wait for a majority; beyond it the answer is `outcome=unknown`.",
            "syncFlushTimeout",
            ge=10,
            is_live=True,
        ),
    ] = 5_000


class MetricsTable(Struct, frozen=True, kw_only=True):
    """``[metrics]``: a page for Prometheus."""

    listen_port: Annotated[
        int,
        setting(
            "Port that answers `GET /metrics`; 0: none. One that is taken is left out with a"
            " warning.",
            "metricsPromExporterPort",
            ge=0,
            le=65_535,
        ),
    ] = 0
    listen_host: Annotated[
        str,
        setting(
            "Address to bind for it; empty: 127.0.0.1, where RocketMQ takes `brokerIP1`. There"
            " is no access control there.",
            "metricsPromExporterHost",
        ),
    ] = "127.0.0.1"
    exporter_type: Annotated[
        MetricsExporterType,
        setting(
            "Empty: `listen_port` alone decides. `PROM`: without a port it is 5557. `DISABLE`: no"
            " page, whatever the port. `OTLP_GRPC` and `LOG` are not built: taken as `DISABLE`"
            " with a warning.",
            "metricsExporterType",
            parse=parse_exporter,
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

SCHEMA: Final = Schema(TABLES)
SETTINGS: Final = SCHEMA.settings
"""Path ``table.name`` → setting, in the order of the tables."""

ROCKETMQ_KEYS: Final = SCHEMA.keys
"""RocketMQ key → path."""
