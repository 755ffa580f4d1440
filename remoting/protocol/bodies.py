"""Bodies of requests and responses that are JSON objects.

Written in standard JSON (or with unquoted numeric keys for clients before 4.9.4), read leniently:
fastjson's dialect, missing and unknown keys, numbers as strings, enums as ordinals.

Spec: docs/internals/protocol/remoting.md, section 5.1.

The numbers a topic may have are one table, for the broker that creates it and the NameServer that
lists it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Protocol, Self, TypeVar

import msgspec
from typing_extensions import Buffer

from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol import fastjson
from dledger.remoting.protocol.fastjson import Dialect

T = TypeVar("T")


class MessageModel(StrEnum):
    """Whether a group's consumers share the queues or each sees all."""

    BROADCASTING = "BROADCASTING"
    CLUSTERING = "CLUSTERING"


class ConsumeType(StrEnum):
    """Which side drives consumption."""

    CONSUME_ACTIVELY = "CONSUME_ACTIVELY"
    CONSUME_PASSIVELY = "CONSUME_PASSIVELY"
    CONSUME_POP = "CONSUME_POP"


class ConsumeFromWhere(StrEnum):
    """Where a group without a stored offset begins."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST = (
        "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST"
    )
    CONSUME_FROM_MIN_OFFSET = "CONSUME_FROM_MIN_OFFSET"
    CONSUME_FROM_MAX_OFFSET = "CONSUME_FROM_MAX_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


# Enums that clients send as ordinals, by the key they stand under.
_ORDINALS: Final[dict[str, tuple[StrEnum, ...]]] = {
    "messageModel": tuple(MessageModel),
    "consumeType": tuple(ConsumeType),
    "consumeFromWhere": tuple(ConsumeFromWhere),
}
# Values that may be reached a second time through `$ref`; RocketMQ's bodies repeat a few objects.
MAX_DIGITS: Final = 18
"""Of a number in a version: it has 64 bits."""

MAX_REFERRED_VALUES: Final = 100_000
# One strict decoder per body; None where only the lenient way can read it.
_decoders: dict[type, msgspec.json.Decoder[Any] | None] = {}


class Body(msgspec.Struct, rename="camel"):
    """A JSON object as RocketMQ's remoting bodies are."""

    def encode(self, dialect: Dialect = Dialect.STANDARD) -> bytes:
        """Return the body as RocketMQ's readers take it: keys sorted, nulls left out."""
        return fastjson.dumps(self, dialect)

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """Return the body held in *data*.

        Raises BadRequestError: not JSON of any dialect, or a field is of the wrong kind.
        """
        return decode_body(data, cls)


