"""Processes and clients that a nemesis acts on: signals, disks, limits, clocks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

import trio

from dledger.cli.local_cluster import Node, status_of
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.jepsen_like.chaos import file_damage, limits, strace_inject
from dledger.jepsen_like.chaos.cluster import ChaosCluster
from dledger.jepsen_like.chaos.limits import Flood, idle_connections
from dledger.jepsen_like.chaos.loop_disk import LoopDisk
from dledger.jepsen_like.nemesis.ground import CannotBeDone, FaultError
from dledger.remoting.addresses import split_address
from dledger.remoting.seams import Rng

STATUS_TIMEOUT_S: Final = 1.0
STOP_WITHIN_S: Final = 5.0
"""A process that is stopped does nothing any more after this, or the machine is hopeless."""

POINT_WAIT_S: Final = 10.0
"""How long a kill waits for the disk to do something."""

SLOW_S_MAX: Final = 120
"""A flush is slowed for no longer, whatever happens to the runner."""

FULL_LEAVES_BYTES: Final = 256 << 10
"""A full disk has space for small files, as they have in practice, and none for a segment."""

VERSIONS_AHEAD: Final = 1
"""Versions by which the protocol of a later release is newer."""

ROT_PLACES: Final = (
    file_damage.Place.SEGMENT,
    file_damage.Place.SEGMENT,
    file_damage.Place.SEGMENT,
    file_damage.Place.INDEX,
    file_damage.Place.SNAPSHOT,
    file_damage.Place.VOTE,
)
ROT_PARTS: Final = tuple(file_damage.Part)
FILLINGS: Final = tuple(file_damage.Filling)


class RealMachine:
    """One process; see `dledger.jepsen_like.nemesis.ground.Machine`."""

    def __init__(self, cluster: ChaosCluster, node: Node) -> None:
        self._cluster = cluster
        self._node = node
        self._paused = False
        self.name = node.name

    @property
    def is_up(self) -> bool:
        """Whether it runs and is not paused."""
        return self._node.running and not self._paused

    @property
    def is_down(self) -> bool:
        """Whether it has ended."""
        return not self._node.running

    async def start(self) -> bool:
        """Start it; it serves some moments later."""
        if not self._node.running:
            await self._cluster.start(self.name)
        return True

    async def kill(self) -> None:
        """SIGKILL."""
        self._paused = False
        await self._cluster.kill(self.name)

    async def stop(self) -> bool:
        """SIGTERM, and SIGKILL when that takes too long."""
        self.resume()
        return await self._cluster.stop(self.name) == 0

    def pause(self) -> None:
        """SIGSTOP."""
        self._paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._paused = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._node.running and self._node.process is not None:
            self._node.process.send_signal(number)


class RealMember(RealMachine):
    """A broker process; see `dledger.jepsen_like.nemesis.ground.Member`.

    Attributes:
        status: Its last answer; empty while it does not answer.
        seen_commit: Newest commit index it has shown.
        seen_voters: The voters in the list it followed last.
        address: Where it answers questions, past the proxy.
        disk: Its own file system; None where it has an ordinary folder.
        is_newer: It was started as one of a later release.
    """

    def __init__(
        self, cluster: ChaosCluster, node: Node, disk: LoopDisk | None, why_no_disk: str, rng: Rng
    ) -> None:
        super().__init__(cluster, node)
        self.address = node.address
        self.disk = disk
        self.is_newer = False
        self.status: Mapping[str, Any] = {}
        self.seen_voters: tuple[str, ...] = ()
        self.seen_commit = 0
        self._lives = 0
        """How often it was started or ended: older answers do not count."""
        self._why_no_disk = why_no_disk
        self._rng = rng
        self._slow = ExitStack()
        self._few_files = ExitStack()
        self._flood = ExitStack()
        self._flooded: Flood | None = None
        self._limited: tuple[int, int, float, float] | None = None
        """Process, limit, and the time and CPU time at which it was set."""
        self._tracing = trio.Lock()
        """A process has one tracer at a time."""
        self._disk_lock = trio.Lock()
        """And its disk one fault that works on its files."""

    @property
    def root(self) -> Path:
        """Its data folder."""
        assert self._node.store_path is not None
        return self._node.store_path

    async def look(self) -> None:
        """Ask for its status now. The answer of a process that has ended since does not count."""
        status, life = None, self._lives
        if self.is_up:
            status = await status_of(self.address, timeout_s=STATUS_TIMEOUT_S)
        if life == self._lives:
            self.note(status)

    def _begin_life(self) -> None:
        self._lives += 1
        self.status = {}

    async def kill(self) -> None:
        """SIGKILL."""
        self._begin_life()
        await super().kill()
        self._begin_life()

    async def stop(self) -> bool:
        """SIGTERM, and SIGKILL when that takes too long."""
        is_clean = await super().stop()
        self._begin_life()
        return is_clean

    def note(self, status: Mapping[str, Any] | None) -> None:
        """Keep its answer; None: it gave none."""
        self.status = status or {}
        if status:
            self.seen_commit = int(status["commit_index"])
            self.seen_voters = tuple(
                sorted(m["name"] for m in status.get("members", ()) if m["standing"] == "voter")
            )

    async def start(self) -> bool:
        """Start it, once the work on its disk has ended."""
        return await self._start(0)

    async def restart_newer(self) -> None:
        """Stop it and start it as a broker of a later release."""
        await self.stop()
        await self._start(VERSIONS_AHEAD)

    async def _start(self, versions_ahead: int) -> bool:
        async with self._disk_lock:
            if self.is_down:
                self._cluster.be_ahead(self.name, versions_ahead)
                self.is_newer = versions_ahead > 0
                self._begin_life()
            return await super().start()

    # -- power and points ------------------------------------------------------------------

    def _own_disk(self) -> LoopDisk:
        if self.disk is None:
            raise CannotBeDone(self._why_no_disk)
        return self.disk

    async def power_cut(self) -> None:
        """Stop it, shut its file system down, kill it, mount what survived."""
        disk = self._own_disk()
        async with self._disk_lock:
            if self._rng.random() < 0.5:
                share, names = self._rng.random(), self._rng.random() < 0.5
                await _in_thread(lambda: disk.keep_some(self._rng, share, names=names))
            if self._node.running and self._node.pid is not None:
                await stand_still(self._node.pid)
            await _in_thread(disk.cut)
            await self.kill()
            await _in_thread(disk.restore)

    async def kill_at_point(self, skip: int, *, power: bool) -> str:
        """End it at one of its next flushes; the file system stays as it is at that moment."""
        why = strace_inject.why_not()
        if why is not None:
            raise CannotBeDone(why)
        pid = self._node.pid
        if pid is None or not self._node.running:
            return ""
        failed = await self._fail_flush(pid, 1 + skip % 8)
        if not failed:
            return ""
        if power and self.disk is not None:
            await self.power_cut()
        else:
            await self.kill()
        return f"flush {1 + skip % 8}"

    # -- disks -----------------------------------------------------------------------------

    async def wipe(self) -> None:
        """Kill it and remove all it has."""
        async with self._disk_lock:
            await self.kill()
            await _in_thread(lambda: file_damage.wipe(self.root))

    async def rot(self, bits: int) -> str:
        """Flip bits of its files; it must have ended."""
        place = ROT_PLACES[self._rng.randrange(len(ROT_PLACES))]
        part = ROT_PARTS[self._rng.randrange(len(ROT_PARTS))]
        async with self._disk_lock:
            await self.kill()
            found = await _in_thread(
                lambda: file_damage.flip_bits(self.root, self._rng, place, part, bits=bits)
            )
        return "; ".join(map(str, found))

    async def _only_simulated(self, *_: object, **__: object) -> NoReturn:
        """State why not."""
        raise CannotBeDone("the disks of this machine are good, and it decides when work begins")

    spoil_sectors = rot_file = begin_work_late = _only_simulated
    lie_about_flushes = undo_lied_flushes = _only_simulated

    async def tear_tail(self, size_bytes: int) -> str:
        """Write over its newest bytes above the commit mark; it must have ended."""
        filling = FILLINGS[self._rng.randrange(len(FILLINGS))]
        async with self._disk_lock:
            await self.kill()
            found = await _in_thread(
                lambda: file_damage.tear_tail(
                    self.root, self._rng, size_bytes, filling, keep_marked=True
                )
            )
        return "" if found is None else str(found)

    # -- limits ----------------------------------------------------------------------------

    async def limit_files(self, spare: int | None) -> str:
        """Let it open only *spare* more files; None heals, and returns how busy it was."""
        busy = self._how_busy()
        self._few_files.close()
        self._limited = None
        pid = self._node.pid
        if spare is None or pid is None or not self._node.running:
            return busy
        why = limits.why_not()
        if why is not None:
            raise CannotBeDone(why)
        manager = limits.few_open_files(pid, spare, lambda: self._runs_as(pid))
        limit = self._few_files.enter_context(manager)
        self._limited = (pid, limit, time.monotonic(), limits.cpu_s(pid))
        return f"at most {limit} descriptors"

    def _runs_as(self, pid: int) -> bool:
        return self._node.running and self._node.pid == pid

    def _how_busy(self) -> str:
        if self._limited is None:
            return ""
        pid, limit, since_s, cpu_s = self._limited
        prefix = f"at most {limit} descriptors: "
        if not self._runs_as(pid):
            return f"{prefix}it stopped"
        spent = (limits.cpu_s(pid) - cpu_s) / max(0.1, time.monotonic() - since_s)
        return f"{prefix}it went on, {spent:.0%} of a processor"

    async def flood(self, connections: int) -> str:
        """Hold *connections* idle connections; 0 closes them and returns what became of them."""
        await _in_thread(self._flood.close)
        flooded, self._flooded = self._flooded, None
        if not connections:
            return str(flooded or "")
        manager = idle_connections(*split_address(self._node.address), connections)
        self._flooded = await _in_thread(lambda: self._flood.enter_context(manager))
        return str(self._flooded)

    async def fill_disk(self, left_bytes: int | None) -> None:
        """Take the space of its file system, or give it back."""
        disk = self._own_disk()
        async with self._disk_lock:
            if left_bytes is None:
                await _in_thread(disk.release)
            else:
                await _in_thread(lambda: disk.fill(max(left_bytes, FULL_LEAVES_BYTES)))

    async def slow_disk(self, delay_s: float) -> None:
        """Let every flush begin late; 0 heals."""
        async with self._tracing:
            await self._slow_disk(delay_s)

    async def _slow_disk(self, delay_s: float) -> None:
        await _in_thread(self._slow.close)
        pid = self._node.pid
        if not delay_s or pid is None or not self._node.running:
            return
        why = strace_inject.why_not()
        if why is not None:
            raise CannotBeDone(why)
        log = self._node.log_path.with_suffix(".strace")
        manager = strace_inject.slow_flushes(
            pid, max(1, int(delay_s * 1000)), log, within_s=SLOW_S_MAX
        )
        await _in_thread(lambda: self._slow.enter_context(manager))

    async def fail_flushes(self, number: int) -> None:
        """Let the next flush end in EIO; it must end itself then."""
        why = strace_inject.why_not()
        if why is not None:
            raise CannotBeDone(why)
        pid = self._node.pid
        if number and pid is not None and self._node.running:
            await self._fail_flush(pid, 1)

    async def _fail_flush(self, pid: int, nth: int) -> int:
        async with self._tracing:
            await _in_thread(self._slow.close)  # it gives way: the flush fails, slow or not
            return int(
                await _in_thread(
                    lambda: strace_inject.fail_one_flush(pid, nth=nth, within_s=int(POINT_WAIT_S))
                )
            )

    # -- clocks ----------------------------------------------------------------------------

    def jump_clock(self, by_ms: int) -> None:
        """Move its date."""
        self._cluster.clocks[self.name].jump(by_ms)

    def set_clock_right(self) -> None:
        """Let its date be right again, and its clocks run as fast as others."""
        self._cluster.clocks[self.name].set_right()
        self._cluster.clocks[self.name].drift(0.0)

    def drift_clock(self, ppm: float) -> None:
        """Let its clocks drift."""
        self._cluster.clocks[self.name].drift(ppm)

    def release(self) -> None:
        """Let go of the process: nothing is slowed or limited any more."""
        self._slow.close()
        self._few_files.close()
        self._flood.close()
        self._limited = self._flooded = None


class RealClient:
    """A machine of clients; see `dledger.jepsen_like.nemesis.ground.Machine`."""

    def __init__(
        self,
        name: str,
        name_servers: tuple[str, ...],
        program: Callable[[RealClient], Awaitable[None]],
        nursery: trio.Nursery,
        *,
        rpc_timeout_s: float,
    ) -> None:
        self.name = name
        self._name_servers = name_servers
        self._program = program
        self._nursery = nursery
        self._rpc_timeout_s = rpc_timeout_s
        self._scope: trio.CancelScope | None = None
        self._ended = trio.Event()
        self.instance: ClientInstance | None = None

    @property
    def is_up(self) -> bool:
        """Whether its program runs."""
        return self._scope is not None

    @property
    def is_down(self) -> bool:
        """Whether it was killed."""
        return self._scope is None

    async def start(self) -> bool:
        """Start the program; return when its instance is open."""
        if self._scope is None:
            await self._nursery.start(self._live)
        return True

    async def _live(self, *, task_status: trio.TaskStatus[None]) -> None:
        self._ended = trio.Event()
        try:
            with trio.CancelScope() as self._scope:
                config = ClientConfig(
                    name_servers=self._name_servers, rpc_timeout_s=self._rpc_timeout_s
                )
                async with connect(config=config) as self.instance:
                    task_status.started()
                    await self._program(self)
        finally:
            self._scope = self.instance = None
            self._ended.set()

    async def kill(self) -> None:
        """Let go of everything in the middle of what it does."""
        if self._scope is not None:
            if self.instance is not None:
                self.instance.abandon()
            self.instance = None
            self._scope.cancel()
            await self._ended.wait()

    async def stop(self) -> bool:
        """End it like `kill`: clients have nothing to lose."""
        await self.kill()
        return True

    def pause(self) -> None:
        """Nothing: the runner's own process cannot stand still."""

    def resume(self) -> None:
        """Nothing."""


async def _in_thread(act: Callable[[], Any]) -> Any:
    """Do what blocks in a worker thread; it is waited for even when cancelled.

    Raises FaultError: a file or device refused.
    """
    try:
        return await trio.to_thread.run_sync(act)
    except OSError as error:
        raise FaultError(f"the fault could not be done: {error}") from error


async def stand_still(pid: int) -> None:
    """Stop a process; no thread of it runs in user space when this returns.

    A call that a thread is inside of may go on. A cancelled call leaves the process stopped or
    about to stop. A flush that races with the shutdown of its file system may be reported as done
    though nothing of it reaches the disk: a process that still runs would acknowledge it.

    Raises:
        FaultError: It still ran after `STOP_WITHIN_S`.
        ProcessLookupError: There is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    with trio.move_on_after(STOP_WITHIN_S):
        while not _stands_still(pid):  # noqa: ASYNC110  # the kernel gives no event
            await trio.sleep(0.001)
        return
    raise FaultError(f"process {pid} did not stop within {STOP_WITHIN_S} s")


def _stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or inside the kernel."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(stat.read_text().rpartition(")")[2].split()[0])
        except FileNotFoundError:
            continue  # that thread has ended
    return all(state in "TtDZX" for state in states)
