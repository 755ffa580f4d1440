"""Faults of the leader of a simulated cluster, one after the other."""

from __future__ import annotations

from dledger.jepsen_like.plans.plan import Kind, Step

KILL_PAUSE_ISOLATE = (
    Step(12_000, Kind.KILL, "leader", 3_000),
    Step(26_000, Kind.PAUSE, "leader", 9_000),
    Step(42_000, Kind.ISOLATE, "leader", 6_000),
)
"""Of a plan that lasts a minute."""