def decode_body(data: Buffer, kind: type[T]) -> T:
    """Return *data* read as *kind*, leniently.

    Raises BadRequestError: not JSON of any dialect, or a field is of the wrong kind.
    """
    decoder = _strict_decoder(kind)
    if decoder is not None and fastjson.REFERENCE.search(data) is None:
        try:
            return decoder.decode(data)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # the lenient way decides
    value = fastjson.loads(data)
    try:
        plain = _Normaliser(memoryview(data).nbytes).normal(value)
        return msgspec.convert(plain, kind, strict=False, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadRequestError(f"body is not a {kind.__name__}: {error}") from error


def _strict_decoder(kind: type) -> msgspec.json.Decoder[Any] | None:
    if kind not in _decoders:
        try:
            _decoders[kind] = msgspec.json.Decoder(kind)
        except TypeError:  # a struct is a map key somewhere
            _decoders[kind] = None
    return _decoders[kind]


class _Normaliser:
    """Turns ordinals into names, drops nulls, makes message queues of keys that hold an object.

    It walks an object once per reference to it, so what it may visit is limited: references to
    lists of references would otherwise double the work with each level.
    """

    def __init__(self, body_bytes: int) -> None:
        # Without references every value takes at least one byte of the body.
        self._left = body_bytes + MAX_REFERRED_VALUES

    def normal(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise BadRequestError("body refers to the same objects too often")
        if isinstance(value, dict):
            result: dict[Any, Any] = {}
            for key, item in value.items():
                if item is None:
                    continue
                names = _ORDINALS.get(key)
                if names is not None and not isinstance(item, dict | list):
                    result[key] = _enum_name(key, item, names)
                elif key.startswith("{"):
                    result[decode_body(key.encode(), MessageQueue)] = self.normal(item)
                else:
                    result[key] = self.normal(item)
            return result
        if isinstance(value, list):
            return [self.normal(item) for item in value]
        return value


def _enum_name(key: str, item: object, names: tuple[StrEnum, ...]) -> str:
    text = str(item)
    if not (text.isascii() and text.isdigit()):
        return text
    ordinal = int(text) if len(text) < 4 else len(names)
    if ordinal >= len(names):
        raise BadRequestError(f"{key} has no value number {text}")
    return names[ordinal].value


class MessageQueue(msgspec.Struct, rename="camel", frozen=True, order=True):
    """One queue of a topic on one broker group."""

    topic: str
    broker_name: str
    queue_id: int


class DataVersion(Body):
    """How new a table is: the counter grows with each change, the time is that of the last one."""

    timestamp: int = 0
    counter: int = 0
    state_version: int = 0

    @property
    def text(self) -> str:
        """The version in one header field."""
        return f"{self.state_version}.{self.timestamp}.{self.counter}"

    @classmethod
    def of_text(cls, text: str) -> DataVersion:
        """Read what `text` wrote. Raises BadRequestError: it is something else."""
        numbers = text.split(".")
        if len(numbers) != 3 or not all(
            number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS
            for number in numbers
        ):
            raise BadRequestError(f"{text[:60]!r} is no data version")
        return cls(int(numbers[1]), int(numbers[2]), int(numbers[0]))


# ---------------------------------------------------------------------------------- routes


class QueueData(Body):
    """How many queues of a topic a broker group has, and what may be done with them."""

    broker_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = 6
    topic_sys_flag: int = 0


class BrokerData(Body):
    """The addresses of a broker group by broker id; 0 is the leader."""

    cluster: str = ""
    broker_name: str = ""
    broker_addrs: dict[int, str] = {}
    zone_name: str | None = None
    enable_acting_master: bool | None = None


class TopicRouteData(Body):
    """Where the queues of a topic are."""

    order_topic_conf: str | None = None
    queue_datas: list[QueueData] = []
    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}


class ClusterInfo(Body):
    """Every broker group, and which cluster it belongs to."""

    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}


class TopicList(Body):
    """Names of topics (or of clusters and brokers, code 304)."""

    topic_list: list[str] = []
    broker_addr: str | None = None


class KVTable(Body):
    """A table of strings."""

    table: dict[str, str] = {}


class GroupList(Body):
    """Names of groups."""

    group_list: list[str] = []


class BrokerMemberGroup(Body):
    """The members of one broker group."""

    cluster: str = ""
    broker_name: str = ""
    broker_addrs: dict[int, str] = {}


class BrokerMemberGroupBody(Body):
    """Answer to GET_BROKER_MEMBER_GROUP."""

    broker_member_group: BrokerMemberGroup | None = None


# ---------------------------------------------------------------------------------- topics


class TopicConfig(Body):
    """What a broker knows of a topic."""

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = 6
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = {}


class TopicConfigList(Body):
    """Body of UPDATE_AND_CREATE_TOPIC_LIST."""

    topic_config_list: list[TopicConfig] = []


class TopicConfigSerializeWrapper(Body):
    """All topics of a broker and how new the table is."""

    topic_config_table: dict[str, TopicConfig] = {}
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)


class RegisterBrokerBody(Body):
    """What a broker sends a NameServer with each registration."""

    topic_config_serialize_wrapper: TopicConfigSerializeWrapper = msgspec.field(
        default_factory=TopicConfigSerializeWrapper
    )
    filter_server_list: list[str] = []
    removed_topics: list[str] | None = None
    """Ours, with differences only: topics that were removed."""


