"""Run stages of the gate, each one a target of the Makefile, to the end, and name all failures.

``stages.py lint types unit`` goes on after a stage that failed. With ``--beside`` one
group of stages runs while the others do. With ``--minutes`` the stages are hunts: each gets its
share of the time that is left, in minutes, as ``HUNT_SHARE``, and one that needs more does not run.

It needs nothing but Python: it runs before anything is installed.
"""

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "stages"
FAILURE = re.compile(r"^(?:FAILED|ERROR) .*|^.*\bError: .*|^make.* \*\*\* .*")
FAILURES_MAX = 200
"""Lines named of one stage: a tree that does not import fails everywhere."""

NEEDS_MINUTES = {
    "hunt-tests": 10.0,
    "mutants": 6.0,
    "interop-all": 20.0,
    "spark-all": 12.0,
    "matrix-all": 5.0,
    "chaos-mutants": 15.0,
    "leader-kills": 6.0,
}
"""What a hunt takes that cannot be made shorter; the others take any share of at least one."""


class Stage(NamedTuple):
    name: str
    code: int
    seconds: float
    failures: tuple[str, ...]


def run(name: str, variables: Sequence[str] = (), *, quiet: bool = False) -> Stage:
    """Run ``make <name>``, show what it prints, and keep that below ``build/stages``."""
    LOGS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    failures: list[str] = []
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    command = ["make", "--no-print-directory", name, *variables]
    with (
        (LOGS / f"{name}.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if not quiet:
                print(line, end="", flush=True)
            if FAILURE.match(line) and len(failures) < FAILURES_MAX:
                failures.append(line.rstrip())
    seconds = time.monotonic() - began
    if quiet:
        print((LOGS / f"{name}.log").read_text(), end="", flush=True)
    print(f"stage: {name} took {seconds:.0f} s, exit {process.returncode}", flush=True)
    return Stage(name, process.returncode, seconds, tuple(failures) if process.returncode else ())


def run_gate(names: Sequence[str], beside: Sequence[str]) -> list[Stage]:
    """Run the stages one after the other, and those of *beside* meanwhile."""
    done: list[Stage] = []
    thread = threading.Thread(target=lambda: done.extend(run(name, quiet=True) for name in beside))
    thread.start()
    stages = [run(name) for name in names]
    thread.join()
    return [*done, *stages]


def run_hunts(names: Sequence[str], minutes: float) -> tuple[list[Stage], list[str]]:
    """Give each hunt its share of the time that is left; return those that ran, and the others."""
    end = time.monotonic() + minutes * 60
    stages: list[Stage] = []
    left_out: list[str] = []
    for at, name in enumerate(names):
        left = (end - time.monotonic()) / 60
        share = left / (len(names) - at)
        needs = NEEDS_MINUTES.get(name, 1.0)
        if left < needs:
            left_out.append(f"{name}: needs {needs:.0f} minutes, {max(left, 0):.1f} are left")
            continue
        stages.append(run(name, [f"HUNT_SHARE={max(1, int(share))}"]))
    return stages, left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--beside", nargs="*", default=[])
    parser.add_argument("--minutes", type=float)
    asked = parser.parse_args()
    began = time.monotonic()
    left_out: list[str] = []
    if asked.minutes is None:
        stages = run_gate(asked.stages, asked.beside)
    else:
        stages, left_out = run_hunts(asked.stages, asked.minutes)
    print(f"\n{'stage':<20} {'seconds':>8}  result")
    for stage in stages:
        print(f"{stage.name:<20} {stage.seconds:>8.0f}  {'failed' if stage.code else 'passed'}")
    for line in left_out:
        print(f"not run: {line}")
    for stage in stages:
        for failure in stage.failures:
            print(f"{stage.name}: {failure}")
    failed = [stage.name for stage in stages if stage.code]
    total = f"{time.monotonic() - began:.0f} s"
    print(f"failed after {total}: {', '.join(failed)}" if failed else f"passed in {total}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
