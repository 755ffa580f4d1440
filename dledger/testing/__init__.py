"""Clusters for tests, and doubles of the seams with checks of their contracts.

Guide: docs/how-to/testing.md.

A name is imported when it is asked for: pytest loads this package in every run, for the plug-in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dledger.testing.clocks import ManualClock, VirtualClock
    from dledger.testing.contract import check_executor
    from dledger.testing.crash_disk import CrashDisk
    from dledger.testing.disk_contract import check_disk
    from dledger.testing.embedded_broker import EmbeddedBroker, assert_messages, drain, wait_for_lag
    from dledger.testing.group_contract import check_broker_group
    from dledger.testing.in_process import EmbeddedCluster, embedded_cluster
    from dledger.testing.in_processes import ProcessCluster, process_cluster
    from dledger.testing.inline_executor import InlineExecutor
    from dledger.testing.memory_network import MemoryNetwork
    from dledger.testing.network_contract import check_network

_HOMES = {
    "CrashDisk": "crash_disk",
    "EmbeddedBroker": "embedded_broker",
    "EmbeddedCluster": "in_process",
    "InlineExecutor": "inline_executor",
    "ManualClock": "clocks",
    "MemoryNetwork": "memory_network",
    "ProcessCluster": "in_processes",
    "VirtualClock": "clocks",
    "assert_messages": "embedded_broker",
    "check_broker_group": "group_contract",
    "check_disk": "disk_contract",
    "check_executor": "contract",
    "check_network": "network_contract",
    "drain": "embedded_broker",
    "embedded_cluster": "in_process",
    "process_cluster": "in_processes",
    "wait_for_lag": "embedded_broker",
}

__all__ = [
    "CrashDisk",
    "EmbeddedBroker",
    "EmbeddedCluster",
    "InlineExecutor",
    "ManualClock",
    "MemoryNetwork",
    "ProcessCluster",
    "VirtualClock",
    "assert_messages",
    "check_broker_group",
    "check_disk",
    "check_executor",
    "check_network",
    "drain",
    "embedded_cluster",
    "process_cluster",
    "wait_for_lag",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
