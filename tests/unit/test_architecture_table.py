"""The table feature → file: complete, and nothing in it that is not there."""

from __future__ import annotations

import re
from collections import Counter

from tests.harness.shipped_files import ROOT

PACKAGES = ("dledger", "commitlog", "namesrv", "client", "remoting")
PAGE = ROOT / "docs" / "internals" / "architecture.md"


def paths_of_the_table() -> list[str]:
    table = PAGE.read_text().split("<!-- features", 1)[1].split("<!-- end of features -->")[0]
    return re.findall(r"`([^`\s]+\.py)`", table)


def test_each_path_of_the_table_exists() -> None:
    paths = paths_of_the_table()
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_each_module_of_the_packages_stands_in_the_table_once() -> None:
    modules = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert sorted(Counter(paths_of_the_table()).items()) == [(path, 1) for path in sorted(modules)]
