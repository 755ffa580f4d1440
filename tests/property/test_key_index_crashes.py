"""The key index against a list: power cuts at any step, full disks, bad sectors, retention."""

import random
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.errors import DiskFullError
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.key_index import FOREVER, KeyIndex, KeyIndexFlush
from dledger.commitlog.key_run import Keys
from dledger.testing.crash_disk import CrashDisk, no_fault
from tests.harness.extent import examples

ROOT = "/store/index"
TOPIC = "T"
KEYS = ("a", "b", "c", "Aa", "BB")  # the last two have one hash


class PowerCutError(Exception):
    """The power goes while the disk is called."""


class Model:
    """The index, the entries whose keys it must have, and what a checkpoint has of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = CrashDisk()
        self.entries: list[list[tuple[int, str]]] = []
        self.first = 1
        self.saved = 0
        self.position = 0
        self.index = self.open()

    def open(self) -> KeyIndex:
        index = KeyIndex(self.disk, ROOT)
        index.begin(self.first, max(self.saved, self.first - 1))
        return index

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
        for number in range(self.index._keys.last + 1, len(self.entries) + 1):
            self.index.put(number, *self.keys_of(number))

    def keys_of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        entry = self.entries[number - 1]
        hashes = [index_key_hash(TOPIC, key) for _, key in entry]
        return np.array(hashes, np.int32), np.array([at for at, _ in entry], np.int64)

    def fill(self) -> None:
        """Fill a part of the first gap."""
        gap = self.index.gap
        if gap is None:
            return
        keys = Keys(gap[0])
        for number in range(gap[0], self.rng.randint(*gap) + 1):
            keys.add(number, *self.keys_of(number))
        if self.run(self.index.begin_fill(keys), self.fault()):
            self.index.end_flush()

    def run(self, job: KeyIndexFlush, fault: Callable[[str, str], None] = no_fault) -> bool:
        """Run a flush; return whether the process is the one that began it."""
        self.disk.fault = fault
        try:
            job.run()
        except PowerCutError:
            self.restart(power_cut=True)
            return False
        except DiskFullError:
            self.is_full = True
        finally:
            self.disk.fault = no_fault
        return True

    def flush(self) -> None:
        job, taken = self.index.begin_flush(), len(self.entries)
        for _ in range(self.rng.randrange(3)):
            self.append()
        self.is_full = False
        if self.run(job, self.fault()) and not self.is_full:
            self.saved = taken

    def fault(self) -> Callable[[str, str], None]:
        left = self.rng.randrange(6)
        kind_of = self.rng.choice(("none", "power", "full"))

        def fault(kind: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left >= 0 or kind_of == "none":
                return
            if kind_of == "power":
                raise PowerCutError
            if kind == "replace":
                raise DiskFullError(path)

        return fault

    def spoil(self) -> None:
        """Let a sector of a run be bad, or a bit of it flip."""
        paths = sorted(path for path in self.disk.files if path.startswith(ROOT))
        if not paths:
            return
        file = self.disk.files[self.rng.choice(paths)]
        at = self.rng.randrange(len(file.content))
        if self.rng.random() < 0.5:
            file.unreadable.append((at, at + 1))
        else:
            file.content[at] ^= 1 << self.rng.randrange(8)

    def delete_before(self) -> None:
        self.first = self.rng.randint(self.first, max(self.saved, self.first))
        self.index.delete_before(self.first)

    def restart(self, *, power_cut: bool) -> None:
        self.disk.fault = no_fault
        if power_cut:
            self.disk = self.disk.power_cut(lambda: self.rng.random() < 0.5)
        self.index = self.open()
        self.put()

    def check(self) -> None:
        """Each key from the first entry on is found once, or the index is behind."""
        for key in KEYS:
            floor = next((at for entry in self.entries[self.first - 1 :] for at, _ in entry), 0)
            steps = self.index.candidates(TOPIC, key, floor, FOREVER)
            found = [position for position in steps if position is not None]
            alike = [
                each for each in KEYS if index_key_hash(TOPIC, each) == index_key_hash(TOPIC, key)
            ]
            wanted = {
                position
                for entry in self.entries[self.first - 1 :]
                for position, each in entry
                if each in alike
            }
            if self.index.is_behind:
                assert set(found) <= wanted
            else:
                assert found == sorted(wanted, reverse=True), key

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.45:
            self.append()
        elif draw < 0.7:
            self.flush()
        elif draw < 0.75:
            self.spoil()
        elif draw < 0.82:
            self.delete_before()
        elif draw < 0.9:
            self.fill()
        else:
            self.restart(power_cut=draw < 0.95)
        self.check()

    def finish(self) -> None:
        """In the end all keys are there, if the disk allows it."""
        self.fault = lambda: no_fault  # type: ignore[method-assign]  # the disk works again
        while self.index.is_behind:
            self.fill()
            self.check()
        self.check()


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32))
def test_index_has_each_key_once_whatever_the_disk_does(seed: int) -> None:
    model = Model(seed)
    for _ in range(50):
        model.step()
    model.finish()
