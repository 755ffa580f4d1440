"""What each request of a broker must be allowed to do.

RocketMQ's ACL 1.0 looks into ten request codes and lets every other one pass with a right
signature. Here each code has a rule of its own, and one that nobody has decided about is for
administrators. Where a request names a message by its place in the log, the right to that
message's topic is asked for: else a signature would be enough to read, or to have copied into a
retry topic, what another line forbids.

Spec: semantics fact sheet, section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from commitlog.errors import CorruptRecordError, OffsetOutOfRangeError
from commitlog.properties import decode_properties
from commitlog.record import decode_record
from commitlog.reply_names import reply_topic
from dledger.group_api import BrokerGroup
from dledger.state.names import (
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    STATE_TOPIC,
    TRACE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from remoting.access.accounts import Permission, Right, group_right, topic_right
from remoting.access.rules import ADMIN, SIGNED, Rights, Rule
from remoting.errors import BadRequestError
from remoting.protocol.bodies import HeartbeatData, LockBatchRequestBody
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand

TopicAt = Callable[[int], str | None]
"""Position in the log → topic of the message there; None when there is none."""

PUB: Final = Permission.PUB
SUB: Final = Permission.SUB
ANY: Final = Permission.PUB | Permission.SUB

INNER_TOPICS: Final = frozenset(
    {STATE_TOPIC, SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC}
)
"""They hold messages of other topics, or what the broker knows: no default grants them."""

_V2: Final = frozenset(
    {
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
    }
)

_SIGNED: Final = (
    RequestCode.CHECK_CLIENT_CONFIG,
    RequestCode.GET_BROKER_RUNTIME_INFO,
    RequestCode.GET_ALL_TOPIC_CONFIG,
    RequestCode.GET_TOPIC_CONFIG,
    RequestCode.GET_TOPIC_STATS_INFO,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.GET_CONSUMER_CONNECTION_LIST,
    RequestCode.GET_PRODUCER_CONNECTION_LIST,
    RequestCode.GET_ALL_PRODUCER_INFO,
    RequestCode.GET_CONSUME_STATS,
    RequestCode.GET_BROKER_CONSUME_STATS,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
    RequestCode.QUERY_CONSUME_TIME_SPAN,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
    RequestCode.QUERY_CORRECTION_OFFSET,
    RequestCode.VIEW_BROKER_STATS_DATA,
    RequestCode.QUERY_CONSUME_QUEUE,
    RequestCode.QUERY_TOPICS_BY_CONSUMER,
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER,
    RequestCode.QUERY_ASSIGNMENT,
    RequestCode.CAPABILITIES,
    # Answered before the gate: what it gives is of no use without an account.
    RequestCode.SIGNATURE_CHALLENGE,
    RequestCode.RAFT_STATUS,
    # A session alone stores no message: each send of it is checked.
    RequestCode.OPEN_PRODUCER,
)
"""They change nothing and show no message."""

_ADMIN: Final = (
    # RocketMQ's own five.
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.UPDATE_BROKER_CONFIG,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.DELETE_SUBSCRIPTIONGROUP,
    # What changes as much, or shows everybody's.
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN,
    RequestCode.GET_BROKER_CONFIG,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
    RequestCode.CLEAN_UNUSED_TOPIC,
    RequestCode.DELETE_EXPIRED_COMMITLOG,
    RequestCode.CLONE_GROUP_OFFSET,
    RequestCode.RESUME_CHECK_HALF_MESSAGE,
    RequestCode.CONSUME_MESSAGE_DIRECTLY,
    RequestCode.GET_ALL_CONSUMER_OFFSET,
    RequestCode.GET_ALL_DELAY_OFFSET,
    RequestCode.GET_TIMER_CHECK_POINT,
    RequestCode.GET_TIMER_METRICS,
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE,
    RequestCode.SET_MESSAGE_REQUEST_MODE,
    RequestCode.AUTH_CREATE_USER,
    RequestCode.AUTH_UPDATE_USER,
    RequestCode.AUTH_DELETE_USER,
    RequestCode.AUTH_GET_USER,
    RequestCode.AUTH_LIST_USER,
    RequestCode.AUTH_CREATE_ACL,
    RequestCode.AUTH_UPDATE_ACL,
    RequestCode.AUTH_DELETE_ACL,
    RequestCode.AUTH_GET_ACL,
    RequestCode.AUTH_LIST_ACL,
    RequestCode.RAFT_CHANGE,
)

LOCAL_ADMIN: Final = frozenset(
    {
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
        RequestCode.RAFT_CHANGE,
    }
)
"""They erase data, or change members, settings of durability and retention: without access
control they come from the broker's own machine, unless `server.open_admin` is on."""