class TopicOffset(Body):
    """Bounds of one queue."""

    min_offset: int = 0
    max_offset: int = 0
    last_update_timestamp: int = 0


class TopicStatsTable(Body):
    """Bounds of the queues of one topic on one broker."""

    offset_table: dict[MessageQueue, TopicOffset] = {}
    topic_put_tps: float = 0.0


# ---------------------------------------------------------------------------------- groups


class SubscriptionData(Body):
    """What a group wants of one topic."""

    topic: str = ""
    sub_string: str = "*"
    tags_set: list[str] = []
    code_set: list[int] = []
    sub_version: int = 0
    expression_type: str | None = None
    class_filter_mode: bool = False


class ConsumerData(Body):
    """One consumer group of a client."""

    group_name: str
    consume_type: ConsumeType = ConsumeType.CONSUME_PASSIVELY
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    subscription_data_set: list[SubscriptionData] = []
    unit_mode: bool = False


class ProducerData(Body):
    """One producer group of a client."""

    group_name: str


class HeartbeatData(Body):
    """What a client sends every broker it talks to, each 30 s."""

    client_id: str = msgspec.field(name="clientID")
    producer_data_set: list[ProducerData] = []
    consumer_data_set: list[ConsumerData] = []
    heartbeat_fingerprint: int = 0
    without_sub: bool = False


class CheckClientRequestBody(Body):
    """Body of CHECK_CLIENT_CONFIG."""

    client_id: str = ""
    group: str = ""
    subscription_data: SubscriptionData | None = None
    namespace: str | None = None


class GroupRetryPolicy(Body):
    """Delays between deliveries of a message that failed; kept as it came."""

    type: str = "CUSTOMIZED"
    exponential_retry_policy: dict[str, Any] | None = None
    customized_retry_policy: dict[str, Any] | None = None


class SubscriptionGroupConfig(Body):
    """What a broker knows of a consumer group."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    group_retry_policy: GroupRetryPolicy = msgspec.field(default_factory=GroupRetryPolicy)
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: int = 0
    consume_timeout_minute: int = 15
    subscription_data_set: list[dict[str, Any]] | None = None
    attributes: dict[str, str] = {}


class SubscriptionGroupConfigList(Body):
    """Body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""

    group_config_list: list[SubscriptionGroupConfig] = []


class SubscriptionGroupWrapper(Body):
    """All consumer groups of a broker and how new the table is."""

    subscription_group_table: dict[str, SubscriptionGroupConfig] = {}
    forbidden_table: dict[str, dict[str, int]] = {}
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)


class QuerySubscriptionResponseBody(Body):
    """What a group wants of a topic; without data when no consumer of it is connected."""

    subscription_data: SubscriptionData | None = None
    group: str = ""
    topic: str = ""


class ConsumerIdList(Body):
    """Answer to GET_CONSUMER_LIST_BY_GROUP."""

    consumer_id_list: list[str] = []


class ClientConnection(Body):
    """One client of a group."""

    client_id: str = ""
    client_addr: str = ""
    language: str = "OTHER"
    version: int = 0


class ConsumerConnection(Body):
    """The clients of a consumer group and what they subscribe."""

    connection_set: list[ClientConnection] = []
    subscription_table: dict[str, SubscriptionData] = {}
    consume_type: ConsumeType | None = None
    message_model: MessageModel | None = None
    consume_from_where: ConsumeFromWhere | None = None


class ProducerConnection(Body):
    """The clients of a producer group."""

    connection_set: list[ClientConnection] = []


class ProducerInfo(Body):
    """One client of a producer group, with its last heartbeat."""

    client_id: str = ""
    remote_ip: str = msgspec.field(name="remoteIP", default="")
    language: str = "OTHER"
    version: int = 0
    last_update_timestamp: int = 0


