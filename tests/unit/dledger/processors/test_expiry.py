"""Messages with a time to live: sends that mark their topic, reads that pass expired ones over."""

from typing import Any

import pytest

from dledger.commitlog.record import encode_record
from dledger.commitlog.record_batch import BatchItem, encode_batch
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import TopicConfig, TopicConfigList
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.state import topics as state
from dledger.state.state_record import TopicsChange
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker, topic_fields
from tests.harness.fake_group import FakeGroup
from tests.harness.pops import ack, answer_of, answered, pop
from tests.harness.pops import handles as handles_of
from tests.harness.pops import hold as hold_pop
from tests.harness.present import present
from tests.harness.pulls import command, found, hold
from tests.harness.pulls import pull as pull_of
from tests.unit.dledger.processors.test_send import ext

EXPIRING = {"message.expires": "true"}


@pytest.fixture
def broker(group: FakeGroup) -> Broker:
    broker = Broker(group)
    broker.make_topic("T", queues=1)
    return broker


def send(broker: Broker, body: bytes, properties: str = "", **changes: Any) -> RemotingCommand:
    fields = ext(**{"queue_id": "0", "properties": properties, **changes})
    return broker.call(RequestCode.SEND_MESSAGE_V2, fields, body)


def expiring(after_ms: object, more: str = "") -> str:
    return f"{more}EXPIRE_AFTER_MS\x01{after_ms}\x02"


def pull(broker: Broker, **changes: Any) -> RemotingCommand:
    return pull_of(broker, **{"queueId": "0", **changes})


def attributes(broker: Broker, topic: str = "T") -> dict[str, str]:
    config = present(broker.group.state.topic_config(topic))
    return dict(config.attributes)


def test_expired_message_is_passed_over_as_a_filtered_one(
    broker: Broker, clock: ManualClock
) -> None:
    for body, properties in ((b"a", ""), (b"b", expiring(500)), (b"c", "")):
        assert send(broker, body, properties).code == 0
    assert found(pull(broker)) == [b"a", b"b", b"c"]
    clock.now_s += 0.499
    assert found(pull(broker)) == [b"a", b"b", b"c"]
    clock.now_s += 0.001
    answer = pull(broker)
    assert found(answer) == [b"a", b"c"]
    assert answer.ext["nextBeginOffset"] == "3"
    assert broker.processors.throughput.expired == 1


def test_queue_of_expired_messages_is_read_to_its_end(broker: Broker, clock: ManualClock) -> None:
    for number in range(5):
        send(broker, b"%d" % number, expiring(10))
    clock.now_s += 1
    answer = pull(broker)
    assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert (answer.ext["nextBeginOffset"], answer.ext["maxOffset"]) == ("5", "5")
    assert pull(broker, queueOffset="5").code == ResponseCode.PULL_NOT_FOUND
    assert broker.group.state.min_offset("T", 0) == 0, "the log keeps them"


def test_pull_that_asks_for_expired_ones_gets_all(broker: Broker, clock: ManualClock) -> None:
    send(broker, b"a", expiring(10))
    clock.now_s += 1
    assert found(pull(broker, withExpired="true")) == [b"a"]
    assert broker.processors.throughput.expired == 0


def test_tags_are_compared_beside_the_time(broker: Broker, clock: ManualClock) -> None:
    send(broker, b"a", expiring(10, "TAGS\x01x\x02"))
    send(broker, b"b", expiring(9999, "TAGS\x01x\x02"))
    send(broker, b"c", expiring(9999, "TAGS\x01y\x02"))
    send(broker, b"d", "TAGS\x01y\x02")
    clock.now_s += 1
    assert found(pull(broker, subscription="x")) == [b"b"]
    assert found(pull(broker, subscription="y")) == [b"c", b"d"]
    assert found(pull(broker, subscription="x || y")) == [b"b", b"c", b"d"]


def test_expression_is_evaluated_beside_the_time(broker: Broker, clock: ManualClock) -> None:
    send(broker, b"a", expiring(10, "size\x015\x02"))
    for body, size in ((b"b", 5), (b"c", 1)):
        send(broker, body, f"size\x01{size}\x02")
    clock.now_s += 1
    wanted = {"expressionType": "SQL92", "subscription": "size > 3"}
    assert found(pull(broker, **wanted)) == [b"b"]


