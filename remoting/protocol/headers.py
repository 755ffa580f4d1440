"""Custom headers: the ext fields of each request and response, typed.

A header's fields are named as RocketMQ names them, in snake_case; `encode` and `decode` translate.
A field without a default is required; None means it was absent.

Spec: docs/internals/protocol/remoting.md, sections 3.2 and 7 to 12.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, TypeAlias

import msgspec

from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand
from dledger.remoting.protocol.header_codec import whole_number

# How wide a number may be; Java parses the same widths.
I32: TypeAlias = int
I64: TypeAlias = int
# A boolean whose "1" counts as true: the C++ client marks its batches that way.
Flag: TypeAlias = bool

_I32_END: Final = 1 << 31
_I64_END: Final = 1 << 63


def _number(end: int) -> Callable[[str, Any], int]:
    def parse(name: str, value: Any) -> int:
        try:
            number = whole_number(value)
        except ValueError as error:
            raise BadRequestError(f"the custom field {name} is not a number: {value!r}") from error
        if not -end <= number < end:
            raise BadRequestError(f"the custom field {name} is out of range: {number}")
        return number

    return parse


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise BadRequestError(f"the custom field {name} is not text")


def _truth(_name: str, value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _flag(name: str, value: Any) -> bool:
    return value in ("1", 1) or _truth(name, value)


_PARSERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "I32": _number(_I32_END),
    "I64": _number(_I64_END),
    "str": _text,
    "bool": _truth,
    "Flag": _flag,
}


# Attribute, wire name, parser, required.
_Field: TypeAlias = tuple[str, str, Callable[[str, Any], Any], bool]
_plans: Final[dict[type, tuple[_Field, ...]]] = {}


def _plan(kind: type[Header]) -> tuple[_Field, ...]:
    """Return how to translate the fields of *kind*; worked out once."""
    known = _plans.get(kind)
    if known is not None:
        return known
    plan: list[_Field] = []
    for field in msgspec.structs.fields(kind):
        # By its text: the width of a number is in the name of its type alone.
        annotation = str(kind.__annotations__[field.name]).removesuffix(" | None")
        name = kind.wire_name(field.name)
        plan.append((field.name, name, _PARSERS[annotation], field.required))
    _plans[kind] = tuple(plan)
    return _plans[kind]


class Header(msgspec.Struct):
    """What all custom headers can do."""

    WIRE_NAMES: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def wire_name(cls, attribute: str) -> str:
        """Return the ext field's name for one of the attributes."""
        named = cls.WIRE_NAMES.get(attribute)
        if named is not None:
            return named
        first, *rest = attribute.split("_")
        return first + "".join(word.capitalize() for word in rest)

    @classmethod
    def decode(cls, ext: ExtFields) -> Self:
        """Return the header held in *ext*; unknown fields are passed over.

        Raises BadRequestError: a required field is missing (``the custom field <name> is null``),
        or one is not of its kind.
        """
        values: dict[str, Any] = {}
        for attribute, name, parse, required in _plan(cls):
            value = ext.get(name)
            if value is not None:
                values[attribute] = parse(name, value)
            elif required:
                raise BadRequestError(f"the custom field {name} is null")
        return cls(**values)

    def encode(self) -> dict[str, str]:
        """Return the ext fields, every value a string, absent ones left out."""
        ext: dict[str, str] = {}
        for attribute, name, _, _ in _plan(type(self)):
            value = getattr(self, attribute)
            if value is not None:
                ext[name] = value if type(value) is str else _text(name, value)
        return ext


# ---------------------------------------------------------------------------------- send


