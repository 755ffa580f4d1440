"""The pages hang together: no dead link, none that the index does not list."""

import re
from pathlib import Path

import pytest

import dledger
from tests.harness.shipped_files import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    return [link for link in _LINK.findall(page.read_text()) if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link.split("#")[0] for link in links(page)]
    dead = [link for link in targets if link and not (page.parent / link).exists()]
    assert dead == []


def test_every_page_is_linked_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in links(index)}
    decisions = ROOT / "docs" / "internals" / "decisions"
    pages = {page for page in PAGES if page.parent != decisions and page != index}
    assert {page.name for page in pages - linked} == set()


def test_the_two_commands_of_the_readme_come_first() -> None:
    first = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)[0]
    assert first == "make demo\nmake test\n"
    rules = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "setup"} <= set(rules)


def test_api_reference_shows_every_public_name() -> None:
    folder = ROOT / "docs" / "reference" / "api"
    shown = [
        name
        for page in folder.glob("*.md")
        for name in re.findall(r"^::: dledger\.(\w+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(shown) == sorted(dledger.__all__)


def test_site_has_every_page_in_its_navigation() -> None:
    listed = re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    assert sorted(listed) == sorted([*pages, "about.md", "CONTRIBUTING.md", "CHANGELOG.md"])
