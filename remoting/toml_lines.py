"""Where settings stand in a TOML file: the parser gives values without their lines."""

from __future__ import annotations

import re

_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]")
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")


def toml_lines(text: str) -> dict[tuple[str, str], int]:
    """Return (table, key) → number of the line it begins on, counted from 1.

    A table's own line has the key ``""``; what stands before the first table has the table ``""``.
    Inside a text of several lines, what looks like a key counts as one if no other has its name.
    """
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _TABLE.match(line)) is not None:
            table = header[1]
            found.setdefault((table, ""), number)
        elif (key := _KEY.match(line)) is not None:
            found.setdefault((table, key[1]), number)
    return found
