"""Opening a session: once for a producer, however often it asks."""

from __future__ import annotations

from remoting.processor import DEFERRED
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection

ID = "30" * 16
OPEN = RequestCode.OPEN_PRODUCER


def epoch_of(answer: RemotingCommand) -> int:
    assert answer.code == 0
    return int(answer.ext["producerEpoch"])


def test_the_epoch_is_the_entry_that_opened_the_session(broker: Broker) -> None:
    epoch = epoch_of(broker.call(OPEN, {"producerId": ID}))
    assert epoch == broker.group.state.applied_index == 1
    session = broker.group.state.producers.get(bytes.fromhex(ID))
    assert session is not None
    assert session.epoch == epoch


def test_asking_again_opens_nothing(broker: Broker) -> None:
    epoch = epoch_of(broker.call(OPEN, {"producerId": ID, "producerEpoch": "0"}))
    assert epoch_of(broker.call(OPEN, {"producerId": ID, "producerEpoch": "0"})) == epoch
    assert broker.group.log.last_index == 1


def test_a_producer_that_leaves_its_epoch_gets_the_next_one(broker: Broker) -> None:
    first = epoch_of(broker.call(OPEN, {"producerId": ID}))
    second = epoch_of(broker.call(OPEN, {"producerId": ID, "producerEpoch": str(first)}))
    assert second > first
    # The same question again, its answer having been lost.
    again = broker.call(OPEN, {"producerId": ID, "producerEpoch": str(first)})
    assert epoch_of(again) == second


def test_questions_on_the_way_share_one_proposal(broker: Broker) -> None:
    one, other = FakeConnection(), FakeConnection()
    for connection in (one, other):
        assert broker.handle(request(OPEN, {"producerId": ID}), connection) is DEFERRED
    assert broker.group.waiting == 1
    broker.group.settle()
    assert epoch_of(one.reply_) == epoch_of(other.reply_) == 1


def test_with_early_answers_a_session_is_told_when_it_is_applied(broker: Broker) -> None:
    broker.group.answers_early = True
    connection = FakeConnection()
    assert broker.handle(request(OPEN, {"producerId": ID}), connection) is DEFERRED
    broker.group.append()
    assert connection.replies == []
    broker.group.apply()
    assert epoch_of(connection.reply_) == 1


def test_what_is_no_id_is_refused_and_only_the_leader_opens(broker: Broker) -> None:
    for bad in ({}, {"producerId": "zz"}, {"producerId": "30"}):
        assert broker.call(OPEN, bad).ext["outcome"] == "not_stored"
    assert broker.call(OPEN, {"producerId": ID, "producerEpoch": "x"}).code == 1
    broker.group.step_down("10.0.0.2:10911")
    answer = broker.call(OPEN, {"producerId": ID})
    assert (answer.code, answer.ext["leaderAddr"]) == (14, "10.0.0.2:10911")


def test_an_opening_that_is_not_stored_can_be_asked_for_again(broker: Broker) -> None:
    connection = FakeConnection()
    broker.handle(request(OPEN, {"producerId": ID}), connection)
    broker.group.step_down()
    assert connection.reply_.ext["outcome"] == "not_stored"
    broker.group.lead()
    assert epoch_of(broker.call(OPEN, {"producerId": ID})) == 1
