"""The retry schedule: where next, how soon, how often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.client.core.errors import BrokerUnreachableError, ClientClosedError, NoRouteError
from dledger.client.core.retry import (
    Failure,
    FailureKind,
    Retry,
    RetryPolicy,
    RetrySchedule,
    Where,
    failure_from_answer,
    failure_from_error,
    failure_of_answer,
    retry_after_s,
    time_left_s,
)
from dledger.commitlog.errors import LocalProtocolError, MQError, RemoteProtocolError
from dledger.remoting.errors import ConnectionLostError, RequestTimedOutError, TooManyInFlightError
from dledger.remoting.protocol.command import RemotingCommand, request, response_to


def test_pauses_double_up_to_the_longest() -> None:
    schedule = RetrySchedule(RetryPolicy(), deadline=100.0)
    steps = [schedule.next(FailureKind.BUSY, 0.0) for _ in range(6)]
    assert [s.delay_s for s in steps if s] == [0.02, 0.04, 0.08, 0.16, 0.25, 0.25]


def test_retry_follows_a_named_leader_at_once_but_bounded() -> None:
    schedule = RetrySchedule(RetryPolicy(max_redirects=3), deadline=100.0)
    steps = [schedule.next(FailureKind.REDIRECTED, 0.0) for _ in range(5)]
    assert steps == [
        Retry(Where.NAMED_LEADER, 0.0),
        Retry(Where.NAMED_LEADER, 0.0),
        Retry(Where.NAMED_LEADER, 0.0),
        Retry(Where.SAME_GROUP, 0.02),
        Retry(Where.NAMED_LEADER, 0.0),
    ]


def test_retry_of_unknown_outcomes_stays_in_the_group() -> None:
    schedule = RetrySchedule(RetryPolicy(max_retries=2), deadline=100.0)
    steps = [schedule.next(FailureKind.UNKNOWN, 0.0, other_broker=True) for _ in range(3)]
    assert [s and s.where for s in steps] == [Where.SAME_GROUP, Where.SAME_GROUP, None]


def test_retry_leaves_an_unreachable_broker_where_allowed() -> None:
    schedule = RetrySchedule(RetryPolicy(), deadline=100.0)
    assert schedule.next(FailureKind.UNREACHABLE, 0.0, other_broker=True) == Retry(
        Where.OTHER_BROKER, 0.02
    )
    assert schedule.next(FailureKind.UNREACHABLE, 0.0) == Retry(Where.SAME_GROUP, 0.04)


def test_retry_leaves_a_leaderless_group_after_an_election() -> None:
    schedule = RetrySchedule(RetryPolicy(leaderless_s=3.0), deadline=100.0)
    times = [10.0, 12.9, 13.0, 20.0]
    steps = [schedule.next(FailureKind.NOT_LEADER, at, other_broker=True) for at in times]
    assert [s and s.where for s in steps] == [
        Where.SAME_GROUP, Where.SAME_GROUP, Where.OTHER_BROKER, Where.OTHER_BROKER,
    ]  # fmt: skip


def test_retry_counts_leaderless_time_again_after_other_errors() -> None:
    schedule = RetrySchedule(RetryPolicy(leaderless_s=3.0), deadline=100.0)
    schedule.next(FailureKind.NOT_LEADER, 0.0, other_broker=True)
    schedule.next(FailureKind.BUSY, 2.0, other_broker=True)
    step = schedule.next(FailureKind.NOT_LEADER, 4.0, other_broker=True)
    assert step is not None
    assert step.where is Where.SAME_GROUP


def test_without_another_group_a_message_waits_for_its_own() -> None:
    schedule = RetrySchedule(RetryPolicy(leaderless_s=3.0), deadline=100.0)
    steps = [schedule.next(FailureKind.NOT_LEADER, at) for at in (0.0, 50.0)]
    assert [s and s.where for s in steps] == [Where.SAME_GROUP, Where.SAME_GROUP]


def test_a_refusal_of_this_broker_is_final_without_another_one() -> None:
    schedule = RetrySchedule(RetryPolicy(), deadline=100.0)
    assert schedule.next(FailureKind.REFUSED_HERE, 0.0) is None
    assert schedule.next(FailureKind.REFUSED_HERE, 0.0, other_broker=True) == Retry(
        Where.OTHER_BROKER, 0.0
    )


@pytest.mark.parametrize(
    ("code", "ext", "expected"),
    [
        (14, {"leaderAddr": "a:1", "term": "3"}, (FailureKind.REDIRECTED, "a:1", 3)),
        (14, {"term": "3", "outcome": "not_stored"}, (FailureKind.NOT_LEADER, None, 3)),
        (14, {}, (FailureKind.BUSY, None, -1)),
        (2, {}, (FailureKind.BUSY, None, -1)),
        (1, {}, (FailureKind.UNKNOWN, None, -1)),
        (1, {"outcome": "not_stored"}, (FailureKind.FINAL, None, -1)),
        (1, {"outcome": "unknown", "leaderAddr": "a:1"}, (FailureKind.UNKNOWN, "a:1", -1)),
        (13, {}, (FailureKind.FINAL, None, -1)),
        (16, {}, (FailureKind.REFUSED_HERE, None, -1)),
        (17, {"term": "many"}, (FailureKind.REFUSED_HERE, None, -1)),
        (29, {}, (FailureKind.FINAL, None, -1)),
    ],
)
def test_retry_step_follows_from_the_answer(
    code: int, ext: dict[str, str], expected: tuple[FailureKind, str | None, int]
) -> None:
    assert failure_of_answer(RemotingCommand(code, ext=ext)) == expected


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_no_attempt_gets_less_than_no_time(
    deadline_s: float, now_s: float, longest_s: float
) -> None:
    left_s = time_left_s(deadline_s, now_s, longest_s)
    assert 0 <= left_s <= longest_s
    if deadline_s > now_s and longest_s > 0:
        assert 0 < left_s <= deadline_s - now_s


@pytest.mark.parametrize(
    ("said", "pause_s"), [("250", 0.25), ("0", 0.0), ("x", 0.0), ("-5", 0.0), ("900000", 5.0)]
)
def test_retry_waits_as_long_as_a_broker_asks_within_bounds(said: str, pause_s: float) -> None:
    answer = response_to(request(310), 2, "busy", {"retryAfterMs": said})
    assert retry_after_s(answer) == pause_s


def test_what_may_be_repeated_is_until_the_deadline() -> None:
    schedule = RetrySchedule(RetryPolicy(max_retries=1), deadline=100.0)
    steps = [
        schedule.next(FailureKind.UNKNOWN, float(now), repeatable=True) for now in range(0, 100, 9)
    ]
    assert all(step is not None and step.where is Where.SAME_GROUP for step in steps)
    assert schedule.next(FailureKind.UNKNOWN, 100.0, repeatable=True) is None
    assert schedule.next(FailureKind.UNKNOWN, 50.0) is not None
    assert schedule.next(FailureKind.UNKNOWN, 50.0) is None


def test_retry_of_unknown_outcomes_can_be_off() -> None:
    schedule = RetrySchedule(RetryPolicy(retry_unknown=False), deadline=100.0)
    assert schedule.next(FailureKind.UNKNOWN, 0.0, repeatable=True) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BrokerUnreachableError("x"), FailureKind.UNREACHABLE),
        (ClientClosedError("x"), FailureKind.UNREACHABLE),
        (TooManyInFlightError("x"), FailureKind.BUSY),
        (ConnectionLostError("x", sent=True), FailureKind.UNKNOWN),
        (ConnectionLostError("x", sent=False), FailureKind.UNREACHABLE),
        (RequestTimedOutError("x"), FailureKind.UNKNOWN),
        (RemoteProtocolError("x"), FailureKind.UNKNOWN),
        (LocalProtocolError("x"), FailureKind.FINAL),
    ],
)
def test_failure_from_error_by_what_may_have_been_sent(error: MQError, kind: FailureKind) -> None:
    assert failure_from_error(error) == Failure(kind, remark="x")


def test_failure_from_error_passes_on_what_ends_no_call() -> None:
    with pytest.raises(NoRouteError):
        failure_from_error(NoRouteError("x"))


def test_failure_from_answer_takes_what_the_broker_asks_for() -> None:
    asked = request(10)
    ext = {"retryAfterMs": "700", "retriable": "true", "reason": "producer_unknown"}
    answer = response_to(asked, 2, "busy", dict(ext))
    expected = Failure(FailureKind.BUSY, 2, "busy", 0.7, is_repeatable=True, is_forgotten=True)
    assert failure_from_answer(answer, FailureKind.BUSY) == expected
