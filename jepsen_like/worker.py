"""Plays seeds one after the other in an interpreter of its own; one JSON line for each on stdout.

``python -m jepsen_like.worker '{"first": 0, "step": 2, "duration_s": 1200, "seconds": 60}'``

A worker knows seeds, never which source tree it is run from.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Final

import msgspec

from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.plans.draw import SIMULATED, add_mode, draw_plan
from dledger.jepsen_like.plans.novelty import Novelty
from dledger.jepsen_like.plans.packages import kinds_named
from dledger.jepsen_like.plans.plan import REAL_ONLY, Kind, Plan, Workload
from dledger.jepsen_like.simulation.play import Played, play
from dledger.jepsen_like.workloads.presets import PRESETS, simulated_workload
from dledger.output import leaves_of

SOAK_WORKLOAD = Workload(producers=2, consumers=1, readers=1, interval_ms=3900)
"""More than one operation a second together, and cheap enough for long runs."""

SOAK_FAULT_INTERVAL_S = 26.0
"""With those that come in pairs one in less than 20 s."""


PRESET_KINDS = SIMULATED - {Kind.CLOCK_JUMP}
"""With a clock an hour ahead a message is an hour late by the others', which is no fault."""


LOCK_LEASE_MS = 10_000
"""Longer than most elections, and short enough that many end in a plan."""


class Order(msgspec.Struct):
    """What a worker is to do.

    Attributes:
        count: Seeds at most; 0: as many as time allows.
        duration_s: Of the faults of each plan.
        seconds: Seconds after which no new seed is begun.
        cpu_seconds: CPU time after which none is; 0: no limit.
        stop_at_violation: End with the first seed that shows one.
        is_soak: Play the workload of long runs.
        calm: Play without faults, and let no member of a push group come or go.
        preset: Play the workload of this name; empty: the one that is drawn.
        modes: Draw modes, too, in long runs; see `dledger.jepsen_like.plans.modes`.
        mode: A mode that every plan has, see `dledger.jepsen_like.plans.modes`; empty: none.
        faults: Names of faults to draw from, with commas between; empty: what is drawn otherwise.
        guided: Play what brings together what has not met, of several workloads and seeds, and not
            one seed after the other.
    """

    first: int = 0
    step: int = 1
    count: int = 0
    duration_s: float = 120.0
    seconds: float = 60.0
    cpu_seconds: float = 0.0
    stop_at_violation: bool = False
    is_soak: bool = False
    calm: bool = False
    preset: str = ""
    modes: bool = False
    mode: str = ""
    faults: str = ""
    guided: bool = False


class Report(msgspec.Struct):
    """What came of one seed.

    Attributes:
        preset: The workload that was played; empty: the one of the order.
        checked: Checkers that gave a verdict.
    """

    seed: int
    simulated_s: float
    cpu_s: float
    violations: list[Violation]
    validity: str
    digest: str
    operations: dict[str, int]
    faults: dict[str, int]
    sometimes: dict[str, int]
    reason: str = ""
    preset: str = ""
    checked: list[str] = []


def plan_of(seed: int, order: Order) -> Plan:
    """Return the plan that an order plays for a seed."""
    plan = _plan_of(seed, order)
    return add_mode(plan, seed, order.mode) if order.mode else plan


def _plan_of(seed: int, order: Order) -> Plan:
    if order.is_soak:
        return draw_plan(
            seed,
            order.duration_s,
            kinds=kinds_of(order),
            workload=SOAK_WORKLOAD,
            members=3,
            fault_interval_s=SOAK_FAULT_INTERVAL_S,
            modes=order.modes,
        )
    if order.preset:
        workload = simulated_workload(order.preset)
        preset = PRESETS[order.preset]
        kinds = kinds_of(order, PRESET_KINDS | preset.kinds)
        plan = draw_plan(
            seed,
            order.duration_s,
            kinds=kinds,
            workload=workload,
            members=Random(f"members {seed}").choice(preset.members) if preset.members else None,
        )
        for mode in preset.modes:
            plan = add_mode(plan, seed, mode)
        if workload.lockers:
            settings = msgspec.structs.replace(plan.settings, lock_lease_ms=LOCK_LEASE_MS)
            plan = msgspec.structs.replace(plan, settings=settings)
    else:
        plan = draw_plan(seed, order.duration_s, kinds=kinds_of(order))
    if not order.calm:
        return plan
    still = msgspec.structs.replace(plan.workload, push_change_s=0)
    return msgspec.structs.replace(plan, steps=(), workload=still)