UNANSWERED: Final = frozenset(
    {
        # from a server to its clients
        RequestCode.CHECK_TRANSACTION_STATE,
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
        RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
        # for NameServers
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.PUT_KV_CONFIG,
        RequestCode.GET_KV_CONFIG,
        RequestCode.DELETE_KV_CONFIG,
        RequestCode.REGISTER_BROKER,
        RequestCode.UNREGISTER_BROKER,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.REGISTER_TOPIC_IN_NAMESRV,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.GET_NAMESRV_CONFIG,
        RequestCode.QUERY_DATA_VERSION,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
        RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.BROKER_HEARTBEAT,
        RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE,
        # not built
        RequestCode.UPDATE_AND_CREATE_ACL_CONFIG,
        RequestCode.DELETE_ACL_CONFIG,
        RequestCode.GET_BROKER_CLUSTER_ACL_INFO,
        RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG,
        RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG,
        RequestCode.BROKER_CLOSE_CHANNEL_REQUEST,
        RequestCode.CHECK_NOT_ACTIVE_BROKER_REQUEST,
        RequestCode.GET_BROKER_LIVE_INFO_REQUEST,
        RequestCode.GET_SYNC_STATE_DATA_REQUEST,
        RequestCode.RAFT_BROKER_HEART_BEAT_EVENT_REQUEST,
        RequestCode.SWITCH_TIMER_ENGINE,
        RequestCode.DELETE_TOPIC_IN_BROKER_LIST,
        RequestCode.DELETE_SUBSCRIPTION_GROUP_LIST,
        RequestCode.POP_LITE_MESSAGE,
        RequestCode.LITE_SUBSCRIPTION_CTL,
        RequestCode.ACK_LITE_MESSAGE,
        RequestCode.NOTIFY_UNSUBSCRIBE_LITE,
        RequestCode.GET_BROKER_LITE_INFO,
        RequestCode.GET_PARENT_TOPIC_INFO,
        RequestCode.GET_LITE_TOPIC_INFO,
        RequestCode.GET_LITE_CLIENT_INFO,
        RequestCode.GET_LITE_GROUP_INFO,
        RequestCode.TRIGGER_LITE_DISPATCH,
        RequestCode.POP_MESSAGE,
        RequestCode.ACK_MESSAGE,
        RequestCode.PEEK_MESSAGE,
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
        RequestCode.NOTIFICATION,
        RequestCode.POLLING_INFO,
        RequestCode.POP_ROLLBACK,
        RequestCode.BATCH_ACK_MESSAGE,
        RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET,
        RequestCode.CONTROLLER_ELECT_MASTER,
        RequestCode.CONTROLLER_REGISTER_BROKER,
        RequestCode.CONTROLLER_GET_REPLICA_INFO,
        RequestCode.CONTROLLER_GET_METADATA_INFO,
        RequestCode.CONTROLLER_GET_SYNC_STATE_DATA,
        RequestCode.GET_BROKER_EPOCH_CACHE,
        RequestCode.NOTIFY_BROKER_ROLE_CHANGED,
        RequestCode.UPDATE_CONTROLLER_CONFIG,
        RequestCode.GET_CONTROLLER_CONFIG,
        RequestCode.CLEAN_BROKER_DATA,
        RequestCode.CONTROLLER_GET_NEXT_BROKER_ID,
        RequestCode.CONTROLLER_APPLY_BROKER_ID,
        RequestCode.ADD_BROKER,
        RequestCode.REMOVE_BROKER,
        RequestCode.QUERY_BROKER_OFFSET,
        RequestCode.GET_TOPIC_CONFIG_LIST,
        RequestCode.GET_TOPIC_NAME_LIST,
        RequestCode.TRIGGER_DELETE_FILES,
        RequestCode.GET_CLIENT_CONFIG,
        RequestCode.SUSPEND_CONSUMER,
        RequestCode.RESUME_CONSUMER,
        RequestCode.RESET_CONSUMER_OFFSET_IN_CONSUMER,
        RequestCode.RESET_CONSUMER_OFFSET_IN_BROKER,
        RequestCode.ADJUST_CONSUMER_THREAD_POOL,
        RequestCode.WHO_CONSUME_THE_MESSAGE,
        RequestCode.REGISTER_FILTER_SERVER,
        RequestCode.REGISTER_MESSAGE_FILTER_CLASS,
        RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS,
        RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON,
        RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC,
        RequestCode.EXCHANGE_BROKER_HA_INFO,
        RequestCode.GET_BROKER_HA_STATUS,
        RequestCode.RESET_MASTER_FLUSH_OFFSET,
        RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG,
        RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG,
        RequestCode.GET_COLD_DATA_FLOW_CTR_INFO,
        RequestCode.SET_COMMITLOG_READ_MODE,
    }
)
"""Codes that a broker has no handler for. Whoever writes one decides here who may ask."""


