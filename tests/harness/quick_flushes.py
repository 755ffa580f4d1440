"""Flushes of real files that return at once, for tests that cut no power.

A test of a thousand entries on three replicas would wait for the disk of the machine some thousand
times. What a flush does is shown in tests/unit/commitlog/test_disk.py, what it is for by disks in
memory that forget (`dledger.testing.crash_disk`) and by real processes in tests/integration.
"""

import os
from collections.abc import Iterator

import pytest

from dledger.commitlog import disk


@pytest.fixture(autouse=True)
def quick_flushes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the system calls of a flush do nothing, but in the tests of the real disk."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.path.name.startswith("test_disk"):
            patch.setattr(disk, "_data_sync", lambda _fd: None)
            patch.setattr(disk, "_sync_file_system", lambda _fd: 0)
            patch.setattr(os, "fsync", lambda _fd: None)
        yield
