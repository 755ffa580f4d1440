"""A replica's whole folder against lists: leaders that change, floors, snapshots, disks that stop.

One replica follows. Its leader's log is a list of entries, and what the group has agreed on is
written down by hand (`tests.harness.agreed_log`). The disk may stop at any of its acts, be full, or
fail to flush; other work of the replica is done between two acts of a job that a worker would do.
"""

import errno
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog import consume_queue, consume_queue_store, shared_units
from dledger.commitlog.errors import DiskFullError, FlushFailedError, ForeignStoreError
from dledger.commitlog.key_index import FOREVER
from dledger.commitlog.log_reader import FlushTicket
from dledger.commitlog.queue_unit import UNIT_BYTES, Units
from dledger.commitlog.segment import LogFormat
from dledger.commitlog.store_paths import StorePaths
from dledger.state.snapshot import snapshot
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import SECTOR_BYTES, CrashDisk, no_fault
from tests.harness.agreed_log import Group, Key
from tests.harness.extent import examples
from tests.harness.replica_folders import SEGMENT_BYTES
from tests.harness.replica_folders import settings as small

ROOT = "/n0"
PATHS = StorePaths(ROOT)
SETTINGS = replace(small(Path(ROOT)), mapped_file_size_consume_queue=8 * UNIT_BYTES)
INDEX_UNITS = 16
STEPS = 60
NEVER = 1 << 30
"""More acts of the disk than there are in a run."""
ATTEMPTS = 30
GROWING = (PATHS.consumequeue, PATHS.index)
"""Folders of files that take space when they are written; the others are reserved when made."""


class PowerCut(BaseException):
    """The power goes while the disk is called."""


