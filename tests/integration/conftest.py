"""Clusters that tests share, by shape: each is started once, in the process of its `xdist_group`.

A test has topics of its own. One that kills a member or harms a disk has a cluster of its own.
"""

import logging
from collections.abc import Iterator

import pytest
import structlog

from dledger.cli.local_cluster import LocalCluster, lay_out
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running


@pytest.fixture(scope="session")
def three_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A group of three; its tests are marked ``xdist_group("three-brokers")``."""
    with running(lay_out(tmp_path_factory.mktemp("three"), settings=SMALL_FILES)) as cluster:
        yield cluster


@pytest.fixture
def no_logs() -> Iterator[None]:
    """Broker and commands are one process here, and what commands print is read."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()
