"""Request and response codes: RocketMQ's, and the range 51100-51199 that is ours.

Administration and registration are accepted by a full daemon: an operator that cannot reach a
daemon under pressure cannot help it. The answer *not supported* carries what takes the place of the
request, for a person that types a command of RocketMQ's tools.

Spec: docs/internals/protocol/remoting.md, sections 4 and 17.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, unique
from typing import Final

# ---------------------------------------------------------------------------------- codes


@unique
class RequestCode(IntEnum):
    """What a request asks for."""

    # needed by producers/consumers
    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    CHECK_CLIENT_CONFIG = 46
    GET_ROUTEINFO_BY_TOPIC = 105
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320
    LITE_PULL_MESSAGE = 361

    # server → client
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326

    # admin request, forwarded to the client
    GET_CONSUMER_RUNNING_INFO = 307
    CONSUME_MESSAGE_DIRECTLY = 309

    # request-reply
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325

    # NameServer (and broker link)
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_BROKER_CLUSTER_INFO = 106
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_TOPIC_IN_NAMESRV = 216
    REGISTER_TOPIC_IN_NAMESRV = 217
    GET_KVLIST_BY_NAMESPACE = 219
    GET_TOPICS_BY_CLUSTER = 224
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    QUERY_DATA_VERSION = 322
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_BROKER_MEMBER_GROUP = 901
    BROKER_HEARTBEAT = 904
    NOTIFY_MIN_BROKER_ID_CHANGE = 905

    # mqadmin / dashboard on the broker
    QUERY_MESSAGE = 12
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    VIEW_MESSAGE_BY_ID = 33
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    QUERY_CORRECTION_OFFSET = 308
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    QUERY_CONSUME_QUEUE = 321
    RESUME_CHECK_HALF_MESSAGE = 323
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    UPDATE_AND_GET_GROUP_FORBIDDEN = 353

    # slave synchronisation
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    GET_TIMER_CHECK_POINT = 60
    GET_TIMER_METRICS = 61
    GET_ALL_MESSAGE_REQUEST_MODE = 402

    # ACL 2.0
    AUTH_CREATE_USER = 3001
    AUTH_UPDATE_USER = 3002
    AUTH_DELETE_USER = 3003
    AUTH_GET_USER = 3004
    AUTH_LIST_USER = 3005
    AUTH_CREATE_ACL = 3006
    AUTH_UPDATE_ACL = 3007
    AUTH_DELETE_ACL = 3008
    AUTH_GET_ACL = 3009
    AUTH_LIST_ACL = 3010

    # POP / server-side assignment
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    POP_MESSAGE = 200050
    ACK_MESSAGE = 200051
    PEEK_MESSAGE = 200052
    CHANGE_MESSAGE_INVISIBLETIME = 200053
    NOTIFICATION = 200054
    POLLING_INFO = 200055
    POP_ROLLBACK = 200056
    BATCH_ACK_MESSAGE = 200151

    # timer recall
    RECALL_MESSAGE = 370

    # controller mode (later)
    CONTROLLER_ALTER_SYNC_STATE_SET = 1001
    CONTROLLER_ELECT_MASTER = 1002
    CONTROLLER_REGISTER_BROKER = 1003
    CONTROLLER_GET_REPLICA_INFO = 1004
    CONTROLLER_GET_METADATA_INFO = 1005
    CONTROLLER_GET_SYNC_STATE_DATA = 1006
    GET_BROKER_EPOCH_CACHE = 1007
    NOTIFY_BROKER_ROLE_CHANGED = 1008
    UPDATE_CONTROLLER_CONFIG = 1009
    GET_CONTROLLER_CONFIG = 1010
    CLEAN_BROKER_DATA = 1011
    CONTROLLER_GET_NEXT_BROKER_ID = 1012
    CONTROLLER_APPLY_BROKER_ID = 1013

    # broker container (ignore)
    ADD_BROKER = 902
    REMOVE_BROKER = 903

    # defined, no handler or obsolete (answer 3)
    QUERY_BROKER_OFFSET = 13
    GET_TOPIC_CONFIG_LIST = 22
    GET_TOPIC_NAME_LIST = 23
    TRIGGER_DELETE_FILES = 27
    GET_CLIENT_CONFIG = 47
    SUSPEND_CONSUMER = 209
    RESUME_CONSUMER = 210
    RESET_CONSUMER_OFFSET_IN_CONSUMER = 211
    RESET_CONSUMER_OFFSET_IN_BROKER = 212
    ADJUST_CONSUMER_THREAD_POOL = 213
    WHO_CONSUME_THE_MESSAGE = 214
    REGISTER_FILTER_SERVER = 301
    REGISTER_MESSAGE_FILTER_CLASS = 302

    # ACL 1.0
    UPDATE_AND_CREATE_ACL_CONFIG = 50
    DELETE_ACL_CONFIG = 51
    GET_BROKER_CLUSTER_ACL_INFO = 52
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG = 53
    GET_BROKER_CLUSTER_ACL_CONFIG = 54

    # between controllers, timer engines, lists, lite topics (answer 3)
    BROKER_CLOSE_CHANNEL_REQUEST = 1014
    CHECK_NOT_ACTIVE_BROKER_REQUEST = 1015
    GET_BROKER_LIVE_INFO_REQUEST = 1016
    GET_SYNC_STATE_DATA_REQUEST = 1017
    RAFT_BROKER_HEART_BEAT_EVENT_REQUEST = 1018
    SWITCH_TIMER_ENGINE = 5001
    DELETE_TOPIC_IN_BROKER_LIST = 5002
    DELETE_SUBSCRIPTION_GROUP_LIST = 5003
    POP_LITE_MESSAGE = 200070
    LITE_SUBSCRIPTION_CTL = 200071
    ACK_LITE_MESSAGE = 200072
    NOTIFY_UNSUBSCRIBE_LITE = 200073
    GET_BROKER_LITE_INFO = 200074
    GET_PARENT_TOPIC_INFO = 200075
    GET_LITE_TOPIC_INFO = 200076
    GET_LITE_CLIENT_INFO = 200077
    GET_LITE_GROUP_INFO = 200078
    TRIGGER_LITE_DISPATCH = 200079

    # static topics, HA status, cold data, RocksDB (later; answer 3)
    CHECK_ROCKSDB_CQ_WRITE_PROGRESS = 354
    EXPORT_ROCKSDB_CONFIG_TO_JSON = 355
    UPDATE_AND_CREATE_STATIC_TOPIC = 513
    EXCHANGE_BROKER_HA_INFO = 906
    GET_BROKER_HA_STATUS = 907
    RESET_MASTER_FLUSH_OFFSET = 908
    UPDATE_COLD_DATA_FLOW_CTR_CONFIG = 2001
    REMOVE_COLD_DATA_FLOW_CTR_CONFIG = 2002
    GET_COLD_DATA_FLOW_CTR_INFO = 2003
    SET_COMMITLOG_READ_MODE = 2004

    # Ours, between our own SDK, tools and daemons. A real RocketMQ answers 3 to them.
    # Handshake: identity, header encodings and requests it understands.
    CAPABILITIES = 51100
    # Batch whose records are in CommitLog record layout already.
    SEND_RECORDS = 51101
    # Role, term, indexes and peers of one replica.
    RAFT_STATUS = 51102
    # Pull with larger limits than RocketMQ's.
    BULK_PULL = 51103
    # Add, remove or replace a member of a group, or hand its leadership over; the leader answers.
    RAFT_CHANGE = 51105
    # A challenge for this connection, so that requests on it are signed for it alone.
    SIGNATURE_CHALLENGE = 51106
    # Open the session of an idempotent producer; the leader answers.
    OPEN_PRODUCER = 51110
    # Messages and a consumer group's offsets, all of them or nothing.
    CONSUME_STEP = 51111


OWN_CODES = range(51100, 51200)


@unique
class ResponseCode(IntEnum):
    """How a request went."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOW = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210
    BROKER_NOT_EXIST = 211
    BROKER_DISPATCH_NOT_COMPLETE = 212
    BROADCAST_CONSUMPTION = 213
    FLOW_CONTROL = 215
    NOT_LEADER_FOR_QUEUE = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002

    # Ours, answered only to senders of a field of ours.
    # The lock of the queue was lost: a newer grant stands, or none.
    STALE_LOCK_TOKEN = 51151
    # The consumer group's offset is another one than the step begins at.
    COMMIT_NOT_EXPECTED = 51153