def test_clock_behind_the_newest_message_expires_by_that(
    broker: Broker, clock: ManualClock
) -> None:
    send(broker, b"a", expiring(500))
    clock.now_s += 1
    send(broker, b"b", expiring(500))
    clock.skew_ms = -5_000
    assert found(pull(broker)) == [b"b"]


def test_pop_passes_expired_messages_over(broker: Broker, clock: ManualClock) -> None:
    for body in (b"a", b"b", b"c", b"d"):
        send(broker, body, expiring(10) if body in b"ad" else "")
    broker.make_group("g")
    clock.now_s += 1
    assert found(pop(broker, maxMsgNums="1")) == [b"b"]
    assert found(pop(broker)) == [b"c"]
    assert broker.processors.throughput.expired == 2


def test_held_pull_waits_behind_what_has_expired(broker: Broker, clock: ManualClock) -> None:
    send(broker, b"a", expiring(10))
    clock.now_s += 1
    hold(broker, queueId="0", queueOffset="1", suspendTimeoutMillis="5000")
    broker.group.put("T", 0, b"fresh")
    (_, answer), *_ = reversed(broker.connection.replies)
    assert found(answer) == [b"fresh"]


@pytest.mark.parametrize("with_expired", ["true", "false"])
def test_held_pull_passes_over_what_expired_meanwhile(
    broker: Broker, clock: ManualClock, with_expired: str
) -> None:
    """A member that catches up applies the first message of a topic when its time is over."""
    listeners = broker.group.on_applied
    hold(broker, queueId="0", suspendTimeoutMillis="5000", withExpired=with_expired)
    later, listeners[:] = list(listeners), []
    send(broker, b"a", expiring(10))
    clock.now_s += 1
    for listener in later:
        listener([("T", 0, 1)])
    answers = [found(answer) for _, answer in broker.connection.replies if answer.body]
    assert answers == ([[b"a"]] if with_expired == "true" else [])


def test_held_pull_at_its_end_passes_over_what_has_expired(
    broker: Broker, clock: ManualClock
) -> None:
    hold(broker, queueId="0", suspendTimeoutMillis="5000")
    broker.group.on_applied.clear()
    send(broker, b"a", expiring(10))
    clock.now_s += 6
    pulls = broker.processors.pull
    (held,) = pulls._held.take_expired(clock.monotonic())
    pulls._answer_held(held)
    (_, answer), *_ = reversed(broker.connection.replies)
    assert (answer.code, answer.body) == (ResponseCode.PULL_RETRY_IMMEDIATELY, b"")
    assert answer.ext["nextBeginOffset"] == "1"


def test_first_message_that_expires_marks_its_topic(broker: Broker) -> None:
    send(broker, b"a")
    assert attributes(broker) == {}
    before = broker.group.log.last_index
    send(broker, b"b", expiring(10))
    assert attributes(broker) == EXPIRING
    assert broker.group.log.last_index == before + 1, "in the entry of the message"
    send(broker, b"c", expiring(10))
    assert [len(applied.changes) for applied in broker.group.applied[-2:]] == [1, 0]


def test_new_topic_is_marked_by_its_first_message(broker: Broker) -> None:
    assert send(broker, b"a", expiring(10), topic="New").code == 0
    assert attributes(broker, "New") == EXPIRING


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1e3", str(1 << 60), "1".zfill(20) + "9"])
def test_time_that_cannot_be_read_is_refused(broker: Broker, value: str) -> None:
    answer = send(broker, b"a", expiring(value))
    assert (answer.code, answer.ext["outcome"]) == (ResponseCode.MESSAGE_ILLEGAL, "not_stored")
    assert broker.group.state.max_offset("T", 0) == 0
    assert attributes(broker) == {}


def test_batch_of_rocketmq_marks_its_topic(broker: Broker, clock: ManualClock) -> None:
    items = [BatchItem(b"a", expiring(10).encode()), BatchItem(b"b")]
    fields = ext(queue_id="0", properties="", batch="true")
    answer = broker.call(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch(items))
    assert (answer.code, attributes(broker)) == (0, EXPIRING)
    clock.now_s += 1
    assert found(pull(broker)) == [b"b"]


