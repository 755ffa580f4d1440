"""Compiled expressions are kept, and not too many of them."""

from __future__ import annotations

import pytest

from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.expression_cache import ExpressionCache


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
