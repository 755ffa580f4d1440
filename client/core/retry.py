"""When a failed attempt is followed by another one, where, and after how long. Pure arithmetic.

The caller gives :class:`RetrySchedule` what went wrong and the time; it answers with the
next step or with nothing. It never waits and never reads a clock.

===========================  =======================  ======================================
failure                      where next               limited by
===========================  =======================  ======================================
REDIRECTED (leader named)    the named leader         at once, up to max_redirects in a row
NOT_LEADER (none named)       same group, or after     deadline
                             some time another broker
UNREACHABLE (not sent)       another broker or group  deadline
BUSY                         another broker or group  deadline
REFUSED_HERE                 another broker only      max_retries, and another broker exists
REQUESTER_AWAY (of a reply)  another broker or group  requester_away_s, deadline
UNKNOWN (sent, no answer)    same group               max_retries, deadline, retry_unknown
UNKNOWN, and repeatable      same group               deadline, retry_unknown
FINAL                        nowhere
===========================  =======================  ======================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    RequestFailedError,
    UnknownOutcomeError,
)
from dledger.commitlog.errors import LocalProtocolError, MQError, RemoteProtocolError
from dledger.remoting.errors import ConnectionLostError, RequestTimedOutError, TooManyInFlightError
from dledger.remoting.protocol.codes import ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.outcome import (
    LEADER_FIELD,
    REASON_FIELD,
    RETRIABLE_FIELD,
    RETRY_AFTER_FIELD,
    TERM_FIELD,
    Condition,
    outcome_of,
)


class FailureKind(Enum):
    """What a failed attempt means for the next one."""

    REDIRECTED = auto()
    NOT_LEADER = auto()
    UNREACHABLE = auto()
    BUSY = auto()
    REFUSED_HERE = auto()
    REQUESTER_AWAY = auto()
    UNKNOWN = auto()
    FINAL = auto()


class Where(Enum):
    """Where the next attempt goes."""

    NAMED_LEADER = auto()
    """To the address the last answer named; no search is needed."""
    SAME_GROUP = auto()
    """To the same broker name, after finding out its leader."""
    OTHER_BROKER = auto()
    """To a queue of another broker name if the topic has one, else as SAME_GROUP."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often a send is tried.

    Attributes:
        max_retries: Attempts after the first one whose outcome was unknown, or that this broker
            refused for good. What was certainly not stored and may go better later is retried
            until the deadline instead.
        retry_unknown: Send again when the outcome is unknown: at least once, or exactly once when
            the broker recognizes repetitions. Off: the caller gets the error at once.
        first_backoff_s: Pause before the second try; doubles each time.
        max_backoff_s: Longest pause; well under the second a fail-over takes.
        leaderless_s: How long a group may have no leader before its messages go to another one, if
            there is one: longer than an election takes, so that a fail-over moves none.
        requester_away_s: How long a reply is tried whose requester is not connected: a client that
            lost a connection is back sooner, and one that has ended must not hold up its replier.
        max_redirects: Redirects followed at once in a row, so that two confused followers that
            name each other do not make a busy loop.
    """

    max_retries: int = 2
    retry_unknown: bool = True
    first_backoff_s: float = 0.020
    max_backoff_s: float = 0.250
    leaderless_s: float = 3.0
    requester_away_s: float = 1.0
    max_redirects: int = 3


@dataclass(frozen=True, slots=True)
class Retry:
    """One more attempt: wait *delay_s*, then go *where*."""

    where: Where
    delay_s: float


class RetrySchedule:
    """The attempts of one send. A step is only given if it starts before the deadline."""

    __slots__ = (
        "_away_since",
        "_backoff_s",
        "_counted",
        "_deadline",
        "_leaderless_since",
        "_policy",
        "_redirects",
    )

    def __init__(self, policy: RetryPolicy, deadline: float) -> None:
        """Start a schedule."""
        self._policy = policy
        self._deadline = deadline
        self._backoff_s = policy.first_backoff_s
        self._counted = 0
        self._away_since: float | None = None
        self._leaderless_since: float | None = None
        self._redirects = 0

    def next(
        self,
        failure: FailureKind,
        now: float,
        *,
        other_broker: bool = False,
        repeatable: bool = False,
    ) -> Retry | None:
        """Return the step after a *failure* seen at *now*, or None when it is over.

        Args:
            other_broker: The message may go to another broker name and there is one.
            repeatable: The broker stores a repetition once, so one more costs nothing.
        """
        policy = self._policy
        if failure is FailureKind.FINAL or now >= self._deadline:
            return None
        if failure is FailureKind.REDIRECTED:
            self._redirects += 1
            if self._redirects <= policy.max_redirects:
                return Retry(Where.NAMED_LEADER, 0.0)
            self._redirects = 0
            return self._paused(Where.SAME_GROUP, now)
        self._redirects = 0
        if failure is FailureKind.NOT_LEADER:
            if self._leaderless_since is None:
                self._leaderless_since = now
            for_long = now - self._leaderless_since >= policy.leaderless_s
            away = for_long and other_broker
            return self._paused(Where.OTHER_BROKER if away else Where.SAME_GROUP, now)
        self._leaderless_since = None
        if failure is FailureKind.REQUESTER_AWAY:
            if self._away_since is None:
                self._away_since = now
            if now - self._away_since >= policy.requester_away_s:
                return None
        if failure is FailureKind.UNKNOWN:
            if not policy.retry_unknown:
                return None
            if not repeatable:
                if self._counted >= policy.max_retries:
                    return None
                self._counted += 1
            return self._paused(Where.SAME_GROUP, now)
        if failure is FailureKind.REFUSED_HERE:
            if not other_broker or self._counted >= policy.max_retries:
                return None
            self._counted += 1
            return Retry(Where.OTHER_BROKER, 0.0)
        return self._paused(Where.OTHER_BROKER if other_broker else Where.SAME_GROUP, now)

    def _paused(self, where: Where, now: float) -> Retry | None:
        delay_s = self._backoff_s
        if now + delay_s >= self._deadline:
            return None
        self._backoff_s = min(delay_s * 2, self._policy.max_backoff_s)
        return Retry(where, delay_s)


_BUSY_CODES = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE})
_REFUSED_HERE_CODES = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
    }
)


def time_left_s(deadline_s: float, now_s: float, longest_s: float = float("inf")) -> float:
    """Return how long something may still take: 0 when the time is over, and never less."""
    return max(0.0, min(longest_s, deadline_s - now_s))


def failure_of_answer(answer: RemotingCommand) -> tuple[FailureKind, str | None, int]:
    """Return what a refusing answer means, and the leader and term it names.

    Args:
        answer: A response whose code is not one of the success codes 0, 10, 11, 12.
    Returns:
        Kind; address of the leader or None; term or -1.
    """
    leader = answer.ext.get(LEADER_FIELD) or None
    try:
        term = whole_number(answer.ext.get(TERM_FIELD, -1))
    except ValueError:
        term = -1
    if leader is not None and not isinstance(leader, str):
        leader = None
    if outcome_of(answer) == "unknown":
        return FailureKind.UNKNOWN, leader, term
    if answer.ext.get(REASON_FIELD) == Condition.REQUESTER_AWAY.value:
        return FailureKind.REQUESTER_AWAY, leader, term
    if answer.code == ResponseCode.SERVICE_NOT_AVAILABLE:
        if leader is not None:
            return FailureKind.REDIRECTED, leader, term
        if term >= 0:
            return FailureKind.NOT_LEADER, None, term
    return failure_of_code(answer.code), leader, term


RETRY_AFTER_MAX_S: Final = 5.0
"""No broker makes a client wait longer than this."""


def retry_after_s(answer: RemotingCommand) -> float:
    """Return how long a refusing broker asks not to be asked again; 0 when it does not say."""
    try:
        asked_ms = whole_number(answer.ext.get(RETRY_AFTER_FIELD, 0))
    except ValueError:
        return 0.0
    return min(max(asked_ms, 0), RETRY_AFTER_MAX_S * 1000) / 1000


def is_retriable(answer: RemotingCommand) -> bool:
    """Return whether a refusing broker answers that asking again can help."""
    return answer.ext.get(RETRIABLE_FIELD) == "true"


def failure_of_code(code: int) -> FailureKind:
    """Return what a refusing code means when nothing was stored, e.g. for one run of a request."""
    if code in _BUSY_CODES:
        return FailureKind.BUSY
    if code in _REFUSED_HERE_CODES:
        return FailureKind.REFUSED_HERE
    return FailureKind.FINAL


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed.

    Attributes:
        kind: What it means for the next attempt.
        code: Response code; -1 when there was no answer.
        remark: For people.
        retry_after_s: Shortest pause, as the broker asks for.
        is_repeatable: Asking again can help.
        is_forgotten: The broker does not know (any more) what became of a sequence.
    """

    kind: FailureKind
    code: int = -1
    remark: str = ""
    retry_after_s: float = 0.0
    is_repeatable: bool = True
    is_forgotten: bool = False


