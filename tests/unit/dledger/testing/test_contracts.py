"""Every implementation of a seam keeps its contract, the test doubles included."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.seams import Disk
from dledger.jepsen_like.seeded_rng import SimRng, rng_stream
from dledger.jepsen_like.simulation.event_trace import Trace
from dledger.jepsen_like.simulation.sim_disk import Mount, SimDisk, SimExecutor
from dledger.jepsen_like.simulation.sim_network import SimNetwork
from dledger.jepsen_like.simulation.virtual_time import Gate, SimClock, VirtualTime, run_virtual
from dledger.remoting.machine import AdaptiveExecutor, ThreadExecutor
from dledger.remoting.seams import Executor
from dledger.remoting.tcp import TcpNetwork
from dledger.testing import (
    CrashDisk,
    InlineExecutor,
    ManualClock,
    MemoryNetwork,
    VirtualClock,
    check_broker_group,
    check_disk,
    check_executor,
    check_network,
)
from dledger.testing.doubles import PartedNetwork, Partition
from tests.harness.fake_group import FakeGroup
from tests.harness.groups import running_groups


class LosesAll(SimRng):
    """Chance by which a power cut loses everything that was not flushed."""

    def random(self) -> float:
        return 0.0


def test_check_disk_os_disk(tmp_path: Path) -> None:
    check_disk(OsDisk(), str(tmp_path))


def test_check_disk_os_disk_with_few_descriptors(tmp_path: Path) -> None:
    check_disk(OsDisk(descriptors_max=4), str(tmp_path))


def test_check_disk_crash_disk() -> None:
    def power_cut(disk: Disk) -> Disk:
        assert isinstance(disk, CrashDisk)
        return disk.power_cut(lambda: False)

    check_disk(CrashDisk(), "/folder", power_cut=power_cut)


def test_check_disk_sim_disk() -> None:
    def power_cut(mount: Disk) -> Disk:
        assert isinstance(mount, Mount)
        mount.disk.kill(mount)
        mount.disk.power_cut()
        return mount.disk.mount()

    check_disk(SimDisk(LosesAll(1)).mount(), "/folder", power_cut=power_cut)


class KeepsOldNames(CrashDisk):
    """A disk whose removals do nothing."""

    def unlink(self, path: str) -> None:
        return


def test_check_disk_names_the_broken_rule() -> None:
    with pytest.raises(AssertionError, match="a removed file does not exist"):
        check_disk(KeepsOldNames(), "/folder")


@pytest.mark.real_time
async def test_check_network_tcp() -> None:
    await check_network(TcpNetwork())


async def test_check_network_memory() -> None:
    await check_network(MemoryNetwork())
    await check_network(MemoryNetwork(latency_s=0.0005))


async def test_check_network_parted() -> None:
    partition, network = Partition(), MemoryNetwork()
    one, other = (PartedNetwork(name, partition, network) for name in ("n0", "n1"))
    await check_network(one, other)
    await partition.part([["n0"], ["n1"]])
    with pytest.raises(OSError, match="No route to host"):
        await check_network(one, other)


@pytest.mark.parametrize("port", [10911, 40911])
def test_check_network_simulated(port: int) -> None:
    async def run(time: VirtualTime) -> None:
        network = SimNetwork(time, rng_stream(1), Trace(time))
        client, server = (network.add_host(f"n{i}", i, f"10.0.0.{i}") for i in (1, 2))
        await check_network(network.view(client), network.view(server), host="10.0.0.2", port=port)

    run_virtual(1, run)


@pytest.mark.parametrize("make", [AdaptiveExecutor, ThreadExecutor, InlineExecutor])
async def test_check_executor(make: Callable[[], Executor]) -> None:
    await check_executor(make())


@pytest.mark.parametrize("kind", ["flush", "reserve"])
@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_check_executor_simulated(kind: str, delay_s: float) -> None:
    async def run(time: VirtualTime) -> None:
        disk = SimDisk(rng_stream(1))
        disk.delay_s = delay_s
        executor = SimExecutor(SimClock(time, Gate()), disk.mount(), rng_stream(2))
        await check_executor(executor, kind=kind)

    run_virtual(1, run)


@pytest.mark.parametrize("clock", [VirtualClock(), ManualClock()])
async def test_check_broker_group_fake(tmp_path: Path, clock: ManualClock | VirtualClock) -> None:
    group = FakeGroup(tmp_path, clock)

    async def settle() -> None:
        group.settle()

    async def end_leadership() -> None:
        group.step_down()

    await check_broker_group(group, settle=settle, end_leadership=end_leadership)
    group.close()


async def test_check_broker_group_of_one(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        await check_broker_group((await groups.leader()).group)


async def test_check_broker_group_of_three(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()

        async def end_leadership() -> None:
            await groups.isolate(leader.name)
            with trio.fail_after(60):
                while leader.group.leadership is not None:
                    await trio.sleep(0.1)

        await check_broker_group(leader.group, end_leadership=end_leadership)


async def test_parted_network_breaks_connections_begun_before() -> None:
    """The partition comes while a connection is made, and before its listener was known."""
    partition, network = Partition(), MemoryNetwork(latency_s=0.1)
    one, other = (PartedNetwork(name, partition, network) for name in ("n0", "n1"))

    async def connect() -> None:
        with pytest.raises(OSError, match="No route to host"):
            await one.connect("127.0.0.1", 1, timeout_s=1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(connect)
        await trio.sleep(0.05)
        await other.listen("127.0.0.1", 1)
        await partition.part([["n0"], ["n1"]])
