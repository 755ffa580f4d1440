"""A group of members without sockets."""

from pathlib import Path

import pytest

from tests.harness.raft_cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)
