"""No file imports itself through others: product, tests and examples, annotations included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.harness.shipped_files import ROOT

FOLDERS = (
    *("client", "commitlog", "dledger", "jepsen_like", "namesrv", "remoting", "spark_jobs"),
    *("tests", "tools", "examples", "docs"),
)


def modules() -> dict[str, Path]:
    """Return the files by the names under which they are imported."""
    found = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(source: str, known: Mapping[str, object]) -> Iterator[str]:
    """Yield the modules of *known* that a module imports, wherever in it that stands.

    ``from package import name`` counts as an import of the module of that name where there is one.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Return a circle, each module followed by one that imports it; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_itself_through_others() -> None:
    known = modules()
    imports = {name: {*imported(path.read_text(), known)} for name, path in known.items()}
    assert len(imports) > 1_000
    assert sum(map(len, imports.values())) > 5_000
    assert circle(imports) == []


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, set()),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, {"a", "b", "c"}),
        ({"a": {"a"}}, {"a"}),
    ],
)
def test_circle_is_found(imports: dict[str, set[str]], expected: set[str]) -> None:
    assert set(circle(imports)) == expected


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import a.b
from a import c, Name
if TYPE_CHECKING:
    from a.d import Other
def work():
    from e import deep
"""
    known = dict.fromkeys(("a", "a.b", "a.c", "a.d", "e.deep"))
    assert sorted(imported(source, known)) == ["a", "a.b", "a.c", "a.d", "e.deep"]
