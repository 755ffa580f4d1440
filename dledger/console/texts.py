"""Figures, times, sizes, message bodies and long lists as people read them. Pure.

Everything from outside stays text: templates escape it for HTML, and characters that would turn,
hide or move what stands beside them are written as escapes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlencode

from dledger.remoting.log import escaped

BODY_SHOWN_BYTES: Final = 16 << 10
"""Of a message's body; a page is for reading, `dledger consume` is for the rest."""
DIGITS_MAX: Final = 18
"""Of a number that is read: below the 64 bits that offsets and times have."""


def number_text(value: float | None) -> str:
    """Return a figure with thousands set apart; a dash where it is not known."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if value % 1 else f"{int(value):,}"


def bytes_text(value: float) -> str:
    """Return a size with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"


def duration_text(value_ms: float | None) -> str:
    """Return a span of time in its two largest units."""
    if value_ms is None:
        return "-"
    if value_ms < 1000:
        return f"{value_ms:.0f} ms"
    minutes, seconds = divmod(int(value_ms // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    largest = next(at for at, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[largest : largest + 2] if count)


def time_text(at_ms: int | None) -> str:
    """Return a time in UTC; a dash where there is none."""
    if at_ms is None or at_ms <= 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}"


def whole(text: str) -> int | None:
    """Return a number from 0 on, as an address or a form has it; None where it is none."""
    is_one = text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
    return int(text) if is_one else None


def time_ms(text: str) -> int | None:
    """Return the time of a field that a person filled in, UTC; None where it is none.

    Takes what a browser's field for date and time sends, ISO 8601, and milliseconds since 1970.
    """
    text = text.strip()
    if (number := whole(text)) is not None:
        return number
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def plain(text: object) -> str:
    """Return text of one line in which every character can be seen."""
    return escaped(str(text))


def body_text(body: bytes) -> str:
    """Return what a page shows of a body; bytes that are no text stand as escapes."""
    head = body[:BODY_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    return escaped(head, keep="\n\t")


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
