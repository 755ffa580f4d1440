"""Elections and commits are decided by pysyncobj's own code, not by a copy of it."""

from __future__ import annotations

import inspect

import pysyncobj.syncobj
from pysyncobj.syncobj import SyncObj

from dledger.raft import library

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
