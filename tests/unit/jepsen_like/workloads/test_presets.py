"""Workloads by name, and what of a broker they use: ``uses.toml``, row by row."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dledger.filters.expiry import EXPIRES_ATTRIBUTE
from dledger.jepsen_like.plans.modes import MODES
from dledger.jepsen_like.workloads.presets import PRESETS, SIMULATED_CLIENTS, workload_for
from dledger.processors.handles import codes_of
from dledger.processors.topics import TYPE_ATTRIBUTE
from dledger.processors.wiring import PROCESSORS
from dledger.services.retention import RETENTION_ATTRIBUTE
from dledger.state.topics import SubscriptionGroupConfig, TopicConfig

USES = tomllib.loads(Path(__file__).with_name("uses.toml").read_text())
ATTRIBUTES = {RETENTION_ATTRIBUTE, TYPE_ATTRIBUTE, EXPIRES_ATTRIBUTE}
ROWS = {
    "requests": ({code.name for code in codes_of(PROCESSORS)}, 23),
    "topics": ({*TopicConfig.__struct_fields__, *ATTRIBUTES}, 2),
    "groups": ({*SubscriptionGroupConfig.__struct_fields__}, 2),
}
"""What there is, and how many of it may have no workload; the numbers only go down."""


@pytest.mark.parametrize("part", ROWS)
def test_each_part_of_a_broker_has_a_workload(part: str) -> None:
    """A row names workloads and modes, or, as a text, why there is none."""
    there, unused_max = ROWS[part]
    assert set(USES[part]) == there
    named = [row for row in USES[part].values() if isinstance(row, list)]
    assert all(row and set(row) <= {*PRESETS, *MODES} for row in named)
    assert len(there) - len(named) <= unused_max


@pytest.mark.parametrize("name", PRESETS)
def test_a_workload_aims_at_its_rate(name: str) -> None:
    workload = workload_for(name, 2000)
    clients = sum(getattr(workload, kind) for kind in SIMULATED_CLIENTS if kind != "push_members")
    if workload.send_back_per_mille:  # beside each consumer there is one that gives back
        clients += workload.consumers
    assert clients / (workload.interval_ms / 1000) == pytest.approx(2000, rel=0.15)
