import pytest

from dledger.commitlog.errors import DiskFullError, FlushFailedError, StoreLockedError
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.sim_disk import PAGE_BYTES, Mount, SimDisk
from dledger.testing.crash_disk import SECTOR_BYTES

OLD, NEW = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES


def disk(seed: int = 1) -> SimDisk:
    return SimDisk(rng_stream(seed))


def with_file(made: SimDisk, sectors: int = 4, path: str = "/d/f") -> Mount:
    """A file of durable old sectors."""
    mount = made.mount()
    file = mount.create(path, sectors * SECTOR_BYTES, reserve=True)
    file.write_at(0, OLD * sectors)
    file.flush()
    mount.flush_dir("/d")
    return mount


@pytest.fixture
def made() -> SimDisk:
    return disk()


def test_a_power_cut_keeps_or_loses_each_unflushed_sector_whole() -> None:
    seen: set[tuple[bytes, ...]] = set()
    for seed in range(200):
        made = disk(seed)
        mount = with_file(made)
        mount.open("/d/f").write_at(100, b"n" * (3 * SECTOR_BYTES))
        made.power_cut()
        content = made.mount().read("/d/f")
        sectors = tuple(
            content[at : at + SECTOR_BYTES] for at in range(0, len(content), SECTOR_BYTES)
        )
        for number, sector in enumerate(sectors):
            begin, end = number * SECTOR_BYTES, (number + 1) * SECTOR_BYTES
            new = bytearray(OLD)
            for at in range(max(begin, 100), min(end, 100 + 3 * SECTOR_BYTES)):
                new[at - begin] = ord("n")
            assert sector in (OLD, bytes(new))
        seen.add(tuple(b"o" if sector == OLD else b"n" for sector in sectors))
    assert len(seen) == 16


def test_what_was_flushed_survives_every_power_cut() -> None:
    for seed in range(50):
        made = disk(seed)
        mount = with_file(made)
        file = mount.open("/d/f")
        file.write_at(SECTOR_BYTES, NEW)
        file.flush()
        made.power_cut()
        assert made.mount().read("/d/f") == OLD + NEW + OLD * 2


def test_a_kill_loses_nothing_and_ends_the_calls_of_the_dead(made: SimDisk) -> None:
    mount = with_file(made)
    file = mount.open("/d/f")
    file.write_at(0, NEW)
    made.kill(mount)
    file.write_at(0, b"x" * SECTOR_BYTES)
    file.flush()
    mount.replace("/d/small", b"x")
    mount.unlink("/d/f")
    mount.create("/d/other", 10, reserve=True)
    assert made.mount().read("/d/f") == NEW + OLD * 3
    assert made.mount().list_dir("/d") == ["f"]


def test_names_not_flushed_are_lost_from_the_first_lost_one() -> None:
    outcomes: set[tuple[str, ...]] = set()
    for seed in range(100):
        made = disk(seed)
        mount = with_file(made)
        for name in ("a", "b", "c"):
            mount.create(f"/d/{name}", 10, reserve=True)
        made.power_cut()
        outcomes.add(tuple(made.mount().list_dir("/d")))
    assert outcomes == {("f",), ("a", "f"), ("a", "b", "f"), ("a", "b", "c", "f")}


def test_an_unlink_that_was_not_flushed_may_come_undone() -> None:
    outcomes = set()
    for seed in range(50):
        made = disk(seed)
        mount = with_file(made)
        mount.unlink("/d/f")
        assert not mount.exists("/d/f")
        made.power_cut()
        outcomes.add(made.mount().exists("/d/f"))
    assert outcomes == {True, False}


def test_a_replaced_file_has_the_old_or_the_new_content() -> None:
    outcomes = set()
    for seed in range(50):
        made = disk(seed)
        mount = made.mount()
        mount.replace("/d/s", b"old")
        flight = mount.take_off()
        mount.replace("/d/s", b"new content")
        mount.work_done()
        made.power_cut()
        outcomes.add(made.mount().read("/d/s"))
        mount.land(flight)
    assert outcomes == {b"old", b"new content"}


