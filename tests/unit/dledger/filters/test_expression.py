"""A compiled expression: what it knows of itself, and what it makes of raw properties."""

from __future__ import annotations

import pytest

from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.property_filter import SEARCHED_NAMES, Expression, ExpressionCache
from dledger.filters.sql_tree import MAX_DEPTH


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
