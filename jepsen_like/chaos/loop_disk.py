"""A disk of one node that can lose power: ext4 in an image file behind a loop device.

FS_IOC_SHUTDOWN stops ext4 at once, journal not flushed: from then on nothing reaches the image, and
calls of processes that still run end in EIO. (FIFREEZE would write out the unsynced pages whose
loss is looked for.) Unmounting throws the page cache away, mounting replays the journal.

::

    cut ──► nothing is written any more ──► processes killed ──► restore: unmount, mount, replay

A flush under way at the cut may be reported as done: a process whose answers are judged must not
run any more by then (`machines.stand_still`). What a flush, a commit of the journal or the kernel's
writeback had sent to the device survives; the device's own cache is never lost.

Only here power is lost and space runs out; `strace_inject` has the flushes of a broker that goes
on, `file_damage` the bytes at rest.

Everything here blocks, for tens of milliseconds as a rule: call it from a worker thread, one call
at a time for one disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from dledger.jepsen_like.nemesis.ground import FaultError
from dledger.remoting.seams import Rng

PAGE_BYTES: Final = 4096
"""What the page cache writes whole; also the block size of the file system."""

LEAST_BYTES: Final = 8 << 20
"""Size of the smallest disk: a journal and little else."""

COMMIT_S: Final = 300
"""Seconds between commits of the journal without a request; longer than a plan stays calm."""

_OPTIONS: Final = f"noatime,noauto_da_alloc,noinit_itable,commit={COMMIT_S}"

COMMAND_TIMEOUT_S: Final = 30
"""Seconds a mount, unmount or format may take before the machine is called unfit."""

BALLAST: Final = ".ballast"
"""File that takes the space of a full disk."""

_COMMITTED: Final = ".committed"
_OURS: Final = (BALLAST, _COMMITTED)
_SHUTDOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = struct.pack("I", 2)
_WRITE_AND_WAIT: Final = 1 | 2 | 4
_TOOLS: Final = ("mkfs.ext4", "losetup", "mount", "umount", "cp")
_BUSY: Final = 32
"""Exit status of `umount` when a process has files open there, among other failures."""


@functools.cache
def why_not() -> str | None:
    """Return why no disk can lose its power here, in one sentence; None when it can."""
    if sys.platform != "linux":
        return "disks that lose power need Linux"
    if os.geteuid() != 0:
        return "only root may mount the disk of a node"
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not os.path.exists("/dev/loop-control"):
        return "this machine has no loop devices"
    try:
        with tempfile.TemporaryDirectory() as folder:
            image, place = Path(folder, "image"), Path(folder, "disk")
            with loop_disk(image, place, size_bytes=LEAST_BYTES) as disk:
                disk.cut()
                disk.restore()
    except FaultError as error:
        return f"a trial of cutting a disk's power failed: {error}"
    return None


def pages_kept(rng: Rng, written: list[tuple[int, int]], share: float) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of stretches of whole pages, each page kept with chance *share*."""
    for start, end in written:
        first = start - start % PAGE_BYTES
        kept_from: int | None = None
        for page in range(first, end, PAGE_BYTES):
            if rng.random() < share:
                kept_from = page if kept_from is None else kept_from
            elif kept_from is not None:
                yield kept_from, page - kept_from
                kept_from = None
        if kept_from is not None:
            yield kept_from, end - kept_from


