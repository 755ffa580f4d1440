"""Text that others gave, shown to people: what a terminal would obey is written as an escape.

Names of topics, groups and clients come from any client that connects. A terminal takes some
characters as
orders: to move, to hide lines, to answer as if typed.
"""

from __future__ import annotations


def escaped(text: str, keep: str = "") -> str:
    """Return *text* with every character that is not printable written as ``\\x1b`` or the like."""
    if text.isprintable():
        return text
    return "".join(
        one
        if one.isprintable() or one in keep
        else one.encode("unicode_escape", "surrogatepass").decode("ascii")
        for one in text
    )
