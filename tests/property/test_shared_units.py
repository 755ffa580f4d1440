"""Consume queues with few open files against a dictionary: power cuts, deletions and moves."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog import consume_queue, consume_queue_store, shared_units
from dledger.commitlog.consume_queue_store import ConsumeQueueStore, remove_all, shared_folder
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import CorruptStoreError, DiskFullError
from dledger.commitlog.mark import SLOT_HEADER_BYTES, SLOT_STRIDE_BYTES
from dledger.commitlog.queue_unit import UNIT_BYTES, UNIT_DTYPE, Units
from dledger.commitlog.shared_units import Row, RowKind, SharedUnits, decode_rows, encode_rows
from dledger.testing.crash_disk import CrashDisk, disk_full
from tests.harness.extent import examples

ROOT = "/store/consumequeue"
TOPICS = ("A", "B", "C")
QUEUES = 4

Key = tuple[str, int]


class PowerCutError(Exception):
    """The power goes while the disk is called."""


def power_cut_after(steps: int) -> Callable[[str, str], None]:
    """Return a fault that lets *steps* calls of the disk pass."""
    left = steps

    def fault(kind: str, path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise PowerCutError(f"{kind} {path}")

    return fault


def unit(number: int) -> tuple[int, int, int]:
    return (number * 100, 100 + number, -number)


@dataclass
class Bounds:
    """A queue as the state tables know it, and the numbers of its units from offset 0 on."""

    min_offset: int = 0
    numbers: list[int] = field(default_factory=list)

    def units(self) -> Units:
        return np.array([unit(number) for number in self.numbers[self.min_offset :]], UNIT_DTYPE)


class Model:
    """The store, what it must hold, and what it must hold after a crash."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = CrashDisk()
        self.queues: dict[Key, Bounds] = {}
        self.log: list[tuple[Key, int]] = []
        self.saved: dict[Key, Bounds] = {}
        self.saved_log = 0
        self.number = 0
        self.store = self.open()

    def open(self) -> ConsumeQueueStore:
        return ConsumeQueueStore(self.disk, ROOT, 8, max_open_files=2)

    def put(self) -> None:
        key = (self.rng.choice(TOPICS), self.rng.randrange(QUEUES))
        count = self.rng.choice((1, 1, 2, 5, 20))
        self.log.append((key, count))
        self.apply(key, count)

    def apply(self, key: Key, count: int) -> None:
        if not count:
            for found in [found for found in self.queues if found[0] == key[0]]:
                del self.queues[found]
            self.store.delete_topic(key[0])
            return
        bounds = self.queues.setdefault(key, Bounds())
        first = len(bounds.numbers)
        bounds.numbers += range(self.number, self.number + count)
        self.number += count
        self.store.queue(*key).put(
            first, np.array([unit(number) for number in bounds.numbers[first:]], UNIT_DTYPE)
        )

    def delete_topic(self) -> None:
        key = (self.rng.choice(TOPICS), 0)
        self.log.append((key, 0))
        self.apply(key, 0)

    def raise_min(self) -> None:
        if self.queues:
            key = self.rng.choice(sorted(self.queues))
            bounds = self.queues[key]
            bounds.min_offset = self.rng.randint(bounds.min_offset, len(bounds.numbers))

    def flush(self, *, begins: bool, steps: int | None) -> None:
        """Flush; after *steps* calls of the disk the power goes, None: it stays."""
        job = self.store.begin_flush()
        taken = {key: Bounds(b.min_offset, list(b.numbers)) for key, b in self.queues.items()}
        log = len(self.log)
        for _ in range(self.rng.randrange(3)):
            self.rng.choice((self.put, self.put, self.delete_topic, self.raise_min))()
        if not begins:
            return
        if steps is not None:
            self.disk.fault = power_cut_after(steps)
        try:
            job.run()
        except PowerCutError:
            self.disk.fault = lambda kind, path: None
            self.restart(power_cut=True)
            return
        self.disk.fault = lambda kind, path: None
        self.saved, self.saved_log = taken, log
        # Only what a written checkpoint no longer has is given up.
        for key, bounds in taken.items():
            if key in self.queues and self.queues[key].min_offset >= bounds.min_offset:
                self.store.queue(*key).delete_before(bounds.min_offset)

    def rot_end(self) -> None:
        """Flip a byte of the file that holds how far the shared units go."""
        path = f"{shared_folder(ROOT)}/end"
        if path in self.disk.files:
            at = self.rng.randrange(2) * SLOT_STRIDE_BYTES + self.rng.randrange(SLOT_HEADER_BYTES)
            self.disk.files[path].content[at] ^= 1 << self.rng.randrange(8)

    def restart(self, *, power_cut: bool) -> None:
        self.store.close()
        if power_cut:
            self.disk = self.disk.power_cut(lambda: self.rng.random() < 0.5)
        if self.rng.random() < 0.3:
            self.rot_end()
        try:
            self.store = self.open()
        except CorruptStoreError:
            remove_all(self.disk, ROOT)
            self.store, self.saved, self.saved_log = self.open(), {}, 0
        for queue in self.store.queues():
            bounds = self.saved.get((queue.topic, queue.queue_id))
            queue.truncate_to(len(bounds.numbers) if bounds else 0)
            if bounds:
                queue.delete_before(bounds.min_offset)
        self.queues = {key: Bounds(b.min_offset, list(b.numbers)) for key, b in self.saved.items()}
        for key, count in self.log[self.saved_log :]:
            self.apply(key, count)

    def check(self) -> None:
        for key, bounds in self.queues.items():
            wanted = bounds.units()
            found = self.store.queue(*key).read(bounds.min_offset, len(wanted))
            assert found.tolist() == wanted.tolist(), key
        shared = sum(len(q._tail.units) for q in self.store.queues() if q._tail is not None)
        assert self.store.shared_bytes == shared

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.6:
            self.put()
        elif draw < 0.65:
            self.delete_topic()
        elif draw < 0.72:
            self.raise_min()
        elif draw < 0.92:
            self.flush(begins=draw < 0.9, steps=self.rng.randrange(12) if draw > 0.84 else None)
        else:
            self.restart(power_cut=draw < 0.97)
        self.check()


