"""What a follower acknowledges: what its disk holds of what was verified, of this log and term."""

from types import SimpleNamespace
from typing import Any

import pytest

from dledger.raft.acks import PendingAcks
from dledger.raft.wire import Kind


class State:
    """A member as far as its acknowledgements go, and what it sent."""

    def __init__(self) -> None:
        self.core = SimpleNamespace(term=3)
        self.journal = SimpleNamespace(
            log=SimpleNamespace(generation=0),
            stable_index=0,
            term_vote=SimpleNamespace(is_durable=True, version=0, durable_version=0),
        )
        self.guards = SimpleNamespace(durable_before_promise=True)
        self.has_hole = False
        self.peers = SimpleNamespace(reply=self._reply, send_made=self._send_made)
        self.sent: list[tuple[str, int]] = []
        self.voted: list[tuple[str, int]] = []

    def _reply(self, leader: str, kind: Kind, matches: bool, index: int) -> None:
        assert (kind, matches) == (Kind.APPEND_REPLY, True)
        self.sent.append((leader, index))

    def _send_made(self, peer: str, frame: Any) -> None:
        self.voted.append((peer, frame.term))


@pytest.fixture
def state() -> Any:
    return State()


@pytest.fixture
def acks(state: Any) -> PendingAcks:
    return PendingAcks(state)


def test_acknowledged_is_what_is_verified_and_stable(acks: PendingAcks, state: Any) -> None:
    acks.defer_ack("n1", 10)
    for stable, sent in ((4, [4]), (4, [4]), (12, [4, 10])):
        state.journal.stable_index = stable
        acks.release()
        assert state.sent == [("n1", index) for index in sent]
    acks.defer_ack("n1", 10)
    acks.release()
    assert state.sent[2:] == [("n1", 10)], "asked for again, answered again"


def test_log_that_was_cut_has_nothing_verified(acks: PendingAcks, state: Any) -> None:
    acks.defer_ack("n1", 10)
    state.journal.stable_index = 4
    acks.release()
    state.journal.log.generation += 1
    assert acks.verified_index("n1", 3) == 0
    state.journal.stable_index = 12
    acks.release()
    assert state.sent == [("n1", 4)]
    acks.defer_ack("n1", 6)
    acks.release()
    assert state.sent == [("n1", 4), ("n1", 6)]


def test_cut_between_two_appends_counts_without_a_release(acks: PendingAcks, state: Any) -> None:
    acks.defer_ack("n1", 10)
    state.journal.log.generation += 1
    state.journal.stable_index = 12
    acks.defer_ack("n1", 6)
    acks.release()
    assert state.sent == [("n1", 6)]


def test_later_term_and_other_leader_begin_again(acks: PendingAcks, state: Any) -> None:
    acks.defer_ack("n1", 10)
    state.core.term = 4
    state.journal.stable_index = 12
    acks.release()
    acks.defer_ack("n2", 3)
    acks.release()
    assert state.sent == [("n2", 3)]


@pytest.mark.parametrize("obstacle", ["vote", "hole"])
def test_nothing_is_acknowledged_before_the_disk_has_it(
    acks: PendingAcks, state: Any, obstacle: str
) -> None:
    state.journal.term_vote.is_durable = obstacle != "vote"
    state.has_hole = obstacle == "hole"
    state.journal.stable_index = 5
    acks.defer_ack("n1", 5)
    acks.release()
    assert state.sent == []
    state.journal.term_vote.is_durable, state.has_hole = True, False
    acks.release()
    assert state.sent == [("n1", 5)]


def test_vote_waits_for_the_version_it_was_given_in(acks: PendingAcks, state: Any) -> None:
    vote = state.journal.term_vote
    vote.version = 5
    acks.defer_vote("n1", Kind.VOTE_REPLY, 3, ())
    for durable, sent in ((4, []), (5, [("n1", 3)]), (6, [("n1", 3)])):
        vote.durable_version = durable
        acks.release()
        assert state.voted == sent


def test_vote_of_a_term_that_is_over_is_dropped(acks: PendingAcks, state: Any) -> None:
    acks.defer_vote("n1", Kind.VOTE_REPLY, 3, ())
    acks.defer_vote("n2", Kind.VOTE_REPLY, 4, ())
    state.core.term = 4
    acks.release()
    assert state.voted == [("n2", 4)]


def test_another_leader_is_acknowledged_what_it_sent(acks: PendingAcks, state: Any) -> None:
    acks.defer_ack("n1", 10)
    acks.defer_ack("n2", 4)
    state.journal.stable_index = 12
    acks.release()
    assert (state.sent, acks.verified_index("n2", 3)) == ([("n2", 4)], 4)
    assert acks.verified_index("n1", 3) == 0