# ------------------------------------------------------------------- codes with a rule of their own


BROKER_RESERVED: Final = frozenset(
    {
        RequestCode.CAPABILITIES, RequestCode.SIGNATURE_CHALLENGE, RequestCode.RAFT_STATUS,
        RequestCode.RAFT_CHANGE, RequestCode.GET_BROKER_CONFIG, RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.GET_BROKER_RUNTIME_INFO, RequestCode.GET_CONSUMER_CONNECTION_LIST,
        RequestCode.GET_PRODUCER_CONNECTION_LIST, RequestCode.GET_ALL_PRODUCER_INFO,
        RequestCode.GET_ALL_TOPIC_CONFIG, RequestCode.GET_TOPIC_CONFIG,
        RequestCode.GET_TOPIC_STATS_INFO, RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.DELETE_SUBSCRIPTIONGROUP, RequestCode.GET_CONSUME_STATS,
    }
)  # fmt: skip
"""What the tools ask a broker."""

NAMESRV_RESERVED: Final = frozenset(
    {
        RequestCode.CAPABILITIES, RequestCode.SIGNATURE_CHALLENGE, RequestCode.REGISTER_BROKER,
        RequestCode.UNREGISTER_BROKER, RequestCode.BROKER_HEARTBEAT, RequestCode.QUERY_DATA_VERSION,
        RequestCode.GET_BROKER_CLUSTER_INFO, RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.GET_NAMESRV_CONFIG, RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER, RequestCode.ADD_WRITE_PERM_OF_BROKER,
    }
)  # fmt: skip
"""What brokers and tools ask a NameServer."""


