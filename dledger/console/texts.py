"""Figures, times, sizes and message bodies as people read them. Pure.

Everything from outside stays text: templates escape it for HTML, and characters that would turn,
hide or move what stands beside them are written as escapes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dledger.remoting.escaped_text import escaped

BODY_SHOWN_BYTES: Final = 16 << 10
"""Of a message's body; a page is for reading, `dledger consume` is for the rest."""
HEX_SHOWN_BYTES: Final = 512
"""Of a body that is no text."""
_HEX_LINE_BYTES: Final = 16
DIGITS_MAX: Final = 18
"""Of a number that is read: below the 64 bits that offsets and times have."""


def number_text(value: float | None) -> str:
    """Return a figure with thousands set apart; a dash where it is not known."""
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.1f}"
    return f"{int(value):,}"


def bytes_text(value: float | None) -> str:
    """Return a size with its unit."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def duration_text(value_ms: float | None) -> str:
    """Return a span of time in its two largest units."""
    if value_ms is None:
        return "-"
    if value_ms < 1000:
        return f"{value_ms:.0f} ms"
    seconds = int(value_ms // 1000)
    parts = [
        (seconds // 86_400, "d"),
        (seconds % 86_400 // 3_600, "h"),
        (seconds % 3_600 // 60, "min"),
        (seconds % 60, "s"),
    ]
    while parts and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"


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
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def plain(text: object) -> str:
    """Return text of one line in which every character can be seen."""
    return escaped(str(text))


@dataclass(frozen=True, slots=True)
class BodyText:
    """A message's body for a page.

    Attributes:
        kind: ``text`` or ``bytes``, which are shown as hexadecimal figures.
        text: What is shown.
        size_bytes: Of the whole body.
        is_cut: Not all of it is shown.
    """

    kind: str
    text: str
    size_bytes: int
    is_cut: bool


def body_text(body: bytes) -> BodyText:
    """Return what a page shows of a body."""
    head = body[:BODY_SHOWN_BYTES]
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        # The cut may stand inside a character; anything else is no text.
        if len(head) == len(body) or error.start < len(head) - 4:
            return _hex_text(body)
        text = head[: error.start].decode()
    if "\x00" in text:
        return _hex_text(body)
    return BodyText("text", escaped(text, keep="\n\t"), len(body), len(head) < len(body))


def _hex_text(body: bytes) -> BodyText:
    lines = []
    for begin in range(0, min(len(body), HEX_SHOWN_BYTES), _HEX_LINE_BYTES):
        part = body[begin : begin + _HEX_LINE_BYTES]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{begin:06x}  {part.hex(' '):<47}  {shown}")
    return BodyText("bytes", "\n".join(lines), len(body), len(body) > HEX_SHOWN_BYTES)
