"""Transactions at the broker: half messages are invisible, decisions are taken once."""

from pathlib import Path
from typing import Any

import pytest

from dledger.commitlog.entry import ENTRY_HEADER_BYTES, SIZE_FIELD_BYTES
from dledger.commitlog.record import BODY_OFFSET, encode_record
from dledger.processors import send
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.topic_names import HALF_TOPIC, OP_HALF_TOPIC, STATE_TOPIC
from dledger.state.state_record import TopicsChange, TransactionsChange, decode_change, state_batch
from dledger.state.topics import TRANSACTIONS_QUEUE, TopicConfig
from dledger.state.transactions import TransactionDecision, TransactionTable
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import CLUSTER, FakeConnection, FakeGroup
from tests.harness.half_messages import (
    COMMIT,
    PROPERTIES,
    ROLLBACK,
    UNDECIDED,
    Half,
    begin,
    end,
    end_ext,
    records,
    send_half,
)
from tests.harness.rotten import flip_bit

IMMUNE = PROPERTIES + "CHECK_IMMUNITY_TIME_IN_SECONDS\x0130\x02"


def ask(broker: Broker, half: Half, decision: int, **changes: Any) -> FakeConnection:
    """End a transaction over a connection of its own; the answer may come later."""
    connection = FakeConnection()
    command = request(RequestCode.END_TRANSACTION, end_ext(half, decision, **changes))
    handled = broker.handle(command, connection)
    if handled is not DEFERRED:
        connection.reply(command, handled)
    return connection


def delete_topic(broker: Broker, topic: str = "T") -> None:
    broker.group.store(TopicsChange(delete=(topic,)))


@pytest.fixture
def half(broker: Broker) -> Half:
    broker.make_topic()
    return begin(broker)


# -- the half message ----------------------------------------------------------------------


def test_half_message_waits_outside_consumers_topics(broker: Broker) -> None:
    broker.make_topic()
    response = send_half(broker)
    assert (response.code, response.ext["queueId"], response.ext["queueOffset"]) == (0, "2", "0")
    assert response.ext["transactionId"] == "ABC"
    assert broker.group.state.max_offset("T", 2) == 0
    (half,) = records(broker.group, HALF_TOPIC, 0)
    # The bits of a prepared message would keep it out of the queue that the checks go through.
    assert (half.topic, half.queue_id, half.sys_flag) == (HALF_TOPIC, 0, 1)
    assert half.property_map == {
        "TRAN_MSG": "true", "PGROUP": "pg", "TAGS": "TagA", "UNIQ_KEY": "ABC", "CLUSTER": CLUSTER,
        "REAL_TOPIC": "T", "REAL_QID": "2",
    }  # fmt: skip


def test_the_topic_is_made_with_its_first_half_message(broker: Broker) -> None:
    begin(broker)
    config = broker.group.state.topic_config("T")
    assert config is not None
    assert config.write_queue_nums == 4


@pytest.mark.parametrize(
    ("changes", "code", "remark"),
    [
        ({"properties": PROPERTIES + "DELAY\x013\x02"}, 13, "cannot be delayed: it has DELAY"),
        ({"properties": PROPERTIES + "TIMER_DELAY_SEC\x013\x02"}, 13, "TIMER_DELAY_SEC"),
        ({"topic": "ReadOnly"}, 16, "forbidden"),
        ({"queueId": "9"}, 29, "illegal"),
    ],
)
def test_refused_half_message_names_its_reason(
    broker: Broker, changes: dict[str, Any], code: int, remark: str
) -> None:
    broker.make_topic()
    broker.make_topic("ReadOnly", perm=4)
    response = send_half(broker, **changes)
    assert (response.code, response.ext["outcome"]) == (code, "not_stored")
    assert remark in (response.remark or "")
    assert broker.group.state.transactions == TransactionTable()


def test_a_broker_may_refuse_transactions(group: FakeGroup) -> None:
    broker = Broker(group, reject_transaction_message=True)
    broker.make_topic()
    response = send_half(broker)
    assert (response.code, response.ext["outcome"]) == (16, "not_stored")
    assert send_half(broker, properties="A\x01b\x02").code == 0