def test_records_that_expire_are_sent_one_by_one(broker: Broker) -> None:
    record = encode_record(topic="T", queue_id=0, body=b"a", properties=expiring(10).encode())
    answer = broker.call(
        RequestCode.SEND_RECORDS,
        {"group": "p", "runs": [["T", 0, 1]]},
        len(record).to_bytes(4, "big") + record,
    )
    ((code, offset, remark),) = answer.ext["results"]
    assert (code, offset) == (ResponseCode.MESSAGE_ILLEGAL, -1)
    assert "EXPIRE_AFTER_MS is sent on its own" in remark


def test_message_that_is_consumed_again_does_not_expire(broker: Broker, clock: ManualClock) -> None:
    broker.make_group("g")
    topic = "%RETRY%g"
    assert send(broker, b"again", expiring(10), topic=topic, reconsume_times="1").code == 0
    assert attributes(broker, topic) == {}
    clock.now_s += 1
    assert found(pull(broker, topic=topic)) == [b"again"]


def test_clock_that_is_behind_expires_late_only(broker: Broker, clock: ManualClock) -> None:
    clock.now_s += 100
    send(broker, b"a", expiring(50))
    clock.now_s -= 100
    assert found(pull(broker)) == [b"a"]
    clock.now_s += 100.05
    assert found(pull(broker)) == []


def test_changed_topic_keeps_its_mark(broker: Broker) -> None:
    send(broker, b"a", expiring(10))
    fields = topic_fields(2)
    assert broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == 0
    assert attributes(broker) == EXPIRING
    body = TopicConfigList(topic_config_list=[TopicConfig("T", 3, 3)]).encode()
    assert broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body).code == 0
    assert attributes(broker) == EXPIRING
    config = present(broker.group.state.topic_config("T"))
    assert config.read_queue_nums == 3


def test_held_receive_passes_over_what_expired_meanwhile(
    broker: Broker, clock: ManualClock
) -> None:
    """The topic has its first message that expires while a receive waits for one that is out."""
    broker.make_group("g")
    send(broker, b"plain")
    (handle,) = handles_of(pop(broker, order="true"))
    waiting = hold_pop(broker, order="true", attemptId="2")
    send(broker, b"a", expiring(500))
    send(broker, b"b")
    assert answer_of(broker, waiting) is None, "the first message is out"
    clock.now_s += 1
    assert ack(broker, handle).code == 0
    broker.group.settle()
    answer = answered(broker, waiting)
    assert found(answer) == [b"b"]


def test_pull_behind_the_barrier_passes_over_what_has_expired(
    broker: Broker, clock: ManualClock
) -> None:
    """The first message that expires is applied while the end of the queue is confirmed."""
    broker.group.barriers_pass = False
    asked = command(queueId="0")
    assert broker.handle(asked) is DEFERRED
    send(broker, b"a", expiring(10))
    clock.now_s += 1
    broker.group.pass_barriers()
    (answer,) = [answer for each, answer in broker.connection.replies if each is asked]
    assert answer.body == b""
    assert answer.ext["nextBeginOffset"] == "1"


@pytest.mark.parametrize("topic", ["%DLQ%g", "%RETRY%g"])
def test_dead_letters_do_not_expire_beside_one_that_was_sent(
    broker: Broker, clock: ManualClock, topic: str
) -> None:
    broker.make_topic(topic, queues=1)
    assert send(broker, b"sent", expiring(10), topic=topic).code == 0
    assert attributes(broker, topic) == {}
    put = state.TopicConfig(topic, 1, 1, 6, attributes=EXPIRING)
    broker.group.store(TopicsChange(put=(put,)))
    clock.now_s += 1
    assert found(pull(broker, topic=topic)) == [b"sent"]


@pytest.mark.parametrize("change", ["-message.expires", "+message.expires=false"])
def test_mark_of_a_topic_cannot_be_taken_away(broker: Broker, change: str) -> None:
    send(broker, b"a", expiring(10))
    fields = topic_fields(attributes=change)
    assert broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == 0
    assert attributes(broker) == EXPIRING
    config = TopicConfig("T", 3, 3, attributes={"message.expires": "false"})
    body = TopicConfigList(topic_config_list=[config]).encode()
    assert broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body).code == 0
    assert attributes(broker) == EXPIRING
