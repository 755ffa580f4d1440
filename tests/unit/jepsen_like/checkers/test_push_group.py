"""Every kind of broken guarantee of a push group is seen, and a good run is none."""

from collections.abc import Callable

import pytest

from dledger.jepsen_like.checkers.push_group import (
    LOST,
    NO_OWNER,
    NOT_COMMITTED,
    OF_PAUSED,
    OUT_OF_ORDER,
    PHANTOM,
    TWO_OWNERS,
    WRONG_COUNT,
    Consumed,
    PushRecord,
    check_record,
)
from dledger.jepsen_like.history.operation import NOTHING


def good() -> PushRecord:
    """Two queues, two members; one message came twice, one through the retry topic."""
    return PushRecord(
        consumed=[
            Consumed("a", 0, 0, 10, 1),
            Consumed("b", 1, 0, 20, 2),
            Consumed("a", 0, 1, 11, 3),
            Consumed("b", 0, 1, 11, 4),
            Consumed("b", NOTHING, 7, 21, 5),
            Consumed("b", 0, 2, 12, 6),
        ],
        stored={0: (0, (10, 11, 12)), 1: (0, (20, 21))},
        owners={"a": frozenset({1}), "b": frozenset({0})},
        committed={0: 3, 1: 2},
        counts={"a start 1": (2, 2), "b start 2": (4, 4)},
    )


def test_a_group_that_did_all_it_must_is_valid() -> None:
    verdict = check_record(good())
    assert verdict.is_valid
    assert verdict.counts == {"consumed": 6, "more_than_once": 1, "members": 2, "lost": 0}


def lose(record: PushRecord) -> None:
    del record.consumed[4]


def abandon(record: PushRecord) -> None:
    record.owners["a"] = frozenset()


def share(record: PushRecord) -> None:
    record.owners["a"] = frozenset({0, 1})


def forget(record: PushRecord) -> None:
    record.committed[0] = 2


def run_ahead(record: PushRecord) -> None:
    record.committed[0] = 4


def commit_nothing(record: PushRecord) -> None:
    del record.committed[1]


def count_badly(record: PushRecord) -> None:
    record.counts["a start 1"] = (3, 2)


def invent(record: PushRecord) -> None:
    record.consumed.append(Consumed("a", 0, 3, 13, 9))


def mistake(record: PushRecord) -> None:
    record.consumed.append(Consumed("a", 0, 1, 12, 9))


def read_on(record: PushRecord) -> None:
    record.of_paused.append("a: queue 0")


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lose, LOST),
        (abandon, NO_OWNER),
        (share, TWO_OWNERS),
        (forget, NOT_COMMITTED),
        (run_ahead, NOT_COMMITTED),
        (commit_nothing, NOT_COMMITTED),
        (count_badly, WRONG_COUNT),
        (invent, PHANTOM),
        (mistake, PHANTOM),
        (read_on, OF_PAUSED),
    ],
)
def test_push_group_names_each_anomaly(spoil: Callable[[PushRecord], None], name: str) -> None:
    record = good()
    spoil(record)
    assert {violation.name for violation in check_record(record).violations} == {name}


def test_what_retention_removed_may_have_been_consumed() -> None:
    record = good()
    record.stored[0] = (2, (12,))
    assert check_record(record).is_valid


def test_orderly_first_delivery_may_not_skip() -> None:
    record = good()
    record.is_orderly = True
    record.consumed = [
        Consumed("a", 0, 0, 10, 1),
        Consumed("a", 0, 1, 11, 2),
        Consumed("b", 0, 0, 10, 3),
        Consumed("b", 0, 1, 11, 4),
        Consumed("b", 0, 2, 12, 5),
        Consumed("b", 1, 0, 20, 6),
        Consumed("b", 1, 1, 21, 7),
    ]
    assert check_record(record).is_valid
    record.consumed[4] = Consumed("b", 0, 2, 12, 5, 2)
    assert check_record(record).is_valid, "begun when the one in front was done"
    record.consumed[4] = Consumed("b", 0, 2, 12, 5, 1)
    assert [violation.name for violation in check_record(record).violations] == [OUT_OF_ORDER]
    del record.consumed[1:4]
    record.consumed.append(Consumed("a", 0, 1, 11, 8))
    found = check_record(record).violations
    assert {(violation.name, violation.subject) for violation in found} == {
        (OUT_OF_ORDER, "queue 0")
    }


def test_a_group_that_did_nothing_proves_nothing() -> None:
    assert check_record(PushRecord()).validity == "unknown"
