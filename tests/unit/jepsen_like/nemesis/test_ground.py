"""What the commit mark covers is at rest."""

from dledger.commitlog.mark import Mark, SlotFile
from dledger.jepsen_like.nemesis.ground import marked_end
from dledger.testing.crash_disk import CrashDisk


def test_newest_mark_gives_the_end_of_the_log() -> None:
    disk = CrashDisk()
    disk.make_dir("/raft")
    slots = SlotFile(disk, "/raft/commit_mark")
    for end in (100, 250, 900):
        slots.store(Mark(end, 1, end - 50, 7, end).encode())
        assert marked_end(bytes(disk.files["/raft/commit_mark"].content)) == end


def test_without_a_mark_nothing_is() -> None:
    assert marked_end(bytes(8192)) == 0
