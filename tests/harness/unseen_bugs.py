"""Asks the unit tests about every planted bug; exit status 1 when they see one.

``python -m tests.harness.unseen_bugs [NUMBER...]``

What a unit test sees says nothing about the simulator, so such a bug does not count as found
by it. About a CPU minute for each.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from jepsen_like.mutants.registry import numbers

JOBS = 2
"""At the same time, one per core."""

BOUND_S = 1800.0
"""Of one bug's tests, on a machine that does other things, too."""

PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"),
    *("-p", "tests.harness.planted_bug", "--ignore=tests/unit/jepsen_like/mutants", "tests/unit"),
)
"""Tests of the planting itself look at the text that is changed here, and are left out."""


def ask(number: int) -> tuple[int, bool, str]:
    """Run the unit tests with one bug; return its number, whether they passed, and their end."""
    ran = subprocess.run(
        [*PYTEST, "--planted", str(number)],
        check=False,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    return number, ran.returncode == 0, "\n".join(ran.stdout.splitlines()[-3:])


def main(asked: list[int]) -> int:
    """Ask about these, or all; print one line for each."""
    seen: list[int] = []
    with ThreadPoolExecutor(JOBS) as pool:
        for number, unseen, end in pool.map(ask, asked or numbers()):
            print(f"{number}: {'not seen' if unseen else 'SEEN'}: {end}", flush=True)
            if not unseen:
                seen.append(number)
    print(f"{len(seen)} seen by the unit tests: {seen}" if seen else "none is seen")
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
