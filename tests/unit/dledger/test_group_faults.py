"""A group of replicas whose disks fail, forget or hang."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from dledger.broker_errors import PendingFullError
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import DiskFullError, FlushFailedError, LocalProtocolError
from dledger.commitlog.mark import SlotFile
from dledger.group_api import Proposed
from dledger.raft.journal import Frame
from dledger.settings.tables import StoreTable
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from dledger.testing.doubles import InlineExecutor
from tests.harness.groups import Groups, bodies, crash_disk, running_groups
from tests.harness.raft_cluster import batch

pytestmark = pytest.mark.slow

ROOT = Path("/memory")
T = TypeVar("T")


def store_settings(name: str, *, sync_flush: bool = True) -> StoreTable:
    return StoreTable(
        path_root_dir=str(ROOT / name),
        mapped_file_size_commit_log=1 << 20,
        flush_disk_type="SYNC_FLUSH" if sync_flush else "ASYNC_FLUSH",
    )


async def test_new_term_does_not_wait_for_cut_entries(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        old = await groups.leader()
        await groups.isolate(old.name)
        outcomes, settled = list[Proposed](), list[Proposed]()
        for number in range(6):
            settling = [settled.append]
            old.group.propose(batch(str(number).encode()), outcomes.append, settled=settling)
            old.group.kick()
            await trio.sleep(0.01)
        between = await groups.leader(among=groups.others(old.name))
        groups.heal()
        await groups.settle()
        while old.group.leadership is None:
            leader = await groups.leader()
            if leader is old:
                break
            # Only the old one can win: the others' timers are held back.
            for other in groups.others(old.name):
                node = groups.replicas[other].group.node
                node.timer.timeout_s = 1000.0
                node.timer.restart(trio.current_time())
            leader.group.node.core.observe_term(leader.group.term + 1)
            leader.group.node.settle()
            for other in groups.others(old.name):
                groups.replicas[other].group.node.timer.leader_at_s = -1e9
            await trio.sleep(3)
        assert between is not old
        assert [result.outcome for result in settled] == ["not_stored"] * 6
        with trio.fail_after(1):
            proposed = await old.group.submit(batch(b"new"))
        assert proposed.first_offsets == (0,)
        assert [result.outcome for result in outcomes].count("stored") == 0
        assert len(outcomes) == 6


async def serve_until_the_apply_fails() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"before"))

        def fault(kind: str, path: str) -> None:
            if kind == "write" and "/consumequeue/" in path:
                raise OSError(errno.EROFS, "read-only file system")

        crash_disk(groups, leader.name).fault = fault
        await leader.group.submit(batch(b"lost"))


async def test_apply_error_stops_a_serving_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dledger.commitlog.consume_queue.SHARED_BYTES_MAX", 0)
    with pytest.raises(ExceptionGroup) as stopped:
        await serve_until_the_apply_fails()
    assert stopped.value.split(FlushFailedError)[1] is None


async def test_next_checkpoint_flushes_later_units(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await groups.leader()
        group = leader.group
        await group.submit(batch(b"first"))
        await trio.sleep(3.5)
        with monkeypatch.context() as patch:
            patch.setattr(group._applier, "apply", lambda *_: None)
            group.propose(batch(b"second", topic="S"), lambda _: None)
            group.kick()
            await trio.sleep(3.5)  # a checkpoint: the mark moves, the tables do not
        await trio.sleep(3.5)  # another: the tables move, the mark does not
        await group.submit(batch(b"third"))
        await trio.sleep(3.5)
        left = crash_disk(groups, "n0").power_cut(lambda: False)
        store = ReplicaStore(left, store_settings("n0"), StateTables)
        unit = store.queues.queue("S", 0).read(0, 1)[0]
        assert b"second" in bytes(store.log.record_at(int(unit["phy_offset"])))
        store.close(clean=False)


class SlowReserve(InlineExecutor):
    """Space that is made ahead takes until `go_on`, in a thread as far as others can see."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = trio.Event()
        self.entry_log: EntryLog | None = None

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        if kind == "reserve" and self.entry_log is not None:
            assert self.entry_log.allocator.claim.take()
            await self.go_on.wait()
            self.entry_log.allocator.claim.give_back()
        return await super().run(work, kind=kind)