class SendMessageHeader(Header):
    """SEND_MESSAGE (10), its V2 forms (310, 320) and the replies (324, 325)."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: I32
    queue_id: I32
    sys_flag: I32
    born_timestamp: I64
    flag: I32
    properties: str | None = None
    reconsume_times: I32 | None = None
    unit_mode: bool | None = None
    max_reconsume_times: I32 | None = None
    batch: Flag | None = None
    bname: str | None = None

    @classmethod
    def of(cls, command: RemotingCommand) -> SendMessageHeader:
        """Return the header of a send request, whichever of the five codes it has.

        Raises BadRequestError: see `decode`.
        """
        if command.code in _V2_CODES:
            header = cls.decode_v2(command.ext)
            if command.code == RequestCode.SEND_BATCH_MESSAGE:
                header.batch = True
            return header
        return cls.decode(command.ext)

    @classmethod
    def decode_v2(cls, ext: ExtFields) -> SendMessageHeader:
        """Return the header held in the one-letter fields of V2; the hot path of a broker.

        Raises BadRequestError: see `decode`; the field is named by its letter.
        """
        try:
            get = ext.get
            "".join((ext["a"], ext["b"], ext["c"], get("n") or ""))  # TypeError: one is no text
            numbers = (ext["d"], ext["e"], ext["f"], ext["g"], ext["h"])
            reconsume_times = get("j")
            max_reconsume_times = get("l")
            digits = "".join(numbers) + (reconsume_times or "") + (max_reconsume_times or "")
            if not (digits.isascii() and digits.isdigit()):
                return _decode_v2_slowly(ext)
            default_topic_queue_nums, queue_id, sys_flag, born_timestamp, flag = map(int, numbers)
            header = cls(
                ext["a"],
                ext["b"],
                ext["c"],
                default_topic_queue_nums,
                queue_id,
                sys_flag,
                born_timestamp,
                flag,
                get("i"),
                None if reconsume_times is None else int(reconsume_times),
                _BOOLEANS[get("k")],
                None if max_reconsume_times is None else int(max_reconsume_times),
                _FLAGS[get("m")],
                get("n"),
            )
        except (KeyError, ValueError, TypeError):
            return _decode_v2_slowly(ext)
        if (
            -_I32_END <= queue_id < _I32_END
            and -_I32_END <= sys_flag < _I32_END
            and -_I32_END <= flag < _I32_END
            and -_I64_END <= born_timestamp < _I64_END
            and -_I32_END <= default_topic_queue_nums < _I32_END
            and (header.reconsume_times is None or -_I32_END <= header.reconsume_times < _I32_END)
            and (header.max_reconsume_times is None or header.max_reconsume_times < _I32_END)
            and (header.properties is None or type(header.properties) is str)
        ):
            return header
        return _decode_v2_slowly(ext)

    def encode_v2(self) -> dict[str, str]:
        """Return the ext fields under the one-letter names."""
        long = self.encode()
        return {
            letter: long[name] for letter, name in _V2_NAMES.items() if long.get(name) is not None
        }


_V2_CODES: Final = frozenset(
    (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
)
# What clients really send; anything else takes the slow way.
_BOOLEANS: Final[dict[Any, bool | None]] = {"true": True, "false": False, None: None}
_FLAGS: Final[dict[Any, bool | None]] = {**_BOOLEANS, "1": True, "0": False}
# Letter of V2 → long name.
_V2_NAMES: Final[Mapping[str, str]] = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
    "l": "maxReconsumeTimes",
    "m": "batch",
    "n": "bname",
}
_LETTERS: Final = {name: letter for letter, name in _V2_NAMES.items()}


def _decode_v2_slowly(ext: ExtFields) -> SendMessageHeader:
    """Find what is wrong, or read what the quick way does not expect."""
    values: dict[str, Any] = {}
    for attribute, name, parse, required in _plan(SendMessageHeader):
        letter = _LETTERS[name]
        value = ext.get(letter)
        if value is not None:
            values[attribute] = parse(letter, value)
        elif required:
            raise BadRequestError(f"the custom field {letter} is null")
    return SendMessageHeader(**values)


class SendMessageResponseHeader(Header):
    """Where a message was stored; with code 0, 10, 11 and 12."""

    WIRE_NAMES: ClassVar[Mapping[str, str]] = {"msg_region": "MSG_REGION", "trace_on": "TRACE_ON"}

    msg_id: str
    queue_id: I32
    queue_offset: I64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    # Drive the client's tracing; missing means on, in region DefaultRegion.
    msg_region: str | None = "DefaultRegion"
    trace_on: bool | None = True


class EndTransactionHeader(Header):
    """END_TRANSACTION (37)."""

    producer_group: str
    tran_state_table_offset: I64
    commit_log_offset: I64
    commit_or_rollback: I32
    msg_id: str
    from_transaction_check: bool | None = False
    transaction_id: str | None = None
    topic: str | None = None
    bname: str | None = None


class CheckTransactionStateHeader(Header):
    """CHECK_TRANSACTION_STATE (39)."""

    tran_state_table_offset: I64
    commit_log_offset: I64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    topic: str | None = None
    bname: str | None = None


class ConsumerSendMsgBackHeader(Header):
    """CONSUMER_SEND_MSG_BACK (36)."""

    offset: I64
    group: str
    delay_level: I32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = False
    max_reconsume_times: I32 | None = None


class ReplyMessageHeader(Header):
    """PUSH_REPLY_MESSAGE_TO_CLIENT (326)."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: I32
    queue_id: I32
    sys_flag: I32
    born_timestamp: I64
    flag: I32
    properties: str | None = None
    reconsume_times: I32 | None = None
    unit_mode: bool | None = False
    born_host: str | None = None
    store_host: str | None = None
    store_timestamp: I64 = 0