class ProducerTableInfo(Body):
    """All producer groups of a broker."""

    data: dict[str, list[ProducerInfo]] = {}


# ---------------------------------------------------------------------------------- progress


class OffsetWrapper(Body):
    """How far one group is in one queue."""

    broker_offset: int = 0
    consumer_offset: int = 0
    pull_offset: int = 0
    last_timestamp: int = 0


class ConsumeStats(Body):
    """How far one group is."""

    offset_table: dict[MessageQueue, OffsetWrapper] = {}
    consume_tps: float = 0.0


class ConsumeStatsList(Body):
    """How far every group of a broker is."""

    consume_stats_list: list[dict[str, list[ConsumeStats]]] = []
    broker_addr: str = ""
    total_diff: int = 0
    total_inflight_diff: int = 0


class BrokerStatsItem(Body):
    """How often something happened within a span: the sum, per second, and per event."""

    sum: int = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Body):
    """Answer to VIEW_BROKER_STATS_DATA."""

    stats_minute: BrokerStatsItem = msgspec.field(default_factory=BrokerStatsItem)
    stats_hour: BrokerStatsItem = msgspec.field(default_factory=BrokerStatsItem)
    stats_day: BrokerStatsItem = msgspec.field(default_factory=BrokerStatsItem)


class QueueOffset(Body):
    """One queue and an offset in it."""

    topic: str = ""
    broker_name: str = ""
    queue_id: int = 0
    offset: int = 0


class ResetOffsetBodyForC(Body):
    """As `ResetOffsetBody`, in the form that the C++ client reads."""

    offset_table: list[QueueOffset] = []


class QueueTimeSpan(Body):
    """From when to when a queue has messages, ms, and how far a group is in it."""

    message_queue: MessageQueue
    min_time_stamp: int = 0
    max_time_stamp: int = 0
    consume_time_stamp: int = 0
    delay_time: int = 0


class QueryConsumeTimeSpanBody(Body):
    """Answer of QUERY_CONSUME_TIME_SPAN."""

    consume_time_span_set: list[QueueTimeSpan] = []


class ConsumeQueueData(Body):
    """One unit of a consume queue, and whether a group's filter lets it pass."""

    physic_offset: int = 0
    physic_size: int = 0
    tags_code: int = 0
    extend_data_json: str | None = None
    bit_map: str | None = None
    eval: bool = True
    msg: str | None = None


class QueryConsumeQueueResponseBody(Body):
    """Answer of QUERY_CONSUME_QUEUE."""

    subscription_data: SubscriptionData | None = None
    filter_data: str | None = None
    queue_data: list[ConsumeQueueData] = []
    min_queue_index: int = 0
    max_queue_index: int = 0


class ResetOffsetBody(Body):
    """Offsets a group is to go on from."""

    offset_table: dict[MessageQueue, int] = {}


class GetConsumerStatusBody(Body):
    """How far clients are: their own offsets of a topic's queues."""

    message_queue_table: dict[MessageQueue, int] = {}
    consumer_table: dict[str, dict[MessageQueue, int]] = {}


class ProcessQueueInfo(Body):
    """What a consumer has of one queue; ``droped`` is spelled so on the wire."""

    commit_offset: int = 0
    cached_msg_min_offset: int = 0
    cached_msg_max_offset: int = 0
    cached_msg_count: int = 0
    cached_msg_size_in_mi_b: int = msgspec.field(name="cachedMsgSizeInMiB", default=0)
    transaction_msg_min_offset: int = 0
    transaction_msg_max_offset: int = 0
    transaction_msg_count: int = 0
    locked: bool = False
    try_unlock_times: int = 0
    last_lock_timestamp: int = 0
    droped: bool = False
    last_pull_timestamp: int = 0
    last_consume_timestamp: int = 0


