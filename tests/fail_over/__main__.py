"""``make fail-over``: how long unmodified clients stand still when a leader fails.

Real brokers, a NameServer and a proxy on loopback; every client sends to a plain topic and to one
ordered queue, and consumes both, all at the same time. A run is one fault on a new cluster.
"""

import argparse
import json
import os
import platform
import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import trio

from dledger.commitlog.errors import MQError
from dledger.output import CliError
from tests.fail_over.figures import Figures
from tests.fail_over.machines import Machines, machines
from tests.fail_over.measured import Measured
from tests.fail_over.run import POLL_S, WAYS, run
from tests.fail_over.tables import CLIENTS, FAULTS, Client

SINGLE = [name for name, fault in FAULTS.items() if not fault.others]

RUN_S = 1800.0
"""More than all limits of a run together."""


def phases(seed: int, repetitions: int) -> list[float]:
    """Return when after a read of the route each repetition has its fault: one per equal part."""
    rng = random.Random(seed)
    drawn = [POLL_S * (part + rng.random()) / repetitions for part in range(repetitions)]
    rng.shuffle(drawn)
    return drawn


async def run_once(
    run_in: Callable[[Path], Awaitable[Mapping[str, Mapping[str, Figures]]]], notes: list[str]
) -> Mapping[str, Mapping[str, Figures]]:
    """Run one fault in a folder of its own; a run that fails is a note."""
    with tempfile.TemporaryDirectory(prefix="fail-over-") as folder:
        try:
            with trio.fail_after(RUN_S):
                return await run_in(Path(folder))
        except* (MQError, CliError, trio.TooSlowError) as group:
            reason: BaseException = group
            while isinstance(reason, BaseExceptionGroup):
                reason = reason.exceptions[0]
            notes.append(f"no result: {reason}")
    return {}


def options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(prog="fail-over", description=__doc__)
    add = parser.add_argument
    add("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS), help="default: all")
    add("--faults", nargs="+", choices=FAULTS, default=SINGLE, help="default: one at a time")
    add("--repetitions", type=int, default=5)
    add("--seed", type=int, default=1, help="draws when each fault begins")
    add("--period-ms", type=int, default=100, help="between the sends of a stream")
    add(
        "--leader-address",
        choices=WAYS,
        help="with broker.leader_address: the leader listens at it, or HAProxy or keepalived as in"
        " deploy/; keepalived wants root",
    )
    add("--output", type=Path, default=Path("build/fail-over.json"), help="file for all figures")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table for each fault, and write all figures to a file."""
    asked = options()
    there = {name: CLIENTS[name] for name in asked.clients if not CLIENTS[name].missing}
    measured = Measured()
    for client in (CLIENTS[name] for name in asked.clients if name not in there):
        measured.notes.append(f"{client.title} is left out: {client.missing} is missing")
    with machines() if asked.leader_address == "keepalived" else nullcontext() as spaces:
        measure(asked, there, spaces, measured)
    print("\n".join(measured.table({**CLIENTS, **FAULTS})))
    print(f"\nall figures: {asked.output}")


def measure(
    asked: argparse.Namespace,
    there: Mapping[str, Client],
    spaces: Machines | None,
    measured: Measured,
) -> None:
    """Let each fault happen as often as it is asked for, and write the figures after each."""
    machine = f"{platform.platform()}, {os.cpu_count()} processors"
    about = {**vars(asked), "output": str(asked.output), "machine": machine}
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    for number, phase_s in enumerate(phases(asked.seed, asked.repetitions), 1):
        for name in asked.faults:
            print(f"{name} {number}: {phase_s:.1f} s after a read of the route", flush=True)
            notes = [f"load average {os.getloadavg()[0]:.1f}"]
            drawn = (FAULTS[name], notes, phase_s, asked.period_ms, asked.leader_address, spaces)
            run_in = partial(run, there, *drawn)
            figures = trio.run(run_once, run_in, notes)
            measured.take(name, figures)
            measured.notes += [f"{name} {number}: {note}" for note in notes]
            document = measured.document(about)
            asked.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
