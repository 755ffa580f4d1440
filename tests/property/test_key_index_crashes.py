"""The key index against a list: power cuts at any step, full disks, bad sectors, retention."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.errors import DiskFullError
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.key_index import KeyIndex, KeyIndexFlush
from dledger.testing.crash_disk import CrashDisk, no_fault
from tests.harness.extent import examples

ROOT = "/store/index"
MARK = "/store/raft/key_index_whole"
TOPIC = "T"
KEYS = ("a", "b", "c", "Aa", "BB")  # the last two have one hash
FOREVER_MS = 1 << 60


class PowerCutError(Exception):
    """The power goes while the disk is called."""


class Model:
    """The index, the entries whose keys it must have, and what a checkpoint has of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = CrashDisk()
        self.disk.make_dir("/store/raft")
        self.entries: list[list[tuple[int, str]]] = []
        self.floor = 0
        self.saved = 0
        self.next = 0
        self.position = 0
        self.index = self.open()
        self.complete()

    def open(self) -> KeyIndex:
        return KeyIndex(self.disk, ROOT, slots=7, max_entries=9, mark=MARK)

    # -- what the owner of an index does ----------------------------------------------------

    def append(self) -> None:
        entry = []
        for _ in range(self.rng.choice((1, 1, 2, 12))):
            self.position += self.rng.choice((100, 200))
            count = self.rng.choice((0, 1, 1, 2, 3))
            entry += [(self.position, self.rng.choice(KEYS)) for _ in range(count)]
        self.entries.append(entry)
        self.put()

    def put(self) -> None:
        """Put the keys of all entries that are not in the index yet."""
        while self.next < len(self.entries):
            entry, lost = self.entries[self.next], self.index.files_lost
            if entry:
                self.index.put_bulk(
                    np.array([index_key_hash(TOPIC, key) for _, key in entry], np.int32),
                    np.array([position for position, _ in entry], np.int64),
                    np.array([position for position, _ in entry], np.int64),
                )
            self.next += 1
            if self.index.has_unreadable or self.index.files_lost != lost:
                self.begin_again()

    def begin_again(self) -> None:
        """Files were given up: put from the newest position that is indexed on."""
        self.index.give_up_unreadable()
        ends = [entry[-1][0] if entry else 0 for entry in self.entries]
        end = self.index.end_phy_offset
        self.next = next((at for at, newest in enumerate(ends) if newest >= max(end, 1)), 0)

    def complete(self) -> None:
        if self.index.is_behind and not self.index.has_unreadable:
            job, lost = self.index.begin_completion(), self.index.files_lost
            if self.run(job, self.fault()):
                self.index.end_completion(job)
                if self.index.files_lost != lost:
                    self.begin_again()
                    self.put()

    def run(self, job: KeyIndexFlush, fault: Callable[[str, str], None] = no_fault) -> bool:
        """Run a flush; return whether the process is the one that began it."""
        self.disk.fault = fault
        try:
            job.run()
        except PowerCutError:
            self.restart(power_cut=True)
            return False
        except DiskFullError:
            pass
        finally:
            self.disk.fault = no_fault
        return True

    def flush(self) -> None:
        job, taken = self.index.begin_flush(), self.next
        for _ in range(self.rng.randrange(3)):
            self.append()
        if self.run(job, self.fault()) and job.done:
            self.saved = taken

    def fault(self) -> Callable[[str, str], None]:
        left = self.rng.randrange(14)
        kind_of = self.rng.choice(("none", "power", "full", "sector"))

        def fault(kind: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left >= 0 or kind_of == "none":
                return
            if kind_of == "power":
                raise PowerCutError
            if kind == "write" and path.startswith(ROOT):
                if kind_of == "full":
                    raise DiskFullError(path)
                raise OSError(errno.EIO, "bad sector", path)

        return fault

    def delete_before(self) -> None:
        self.floor = self.rng.randint(self.floor, self.position)
        self.index.delete_before(self.floor)

    def restart(self, *, power_cut: bool) -> None:
        self.index.close()
        self.disk.fault = no_fault
        if power_cut:
            self.disk = self.disk.power_cut(lambda: self.rng.random() < 0.5)
        self.index = self.open()
        self.next = min(self.next, self.saved)
        if self.index.is_behind:
            self.begin_again()
            self.next = min(self.next, self.saved)
        self.put()

    def check(self) -> None:
        """Each key from the floor on is found, and no entry of the index is there twice."""
        if self.index.has_unreadable:
            self.begin_again()
        self.put()
        self.complete()
        for key in KEYS:
            found = [
                position
                for file in reversed(self.index._files)
                for position in file.walk(index_key_hash(TOPIC, key), 0, FOREVER_MS)
                if position is not None and position >= self.floor
            ]
            alike = [
                each for each in KEYS if index_key_hash(TOPIC, each) == index_key_hash(TOPIC, key)
            ]
            wanted = [
                position
                for entry in self.entries
                for position, each in entry
                if each in alike and position >= self.floor
            ]
            assert found == wanted[::-1], key

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.5:
            self.append()
        elif draw < 0.8:
            self.flush()
        elif draw < 0.87:
            self.delete_before()
        else:
            self.restart(power_cut=draw < 0.95)
        self.check()


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32))
def test_index_has_each_key_once_whatever_the_disk_does(seed: int) -> None:
    model = Model(seed)
    for _ in range(50):
        model.step()