def test_work_that_has_landed_is_durable() -> None:
    for seed in range(20):
        made = disk(seed)
        mount = with_file(made)
        flight = mount.take_off()
        mount.open("/d/f").write_at(0, NEW)
        mount.open("/d/f").flush()
        mount.replace("/d/s", b"new")
        mount.work_done()
        mount.land(flight)
        made.power_cut()
        assert made.mount().read("/d/f") == NEW + OLD * 3
        assert made.mount().read("/d/s") == b"new"


def test_a_later_step_is_on_disk_only_with_the_earlier_ones() -> None:
    outcomes = set()
    for seed in range(100):
        made = disk(seed)
        mount = with_file(made)
        mount.replace("/d/s", b"old")
        mount.take_off()
        mount.open("/d/f").write_at(0, NEW)
        mount.open("/d/f").flush()
        mount.replace("/d/s", b"new")
        mount.work_done()
        made.power_cut()
        after = made.mount()
        outcomes.add((after.read("/d/f")[:1], after.read("/d/s")))
    assert outcomes == {(b"o", b"old"), (b"n", b"old"), (b"n", b"new")}


def test_a_failed_flush_loses_its_pages_for_the_next_too(made: SimDisk) -> None:
    mount = with_file(made)
    file = mount.open("/d/f")
    file.write_at(0, NEW)
    made.flush_failures = 1
    with pytest.raises(FlushFailedError):
        file.flush()
    file.flush()
    assert mount.read("/d/f") == NEW + OLD * 3
    made.power_cut()
    assert made.mount().read("/d/f") == OLD * 4


def test_a_dead_process_leaves_no_pages_that_a_failed_flush_lost(made: SimDisk) -> None:
    mount = with_file(made)
    file = mount.open("/d/f")
    file.write_at(0, NEW)
    made.flush_failures = 1
    with pytest.raises(FlushFailedError):
        file.flush()
    made.kill(mount)
    assert made.mount().read("/d/f") == OLD * 4


def test_a_full_disk_serves_what_was_reserved(made: SimDisk) -> None:
    mount = with_file(made)
    sparse = mount.create("/d/sparse", 10 * PAGE_BYTES, reserve=False)
    sparse.write_at(0, b"x")
    made.capacity_bytes = made.used_bytes
    assert mount.free_bytes("/d") == 0
    with pytest.raises(DiskFullError):
        mount.create("/d/more", 1, reserve=True)
    with pytest.raises(DiskFullError):
        sparse.write_at(5 * PAGE_BYTES, b"x")
    with pytest.raises(DiskFullError):
        mount.replace("/d/small", b"x")
    sparse.write_at(1, b"y")
    mount.open("/d/f").write_at(0, NEW)
    mount.unlink("/d/f")
    mount.create("/d/more", SECTOR_BYTES, reserve=True)
    assert not mount.exists("/d/small")


def test_rot_flips_single_bits_of_written_bytes(made: SimDisk) -> None:
    mount = with_file(made, path="/d/commitlog/0")
    (found,) = made.rot()
    path, at = found
    before, after = OLD * 4, mount.read(path)
    differing = [i for i in range(len(before)) if before[i] != after[i]]
    assert differing == [at]
    assert (before[at] ^ after[at]).bit_count() == 1
    assert made.rot("/nowhere/") == []


def test_a_wipe_leaves_an_empty_disk(made: SimDisk) -> None:
    with_file(made)
    made.wipe()
    assert made.mount().list_dir("/") == []
    assert made.used_bytes == 0


def test_a_lock_is_held_until_released_or_its_process_ends(made: SimDisk) -> None:
    mount = made.mount()
    claim = mount.lock("/d/lock")
    with pytest.raises(StoreLockedError):
        made.mount().lock("/d/lock")
    claim.release()
    again = made.mount()
    again.lock("/d/lock")
    made.kill(again)
    made.mount().lock("/d/lock")


