"""Workloads by name, and what of a broker they use: ``uses.toml``, row by row."""

import tomllib
from pathlib import Path

import pytest

from dledger.filters.expiry import EXPIRES_ATTRIBUTE
from dledger.jepsen_like.plans.modes import MODES
from dledger.jepsen_like.simulation.side_work import LIVE_SETTINGS
from dledger.jepsen_like.workloads.presets import PRESETS, SIMULATED_CLIENTS, workload_for
from dledger.processors.handles import codes_of
from dledger.processors.topics import TYPE_ATTRIBUTE
from dledger.processors.wiring import PROCESSORS
from dledger.services.retention import RETENTION_ATTRIBUTE
from dledger.settings.config import SCHEMA
from dledger.state.topics import SubscriptionGroupConfig, TopicConfig

USES = tomllib.loads(Path(__file__).with_name("uses.toml").read_text())
ATTRIBUTES = {RETENTION_ATTRIBUTE, TYPE_ATTRIBUTE, EXPIRES_ATTRIBUTE}
ROWS = {
    "requests": {code.name for code in codes_of(PROCESSORS)},
    "topics": {*TopicConfig.__struct_fields__, *ATTRIBUTES},
    "groups": {*SubscriptionGroupConfig.__struct_fields__},
    "settings": {*SCHEMA.settings},
}
"""What there is."""
SETTINGS_WITHOUT_MAX = 52
"""Settings that no plan sets; the number only goes down."""


@pytest.mark.parametrize("part", ROWS)
def test_each_part_of_a_broker_has_a_workload(part: str) -> None:
    assert set(USES[part]) == ROWS[part]
    named = {name: row for name, row in USES[part].items() if isinstance(row, list)}
    assert all(row and set(row) <= {*PRESETS, *MODES} for row in named.values())
    without = len(USES[part]) - len(named)
    assert without <= (SETTINGS_WITHOUT_MAX if part == "settings" else 0)


def test_settings_that_change_at_run_time_are_changed_by_a_mode() -> None:
    changed = {key for key, values in LIVE_SETTINGS if values}
    used = {path for path, row in USES["settings"].items() if "live_settings" in row}
    for path in used:
        assert changed & {path, *SCHEMA.settings[path].keys}, path


@pytest.mark.parametrize("name", PRESETS)
def test_a_workload_aims_at_its_rate(name: str) -> None:
    workload = workload_for(name, 2000)
    clients = sum(getattr(workload, kind) for kind in SIMULATED_CLIENTS if kind != "push_members")
    if workload.send_back_per_mille:  # beside each consumer there is one that gives back
        clients += workload.consumers
    assert clients / (workload.interval_ms / 1000) == pytest.approx(2000, rel=0.15)
