"""Fast tests have a budget of processor time, slow ones and those under coverage have none."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from tests.harness import processor_budget
from tests.harness.processor_budget import BUDGET_S, FACTOR, pytest_runtest_call


class Item:
    """A test, as far as the budget reads it."""

    def __init__(self, *marks: str) -> None:
        self.marks = marks

    def get_closest_marker(self, name: str) -> object | None:
        return name if name in self.marks else None


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return what the process will have spent, whenever it is asked."""
    left: list[float] = []
    # Nothing is left when the budget of the test itself is read.
    monkeypatch.setattr(processor_budget, "spent_s", lambda: left.pop(0) if left else 0.0)
    monkeypatch.delitem(sys.modules, "coverage", raising=False)
    return left


def call(item: Any) -> None:
    """Run the hook around a test that passes."""
    hook = pytest_runtest_call(item)
    next(hook)
    with pytest.raises(StopIteration):
        next(hook)


def test_fast_test_over_its_budget_fails(spent: list[float]) -> None:
    spent += [7.0, 7.0 + FACTOR * BUDGET_S + 0.1]
    with pytest.raises(pytest.fail.Exception, match=r"took 5\.1 s of processor time"):
        call(Item())


def test_fast_test_within_its_budget_passes(spent: list[float]) -> None:
    spent += [7.0, 7.0 + FACTOR * BUDGET_S]
    call(Item())


def test_slow_test_has_no_budget(spent: list[float]) -> None:
    spent += [0.0, 1_000.0]
    call(Item("slow"))


def test_coverage_lifts_the_budget(spent: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coverage", types.ModuleType("coverage"))
    spent += [0.0, 1_000.0]
    call(Item())


def test_test_that_fails_raises_its_own_error(spent: list[float]) -> None:
    spent += [0.0]
    hook = pytest_runtest_call(Item())  # type: ignore[arg-type]  # one method will do
    next(hook)
    with pytest.raises(ZeroDivisionError):
        hook.throw(ZeroDivisionError())


def test_spent_time_is_that_of_the_processor() -> None:
    before_s = processor_budget.spent_s()
    sum(range(1_000_000))
    assert processor_budget.spent_s() > before_s
