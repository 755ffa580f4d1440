"""Clusters for tests, in this process or in several. Guide: docs/guide/testing.md."""

from dledger.testing.assertions import assert_messages, drain, wait_for_lag
from dledger.testing.embedded_broker import EmbeddedBroker
from dledger.testing.in_process import EmbeddedCluster, embedded_cluster
from dledger.testing.in_processes import ProcessCluster, process_cluster

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