async def test_proposals_wait_while_the_log_is_being_enlarged(tmp_path: Path) -> None:
    """Space that is being made is no full disk: what waits for it is stored."""
    async with running_groups(tmp_path, 1) as groups:
        groups.replicas.pop("n0").kill()
        groups.executors["n0"] = executor = SlowReserve()
        await groups.start("n0")
        leader = await groups.leader()
        await leader.group.submit(batch(b"before"))
        entry_log = executor.entry_log = leader.group.store.log
        entry_log.allocator.limit = entry_log.end_position
        leader.group.maintenance.reserve_wake.set()
        outcomes: list[Proposed] = []
        await trio.sleep(0.1)
        for body in (b"a", b"b"):
            leader.group.propose(batch(body), outcomes.append)
            leader.group.kick()
            await trio.sleep(0.1)
        assert outcomes == []
        executor.go_on.set()
        await trio.sleep(1)
        assert [proposed.outcome for proposed in outcomes] == ["stored", "stored"]
        assert bodies(leader.group) == [b"before", b"a", b"b"]


async def test_what_is_not_sealed_in_time_is_answered_as_not_stored(tmp_path: Path) -> None:
    """A disk that hangs keeps the leader in office: heartbeats do not need it."""
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"before"))
        leader.group.node.flusher.flushing = True  # a flush that does not end
        outcomes: list[Proposed] = []
        leader.group.propose(batch(b"x"), outcomes.append)
        await trio.sleep(2)
        leader.group.propose(batch(b"y"), outcomes.append)
        await trio.sleep(2)
        assert [result.outcome for result in outcomes] == ["not_stored"]
        leader.group.node.flusher.flushing = False
        await trio.sleep(1)
        assert [result.outcome for result in outcomes] == ["not_stored", "stored"]
        assert bodies(leader.group) == [b"before", b"y"]


# -- no vote is kept----------------------------------------------------------------------


def opened(disk: CrashDisk, *, sync_flush: bool = True) -> ReplicaStore:
    return ReplicaStore(disk, store_settings("n0", sync_flush=sync_flush), StateTables)


async def test_damage_is_kept_until_refilled() -> None:
    """A checkpoint of what is left would look like one of an undamaged log."""
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await groups.leader()
        positions = [
            (await leader.group.submit(batch(str(n).encode() * 50))).phy_offset for n in range(9)
        ]
        await trio.sleep(4)
        disk = crash_disk(groups, "n0").power_cut(lambda: True)
    segment = disk.files[f"{ROOT}/n0/commitlog/{0:020d}"]
    segment.content[positions[4] + 90] ^= 1
    disk.files.pop(f"{ROOT}/n0/raft/snapshot")  # or the log is refilled up to it
    disk.files.pop(f"{ROOT}/n0/raft/extent")
    store = opened(disk)
    assert (store.damaged, store.torn) == (True, True)
    while store.tables.applied_index < store.log.last_index:
        store.apply(store.tables.applied_index + 1)
    checkpoint = store.begin_checkpoint(store.log.last_index)
    assert checkpoint is not None
    checkpoint.write()
    store.close(clean=True)
    store = opened(disk)
    assert (store.damaged, store.torn) == (True, True)
    store.end_doubt()
    store.close(clean=True)
    store = opened(disk)
    assert (store.damaged, store.torn) == (False, False)
    store.close(clean=True)


async def test_interrupted_refill_begins_again() -> None:
    """The checkpoint claims queues that were thrown away when the log was found cut."""
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await groups.leader()
        positions = [
            (await leader.group.submit(batch(str(n).encode() * 50))).phy_offset for n in range(9)
        ]
        await trio.sleep(4)
        topic, queue_id = next(key for key in leader.group.state.queues if key[0] == "T")
        disk = crash_disk(groups, "n0").power_cut(lambda: True)
    whole = opened(disk.copy())
    frames = {i: bytes(whole.log.frame(i)) for i in range(1, whole.log.last_index + 1)}
    units = whole.queues.queue(topic, queue_id).read(0, 9).tolist()
    whole.close(clean=False)
    assert len(units) == 9
    segment = disk.files[f"{ROOT}/n0/commitlog/{0:020d}"]
    segment.content[positions[4] + 90] ^= 1
    disk.files.pop(f"{ROOT}/n0/raft/extent")
    store = opened(disk)
    assert store.refilling
    for index in range(store.log.last_index + 1, len(frames) + 1):
        store.log.append(memoryview(frames[index]), sealed_here=False)
    store.log.flush()
    store.close(clean=False)  # killed before it derived anything from them

    store = opened(disk)
    while store.derived_index < store.log.last_index:
        store.apply(store.derived_index + 1)
    assert store.queues.queue(topic, queue_id).read(0, 9).tolist() == units
    store.close(clean=True)


