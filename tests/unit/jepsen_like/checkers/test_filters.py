"""Filtered pulls: what matches is found, in order, and nothing else; one planted anomaly each."""

import pytest

from dledger.jepsen_like.checkers.filters import FILTERS, WRONG, check_history, number_of, tag_of
from dledger.jepsen_like.history.columns import hash_range
from dledger.jepsen_like.history.operation import F, History, ReplicaRead, RunHeader
from tests.harness.rows import row

VALUES = tuple(range(100, 140))


def history(*pulls: tuple[int, int, int, list[int]], begin: int = 0) -> History:
    """Return one of filtered pulls: filter, first offset, where it goes on, what it found."""
    made = History(RunHeader(""))
    made.replica_reads = [
        ReplicaRead(9, "n0", "t", 0, begin, VALUES[begin:20]),
        ReplicaRead(9, "n0", "t", 0, 20, VALUES[20:]),
        ReplicaRead(9, "n1", "t", 0, 30, VALUES[30:]),
    ]
    for number, off, then, values in pulls:
        fields = {"off": off, "max_off": then, "status": number}
        found = {"cnt": len(values), "range_hash": hash_range(0, values)}
        made.operations.append(row(len(made.operations), F.FILTERED, 1, 2, **fields, **found))
    return made


def matching(number: int, off: int, then: int) -> list[int]:
    return [value for value in VALUES[off:then] if FILTERS[number].matches(value)]


@pytest.mark.parametrize("number", range(len(FILTERS)))
def test_what_matches_is_what_must_be_found(number: int) -> None:
    found = matching(number, 3, 40)
    assert 0 < len(found) < 37
    verdict = check_history(history((number, 3, 40, found), (number, 0, 0, [])))
    assert (verdict.validity, verdict.counts) == ("valid", {"pulls": 2, "messages": len(found)})


@pytest.mark.parametrize("number", range(len(FILTERS)))
def test_one_left_out_added_or_out_of_order_is_found(number: int) -> None:
    found = matching(number, 0, 40)
    other = next(value for value in VALUES if not FILTERS[number].matches(value))
    for wrong in (found[1:], found[:-1], [*found, other], [found[1], found[0], *found[2:]]):
        verdict = check_history(history((number, 0, 40, wrong)))
        (violation,) = verdict.violations
        assert (violation.name, violation.operations) == (WRONG, (0,))
        assert FILTERS[number].text in violation.detail


def test_filters_ignore_what_retention_removed() -> None:
    verdict = check_history(history((0, 3, 40, []), (0, 12, 40, matching(0, 12, 40)), begin=10))
    assert (verdict.validity, verdict.counts["pulls"]) == ("valid", 1)


def test_without_a_match_there_is_nothing_to_check() -> None:
    assert check_history(history((0, 0, 1, []))).validity == "unknown"


def test_a_value_without_a_number_is_unknown_to_comparisons() -> None:
    value = 105
    assert (number_of(value), tag_of(value)) == (None, "t1")
    assert [chosen.matches(value) for chosen in FILTERS] == [True, *3 * [False], True, *2 * [False]]
