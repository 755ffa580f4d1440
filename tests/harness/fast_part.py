"""Cases of which `make check` takes a few: the others are marked slow, and run by `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast_part(cases: Iterable[Any], count: int) -> list[Any]:
    """Return all *cases* for ``parametrize``; *count* of them, evenly spread, are fast."""
    every = list(cases)
    fast = {at * len(every) // count for at in range(count)}
    return [
        case if at in fast else pytest.param(case, marks=pytest.mark.slow)
        for at, case in enumerate(every)
    ]
