"""Clusters for tests, in this process or in several. Guide: docs/how-to/testing.md.

A name is imported when it is asked for: pytest loads this package in every run, for the plug-in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dledger.testing.assertions import assert_messages, drain, wait_for_lag
    from dledger.testing.embedded_broker import EmbeddedBroker
    from dledger.testing.in_process import EmbeddedCluster, embedded_cluster
    from dledger.testing.in_processes import ProcessCluster, process_cluster

_HOMES = {
    "EmbeddedBroker": "embedded_broker",
    "EmbeddedCluster": "in_process",
    "ProcessCluster": "in_processes",
    "assert_messages": "assertions",
    "drain": "assertions",
    "embedded_cluster": "in_process",
    "process_cluster": "in_processes",
    "wait_for_lag": "assertions",
}

__all__ = [
    "EmbeddedBroker",
    "EmbeddedCluster",
    "ProcessCluster",
    "assert_messages",
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