class ConsumeStatus(Body):
    """How fast a consumer takes messages of a topic: ms each, messages a second, failures."""

    pull_rt: float = msgspec.field(name="pullRT", default=0.0)
    pull_tps: float = msgspec.field(name="pullTPS", default=0.0)
    consume_rt: float = msgspec.field(name="consumeRT", default=0.0)
    consume_ok_tps: float = msgspec.field(name="consumeOKTPS", default=0.0)
    consume_failed_tps: float = msgspec.field(name="consumeFailedTPS", default=0.0)
    consume_failed_msgs: int = 0


class ConsumerRunningInfo(Body):
    """Answer of GET_CONSUMER_RUNNING_INFO: what a client reports of one of its consumers."""

    properties: dict[str, str] = {}
    subscription_set: list[SubscriptionData] = []
    mq_table: dict[MessageQueue, ProcessQueueInfo] = {}
    mq_pop_table: dict[MessageQueue, dict[str, Any]] = {}
    status_table: dict[str, ConsumeStatus] = {}
    user_consumer_info: dict[str, str] = {}
    jstack: str | None = None


class ConsumeMessageDirectlyResult(Body):
    """Answer of CONSUME_MESSAGE_DIRECTLY: what a listener made of one message."""

    order: bool = False
    auto_commit: bool = True
    consume_result: str | None = None
    remark: str | None = None
    spent_time_mills: int = 0


class ConsumerOffsetSerializeWrapper(Body):
    """All consumer offsets of a broker: "topic@group" → queue id → offset."""

    offset_table: dict[str, dict[int, int]] = {}
    data_version: DataVersion | None = None


class DelayOffsetSerializeWrapper(Body):
    """How far each delay level has been delivered."""

    offset_table: dict[int, int] = {}
    data_version: DataVersion | None = None


class LockBatchRequestBody(Body):
    """Body of LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    consumer_group: str = ""
    client_id: str = ""
    only_this_broker: bool = False
    mq_set: list[MessageQueue] = []


class LockBatchResponseBody(Body):
    """The queues that are locked for the caller now."""

    lock_ok_mq_set: list[MessageQueue] = msgspec.field(name="lockOKMQSet", default_factory=list)


MAX_QUEUE_NUMS: Final = 65_536
"""Queues of one topic on one broker: each costs a folder and a table row on every replica, and an
object in every client."""

MAX_PERM: Final = 15
"""Inherit, read, write and priority."""

MAX_SYS_FLAG: Final = 2**31 - 1
"""Clients read 32 bits, with a sign."""

MAX_TOPIC_NAME_CHARS: Final = 255
"""Of retry and dead letter topics; others are shorter."""


class TopicNumbers(Protocol):
    """What is looked at of a topic, wherever it stands."""

    @property
    def read_queue_nums(self) -> int:
        """Queues that may be pulled from."""

    @property
    def write_queue_nums(self) -> int:
        """Queues that may be sent to."""

    @property
    def perm(self) -> int:
        """What may be done."""

    @property
    def topic_sys_flag(self) -> int:
        """RocketMQ's unit flags."""


_BOUNDS: Final = (
    ("read_queue_nums", "readQueueNums", MAX_QUEUE_NUMS),
    ("write_queue_nums", "writeQueueNums", MAX_QUEUE_NUMS),
    ("perm", "perm", MAX_PERM),
    ("topic_sys_flag", "topicSysFlag", MAX_SYS_FLAG),
)


def out_of_bounds(topic: TopicNumbers) -> str:
    """Return which number of *topic* is none that a topic may have; empty: all are."""
    for name, shown, most in _BOUNDS:
        number = getattr(topic, name)
        if not 0 <= number <= most:
            return f"{shown} {number} is not between 0 and {most}"
    return ""


def bad_topic_name(name: str) -> str:
    """Return why *name* cannot stand in a route; empty: it can."""
    if not name or len(name) > MAX_TOPIC_NAME_CHARS:
        return f"a name of {len(name)} characters is not between 1 and {MAX_TOPIC_NAME_CHARS}"
    if not name.isprintable():
        return "its name cannot be printed"
    return ""
