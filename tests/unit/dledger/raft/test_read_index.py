"""The bookkeeping of reads that wait for proof of leadership."""

from dledger.broker_errors import NotLeaderError
from dledger.raft.read_index import ReadIndex


def ignore(_: NotLeaderError | None) -> None:
    """Stand for a read."""


def asked(reads: ReadIndex, index: int = 1, deadline_s: float = 10.0) -> None:
    reads.add(index, deadline_s, ignore)


def test_a_heartbeat_that_left_before_the_read_proves_nothing() -> None:
    reads = ReadIndex()
    reads.heartbeat_sent(1)
    asked(reads)
    reads.heartbeat_echoed("b", 1)
    assert reads.needs_heartbeat
    assert reads.pop_ready(reads.confirmed(["b", "c"], 1), 9) == []
    reads.heartbeat_sent(2)
    assert not reads.needs_heartbeat
    assert reads.pop_ready(reads.confirmed(["b", "c"], 1), 9) == []
    reads.heartbeat_echoed("c", 2)
    assert reads.pop_ready(reads.confirmed(["b", "c"], 1), 9) == [ignore]
    assert len(reads) == 0


def test_later_echo_counts_for_an_earlier_heartbeat() -> None:
    reads = ReadIndex()
    others = ["b", "c", "d", "e"]
    asked(reads)
    reads.heartbeat_sent(1)
    reads.heartbeat_echoed("b", 1)
    reads.heartbeat_echoed("b", 1)
    assert reads.confirmed(others, 2) == 0
    reads.heartbeat_sent(2)
    reads.heartbeat_echoed("c", 2)
    assert reads.confirmed(others, 2) == 1
    assert reads.pop_ready(1, 1) == [ignore]


def test_echo_of_a_non_voter_counts_nothing() -> None:
    reads = ReadIndex()
    asked(reads)
    reads.heartbeat_sent(1)
    reads.heartbeat_echoed("learner", 1)
    reads.heartbeat_echoed("b", 7)  # no heartbeat of this term
    assert reads.confirmed(["b", "c"], 1) == 0


def test_a_read_waits_until_its_index_is_applied() -> None:
    reads = ReadIndex()
    asked(reads, index=5)
    reads.heartbeat_sent(1)
    reads.heartbeat_echoed("b", 1)
    assert reads.pop_ready(1, 4) == []
    assert reads.pop_ready(1, 5) == [ignore]


def test_reads_that_come_while_a_heartbeat_is_out_share_the_next() -> None:
    reads = ReadIndex()
    asked(reads)
    reads.heartbeat_sent(1)
    for _ in range(5):
        asked(reads)
        assert not reads.needs_heartbeat
    reads.heartbeat_echoed("b", 1)
    assert len(reads.pop_ready(1, 9)) == 1
    assert reads.needs_heartbeat
    reads.heartbeat_sent(2)
    assert len(reads.pop_ready(2, 9)) == 5


def test_a_lost_heartbeat_is_made_good_by_the_regular_one() -> None:
    reads = ReadIndex()
    asked(reads)
    reads.heartbeat_sent(1)
    asked(reads)
    reads.heartbeat_sent(2)
    reads.heartbeat_echoed("b", 2)
    assert len(reads.pop_ready(reads.confirmed(["b"], 1), 9)) == 2


def test_alone_no_echo_is_needed() -> None:
    reads = ReadIndex()
    asked(reads)
    reads.heartbeat_sent(1)
    assert reads.pop_ready(reads.confirmed([], 0), 1) == [ignore]


def test_reads_end_with_their_deadline_and_the_term() -> None:
    reads = ReadIndex()
    asked(reads, deadline_s=1.0)
    asked(reads, deadline_s=2.0)
    assert reads.pop_expired(0.9) == []
    assert len(reads.pop_expired(1.0)) == 1
    reads.heartbeat_sent(1)
    reads.heartbeat_echoed("b", 1)
    assert reads.clear() == [ignore]
    asked(reads)
    reads.heartbeat_sent(2)
    assert reads.confirmed(["b"], 1) == 0, "an echo of an earlier term"
