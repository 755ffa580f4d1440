"""The bookkeeping of reads that wait for proof of leadership."""

from __future__ import annotations

from dledger.broker_errors import NotLeaderError
from dledger.raft.barrier import ReadBarrier


def ignore(_: NotLeaderError | None) -> None:
    """Stand for a read."""


def asked(barrier: ReadBarrier, index: int = 1, deadline_s: float = 10.0) -> None:
    barrier.ask(index, deadline_s, ignore)


def test_a_heartbeat_that_left_before_the_read_proves_nothing() -> None:
    barrier = ReadBarrier()
    barrier.beat_left(1)
    asked(barrier)
    barrier.echoed("b", 1)
    assert barrier.wants_beat
    assert barrier.take_ready(barrier.confirmed(["b", "c"], 1), 9) == []
    barrier.beat_left(2)
    assert not barrier.wants_beat
    assert barrier.take_ready(barrier.confirmed(["b", "c"], 1), 9) == []
    barrier.echoed("c", 2)
    assert barrier.take_ready(barrier.confirmed(["b", "c"], 1), 9) == [ignore]
    assert len(barrier) == 0


def test_a_majority_is_needed_and_a_later_echo_counts_for_an_earlier_heartbeat() -> None:
    barrier = ReadBarrier()
    others = ["b", "c", "d", "e"]
    asked(barrier)
    barrier.beat_left(1)
    barrier.echoed("b", 1)
    barrier.echoed("b", 1)
    assert barrier.confirmed(others, 2) == 0
    barrier.beat_left(2)
    barrier.echoed("c", 2)
    assert barrier.confirmed(others, 2) == 1
    assert barrier.take_ready(1, 1) == [ignore]


def test_the_echo_of_one_who_is_no_voter_counts_for_nothing() -> None:
    barrier = ReadBarrier()
    asked(barrier)
    barrier.beat_left(1)
    barrier.echoed("learner", 1)
    barrier.echoed("b", 7)  # no heartbeat of this reign
    assert barrier.confirmed(["b", "c"], 1) == 0


def test_a_read_waits_until_its_index_is_applied() -> None:
    barrier = ReadBarrier()
    asked(barrier, index=5)
    barrier.beat_left(1)
    barrier.echoed("b", 1)
    assert barrier.take_ready(1, 4) == []
    assert barrier.take_ready(1, 5) == [ignore]


def test_reads_that_come_while_a_heartbeat_is_out_share_the_next() -> None:
    barrier = ReadBarrier()
    asked(barrier)
    barrier.beat_left(1)
    for _ in range(5):
        asked(barrier)
        assert not barrier.wants_beat
    barrier.echoed("b", 1)
    assert len(barrier.take_ready(1, 9)) == 1
    assert barrier.wants_beat
    barrier.beat_left(2)
    assert len(barrier.take_ready(2, 9)) == 5


def test_a_lost_heartbeat_is_made_good_by_the_regular_one() -> None:
    barrier = ReadBarrier()
    asked(barrier)
    barrier.beat_left(1)
    asked(barrier)
    barrier.beat_left(2)
    barrier.echoed("b", 2)
    assert len(barrier.take_ready(barrier.confirmed(["b"], 1), 9)) == 2


def test_alone_no_echo_is_needed() -> None:
    barrier = ReadBarrier()
    asked(barrier)
    barrier.beat_left(1)
    assert barrier.take_ready(barrier.confirmed([], 0), 1) == [ignore]


def test_time_and_reigns_end() -> None:
    barrier = ReadBarrier()
    asked(barrier, deadline_s=1.0)
    asked(barrier, deadline_s=2.0)
    assert barrier.take_expired(0.9) == []
    assert len(barrier.take_expired(1.0)) == 1
    barrier.beat_left(1)
    barrier.echoed("b", 1)
    assert barrier.end() == [ignore]
    asked(barrier)
    barrier.beat_left(2)
    assert barrier.confirmed(["b"], 1) == 0, "an echo of an earlier reign"
