"""Bits that flip in queue files are found by a comparison with the log, and made good.

Queue files that the disk does not give back are made again while the replica goes on.

Starts with a checkpoint from before a floor, a deletion, or both: what queues have then.
"""

import errno
import shutil
from pathlib import Path

import pytest
import trio

from dledger.commitlog.derive import derive_together
from dledger.commitlog.errors import CorruptEntryError, DiskFullError
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.derived_files import give_up_differing, points_to
from dledger.group import Group
from dledger.state.apply import read_plain
from dledger.state.snapshot import snapshot
from dledger.state.state_record import FloorChange, state_batch
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk, disk_full, no_fault
from tests.harness.expired import EXPIRED
from tests.harness.groups import bodies, crash_disk, running_groups
from tests.harness.keyed_messages import ALWAYS, keyed
from tests.harness.present import present
from tests.harness.raft_cluster import batch
from tests.harness.replica_folders import SEGMENT_BYTES, Writer, settings, usual
from tests.unit.dledger.test_scrub import filled, follower_of, scrubbed
from tests.unit.dledger.test_shared_queues import checkpoint, units

__all__ = ["disk", "log", "store"]


def checked(store: ReplicaStore, max_bytes: int = 0) -> int:
    """Compare all entries, those of up to *max_bytes* at once; return how many files are lost."""
    given_up = 0
    index, last = store.log.first_index, store.derived_index
    while index <= last:
        frames, headers = read_plain(store.log, index, last, max_bytes)
        if headers:
            derived = derive_together(frames, headers, delay_ms=store.delays)
            given_up += give_up_differing(store.queues, store.tables, store.log, derived)
        index += max(len(headers), 1)
    return given_up


PIECES = pytest.mark.parametrize("max_bytes", [0, 700, 1 << 20])


@PIECES
def test_whole_files_are_left_alone(store: ReplicaStore, max_bytes: int) -> None:
    assert checked(store, max_bytes) == 0
    assert not store.queues.lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("byte", "max_bytes"), [(3, 0), (7, 700), (10, 1 << 20), (14, 700), (19, 700)]
)
def test_each_file_with_a_flipped_bit_is_made_again(
    store: ReplicaStore, disk: CrashDisk, byte: int, max_bytes: int
) -> None:
    wanted = units(store)
    for path in queue_files(disk):
        is_time = SCHEDULE_TOPIC in path and byte >= 12
        disk.files[path].content[byte] ^= 1
        assert checked(store, max_bytes) == (not is_time), path
        if is_time:
            disk.files[path].content[byte] ^= 1
            continue
        repaired(store)
        assert units(store) == wanted, path
        assert checked(store, max_bytes) == 0


def test_a_unit_points_to_its_own_message_alone(store: ReplicaStore, log: Writer) -> None:
    for (topic, queue_id), bounds in store.tables.queues.items():
        found = store.queues.queue(topic, queue_id).read(0, bounds.max_offset)
        for offset, unit in enumerate(found):
            assert points_to(store.log, unit, topic, queue_id, offset)
            assert not points_to(store.log, unit, topic, queue_id, offset + 1)
            assert not points_to(store.log, unit, f"{topic}x", queue_id, offset)


def test_two_flipped_files_of_a_queue_are_both_made_again(
    store: ReplicaStore, disk: CrashDisk
) -> None:
    wanted, files = units(store), queue_files(disk)
    for path in files:
        content = disk.files[path].content
        for begin in range(0, len(content), UNIT_BYTES):
            if any(content[begin : begin + UNIT_BYTES]):
                content[begin + 5] ^= 0x10
    assert checked(store) == len(files)
    repaired(store)
    assert units(store) == wanted


async def test_the_scrub_finds_a_flipped_bit_in_a_queue_file() -> None:
    root = Path("/memory")
    async with running_groups(root, disks=CrashDisk) as groups:
        follower = follower_of(groups, await filled(groups))
        group = follower.group
        wanted = bodies(group)
        disk = crash_disk(groups, follower.name)
        for _ in range(3):  # units that were shared are moved into files of their queue
            group.store.queues.flush()
        path = f"{root}/{follower.name}/consumequeue/T/0/{0:020d}"
        disk.files[path].content[6] ^= 1
        await scrubbed(follower)
        assert group.scrub.status()["queue_files_differing"] == 1
        with trio.fail_after(20):
            while group.store.derived.is_behind:
                await trio.sleep(0.01)
        assert bodies(group) == wanted


SETTINGS = settings(Path("/n0"))
STEP_BYTES = 300


@pytest.fixture
def log() -> Writer:
    return usual(60)


@pytest.fixture
def disk() -> CrashDisk:
    return CrashDisk()


