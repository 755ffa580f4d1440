"""Cases of which `make test` takes a few; the others are a hunt."""

from collections.abc import Iterable
from typing import Any

import pytest


def gate_part(cases: Iterable[Any], count: int) -> list[Any]:
    """Return all *cases* for ``parametrize``; all but *count* of them, evenly spread, are hunts."""
    every = list(cases)
    chosen = {at * len(every) // count for at in range(count)}
    return [
        case if at in chosen else pytest.param(case, marks=pytest.mark.hunt)
        for at, case in enumerate(every)
    ]