def test_too_many_open_transactions_are_refused_for_now(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.make_topic()
    monkeypatch.setattr(send, "MAX_OPEN_HALVES", 2)
    first = begin(broker)
    begin(broker)
    response = send_half(broker)
    assert (response.code, response.ext["outcome"]) == (2, "not_stored")
    assert response.ext["retriable"] == "true"
    assert end(broker, first, ROLLBACK).code == 0
    assert send_half(broker).code == 0


def test_a_message_consumed_again_is_no_half_message(broker: Broker) -> None:
    broker.make_topic("%RETRY%g", 1)
    response = send_half(
        broker, topic="%RETRY%g", queueId="0", reconsumeTimes="1", maxReconsumeTimes="16"
    )
    assert response.code == 0
    assert "transactionId" not in response.ext
    assert broker.group.state.max_offset("%RETRY%g", 0) == 1
    assert not broker.group.state.transactions.open


# -- the decision --------------------------------------------------------------------------


def test_a_commit_puts_the_message_into_its_queue(broker: Broker, half: Half) -> None:
    before = broker.group.log.last_index
    response = end(broker, half, COMMIT)
    assert (response.code, response.ext) == (0, {})
    (message,) = records(broker.group, "T", 2)
    assert (bytes(message.body), message.flag, message.sys_flag) == (b"body", 77, 1 | COMMIT)
    assert message.prepared_transaction_offset == half.position
    assert (message.born_timestamp_ms, message.queue_offset) == (1699999999000, 0)
    (stored,) = records(broker.group, HALF_TOPIC, 0)
    assert message.properties == stored.properties
    assert message.born_host == stored.born_host
    assert broker.group.log.last_index == before + 1  # message and decision are one entry


def test_the_decision_is_a_record_beside_the_message(broker: Broker, half: Half) -> None:
    end(broker, half, COMMIT)
    assert broker.group.state.transactions.decided == {half.offset: COMMIT}
    assert not broker.group.state.transactions.open
    (record,) = records(broker.group, STATE_TOPIC, TRANSACTIONS_QUEUE)
    assert decode_change(TRANSACTIONS_QUEUE, record.body) == TransactionsChange(
        decided=((half.offset, TransactionDecision.COMMIT),)
    )
    assert broker.group.state.max_offset(OP_HALF_TOPIC, 0) == 0


def test_a_rollback_brings_nothing_into_the_world(broker: Broker, half: Half) -> None:
    assert end(broker, half, ROLLBACK).code == 0
    assert broker.group.state.max_offset("T", 2) == 0
    assert broker.group.state.transactions.decided == {half.offset: ROLLBACK}


def test_not_to_know_changes_nothing(broker: Broker, half: Half) -> None:
    before = broker.group.log.last_index
    assert end(broker, half, UNDECIDED).code == 0
    broker.group.settle()
    assert broker.group.log.last_index == before
    assert list(broker.group.state.transactions.open) == [half.offset]


def test_the_first_decision_stands(broker: Broker, half: Half) -> None:
    end(broker, half, ROLLBACK)
    before = broker.group.log.last_index
    assert end(broker, half, ROLLBACK).code == 0
    refused = end(broker, half, COMMIT)
    assert (refused.code, refused.ext["outcome"]) == (1, "not_stored")
    assert refused.ext["decision"] == "rollback"
    broker.group.settle()
    assert broker.group.log.last_index == before
    assert broker.group.state.max_offset("T", 2) == 0


def test_decisions_in_flight_count(broker: Broker, half: Half) -> None:
    first, again = ask(broker, half, COMMIT), ask(broker, half, COMMIT)
    other = ask(broker, half, ROLLBACK)
    assert (other.reply_.code, other.reply_.ext["decision"]) == (1, "commit")
    assert (first.replies, again.replies) == ([], [])
    broker.group.settle()
    assert (first.reply_.code, again.reply_.code) == (0, 0)
    assert broker.group.state.max_offset("T", 2) == 1


def test_a_decision_that_is_not_stored_may_be_taken_again(broker: Broker, half: Half) -> None:
    first, again = ask(broker, half, COMMIT), ask(broker, half, COMMIT)
    broker.group.step_down("10.0.0.2:10911")
    for connection in (first, again):
        assert connection.reply_.code == 14
        assert connection.reply_.ext["outcome"] == "not_stored"
    broker.group.lead()
    assert end(broker, half, ROLLBACK).code == 0
    assert broker.group.state.transactions.decided == {half.offset: ROLLBACK}


def test_committed_decision_of_an_earlier_leader_stands(broker: Broker, half: Half) -> None:
    first = ask(broker, half, COMMIT)
    broker.group.append()
    broker.group.step_down()
    assert first.reply_.ext["outcome"] == "unknown"
    broker.group.lead()  # with what was appended
    assert end(broker, half, ROLLBACK).ext["decision"] == "commit"
    assert end(broker, half, COMMIT).code == 0
    assert broker.group.state.max_offset("T", 2) == 1


def test_decision_without_a_majority_is_unknown(broker: Broker, half: Half) -> None:
    first = ask(broker, half, COMMIT)
    broker.group.append()
    broker.group.time_out()
    assert first.reply_.ext["outcome"] == "unknown"
    again = ask(broker, half, COMMIT)
    assert (again.reply_.ext["outcome"], again.reply_.ext["retriable"]) == ("unknown", "true")
    assert ask(broker, half, ROLLBACK).reply_.code == 1
    broker.group.apply()
    assert end(broker, half, COMMIT).code == 0
    assert len(broker.processors.transactions) == 0
    assert broker.group.state.max_offset("T", 2) == 1


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"producerGroup": "other"}, "the producer group is wrong: other, the half has pg"),
        ({"tranStateTableOffset": "1"}, "the transaction state table offset is wrong"),
        ({"commitLogOffset": "0"}, "no half message stands at 0"),
        ({"commitLogOffset": "999999"}, "no half message stands at 999999"),
        ({"commitLogOffset": "-1"}, "no half message stands at -1"),
        ({"commitOrRollback": "4"}, "commitOrRollback 4 is neither"),
    ],
)
def test_an_end_must_fit_its_half_message(
    broker: Broker, changes: dict[str, Any], remark: str
) -> None:
    broker.make_topic()
    half = begin(broker)
    response = end(broker, half, COMMIT, **changes)
    assert (response.code, response.ext["outcome"]) == (1, "not_stored")
    assert remark in (response.remark or "")
    assert list(broker.group.state.transactions.open) == [half.offset]