def broker_rules(topic_at: TopicAt, cluster: str) -> dict[int, Rule]:
    """Return the rule of each request code that a broker answers.

    Args:
        topic_at: Topic of the message at a position of the log.
        cluster: Name of the cluster; answering needs no right to its topic for replies.
    """
    code = RequestCode
    rules: dict[int, Rule] = {}
    rules.update(dict.fromkeys(_SIGNED, SIGNED))
    rules.update(dict.fromkeys(_ADMIN, ADMIN))
    by_rights: tuple[tuple[Rights, tuple[RequestCode, ...]], ...] = (
        (_send, (code.SEND_MESSAGE, code.SEND_MESSAGE_V2, code.SEND_BATCH_MESSAGE)),
        (_reply(reply_topic(cluster)), (code.SEND_REPLY_MESSAGE, code.SEND_REPLY_MESSAGE_V2)),
        (_send_records, (code.SEND_RECORDS,)),
        (_of(PUB, topic="topic"), (code.RECALL_MESSAGE,)),
        (
            _of(SUB, topic="topic", group="consumerGroup"),
            (
                code.PULL_MESSAGE,
                code.LITE_PULL_MESSAGE,
                code.BULK_PULL,
                code.QUERY_CONSUMER_OFFSET,
                code.UPDATE_CONSUMER_OFFSET,
            ),
        ),
        (
            _of(ANY, topic="topic"),
            (
                code.SEARCH_OFFSET_BY_TIMESTAMP,
                code.GET_MAX_OFFSET,
                code.GET_MIN_OFFSET,
                code.GET_EARLIEST_MSG_STORETIME,
            ),
        ),
        (_of(SUB, topic="topic"), (code.QUERY_MESSAGE,)),
        (
            _of(SUB, topic="topic", group="group"),
            (code.INVOKE_BROKER_TO_RESET_OFFSET, code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS),
        ),
        (
            _of(SUB, group="consumerGroup"),
            (code.GET_CONSUMER_LIST_BY_GROUP, code.GET_CONSUMER_RUNNING_INFO),
        ),
        (_heartbeat, (code.HEART_BEAT,)),
        (_unregister, (code.UNREGISTER_CLIENT,)),
        (_lock, (code.LOCK_BATCH_MQ, code.UNLOCK_BATCH_MQ)),
        (_message_at(topic_at, "offset", SUB), (code.VIEW_MESSAGE_BY_ID,)),
        (_send_back(topic_at), (code.CONSUMER_SEND_MSG_BACK,)),
        (_message_at(topic_at, "commitLogOffset", PUB), (code.END_TRANSACTION,)),
    )
    for rights, codes in by_rights:
        rules.update(dict.fromkeys(codes, Rule(rights=rights)))
    return rules