def kinds_of(order: Order, otherwise: frozenset[Kind] = SIMULATED) -> frozenset[Kind]:
    """Return the faults that an order draws from, those of its workload where it names none.

    Raises ConfigError: there is no fault of a name.
    """
    if not order.faults:
        return otherwise
    return kinds_named(order.faults.split(",")) - REAL_ONLY


def report_of(seed: int, played: Played, cpu_s: float) -> Report:
    """Return the report of a play."""
    return Report(
        seed,
        played.simulated_s,
        cpu_s,
        list(played.violations),
        played.verdict.validity,
        played.digest,
        dict(played.operations),
        dict(played.faults),
        dict(played.sometimes),
        played.verdict.reason,
        checked=[one.checker for one in played.verdicts if one.validity != "unknown"],
    )


GUIDED_PRESETS: Final = ("", *(name for name in PRESETS if name not in ("demo", "drain", "grpc")))
"""Workloads that a guided order chooses from; the first is its own."""

GUIDED_SPREAD: Final = 2
"""A workload has no more plans than this above the one that has least: how a service is used for
long shows more than the pairs it is in."""

GUIDED_SEEDS: Final = 3
"""Seeds that each workload is looked at with, before a plan is chosen."""


def with_preset(order: Order, preset: str) -> Order:
    """Return the order that plays the workload *preset*, its own where that is empty."""
    return msgspec.structs.replace(order, preset=preset, is_soak=False) if preset else order


class _Guide:
    """Chooses the next plan of a guided order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.novelty = Novelty()
        self._next = dict.fromkeys(GUIDED_PRESETS, order.first)
        self._played = dict.fromkeys(GUIDED_PRESETS, 0)
        self._open: dict[tuple[str, int], Plan] = {}

    def choose(self) -> tuple[int, Order]:
        """Return the seed and the order of the plan that is worth most."""
        for preset in GUIDED_PRESETS:
            while sum(name == preset for name, _ in self._open) < GUIDED_SEEDS:
                seed = self._next[preset]
                self._next[preset] += self._order.step
                self._open[preset, seed] = plan_of(seed, with_preset(self._order, preset))
        least = min(self._played.values())
        preset, seed = max(
            (key for key in self._open if self._played[key[0]] < least + GUIDED_SPREAD),
            key=lambda key: self.novelty.worth(self._open[key]),
        )
        return seed, with_preset(self._order, preset)

    def note(self, report: Report) -> None:
        """Count what came of the plan that was chosen."""
        plan = self._open.pop((report.preset, report.seed))
        self._played[report.preset] += 1
        self.novelty.note(plan, report)


def reports(order: Order) -> Iterator[Report]:
    """Play the seeds of an order, until its time is over."""
    gc.freeze()  # modules, mostly: no run needs to look for garbage among them
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    guide = _Guide(order) if order.guided else None
    seed, played_seeds = order.first, 0
    while not order.count or played_seeds < order.count:
        cpu_s = time.process_time()
        if time.monotonic() - begin_s > order.seconds and played_seeds:
            return
        if order.cpu_seconds and cpu_s - begin_cpu_s > order.cpu_seconds:
            return
        if guide is None:
            report = _report(seed, order, cpu_s)
        else:
            seed, chosen = guide.choose()
            report = _report(seed, chosen, cpu_s)
            report.preset = "" if chosen is order else chosen.preset
            guide.note(report)
        yield report
        if order.stop_at_violation and report.validity == "invalid":
            return
        seed += order.step
        played_seeds += 1


def _report(seed: int, order: Order, cpu_s: float) -> Report:
    try:
        played = play(plan_of(seed, order))
    except Exception as error:  # noqa: BLE001  # whatever ends a run is a finding, with its seed
        first = leaves_of(error)[0]
        text = f"{type(first).__name__}: {first}"
        violation = Violation("run broke", "harness", text[:2000], checker="harness")
        spent_s = time.process_time() - cpu_s
        return Report(seed, 0.0, spent_s, [violation], "invalid", "", {}, {}, {}, text[:200])
    return report_of(seed, played, time.process_time() - cpu_s)


def main(argument: str) -> int:
    """Play the plans of *argument*, an `Order` as JSON."""
    order = msgspec.json.decode(argument, type=Order)
    for report in reports(order):
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