class RecallMessageHeader(Header):
    """RECALL_MESSAGE (370)."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


# ---------------------------------------------------------------------------------- pull


class PullMessageHeader(Header):
    """PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361)."""

    WIRE_NAMES: ClassVar[Mapping[str, str]] = {
        "proxy_forward_client_id": "proxyFrowardClientId"  # spelled so
    }

    consumer_group: str
    topic: str
    queue_id: I32
    queue_offset: I64
    max_msg_nums: I32
    sys_flag: I32
    commit_offset: I64
    suspend_timeout_millis: I64
    sub_version: I64
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: I32 | None = None
    request_source: I32 | None = None
    proxy_forward_client_id: str | None = None


class PullMessageResponseHeader(Header):
    """Where to go on, and the bounds of the queue."""

    suggest_which_broker_id: I64
    next_begin_offset: I64
    min_offset: I64
    max_offset: I64
    offset_delta: I64 | None = None
    topic_sys_flag: I32 | None = None
    group_sys_flag: I32 | None = None
    forbidden_type: I32 | None = None


class QueryConsumerOffsetHeader(Header):
    """QUERY_CONSUMER_OFFSET (14)."""

    consumer_group: str
    topic: str
    queue_id: I32
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffsetHeader(Header):
    """UPDATE_CONSUMER_OFFSET (15)."""

    consumer_group: str
    topic: str
    queue_id: I32
    commit_offset: I64


class QueueHeader(Header):
    """One queue: GET_MIN_OFFSET (31), GET_EARLIEST_MSG_STORETIME (32)."""

    topic: str
    queue_id: I32


class GetMaxOffsetHeader(Header):
    """GET_MAX_OFFSET (30)."""

    topic: str
    queue_id: I32
    committed: bool | None = None


class SearchOffsetHeader(Header):
    """SEARCH_OFFSET_BY_TIMESTAMP (29)."""

    topic: str
    queue_id: I32
    timestamp: I64
    boundary_type: str | None = None


class OffsetResponseHeader(Header):
    """An offset: answers to 14, 29, 30, 31."""

    offset: I64


class ConsumerGroupHeader(Header):
    """One consumer group: codes 38, 40, 203."""

    consumer_group: str


class UnregisterClientHeader(Header):
    """UNREGISTER_CLIENT (35); the C++ client sends "" for the group that is absent."""

    WIRE_NAMES: ClassVar[Mapping[str, str]] = {"client_id": "clientID"}

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None


# ---------------------------------------------------------------------------------- queries


class QueryMessageHeader(Header):
    """QUERY_MESSAGE (12)."""

    WIRE_NAMES: ClassVar[Mapping[str, str]] = {"unique_key_query": "_UNIQUE_KEY_QUERY"}

    topic: str
    key: str
    max_num: I32
    begin_timestamp: I64
    end_timestamp: I64
    unique_key_query: bool | None = False


class ViewMessageHeader(Header):
    """VIEW_MESSAGE_BY_ID (33)."""

    offset: I64
    topic: str | None = None


# ---------------------------------------------------------------------------------- administration


class CreateTopicHeader(Header):
    """UPDATE_AND_CREATE_TOPIC (17)."""

    topic: str
    default_topic: str
    read_queue_nums: I32
    write_queue_nums: I32
    perm: I32
    topic_filter_type: str
    order: bool
    topic_sys_flag: I32 | None = 0
    attributes: str | None = None
    force: bool | None = None


class TopicHeader(Header):
    """One topic: codes 202, 215, 217, 300, 351."""

    topic: str


class GroupHeader(Header):
    """One group, under the name `group`: codes 343, 352."""

    group: str


class GroupTopicHeader(Header):
    """A group and a topic: codes 303 and 345."""

    group: str
    topic: str


class ConsumerClientHeader(Header):
    """One consumer of a group: code 307."""

    consumer_group: str
    client_id: str
    jstack_enable: bool | None = None


class ConsumeDirectlyHeader(Header):
    """CONSUME_MESSAGE_DIRECTLY (309)."""

    consumer_group: str
    msg_id: str
    client_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None


class ConsumerStatusHeader(Header):
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223)."""

    topic: str
    group: str
    client_addr: str | None = None


