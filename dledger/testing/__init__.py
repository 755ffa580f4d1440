"""Clusters for tests, and doubles of the seams with checks of their contracts.

Guide: docs/how-to/testing.md.

A name is imported when it is asked for: pytest loads this package in every run, for the plug-in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dledger.testing.clusters import (
        EmbeddedCluster,
        ProcessCluster,
        embedded_cluster,
        process_cluster,
    )
    from dledger.testing.contract import check_disk, check_executor, check_network
    from dledger.testing.crash_disk import CrashDisk
    from dledger.testing.doubles import InlineExecutor, ManualClock, MemoryNetwork, VirtualClock
    from dledger.testing.embedded_broker import EmbeddedBroker, assert_messages, drain, wait_for_lag
    from dledger.testing.group_contract import check_broker_group

_HOMES = {
    "CrashDisk": "crash_disk", "EmbeddedBroker": "embedded_broker", "EmbeddedCluster": "clusters",
    "InlineExecutor": "doubles", "ManualClock": "doubles", "MemoryNetwork": "doubles",
    "ProcessCluster": "clusters", "VirtualClock": "doubles", "assert_messages": "embedded_broker",
    "check_broker_group": "group_contract", "check_disk": "contract", "check_executor": "contract",
    "check_network": "contract", "drain": "embedded_broker", "embedded_cluster": "clusters",
    "process_cluster": "clusters", "wait_for_lag": "embedded_broker",
}  # fmt: skip

__all__ = [
    "CrashDisk", "EmbeddedBroker", "EmbeddedCluster", "InlineExecutor", "ManualClock",
    "MemoryNetwork", "ProcessCluster", "VirtualClock", "assert_messages", "check_broker_group",
    "check_disk", "check_executor", "check_network", "drain", "embedded_cluster", "process_cluster",
    "wait_for_lag",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
