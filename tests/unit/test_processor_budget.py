"""Fast tests have a budget of processor time, slow ones and those under coverage have none."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.harness import processor_budget
from tests.harness.processor_budget import BUDGET_S, FACTOR, NOTED, pytest_runtest_call
from tests.harness.shipped_files import ROOT


class Item:
    """A test, as far as the budget reads it."""

    def __init__(self, *marks: str) -> None:
        self.marks = marks
        self.user_properties: list[tuple[str, object]] = []

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


def noted(item: Item) -> list[str]:
    """Return what the report of a test has of its time."""
    return [f"{value:.1f}" for name, value in item.user_properties if name == NOTED]


def test_fast_test_over_its_budget_is_noted(spent: list[float]) -> None:
    item = Item()
    spent += [7.0, 7.0 + FACTOR * BUDGET_S + 0.1]
    call(item)
    assert noted(item) == ["5.1"]


def test_fast_test_within_its_budget_is_not_noted(spent: list[float]) -> None:
    item = Item()
    spent += [7.0, 7.0 + FACTOR * BUDGET_S]
    call(item)
    assert noted(item) == []


def test_slow_test_has_no_budget(spent: list[float]) -> None:
    item = Item("slow")
    spent += [0.0, 1_000.0]
    call(item)
    assert noted(item) == []


def test_coverage_lifts_the_budget(spent: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coverage", types.ModuleType("coverage"))
    item = Item()
    spent += [0.0, 1_000.0]
    call(item)
    assert noted(item) == []


def test_run_names_the_longest_tests_first(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.harness import processor_budget\n"
        "from tests.harness.processor_budget import *\n"
        "left = [0.0, 6.0, 0.0, 9.0, 0.0, 1.0]\n"
        "processor_budget.spent_s = lambda: left.pop(0)\n"
    )
    (tmp_path / "test_three.py").write_text(
        "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 passed" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if "mark it slow" in line]
    assert [(took, name.partition("::")[2]) for took, _, name, *_ in lines] == [
        ("9.0", "test_b:"),
        ("6.0", "test_a:"),
    ]


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
