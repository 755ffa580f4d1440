"""Requests with a rule of their own: those a full daemon still accepts, and those it does not know.

Administration and registration are accepted without capacity for others: they are few and small,
and an operator that cannot reach a daemon under pressure cannot help it.

The answer *not supported* carries what takes the place of the request, so that a person that types
a command of RocketMQ's tools reads it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from remoting.protocol.codes import RequestCode

BROKER_RESERVED: Final = frozenset(
    {
        RequestCode.CAPABILITIES,
        RequestCode.SIGNATURE_CHALLENGE,
        RequestCode.RAFT_STATUS,
        RequestCode.RAFT_CHANGE,
        RequestCode.GET_BROKER_CONFIG,
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.GET_BROKER_RUNTIME_INFO,
        RequestCode.GET_CONSUMER_CONNECTION_LIST,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        RequestCode.GET_ALL_PRODUCER_INFO,
        RequestCode.GET_ALL_TOPIC_CONFIG,
        RequestCode.GET_TOPIC_CONFIG,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.GET_CONSUME_STATS,
    }
)
"""What the tools ask a broker."""

NAMESRV_RESERVED: Final = frozenset(
    {
        RequestCode.CAPABILITIES,
        RequestCode.SIGNATURE_CHALLENGE,
        RequestCode.REGISTER_BROKER,
        RequestCode.UNREGISTER_BROKER,
        RequestCode.BROKER_HEARTBEAT,
        RequestCode.QUERY_DATA_VERSION,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.GET_NAMESRV_CONFIG,
        RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
    }
)
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
    "accounts stand in the file of `server.acl_file`: `dledger acl ls`, `add`, `grant`, `rm`": """
        UPDATE_AND_CREATE_ACL_CONFIG DELETE_ACL_CONFIG GET_BROKER_CLUSTER_ACL_INFO
        UPDATE_GLOBAL_WHITE_ADDRS_CONFIG GET_BROKER_CLUSTER_ACL_CONFIG
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
    "clients assign queues themselves: leave `clientRebalance` at its default, true": """
        QUERY_ASSIGNMENT
    """,
    "consumers pull: POP is not built, and pulling needs no mode": """
        SET_MESSAGE_REQUEST_MODE GET_ALL_MESSAGE_REQUEST_MODE
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
    "POP is not built: consumers pull, or use RocketMQ's push consumer, which pulls": """
        POP_MESSAGE ACK_MESSAGE PEEK_MESSAGE CHANGE_MESSAGE_INVISIBLETIME NOTIFICATION
        POLLING_INFO POP_ROLLBACK BATCH_ACK_MESSAGE
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