class LoopDisk:
    """A mounted disk. Get it from `loop_disk`."""

    def __init__(self, image: Path, place: Path) -> None:
        self.image = image
        self.place = place
        self._device = ""

    # -- power ----------------------------------------------------------------------------------

    def cut(self) -> None:
        """From this instant nothing reaches the image and every call on the disk fails with EIO.

        Raises FaultError: it is not mounted, or this kernel's ext4 cannot be shut down.
        """
        if not self.mounted:
            raise FaultError(f"{self.place} has no power to cut: it is not mounted")
        try:
            folder = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.ioctl(folder, _SHUTDOWN, _NO_LOG_FLUSH)
            finally:
                os.close(folder)
        except OSError as error:
            raise FaultError(f"the power of {self.place} could not be cut: {error}") from error

    def restore(self) -> None:
        """Mount what survived a cut; the journal is replayed.

        A process that still has files of the dead disk open, or a namespace that was made while it
        was mounted, keeps those: the disk goes on with a copy.

        Raises FaultError: what survived cannot be mounted. The image is kept as it is.
        """
        if self.mounted and not self._unmount():
            _run("umount", "--lazy", str(self.place))
            self._go_on_with_a_copy()
        self.mount()
        if self._is_dead():
            self._let_go()
            self._go_on_with_a_copy()
            self.mount()

    def keep_some(self, rng: Rng, share: float, *, names: bool) -> int:
        """Write some unflushed pages out, as the kernel may before a cut; return their bytes.

        Each page of data survives with chance *share*. *names* commits the journal too: names,
        sizes, and pages in space reserved but never written before, survive only so. The kernel may
        write neighbours.
        """
        kept_bytes = 0
        # Unlike `Path.rglob`, a walk is not upset by folders that a running node removes meanwhile.
        for folder, folders, names_there in os.walk(self.place):
            folders.sort()
            for name in sorted(set(names_there) - set(_OURS)):
                kept_bytes += _write_out(os.path.join(folder, name), rng, share)
        if names:
            self._commit_journal()
        return kept_bytes

    # -- space ----------------------------------------------------------------------------------

    def fill(self, leave_bytes: int) -> int:
        """Take all space but about *leave_bytes*, through power cuts too; return what is free now.

        `release` heals.

        Raises FaultError: the space cannot be taken; what was taken is given back.
        """
        fd = os.open(self.place / BALLAST, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # More than once if need be: what other files give back while this goes on counts too.
            while (taken := self.free_bytes - leave_bytes) > 0:
                end = os.fstat(fd).st_size
                os.posix_fallocate(fd, end, -(-taken // PAGE_BYTES) * PAGE_BYTES)
                os.fsync(fd)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                self.release()
                raise FaultError(f"{self.place} could not be filled: {error}") from error
        finally:
            os.close(fd)
        self._flush_names()
        return self.free_bytes

    def release(self) -> None:
        """Give the space back that `fill` took. Idempotent."""
        (self.place / BALLAST).unlink(missing_ok=True)
        self._flush_names()

    @property
    def free_bytes(self) -> int:
        """Space a process may still take."""
        stat = os.statvfs(self.place)
        return stat.f_bavail * stat.f_frsize

    # -- mounting -------------------------------------------------------------------------------

    @property
    def mounted(self) -> bool:
        """True while this disk and no other is what stands at `place`."""
        if not self._device or not self.place.exists():
            return False
        return os.stat(self.place).st_dev == os.stat(self._device).st_rdev

    def mount(self) -> None:
        """Mount the disk at its place. Raises FaultError: it cannot be mounted."""
        _run("mount", "-t", "ext4", "-o", _OPTIONS, self._device, str(self.place))

    def _is_dead(self) -> bool:
        """Whether what was mounted is the file system that has lost its power."""
        stat = os.stat(self.place)
        try:
            os.utime(self.place, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return True
        return False

    def _unmount(self) -> bool:
        return _run("umount", str(self.place), may_fail_with=_BUSY)

    def _let_go(self) -> None:
        # A node that was not ended must not keep the mount: it goes when the node does.
        if self.mounted and not self._unmount():
            _run("umount", "--lazy", str(self.place))

    def _attach(self) -> None:
        self._device = _output("losetup", "--find", "--show", str(self.image))

    def _detach(self) -> None:
        device, self._device = self._device, ""
        backing = Path("/sys/block", Path(device).name, "loop", "backing_file")
        try:
            ours = backing.read_text().strip().removesuffix(" (deleted)") == str(self.image)
        except FileNotFoundError:
            return
        if ours:
            # In use still: the kernel detaches it when the last user goes.
            _run("losetup", "--detach", device)

    def _go_on_with_a_copy(self) -> None:
        copy = self.image.with_name(self.image.name + ".copy")
        _run("cp", "--sparse=always", "--reflink=auto", str(self.image), str(copy))
        self._detach()
        os.replace(copy, self.image)
        self._attach()

    def _flush_names(self) -> None:
        folder = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _commit_journal(self) -> None:
        # Flushing one file that has grown commits all the journal holds, but no other file's pages.
        with (self.place / _COMMITTED).open("ab") as file:
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def loop_disk(image: Path, place: Path, *, size_bytes: int) -> Iterator[LoopDisk]:
    """Make a disk, mount it at the folder *place* while the block runs, take all of it away again.

    *size_bytes*: at least `LEAST_BYTES`; some of it is the file system's own.

    Raises FaultError: it could not be made (see `why_not`); nothing of it is left.
    """
    if size_bytes < LEAST_BYTES:
        raise FaultError(f"a disk of {size_bytes} bytes is too small; {LEAST_BYTES} at least")
    if place.exists() and any(place.iterdir()):
        raise FaultError(f"{place} is not empty; a disk mounted there would hide what it holds")
    with ExitStack() as stack:
        try:
            with image.open("xb") as file:
                file.truncate(size_bytes)
        except OSError as error:
            raise FaultError(f"no image of a disk could be made: {error}") from error
        stack.callback(image.unlink, missing_ok=True)
        block = str(PAGE_BYTES)
        _run(
            "mkfs.ext4", "-q", "-F", "-b", block, "-m", "0", "-E", "lazy_itable_init=1", str(image)
        )
        # Names of loop devices are compared with the kernel's, which has no links in them.
        disk = LoopDisk(image.resolve(), place.resolve())
        disk._attach()
        stack.callback(disk._detach)
        if not place.exists():
            place.mkdir(parents=True)
            stack.callback(place.rmdir)
        disk.mount()
        stack.callback(disk._let_go)
        yield disk


def _write_out(path: str, rng: Rng, share: float) -> int:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        kept_bytes = 0
        for offset, size in pages_kept(rng, data_extents(fd), share):
            if _libc().sync_file_range(fd, offset, size, _WRITE_AND_WAIT):
                number = ctypes.get_errno()
                raise FaultError(f"pages of {path} could not be written: {os.strerror(number)}")
            kept_bytes += size
        return kept_bytes
    finally:
        os.close(fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return libc


def _run(*command: str, may_fail_with: int = 0) -> bool:
    """Run a command; return whether it succeeded, False only when it may fail like that."""
    done = _finished(command)
    if done.returncode not in (0, may_fail_with):
        raise FaultError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.returncode == 0


def _output(*command: str) -> str:
    done = _finished(command)
    if done.returncode:
        raise FaultError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def _finished(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FaultError(f"{command[0]} could not be run: {error}") from error


def data_extents(fd: int) -> list[tuple[int, int]]:
    """Return (offset, end) of the stretches of an open file that hold data, on disk or not yet."""
    found: list[tuple[int, int]] = []
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return found
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, end))
