"""Workloads by name."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.workloads.presets import PRESETS, workload_for


@pytest.mark.parametrize("name", PRESETS)
def test_a_workload_aims_at_its_rate(name: str) -> None:
    workload = workload_for(name, 2000)
    clients = workload.producers + workload.consumers + workload.readers + workload.lockers
    clients += workload.filterers + workload.receivers + workload.steppers
    clients += workload.expirers
    if workload.send_back_per_mille:  # beside each consumer there is one that gives back
        clients += workload.consumers
    assert clients / (workload.interval_ms / 1000) == pytest.approx(2000, rel=0.15)


def test_every_part_of_the_checks_has_a_workload() -> None:
    assert workload_for("delayed", 1000).delayed_per_mille > 0
    assert workload_for("offsets", 1000).consumers > workload_for("offsets", 1000).producers
    assert workload_for("drain", 1000).consumers == 0
    assert workload_for("queue-log", 1000).readers > 0
    assert workload_for("locks", 1000).lockers > 0
    assert workload_for("time-to-live", 1000).expirers > 0
