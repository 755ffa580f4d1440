"""New, stored, on its way, too old, too early: judged before anything is appended.

Idempotent producers: sessions, and repeated sends that are answered as the first attempt.
"""

import struct
from functools import partial
from typing import Any

import pytest

from dledger.broker_errors import (
    ProducerUnknownError,
    SequenceGapError,
    SequenceTooOldError,
    SequenceUndecidedError,
)
from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.record import encode_record
from dledger.commitlog.record_batch import BatchItem, encode_batch
from dledger.group_api import Proposed
from dledger.processors.idempotent_sends import ProducerSends, SendInFlight
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.own_fields import OPEN_SEQUENCES_MAX, ProducerStamp
from dledger.state.producer_sessions import SESSION_IDLE_MAX_MS, StoredSend
from dledger.state.state_record import (
    ProducerOpenedChange,
    ProducerSendChange,
    TopicsChange,
    behind_heads,
    state_record,
)
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup

ID = b"0123456789abcdef"


class Sender:
    """Judges and proposes as a processor does."""

    def __init__(self, group: FakeGroup) -> None:
        self.group = group
        self.sends = ProducerSends(group)
        self.reported: dict[str, Proposed] = {}
        self.epoch = self.open()

    def open(self) -> int:
        self.group.store(ProducerOpenedChange(ID))
        return self.group.state.applied_index

    def stamp(self, sequence: int, first_open: int | None = None) -> ProducerStamp:
        return ProducerStamp(
            ID, self.epoch, sequence, sequence if first_open is None else first_open
        )

    def propose(self, stamp: ProducerStamp, name: str = "") -> None:
        assert self.sends.judge(stamp) is None
        noted = state_record(ProducerSendChange(*stamp))
        record = encode_record(topic="T", queue_id=0, body=b"x", properties=b"")
        flight = SendInFlight(
            stamp, record, (), [lambda placed: self.reported.update({name: placed})]
        )
        batch = behind_heads([noted], RecordBatch.joined([record], [Run("T", 0, 1)]))
        settled = [partial(self.sends.settled, flight)]
        self.group.propose(batch, flight.answered, is_applied=False, settled=settled)
        self.sends.add(flight)


@pytest.fixture
def sender(group: FakeGroup) -> Sender:
    return Sender(group)


