"""What executors, disks and networks must do in every implementation, as checks.

A requirement that does not hold fails with one sentence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Final, ParamSpec

import trio
import trio.from_thread

from dledger.commitlog.errors import InvariantBroken, OffsetOutOfRangeError, StoreLockedError
from dledger.commitlog.seams import Disk
from dledger.remoting.seams import Executor, Listener, Network, Stream, send_at_once

# ---------------------------------------------------------------------------------- executors


P = ParamSpec("P")


def require(condition: object, sentence: str) -> None:
    """Demand *condition*.

    Raises:
        AssertionError: It does not hold; the text is *sentence*.
    """
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(sentence)


@contextmanager
def require_error(expected: type[BaseException], act: str) -> Iterator[None]:
    """Demand that the block raises *expected*.

    Args:
        act: What the block does, as the subject of the sentence.
    Raises:
        AssertionError: It raises nothing, or something else, which is the cause then.
    """
    __tracebackhide__ = True
    try:
        yield
    except expected:
        return
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{act} raises {found}, not {expected.__name__}") from error
    raise AssertionError(f"{act} raises nothing, not {expected.__name__}")


def unwrapped(check: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Let *check* raise the first broken requirement itself, not the group its tasks made of it."""

    @wraps(check)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        __tracebackhide__ = True
        try:
            await check(*args, **kwargs)
        except BaseExceptionGroup as group:
            broken = group.subgroup(AssertionError)
            while isinstance(broken, BaseExceptionGroup):
                broken = broken.exceptions[0]  # type: ignore[assignment]  # down to a leaf
            if broken is None:
                raise
            raise broken from group

    return run


RUNS: Final = 50
"""Of one kind in a row: enough for one that measures to change its mind."""


class _FailedError(Exception):
    """What the work of a check raises."""


def _fail() -> None:
    raise _FailedError


@unwrapped
async def check_executor(executor: Executor, *, kind: str = "check") -> None:
    """Check that *executor* keeps the contract of the seam.

    Args:
        kind: Name under which it measures the work of this check.
    Raises:
        AssertionError: It does not; the text names the point.
    """
    for number in range(RUNS):
        require(isinstance(executor.runs_inline(kind), bool), "runs_inline gives a bool")
        if executor.runs_inline(kind):
            found = executor.run_inline(partial(int, number), kind=kind)
        else:
            found = await executor.run(partial(int, number), kind=kind)
        require(found == number, "work gives its result")
    with require_error(_FailedError, "run of work that fails"):
        await executor.run(_fail, kind=kind)
    with require_error(_FailedError, "run_inline of work that fails"):
        executor.run_inline(_fail, kind=kind)
    require(await executor.run(lambda: 7, kind=kind) == 7, "work runs after work that failed")
    await _check_one_at_a_time(executor, kind)
    await _check_cancellation(executor, kind)


async def _check_one_at_a_time(executor: Executor, kind: str) -> None:
    running, done = 0, 0

    def work() -> None:
        nonlocal running, done
        running += 1
        require(running == 1, "work of one kind never runs beside work of its kind")
        running -= 1
        done += 1

    async with trio.open_nursery() as nursery:
        for _ in range(RUNS):
            nursery.start_soon(partial(executor.run, work, kind=kind))
    require(done == RUNS, "every work runs exactly once")


async def _check_cancellation(executor: Executor, kind: str) -> None:
    """Work that has begun is finished, and `run` returns or is cancelled after it alone."""
    begun, finished = 0, 0
    with trio.CancelScope() as scope:

        def work() -> None:
            nonlocal begun, finished
            begun += 1
            if _in_thread():
                trio.from_thread.run_sync(scope.cancel)
            else:
                scope.cancel()
            finished += 1

        await executor.run(work, kind=kind)
        await trio.lowlevel.checkpoint()
    require((begun, finished) == (1, 1), "work that has begun is finished when run ends")
    with trio.CancelScope() as scope:
        scope.cancel()
        await executor.run(lambda: None, kind=kind)
        await trio.lowlevel.checkpoint()
        require(False, "a cancelled task goes on after its work")
    require(await executor.run(lambda: 1, kind=kind) == 1, "work runs after a cancellation")


def _in_thread() -> bool:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return True
    return False


# ---------------------------------------------------------------------------------- disks


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


LIMIT_S: Final = 10.0
"""Nothing here takes so long; what does hangs."""

CHUNK_BYTES: Final = 64 * 1024
LARGE_BYTES: Final = 3 * 1024 * 1024
"""More than sockets and windows hold: its sender waits for its reader."""


@dataclass(slots=True)
class _Ends:
    """Both networks, and where the serving one listens."""

    client: Network
    listener: Listener

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[Stream, Stream]]:
        """Give both ends of a new connection, the caller's first; closed when the block ends."""
        host, port = self.listener.address
        ours = await self.client.connect(host, port, timeout_s=LIMIT_S)
        theirs = await self.listener.accept()
        try:
            yield ours, theirs
        finally:
            with trio.CancelScope(shield=True):
                await ours.aclose()
                await theirs.aclose()