class ProducerGroupHeader(Header):
    """One producer group: code 204."""

    producer_group: str


class DeleteSubscriptionGroupHeader(Header):
    """DELETE_SUBSCRIPTIONGROUP (207); 4.9 calls the second field removeOffset."""

    group_name: str
    clean_offset: bool | None = None
    remove_offset: bool | None = None


class GetConsumeStatsHeader(Header):
    """GET_CONSUME_STATS (208)."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class GetBrokerConsumeStatsHeader(Header):
    """GET_BROKER_CONSUME_STATS (317)."""

    is_order: bool


class QueryConsumeQueueHeader(Header):
    """QUERY_CONSUME_QUEUE (321)."""

    topic: str
    queue_id: I32
    index: I64
    count: I32
    consumer_group: str | None = None


class ResetOffsetHeader(Header):
    """INVOKE_BROKER_TO_RESET_OFFSET (222) and RESET_CONSUMER_CLIENT_OFFSET (220)."""

    topic: str
    group: str
    timestamp: I64
    is_force: bool
    queue_id: I32 | None = None
    offset: I64 | None = None


class CloneGroupOffsetHeader(Header):
    """CLONE_GROUP_OFFSET (314)."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None


class ViewBrokerStatsDataHeader(Header):
    """VIEW_BROKER_STATS_DATA (315)."""

    stats_name: str
    stats_key: str


# ---------------------------------------------------------------------------------- NameServer


GROUP_IDENTITIES_FIELD: Final = "groupIdentities"
"""In our NameServers' answer to a question for a route: broker name to the identity of its group
and the addresses of members that name none, as a JSON object of lists."""

REFUSED_BROKERS_FIELD: Final = "refusedBrokers"
"""In our NameServers' answer to GET_BROKER_CLUSTER_INFO: sentences, as a JSON list."""


class RegisterBrokerHeader(Header):
    """REGISTER_BROKER (103)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: I64
    heartbeat_timeout_millis: I64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool | None = False
    body_crc32: I32 | None = 0
    group_identity: str | None = None
    """Ours: a RocketMQ broker sends none."""
    membership_proof: str | None = None
    """Ours: what members of the group alone can say, where they share a secret."""
    topics_since: str | None = None
    """Ours: the body has only what changed since this version, as `DataVersion.text` writes it."""


class RegisterBrokerResponseHeader(Header):
    """What a follower learns of its leader; and, of our NameServers, what was not taken."""

    ha_server_addr: str | None = None
    master_addr: str | None = None
    kept_by: str | None = None
    """Another address holds the id: nothing changed."""
    topics_left_out: str | None = None
    """Topics that are not in the route, with the reasons; the first ones of many."""
    takes_differences: bool | None = None
    """Ours: a registration may name `topics_since`. RocketMQ's NameServer never sends it."""
    needs_all: bool | None = None
    """Ours: the differences were not taken, for they begin at another version. Nothing changed."""