@pytest.fixture(autouse=True)
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consume_queue, "SHARED_BYTES_MAX", 80 * UNIT_BYTES)
        patch.setattr(consume_queue, "SHARED_QUEUE_BYTES", 12 * UNIT_BYTES)
        patch.setattr(consume_queue_store, "MOVED_TOGETHER", 3)
        patch.setattr(shared_units, "FILE_BYTES_MIN", 3000)
        yield


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 2**32))
def test_queues_with_few_files_hold_what_was_put(seed: int) -> None:
    model = Model(seed)
    for _ in range(80):
        model.step()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(RowKind),
            st.text(min_size=1, max_size=40),
            st.integers(0, 2**31 - 1),
            st.integers(0, 2**62),
            st.integers(0, 5).map(lambda count: bytes(range(UNIT_BYTES)) * count),
        ).map(lambda fields: Row(*fields)),
        max_size=8,
    )
)
def test_rows_are_read_as_written(rows: list[Row]) -> None:
    data = encode_rows(rows)
    assert list(decode_rows(data)) == rows
    for end in range(len(data)):
        try:
            assert list(decode_rows(data[:end])) == rows[: len(list(decode_rows(data[:end])))]
        except CorruptStoreError:
            continue


def durable(disk: CrashDisk, rows: list[Row]) -> None:
    shared = SharedUnits(disk, shared_folder(ROOT))
    for row in rows:
        shared.write([row])
    shared.close()


def test_shared_units_name_every_damaged_byte() -> None:
    disk = CrashDisk()
    rows = [Row(RowKind.UNITS, "T", queue_id, 5, bytes(2 * UNIT_BYTES)) for queue_id in range(3)]
    durable(disk, rows)
    (path,) = [path for path in disk.files if path.endswith("1") and ".shared/" in path]
    written = len(bytes(disk.files[path].content).rstrip(b"\0")) + 2 * UNIT_BYTES
    for at in range(written - 2 * UNIT_BYTES):
        hurt = disk.copy()
        hurt.files[path].content[at] ^= 0x10
        with pytest.raises(CorruptStoreError):
            SharedUnits(hurt, shared_folder(ROOT))
    lost = disk.copy()
    lost.unlink(path)
    with pytest.raises(CorruptStoreError, match="missing"):
        SharedUnits(lost, shared_folder(ROOT))


def test_shared_units_without_space_are_written_later() -> None:
    disk = CrashDisk()
    shared = SharedUnits(disk, shared_folder(ROOT))
    rows = [Row(RowKind.UNITS, "T", 0, 5, bytes(2 * UNIT_BYTES))]
    disk.fault = disk_full()
    with pytest.raises(DiskFullError):
        shared.write(rows)
    disk.fault = lambda kind, path: None
    shared.write(rows)
    again = SharedUnits(disk.power_cut(lambda: False), shared_folder(ROOT))
    tail = again.tails["T"][0]
    assert (tail.first, tail.end) == (5, 7)


@pytest.mark.slow
def test_many_thousand_queues_take_no_file_of_their_own(tmp_path: object) -> None:
    root = f"{tmp_path}/consumequeue"
    store = ConsumeQueueStore(OsDisk(), root, 8, max_open_files=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consume_queue, "SHARED_BYTES_MAX", 32 << 20)
        for number in range(20_000):
            store.queue(f"t{number // 5}", number % 5).put(0, np.array([unit(number)], UNIT_DTYPE))
        store.flush()
        store.close()
    assert len(OsDisk().list_dir(root)) <= 2
    again = ConsumeQueueStore(OsDisk(), root, 8, max_open_files=2)
    for number in (0, 7, 19_999):
        found = again.queue(f"t{number // 5}", number % 5).read(0, 1)
        assert found.tolist() == [unit(number)]
    again.close()
