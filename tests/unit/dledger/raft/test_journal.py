"""Term and vote: what is on disk, what a crash leaves of it, and what no member can have."""

import cbor2
import pytest

from dledger.commitlog.errors import CorruptStoreError
from dledger.commitlog.mark import SLOT_STRIDE_BYTES, SlotFile
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.sim_disk import SimDisk
from dledger.raft.journal import TermVote, parse_term_vote
from dledger.raft.wire import TERM_MAX
from dledger.testing.crash_disk import Inode

PATH = "/store/raft/vote"


def opened(disk: SimDisk) -> TermVote:
    mount = disk.mount()
    mount.make_dir("/store/raft")
    return TermVote(SlotFile(mount, PATH))


def kept(vote: TermVote, term: int, candidate: str | None) -> None:
    vote.set(term, candidate)
    version, record = vote.snapshot()
    vote.write(record)
    vote.mark_durable(version)


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("votes", range(1, 3))
def test_a_bad_sector_in_either_slot_forgets_no_vote(slot: int, votes: int) -> None:
    disk = SimDisk(rng_stream(1))
    vote = opened(disk)
    for term in range(1, votes + 1):
        kept(vote, term, "n0")
        kept(vote, term + 1, None)
        kept(vote, term + 1, "n1")
    disk.flip(PATH, slot * SLOT_STRIDE_BYTES, slot * SLOT_STRIDE_BYTES + 24, bits=1)
    again = opened(disk)
    assert (again.term, again.voted_for) == (votes + 1, "n1")


@pytest.mark.parametrize("slot", [0, 1])
def test_record_with_one_copy_is_written_again(slot: int) -> None:
    disk = SimDisk(rng_stream(1))
    kept(opened(disk), 3, "n1")
    assert opened(disk).is_durable
    disk.flip(PATH, slot * SLOT_STRIDE_BYTES, slot * SLOT_STRIDE_BYTES + 24, bits=1)
    vote = opened(disk)
    assert not vote.is_durable
    version, record = vote.snapshot()
    vote.write(record)
    vote.mark_durable(version)
    assert vote.is_durable
    for spoilt in (0, SLOT_STRIDE_BYTES):
        copy = SimDisk(rng_stream(2))
        copy.names = {PATH: Inode(len(disk.names[PATH].content), reserve=True)}
        copy.names[PATH].content[:] = disk.names[PATH].content
        copy.flip(PATH, spoilt, spoilt + 24, bits=1)
        again = opened(copy)
        assert (again.term, again.voted_for) == (3, "n1")


@pytest.mark.parametrize("seed", range(30))
def test_power_cut_leaves_the_old_or_the_new_record(seed: int) -> None:
    disk = SimDisk(rng_stream(seed))
    vote = opened(disk)
    kept(vote, 3, "n0")
    mount = disk.mount()
    written = TermVote(SlotFile(mount, PATH))
    written.set(4, "n2")
    mount.take_off()
    written.write(written.snapshot()[1])
    disk.power_cut()
    again = opened(disk)
    assert (again.term, again.voted_for) in {(3, "n0"), (4, "n2")}


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ([2**61, "n0"], "2305843009213693952"),
        ([2**63 - 1, None], "beyond all numbers"),
        ([2**20_000, "n0"], "beyond all numbers"),
        ([-1, None], "beyond all numbers"),
        ([True, None], "beyond all numbers"),
        ([7, ""], "stored vote"),
        ([7, 9], "stored vote"),
        ([7], "not what this version writes"),
    ],
    ids=["62", "63", "huge", "-1", "flag", "empty", "number", "short"],
)
def test_term_or_vote_out_of_range_is_named_with_its_repair(record: object, complaint: str) -> None:
    with pytest.raises(CorruptStoreError, match=complaint) as raised:
        parse_term_vote(cbor2.dumps(record))
    if complaint != "not what this version writes":
        assert "dledger raft repair-term DIR" in str(raised.value)


@pytest.mark.parametrize("record", [(0, None), (TERM_MAX, "n0"), (7, "a name")], ids=repr)
def test_a_term_and_vote_in_range_are_read(record: tuple[int, str | None]) -> None:
    assert parse_term_vote(cbor2.dumps(list(record))) == record


def test_a_vote_that_changes_while_it_is_written_waits() -> None:
    """What was written is the vote before: the newer one is lost with the power."""
    disk = SimDisk(rng_stream(1))
    vote = opened(disk)
    vote.set(3, "n1")
    version, record = vote.snapshot()
    vote.set(4, "n2")
    vote.write(record)
    vote.mark_durable(version)
    assert (vote.durable_version, vote.is_durable) == (version, False)
    disk.power_cut()
    again = opened(disk)
    assert (again.term, again.voted_for) == (3, "n1")
