"""A machine without descriptors or buffers, or with broken ones, loses links and nothing else."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from dledger.membership_changes import MembershipChanges
from dledger.raft.link_faults import local_fault
from remoting.seams import Network, Stream
from tests.harness.groups import Groups, running_groups
from tests.harness.raft_cluster import batch

pytestmark = pytest.mark.usefixtures("autojump_clock")

FAULTY_S = 65.0
"""Longer than the pause between two lines about the same fault."""


@dataclass
class Faults:
    """Errors of a machine, by what fails; none: it works."""

    errors: dict[str, int] = field(default_factory=dict)
    raised: Counter[str] = field(default_factory=Counter)

    def check(self, what: str) -> None:
        if what in self.errors:
            self.raised[what] += 1
            raise OSError(self.errors[what], "as the kernel says")


class FaultyStream:
    """A stream of a machine with faults."""

    def __init__(self, stream: Stream, faults: Faults) -> None:
        self._stream = stream
        self._faults = faults
        self.peer_address, self.local_address = stream.peer_address, stream.local_address

    async def send_all(self, data: Any) -> None:
        self._faults.check("send")
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int) -> Any:
        data = await self._stream.receive_some(max_bytes)
        self._faults.check("receive")
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


class FaultyNetwork:
    """The network of a machine with faults."""

    def __init__(self, network: Network, faults: Faults) -> None:
        self._network = network
        self._faults = faults

    async def listen(self, host: str, port: int, **options: Any) -> Any:
        self._faults.check("listen")
        listener: Any = await self._network.listen(host, port, **options)
        accept: Callable[[], Any] = listener.accept

        async def faulty() -> FaultyStream:
            return FaultyStream(await accept(), self._faults)

        listener.accept = faulty
        return listener

    async def connect(self, host: str, port: int, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self._faults.check("connect")
        return FaultyStream(await self._network.connect(host, port, **options), self._faults)


def lines_of(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "peer_link_broken"]


def break_machine(groups: Groups, name: str) -> Faults:
    """Let the network of *name*, which has not started, fail as is said later."""
    faults, network_of = Faults(), groups.network_of

    def faulty(asked: str) -> Any:
        network = network_of(asked)
        return FaultyNetwork(network, faults) if asked == name else network

    groups.network_of = faulty  # type: ignore[method-assign, assignment] # the seam it gets
    return faults


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("connect", errno.EMFILE),
        ("receive", errno.EIO),
        ("send", errno.ENOBUFS),
    ],
)
async def test_a_faulty_machine_loses_its_links_and_gets_them_back(
    tmp_path: Path, nursery: trio.Nursery, what: str, number: int
) -> None:
    groups = Groups(tmp_path, nursery)
    faults = break_machine(groups, "n0")
    for name in groups.names:
        await groups.start(name)
    await (await groups.leader()).group.submit(batch(b"before"))
    with structlog.testing.capture_logs() as lines:
        faults.errors[what] = number
        await groups.isolate("n0")  # what stands breaks, so that it dials again
        groups.heal()
        await trio.sleep(FAULTY_S)
        others = groups.others("n0")
        await (await groups.leader(among=others)).group.submit(batch(b"meanwhile"))
        faults.errors.clear()
        await trio.sleep(10)
    assert faults.raised[what] > 50
    told = lines_of(lines)
    assert all(f"[Errno {number}]" in line["error"] for line in told)
    assert 1 <= len(told) <= 3
    assert sum(line["times"] for line in told) > 10
    await (await groups.leader()).group.submit(batch(b"after"))
    await groups.settle()
    rows = (await groups.leader()).group.status()["peers"].values()
    assert [row["connected"] for row in rows] == [True, True]


async def test_a_member_that_cannot_listen_yet_serves_on(tmp_path: Path) -> None:
    """One that was alone gets company, and its port is taken or there is no descriptor."""
    async with trio.open_nursery() as nursery:
        groups = Groups(tmp_path, nursery, 1)
        faults = break_machine(groups, "n0")
        alone = await groups.start("n0")
        await (await groups.leader()).group.submit(batch(b"alone"))
        faults.errors["listen"] = errno.EMFILE
        groups.names.append("n1")
        added = await groups.start("n1")
        with structlog.testing.capture_logs() as lines:
            changes = MembershipChanges(alone.group, alone.clock)
            nursery.start_soon(changes.add, "n1", ("127.0.0.1", 40912))
            await trio.sleep(5)
            await alone.group.submit(batch(b"still alone"))
            faults.errors.clear()
            with trio.fail_after(60):
                while not added.group.node.roster.is_self_voter:
                    await trio.sleep(0.1)
        assert [line["times"] for line in lines_of(lines)] == [1]
        assert faults.raised["listen"] >= 3
        await groups.settle()
        nursery.cancel_scope.cancel()
    for replica in groups.replicas.values():
        replica.group.store.close(clean=False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, "no more"), "[Errno 24] no more"),
        (ConnectionResetError(errno.ECONNRESET, "gone"), None),
        (trio.BrokenResourceError("gone"), None),
        (TimeoutError("late"), None),
    ],
)
def test_faults_of_this_machine_are_told_from_lost_peers(
    error: Exception, expected: str | None
) -> None:
    assert local_fault(error) == expected
    outer = OSError("all attempts to connect failed")
    outer.__cause__ = ExceptionGroup("all", [ConnectionRefusedError(111, "no"), error])
    assert local_fault(outer) == expected
    broken = trio.BrokenResourceError("socket connection broken")
    broken.__cause__ = error
    assert local_fault(broken) == expected


async def test_members_of_a_sound_machine_have_nothing_to_say(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with running_groups(tmp_path) as groups:
            await groups.leader()
            groups.replicas.pop("n2").kill()
            await trio.sleep(5)
    assert lines_of(lines) == []
