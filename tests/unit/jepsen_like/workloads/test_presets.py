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
