"""Citations of the code resolve inside the repository: page and section exist."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.shipped_files import ROOT

PACKAGES = ("client", "commitlog", "dledger", "jepsen_like", "namesrv", "remoting", "spark_jobs")
_SPEC = re.compile(r"^[ \t]*Spec: (.*?)(?=\n[ \t]*\n|\n?[ \t]*\"\"\")", re.DOTALL | re.MULTILINE)
_PAGE = re.compile(r"(docs/[\w./-]+\.md)((?:, sections? [\d., andto]*\d)?)")
_HEADING = re.compile(r"^#+ (\d+(?:\.\d+)?)\.? ", re.MULTILINE)


class Citation(NamedTuple):
    page: str
    sections: tuple[str, ...]


def citations(text: str) -> list[Citation]:
    """Return the pages that one citation names; empty when it names none."""
    line = " ".join(text.split())
    return [
        Citation(page, tuple(re.findall(r"\d+(?:\.\d+)?", sections)))
        for page, sections in _PAGE.findall(line)
    ]


def cited() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for text in _SPEC.findall(path.read_text()):
                yield name, text


@cache
def headings(page: str) -> frozenset[str]:
    return frozenset(_HEADING.findall((ROOT / page).read_text()))


def unresolved(citation: Citation) -> list[str]:
    if not Path(ROOT, citation.page).is_file():
        return [citation.page]
    known = headings(citation.page)
    return [f"{citation.page} {section}" for section in citation.sections if section not in known]


def test_every_citation_names_a_page_and_its_sections() -> None:
    found = list(cited())
    assert len(found) > 60
    for name, text in found:
        named = citations(text)
        assert named, f"{name}: {text!r} names no page"
        assert [where for one in named for where in unresolved(one)] == [], name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docs/a.md.", [("docs/a.md", ())]),
        ("docs/a.md, section 4.", [("docs/a.md", ("4",))]),
        ("docs/a.md, sections 3.2 and 7 to\n    12; docs/b.md.", [
            ("docs/a.md", ("3.2", "7", "12")), ("docs/b.md", ()),
        ]),
        ("docs/a.md, section 11, rules 2 to 6.", [("docs/a.md", ("11",))]),
        ("a standard", []),
    ],
)  # fmt: skip
def test_citations_are_read(text: str, expected: list[tuple[str, tuple[str, ...]]]) -> None:
    assert citations(text) == expected


def test_missing_page_or_section_is_unresolved() -> None:
    page = "docs/internals/protocol/store.md"
    assert unresolved(Citation(page, ("1", "99"))) == [f"{page} 99"]
    assert unresolved(Citation("docs/none.md", ())) == ["docs/none.md"]
