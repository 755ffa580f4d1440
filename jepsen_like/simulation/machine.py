"""A machine of the world, and at most one process on it at a time.

The machine keeps its disk, its address and its clock; a process has its heap, its open files and
its connections. `Node.kill` takes the process away between two of its steps, `Node.power_cut` the
machine with it.
"""

from __future__ import annotations

import math
import posixpath
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum
from typing import ClassVar, Final, Protocol

import trio

from dledger.commitlog.errors import (
    CorruptStoreError,
    DiskFullError,
    FlushFailedError,
    ForeignStoreError,
    StoreLockedError,
)
from dledger.commitlog.mark import SLOT_STRIDE_BYTES
from dledger.jepsen_like.nemesis.ground import marked_end
from dledger.jepsen_like.plans.modes import ROT_COUNTERS
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.event_trace import Event, Trace
from dledger.jepsen_like.simulation.platter import ROTTEN
from dledger.jepsen_like.simulation.sim_disk import Mount, SimDisk, SimExecutor
from dledger.jepsen_like.simulation.sim_network import NodeNetwork, SimNetwork
from dledger.jepsen_like.simulation.virtual_time import SimClock, VirtualTime
from dledger.output import leaves_of

EXPECTED_ENDS: Final = (
    FlushFailedError,
    DiskFullError,
    CorruptStoreError,
    ForeignStoreError,
    StoreLockedError,
    OSError,
)
"""With these a process may end by itself when its disk is bad; with any other it must not."""

VOTE_ROT_CHANCE: Final = 0.25
"""How often rot hits the vote and not the log. No vote may suffer: there are two copies."""

VOTE_BYTES: Final = 24
"""Of a slot of the vote: its head and the beginning of its record."""

current_node: ContextVar[str] = ContextVar("current_node", default="world")
"""Name of the node whose code is running; distinguishes log lines."""


class MachineWorld(Protocol):
    """What a machine needs of the world that it is in."""

    seed: int
    time: VirtualTime
    nursery: trio.Nursery
    network: SimNetwork
    trace: Trace
    is_over: bool

    @property
    def now_s(self) -> float:
        """Virtual time."""

    @property
    def elapsed_s(self) -> float:
        """Virtual time since the begin."""

    @property
    def sometimes(self) -> Counter[str]:
        """Where interesting things are counted."""

    def violate(self, invariant: str, text: str, cause: BaseException | None = None) -> None:
        """Note that something that must hold did not."""


class State(Enum):
    """Of a node."""

    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    PAUSED = "paused"
    STOPPING = "stopping"


class Process:
    """One incarnation: what ends with it."""

    __slots__ = (
        "clock",
        "ended",
        "executor",
        "mount",
        "network",
        "number",
        "ready",
        "rng",
        "scope",
    )

    def __init__(self, node: Node, number: int) -> None:
        world = node.world
        self.number = number
        self.rng = rng_stream(world.seed, node.name, "rng", number)
        self.clock = SimClock(
            world.time,
            node.host.gate,
            number=node.number,
            offset_ms=node.clock_offset_ms,
            drift_ppm=node.clock_drift_ppm,
        )
        self.mount: Mount = node.disk.mount()
        self.network: NodeNetwork = world.network.view(node.host)
        self.executor = SimExecutor(
            self.clock, self.mount, rng_stream(world.seed, node.name, "disk time", number)
        )
        self.scope = trio.CancelScope()
        self.ready = trio.Event()
        self.ended = trio.Event()