_FORGOTTEN: Final = frozenset({Condition.PRODUCER_UNKNOWN.value, Condition.SEQUENCE_TOO_OLD.value})


def failure_from_answer(answer: RemotingCommand, kind: FailureKind) -> Failure:
    """Return the failure a refusing *answer* stands for."""
    return Failure(
        kind,
        answer.code,
        answer.remark or "",
        retry_after_s(answer),
        is_retriable(answer),
        answer.ext.get(REASON_FIELD) in _FORGOTTEN,
    )


def error_of_call(what: str, error: RequestFailedError, *, unknown: str = "") -> ClientError:
    """Return the error of a change that no leader took.

    Args:
        what: What was asked for.
        unknown: What may be added where its outcome is not known.
    """
    if error.outcome == "unknown":
        return UnknownOutcomeError(f"{what} may or may not count: {error}{unknown}")
    is_busy = failure_of_code(error.code) is FailureKind.BUSY
    kind = BrokerBusyError if is_busy else BrokerRefusedError
    return kind(f"{what}: {error}", code=error.code, remark=error.remark)


def failure_from_error(error: MQError) -> Failure:
    """Return the failure that an error of a call stands for.

    Raises MQError: *error*, when it is none that a call ends with.
    """
    match error:
        case BrokerUnreachableError() | ClientClosedError():
            kind = FailureKind.UNREACHABLE
        case TooManyInFlightError():
            kind = FailureKind.BUSY
        case ConnectionLostError():
            kind = FailureKind.UNKNOWN if error.sent else FailureKind.UNREACHABLE
        case RequestTimedOutError() | RemoteProtocolError():
            kind = FailureKind.UNKNOWN
        case LocalProtocolError():
            kind = FailureKind.FINAL
        case RequestFailedError() if error.code >= 0:
            # The account is not let in; of the messages nothing was sent.
            return Failure(failure_of_code(error.code), error.code, error.remark)
        case _:
            raise error
    return Failure(kind, remark=str(error))
