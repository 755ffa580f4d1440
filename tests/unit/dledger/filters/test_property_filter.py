"""How far a scan goes, and what it finds.

A compiled expression: what it knows of itself, and what it makes of raw properties.
"""

import numpy as np
import pytest

from dledger.commitlog.errors import OffsetOutOfRangeError
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.queue_unit import UNIT_DTYPE, Units
from dledger.commitlog.record import encode_record
from dledger.filters import property_filter
from dledger.filters.errors import DamagedMessageError, ExpressionIllegalError
from dledger.filters.property_filter import (
    SEARCHED_NAMES,
    Expression,
    ExpressionCache,
    RetryFilter,
    scan,
)
from dledger.filters.sql_tree import MAX_DEPTH


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
    assert scan(numbers.read, numbers.units, 32, wants)[:2] == ([7, 90, 91, 92], 100)


def test_it_stops_when_enough_match(numbers: Log) -> None:
    assert scan(numbers.read, numbers.units, 2, Expression("n >= 10"))[:2] == ([10, 11], 12)
    assert numbers.reads == 12


def test_nothing_matches(numbers: Log) -> None:
    assert scan(numbers.read, numbers.units, 32, Expression("n > 100"))[:2] == ([], 100)


def test_a_costly_expression_is_asked_about_fewer_messages(
    numbers: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(property_filter, "MAX_SCAN_COST", 110)
    assert Expression("n > 100").cost == 3
    assert scan(numbers.read, numbers.units, 32, Expression("n > 100"))[:2] == ([], 10)
    costly = Expression(" AND ".join(["n > 100"] * 250))
    assert scan(numbers.read, numbers.units, 32, costly)[:2] == ([], 1), "it always gets on"


def test_long_properties_end_a_scan_early(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([{"n": "1", "x": "y" * 1000}] * 20)
    monkeypatch.setattr(property_filter, "MAX_SCAN_PROPERTIES_BYTES", 3000)
    assert scan(log.read, log.units, 32, Expression("n = 2"))[:2] == ([], 3)
    assert scan(log.read, log.units, 32, Expression("n = 1"))[:2] == ([0, 1, 2], 3)


def test_a_scan_states_what_it_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(property_filter, "MAX_SCAN_PROPERTIES_BYTES", 4_000)
    monkeypatch.setattr(property_filter, "MAX_SCAN_COST", 1_000)
    short = Log([{"n": "1"}] * 20)
    wants = Expression("n = 1")
    each = property_filter.MESSAGE_COST + wants.cost
    assert scan(short.read, short.units, 7, wants).cost == 7 * each
    properties = {"n": "1", "x": "y" * 1_000}
    long = Log([properties] * 20)
    two = 2 * len(encode_properties(properties))
    assert scan(long.read, long.units, 2, wants).cost == 1_000 * two // 4_000
    assert scan(long.read, long.units, 32, wants).cost >= 1_000


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
def test_retry_is_judged_by_where_it_comes_from(properties: dict[str, str], expected: bool) -> None:
    wants = RetryFilter({"T": Expression("n = 5"), "S": Expression("s = 'x' OR s = 'y'")})
    assert wants.cost == 7
    assert wants.matches(encode_properties(properties)) is expected


def test_it_knows_its_names_and_its_cost() -> None:
    made = Expression("a > 5 AND (b IN ('x') OR NOT a)")
    assert made.text == "a > 5 AND (b IN ('x') OR NOT a)"
    assert made.names == {"a", "b"}
    # AND, >, a, 5, OR, IN, b, NOT, the cast, a
    assert made.cost == 10


@pytest.mark.parametrize("names", [1, SEARCHED_NAMES, SEARCHED_NAMES + 1])
def test_raw_properties_are_read_leniently(names: int) -> None:
    more = "".join(f" AND p{i} IS NULL" for i in range(1, names))
    made = Expression(f"a = 'x'{more}")
    assert made.matches(b"a\x01x\x02")
    assert made.matches(b"a\x01x"), "the last separator may be missing"
    assert made.matches(b"a\x01y\x02a\x01x\x02"), "the later one wins"
    assert made.matches(b"\x02\x02b\x01\x02a\x01x\x02\x01")
    assert not made.matches(b"a\x01\x02"), "an empty value is none"
    assert not made.matches(b"")
    assert not made.matches(b"aa\x01x\x02")
    assert Expression(f"a = '\ufffd'{more}").matches(b"a\x01\xff\x02")


def test_the_depth_is_limited() -> None:
    def nested(depth: int) -> str:
        return "NOT " * depth + "a"  # a cast and the property stand below

    deepest = Expression(nested(MAX_DEPTH - 2))
    assert deepest.cost == MAX_DEPTH
    assert not deepest.matches(b"a\x01x\x02")
    with pytest.raises(ExpressionIllegalError, match="more than 64 operators"):
        Expression(nested(MAX_DEPTH - 1))
    with pytest.raises(ExpressionIllegalError, match="more than 64 operators"):
        Expression("a IS NULL" + " IS NULL" * 300)


def test_brackets_are_no_operators() -> None:
    assert Expression("(" * 400 + "a = 5" + ")" * 400).matches(b"a\x015\x02")


def test_a_chain_is_not_deep() -> None:
    made = Expression(" OR ".join(["a = 5"] * 250))
    assert made.matches(b"a\x015\x02")
    assert made.cost == 751


def test_a_text_is_compiled_once() -> None:
    cache = ExpressionCache()
    made = cache.get("a = 5")
    assert made.matches(b"a\x015\x02")
    assert cache.get("a = 5") is made
    assert cache.get("a = 6") is not made


def test_why_a_text_is_none_is_kept_too() -> None:
    cache = ExpressionCache()
    with pytest.raises(ExpressionIllegalError, match="ends too early") as first:
        cache.get("a =")
    assert len(cache) == 1
    with pytest.raises(ExpressionIllegalError, match="ends too early") as second:
        cache.get("a =")
    assert first.value is not second.value


def test_the_least_recently_used_leave_first() -> None:
    cache = ExpressionCache(max_chars=15)
    kept, dropped, _ = cache.get("a = 1"), cache.get("a = 2"), cache.get("a = 3")
    assert cache.get("a = 1") is kept
    cache.get("a = 4")
    assert len(cache) == 3
    assert cache.get("a = 1") is kept
    assert cache.get("a = 2") is not dropped


def test_what_is_too_long_is_not_kept() -> None:
    cache = ExpressionCache()
    with pytest.raises(ExpressionIllegalError, match="characters"):
        cache.get("a" * 100_000)
    assert len(cache) == 0
