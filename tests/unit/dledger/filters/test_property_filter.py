"""How far a scan goes, and what it finds."""

from __future__ import annotations

import numpy as np
import pytest

from commitlog.errors import OffsetOutOfRangeError
from commitlog.properties import encode_properties
from commitlog.queue_unit import UNIT_DTYPE, Units
from commitlog.record import encode_record
from dledger.filters import property_filter
from dledger.filters.errors import DamagedMessageError
from dledger.filters.property_filter import Expression, RetryFilter, scan


class Log:
    """Records back to back."""

    def __init__(self, properties: list[dict[str, str]]) -> None:
        records = [
            encode_record(topic="T", queue_id=0, body=b"b" * i, properties=encode_properties(item))
            for i, item in enumerate(properties)
        ]
        self.data = bytearray(b"".join(records))
        self.units: Units = np.zeros(len(records), UNIT_DTYPE)
        self.units["size"] = [len(record) for record in records]
        self.units["phy_offset"] = np.cumsum(self.units["size"]) - self.units["size"]
        self.reads = 0

    def read(self, position: int, size: int) -> memoryview:
        self.reads += 1
        return memoryview(self.data)[position : position + size]


@pytest.fixture
def numbers() -> Log:
    return Log([{"n": str(i)} for i in range(100)])


def test_what_matches_is_named_by_its_place(numbers: Log) -> None:
    wants = Expression("n BETWEEN 90 AND 92 OR n = 7")
    assert scan(numbers.read, numbers.units, 32, wants) == ([7, 90, 91, 92], 100)


def test_it_stops_when_enough_match(numbers: Log) -> None:
    assert scan(numbers.read, numbers.units, 2, Expression("n >= 10")) == ([10, 11], 12)
    assert numbers.reads == 12


def test_nothing_matches(numbers: Log) -> None:
    assert scan(numbers.read, numbers.units, 32, Expression("n > 100")) == ([], 100)


def test_a_costly_expression_is_asked_about_fewer_messages(
    numbers: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(property_filter, "MAX_SCAN_COST", 110)
    assert Expression("n > 100").cost == 3
    assert scan(numbers.read, numbers.units, 32, Expression("n > 100")) == ([], 10)
    costly = Expression(" AND ".join(["n > 100"] * 250))
    assert scan(numbers.read, numbers.units, 32, costly) == ([], 1), "it always gets on"


def test_long_properties_end_a_scan_early(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([{"n": "1", "x": "y" * 1000}] * 20)
    monkeypatch.setattr(property_filter, "MAX_SCAN_PROPERTIES_BYTES", 3000)
    assert scan(log.read, log.units, 32, Expression("n = 2")) == ([], 3)
    assert scan(log.read, log.units, 32, Expression("n = 1")) == ([0, 1, 2], 3)


def test_a_damaged_record_is_named(numbers: Log) -> None:
    position, size = int(numbers.units["phy_offset"][3]), int(numbers.units["size"][3])
    numbers.data[position + 84 : position + 88] = b"\xff\xff\xff\xff"
    with pytest.raises(DamagedMessageError) as raised:
        scan(numbers.read, numbers.units, 32, Expression("n = 1"))
    assert (raised.value.position, raised.value.size) == (position, size)


def test_property_filter_passes_errors_of_the_log(numbers: Log) -> None:
    def read(_position: int, _size: int) -> memoryview:
        raise OffsetOutOfRangeError("gone")

    with pytest.raises(OffsetOutOfRangeError):
        scan(read, numbers.units, 32, Expression("n = 1"))


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"RETRY_TOPIC": "T", "n": "5"}, True),
        ({"RETRY_TOPIC": "T", "n": "4"}, False),
        ({"RETRY_TOPIC": "T"}, False),
        ({"RETRY_TOPIC": "S", "s": "x"}, True),
        ({"RETRY_TOPIC": "other", "n": "4"}, True),
        ({"n": "4"}, True),
    ],
)
def test_a_retry_is_judged_by_where_it_comes_from(
    properties: dict[str, str], expected: bool
) -> None:
    wants = RetryFilter({"T": Expression("n = 5"), "S": Expression("s = 'x' OR s = 'y'")})
    assert wants.cost == 7
    assert wants.matches(encode_properties(properties)) is expected
