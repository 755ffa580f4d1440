"""Cases of which `make check` or `make test` takes a few; the others are marked slow, or a hunt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast_part(cases: Iterable[Any], count: int) -> list[Any]:
    """Return all *cases* for ``parametrize``; *count* of them, evenly spread, are fast."""
    return _marked(cases, count, pytest.mark.slow)


def gate_part(cases: Iterable[Any], count: int) -> list[Any]:
    """Return all *cases* for ``parametrize``; all but *count* of them, evenly spread, are hunts."""
    return _marked(cases, count, pytest.mark.hunt)


def _marked(cases: Iterable[Any], count: int, mark: pytest.MarkDecorator) -> list[Any]:
    every = list(cases)
    chosen = {at * len(every) // count for at in range(count)}
    return [
        case if at in chosen else pytest.param(case, marks=mark) for at, case in enumerate(every)
    ]