@pytest.mark.parametrize("struck", ["create", "replace", "flush", "unlink"])
def test_a_process_killed_within_an_act_has_not_done_it(struck: str) -> None:
    acts = ["create", "replace", "flush", "unlink"]
    made = disk()
    mount = with_file(made)
    mount.replace("/d/s", b"old")
    file = mount.open("/d/f")
    file.write_at(0, NEW)

    def strike(kind: str, path: str, offset: int, size: int) -> None:
        if kind == struck:
            made.kill(mount)

    made.observe = strike
    mount.create("/d/new", 10, reserve=True)
    mount.replace("/d/s", b"new")
    file.flush()
    mount.unlink("/d/f")
    done = acts[: acts.index(struck)]
    after = made.mount()
    assert after.exists("/d/new") == ("create" in done)
    assert after.read("/d/s") == (b"new" if "replace" in done else b"old")
    assert (made.names["/d/f"].undo == {}) == ("flush" in done)
    assert after.exists("/d/f")


def test_what_a_power_cut_may_change_is_returned(made: SimDisk) -> None:
    mount = with_file(made)
    file = mount.open("/d/f")
    end = 4 * SECTOR_BYTES
    assert made.first_doubtful("/d/f", 0, end) is None
    file.write_at(SECTOR_BYTES, b"o" * 10 + b"n")
    assert made.first_doubtful("/d/f", 0, end) == SECTOR_BYTES
    assert made.first_doubtful("/d/f", 0, SECTOR_BYTES) is None
    assert made.first_doubtful("/d/f", SECTOR_BYTES + 11, end) is None
    assert made.certain("/d/f") == OLD * 4
    flight = mount.take_off()
    file.flush()
    mount.work_done()
    assert made.first_doubtful("/d/f", 0, end) == SECTOR_BYTES
    assert made.certain("/d/f") == OLD * 4
    mount.land(flight)
    assert made.first_doubtful("/d/f", 0, end) is None
    assert made.certain("/d/f") == mount.read("/d/f") != OLD * 4


def test_bytes_under_a_name_that_may_go_are_uncertain(made: SimDisk) -> None:
    mount = with_file(made)
    file = mount.create("/d/g", SECTOR_BYTES, reserve=True)
    file.write_at(0, NEW)
    file.flush()
    assert made.first_doubtful("/d/g", 0, SECTOR_BYTES) == 0
    assert made.certain("/d/g") is None
    flight = mount.take_off()
    mount.flush_dir("/d")
    mount.work_done()
    assert made.first_doubtful("/d/g", 0, SECTOR_BYTES) == 0
    mount.land(flight)
    assert made.first_doubtful("/d/g", 0, SECTOR_BYTES) is None


@pytest.mark.parametrize("is_work", [False, True])
def test_a_flush_that_ends_has_waited_for_earlier_ones(is_work: bool) -> None:
    for seed in range(20):
        made = disk(seed)
        mount = with_file(made)
        file = mount.create("/d/g", SECTOR_BYTES, reserve=True)
        file.write_at(0, NEW)
        mount.take_off()
        file.flush()
        mount.flush_dir("/d")
        mount.work_done()
        second = mount.take_off() if is_work else None
        file.flush()
        mount.flush_dir("/d")
        if second is not None:
            mount.work_done()
            assert made.first_doubtful("/d/g", 0, SECTOR_BYTES) == 0
            mount.land(second)
        assert made.first_doubtful("/d/g", 0, SECTOR_BYTES) is None
        made.power_cut()
        assert made.mount().read("/d/g") == NEW


def test_a_torn_tail_is_the_newest_bytes_and_none_that_must_stay() -> None:
    fillings = set()
    for seed in range(20):
        made = disk(seed)
        with_file(made, path="/d/0000")
        with_file(made, path="/d/2048")
        assert made.tear_tail("/d/", 700, 2048 + 1500) == ("/d/2048", 1500)
        content = made.mount().read("/d/2048")
        assert content[:1500] == OLD * 2 + OLD[: 1500 - 2 * SECTOR_BYTES]
        assert content[1500:] != OLD * 2
        assert made.mount().read("/d/0000") == OLD * 4
        fillings.add(not any(content[1500:]))
        assert made.tear_tail("/d/", 700, 2048 * 2) is None
    assert fillings == {True, False}