class Replica:
    """The replica under test, and what it must hold."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.group = Group(self.rng)
        self.disk = CrashDisk()
        self.disk.replace(PATHS.format, LogFormat(SEGMENT_BYTES, INDEX_UNITS).encode())
        self.first, self.mine = 1, list[bytes]()
        self.acked = self.known = self.saved = self.installed = self.reached = 0
        self.offered = False
        self.tickets: list[FlushTicket] = []
        self.inside: Callable[[], None] | None = None
        self.store = self.open()

    def open(self) -> ReplicaStore:
        files = self.rng.choice((1, 2, 200))
        return ReplicaStore(self.disk, SETTINGS, StateTables, queue_files_max=files)

    @property
    def last(self) -> int:
        return self.first + len(self.mine) - 1

    @property
    def common(self) -> int:
        """Newest entry that this replica and the leader both have."""
        frames, at = self.group.log.frames, self.last
        while at >= self.first and (
            at > len(frames) or frames[at - 1] != self.mine[at - self.first]
        ):
            at -= 1
        return at

    # -- what a follower does ---------------------------------------------------------------

    def receive(self) -> None:
        group, log, common = self.group, self.store.log, self.common
        assert common >= self.known
        if self.store.installing or common + 1 < group.first_index:
            return
        frames = group.log.frames[common : common + self.rng.choice((1, 2, 5, 30))]
        if frames and common < self.last:
            self.acked = min(self.acked, common)
            log.truncate_from(common + 1)
            del self.mine[common + 1 - self.first :]
        for frame in frames:
            self.mine.append(frame)
            try:
                log.append(frame)
            except DiskFullError:
                self.mine.pop()
                return

    def begin_flush(self) -> None:
        ticket = self.store.log.begin_flush()
        if ticket is not None and not self.store.installing:
            self.tickets.append(ticket)

    def end_flush(self) -> None:
        if self.tickets:
            ticket = self.tickets.pop(self.rng.randrange(len(self.tickets)))
            ticket.run()
            if self.store.log.complete_flush(ticket):
                self.acked = max(self.acked, ticket.last_index)

    def apply(self) -> None:
        store = self.store
        if store.installing:
            return
        self.known = max(self.known, min(self.group.commit, self.common))
        last = min(store.applicable(self.known), store.log.durable_index)
        stop = min(last, store.derived_index + self.rng.choice((1, 4, 64)))
        while store.derived_index < stop:
            try:
                store.apply_next(stop)
            except DiskFullError:
                return
            self.reached = max(self.reached, store.derived_index)

    def reserve(self) -> None:
        if self.store.log.allocator.needs_reserve:
            try:
                self.store.log.allocator.reserve_next()
            except DiskFullError:
                return

    def checkpoint(self) -> None:
        store = self.store
        taken = store.begin_checkpoint(self.known)
        if taken is None:
            return
        try:
            self.beside(taken.write)
            self.saved = max(self.saved, taken.index)
            drop = store.plan_drop(taken.floor)
            if drop is None or self.rng.random() < 0.3:
                return
            self.beside(drop.note)
        except DiskFullError:
            return
        store.detach(drop)
        del self.mine[: drop.anchor.first_index - self.first]
        self.first = drop.anchor.first_index
        self.beside(drop.remove)

    def repair(self) -> None:
        """Put missing units and keys, as the task for it does."""
        store = self.store
        try:
            store.put_missing_units(500)
            job = store.put_missing_keys(500, skip_damaged=False)
            if job is not None:
                try:
                    self.beside(job.run)
                finally:
                    store.key_index.end_flush()
        except DiskFullError:
            return

    def install(self) -> None:
        """Take in a leader's snapshot, where one would be offered."""
        store, group = self.store, self.group
        if not group.snapshots or self.common + 1 >= group.first_index:
            return
        index, data = group.snapshots[-1]
        if index <= max(self.known, self.installed):
            return
        loaded = store.decode(data)
        assert store.needs(loaded, self.known)
        self.offered = True
        try:
            self.beside(lambda: store.offer(data))
        except DiskFullError:
            self.offered = False
            return
        store.installing = True
        while True:
            try:
                entry_log = store.empty_for(loaded)
                break
            except DiskFullError:
                store.log.close(clean=False)
                if self.rng.random() < 0.5:
                    self.full_after = NEVER
        self.tickets.clear()
        before = store.take_over(loaded, entry_log)
        self.first, self.mine = loaded.floor.first_index, []
        self.known = self.acked = self.first - 1
        self.installed, self.offered = index, False
        before.close(clean=False)

    # -- the disk ---------------------------------------------------------------------------

    def beside(self, job: Callable[[], None]) -> None:
        """Run *job* as in a worker: between its acts this replica does other things."""
        self.inside = self.rng.choice((None, self.receive, self.apply, self.both))
        try:
            job()
        finally:
            self.inside = None

    def both(self) -> None:
        self.receive()
        self.store.log.flush()
        self.acked = max(self.acked, self.store.log.durable_index)
        self.apply()

    def act(self, kind: str, path: str) -> None:
        """Be called before each act of the disk."""
        self.cut_after -= 1
        self.full_after -= 1
        self.broken_after -= 1
        if self.cut_after < 0:
            raise PowerCut
        takes_space = kind in ("create", "replace") or (
            kind == "write" and path.startswith(GROWING) and not path.endswith("/end")
        )
        if self.full_after < 0 and takes_space:
            raise DiskFullError(f"no space for {kind} of {path}")
        if self.broken_after < 0 and kind == "flush":
            raise FlushFailedError(path)
        inside = self.inside
        if inside is not None and self.rng.random() < 0.3:
            self.inside = None
            inside()
            self.inside = inside

    def rot(self) -> None:
        """Let a sector of a derived file be one that the disk does not give back."""
        rotten = (*GROWING, PATHS.entry_index)
        paths = sorted(path for path in self.disk.files if path.startswith(rotten))
        if paths:
            file = self.disk.files[self.rng.choice(paths)]
            at = self.rng.randrange(0, len(file.content), SECTOR_BYTES)
            file.unreadable.append((at, min(at + SECTOR_BYTES, len(file.content))))

    def step(self) -> None:
        rng = self.rng
        acts = rng.choice((5, 20, 80))
        self.cut_after = self.full_after = self.broken_after = NEVER
        draw = rng.random()
        if draw < 0.15:
            self.cut_after = rng.randrange(acts)
        elif draw < 0.3:
            self.full_after = rng.randrange(acts)
        elif draw < 0.33:
            self.broken_after = rng.randrange(acts)
        self.disk.fault = self.act
        group = self.group
        if rng.random() < 0.4:
            group.go_on(self.is_away)
        self.is_away ^= rng.random() < (0.3 if self.is_away else 0.06)
        choices = (
            (self.receive, 0 if self.is_away else 20), (self.both, 0 if self.is_away else 20),
            (self.begin_flush, 8), (self.end_flush, 8), (self.apply, 10), (self.checkpoint, 12),
            (self.reserve, 3), (self.repair, 6), (self.install, 0 if self.is_away else 20),
            (self.kill, 3), (self.stop, 2), (self.power, 3), (self.open_with_other_sizes, 1),
            (self.rot, 3),
        )  # fmt: skip
        (act,) = rng.choices([c for c, _ in choices], [w for _, w in choices])
        try:
            act()
        except (PowerCut, FlushFailedError):
            self.power()

    # -- ends and starts --------------------------------------------------------------------

    def kill(self) -> None:
        self.disk._locks.clear()
        self.start()

    def power(self) -> None:
        odds = self.rng.choice((0.0, 0.5, 0.9, 1.0))
        self.disk = self.disk.power_cut(lambda: self.rng.random() < odds)
        self.start()

    def stop(self) -> None:
        """Stop in order: a checkpoint, then all files are closed."""
        self.both()
        self.checkpoint()
        self.store.close(clean=True)
        self.start()

    def open_with_other_sizes(self) -> None:
        """Start with a setting that does not fit the folder: it is refused and left as it was."""
        self.disk.fault = no_fault
        before = {path: bytes(file.content) for path, file in self.disk.files.items()}
        self.disk._locks.clear()
        with pytest.raises(ForeignStoreError):
            ReplicaStore(
                self.disk, replace(SETTINGS, mapped_file_size_commit_log=8192), StateTables
            )
        after = {path: bytes(file.content) for path, file in self.disk.files.items()}
        assert after == before
        self.kill()

    def start(self) -> None:
        """Start, perhaps several times, and compare what there is with what must be there."""
        for attempt in range(ATTEMPTS):
            self.cut_after = self.full_after = self.broken_after = NEVER
            if attempt < 3 and self.rng.random() < 0.3:
                self.cut_after = self.rng.randrange(60)
            elif attempt < 3 and self.rng.random() < 0.2:
                self.full_after = self.rng.randrange(30)
            self.disk.fault = self.act
            self.inside = None
            try:
                self.store = self.open()
                break
            except PowerCut:
                self.disk = self.disk.power_cut(lambda: self.rng.random() < 0.5)
            except DiskFullError:
                self.disk._locks.clear()
        self.disk.fault = no_fault
        self.tickets.clear()
        self.compare_after_start()

    def compare_after_start(self) -> None:
        store, log = self.store, self.store.log
        unacked = self.last - self.acked
        assert not store.damaged
        assert not store.torn or unacked >= 2 or self.was_torn
        self.was_torn = store.torn
        emptied = self.offered and log.first_index > self.last
        if not self.mine and log.first_index == self.first:
            # An offer that was cut before it was durable leaves an empty log as it was.
            emptied = emptied and store.refilling
        kept = self.mine
        if (
            self.offered
            and (log.first_index, log.last_index + 1) != (self.first, self.first)
            and (log.last_index < log.first_index)
        ):
            emptied = True
        if emptied:
            assert store.refilling
            assert log.last_index == log.first_index - 1
            self.first, self.mine = log.first_index, []
            self.acked, self.known = self.first - 1, self.first - 1
        else:
            shift = log.first_index - self.first
            assert shift >= 0
            self.mine = kept[shift : log.last_index + 1 - self.first]
            self.first = log.first_index
            assert log.last_index >= self.acked
            self.acked = log.last_index
        self.offered = False
        self.installed = 0
        commit = store.restored_commit_index
        assert commit <= self.group.commit
        assert commit <= self.common
        if not emptied:
            assert store.tables.applied_index >= self.saved
        assert store.derived_index <= self.group.commit
        self.known = commit
        self.check()

    # -- what must be so --------------------------------------------------------------------

    def check(self) -> None:
        store, log = self.store, self.store.log
        assert (log.first_index, log.last_index) == (self.first, self.last)
        frames = [bytes(log.frame(index)) for index in range(log.first_index, self.last + 1)]
        assert frames == self.mine
        assert log.durable_index >= self.acked
        if store.refilling:
            return
        applied = store.tables.applied_index
        assert applied == store.derived_index
        if applied < self.reached:
            return  # queue files may already lack what an entry gives up that comes again
        self.reached = applied
        assert snapshot(store.tables) == self.group.tables[applied]
        agreed = self.group.agreed_at(applied)
        assert store.tables.queues.keys() == agreed.queues.keys()
        for key, queue in agreed.queues.items():
            bounds = store.tables.queues[key]
            assert (bounds.min_offset, bounds.max_offset) == (queue.low, len(queue.messages)), key
            units = self.units(key, queue.low, len(queue.messages) - queue.low)
            found = [(int(unit["phy_offset"]), int(unit["size"])) for unit in units]
            assert found == queue.messages[queue.low :], key
        if store.keys.is_behind:
            return
        for (topic, word), positions in agreed.keys.items():
            # On a full disk the keys of an entry may be there before it is applied.
            kept = range(log.first_position, store.tables.applied_end_position)
            steps = store.key_index.candidates(topic, word, 0, FOREVER)
            found_at = [at for at in steps if at is not None and at in kept]
            if store.keys.is_behind:
                return  # a file of the index could not be read: it is made again
            assert found_at == [at for at in positions if at in kept][::-1], (topic, word)

    def units(self, key: Key, first: int, count: int) -> Units:
        """Read units; files that cannot be read are made again meanwhile."""
        for _ in range(ATTEMPTS):
            try:
                return self.store.queues.queue(*key).read(first, count)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
            assert self.store.derived.queue_repair.is_behind
            while self.store.put_missing_units(500):
                pass
        pytest.fail("the units cannot be read")

    def finish(self) -> None:
        """Heal everything: the replica ends as the group."""
        self.cut_after = self.full_after = self.broken_after = NEVER
        self.disk.fault = no_fault
        group = self.group
        group.elect()
        group.commit = group.log.index
        group.agree()
        group.save()
        for _ in range(200):
            self.install()
            self.both()
            self.repair()
            if self.store.derived_index == group.commit and not self.store.derived.is_behind:
                break
        self.checkpoint()
        self.check()
        assert self.store.tables.applied_index == group.commit
        self.stop()
        assert self.store.tables.applied_index == group.commit

    was_torn = is_away = False
    cut_after = full_after = broken_after = NEVER


@pytest.fixture(autouse=True)
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consume_queue, "SHARED_BYTES_MAX", 1600)
        patch.setattr(consume_queue, "SHARED_QUEUE_BYTES", 240)
        patch.setattr(consume_queue_store, "MOVED_TOGETHER", 3)
        patch.setattr(shared_units, "FILE_BYTES_MIN", 3000)
        yield


def play(seed: int) -> None:
    replica = Replica(seed)
    for _ in range(STEPS):
        replica.step()
        replica.disk.fault = no_fault
        replica.check()
    replica.finish()


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32))
def test_replica_folder_holds_what_was_agreed(seed: int) -> None:
    play(seed)
