"""Extension of griffe: sections of docstrings as mkdocstrings expects them.

In the sources a section follows the one before it without a blank line, and a section of one
sentence stands in the line of its title.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_TITLE = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Cancellation|Invariant|Spec):[ ]*(.*)$"
)
_ERROR = re.compile(r"^[A-Z]\w+(?:, [A-Z]\w+)*: ")
_KNOWN = ("Args", "Attributes", "Returns", "Yields", "Raises")


def with_sections(text: str) -> str:
    """Return a docstring with a blank line before each section, and contents below its title."""
    lines: list[str] = []
    for line in text.splitlines():
        found = _TITLE.match(line)
        if found is None:
            lines.append(line)
            continue
        title, rest = found.groups()
        if lines and lines[-1]:
            lines.append("")
        if title not in _KNOWN:
            lines += [f"**{title}:** {rest}"]
        elif rest and (title != "Raises" or _ERROR.match(rest)):
            lines += [f"{title}:", f"    {rest}"]
        else:
            lines.append(line)
    return "\n".join(lines)


class Sections(Extension):
    """Applies `with_sections` to every docstring that is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_sections(obj.docstring.value)
