"""Extensions of griffe: sections of docstrings as mkdocstrings expects them, public names only.

In the sources a section follows the one before it without a blank line, and a section of one
sentence stands in the line of its title.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Expr, Extension, Object

_TITLE = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Cancellation|Invariant|Spec):[ ]*(.*)$"
)
_ERROR = re.compile(r"^[A-Z]\w+(?:, [A-Z]\w+)*: ")
_NO_BASES = ("ManagedScope",)
_NOT_PUBLIC = re.compile(r"\._|^dledger\.cli\.")
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


class PublicNames(Extension):
    """Leaves out what users do not write: bases for our use, constructors with private types."""

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        cls.bases = [base for base in cls.bases if str(base) not in _NO_BASES]
        constructor = cls.members.get("__init__")
        if constructor is None or constructor.is_alias:
            return
        annotations = [parameter.annotation for parameter in constructor.parameters]
        names = [
            name.canonical_path
            for annotation in annotations
            if isinstance(annotation, Expr)
            for name in annotation.iterate(flat=True)
            if isinstance(name, Expr)
        ]
        if any(map(_NOT_PUBLIC.search, names)):
            cls.del_member("__init__")
