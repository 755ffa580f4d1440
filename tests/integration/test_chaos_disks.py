"""Faults of real disks, shown on programs of a few lines.

Each mechanism reports why it is missing where it is; its tests are skipped with that sentence.
"""

import errno
import os
import random
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import DiskFullError
from dledger.jepsen_like.chaos import limits, loop_disk
from dledger.jepsen_like.chaos.file_damage import Part, Stretch, choose_byte, wipe, written_in
from dledger.jepsen_like.chaos.limits import few_open_files, limit_with_spare
from dledger.jepsen_like.chaos.loop_disk import PAGE_BYTES, LoopDisk, pages_kept
from dledger.jepsen_like.chaos.strace_inject import fail_one_flush, slow_flushes
from dledger.jepsen_like.nemesis.ground import FaultError
from tests.harness.broken_disks import (
    DISK_BYTES,
    ended,
    is_traced,
    needs,
    needs_loop,
    needs_strace,
    program,
    tracers,
)

needs_limits = needs(limits.why_not)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk.loop_disk(tmp_path / "image", tmp_path / "disk", size_bytes=DISK_BYTES) as made:
        yield made


def power_cut(disk: LoopDisk, kill: Callable[[], object] = lambda: None) -> None:
    """Lose what was not flushed; *kill* ends what uses the disk."""
    disk.cut()
    kill()
    disk.restore()


# ------------------------------------------------------------------------------ power

WRITER = """
import mmap, os, sys
os.chdir(sys.argv[1])
page = 4096

def made(name):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 8 * page)
    os.pwrite(fd, b"0" * page, 0)
    os.fsync(fd)
    return fd

def flush_folder():
    fd = os.open(".", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)

written, mapped = made("written"), made("mapped")
view = mmap.mmap(mapped, 8 * page)
for name in ("renamed", "renamed_unsynced"):
    with open(name, "wb", buffering=0) as file:
        file.write(b"old")
        os.fsync(file.fileno())
    with open(name + ".tmp", "wb", buffering=0) as file:
        file.write(b"new")
        os.fsync(file.fileno())
with open("new_file_synced", "wb", buffering=0) as file:
    file.write(b"body")
    os.fsync(file.fileno())
os.rename("renamed.tmp", "renamed")
open("new_folder_synced", "wb", buffering=0).write(b"body")
flush_folder()

os.pwrite(written, b"A" * page, page)
os.fdatasync(written)
view[page : 2 * page] = b"A" * page
view.flush(0, 2 * page)

# Nothing is flushed from here on.
os.pwrite(written, b"B" * page, 0)
os.pwrite(written, b"B" * page, 2 * page)
view[:page] = b"B" * page
view[2 * page : 3 * page] = b"B" * page
open("new_unsynced", "wb", buffering=0).write(b"body")
os.rename("renamed_unsynced.tmp", "renamed_unsynced")
print("ready", flush=True)
sys.stdin.read()
"""


def letters(path: Path, pages: int) -> str:
    data = path.read_bytes()
    found = [data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] for number in range(pages)]
    assert all(len(set(page)) == 1 for page in found), "a page is torn"
    return "".join(chr(page[0]) for page in found).replace("\0", "-")


@needs_loop
def test_a_power_cut_keeps_what_was_flushed_and_loses_the_rest(disk: LoopDisk) -> None:
    with program(WRITER, disk.place) as process:
        assert letters(disk.place / "written", 4) == "BAB-"
        power_cut(disk, lambda: ended(process))
    # "0" was overwritten by B, A was flushed, the third page was only ever written as B.
    assert letters(disk.place / "written", 4) == "0A--"
    assert letters(disk.place / "mapped", 4) == "0A--"
    assert (disk.place / "new_file_synced").read_bytes() == b"body"
    # A name that was flushed, of a file that was not.
    assert (disk.place / "new_folder_synced").read_bytes() == b""
    assert not (disk.place / "new_unsynced").exists()
    assert (disk.place / "renamed").read_bytes() == b"new"
    assert (disk.place / "renamed_unsynced").read_bytes() == b"old"
    assert (disk.place / "renamed_unsynced.tmp").read_bytes() == b"new"


