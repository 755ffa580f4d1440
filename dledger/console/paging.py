"""A long list, page by page, and its search. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from dledger.console.texts import whole

PAGE_ROWS: Final = 50
"""Rows of one page: each may cost questions to every broker."""


@dataclass(frozen=True, slots=True)
class Paged:
    """One page of a list of names."""

    rows: Sequence[str]
    number: int
    total: int
    before: str | None
    after: str | None

    @property
    def first_row(self) -> int:
        """Number of the first row on the page, from 1; 0 when there is none."""
        return (self.number - 1) * PAGE_ROWS + 1 if self.total else 0


def paged(names: Sequence[str], asked: str | None, **search: str) -> Paged:
    """Return the page that an address asks for, the nearest there is, of the names that match.

    *search*: fields of the address; a name has every word of ``q``, whatever their case.
    """
    words = search.get("q", "").lower().split()
    names = [name for name in names if all(word in name.lower() for word in words)]
    pages = max(1, -(-len(names) // PAGE_ROWS))
    number = min(max(1, whole(asked or "") or 1), pages)
    begin = (number - 1) * PAGE_ROWS
    kept = {key: value for key, value in search.items() if value}
    before, after = (
        f"?{urlencode({**kept, 'page': other})}" if 1 <= other <= pages else None
        for other in (number - 1, number + 1)
    )
    return Paged(names[begin : begin + PAGE_ROWS], number, len(names), before, after)
