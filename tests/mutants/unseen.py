"""Which planted bugs do the unit tests find?

A first run of all tests, without a bug, records which of them run a line of the functions that bugs
change; no other test can find the bug. Then each bug is planted into a tree of its own, which runs
those tests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from coverage import CoverageData

from tests.mutants.patches import Patch, changed_functions
from tests.mutants.trees import ROOT, environment_of, plant_tree, sources_of

UNIT_TESTS: Final = "tests/unit"
OWN_TESTS: Final = "tests/unit/mutants"
"""Those of the planting itself compare the text that it changes."""


def seen(patches: Sequence[Patch], tell: Callable[[str], object]) -> int:
    """Return how many of the bugs unit tests find; *tell* gets a line for each.

    Raises:
        RuntimeError: Tests fail without a bug.
    """
    folder = Path(tempfile.mkdtemp(prefix="unseen-bugs-"))
    reach = _reach_of(folder)
    tell(f"which test runs which line: {folder}/reach.log")
    count = 0
    for patch in patches:
        tests = sorted(_tests_that_run(patch, reach))
        if not tests:
            tell(f"{patch.number}: not seen, no test runs what it changes")
            continue
        (folder / "tests").write_text("\n".join(tests))
        with tempfile.TemporaryDirectory(prefix=f"mutant-{patch.number}-") as tree:
            plant_tree(patch.number, Path(tree), with_tests=True)
            log = folder / f"{patch.number}.log"
            status = _run_tests([f"@{folder}/tests"], Path(tree), log)
        count += status != 0
        said = f"SEEN, {log}" if status else "not seen"
        end = "".join(log.read_text().splitlines()[-1:])
        tell(f"{patch.number}: {said} by {len(tests)} tests that run what it changes: {end}")
    return count


def found_by_tests_near(patch: Patch) -> bool:
    """Return whether a unit test fails with the bug, of the files that name a changed module.

    Fewer tests than `seen` runs, and no run of all of them first: a bug that only tests of other
    modules find counts as not found.
    """
    modules = [path.removesuffix(".py").replace("/", ".") for path in patch.hunks]
    with tempfile.TemporaryDirectory(prefix=f"mutant-{patch.number}-") as folder:
        tree = plant_tree(patch.number, Path(folder), with_tests=True)
        near = [
            str(path.relative_to(tree))
            for path in sorted((tree / UNIT_TESTS).rglob("test_*.py"))
            if not path.is_relative_to(tree / OWN_TESTS)
            and any(module in path.read_text() for module in modules)
        ]
        # 1: tests failed, 2: a module that is imported breaks.
        return bool(near) and _run_tests(near, tree, Path(folder) / "log") in (1, 2)


def _reach_of(folder: Path) -> CoverageData:
    file, log = folder / "reach", folder / "reach.log"
    plugin = ["-p", "tests.mutants.reach", "--reach", str(file), f"--ignore={OWN_TESTS}"]
    if _run_tests([*plugin, UNIT_TESTS], ROOT, log):
        raise RuntimeError(f"tests fail without a bug: {log}")
    data = CoverageData(basename=str(file))
    data.read()
    return data


def _run_tests(arguments: Sequence[str], tree: Path, log: Path) -> int:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", *arguments]
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment_of(tree),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    return done.returncode


def _tests_that_run(patch: Patch, reach: CoverageData) -> set[str]:
    """Return the tests that run a line of a function that the bug changes."""
    tests: set[str] = set()
    for path, lines in changed_functions(patch, sources_of(patch)):
        by_line = reach.contexts_by_lineno(str(ROOT / path))
        # The head of a function runs when its module is imported.
        tests |= {test for line in lines[1:] for test in by_line.get(line, ()) if test}
    return tests
