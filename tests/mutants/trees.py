"""Copies of the source tree with a planted bug in them; interpreters run them instead of ours."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.mutants.patches import Patch, plant, read_patches

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = (
    "commitlog",
    "remoting",
    "client",
    "namesrv",
    "dledger",
    "jepsen_like",
    "spark_jobs",
)


def planted_text(patch: Patch) -> dict[str, str]:
    """Return the files that the bug changes, with the bug in them.

    Raises:
        StalePatchError: The product's text has moved on.
    """
    return plant(patch, sources_of(patch))


def sources_of(patch: Patch) -> dict[str, str]:
    """Return the text of the files that the bug changes."""
    return {path: (ROOT / path).read_text() for path in patch.hunks if (ROOT / path).is_file()}


def plant_tree(number: int, folder: Path, *, with_tests: bool = False) -> Path:
    """Copy the packages into *folder*, plant the bug *number*, and return the folder.

    Args:
        with_tests: Copy everything that is under version control.

    Raises:
        KeyError: There is no such bug.
        StalePatchError: The product's text has moved on.
    """
    texts = planted_text(read_patches()[number])
    copy_tree(folder, with_tests=with_tests)
    for path, text in texts.items():
        (folder / path).write_text(text)
    return folder


def copy_tree(folder: Path, *, with_tests: bool = False) -> Path:
    """Copy the packages into *folder* and return it.

    Args:
        with_tests: Copy everything that is under version control.
    """
    if with_tests:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in map(os.fsdecode, listed.stdout.split(b"\0")):
            if name and (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    else:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, symlinks=True, dirs_exist_ok=True)
    shutil.copy2(ROOT / "tests/mutants/planted_chance.py", folder)
    return folder


@contextmanager
def planted_tree(number: int) -> Iterator[Path | None]:
    """Yield a tree with the bug *number*, which is removed afterwards; None for number 0.

    Raises:
        KeyError: There is no such bug.
        StalePatchError: The product's text has moved on.
    """
    if not number:
        yield None
        return
    with TemporaryDirectory(prefix=f"mutant-{number}-") as folder:
        yield plant_tree(number, Path(folder))


def environment_of(tree: Path) -> dict[str, str]:
    """Return the environment in which a Python interpreter runs the packages of *tree*."""
    # Without the second one ``python -m`` finds the packages of the working directory first.
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
