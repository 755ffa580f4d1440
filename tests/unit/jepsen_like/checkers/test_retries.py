"""Messages given back: nothing lost, nothing doubled, counted right; one planted anomaly each."""

import pytest

from dledger.jepsen_like.checkers.retries import (
    DOUBLED,
    EARLY,
    LOST,
    MAX_TRIES,
    NOWHERE,
    check_history,
)
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from tests.harness.rows import row

RETRY, DEAD = "%RETRY%g", "%DLQ%g"


class Rows:
    """A history under construction."""

    def __init__(self) -> None:
        self.rows: list[Operation] = []

    def gave(self, value: int, tries: int, outcome: Outcome = Outcome.OK, asked: int = 0) -> None:
        fields = {"outcome": outcome, "value": value, "cnt": tries, "status": asked}
        self.rows.append(row(len(self.rows), F.SEND_BACK, 1, 2, **fields))

    def there(self, value: int, tries: int, topic: str = RETRY, min_off: int = 0) -> None:
        fields = {"topic": topic, "value": value, "cnt": tries, "min_off": min_off}
        self.rows.append(row(len(self.rows), F.RETURNED, 3, 4, **fields))

    def names(self) -> list[str]:
        return [violation.name for violation in check_history(self.rows).violations]


@pytest.fixture
def good() -> Rows:
    """A message tried until it is given up, one given up at once, one that no send knows."""
    rows = Rows()
    for tries in range(MAX_TRIES):
        rows.gave(7, tries)
        rows.there(7, tries + 1)
    rows.gave(7, MAX_TRIES)
    rows.there(7, MAX_TRIES + 1, DEAD)
    rows.gave(8, 0, asked=-1)
    rows.there(8, 1, DEAD)
    rows.gave(9, 0, Outcome.INFO)
    rows.gave(9, 0, Outcome.FAIL)
    return rows


def test_what_was_given_back_once_is_there_once(good: Rows) -> None:
    verdict = check_history(good.rows)
    assert (verdict.validity, verdict.violations) == ("valid", ())
    assert verdict.counts == {
        "acknowledged": 5, "unknown": 1, "there": 5, "dead": 2, "tries_max": MAX_TRIES + 1,
    }  # fmt: skip


def test_an_unknown_one_may_be_there_but_once(good: Rows) -> None:
    good.there(9, 1)
    assert good.names() == []
    good.there(9, 1)
    assert good.names() == [DOUBLED]


def test_a_lost_one_is_found_unless_retention_took_the_beginning(good: Rows) -> None:
    good.gave(10, 0)
    assert good.names() == [LOST]
    good.there(NOTHING, 0, min_off=5)
    assert good.names() == []


def test_a_wrong_count_is_a_lost_one_and_one_out_of_nothing(good: Rows) -> None:
    good.gave(10, 1)
    good.there(10, 1)
    assert sorted(good.names()) == sorted([LOST, NOWHERE])


def test_the_wrong_topic_is_found(good: Rows) -> None:
    good.gave(10, MAX_TRIES)
    good.there(10, MAX_TRIES + 1)
    assert sorted(good.names()) == sorted([LOST, NOWHERE])


def test_retries_no_verdict_before_everything_is_read(good: Rows) -> None:
    good.gave(10, 0)
    assert check_history(good.rows, drained=False).violations == ()


@pytest.mark.parametrize(
    ("outcome", "call_ns", "error_ns", "is_early"),
    [
        (Outcome.OK, 99, 0, True),
        (Outcome.OK, 100, 0, False),
        (Outcome.OK, 99, 1, False),
        (Outcome.INFO, 99, 0, True),
        (Outcome.FAIL, 99, 0, False),
    ],
)
def test_a_retry_is_not_read_before_its_delay(
    outcome: Outcome, call_ns: int, error_ns: int, is_early: bool
) -> None:
    rows = Rows()
    for tries, due_ns in ((0, 100), (0, 200), (1, NOTHING)):
        rows.gave(7, tries, outcome)
        rows.rows[-1].due_ns = due_ns
    rows.gave(7, 5, asked=-1)  # no row is known that it came from
    rows.rows[2].call_ns = call_ns
    whole = check_history(rows.rows, drained=False, clock_error_ns=error_ns)
    shown = [(violation.name, violation.operations) for violation in whole.violations]
    assert shown[:1] == ([(EARLY, (0, 2))] if is_early else [])