class BrokerHeader(Header):
    """One broker: UNREGISTER_BROKER (104), QUERY_DATA_VERSION (322)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: I64
    group_identity: str | None = None
    """Ours: a RocketMQ broker sends none."""


class BrokerHeartbeatHeader(Header):
    """BROKER_HEARTBEAT (904)."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: I64 | None = None
    heartbeat_timeout_mills: I64 | None = None


class QueryDataVersionResponseHeader(Header):
    """Whether the broker's topics are news."""

    changed: bool


class BrokerMemberGroupHeader(Header):
    """GET_BROKER_MEMBER_GROUP (901)."""

    cluster_name: str
    broker_name: str


class GetRouteInfoHeader(Header):
    """GET_ROUTEINFO_BY_TOPIC (105)."""

    topic: str
    accept_standard_json_only: bool | None = None
    group_identities: bool | None = None
    """Ours: the answer names the group of each broker name in `GROUP_IDENTITIES_FIELD`."""


class BrokerNameHeader(Header):
    """WIPE_/ADD_WRITE_PERM_OF_BROKER (205, 327)."""

    broker_name: str


class WipeWritePermResponseHeader(Header):
    """How many topics lost the right to be written."""

    wipe_topic_count: I32


class AddWritePermResponseHeader(Header):
    """How many topics may be written again."""

    add_topic_count: I32


class TopicsByClusterHeader(Header):
    """GET_TOPICS_BY_CLUSTER (224)."""

    cluster: str


class DeleteTopicInNamesrvHeader(Header):
    """DELETE_TOPIC_IN_NAMESRV (216)."""

    topic: str
    cluster_name: str | None = None


class PutKvConfigHeader(Header):
    """PUT_KV_CONFIG (100)."""

    namespace: str
    key: str
    value: str


class KvConfigHeader(Header):
    """GET_KV_CONFIG (101) and DELETE_KV_CONFIG (102)."""

    namespace: str
    key: str


class GetKvConfigResponseHeader(Header):
    """The value asked for."""

    value: str | None = None


class KvNamespaceHeader(Header):
    """GET_KVLIST_BY_NAMESPACE (219)."""

    namespace: str


VERSION: Final = "v1"
MAX_HANDLE_CHARS: Final = 2048
"""Longer than any topic, name and key make it."""


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """A message that can be recalled: what a producer needs for it, in one word.

    Format: URL-safe base64 of ``v1 <topic> <brokerName> <time, ms> <UNIQ_KEY>``.

    Spec: docs/internals/protocol/remoting.md, section 7.2.
    """

    topic: str
    broker_name: str
    due_ms: int
    uniq_key: str

    def encode(self) -> str:
        """Return the handle as clients carry it."""
        text = f"{VERSION} {self.topic} {self.broker_name} {self.due_ms} {self.uniq_key}"
        return urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def decode(cls, handle: str) -> RecallHandle:
        """Read what `encode` made; padding may be missing.

        Raises BadRequestError: it is no handle.
        """
        try:
            if len(handle) > MAX_HANDLE_CHARS:
                raise ValueError
            padded = handle + "=" * (-len(handle) % 4)
            version, topic, broker, due, key = urlsafe_b64decode(padded).decode().split(" ")
            if version != VERSION:
                raise ValueError
            return cls(topic, broker, whole_number(due), key)
        except (ValueError, binascii.Error):
            raise BadRequestError(
                f"recall failed, {handle[:64]!r} is no recall handle; nothing was recalled"
            ) from None
