"""The pytest plug-in: a cluster, a fresh topic and a client for the asking.

``--dledger-addr host:port`` runs the same tests against a cluster that runs already. A nemesis does
the same fault again and again, and heals it in between.

Every pytest run of an environment loads this module: brokers and clients are imported by the
fixtures that need them.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from dledger.client.blocking import BlockingClient
    from dledger.testing.embedded_broker import EmbeddedBroker


FAULT_S: Final = 1.0
CALM_S: Final = 2.0
"""Long enough to elect a leader and do some work under it."""


def _kill_leader(cluster: EmbeddedBroker) -> Callable[[], None]:
    leader = cluster.leader()
    cluster.kill(leader)
    return lambda: cluster.start(leader)


def _restart_leader(cluster: EmbeddedBroker) -> Callable[[], None]:
    leader = cluster.leader()
    cluster.stop(leader)
    return lambda: cluster.start(leader)


def _partition_leader(cluster: EmbeddedBroker) -> Callable[[], None]:
    leader = cluster.leader()
    cluster.partition([[leader], [name for name in cluster.brokers if name != leader]])
    return cluster.heal


NEMESES: Final[Mapping[str, Callable[[EmbeddedBroker], Callable[[], None]]]] = {
    "kill-leader": _kill_leader,
    "restart-leader": _restart_leader,
    "partition-leader": _partition_leader,
}
"""What each does; it returns what undoes it."""


@contextmanager
def disturb(cluster: EmbeddedBroker, name: str) -> Iterator[None]:
    """Do *name* to the cluster again and again while the block runs; healed when it is left.

    Raises:
        ValueError: No such nemesis.
        BaseException: What the nemesis could not do.
    """
    if name not in NEMESES:
        raise ValueError(f"no nemesis {name!r}; there are {', '.join(sorted(NEMESES))}")
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                undo = NEMESES[name](cluster)
                stop.wait(FAULT_S)
                undo()
                stop.wait(CALM_S)
        except BaseException as error:  # noqa: BLE001  # raised where the block ends
            failures.append(error)

    thread = threading.Thread(target=run, name=f"nemesis {name}")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that runs already."""

    name_server_addr: str

    def create_topic(self, topic: str, *, queue_nums: int = 4) -> None:
        """Create a topic on it."""
        from dledger.client.blocking import BlockingClient

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
def dledger_client(dledger_cluster: EmbeddedBroker | RunningCluster) -> Iterator[BlockingClient]:
    """A blocking client of `dledger_cluster`."""
    from dledger.client.blocking import BlockingClient

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
