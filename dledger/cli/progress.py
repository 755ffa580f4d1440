"""How far a long command is: one line on a terminal, once it has taken two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

SILENT_S: Final = 2.0
"""A command that ends within this time shows nothing."""
BETWEEN_S: Final = 0.2
"""Between two lines: a person reads no faster, and a terminal over a slow link keeps up."""
BAR_CHARS: Final = 24


class ProgressLine:
    """Draws one line again and again.

    Args:
        total: What is all; 0: not known.
        out: A terminal; on anything else nothing is written.
    """

    def __init__(self, total: int, unit: str, out: TextIO, now_s: Callable[[], float]) -> None:
        self._total = total
        self._unit = unit
        self._out = out
        self._now_s = now_s
        self._began_s = now_s()
        self._next_s = self._began_s + SILENT_S
        self._is_drawn = False
        self._shows = out.isatty()
        self.done = 0

    def add(self, count: int = 1) -> None:
        """Count *count* more as done."""
        self.to(self.done + count)

    def to(self, done: int) -> None:
        """Have *done* done, and draw the line when it is time."""
        self.done = done
        if not self._shows:
            return
        now_s = self._now_s()
        if now_s >= self._next_s:
            self._next_s = now_s + BETWEEN_S
            self._is_drawn = True
            text = line_of(done, self._total, self._unit, now_s - self._began_s)
            self._out.write(f"\r{text}\x1b[K")
            self._out.flush()

    def end(self) -> None:
        """Remove the line."""
        if self._is_drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._is_drawn = False


def line_of(done: int, total: int, unit: str, elapsed_s: float) -> str:
    """Return the text of the line: bar, numbers, rate and the time that is left. Pure."""
    per_s = done / elapsed_s if elapsed_s > 0 else 0.0
    rate = f"{per_s:,.0f} {unit}/s"
    if total <= 0:
        return f"{done:,} {unit}, {rate}"
    part = min(1.0, done / total)
    full = round(part * BAR_CHARS)
    bar = "#" * full + "." * (BAR_CHARS - full)
    left = f", {max(0.0, total - done) / per_s:,.0f} s left" if per_s > 0 else ""
    return f"[{bar}] {part:4.0%}  {done:,} of {total:,} {unit}, {rate}{left}"


@contextmanager
def progress(total: int, unit: str) -> Iterator[ProgressLine]:
    """Show on standard error how far the block is; the line is removed at its end."""
    line = ProgressLine(total, unit, sys.stderr, time.monotonic)
    try:
        yield line
    finally:
        line.end()