@pytest.fixture
def store(disk: CrashDisk, log: Writer) -> ReplicaStore:
    """Return a replica whose queues have files, all of them durable."""
    store = ReplicaStore(disk, SETTINGS, StateTables)
    append(store, log)
    for _ in range(3):
        checkpoint(store)
        log.no_op()
        append(store, log)
    assert store.queues.shared_bytes < 100
    return store


def append(store: ReplicaStore, log: Writer) -> None:
    for frame in log.frames[store.log.last_index :]:
        store.log.append(frame)
    store.log.flush()
    while store.derived_index < store.log.last_index:
        store.apply(store.derived_index + 1)


def queue_files(disk: CrashDisk) -> list[str]:
    return sorted(path for path in disk.files if "/consumequeue/" in path)


def lose(store: ReplicaStore, disk: CrashDisk, files: list[str]) -> None:
    """Let files be unreadable, and be read."""
    for path in files:
        disk.files[path].unreadable.append((0, 1 << 20))
        _, topic, queue_id, begin = path.rsplit("/", 3)
        with pytest.raises(OSError, match="nput/output"):
            store.queues.queue(topic, int(queue_id)).read(int(begin) // UNIT_BYTES, 1)


def note(store: ReplicaStore, disk: CrashDisk) -> bool:
    return disk.exists(store.paths.derived_lost)


def repaired(store: ReplicaStore) -> int:
    """Bring the repair to its end; return in how many steps."""
    for step in range(1, 1_000):
        if not store.put_missing_units(STEP_BYTES):
            return step
    raise AssertionError("no end")


def test_a_file_that_cannot_be_written_is_made_again(
    store: ReplicaStore, disk: CrashDisk, log: Writer
) -> None:
    key = max(store.tables.queues)
    path = [path for path in queue_files(disk) if f"/{key[0]}/{key[1]}/" in path][-1]

    def fault(kind: str, at: str) -> None:
        if kind == "write" and at == path:
            raise OSError(errno.EIO, "the rest of a page")

    disk.fault = fault
    for _ in range(3):
        log.messages(*key, 4)
        append(store, log)
        checkpoint(store)
    assert store.derived.is_behind
    disk.fault = lambda _kind, _path: None
    repaired(store)
    checkpoint(store)
    whole = ReplicaStore(CrashDisk(), SETTINGS, StateTables)
    append(whole, log)
    assert units(store) == units(whole)


def test_a_repair_waits_for_damaged_entries_and_space(store: ReplicaStore, disk: CrashDisk) -> None:
    wanted = units(store)
    lose(store, disk, queue_files(disk)[:3])
    space = 1

    def full(kind: str, _path: str) -> None:
        nonlocal space
        if kind == "create":
            space -= 1
            if space < 0:
                raise DiskFullError("no space")

    disk.fault = full
    with pytest.raises(DiskFullError):
        repaired(store)
    disk.fault = lambda _kind, _path: None
    store.log.repair.mark_damaged(20)
    for _ in range(3):
        with pytest.raises(CorruptEntryError):
            repaired(store)
    store.log.repair.mark_whole(20)
    repaired(store)
    assert units(store) == wanted


async def test_a_running_replica_makes_its_queue_again() -> None:
    async with running_groups(Path("/memory"), disks=CrashDisk) as groups:
        leader = await groups.fill(str(number).encode() for number in range(30))
        await trio.sleep(10)
        disk, group = crash_disk(groups, leader.name), leader.group
        await groups.fill([b"more"])
        await trio.sleep(10)
        key = next(key for key in group.state.queues if key[0] == "T")
        wanted = all_units(group, key)
        (path,) = (path for path in queue_files(disk) if f"/{key[0]}/{key[1]}/" in path)
        disk.files[path].unreadable.append((0, 512))
        with pytest.raises(OSError, match="nput/output"):
            all_units(group, key)
        await group.submit(batch(b"meanwhile", topic=key[0], queue_id=key[1]))
        with trio.fail_after(60):
            while group.store.derived.is_behind or note(group.store, disk):
                await trio.sleep(0.1)
        assert group.leadership is not None
        assert all_units(group, key)[:-1] == wanted
        assert len(all_units(group, key)) == len(wanted) + 1


def all_units(group: Group, key: tuple[str, int]) -> list[tuple[int, int, int]]:
    bounds = group.state.queues[key]
    found: list[tuple[int, int, int]] = group.queues.queue(*key).read(0, bounds.max_offset).tolist()
    return found


# -- a key index that is lost is made again from the log, the same to the byte


def index_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "index").iterdir())}


def replayed(store: ReplicaStore, last: int) -> ReplicaStore:
    while store.tables.applied_index < last:
        store.apply(store.tables.applied_index + 1)
    return store


