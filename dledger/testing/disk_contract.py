"""What `commitlog.seams.Disk` demands of every implementation, as a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commitlog.errors import InvariantBroken, OffsetOutOfRangeError, StoreLockedError
from commitlog.seams import Disk
from dledger.testing.contract import require, require_error

SIZE: Final = 8192
"""Of the files made here: two pages, so that a write may cross a boundary."""


def check_disk(disk: Disk, folder: str, *, power_cut: Callable[[Disk], Disk] | None = None) -> None:
    """Check that *disk* keeps the contract of the seam.

    Args:
        folder: An empty folder on it, or one that does not exist; what is made stays there.
        power_cut: Returns the disk as the next process finds it when everything that was not
            flushed is lost. Without it nothing is checked of what is durable.
    Raises:
        AssertionError: It does not; the text names the point.
    """
    _check_files(disk, f"{folder}/files")
    _check_ranges(disk, f"{folder}/ranges")
    _check_closed(disk, f"{folder}/closed")
    _check_folders(disk, f"{folder}/folders")
    _check_small_files(disk, f"{folder}/small")
    _check_removal(disk, f"{folder}/removal")
    _check_lock(disk, f"{folder}/lock")
    free, total = disk.free_bytes(folder), disk.total_bytes(folder)
    require(free >= 0 and total > 0, f"{free} of {total} bytes are no sizes of a disk")
    if power_cut is not None:
        _check_durability(disk, f"{folder}/durable", power_cut)


def _check_files(disk: Disk, folder: str) -> None:
    path = f"{folder}/new/file"
    file = disk.create(path, SIZE, reserve=True)
    require(file.path == path, "a file's path is the one it was opened with")
    require(file.size == SIZE, "a new file has the size that was given")
    require(file.read(0, SIZE) == bytes(SIZE), "a new file is filled with zeros")
    view = file.view(0, SIZE)
    require(view.readonly, "a view is read-only")
    file.write_at(4090, b"across")
    file.write_at(0, memoryview(b"-begin-")[1:6])
    file.write_at(SIZE - 3, bytearray(b"end"))
    file.write_at(5, b"")
    expected = bytearray(SIZE)
    expected[4090:4096], expected[:5], expected[-3:] = b"across", b"begin", b"end"
    require(bytes(view) == expected, "a view sees later writes, and those alone")
    require(file.read(4090, 6) == b"across", "a read gives what was written")
    before = file.read(0, 5)
    file.write_at(0, b"BEGIN")
    require(before == b"begin", "a read gives a copy")
    other = disk.open(path)
    require(other.size == SIZE, "a file keeps its size")
    require(other.read(0, 5) == b"BEGIN", "every opened file sees what another one wrote")
    with require_error(FileExistsError, "create of a name that is taken"):
        disk.create(path, SIZE, reserve=False)
    require(disk.read(path)[:5] == b"BEGIN", "a refused create leaves the file as it is")
    with require_error(FileNotFoundError, "open of a missing file"):
        disk.open(f"{folder}/missing")
    sparse = disk.create(f"{folder}/sparse", SIZE, reserve=False)
    require(sparse.read(SIZE - 1, 1) == b"\0", "a file without reserved space has its size, too")
    for opened in (file, other, sparse):
        opened.flush()
        opened.close()


def _check_ranges(disk: Disk, folder: str) -> None:
    file = disk.create(f"{folder}/file", SIZE, reserve=True)
    for offset, size in ((-1, 1), (0, SIZE + 1), (SIZE, 1), (0, -1)):
        with require_error(OffsetOutOfRangeError, f"view of {size} bytes at {offset}"):
            file.view(offset, size)
        with require_error(OffsetOutOfRangeError, f"read of {size} bytes at {offset}"):
            file.read(offset, size)
    for offset, data in ((-1, b"x"), (SIZE, b"x"), (SIZE - 1, b"xy")):
        with require_error(InvariantBroken, f"write of {len(data)} bytes at {offset}"):
            file.write_at(offset, data)
    require(file.read(0, SIZE) == bytes(SIZE), "a refused write changes nothing")
    require(bytes(file.view(SIZE, 0)) == b"", "a view of nothing at the end is empty")
    require(file.read(SIZE, 0) == b"", "a read of nothing at the end is empty")
    file.close()


def _check_closed(disk: Disk, folder: str) -> None:
    path = f"{folder}/file"
    file = disk.create(path, SIZE, reserve=True)
    file.write_at(0, b"kept")
    view = file.view(0, 4)
    file.close()
    file.close()
    require(bytes(view) == b"kept", "a view outlives its file")
    with require_error(InvariantBroken, "write to a closed file"):
        file.write_at(0, b"late")
    file.flush()
    again = disk.open(path)
    require(again.read(0, 4) == b"kept", "close keeps what was written")
    again.close()


def _check_folders(disk: Disk, folder: str) -> None:
    require(disk.list_dir(folder) == [], "a missing folder lists nothing")
    require(not disk.exists(folder), "a missing folder does not exist")
    disk.make_dir(f"{folder}/a/b")
    disk.make_dir(f"{folder}/a/b")
    require(disk.exists(f"{folder}/a"), "parents are made, too")
    require(disk.list_dir(f"{folder}/a/b") == [], "a new folder is empty")
    disk.make_dir(f"{folder}/c", durably=False)
    for name in ("2", "10", "1"):
        disk.create(f"{folder}/{name}", SIZE, reserve=False).close()
    found = list(disk.list_dir(folder))
    require(found == ["1", "10", "2", "a", "c"], f"files and folders are listed sorted: {found}")
    require(disk.exists(f"{folder}/10"), "a file exists")
    disk.flush_dir(folder)
    disk.flush_all([f"{folder}/1", f"{folder}/missing"], [folder, f"{folder}/missing"])


def _check_small_files(disk: Disk, folder: str) -> None:
    path = f"{folder}/small"
    with require_error(FileNotFoundError, "read of a missing file"):
        disk.read(path)
    for content in (b"first", memoryview(b"the second, longer"), bytearray(b"3"), b""):
        disk.replace(path, content)
        require(disk.read(path) == bytes(content), "replace sets the whole content")
    require(list(disk.list_dir(folder)) == ["small"], "replace leaves no other name behind")


def _check_removal(disk: Disk, folder: str) -> None:
    path = f"{folder}/deep/er/file"
    file = disk.create(path, SIZE, reserve=True)
    file.write_at(0, b"open")
    disk.unlink(path)
    disk.unlink(path)
    require(not disk.exists(path), "a removed file does not exist")
    require(file.read(0, 4) == b"open", "a removed file can be read while it is open")
    file.flush()
    file.close()
    disk.create(path, SIZE, reserve=True).close()
    require(disk.read(path) == bytes(SIZE), "a name can be used again, for a new file")
    disk.remove_tree(f"{folder}/deep")
    disk.remove_tree(f"{folder}/deep")
    require(not disk.exists(path), "remove_tree removes files")
    require(not disk.exists(f"{folder}/deep"), "remove_tree removes folders")
    require(disk.list_dir(folder) == [], "remove_tree removes the folder's own name")


def _check_lock(disk: Disk, folder: str) -> None:
    path = f"{folder}/lock"
    lock = disk.lock(path)
    require(disk.exists(path), "the lock is a file")
    with require_error(StoreLockedError, "lock of a path that is locked"):
        disk.lock(path)
    lock.release()
    lock.release()
    again = disk.lock(path)
    lock.release()
    with require_error(StoreLockedError, "lock after an old claim was released once more"):
        disk.lock(path)
    again.release()


def _check_durability(disk: Disk, folder: str, power_cut: Callable[[Disk], Disk]) -> None:
    kept, volatile, nameless = (f"{folder}/{name}" for name in ("kept", "volatile", "nameless"))
    disk.replace(f"{folder}/small", b"old")
    for path in (kept, volatile):
        file = disk.create(path, SIZE, reserve=True)
        file.write_at(0, b"flushed")
        file.flush()
    disk.flush_dir(folder)
    late = disk.open(volatile)
    late.write_at(4096, b"lost")
    late.write_at(0, b"FLUSHED")
    disk.create(nameless, SIZE, reserve=True).flush()
    disk.replace(f"{folder}/other/small", b"elsewhere")
    disk.unlink(kept)
    found = power_cut(disk)
    require(found.exists(kept), "a removal is durable after flush_dir alone")
    require(found.open(kept).read(0, 7) == b"flushed", "what was flushed is there")
    after = found.open(volatile).read(0, SIZE)
    require(after[:7] == b"flushed", "a flushed sector has its flushed bytes again")
    require(after[4096:4100] == bytes(4), "bytes that were not flushed are lost")
    require(not found.exists(nameless), "a name is durable after flush_dir alone")
    require(found.read(f"{folder}/small") == b"old", "replace is durable when it returns")
    require(found.read(f"{folder}/other/small") == b"elsewhere", "replace makes its folder durable")
    found.replace(f"{folder}/small", b"new")
    found.flush_dir(folder)
    found.unlink(kept)
    found.flush_dir(folder)
    again = power_cut(found)
    require(not again.exists(kept), "a removal is durable after flush_dir")
    require(again.read(f"{folder}/small") == b"new", "replace leaves the old or the new content")
    again.lock(f"{folder}/lock").release()
