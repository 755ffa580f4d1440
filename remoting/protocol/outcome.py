"""What happened to the message: one table from condition to response code and outcome.

Every answer that is not plain success has `outcome` in its ext fields: ``stored``,
``not_stored`` or ``unknown``. Codes 0, 10, 11 and 12 are used only when the record is in the log.

Spec: docs/internals/protocol/remoting.md, section 4; docs/reference/errors.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum, unique
from typing import Final, NamedTuple

from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    DiskFullError,
    LocalProtocolError,
    LogBusyError,
    MQError,
    OffsetOutOfRangeError,
    Outcome,
)
from dledger.remoting.errors import AccessRefusedError, BadRequestError, BusyError
from dledger.remoting.protocol.codes import ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to

# Names of the ext fields that answers carry.
OUTCOME_FIELD: Final = "outcome"
LEADER_FIELD: Final = "leaderAddr"
TERM_FIELD: Final = "term"
RETRIABLE_FIELD: Final = "retriable"
REASON_FIELD: Final = "reason"
"""Which condition it is, where a code alone does not tell."""
RETRY_AFTER_FIELD: Final = "retryAfterMs"
"""In a refusal for now: do not ask again before this number of milliseconds."""
DECISION_FIELD: Final = "decision"
"""In a refused END_TRANSACTION: what the half message was decided as, ``commit`` and so on."""
GO_AWAY_FIELD: Final = "goAway"
"""In a refusal: this server shuts down; close the connection when nothing is waited for."""

STORED_CODES: Final = frozenset((0, 10, 11, 12))
"""Response codes of a message that is in the log."""


@unique
class Condition(StrEnum):
    """Everything that can be the case when a request has been dealt with."""

    # The record is in the log.
    STORED = "stored"
    FLUSH_DISK_TIMEOUT = "flush_disk_timeout"
    SLAVE_NOT_AVAILABLE = "slave_not_available"
    FLUSH_SLAVE_TIMEOUT = "flush_slave_timeout"
    # Not known here.
    QUORUM_TIMEOUT = "quorum_timeout"
    LEADERSHIP_LOST = "leadership_lost"
    INTERNAL_ERROR = "internal_error"
    PRODUCER_UNKNOWN = "producer_unknown"
    SEQUENCE_TOO_OLD = "sequence_too_old"
    SEQUENCE_UNDECIDED = "sequence_undecided"
    REPLY_UNCONFIRMED = "reply_unconfirmed"
    # Refused before append; the same call may succeed elsewhere or later.
    NOT_LEADER = "not_leader"
    SHUTTING_DOWN = "shutting_down"
    NOT_READY = "not_ready"
    DISK_FULL = "disk_full"
    PENDING_FULL = "pending_full"
    BUSY = "busy"
    SEQUENCE_GAP = "sequence_gap"
    TIMER_FLOW_CONTROL = "timer_flow_control"
    REQUESTER_AWAY = "requester_away"
    # Refused before append; the same call will be refused again.
    MESSAGE_ILLEGAL = "message_illegal"
    TIMER_NOT_ENABLED = "timer_not_enabled"
    ALREADY_DELIVERED = "already_delivered"
    BAD_REQUEST = "bad_request"
    NOT_SUPPORTED = "not_supported"
    NO_PERMISSION = "no_permission"
    TABLE_FULL = "table_full"
    ACCESS_REFUSED = "access_refused"
    TOPIC_NOT_EXIST = "topic_not_exist"
    GROUP_NOT_EXIST = "group_not_exist"
    INVALID_QUEUE = "invalid_queue"
    SUBSCRIPTION_ILLEGAL = "subscription_illegal"
    SUBSCRIPTION_NOT_EXIST = "subscription_not_exist"
    SUBSCRIPTION_NOT_LATEST = "subscription_not_latest"
    NOT_FOUND = "not_found"
    OFFSET_MOVED = "offset_moved"
    SEQUENCE_REUSED = "sequence_reused"
    ILLEGAL_OPERATION = "illegal_operation"
    STALE_LOCK_TOKEN = "stale_lock_token"
    COMMIT_NOT_EXPECTED = "commit_not_expected"
    STALE_RECEIPT = "stale_receipt"
    POP_AT_WORK = "pop_at_work"
    CONSUMER_NOT_ONLINE = "consumer_not_online"
    CLIENT_SILENT = "client_silent"


class Answer(NamedTuple):
    """How a condition is answered to the client."""

    code: ResponseCode
    outcome: Outcome
    retriable: bool


ANSWERS: Final[Mapping[Condition, Answer]] = {
    Condition.STORED: Answer(ResponseCode.SUCCESS, "stored", False),
    Condition.FLUSH_DISK_TIMEOUT: Answer(ResponseCode.FLUSH_DISK_TIMEOUT, "stored", False),
    Condition.SLAVE_NOT_AVAILABLE: Answer(ResponseCode.SLAVE_NOT_AVAILABLE, "stored", False),
    Condition.FLUSH_SLAVE_TIMEOUT: Answer(ResponseCode.FLUSH_SLAVE_TIMEOUT, "stored", False),
    Condition.QUORUM_TIMEOUT: Answer(ResponseCode.SYSTEM_ERROR, "unknown", True),
    Condition.LEADERSHIP_LOST: Answer(ResponseCode.SYSTEM_ERROR, "unknown", True),
    Condition.INTERNAL_ERROR: Answer(ResponseCode.SYSTEM_ERROR, "unknown", False),
    Condition.PRODUCER_UNKNOWN: Answer(ResponseCode.SYSTEM_ERROR, "unknown", False),
    Condition.SEQUENCE_TOO_OLD: Answer(ResponseCode.SYSTEM_ERROR, "unknown", False),
    Condition.SEQUENCE_UNDECIDED: Answer(ResponseCode.SYSTEM_ERROR, "unknown", True),
    Condition.REPLY_UNCONFIRMED: Answer(ResponseCode.SYSTEM_ERROR, "unknown", True),
    Condition.NOT_LEADER: Answer(ResponseCode.SERVICE_NOT_AVAILABLE, "not_stored", True),
    Condition.SHUTTING_DOWN: Answer(ResponseCode.SERVICE_NOT_AVAILABLE, "not_stored", True),
    Condition.NOT_READY: Answer(ResponseCode.SERVICE_NOT_AVAILABLE, "not_stored", True),
    Condition.DISK_FULL: Answer(ResponseCode.SERVICE_NOT_AVAILABLE, "not_stored", True),
    Condition.PENDING_FULL: Answer(ResponseCode.SYSTEM_BUSY, "not_stored", True),
    Condition.BUSY: Answer(ResponseCode.SYSTEM_BUSY, "not_stored", True),
    Condition.SEQUENCE_GAP: Answer(ResponseCode.SYSTEM_BUSY, "not_stored", True),
    Condition.TIMER_FLOW_CONTROL: Answer(ResponseCode.SYSTEM_ERROR, "not_stored", True),
    Condition.REQUESTER_AWAY: Answer(ResponseCode.SYSTEM_ERROR, "not_stored", True),
    Condition.MESSAGE_ILLEGAL: Answer(ResponseCode.MESSAGE_ILLEGAL, "not_stored", False),
    Condition.TIMER_NOT_ENABLED: Answer(ResponseCode.SYSTEM_ERROR, "not_stored", False),
    Condition.ALREADY_DELIVERED: Answer(ResponseCode.ILLEGAL_OPERATION, "not_stored", False),
    Condition.BAD_REQUEST: Answer(ResponseCode.SYSTEM_ERROR, "not_stored", False),
    Condition.NOT_SUPPORTED: Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "not_stored", False),
    Condition.NO_PERMISSION: Answer(ResponseCode.NO_PERMISSION, "not_stored", False),
    Condition.TABLE_FULL: Answer(ResponseCode.NO_PERMISSION, "not_stored", False),
    # Code 1 as in RocketMQ 4.
    Condition.ACCESS_REFUSED: Answer(ResponseCode.SYSTEM_ERROR, "not_stored", False),
    Condition.TOPIC_NOT_EXIST: Answer(ResponseCode.TOPIC_NOT_EXIST, "not_stored", False),
    Condition.GROUP_NOT_EXIST: Answer(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "not_stored", False
    ),
    Condition.INVALID_QUEUE: Answer(ResponseCode.INVALID_PARAMETER, "not_stored", False),
    Condition.SUBSCRIPTION_ILLEGAL: Answer(
        ResponseCode.SUBSCRIPTION_PARSE_FAILED, "not_stored", False
    ),
    Condition.SUBSCRIPTION_NOT_EXIST: Answer(
        ResponseCode.SUBSCRIPTION_NOT_EXIST, "not_stored", True
    ),
    Condition.SUBSCRIPTION_NOT_LATEST: Answer(
        ResponseCode.SUBSCRIPTION_NOT_LATEST, "not_stored", True
    ),
    Condition.NOT_FOUND: Answer(ResponseCode.QUERY_NOT_FOUND, "not_stored", False),
    Condition.OFFSET_MOVED: Answer(ResponseCode.PULL_OFFSET_MOVED, "not_stored", False),
    Condition.SEQUENCE_REUSED: Answer(ResponseCode.MESSAGE_ILLEGAL, "not_stored", False),
    Condition.ILLEGAL_OPERATION: Answer(ResponseCode.ILLEGAL_OPERATION, "not_stored", False),
    Condition.STALE_LOCK_TOKEN: Answer(ResponseCode.STALE_LOCK_TOKEN, "not_stored", False),
    Condition.COMMIT_NOT_EXPECTED: Answer(ResponseCode.COMMIT_NOT_EXPECTED, "not_stored", False),
    # RocketMQ's clients take it for "no such message": the handle is good for nothing any more.
    Condition.STALE_RECEIPT: Answer(ResponseCode.NO_MESSAGE, "not_stored", False),
    Condition.POP_AT_WORK: Answer(ResponseCode.NO_PERMISSION, "not_stored", True),
    Condition.CONSUMER_NOT_ONLINE: Answer(ResponseCode.CONSUMER_NOT_ONLINE, "not_stored", False),
    Condition.CLIENT_SILENT: Answer(ResponseCode.CONSUME_MSG_TIMEOUT, "unknown", True),
}

RETRY_AFTER_MS: Final[Mapping[Condition, int]] = {
    # A named limit of requests: some of them are answered within a flush or two.
    Condition.BUSY: 20,
    # What waits for a majority has to be written first; a tenth of it is space enough to go on.
    Condition.PENDING_FULL: 100,
}
"""How long a refused client is asked to wait; others may ask again as soon as they like."""

# Errors that have a condition of their own. An error class elsewhere names its own in a class
# attribute `condition`, and fields for the answer in an attribute `answer_fields`.
_CONDITIONS: Final[tuple[tuple[type[MQError], Condition], ...]] = (
    (BusyError, Condition.BUSY),
    (AccessRefusedError, Condition.ACCESS_REFUSED),
    (BadRequestError, Condition.BAD_REQUEST),
    (LocalProtocolError, Condition.BAD_REQUEST),
    (DiskFullError, Condition.DISK_FULL),
    (LogBusyError, Condition.NOT_READY),
    (OffsetOutOfRangeError, Condition.NOT_FOUND),
    (CorruptRecordError, Condition.INTERNAL_ERROR),
    # Known to be damaged and being repaired; other replicas have it.
    (CorruptEntryError, Condition.NOT_READY),
)


def condition_of(error: BaseException) -> Condition:
    """Return the condition an error stands for."""
    named = getattr(error, "condition", None)
    if isinstance(named, Condition):
        return named
    for kind, condition in _CONDITIONS:
        if isinstance(error, kind):
            return condition
    return Condition.INTERNAL_ERROR


def answer(
    asked: RemotingCommand, condition: Condition, remark: str | None = None, **fields: object
) -> RemotingCommand:
    """Return the response to *asked* for *condition*."""
    code, outcome, retriable = ANSWERS[condition]
    ext = {name: str(value) for name, value in fields.items() if value is not None}
    retry_after_ms = RETRY_AFTER_MS.get(condition)
    if retry_after_ms is not None:
        ext[RETRY_AFTER_FIELD] = str(retry_after_ms)
        remark = f"{remark or 'busy'}; retry after {retry_after_ms} ms"
    ext[OUTCOME_FIELD] = outcome
    if retriable:
        ext[RETRIABLE_FIELD] = "true"
    return response_to(asked, int(code), remark, ext)


def answer_error(asked: RemotingCommand, error: BaseException) -> RemotingCommand:
    """Return the response to *asked* for *error*: its text as remark, its outcome beside.

    An error outside the table is code 1. If it is one of ours its own `outcome` counts, for it
    knows better than the table.
    """
    condition = condition_of(error)
    fields = getattr(error, "answer_fields", None)
    response = answer(
        asked,
        condition,
        str(error) or type(error).__name__,
        **(fields if isinstance(fields, dict) else {}),
    )
    if condition is Condition.INTERNAL_ERROR and isinstance(error, MQError):
        response.ext[OUTCOME_FIELD] = error.outcome
        if error.retriable:
            response.ext[RETRIABLE_FIELD] = "true"
    return response


def outcome_of(response: RemotingCommand) -> Outcome:
    """Return the outcome that a response has for the message.

    A real RocketMQ sends no `outcome`: its codes decide. Everything it refuses it refuses before
    the append, except code 1, which may mean anything.
    """
    said = response.ext.get(OUTCOME_FIELD)
    if said == "stored":
        return "stored"
    if said == "not_stored":
        return "not_stored"
    if said == "unknown":
        return "unknown"
    if response.code in STORED_CODES:
        return "stored"
    return "unknown" if response.code == ResponseCode.SYSTEM_ERROR else "not_stored"
