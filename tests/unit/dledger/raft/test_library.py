"""Elections and commits are decided by pysyncobj's own code, not by a copy of it."""

import inspect
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pysyncobj.syncobj
from pysyncobj.syncobj import SyncObj

from dledger.raft import library
from dledger.testing.doubles import ManualClock

DECIDING = (
    "_onTick",
    "_SyncObj__onMessageReceived",
    "_SyncObj__onBecomeLeader",
    "_SyncObj__setCurrentTerm",
    "_SyncObj__setState",
    "_SyncObj__getEntries",
    "_SyncObj__deleteEntriesFrom",
)


def test_what_decides_is_not_overridden() -> None:
    for kind in (library._Library, library._LibraryWithoutDump):
        for name in DECIDING:
            assert getattr(kind, name) is getattr(SyncObj, name), name
            assert inspect.getsourcefile(getattr(kind, name)) == pysyncobj.syncobj.__file__


def test_library_keeps_the_clocks_of_two_threads_apart() -> None:
    both_are_inside, one_is_outside = threading.Barrier(2, timeout=60), threading.Event()

    def now(at_s: float) -> float:
        clock = ManualClock()
        clock.now_s = at_s
        with library._Entered(library._Seams(clock, random.Random(1))):
            both_are_inside.wait()
            if at_s:
                assert one_is_outside.wait(60)
            read_s = pysyncobj.syncobj.monotonicTime()
        one_is_outside.set()
        return float(read_s)

    with ThreadPoolExecutor(2) as nodes:
        assert list(nodes.map(now, [0.0, 3.0])) == [1.0, 4.0]
