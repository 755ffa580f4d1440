"""The retry schedule: where next, how soon, how often."""

from __future__ import annotations

import pytest

from client.retry import (
    FailureKind,
    Retry,
    RetryPolicy,
    RetrySchedule,
    Where,
    failure_of_answer,
    failure_of_code,
)
from remoting.protocol.command import RemotingCommand


def test_pauses_double_up_to_the_longest() -> None:
    schedule = RetrySchedule(RetryPolicy(), deadline=100.0)
    steps = [schedule.next(FailureKind.BUSY, 0.0) for _ in range(6)]
    assert [s.delay_s for s in steps if s] == [0.02, 0.04, 0.08, 0.16, 0.25, 0.25]


def test_a_named_leader_is_followed_at_once_but_not_for_ever() -> None:
    schedule = RetrySchedule(RetryPolicy(max_redirects=3), deadline=100.0)
    steps = [schedule.next(FailureKind.REDIRECTED, 0.0) for _ in range(5)]
    assert steps == [
        Retry(Where.NAMED_LEADER, 0.0),
        Retry(Where.NAMED_LEADER, 0.0),
        Retry(Where.NAMED_LEADER, 0.0),
        Retry(Where.SAME_GROUP, 0.02),
        Retry(Where.NAMED_LEADER, 0.0),
    ]


def test_unknown_outcomes_are_retried_on_the_same_group_a_few_times() -> None:
    schedule = RetrySchedule(RetryPolicy(max_retries=2), deadline=100.0)
    steps = [schedule.next(FailureKind.UNKNOWN, 0.0, other_broker=True) for _ in range(3)]
    assert [s and s.where for s in steps] == [Where.SAME_GROUP, Where.SAME_GROUP, None]


def test_unknown_outcomes_surface_at_once_when_asked_to() -> None:
    schedule = RetrySchedule(RetryPolicy(retry_unknown=False), deadline=100.0)
    assert schedule.next(FailureKind.UNKNOWN, 0.0) is None


def test_an_unreachable_broker_sends_a_message_elsewhere_if_it_may() -> None:
    schedule = RetrySchedule(RetryPolicy(), deadline=100.0)
    assert schedule.next(FailureKind.UNREACHABLE, 0.0, other_broker=True) == Retry(
        Where.OTHER_BROKER, 0.02
    )
    assert schedule.next(FailureKind.UNREACHABLE, 0.0) == Retry(Where.SAME_GROUP, 0.04)


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
def test_an_answer_tells_what_to_do(
    code: int, ext: dict[str, str], expected: tuple[FailureKind, str | None, int]
) -> None:
    assert failure_of_answer(RemotingCommand(code, ext=ext)) == expected


def test_codes_of_single_runs() -> None:
    assert failure_of_code(2) is FailureKind.BUSY
    assert failure_of_code(204) is FailureKind.REFUSED_HERE
    assert failure_of_code(13) is FailureKind.FINAL