@needs_loop
def test_power_cut_keeps_pages_that_were_written_back(disk: LoopDisk) -> None:
    with program(WRITER, disk.place) as process:
        assert disk.keep_some(random.Random(1), 1.0, names=True) > 0
        power_cut(disk, lambda: ended(process))
    assert letters(disk.place / "written", 4) == "BAB-"
    assert letters(disk.place / "mapped", 4) == "BAB-"
    assert (disk.place / "new_unsynced").read_bytes() == b"body"
    assert (disk.place / "renamed_unsynced").read_bytes() == b"new"


@needs_loop
def test_power_cut_without_journal_keeps_old_places_only(disk: LoopDisk) -> None:
    with program(WRITER, disk.place) as process:
        disk.keep_some(random.Random(1), 1.0, names=False)
        power_cut(disk, lambda: ended(process))
    # The third page lies in space that counts as never written until the journal is committed.
    assert letters(disk.place / "written", 4) == "BA--"
    assert (disk.place / "renamed_unsynced").read_bytes() == b"old"


@needs_loop
def test_power_cut_gives_back_a_disk_that_a_namespace_holds(disk: LoopDisk) -> None:
    (disk.place / "flushed").write_bytes(b"body")
    os.sync()
    holder = ("unshare", "--mount", "--propagation", "private", "cat")
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"there\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"there\n"
        power_cut(disk)
        assert (disk.place / "flushed").read_bytes() == b"body"
        process.stdin.close()


SCATTER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
# Page by page: what is written in one piece may be kept, and written out, in one piece.
for page in range(64):
    os.pwrite(fd, b"A" * 4096, page * 4096)
os.fsync(fd)
for page in range(64):
    os.pwrite(fd, b"B" * 4096, page * 4096)
