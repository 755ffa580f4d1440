"""New, stored, on its way, too old, too early: judged before anything is appended."""

from __future__ import annotations

import numpy as np
import pytest

from commitlog.entry import RecordBatch, Run
from commitlog.record import encode_record
from dledger.broker_errors import (
    ProducerUnknownError,
    SequenceGapError,
    SequenceTooOldError,
    SequenceUndecidedError,
)
from dledger.group_api import Proposed
from dledger.services.producer_sends import ProducerSends, SendInFlight, behind
from dledger.state.producer_sessions import SESSION_IDLE_MAX_MS, StoredSend
from dledger.state.state_record import (
    ProducerOpenedChange,
    ProducerSendChange,
    state_batch,
    state_record,
)
from remoting.protocol.producer_stamp import OPEN_SEQUENCES_MAX, ProducerStamp
from tests.harness.fake_group import FakeGroup

ID = b"0123456789abcdef"


class Sender:
    """Judges and proposes as a processor does."""

    def __init__(self, group: FakeGroup) -> None:
        self.group = group
        self.sends = ProducerSends(group)
        self.told: dict[str, Proposed] = {}
        self.epoch = self.open()

    def open(self) -> int:
        self.group.propose(state_batch(ProducerOpenedChange(ID)), lambda _: None)
        self.group.settle()
        return self.group.state.applied_index

    def stamp(self, sequence: int, first_open: int | None = None) -> ProducerStamp:
        return ProducerStamp(
            ID, self.epoch, sequence, sequence if first_open is None else first_open
        )

    def propose(self, stamp: ProducerStamp, name: str = "") -> None:
        assert self.sends.judge(stamp) is None
        noted = state_record(ProducerSendChange(*stamp))
        record = encode_record(topic="T", queue_id=0, body=b"x", properties=b"")
        flight = SendInFlight(record, (), [lambda placed: self.told.update({name: placed})])
        batch = RecordBatch(
            noted.record + record,
            np.array([len(noted.record), len(record)], np.uint32),
            (noted.run, Run("T", 0, 1)),
        )
        size = len(noted.record)
        self.group.propose(
            batch, lambda done: self.sends.answered(stamp, flight, behind(done, 1, size))
        )
        self.sends.add(stamp, flight)


@pytest.fixture
def sender(group: FakeGroup) -> Sender:
    return Sender(group)


def test_a_stored_send_is_found_where_its_first_attempt_stands(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    sender.group.settle()
    placed = sender.told["first"]
    assert sender.sends.judge(sender.stamp(0)) == StoredSend(placed.phy_offset)
    assert placed.first_offsets == (0,)
    assert len(sender.sends) == 0


def test_a_repetition_on_the_way_waits_for_the_same_proposal(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    same = sender.sends.judge(sender.stamp(0))
    assert isinstance(same, SendInFlight)
    same.join(lambda placed: sender.told.update(second=placed))
    assert sender.group.waiting == 1
    sender.group.settle()
    assert sender.told["first"] == sender.told["second"]
    assert sender.told["first"].outcome == "stored"


def test_a_send_that_was_not_stored_is_new_again(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    sender.group.step_down()
    assert sender.told["first"].outcome == "not_stored"
    sender.group.lead()
    assert sender.sends.judge(sender.stamp(0)) is None


def test_an_answer_of_unknown_outcome_leaves_the_send_undecided(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    sender.group.append()
    sender.group.time_out()
    assert sender.told["first"].outcome == "unknown"
    with pytest.raises(SequenceUndecidedError, match="send 0 is on its way"):
        sender.sends.judge(sender.stamp(0))
    sender.group.apply()
    assert isinstance(sender.sends.judge(sender.stamp(0)), StoredSend)
    assert len(sender.sends) == 0


def test_an_answer_before_the_apply_is_given_again(sender: Sender) -> None:
    sender.group.answers_early = True
    sender.propose(sender.stamp(0), "first")
    sender.group.append()
    same = sender.sends.judge(sender.stamp(0))
    assert isinstance(same, SendInFlight)
    same.join(lambda placed: sender.told.update(second=placed))
    assert sender.told["second"] == sender.told["first"]
    sender.group.apply()
    assert isinstance(sender.sends.judge(sender.stamp(0)), StoredSend)


def test_after_a_change_of_leader_the_applied_sessions_decide(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    sender.group.append()
    sender.propose(sender.stamp(1, 0), "second")
    sender.group.step_down()
    assert sender.told["first"].outcome == "unknown"
    assert sender.told["second"].outcome == "not_stored"
    sender.group.lead()
    assert isinstance(sender.sends.judge(sender.stamp(0)), StoredSend)
    assert sender.sends.judge(sender.stamp(1, 0)) is None


def test_send_after_a_gap_is_not_stored(sender: Sender) -> None:
    with pytest.raises(SequenceGapError, match="send 0 comes before it") as caught:
        sender.sends.judge(sender.stamp(1, 0))
    assert (caught.value.outcome, caught.value.retriable) == ("not_stored", True)
    sender.propose(sender.stamp(0))
    assert sender.sends.judge(sender.stamp(1, 0)) is None  # in flight is there
    assert sender.sends.judge(sender.stamp(5, 5)) is None  # the ones before were given up


def test_too_many_open_sequences_are_refused(sender: Sender) -> None:
    with pytest.raises(SequenceGapError, match=f"at most {OPEN_SEQUENCES_MAX}"):
        sender.sends.judge(sender.stamp(OPEN_SEQUENCES_MAX, 0))


def test_a_send_the_producer_has_settled_cannot_be_judged(sender: Sender) -> None:
    sender.propose(sender.stamp(7, 7))
    with pytest.raises(SequenceTooOldError) as caught:  # the later one is only in flight yet
        sender.sends.judge(sender.stamp(6, 6))
    assert (caught.value.outcome, caught.value.retriable) == ("unknown", False)
    sender.group.settle()
    with pytest.raises(SequenceTooOldError):
        sender.sends.judge(sender.stamp(6, 6))


def test_producer_of_another_epoch_is_unknown(sender: Sender) -> None:
    with pytest.raises(ProducerUnknownError) as caught:
        sender.sends.judge(ProducerStamp(b"x" * 16, sender.epoch, 0, 0))
    assert (caught.value.outcome, caught.value.retriable) == ("unknown", False)
    old = sender.stamp(0)
    sender.epoch = sender.open()
    with pytest.raises(ProducerUnknownError, match=f"has epoch {sender.epoch} now"):
        sender.sends.judge(old)
    assert sender.sends.judge(sender.stamp(0)) is None


def test_of_an_expired_session_only_what_is_on_its_way_is_known(sender: Sender) -> None:
    group = sender.group
    sender.propose(sender.stamp(0))
    group.settle()
    group.clock.now_s += SESSION_IDLE_MAX_MS / 1000 + 1  # type: ignore[union-attr]  # it is the manual clock
    sender.propose(sender.stamp(1, 0))
    # Somebody else's entry is applied first, and closes the session by its store time.
    group.state.producers.open(b"y" * 16, 99, group.clock.wall_ms())
    assert group.state.producers.get(ID) is None
    assert isinstance(sender.sends.judge(sender.stamp(1, 0)), SendInFlight)
    with pytest.raises(SequenceTooOldError):
        sender.sends.judge(sender.stamp(0, 0))
    assert sender.sends.judge(sender.stamp(2, 0)) is None
    group.settle()
    assert isinstance(sender.sends.judge(sender.stamp(1, 1)), StoredSend)
    with pytest.raises(SequenceTooOldError):
        sender.sends.judge(sender.stamp(0, 0))
