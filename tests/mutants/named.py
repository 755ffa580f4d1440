"""Do the tests that a patch names still find its bug?

One tree for each of the hunts at the same time gets one bug after the other, and runs the files of
tests that its patch names, and nothing else. Before that they run without a bug: there they pass.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from tests.mutants.patches import Patch
from tests.mutants.trees import copy_tree, environment_of, planted_text, sources_of

FAILED: Final = (1, 2)
"""Exit status of pytest: tests failed, or a module that is imported breaks."""

SCENES: Final = "tests/simulation/"
"""All tests of such a file run; elsewhere those that are slow do not."""

TEST_S: Final = 300
"""Of one test: one that a bug lets wait without end is ended, and has found it."""


class Named(msgspec.Struct):
    """What came of one bug.

    Attributes:
        number: The bug.
        found: A test that its patch names fails.
        said: The last line of their run.
    """

    number: int
    found: bool
    said: str


def run_named(patches: Sequence[Patch], jobs: int, tell: Callable[[Named], object]) -> list[Named]:
    """Run for each bug the tests that its patch names, *jobs* at a time.

    Raises:
        RuntimeError: They fail without a bug.
        StalePatchError: The product's text is no longer what a bug was made for.
    """
    every = sorted({test for patch in patches for test in patch.tests})
    trees: SimpleQueue[Path] = SimpleQueue()
    with TemporaryDirectory(prefix="named-tests-") as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            trees.put(copy_tree(Path(folder) / f"{number}", with_tests=True))
        tree = trees.get()
        status, said = _run(tree, every)
        trees.put(tree)
        if status:
            raise RuntimeError(f"tests fail without a bug: {said}")
        return list(pool.map(partial(_one, trees, tell), patches))


def _one(trees: SimpleQueue[Path], tell: Callable[[Named], object], patch: Patch) -> Named:
    tree = trees.get()
    try:
        _write(tree, planted_text(patch), patch.number)
        status, said = _run(tree, patch.tests)
    finally:
        _write(tree, sources_of(patch), -patch.number)
        trees.put(tree)
    named = Named(patch.number, status in FAILED, said)
    tell(named)
    return named


def _write(tree: Path, texts: dict[str, str], salt: int) -> None:
    """Write files with times of their own: what is compiled of them before is not taken."""
    for path, text in texts.items():
        (tree / path).write_text(text)
        now_s = (tree / path).stat().st_mtime
        os.utime(tree / path, (now_s, now_s - 100_000 + 10 * salt))


def _run(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout", f"{TEST_S}", *tests]
    if not any(test.startswith(SCENES) for test in tests):
        command += ["-m", "not hunt"]
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment_of(tree),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, "".join(done.stdout.splitlines()[-1:])