async def test_a_rebuilt_key_index_is_the_one_that_was_written(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        # Entries of one record and of many take different ways into the index.
        for first, count in ((0, 1), (1, 300), (301, 2), (303, 60)):
            await leader.group.submit(keyed(first, count))
        last = leader.group.state.applied_index
        positions = {
            key: leader.group.key_index.query("T", key, 64, *ALWAYS)
            for key in ("id0", "id362", "k3", "all", "nothing")
        }
        assert [len(found) for found in positions.values()] == [1, 1, 52, 64, 0]
        leader.group.store.key_index.flush()
        leader.kill()
    root = tmp_path / "n0"
    written = index_files(root)
    assert len(written) == 1
    for lost in ("index", "raft/snapshot"):
        path = root / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    store = replayed(groups.open_store("n0"), last)
    for key, found in positions.items():
        assert store.key_index.query("T", key, 64, *ALWAYS) == found
    store.key_index.flush()
    assert list(index_files(root).values()) == list(written.values())
    store.close(clean=False)


class Replica:
    """A replica that gets the entries of a log as they are written."""

    def __init__(self) -> None:
        self.log, self.disk = Writer(), CrashDisk()
        self.store = ReplicaStore(self.disk, SETTINGS, StateTables)
        self.log.no_op()
        self.log.topics(put=["T", "U"])
        for _ in range(20):
            self.log.messages("U", 0, 3)
            self.log.messages("T", 0, 2)
        # The second checkpoint finds the units in files of their queues.
        for _ in range(2):
            self.log.messages("T", 0, 1)
            self.follow()
            checkpoint(self.store)

    def follow(self) -> None:
        for frame in self.log.frames[self.store.log.last_index :]:
            self.store.log.append(frame)
        self.store.log.flush()
        self.apply()

    def apply(self) -> None:
        while self.store.derived_index < self.log.index:
            self.store.apply_next(self.log.index)

    def move_floor(self, index: int) -> None:
        self.log.batch(state_batch(FloorChange(self.store.log.anchor_at(index), EXPIRED)))

    def first_of_segment(self, number: int) -> int:
        log = self.store.log
        return next(i for i in range(1, 99) if log.position_at(i) >= number * SEGMENT_BYTES)

    def kill(self) -> None:
        """Start once more with what the last process wrote."""
        self.disk = self.disk.copy()
        self.store = ReplicaStore(self.disk, SETTINGS, StateTables)

    def check(self) -> None:
        """Compare with a replica that never stopped."""
        whole = ReplicaStore(CrashDisk(), SETTINGS, StateTables)
        for frame in self.log.frames:
            whole.log.append(frame)
        whole.log.flush()
        for index in range(1, self.log.index + 1):
            whole.apply(index)
        assert snapshot(self.store.tables) == snapshot(whole.tables)
        assert units(self.store) == units(whole)


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_start_passes_a_floor_before_a_deletion(is_made_again: bool) -> None:
    replica = Replica()
    replica.move_floor(25)
    replica.log.topics(delete=["U"])
    if is_made_again:
        replica.log.topics(put=["U"])
        replica.log.messages("U", 0, 9)
    replica.follow()
    assert not replica.disk.exists("/n0/consumequeue/U")
    replica.kill()
    replica.apply()
    replica.check()


@pytest.mark.parametrize("floors", [(1, 2), (2, 4)], ids=["in one file", "over two files"])
def test_queue_files_stay_while_a_checkpoint_needs_them(floors: tuple[int, int]) -> None:
    replica = Replica()
    store = replica.store
    replica.move_floor(replica.first_of_segment(floors[0]))
    replica.follow()
    taken = present(store.begin_checkpoint(replica.log.index))
    replica.move_floor(replica.first_of_segment(floors[1]))
    replica.follow()
    taken.write()
    drop = present(store.plan_drop(taken.floor))
    drop.note()
    store.detach(drop)
    drop.remove()
    replica.kill()
    replica.apply()
    replica.check()
    checkpoint(replica.store)
    drop = present(replica.store.plan_drop(replica.store.tables.floor))
    before = len(replica.disk.files)
    replica.store.detach(drop)
    assert len(replica.disk.files) < before, "they go with the next one"


def test_a_floor_is_finished_when_there_is_space() -> None:
    replica = Replica()
    store = replica.store
    replica.disk.files[f"/n0/consumequeue/U/0/{16 * UNIT_BYTES:020d}"].unreadable.append((0, 320))
    replica.disk.fault = disk_full(path_part="/consumequeue/U/")
    replica.move_floor(25)
    with pytest.raises(DiskFullError):
        replica.follow()
    with pytest.raises(DiskFullError):
        replica.apply()
    assert store.begin_checkpoint(replica.log.index) is None
    replica.disk.fault = no_fault
    replica.apply()
    replica.check()