def test_only_half_messages_are_ended(broker: Broker) -> None:
    broker.make_topic()
    response = send_half(broker, properties="PGROUP\x01pg\x02UNIQ_KEY\x01ABC\x02")
    (message,) = records(broker.group, "T", 2)
    assert response.code == 0
    assert end(broker, Half(0, message.phy_offset), COMMIT).code == 1
    assert broker.group.state.max_offset("T", 2) == 1


def test_what_is_not_applied_cannot_be_ended(broker: Broker) -> None:
    broker.make_topic()
    first = begin(broker)
    ext = end_ext(Half(1, broker.group.log.end_position), COMMIT)
    assert broker.call(RequestCode.END_TRANSACTION, ext).code == 1
    assert list(broker.group.state.transactions.open) == [first.offset]


def test_a_topic_deleted_since_keeps_the_transaction_open(broker: Broker, half: Half) -> None:
    delete_topic(broker)
    response = end(broker, half, COMMIT)
    assert (response.code, response.ext["outcome"]) == (17, "not_stored")
    assert list(broker.group.state.transactions.open) == [half.offset]
    broker.make_topic(queues=1)
    response = end(broker, half, COMMIT)
    assert (response.code, response.ext["outcome"]) == (17, "not_stored")
    assert broker.group.state.max_offset("T", 0) == 0, "it was not meant for the new topic"
    assert end(broker, half, ROLLBACK).code == 0


def test_a_topic_being_deleted_takes_no_commit(broker: Broker, half: Half) -> None:
    ext = {"topic": "T"}
    assert broker.handle(request(RequestCode.DELETE_TOPIC_IN_BROKER, ext)) is DEFERRED
    assert ask(broker, half, COMMIT).reply_.code == 17
    broker.group.settle()
    assert end(broker, half, ROLLBACK).code == 0