print("ready", flush=True)
sys.stdin.read()
"""


@needs_loop
def test_some_of_the_unflushed_pages_survive_by_chance(disk: LoopDisk) -> None:
    path = disk.place / "scattered"
    with program(SCATTER, path) as process:
        kept_bytes = disk.keep_some(random.Random(5), 0.5, names=False)
        power_cut(disk, lambda: ended(process))
    found = letters(path, 64)
    assert set(found) == {"A", "B"}
    assert found.count("B") * PAGE_BYTES == kept_bytes
    assert "BA" in found.lstrip("B"), "the kept pages are no prefix"


@needs_loop
def test_dead_disk_refuses_flushes_of_a_running_process(disk: LoopDisk) -> None:
    fd = os.open(disk.place / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b"flushed")
        os.fsync(fd)
        disk.cut()
        with pytest.raises(OSError, match="Input/output error"):
            os.fdatasync(fd)
        with pytest.raises(OSError, match="Input/output error"):
            os.pwrite(fd, b"written", 0)
        # The descriptor keeps the dead file system alive: the disk goes on beside it.
        disk.restore()
        assert (disk.place / "file").read_bytes() == b"flushed"
        (disk.place / "file").write_bytes(b"goes on")
        with pytest.raises(OSError, match="Input/output error"):
            os.fdatasync(fd)
    finally:
        os.close(fd)


def loop_devices_of(folder: Path) -> list[str]:
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        if backing.read_text().startswith(str(folder)):
            found.append(backing.parent.parent.name)
    return found


def mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [place for line in lines if (place := line.split()[4]).startswith(str(folder))]


@needs_loop
def test_disk_leaves_nothing_behind_after_an_error(tmp_path: Path) -> None:
    image, place = tmp_path / "image", tmp_path / "disk"

    def fail_in_the_middle() -> None:
        assert len(loop_devices_of(tmp_path)) == 1
        assert mounts_below(tmp_path) == [str(place)]
        raise RuntimeError("in the middle of a cut")

    with (
        pytest.raises(RuntimeError, match="in the middle"),
        loop_disk.loop_disk(image, place, size_bytes=DISK_BYTES) as disk,
    ):
        power_cut(disk, fail_in_the_middle)
    assert (loop_devices_of(tmp_path), mounts_below(tmp_path)) == ([], [])
    assert list(tmp_path.iterdir()) == []


@needs_loop
def test_disk_is_not_mounted_over_a_used_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with (
        pytest.raises(FaultError, match="is not empty"),
        loop_disk.loop_disk(tmp_path / "image", tmp_path / "taken", size_bytes=DISK_BYTES),
    ):
        pass
    (tmp_path / "image").write_text("mine too")
    with (
        pytest.raises(FaultError, match="no image of a disk could be made"),
        loop_disk.loop_disk(tmp_path / "image", tmp_path / "disk", size_bytes=DISK_BYTES),
    ):
        pass
    assert (tmp_path / "image").read_text() == "mine too"
    assert (tmp_path / "taken" / "file").read_text() == "mine"


def test_kept_pages_are_whole_and_lie_where_data_is() -> None:
    assert list(pages_kept(random.Random(1), [(0, 10_000), (40_960, 40_970)], 1.0)) == [
        (0, 10_000),
        (40_960, 10),
    ]
    assert list(pages_kept(random.Random(1), [(0, 10_000)], 0.0)) == []
    some = list(pages_kept(random.Random(2), [(0, 1 << 20)], 0.5))
    assert all(offset % PAGE_BYTES == 0 == size % PAGE_BYTES for offset, size in some)
    assert 0.3 < sum(size for _, size in some) / (1 << 20) < 0.7


# ------------------------------------------------------------------------------ space


@needs_loop
def test_full_disk_stays_full_through_a_power_cut(disk: LoopDisk) -> None:
    free_before = disk.free_bytes
    left = disk.fill(100_000)
    assert left <= 100_000
    path = str(disk.place / "segment")
    with pytest.raises(DiskFullError):
        OsDisk().create(path, 1 << 20, reserve=True)
    power_cut(disk)
    assert disk.free_bytes <= 100_000
    with pytest.raises(DiskFullError):
        OsDisk().create(path, 1 << 20, reserve=True)
    disk.release()
    disk.release()
    assert disk.free_bytes == free_before
    OsDisk().create(path, 1 << 20, reserve=True).close()
    power_cut(disk)
    assert not (disk.place / loop_disk.BALLAST).exists()


# ------------------------------------------------------------------------------ flushes

FLUSHER = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    try:
        os.write(fd, b"x")
        os.fdatasync(fd)
        flushed = "flushed"
    except OSError as error:
        flushed = f"errno {error.errno}"
    print(flushed, round((time.perf_counter() - began) * 1000), flush=True)
"""


def flush_in(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Have the program flush once; return what came of it and the milliseconds it took."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("flush\n")
    process.stdin.flush()
    *said, took_ms = process.stdout.readline().split()
    return " ".join(said), int(took_ms)


@needs_strace
async def test_one_flush_fails_and_the_next_succeeds(tmp_path: Path) -> None:
    failed = -1

    async def fail_second(pid: int) -> None:
        nonlocal failed
        failed = await trio.to_thread.run_sync(lambda: fail_one_flush(pid, nth=2, within_s=30))

    with program(FLUSHER, tmp_path / "file") as process:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_second, process.pid)
            with trio.fail_after(60):
                while not is_traced(process.pid):
                    await trio.sleep(0.01)
            assert flush_in(process)[0] == "flushed"
            assert flush_in(process)[0] == f"errno {errno.EIO}"
        assert failed == 1
        assert tracers(process.pid) == {0}
        assert [flush_in(process)[0] for _ in range(3)] == ["flushed"] * 3


@needs_strace
def test_flushes_are_slow_while_the_block_runs_and_not_after(tmp_path: Path) -> None:
    with program(FLUSHER, tmp_path / "file") as process:
        with slow_flushes(process.pid, 150, tmp_path / "strace", within_s=30):
            took = [flush_in(process) for _ in range(3)]
        assert (tmp_path / "strace").read_text().count("(DELAYED)") == 3
        assert [said for said, _ in took] == ["flushed"] * 3
        assert min(took_ms for _, took_ms in took) >= 150
        assert tracers(process.pid) == {0}
        # The disk itself may be slow for a while; each of these would take as long if it lasted.
        assert min(flush_in(process)[1] for _ in range(3)) < min(took_ms for _, took_ms in took)


