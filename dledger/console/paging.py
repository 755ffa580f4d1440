"""A long list, page by page, and its search. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar
from urllib.parse import urlencode

PAGE_ROWS: Final = 50
"""Rows of one page: each may cost questions to every broker."""

DIGITS_MAX: Final = 9
"""Of a page's number; no list has as many pages."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Paged(Generic[T]):
    """One page of a list.

    Attributes:
        rows: What is on it.
        number: Which page, from 1.
        pages: How many there are, at least one.
        total: Rows of all pages.
        query: The rest of the address: the search.
    """

    rows: Sequence[T]
    number: int
    pages: int
    total: int
    query: str = ""

    @property
    def before(self) -> str | None:
        """Query of the page before; None on the first."""
        return self._to(self.number - 1) if self.number > 1 else None

    @property
    def after(self) -> str | None:
        """Query of the next page; None on the last."""
        return self._to(self.number + 1) if self.number < self.pages else None

    @property
    def first_row(self) -> int:
        """Number of the first row on the page, from 1; 0 when there is none."""
        return (self.number - 1) * PAGE_ROWS + 1 if self.total else 0

    def _to(self, number: int) -> str:
        return f"?{self.query}{'&' if self.query else ''}page={number}"


def paged(rows: Sequence[T], page: str | None, search: dict[str, str] | None = None) -> Paged[T]:
    """Return the page that an address asks for; the nearest there is.

    Args:
        page: As it stands in the address.
        search: What else stands in the address.
    """
    pages = max(1, -(-len(rows) // PAGE_ROWS))
    is_number = page is not None and page.isascii() and page.isdigit()
    asked = int(page[:DIGITS_MAX]) if page is not None and is_number else 1
    number = min(max(asked, 1), pages)
    begin = (number - 1) * PAGE_ROWS
    query = urlencode({key: value for key, value in (search or {}).items() if value})
    return Paged(rows[begin : begin + PAGE_ROWS], number, pages, len(rows), query)


def matching(names: Sequence[str], wanted: str) -> list[str]:
    """Return the names that contain every word of *wanted*, whatever their case."""
    words = wanted.lower().split()
    return [name for name in names if all(word in name.lower() for word in words)]