def test_a_send_that_was_not_stored_is_new_again(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    sender.group.step_down()
    assert sender.reported["first"].outcome == "not_stored"
    sender.group.lead()
    assert sender.sends.judge(sender.stamp(0)) is None


def test_an_answer_of_unknown_outcome_leaves_the_send_undecided(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    sender.group.append()
    sender.group.time_out()
    assert sender.reported["first"].outcome == "unknown"
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
    same.join(lambda placed: sender.reported.update(second=placed))
    assert sender.reported["second"] == sender.reported["first"]
    sender.group.apply()
    assert isinstance(sender.sends.judge(sender.stamp(0)), StoredSend)


def test_sends_of_an_epoch_that_is_over_are_forgotten(sender: Sender) -> None:
    sender.group.answers_early = True
    sender.propose(sender.stamp(7), "seventh")
    sender.group.append()
    sender.epoch = sender.open()
    assert sender.sends.judge(sender.stamp(0)) is None
    assert len(sender.sends) == 0


def test_a_stored_send_is_forgotten_whose_session_ended(sender: Sender) -> None:
    group = sender.group
    group.answers_early = True
    sender.propose(sender.stamp(7), "seventh")
    group.append()
    group.apply()
    # Nothing was judged until the session was closed.
    group.state.producers.open(b"y" * 16, 99, group.clock.wall_ms() + 2 * SESSION_IDLE_MAX_MS)
    with pytest.raises(ProducerUnknownError):
        sender.sends.judge(sender.stamp(8, 8))
    assert len(sender.sends) == 0


def test_after_a_change_of_leader_the_applied_sessions_decide(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    sender.group.append()
    sender.propose(sender.stamp(1, 0), "second")
    sender.group.step_down()
    assert sender.reported["first"].outcome == "unknown"
    assert sender.reported["second"].outcome == "not_stored"
    sender.group.lead()
    assert isinstance(sender.sends.judge(sender.stamp(0)), StoredSend)
    assert sender.sends.judge(sender.stamp(1, 0)) is None


def test_what_an_earlier_term_lost_is_new_again(sender: Sender) -> None:
    sender.propose(sender.stamp(0), "first")
    sender.group.append()
    sender.group.step_down()
    assert sender.reported["first"].outcome == "unknown"
    sender.group.log.truncate_from(sender.group.state.applied_index + 1)
    sender.group.lead()
    assert sender.sends.judge(sender.stamp(0)) is None


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
    # An entry of another producer is applied first, and closes the session by its store time.
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


RECORDS = RequestCode.SEND_RECORDS


def rec(queue_id: int = 0, body: bytes = b"hello", topic: str = "T", key: str = "K") -> bytes:
    properties = f"UNIQ_KEY\x01{key}\x02".encode()
    return encode_record(topic=topic, queue_id=queue_id, body=body, properties=properties)


def opened(broker: Broker, left: int = 0) -> int:
    ext = {"producerId": ID.hex(), "producerEpoch": str(left)}
    answer = broker.call(RequestCode.OPEN_PRODUCER, ext)
    assert answer.code == 0
    return int(answer.ext["producerEpoch"])


def records_request(
    stamp: list[Any] | None, runs: list[list[Any]], records: list[bytes]
) -> tuple[dict[str, Any], bytes]:
    body = struct.pack(f">{len(records)}I", *map(len, records)) + b"".join(records)
    return {"group": "p", "runs": runs, "timeout_ms": 3000, "producer": stamp}, body


def send(
    broker: Broker, stamp: list[Any] | None, runs: list[list[Any]], records: list[bytes]
) -> RemotingCommand:
    ext, body = records_request(stamp, runs, records)
    return broker.call(RECORDS, ext, body)


@pytest.fixture
def epoch(broker: Broker) -> int:
    broker.make_topic("T")
    return opened(broker)


def max_offset(broker: Broker, queue_id: int = 0) -> int:
    return broker.group.state.max_offset("T", queue_id)


def test_a_repeated_batch_is_stored_once_and_answered_alike(broker: Broker, epoch: int) -> None:
    runs = [["T", 1, 2], ["T", 0, 1]]
    records = [rec(1, b"a", key="K1"), rec(1, b"b", key="K2"), rec(0, b"c", key="K3")]
    send(broker, None, [["T", 1, 1]], [rec(1)])
    first = send(broker, [ID, epoch, 0, 0], runs, records)
    assert first.ext["results"] == [[0, 1], [0, 0]]
    again = send(broker, [ID, epoch, 0, 0], runs, records)
    assert (again.code, again.ext) == (0, first.ext)
    assert (max_offset(broker, 1), max_offset(broker)) == (3, 1)


def test_while_the_first_is_on_its_way_the_second_waits_for_it(broker: Broker, epoch: int) -> None:
    ext, body = records_request([ID, epoch, 0, 0], [["T", 0, 1]], [rec()])
    one, other = FakeConnection(), FakeConnection()
    assert broker.handle(request(RECORDS, dict(ext), body), one) is DEFERRED
    assert broker.handle(request(RECORDS, dict(ext), body), other) is DEFERRED
    assert broker.group.waiting == 1
    assert other.replies == []
    broker.group.settle()
    assert one.reply_.ext == other.reply_.ext
    assert one.reply_.ext["results"] == [[0, 0]]
    assert max_offset(broker) == 1


def test_repeat_is_refused_again_and_the_rest_found(broker: Broker, epoch: int) -> None:
    runs = [["T", 0, 1], ["T", 9, 1], ["T", 1, 1]]
    records = [rec(0, b"a"), rec(9, b"b"), rec(1, b"c")]
    first = send(broker, [ID, epoch, 0, 0], runs, records)
    assert [result[0] for result in first.ext["results"]] == [0, 29, 0]
    again = send(broker, [ID, epoch, 0, 0], runs, records)
    assert [result[:2] for result in again.ext["results"]] == [[0, 0], [2, -1], [0, 0]]
    assert again.ext["phy_offset"] == first.ext["phy_offset"]


def test_a_topic_made_by_the_first_is_made_once(broker: Broker, epoch: int) -> None:
    records = [rec(topic="New", body=b"x")]
    first = send(broker, [ID, epoch, 0, 0], [["New", 0, 1]], records)
    again = send(broker, [ID, epoch, 0, 0], [["New", 0, 1]], records)
    assert again.ext == first.ext
    assert broker.group.state.max_offset("New", 0) == 1


def test_a_topic_deleted_since_does_not_make_it_unstored(broker: Broker, epoch: int) -> None:
    first = send(broker, [ID, epoch, 0, 0], [["T", 0, 1]], [rec()])
    broker.group.store(TopicsChange(delete=("T",)))
    assert send(broker, [ID, epoch, 0, 0], [["T", 0, 1]], [rec()]).ext == first.ext


@pytest.mark.parametrize(
    ("runs", "records"),
    [
        ([["T", 0, 1]], [rec(body=b"other")]),
        ([["T", 0, 1]], [rec(key="other")]),
        ([["T", 2, 1]], [rec(2)]),
    ],
)
def test_another_message_under_the_same_sequence_is_refused(
    broker: Broker, epoch: int, runs: list[list[Any]], records: list[bytes]
) -> None:
    send(broker, [ID, epoch, 0, 0], [["T", 0, 1]], [rec()])
    answer = send(broker, [ID, epoch, 0, 0], runs, records)
    assert (answer.code, answer.ext["outcome"]) == (13, "not_stored")
    assert answer.ext["reason"] == "sequence_reused"
    assert max_offset(broker) == 1


def test_unknown_earlier_answer_is_reported(
    broker: Broker, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = send(broker, [ID, epoch, 0, 0], [["T", 0, 1]], [rec()])
    # The record is stored, but something else stands where it was.
    found = broker.group.log.record_at
    monkeypatch.setattr(
        broker.group.log, "record_at", lambda at: found(at)[:40] if at else found(at)
    )
    answer = send(broker, [ID, epoch, 0, 0], [["T", 0, 1]], [rec()])
    assert (answer.code, answer.ext["outcome"]) == (1, "unknown")
    assert answer.ext["reason"] == "sequence_too_old"
    assert broker.group.damage_reports == [(first.ext["phy_offset"], 1)]


@pytest.mark.parametrize(
    ("stamp", "code", "outcome", "reason"),
    [((0, 1, 0), 2, "not_stored", "sequence_gap"), ((1, 0, 0), 1, "unknown", "producer_unknown")],
)
def test_bad_stamp_is_answered_with_its_outcome(
    broker: Broker, epoch: int, stamp: tuple[int, int, int], code: int, outcome: str, reason: str
) -> None:
    later, sequence, first_open = stamp
    answer = send(broker, [ID, epoch + later, sequence, first_open], [["T", 0, 1]], [rec()])
    assert (answer.code, answer.ext["outcome"], answer.ext["reason"]) == (code, outcome, reason)
    assert max_offset(broker) == 0


@pytest.mark.parametrize(
    "stamp", [[ID, 1, 0], [b"short", 1, 0, 0], [ID, 0, 0, 0], [ID, 1, 0, 1], [ID, 1, "0", 0], "x"]
)
def test_what_is_no_stamp_is_refused(broker: Broker, epoch: int, stamp: Any) -> None:
    answer = send(broker, stamp, [["T", 0, 1]], [rec()])
    assert (answer.code, answer.ext["outcome"]) == (1, "not_stored")
    assert max_offset(broker) == 0


# -- RocketMQ's own requests -------------------------------------------------------------


def single(
    broker: Broker,
    epoch: int,
    sequence: int,
    *,
    properties: str = "UNIQ_KEY\x01K\x02",
    code: RequestCode = RequestCode.SEND_MESSAGE_V2,
    body: bytes = b"hello",
    queue_id: int = 0,
    connection: FakeConnection | None = None,
) -> RemotingCommand:
    ext = {"a": "p", "b": "T", "c": "TBW102", "d": "4", "e": str(queue_id), "f": "0", "g": "5"}
    ext |= {"h": "0", "i": properties}
    ext |= {
        "producerId": ID.hex(),
        "producerEpoch": str(epoch),
        "producerSequence": str(sequence),
        "producerFirstOpen": str(sequence),
    }
    return broker.call(code, ext, body, connection=connection)


def test_a_repeated_single_send_is_stored_once(broker: Broker, epoch: int) -> None:
    first = single(broker, epoch, 0)
    again = single(broker, epoch, 0, connection=FakeConnection(("10.9.9.9", 1)))
    assert first.code == 0
    assert again.ext == first.ext
    assert max_offset(broker) == 1
    assert single(broker, epoch, 1).ext["queueOffset"] == "1"


def test_a_repeated_delayed_send_waits_once(broker: Broker, epoch: int) -> None:
    properties = "UNIQ_KEY\x01K\x02DELAY\x013\x02"
    first = single(broker, epoch, 0, properties=properties, queue_id=2)
    again = single(broker, epoch, 0, properties=properties, queue_id=2)
    assert (again.code, again.ext) == (0, first.ext)
    assert first.ext["queueId"] == "2"
    assert broker.group.state.max_offset("SCHEDULE_TOPIC_XXXX", 2) == 1


def test_a_repeated_half_message_is_one_transaction(broker: Broker, epoch: int) -> None:
    properties = "UNIQ_KEY\x01K\x02TRAN_MSG\x01true\x02PGROUP\x01p\x02"
    first = single(broker, epoch, 0, properties=properties, queue_id=2)
    again = single(broker, epoch, 0, properties=properties, queue_id=2)
    assert (again.code, again.ext) == (0, first.ext)
    assert first.ext["transactionId"] == "K"
    assert (first.ext["queueId"], first.ext["queueOffset"]) == ("2", "0")
    assert list(broker.group.state.transactions.open) == [0]


def test_a_repeated_rocketmq_batch_is_stored_once(broker: Broker, epoch: int) -> None:
    body = encode_batch(
        [BatchItem(b"one", b"UNIQ_KEY\x01A\x02", 0), BatchItem(b"two", b"UNIQ_KEY\x01B\x02", 0)]
    )
    code = RequestCode.SEND_BATCH_MESSAGE
    first = single(broker, epoch, 0, code=code, body=body)
    again = single(broker, epoch, 0, code=code, body=body)
    assert (again.code, again.ext) == (0, first.ext)
    assert len(first.ext["msgId"].split(",")) == 2
    assert max_offset(broker) == 2


def test_half_message_under_way_answers_both_sends(broker: Broker, epoch: int) -> None:
    ext = {"a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "5", "h": "0"}
    ext |= {"i": "UNIQ_KEY\x01K\x02TRAN_MSG\x01true\x02", "producerId": ID.hex()}
    ext |= {"producerEpoch": str(epoch), "producerSequence": "0", "producerFirstOpen": "0"}
    one, other = FakeConnection(), FakeConnection()
    for connection in (one, other):
        command = request(RequestCode.SEND_MESSAGE_V2, dict(ext), b"x")
        assert broker.handle(command, connection) is DEFERRED
    broker.group.settle()
    assert one.reply_.ext == other.reply_.ext
    assert one.reply_.ext["transactionId"] == "K"


@pytest.mark.parametrize(
    "changed", [{"queue_id": -1}, {"properties": "KEYS\x01k\x02"}, {"epoch": 0}]
)
def test_unrecognisable_single_send_is_refused(
    broker: Broker, epoch: int, changed: dict[str, Any]
) -> None:
    answer = single(broker, changed.pop("epoch", epoch), 0, **changed)
    assert (answer.code, answer.ext["outcome"]) == (1, "not_stored")
    assert max_offset(broker) == 0


def test_sends_without_a_stamp_leave_no_trace(broker: Broker, group: FakeGroup) -> None:
    broker.make_topic("T")
    before = group.state.max_offset("RMQ_SYS_DLEDGER_STATE", 10)
    send(broker, None, [["T", 0, 1]], [rec()])
    assert group.state.max_offset("RMQ_SYS_DLEDGER_STATE", 10) == before == 0
    assert len(group.state.producers) == 0


NEW_ID = "30" * 16
OPEN = RequestCode.OPEN_PRODUCER


def epoch_of(answer: RemotingCommand) -> int:
    assert answer.code == 0
    return int(answer.ext["producerEpoch"])


def test_the_epoch_is_the_entry_that_opened_the_session(broker: Broker) -> None:
    epoch = epoch_of(broker.call(OPEN, {"producerId": NEW_ID}))
    assert epoch == broker.group.state.applied_index == 1
    session = broker.group.state.producers.get(bytes.fromhex(NEW_ID))
    assert session is not None
    assert session.epoch == epoch


def test_asking_again_opens_nothing(broker: Broker) -> None:
    epoch = epoch_of(broker.call(OPEN, {"producerId": NEW_ID, "producerEpoch": "0"}))
    assert epoch_of(broker.call(OPEN, {"producerId": NEW_ID, "producerEpoch": "0"})) == epoch
    assert broker.group.log.last_index == 1


def test_a_producer_that_leaves_its_epoch_gets_the_next_one(broker: Broker) -> None:
    first = epoch_of(broker.call(OPEN, {"producerId": NEW_ID}))
    second = epoch_of(broker.call(OPEN, {"producerId": NEW_ID, "producerEpoch": str(first)}))
    assert second > first
    # The same question again, its answer having been lost.
    again = broker.call(OPEN, {"producerId": NEW_ID, "producerEpoch": str(first)})
    assert epoch_of(again) == second


def test_questions_on_the_way_share_one_proposal(broker: Broker) -> None:
    one, other = FakeConnection(), FakeConnection()
    for connection in (one, other):
        assert broker.handle(request(OPEN, {"producerId": NEW_ID}), connection) is DEFERRED
    assert broker.group.waiting == 1
    broker.group.settle()
    assert epoch_of(one.reply_) == epoch_of(other.reply_) == 1


def test_what_is_no_id_is_refused(broker: Broker) -> None:
    for bad in ({}, {"producerId": "zz"}, {"producerId": "30"}):
        assert broker.call(OPEN, bad).ext["outcome"] == "not_stored"
    assert broker.call(OPEN, {"producerId": NEW_ID, "producerEpoch": "x"}).code == 1


def test_an_opening_that_is_not_stored_can_be_asked_for_again(broker: Broker) -> None:
    connection = FakeConnection()
    broker.handle(request(OPEN, {"producerId": NEW_ID}), connection)
    broker.group.step_down()
    assert connection.reply_.ext["outcome"] == "not_stored"
    broker.group.lead()
    assert epoch_of(broker.call(OPEN, {"producerId": NEW_ID})) == 1