@needs_strace
def test_a_process_that_is_not_there_cannot_be_attached_to(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(FaultError, match="cannot be attached to"):
        fail_one_flush(process.pid, within_s=5)


@needs_strace
def test_failure_that_is_not_reached_is_given_up(tmp_path: Path) -> None:
    with program(FLUSHER, tmp_path / "file") as process:
        assert fail_one_flush(process.pid, within_s=1) == 0
        assert flush_in(process)[0] == "flushed"


# ------------------------------------------------------------------------------ limits

OPENER = """
import os, sys
print("ready", flush=True)
kept = []
for line in sys.stdin:
    count = 0
    try:
        while count < 50:
            kept.append(os.open("/dev/null", os.O_RDONLY))
            count += 1
    except OSError as error:
        count = f"{count} then errno {error.errno}"
    while kept:
        os.close(kept.pop())
    print(count, flush=True)
"""


@needs_limits
def test_a_process_runs_out_of_descriptors_and_gets_them_back() -> None:
    def opened(process: subprocess.Popen[str]) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("open\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    with program(OPENER) as process:
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        with few_open_files(process.pid, 7):
            assert opened(process) == f"7 then errno {errno.EMFILE}"
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == before
        assert opened(process) == "50"
        with few_open_files(process.pid, 0):
            assert opened(process) == f"0 then errno {errno.EMFILE}"
            ended(process)
    with pytest.raises(FaultError, match="cannot be seen"), few_open_files(process.pid, 1):
        pass


@pytest.mark.parametrize(
    ("in_use", "spare", "limit"),
    [
        ({0, 1, 2}, 0, 3),
        ({0, 1, 2}, 4, 7),
        ({0, 1, 2, 9}, 2, 5),
        ({0, 1, 2, 4}, 1, 5),
        (set(), 0, 0),
    ],
)
def test_the_limit_leaves_as_many_free_numbers_as_asked_for(
    in_use: set[int], spare: int, limit: int
) -> None:
    assert limit_with_spare(in_use, spare) == limit
    assert len(set(range(limit)) - in_use) == spare


# ------------------------------------------------------------------------------ damage


def test_parts_of_what_is_written_are_hit_each_in_its_place() -> None:
    written = [Stretch("a", 0, 5000), Stretch("a", 8192, 9000), Stretch("b", 0, 2000)]
    rng = random.Random(1)
    heads = {choose_byte(rng, written, Part.HEAD) for _ in range(300)}
    tails = {choose_byte(rng, written, Part.TAIL) for _ in range(300)}
    middles = {choose_byte(rng, written, Part.MIDDLE) for _ in range(3000)}
    assert {path for path, _ in heads} == {"a"}
    assert max(offset for _, offset in heads) < 512
    assert {path for path, _ in tails} == {"b"}
    assert min(offset for _, offset in tails) >= 2000 - 512
    assert max(offset for _, offset in tails) < 2000
    assert not middles & (heads | tails)
    assert all(
        512 <= offset < 5000 or 8192 <= offset < 9000 for path, offset in middles if path == "a"
    )
    assert {path for path, _ in middles} == {"a", "b"}


def test_a_single_short_stretch_is_head_middle_and_tail_at_once() -> None:
    written = [Stretch("a", 40, 43)]
    for part in Part:
        found = {choose_byte(random.Random(seed), written, part) for seed in range(40)}
        assert found == {("a", 40), ("a", 41), ("a", 42)}


def test_what_is_written_is_found_without_the_zeros_around_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(8 << 20)
        for offset, data in ((0, b"a" * 1000), (4096 + 7, b"b"), (5 << 20, b"c" * 512)):
            file.seek(offset)
            file.write(data)
    assert written_in(path) == [
        Stretch(str(path), 0, 1000),
        Stretch(str(path), 4103, 4104),
        Stretch(str(path), 5 << 20, (5 << 20) + 512),
    ]


def test_a_folder_that_is_no_brokers_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(FaultError, match="is no broker's data folder"):
        wipe(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