class Node:
    """A machine and its process.

    Attributes:
        number: Its number in the trace; from 1.
        incarnation: How many processes have been started on it.
        error: What its last process ended with, when it ended by itself.
        ran_since_s: When it last started or went on after a pause, virtual time.
        disk_watchers: Called with kind and path of everything its disk is about to do.
        is_trusted: Its disk has lost nothing that was flushed since it was last wiped or new.
        spoiled: The process whose disk got bad sectors last, and its passes through the log then.
        harmed_s: When something was last taken from its disk, time of the run.
        files: What an operator lays on its disk before each start, by path.
    """

    kind: ClassVar[str] = "node"

    def __init__(self, world: MachineWorld, name: str, number: int, address: str) -> None:
        self.world = world
        self.name = name
        self.number = number
        self.address = address
        self.host = world.network.add_host(name, number, address)
        self.disk = SimDisk(rng_stream(world.seed, name, "disk"))
        self.disk.observe = self._disk_event
        self.clock_offset_ms = 0
        self.clock_drift_ppm = 0.0
        self.state = State.DOWN
        self.incarnation = 0
        self.error: BaseException | None = None
        self.is_trusted = True
        self.spoiled = (0, 0)
        self.harmed_s = -math.inf
        self.ran_since_s = 0.0
        self.disk_watchers: list[Callable[[str, str], None]] = []
        self.files: dict[str, bytes] = {}
        self.process: Process | None = None
        self._events = {"write": Event.WRITE, "flush": Event.FLUSH, "replace": Event.REPLACE}

    # -- start and end ---------------------------------------------------------------------

    async def start(self) -> bool:
        """Start a process; return when it serves, or has ended: then False.

        A node that is not down is left as it is.
        """
        if self.state is not State.DOWN:
            return self.state is State.UP
        self.incarnation += 1
        for path, content in self.files.items():
            self.disk.install(path, content)
        process = self.process = Process(self, self.incarnation)
        self.world.network.power_on(self.host)
        self.state = State.STARTING
        self.error = None
        self._note(Event.START, self.incarnation)
        self.world.nursery.start_soon(self._live, process, name=f"{self.name}#{self.incarnation}")
        await process.ready.wait()
        return self.process is process

    async def _live(self, process: Process) -> None:
        current_node.set(self.name)
        error: BaseException | None = None
        try:
            with process.scope:
                try:
                    await self._serve(process)
                except Exception as failed:  # noqa: BLE001  # judged below
                    error = failed
        except Exception as failed:  # noqa: BLE001  # beside the cancellation of what else it did
            error = failed
        finally:
            process.ended.set()
            process.ready.set()
            if self.process is process:
                self._ended(process, error)

    def _ended(self, process: Process, error: BaseException | None) -> None:
        self.error = error
        self._note(Event.ENDED, process.number, int(error is not None))
        self._take_process_away(silent=False)
        if error is None or self.world.is_over:
            return
        self.world.sometimes["node_gave_up"] += 1
        for leaf in leaves_of(error):
            if not isinstance(leaf, EXPECTED_ENDS):
                self.world.violate(
                    "crash", f"{self.name} ended with {type(leaf).__name__}: {leaf}", leaf
                )

    async def _serve(self, process: Process) -> None:
        raise NotImplementedError

    def _is_up(self, process: Process) -> None:
        if self.process is process and self.state is State.STARTING:
            self.state = State.UP
            self.ran_since_s = self.world.now_s
            self._note(Event.STARTED, process.number)
            process.ready.set()

    @property
    def is_up(self) -> bool:
        """Whether its process serves and runs."""
        return self.state is State.UP

    @property
    def is_down(self) -> bool:
        """Whether it has no process."""
        return self.state is State.DOWN

    async def kill(self) -> None:
        """End the process at once; what it wrote stays in the page cache. Idempotent."""
        self.kill_now()

    def kill_now(self) -> None:
        """Do the same without a checkpoint, also inside the process."""
        if self.process is None:
            return
        self._note(Event.KILL, self.incarnation)
        self._take_process_away(silent=False)

    async def power_cut(self) -> None:
        """End process and machine at once; what was not flushed is lost by chance."""
        self.power_cut_now()

    def power_cut_now(self) -> None:
        """Do the same without a checkpoint, also inside the process.

        The other ends of its connections hear nothing. The machine is up again with the next start.
        """
        self._note(Event.POWER_CUT, self.incarnation)
        self._take_process_away(silent=True)
        self.host.is_up = False
        lost = self.disk.power_cut()
        if lost:
            self.world.sometimes["sectors_lost"] += lost

    def _take_process_away(self, *, silent: bool) -> None:
        process, self.process = self.process, None
        self.state = State.DOWN
        if process is None:
            return
        process.network.is_gone = True
        self.world.network.kill(self.host, silent=silent)
        if self.disk.kill(process.mount):
            self._lost_pages()
        process.scope.cancel()
        # Its tasks may wait behind a closed gate; they are let out to be cancelled.
        process.clock.gate.open()
        process.ready.set()

    def _lost_pages(self) -> None:
        """Take note that the pages of a flush that failed are lost with their process."""

    def pause(self) -> None:
        """Stop the process where it waits; see `sim_clock`. Idempotent."""
        if self.state is State.UP:
            self._note(Event.PAUSE, self.incarnation)
            self.state = State.PAUSED
            self.host.gate.close()

    def resume(self) -> None:
        """Let the process go on. Idempotent."""
        if self.state is State.PAUSED:
            self._note(Event.RESUME, self.incarnation)
            self.state = State.UP
            self.ran_since_s = self.world.now_s
            self.host.gate.open()
            self.world.network.resume(self.host.streams.values())

    async def stop(self, timeout_s: float = 30.0) -> bool:
        """Ask the process to end cleanly; kill it after *timeout_s*; tell whether it was clean."""
        process = self.process
        if process is None:
            return True
        self.resume()
        self._note(Event.STOP, self.incarnation)
        self.state = State.STOPPING
        self._ask_to_stop(process)
        with trio.move_on_after(timeout_s):
            await process.ended.wait()
        if self.process is process:
            self.kill_now()
            return False
        return self.error is None

    def _ask_to_stop(self, process: Process) -> None:
        process.scope.cancel()

    async def restart(self) -> bool:
        """Start again on the same disk, killing what runs."""
        self.kill_now()
        return await self.start()

    async def wipe(self) -> None:
        """Lose the disk; the process is killed before."""
        self.kill_now()
        self._note(Event.WIPE, self.incarnation)
        self.disk.wipe()
        self.is_trusted = True
        self.harmed_s = self.world.elapsed_s

    # -- faults ----------------------------------------------------------------------------

    def jump_clock(self, by_ms: int) -> None:
        """Move the machine's date."""
        self.clock_offset_ms += by_ms
        self._note(Event.CLOCK_FAULT, by_ms)
        if self.process is not None:
            self.process.clock.jump(by_ms)

    def drift_clock(self, ppm: float) -> None:
        """Let the machine's clocks run faster or slower."""
        self.clock_drift_ppm = ppm
        self._note(Event.CLOCK_FAULT, 0, int(ppm))
        if self.process is not None:
            self.process.clock.drift(ppm)

    async def slow_disk(self, delay_s: float) -> None:
        """Let every flush take *delay_s* longer; 0 heals."""
        self.disk.delay_s = delay_s
        self._note(Event.DISK_FAULT, 1, int(delay_s * 1000))

    async def fail_flushes(self, number: int) -> None:
        """Let the next flushes fail, with their pages lost."""
        self.disk.flush_failures = number
        self._note(Event.DISK_FAULT, 2, number)

    async def fill_disk(self, left_bytes: int | None) -> None:
        """Let the disk have only *left_bytes* more; None heals."""
        used = self.disk.used_bytes
        self.disk.capacity_bytes = None if left_bytes is None else used + left_bytes
        self._note(Event.DISK_FAULT, 3, -1 if left_bytes is None else left_bytes)

    def _marked_end(self) -> int:
        mark = self.disk.names.get("/store/raft/commit_mark")
        return 0 if mark is None else marked_end(bytes(mark.content))

    async def tear_tail(self, size_bytes: int) -> str:
        """Write over the log's newest bytes above the commit mark; return where."""
        found = self.disk.tear_tail("/commitlog/", size_bytes, self._marked_end())
        if found is not None:
            self.is_trusted = False
            self.harmed_s = self.world.elapsed_s
            self.world.sometimes["tail_torn"] += 1
        self._note(Event.DISK_FAULT, 6, 0 if found is None else found[1])
        return _places([] if found is None else [found])

    async def rot(self, bits: int) -> str:
        """Flip bits of the log's data at rest, or of one copy of the vote; return where."""
        vote = "/store/raft/vote"
        if self.disk.rng.random() < VOTE_ROT_CHANCE and vote in self.disk.names:
            start = self.disk.rng.randrange(2) * SLOT_STRIDE_BYTES
            found = self.disk.flip(vote, start, start + VOTE_BYTES, bits)
            self._note(Event.DISK_FAULT, 5, len(found))
            return _places(found)
        found = self.disk.rot("/commitlog/", bits, self._marked_end())
        if found:
            self.is_trusted = False
            self.harmed_s = self.world.elapsed_s
        self._note(Event.DISK_FAULT, 4, len(found))
        return _places(found)

    async def lie_about_flushes(self, *, lies: bool) -> None:
        """Let a power cut undo the flushes of the log from now on; false ends that."""
        self.disk.lie(lies=lies)
        self._note(Event.DISK_FAULT, 8, int(lies))

    async def undo_lied_flushes(self) -> str:
        """Lose by chance what these flushes wrote; the machine is down. Return how much."""
        undone = self.disk.undo_lies()
        self.is_trusted = False
        self.harmed_s = self.world.elapsed_s
        self.world.sometimes["flushes_undone"] += undone
        self._note(Event.DISK_FAULT, 10, undone)
        return f"{undone} sectors"

    async def begin_work_late(self, by_s: float) -> None:
        """Let blocking work begin up to *by_s* late; 0 heals."""
        self.disk.late_s = by_s
        self._note(Event.DISK_FAULT, 9, int(by_s * 1000))

    async def spoil_sectors(self, sectors: int) -> str:
        """Let reads of sectors of the log, or of what is made from it, fail; return where."""
        found = self.disk.spoil_sectors(sectors, self._marked_end())
        if any("/commitlog/" in path for path, _ in found):
            self.is_trusted = False
            self.harmed_s = self.world.elapsed_s
        self.world.sometimes["sectors_bad"] += len(found)
        self._note(Event.DISK_FAULT, 7, len(found))
        return _places(found)

    async def rot_file(self, arg: int) -> str:
        """Let a file that is not a segment go bad, as `Kind.FILE_ROT` has it; return where."""
        kind, unreadable = arg % len(ROTTEN), arg // len(ROTTEN) % 2 == 1
        bits = 1 + arg // (2 * len(ROTTEN))
        found = self.disk.rot_file(ROTTEN[kind], bits, unreadable=unreadable)
        if found:
            self.is_trusted = False
            self.harmed_s = self.world.elapsed_s
            self.world.sometimes[ROT_COUNTERS[kind]] += 1
        self._note(Event.DISK_FAULT, 11, len(found))
        return _places(found)

    # -- watching --------------------------------------------------------------------------

    def _note(self, event: Event, first: int = 0, second: int = 0) -> None:
        self.world.trace.note(event, self.number, first, second)

    def _disk_event(self, kind: str, path: str, offset: int, size: int) -> None:
        event = self._events.get(kind)
        if event is not None:
            self.world.trace.note(event, self.number, offset, size)
        if kind == "read_error":
            self.world.sometimes[kind] += 1
        for watcher in tuple(self.disk_watchers):
            watcher(kind, path)


def _places(found: Iterable[tuple[str, int]]) -> str:
    """Return files and bytes in them as the detail of a fault."""
    return ", ".join(f"{posixpath.relpath(path, '/store')}@{at}" for path, at in found)