def test_a_topic_closed_to_senders_still_takes_a_commit(broker: Broker, half: Half) -> None:
    config = TopicConfig("T", 4, 4, 4)
    broker.group.store(TopicsChange(put=(config,)))
    assert end(broker, half, COMMIT).code == 0
    assert broker.group.state.max_offset("T", 2) == 1


def test_answer_to_a_check_may_not_come_before_its_time(broker: Broker, clock: ManualClock) -> None:
    broker.make_topic()
    half = begin(broker, properties=IMMUNE)
    clock.now_s = 29.9
    early = end(broker, half, COMMIT, fromTransactionCheck="true")
    assert (early.code, early.ext["outcome"]) == (604, "not_stored")
    clock.now_s = 30
    assert end(broker, half, COMMIT, fromTransactionCheck="true").code == 0


def test_answer_to_a_question_counts_by_a_clock_that_went_back(
    broker: Broker, clock: ManualClock
) -> None:
    """Else a half message whose producer answers each time is given up at last."""
    broker.make_topic()
    half = begin(broker, properties=IMMUNE)
    clock.skew_ms = -3_600_000
    early = end(broker, half, COMMIT, fromTransactionCheck="true")
    assert (early.code, early.ext["outcome"]) == (604, "not_stored")
    counted = state_batch(TransactionsChange(checked=((half.offset, 1),)))
    broker.group.propose(counted, lambda _: None)
    broker.group.settle()
    assert end(broker, half, COMMIT, fromTransactionCheck="true").code == 0
    assert broker.group.state.max_offset("T", 2) == 1


def test_the_producer_itself_may_decide_at_any_time(broker: Broker) -> None:
    broker.make_topic()
    half = begin(broker, properties=IMMUNE)
    assert end(broker, half, COMMIT, fromTransactionCheck="false").code == 0


def test_a_decision_of_long_ago_is_not_taken_again(broker: Broker, half: Half) -> None:
    end(broker, half, COMMIT)
    broker.group.state.transactions.decided.clear()
    response = end(broker, half, COMMIT)
    assert (response.code, response.ext["outcome"]) == (1, "not_stored")
    assert "decided so long ago" in (response.remark or "")
    assert broker.group.state.max_offset("T", 2) == 1


def test_damaged_half_message_is_repaired_first(broker: Broker, half: Half, tmp_path: Path) -> None:
    flip_bit(tmp_path, half.position + BODY_OFFSET)
    response = end(broker, half, COMMIT)
    assert (response.code, response.ext["outcome"]) == (14, "not_stored")
    assert response.ext["retriable"] == "true"
    assert broker.group.damage_reports == [(half.position, 1)]
    flip_bit(tmp_path, half.position + BODY_OFFSET)
    assert end(broker, half, COMMIT).code == 0


def test_forged_half_message_decides_nothing(broker: Broker, half: Half) -> None:
    # A record inside the body of a message: no byte of it was ever checked.
    entry_log = broker.group.log
    at = entry_log.end_position + ENTRY_HEADER_BYTES + SIZE_FIELD_BYTES + BODY_OFFSET
    forged = encode_record(
        topic=HALF_TOPIC,
        queue_id=0,
        body=b"forged",
        properties=b"PGROUP\x01pg\x02REAL_TOPIC\x01T\x02REAL_QID\x010\x02",
        queue_offset=half.offset,
        phy_offset=at,
    )
    broker.group.put("T", 3, forged)
    response = end(broker, half._replace(position=at), COMMIT)
    assert response.code == 1
    assert f"no record begins at {at}" in (response.remark or "")
    assert list(broker.group.state.transactions.open) == [half.offset]


def test_clients_cannot_look_into_the_future_of_a_queue(broker: Broker, half: Half) -> None:

    def end_of_queue() -> RemotingCommand:
        return broker.call(RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": "2"})

    assert end_of_queue().ext["offset"] == "0"
    end(broker, half, COMMIT)
    assert end_of_queue().ext["offset"] == "1"


def test_every_decision_has_its_number_on_the_wire() -> None:
    assert (TransactionDecision.COMMIT, TransactionDecision.ROLLBACK) == (COMMIT, ROLLBACK)