@unwrapped
async def check_network(
    client: Network, server: Network | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> None:
    """Check that a network keeps the contract of the seam, without TLS.

    Args:
        client: The network as the connecting side has it.
        server: The same as the serving side has it; None: both have *client*.
        host: An address of the serving side.
        port: A free port there; 0: the implementation finds one.
    Raises:
        AssertionError: It does not; the text names the point.
    """
    server = client if server is None else server
    with trio.move_on_after(10 * LIMIT_S) as scope:
        listener = await server.listen(host, port)
        require(listener.address[1] > 0, "a listener knows the port that is bound")
        require(not port or listener.address[1] == port, "a listener binds the port it was given")
        ends = _Ends(client, listener)
        with require_error(OSError, "listen at an address that is taken"):
            await server.listen(*listener.address)
        await _check_addresses(ends)
        await _check_bytes(ends)
        await _check_both_ways(ends)
        await _check_send_at_once(ends)
        await _check_cancelled_receive(ends)
        await _check_close(ends)
        await _check_peer_closed(ends)
        await _check_listener_closed(ends, server)
    require(not scope.cancelled_caught, "the network hangs: a call that should end does not")


async def _check_addresses(ends: _Ends) -> None:
    async with ends.connected() as (ours, theirs):
        require(ours.peer_address == ends.listener.address, "the caller knows whom it called")
        require(theirs.local_address == ends.listener.address, "so does the end it accepted")
        require(theirs.peer_address == ours.local_address, "both sides see the caller's address")
        async with ends.connected() as (second, _):
            require(second.local_address != ours.local_address, "each connection has its own port")


async def _check_bytes(ends: _Ends) -> None:
    async with ends.connected() as (ours, theirs):
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            await sender.send_all(b"one")
            await sender.send_all(memoryview(b"-two-")[1:4])
            await sender.send_all(bytearray(b"three"))
            first = bytes(await receiver.receive_some(2))
            require(
                0 < len(first) <= 2, "receive_some gives a byte at least, and its limit at most"
            )
            received = first + await _received(receiver, 11 - len(first))
            require(received == b"onetwothree", "bytes arrive once each and in order")


async def _received(stream: Stream, count: int) -> bytes:
    """Return the next *count* bytes, fewer at the end of the stream."""
    received = bytearray()
    while len(received) < count:
        data = await stream.receive_some(min(CHUNK_BYTES, count - len(received)))
        if not data:
            break
        received += data
    return bytes(received)


async def _check_both_ways(ends: _Ends) -> None:
    """One task may send while another receives, however much it is."""
    sent = bytes(range(256)) * (LARGE_BYTES // 256)

    async def carry(sender: Stream, receiver: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send_all, sent)
            received = await _received(receiver, len(sent))
        require(received == sent, "large data arrives whole in both directions at once")

    async with ends.connected() as (ours, theirs), trio.open_nursery() as nursery:
        nursery.start_soon(carry, ours, theirs)
        nursery.start_soon(carry, theirs, ours)


async def _check_send_at_once(ends: _Ends) -> None:
    """A stream that sends without waiting takes the beginning, and nothing when it is full."""
    async with ends.connected() as (ours, theirs):
        at_once = send_at_once(ours)
        if at_once is None:
            return
        sent = bytes(range(251)) * (LARGE_BYTES // 251)
        taken = 0
        while step := at_once(memoryview(sent)[taken : taken + CHUNK_BYTES]):
            taken += step
            require(step <= CHUNK_BYTES and taken < len(sent), "a full stream takes nothing")
        rest = sent[taken : taken + CHUNK_BYTES]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send_all, rest)
            received = await _received(theirs, taken + len(rest))
        require(received == sent[: taken + len(rest)], "both ways to send keep the order")
        await ours.aclose()
        with require_error(OSError, "send at once on a closed stream"):
            at_once(b"x")


async def _check_cancelled_receive(ends: _Ends) -> None:
    async with ends.connected() as (ours, theirs):
        with trio.move_on_after(0.01):
            await theirs.receive_some(CHUNK_BYTES)
        await ours.send_all(b"after")
        require(await _received(theirs, 5) == b"after", "a cancelled receive loses no bytes")


async def _check_close(ends: _Ends) -> None:
    async with ends.connected() as (ours, _):
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with require_error(trio.ClosedResourceError, "receive while its stream is closed"):
                    await ours.receive_some(1)

            nursery.start_soon(receive)
            await trio.sleep(0.01)
            await ours.aclose()
        await ours.aclose()
        with require_error(trio.ClosedResourceError, "send on a closed stream"):
            await ours.send_all(b"x")
        with require_error(trio.ClosedResourceError, "receive on a closed stream"):
            await ours.receive_some(1)


async def _check_peer_closed(ends: _Ends) -> None:
    async with ends.connected() as (ours, theirs):
        await ours.send_all(b"last")
        await ours.aclose()
        require(await _received(theirs, 5) == b"last", "what was sent before a close arrives")
        require(not await theirs.receive_some(1), "then the stream ends, with an empty buffer")
        with require_error(trio.BrokenResourceError, "send to a peer that has closed"):
            while True:
                await theirs.send_all(bytes(CHUNK_BYTES))
                await trio.sleep(0.01)


async def _check_listener_closed(ends: _Ends, server: Network) -> None:
    listener = ends.listener
    async with ends.connected() as (ours, theirs):
        async with trio.open_nursery() as nursery:

            async def accept() -> None:
                with require_error(trio.ClosedResourceError, "accept while its listener is closed"):
                    await listener.accept()

            nursery.start_soon(accept)
            await trio.sleep(0.01)
            await listener.aclose()
        await listener.aclose()
        with require_error(trio.ClosedResourceError, "accept on a closed listener"):
            await listener.accept()
        await ours.send_all(b"still")
        require(await _received(theirs, 5) == b"still", "connections outlive their listener")
    with require_error(OSError, "connect where nothing listens"):
        await ends.client.connect(*listener.address, timeout_s=LIMIT_S)
    again = await server.listen(*listener.address)
    await again.aclose()
