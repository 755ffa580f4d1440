"""The pytest plug-in: a cluster, a fresh topic and a client for the asking.

``--dledger-addr host:port`` runs the same tests against a cluster that runs already.

Every pytest run of an environment loads this module: brokers and clients are imported by the
fixtures that need them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from dledger.testing.nemesis import NEMESES, disturb

if TYPE_CHECKING:
    from client.blocking import BlockingClient
    from dledger.testing.embedded_broker import EmbeddedBroker

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that runs already."""

    name_server_addr: str

    def create_topic(self, topic: str, *, queue_nums: int = 4) -> None:
        """Create a topic on it."""
        from client.blocking import BlockingClient

        with BlockingClient(self.name_server_addr) as client:
            client.admin().create_topic(topic, queue_nums=queue_nums)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--dledger-addr``."""
    parser.getgroup("dledger").addoption(
        "--dledger-addr",
        default="",
        help="NameServer of a running cluster, host:port; tests use it instead of starting one.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        "dledger_nemesis(name): trouble for dledger_raft_cluster while the test runs: "
        + ", ".join(sorted(NEMESES)),
    )


@pytest.fixture(scope="session")
def dledger_cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker | RunningCluster]:
    """One broker for all tests of the session, or the one of ``--dledger-addr``."""
    address: str = request.config.getoption("--dledger-addr")
    if address:
        yield RunningCluster(address)
        return
    from dledger.testing.embedded_broker import EmbeddedBroker

    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
def dledger_topic(
    request: pytest.FixtureRequest, dledger_cluster: EmbeddedBroker | RunningCluster
) -> str:
    """The name of a topic that only this test has."""
    name = re.sub(r"[^a-zA-Z0-9_-]+", "-", request.node.name)[:60]
    topic = f"{name}-{next(_numbers)}"
    dledger_cluster.create_topic(topic)
    return topic


@pytest.fixture
def dledger_client(
    dledger_cluster: EmbeddedBroker | RunningCluster,
) -> Iterator[BlockingClient]:
    """A blocking client of `dledger_cluster`."""
    from client.blocking import BlockingClient

    with BlockingClient(dledger_cluster.name_server_addr) as client:
        yield client


@pytest.fixture
def dledger_raft_cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    """Three brokers for this test alone; under a nemesis when the test is marked with one.

    ``@pytest.mark.dledger_nemesis("kill-leader")``
    """
    from dledger.testing.embedded_broker import EmbeddedBroker

    mark = request.node.get_closest_marker("dledger_nemesis")
    with EmbeddedBroker(brokers=3) as cluster:
        if mark is None:
            yield cluster
        else:
            with disturb(cluster, str(mark.args[0])):
                yield cluster