@pytest.mark.parametrize("place", [0, 20, 60, -1])
async def test_damaged_tables_are_rebuilt_from_the_log(place: int) -> None:
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await groups.leader()
        for number in range(9):
            await leader.group.submit(batch(str(number).encode() * 50))
        await trio.sleep(4)
        topic, queue_id = next(key for key in leader.group.state.queues if key[0] == "T")
        disk = crash_disk(groups, "n0").power_cut(lambda: True)
    whole = opened(disk.copy())
    units = whole.queues.queue(topic, queue_id).read(0, 9).tolist()
    bounds = dict(whole.tables.queues)
    whole.close(clean=False)
    disk.files[f"{ROOT}/n0/raft/snapshot"].content[place] ^= 4
    store = opened(disk)
    assert not store.damaged
    assert store.tables.queues == bounds
    assert store.queues.queue(topic, queue_id).read(0, 9).tolist() == units
    store.close(clean=True)


def test_unclean_async_stop_is_remembered() -> None:
    disk = CrashDisk()
    opened(disk, sync_flush=False).close(clean=False)
    store = opened(disk, sync_flush=True)
    assert store.torn
    store.close(clean=True)
    store = opened(disk, sync_flush=True)
    assert store.torn
    store.end_doubt()
    store.close(clean=False)
    store = opened(disk, sync_flush=True)
    assert not store.torn
    store.close(clean=True)


def test_clean_async_stop_leaves_no_uncertainty() -> None:
    disk = CrashDisk()
    opened(disk, sync_flush=False).close(clean=True)
    store = opened(disk, sync_flush=True)
    assert not store.torn
    store.close(clean=False)
    store = opened(disk, sync_flush=True)
    assert not store.torn
    store.close(clean=True)


async def test_a_mark_of_another_entry_commits_nothing() -> None:
    """A follower that truncated, wrote again and lost power finds the old entry there again."""
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"x"))
        last = leader.group.store.log.mark_at(leader.group.store.log.last_index)
        disk = crash_disk(groups, "n0").power_cut(lambda: True)
    slots = SlotFile(disk, f"{ROOT}/n0/raft/commit_mark")
    slots.store(replace(last, chain=last.chain ^ 1).encode())
    slots.close()
    disk.files.pop(f"{ROOT}/n0/raft/snapshot", None)
    store = opened(disk)
    assert (store.restored_commit_index, store.tables.applied_index) == (0, 0)
    assert store.damaged
    store.close(clean=False)


async def test_cut_below_the_mark_leaves_nothing_proven() -> None:
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"x"))
        log = leader.group.store.log
        last, lost = (log.mark_at(log.last_index - behind) for behind in (0, 1))
        disk = crash_disk(groups, "n0").power_cut(lambda: True)
    slots = SlotFile(disk, f"{ROOT}/n0/raft/commit_mark")
    slots.store(last.encode())
    slots.close()
    disk.open(f"{ROOT}/n0/commitlog/{0:020}").write_at(lost.position, bytes(64))
    for path in [path for path in disk.files if "snapshot" in path or "entryindex" in path]:
        disk.unlink(path)
    store = opened(disk)
    assert 0 == store.restored_commit_index < store.log.last_index == lost.index - 1
    store.close(clean=False)


async def test_a_mark_that_is_held_is_applied_at_start() -> None:
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await groups.leader()
        proposed = await leader.group.submit(batch(b"x"))
        await trio.sleep(4)
        disk = crash_disk(groups, "n0").power_cut(lambda: False)
    store = opened(disk)
    assert store.restored_commit_index == store.tables.applied_index == proposed.index
    store.close(clean=False)


async def test_a_checkpoint_claims_only_what_was_flushed_before_it() -> None:
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"x"))
        disk = crash_disk(groups, "n0")
        disk.steps.clear()
        await trio.sleep(4)
        root = f"{ROOT}/n0"
        order = [
            ("flush", f"{root}/consumequeue/T/0/{0:020d}"),
            ("replace", f"{root}/raft/snapshot"),
            ("flush", f"{root}/raft/commit_mark"),
        ]
        assert [step for step in dict.fromkeys(disk.steps) if step in order] == order