_INSTEAD: Final[Mapping[str, str]] = {
    "RocketMQ has no handler for it either": """
        QUERY_BROKER_OFFSET GET_TOPIC_CONFIG_LIST GET_TOPIC_NAME_LIST GET_CLIENT_CONFIG
        SUSPEND_CONSUMER RESUME_CONSUMER RESET_CONSUMER_OFFSET_IN_CONSUMER
        RESET_CONSUMER_OFFSET_IN_BROKER ADJUST_CONSUMER_THREAD_POOL WHO_CONSUME_THE_MESSAGE
    """,
    "RocketMQ has no handler for it either; 329 lets expired segments go": """
        TRIGGER_DELETE_FILES
    """,
    "timers lie in the log, in the topic `rmq_sys_wheel_timer`": """
        GET_TIMER_CHECK_POINT GET_TIMER_METRICS
    """,
    "filter servers were removed in RocketMQ 4.9": """
        REGISTER_FILTER_SERVER REGISTER_MESSAGE_FILTER_CLASS
    """,
    "208 and 314 do what it is used for": """
        QUERY_CORRECTION_OFFSET
    """,
    "messages that were given up are in `TRANS_CHECK_MAX_TIME_TOPIC`: send them again": """
        RESUME_CHECK_HALF_MESSAGE
    """,
    "permissions of accounts decide what may be read: `dledger acl grant`": """
        UPDATE_AND_GET_GROUP_FORBIDDEN
    """,
    "there is no RocksDB": """
        CHECK_ROCKSDB_CQ_WRITE_PROGRESS EXPORT_ROCKSDB_CONFIG_TO_JSON
    """,
    "queues stay in their group: a new one gets topics by `dledger topic create --broker`": """
        UPDATE_AND_CREATE_STATIC_TOPIC
    """,
    "each process is one broker: start another with `dledger broker -c FILE`": """
        ADD_BROKER
    """,
    "each process is one broker: stop it with SIGTERM": """
        REMOVE_BROKER
    """,
    "Raft elects the leader, not a NameServer": """
        NOTIFY_MIN_BROKER_ID_CHANGE
    """,
    "members replicate by Raft: `dledger raft status` shows how far each is": """
        EXCHANGE_BROKER_HA_INFO GET_BROKER_HA_STATUS
    """,
    "members replicate by Raft: what is committed is never reset": """
        RESET_MASTER_FLUSH_OFFSET
    """,
    "leaders are elected without a controller: `dledger raft status`, `transfer-leader`": """
        CONTROLLER_ALTER_SYNC_STATE_SET CONTROLLER_ELECT_MASTER CONTROLLER_REGISTER_BROKER
        CONTROLLER_GET_REPLICA_INFO CONTROLLER_GET_METADATA_INFO CONTROLLER_GET_SYNC_STATE_DATA
        NOTIFY_BROKER_ROLE_CHANGED UPDATE_CONTROLLER_CONFIG GET_CONTROLLER_CONFIG
        CLEAN_BROKER_DATA CONTROLLER_GET_NEXT_BROKER_ID CONTROLLER_APPLY_BROKER_ID
    """,
    "terms take the place of epochs: `dledger raft status`": """
        GET_BROKER_EPOCH_CACHE
    """,
    "between RocketMQ's controllers: leaders are elected by Raft, without one": """
        BROKER_CLOSE_CHANNEL_REQUEST CHECK_NOT_ACTIVE_BROKER_REQUEST
        GET_BROKER_LIVE_INFO_REQUEST GET_SYNC_STATE_DATA_REQUEST
        RAFT_BROKER_HEART_BEAT_EVENT_REQUEST
    """,
    "readers of old data go to a follower: `slaveReadEnable`": """
        UPDATE_COLD_DATA_FLOW_CTR_CONFIG REMOVE_COLD_DATA_FLOW_CTR_CONFIG
        GET_COLD_DATA_FLOW_CTR_INFO
    """,
    "the kernel reads ahead as it sees fit: there is no mode to set": """
        SET_COMMITLOG_READ_MODE
    """,
    "there is one engine for timers: they lie in the log": """
        SWITCH_TIMER_ENGINE
    """,
    "delete them one by one: `dledger topic delete`, or 215": """
        DELETE_TOPIC_IN_BROKER_LIST
    """,
    "delete them one by one: `mqadmin deleteSubGroup`, or 207": """
        DELETE_SUBSCRIPTION_GROUP_LIST
    """,
    "a POP hands messages out for a time, and one that is not acknowledged comes again": """
        PEEK_MESSAGE POP_ROLLBACK
    """,
    "lite topics are not built: topics are cheap, make one of each": """
        POP_LITE_MESSAGE LITE_SUBSCRIPTION_CTL ACK_LITE_MESSAGE NOTIFY_UNSUBSCRIBE_LITE
        GET_BROKER_LITE_INFO GET_PARENT_TOPIC_INFO GET_LITE_TOPIC_INFO GET_LITE_CLIENT_INFO
        GET_LITE_GROUP_INFO TRIGGER_LITE_DISPATCH
    """,
}
"""What takes their place → names of request codes."""

INSTEAD: Final[Mapping[int, str]] = {
    RequestCode[name]: sentence for sentence, names in _INSTEAD.items() for name in names.split()
}
"""Request code → the sentence."""


def not_supported(code: int) -> str:
    """Return the remark of the answer; it begins as RocketMQ's does."""
    instead = INSTEAD.get(code)
    remark = f" request type {code} not supported"
    return f"{remark}; {instead}" if instead else remark
