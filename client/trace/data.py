r"""What message trace records of a message, in RocketMQ's encoding to the byte.

Each record is text: fields joined by \x01, ended by \x02::

    Pub             time region group topic msgId tags keys storeHost bodyLength cost msgType
                    offsetMsgId success
    SubBefore       time region group requestId msgId retryTimes keys
    SubAfter        requestId msgId cost success keys contextCode time group
    EndTransaction  time region group topic msgId tags keys storeHost msgType transactionId state
                    fromTransactionCheck

The type stands first in each. RocketMQ's clients write ``null`` where a message has no tags, no
keys or no region, and its reader needs the last field of SubBefore: so does this.

Spec: docs/internals/protocol/semantics.md, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from commitlog.properties import KEY_SEPARATOR

CONTENT_SEPARATOR: Final = "\x01"
FIELD_SEPARATOR: Final = "\x02"
DEFAULT_REGION: Final = "DefaultRegion"
_NULL: Final = "null"


class TraceType(Enum):
    """Which step of a message's way."""

    PUB = "Pub"
    SUB_BEFORE = "SubBefore"
    SUB_AFTER = "SubAfter"
    END_TRANSACTION = "EndTransaction"


@dataclass(frozen=True, slots=True)
class TraceBean:
    """One message of a `TraceContext`. Which fields are written depends on the type."""

    msg_id: str
    topic: str = ""
    tags: str = ""
    keys: str = ""
    store_host: str = ""
    body_length: int = 0
    msg_type: int = 0
    offset_msg_id: str = ""
    retry_times: int = 0
    transaction_id: str = ""
    transaction_state: str = ""
    from_transaction_check: bool = False


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One step of one or several messages.

    Attributes:
        trace_type: Which step.
        time_stamp_ms: Wall time of the client: when a send or a consumption began; of SubAfter
            when it ended, 0 where an old client did not say.
        cost_time_ms: How long it took.
        request_id: Joins SubBefore and SubAfter.
        context_code: How the listener came back: see `client.core.hooks.ConsumeReturnType`.
    """

    trace_type: TraceType
    time_stamp_ms: int
    beans: tuple[TraceBean, ...]
    region_id: str = ""
    group_name: str = ""
    cost_time_ms: int = 0
    is_success: bool = True
    request_id: str = ""
    context_code: int = 0


def encode(context: TraceContext) -> str:
    """Return the records of *context*, one for each message."""
    return "".join(
        CONTENT_SEPARATOR.join((context.trace_type.value, *_fields(context, bean)))
        + FIELD_SEPARATOR
        for bean in context.beans
    )


def keys_of(context: TraceContext) -> list[str]:
    """Return what the trace of *context* is found by: ids and keys of its messages."""
    found: dict[str, None] = {}
    for bean in context.beans:
        found[bean.msg_id] = None
        found.update(dict.fromkeys(key for key in bean.keys.split(KEY_SEPARATOR) if key))
    return list(found)


def _fields(context: TraceContext, bean: TraceBean) -> tuple[str, ...]:
    time, region = str(context.time_stamp_ms), context.region_id or _NULL
    keys, success = bean.keys or _NULL, _java_bool(context.is_success)
    match context.trace_type:
        case TraceType.PUB:
            return (
                time, region, context.group_name, bean.topic, bean.msg_id, bean.tags or _NULL, keys,
                bean.store_host, str(bean.body_length), str(context.cost_time_ms),
                str(bean.msg_type), bean.offset_msg_id, success,
            )  # fmt: skip
        case TraceType.SUB_BEFORE:
            return (
                time, region, context.group_name, context.request_id, bean.msg_id,
                str(bean.retry_times), keys,
            )  # fmt: skip
        case TraceType.SUB_AFTER:
            return (
                context.request_id, bean.msg_id, str(context.cost_time_ms), success, keys,
                str(context.context_code), time, context.group_name,
            )  # fmt: skip
        case TraceType.END_TRANSACTION:
            return (
                time, region, context.group_name, bean.topic, bean.msg_id, bean.tags or _NULL, keys,
                bean.store_host, str(bean.msg_type), bean.transaction_id, bean.transaction_state,
                _java_bool(bean.from_transaction_check),
            )  # fmt: skip


def decode(text: str) -> Iterator[TraceContext]:
    """Yield what a trace message records, also one of another client; a context has one bean.

    A record that cannot be read, or of an unknown type, is passed over: what stands
    around it is worth as much.
    """
    for record in text.split(FIELD_SEPARATOR):
        name, *values = record.split(CONTENT_SEPARATOR)
        try:
            kind = TraceType(name)
            yield _READERS[kind]([_not_null(value) for value in values])
        except (ValueError, IndexError):
            continue


def _read_pub(values: list[str]) -> TraceContext:
    time, region, group, topic, msg_id, tags, keys, host, length, cost, kind = values[:11]
    # The oldest clients wrote no offset message id; some later ones their own address at the end.
    offset_msg_id, success = ("", values[11]) if len(values) == 12 else (values[11], values[12])
    bean = TraceBean(
        msg_id, topic, tags, keys, host, int(length), int(kind), offset_msg_id
    )  # fmt: skip
    return TraceContext(
        TraceType.PUB, int(time), (bean,), region, group, int(cost), _is_true(success)
    )


def _read_sub_before(values: list[str]) -> TraceContext:
    time, region, group, request_id, msg_id, retries = values[:6]
    keys = values[6] if len(values) > 6 else ""
    bean = TraceBean(msg_id, keys=keys, retry_times=int(retries))
    return TraceContext(
        TraceType.SUB_BEFORE, int(time), (bean,), region, group, request_id=request_id
    )


def _read_sub_after(values: list[str]) -> TraceContext:
    request_id, msg_id, cost, success = values[:4]
    keys = values[4] if len(values) > 4 else ""
    bean = TraceBean(msg_id, keys=keys)
    return TraceContext(
        TraceType.SUB_AFTER,
        int(values[6]) if len(values) > 6 else 0,
        (bean,),
        group_name=values[7] if len(values) > 7 else "",
        cost_time_ms=int(cost),
        is_success=_is_true(success),
        request_id=request_id,
        context_code=int(values[5]) if len(values) > 5 else 0,
    )


def _read_end_transaction(values: list[str]) -> TraceContext:
    time, region, group, topic, msg_id, tags, keys, host, kind, transaction, state, check = values[
        :12
    ]
    bean = TraceBean(
        msg_id, topic, tags, keys, host, msg_type=int(kind), transaction_id=transaction,
        transaction_state=state, from_transaction_check=_is_true(check),
    )  # fmt: skip
    return TraceContext(TraceType.END_TRANSACTION, int(time), (bean,), region, group)


_READERS: Final = {
    TraceType.PUB: _read_pub,
    TraceType.SUB_BEFORE: _read_sub_before,
    TraceType.SUB_AFTER: _read_sub_after,
    TraceType.END_TRANSACTION: _read_end_transaction,
}


def _java_bool(value: bool) -> str:
    return "true" if value else "false"


def _is_true(text: str) -> bool:
    return text.lower() == "true"


def _not_null(text: str) -> str:
    return "" if text == _NULL else text
