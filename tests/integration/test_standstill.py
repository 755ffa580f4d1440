"""Stopping a process, as before a power cut."""

import mmap
import struct
from pathlib import Path

import pytest

from dledger.jepsen_like.chaos.machines import stand_still
from tests.harness.broken_disks import program

COUNTERS = 3
"""Threads that count, one after the other as Python runs them."""

COUNT = f"""
import mmap, struct, sys, threading
file = open(sys.argv[1], "r+b")
counters = mmap.mmap(file.fileno(), {mmap.PAGESIZE})

def count(number):
    value = 0
    while True:
        value += 1
        struct.pack_into("<Q", counters, 8 * number, value)

for number in range({COUNTERS}):
    threading.Thread(target=count, args=(number,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
async def test_stopped_process_runs_no_thread(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    path.write_bytes(bytes(mmap.PAGESIZE))
    layout = struct.Struct(f"<{COUNTERS}Q")
    with program(COUNT, path) as process, path.open("rb") as file:
        counters = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        while 0 in layout.unpack_from(counters):
            assert process.poll() is None
        await stand_still(process.pid)
        stopped = layout.unpack_from(counters)
        for _ in range(200_000):
            assert layout.unpack_from(counters) == stopped


async def test_stop_of_a_missing_process_is_an_error() -> None:
    with program("print('ready', flush=True)", ()) as process:
        process.wait()
        with pytest.raises(ProcessLookupError):
            await stand_still(process.pid)
