"""Trouble for a test's cluster: the same fault again and again, healed in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
