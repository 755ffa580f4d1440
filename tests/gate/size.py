"""Compare lines and files per folder with their budget, ``tests/gate/size.toml``: ``make size``.

The budget goes down only. Lines are all lines of Python files under version control.
"""

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BUDGET = Path(__file__).with_suffix(".toml")


class Size(NamedTuple):
    files: int
    lines: int


def measure(folders: Iterable[str]) -> dict[str, Size]:
    """Return what stands in each of *folders*; links into other folders do not count."""
    sizes = {}
    for folder in folders:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--", f"{folder}/*.py"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
        counts = [path.read_bytes().count(b"\n") for path in paths if path.is_file()]
        sizes[folder] = Size(len(counts), sum(counts))
    return sizes


def exceeded(sizes: Mapping[str, Size], budget: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence for each folder, and for the product, that is above its budget."""
    product = [size for folder, size in sizes.items() if folder not in ("tests", "tools")]
    total = Size(*map(sum, zip(*product, strict=True)))
    return [
        f"{folder}: {getattr(size, unit):,} {unit}, the budget is {limit:,}"
        for folder, size in [*sizes.items(), ("product", total)]
        for unit, limit in budget[folder].items()
        if getattr(size, unit) > limit
    ]


def main() -> int:
    budget = tomllib.loads(BUDGET.read_text())
    sizes = measure(folder for folder in budget if folder != "product")
    for folder, size in sizes.items():
        print(f"{folder:<12} {size.files:>4} files {size.lines:>8,} lines")
    sentences = exceeded(sizes, budget)
    for sentence in sentences:
        print(f"error: {sentence}")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