async def test_leadership_waits_for_its_no_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elected is not enough: what earlier leaders left may still be on its way."""
    async with running_groups(tmp_path) as groups:
        first = await groups.leader()
        await first.group.submit(batch(b"x"))
        others = [groups.replicas[name].group for name in groups.others(first.name)]
        with monkeypatch.context() as patch:
            for group in others:
                journal = group.node.journal

                def add(command: object, *where: int, real: Any = journal.add) -> None:
                    if isinstance(command, Frame):
                        raise DiskFullError("no space for what others append")
                    real(command, *where)

                patch.setattr(journal, "add", add)
            await groups.isolate(first.name)
            with trio.fail_after(20):
                while not any(group.node.is_leader for group in others):
                    await trio.sleep(0.01)
            for _ in range(50):
                assert [group.leadership for group in others] == [None, None]
                await trio.sleep(0.01)
        second = await groups.leader(among=groups.others(first.name))
        assert second.group.state.applied_index >= second.group.node.state.noop_index > 0


async def test_a_disk_too_full_to_apply_leaves_a_node_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On all three replicas at once, as happens to equal disks."""
    monkeypatch.setattr("dledger.commitlog.consume_queue.SHARED_BYTES_MAX", 0)
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = (await groups.leader()).group
        await leader.submit(batch(b"read me"))
        await trio.sleep(1)  # followers apply it, too
        topic, queue_id = next(key for key in leader.state.queues if key[0] == "T")

        def full(kind: str, path: str) -> None:
            if kind in ("create", "write") and "/consumequeue/" in path:
                raise DiskFullError("no space")

        disks = [crash_disk(groups, name) for name in groups.names]
        for disk in disks:
            disk.fault = full
        outcomes: list[Proposed] = []
        leader.propose(batch(b"too late", topic="new"), outcomes.append)
        leader.kick()
        await trio.sleep(30)
        assert [result.outcome for result in outcomes] == ["unknown"]
        for replica in groups.replicas.values():
            assert replica.group.queues.queue(topic, queue_id).read(0, 1)["size"][0] > 0
            assert ("new", 0) not in replica.group.state.queues
        for disk in disks:
            disk.fault = lambda kind, path: None
        await trio.sleep(3)
        assert (await (await groups.leader()).group.submit(batch(b"more"))).first_offsets == (1,)
        for replica in groups.replicas.values():
            assert replica.group.state.queues["new", 0].max_offset == 1
            assert len(replica.group.queues.queue("new", 0).read(0, 1)) == 1


# -- limits --------------------------------------------------------------------------------


async def test_batch_fits_segments_for_any_entry_cap(tmp_path: Path) -> None:
    """Segments of 1 MiB under an entry cap of 8 MiB."""
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        outcomes: list[Proposed] = []
        for _ in range(3):
            leader.group.propose(batch(bytes(600_000)), outcomes.append)
        leader.group.kick()
        await trio.sleep(1)
        assert [result.outcome for result in outcomes] == ["stored"] * 3
        assert len({result.index for result in outcomes}) == 3
        with pytest.raises(LocalProtocolError, match="does not fit"):
            leader.group.propose(batch(bytes(1_100_000)), outcomes.append)
        assert (await leader.group.submit(batch(b"x"))).first_offsets == (3,)


async def test_unacknowledged_appends_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers without space keep the leader in office, but nothing is committed."""
    async with trio.open_nursery() as nursery:
        groups = Groups(tmp_path, nursery)
        groups.settings.max_pending_bytes = 20_000
        for name in groups.names:
            await groups.start(name)
        leader = (await groups.leader()).group

        def full(*_: object, **__: object) -> None:
            raise DiskFullError("no space")

        outcomes, settled = list[Proposed](), list[Proposed]()
        with monkeypatch.context() as patch:
            for replica in groups.replicas.values():
                if replica.group is not leader:
                    patch.setattr(replica.group.store.log, "append", full)
            for _ in range(2):
                leader.propose(batch(bytes(9_000)), outcomes.append, settled=[settled.append])
                leader.kick()
            await trio.sleep(5)
            assert [result.outcome for result in outcomes] == ["unknown"] * 2
            assert not settled
            assert leader.leadership is not None
            with pytest.raises(PendingFullError):
                leader.propose(batch(bytes(9_000)), outcomes.append)
        await trio.sleep(2)
        assert (await leader.submit(batch(bytes(9_000)))).first_offsets == (2,)
        assert [result.outcome for result in settled] == ["stored"] * 2
        nursery.cancel_scope.cancel()
    for replica in groups.replicas.values():
        replica.group.store.close(clean=False)