def topic_of_message_at(group: BrokerGroup) -> TopicAt:
    """Return how to find the topic of an applied message; a waiting one's is where it goes to."""

    def topic_at(offset: int) -> str | None:
        if not 0 <= offset < group.state.applied_end_position:
            return None
        try:
            record = decode_record(group.log.record_at(offset))
        except (OffsetOutOfRangeError, CorruptRecordError):
            return None
        if record.topic in (HALF_TOPIC, SCHEDULE_TOPIC):
            return decode_properties(record.properties).get("REAL_TOPIC", record.topic)
        return record.topic

    return topic_at


def _topic(topic: str, permission: Permission) -> Right:
    return topic_right(topic, permission, by_line=topic in INNER_TOPICS)


def _text(command: RemotingCommand, name: str) -> str:
    value = command.ext.get(name)
    if value is None:
        raise BadRequestError(f"the custom field {name} is null")
    if not isinstance(value, str):
        raise BadRequestError(f"the custom field {name} is not text")
    return value


def _of(permission: Permission, *, topic: str = "", group: str = "") -> Rights:
    """Return the rights to the topic and the group that two ext fields name."""

    def rights(command: RemotingCommand) -> Iterator[Right]:
        if topic:
            yield _topic(_text(command, topic), permission)
        if group:
            yield group_right(_text(command, group))

    return rights


def _send(command: RemotingCommand) -> Iterable[Right]:
    topic = _text(command, "b" if command.code in _V2 else "topic")
    return () if topic == TRACE_TOPIC else (_topic(topic, PUB),)


def _reply(free_topic: str) -> Rights:
    def rights(command: RemotingCommand) -> Iterable[Right]:
        topic = _text(command, "b" if command.code in _V2 else "topic")
        return () if topic == free_topic else (_topic(topic, PUB),)

    return rights


def _send_records(command: RemotingCommand) -> Iterator[Right]:
    runs = command.ext.get("runs")
    if not isinstance(runs, list):
        raise BadRequestError("runs must be a list")
    for topic in {run[0] if isinstance(run, list) and run else None for run in runs}:
        if not isinstance(topic, str):
            raise BadRequestError("a run is [topic, queue id, count]")
        if topic != TRACE_TOPIC:
            yield _topic(topic, PUB)


def _heartbeat(command: RemotingCommand) -> Iterator[Right]:
    for consumer in HeartbeatData.decode(command.body).consumer_data_set:
        yield group_right(consumer.group_name)
        for subscription in consumer.subscription_data_set:
            yield _topic(subscription.topic, SUB)


def _unregister(command: RemotingCommand) -> Iterable[Right]:
    return (
        (group_right(_text(command, "consumerGroup")),) if command.ext.get("consumerGroup") else ()
    )


def _lock(command: RemotingCommand) -> Iterable[Right]:
    return (group_right(LockBatchRequestBody.decode(command.body).consumer_group),)


def _message_at(topic_at: TopicAt, field: str, permission: Permission) -> Rights:
    def rights(command: RemotingCommand) -> Iterable[Right]:
        try:
            offset = int(command.ext.get(field, ""))
        except (TypeError, ValueError):
            raise BadRequestError(f"the custom field {field} is not a number") from None
        topic = topic_at(offset)
        return () if topic is None else (_topic(topic, permission),)

    return rights


def _send_back(topic_at: TopicAt) -> Rights:
    to_message = _message_at(topic_at, "offset", SUB)

    def rights(command: RemotingCommand) -> Iterator[Right]:
        yield group_right(_text(command, "group"))
        yield from to_message(command)

    return rights
