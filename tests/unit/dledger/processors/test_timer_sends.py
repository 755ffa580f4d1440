"""Messages with a time of their own: what a send stores and answers, and how it is taken back."""

import pytest

from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.commitlog.record import Record, decode_record
from dledger.commitlog.record_batch import BatchItem, encode_batch
from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import RecallHandle
from dledger.remoting.protocol.outcome import OUTCOME_FIELD, RETRIABLE_FIELD
from dledger.state.state_record import TimersChange
from dledger.testing.doubles import EPOCH_MS, ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, FakeGroup

KEY = "UNIQ_KEY\x01K\x02"


def send(broker: Broker, properties: str, **changes: str) -> RemotingCommand:
    sent = dict(zip("abcdefghi", ["p", "T", "TBW102", *"41010", properties], strict=True))
    return broker.call(RequestCode.SEND_MESSAGE_V2, sent | changes, b"hello")


def stored(group: FakeGroup, topic: str, queue_id: int, offset: int = 0) -> Record:
    unit = group.queues.queue(topic, queue_id).read(offset, 1)
    return decode_record(bytes(group.log.record_at(int(unit["phy_offset"][0]))))


def recall(broker: Broker, handle: str, topic: str = "T") -> RemotingCommand:
    return broker.call(RequestCode.RECALL_MESSAGE, {"topic": topic, "recallHandle": handle})


def deliver(group: FakeGroup, offset: int) -> None:
    group.store(TimersChange(done=(offset,)))


@pytest.fixture
def broker(group: FakeGroup) -> Broker:
    broker = Broker(group, timer_max_delay_sec=100)
    broker.make_topic()
    return broker


def test_timer_message_waits_and_gets_a_handle(broker: Broker) -> None:
    response = send(broker, KEY + "TIMER_DELAY_MS\x011500\x02")
    assert response.code == 0
    assert (response.ext["queueId"], response.ext["queueOffset"]) == ("1", "0")
    handle = RecallHandle.decode(response.ext["recallHandle"])
    assert handle == RecallHandle("T", BROKER, EPOCH_MS + 2000, "K")
    record = stored(broker.group, TIMER_TOPIC, 0)
    assert record.property_map == {
        "UNIQ_KEY": "K",
        "CLUSTER": "DefaultCluster",
        "TIMER_DELAY_MS": "1500",
        "REAL_TOPIC": "T",
        "REAL_QID": "1",
        "TIMER_OUT_MS": str(EPOCH_MS + 2000),
    }
    unit = broker.group.queues.queue(TIMER_TOPIC, 0).read(0, 1)[0]
    assert int(unit["tags_code"]) == EPOCH_MS + 2000
    assert broker.group.state.max_offset("T", 1) == 0
    assert 0 in broker.group.state.timers


@pytest.mark.parametrize("asked", [EPOCH_MS, EPOCH_MS - 5, 1, -7])
def test_a_time_that_has_come_means_at_once(broker: Broker, asked: int) -> None:
    response = send(broker, KEY + f"TIMER_DELIVER_MS\x01{asked}\x02")
    assert response.code == 0
    assert "recallHandle" not in response.ext
    assert stored(broker.group, "T", 1).property_map["UNIQ_KEY"] == "K"


def test_a_delay_level_goes_before_a_time(broker: Broker) -> None:
    response = send(broker, KEY + "DELAY\x012\x02TIMER_DELAY_SEC\x015\x02")
    assert "recallHandle" not in response.ext
    assert "TIMER_DELAY_SEC" not in stored(broker.group, SCHEDULE_TOPIC, 1).property_map


@pytest.mark.parametrize(
    ("properties", "code", "remark"),
    [
        ("TIMER_DELAY_SEC\x01101\x02", 13, "timerMaxDelaySec"),
        ("TIMER_DELAY_SEC\x01" + "9" * 30 + "\x02", 13, "timerMaxDelaySec"),
        ("TIMER_DELAY_SEC\x01" + "9" * 4300 + "\x02", 13, "timerMaxDelaySec"),
        ("TIMER_DELAY_SEC\x01" + "9" * 4301 + "\x02", 13, "not a number"),
        (f"TIMER_DELIVER_MS\x01{EPOCH_MS + 100_001}\x02", 13, "100001 ms"),
        ("TIMER_DELAY_MS\x01soon\x02", 13, "not a number"),
        (f"TIMER_DELIVER_MS\x01{EPOCH_MS}\x02TIMER_DEL_UNIQKEY\x01K\x02", 13, "over"),
    ],
)
def test_times_that_cannot_be_are_refused(
    broker: Broker, properties: str, code: int, remark: str
) -> None:
    response = send(broker, KEY + properties)
    assert response.code == code
    assert response.ext[OUTCOME_FIELD] == "not_stored"
    assert remark in (response.remark or "")
    assert len(response.remark or "") < 200


def test_a_time_that_is_just_near_enough_is_taken(broker: Broker) -> None:
    assert send(broker, KEY + f"TIMER_DELIVER_MS\x01{EPOCH_MS + 100_000}\x02").code == 0


def test_switched_off_and_too_many_are_refused_with_code_1(group: FakeGroup) -> None:
    off = Broker(group, timer_wheel_enable=False)
    off.make_topic()
    response = send(off, KEY + "TIMER_DELAY_MS\x0150\x02")
    assert response.code == ResponseCode.SYSTEM_ERROR
    assert RETRIABLE_FIELD not in response.ext
    full = Broker(group, timer_pending_max=1)
    assert send(full, KEY + "TIMER_DELAY_MS\x0150\x02").code == 0
    response = send(full, KEY + "TIMER_DELAY_MS\x0150\x02")
    assert response.code == ResponseCode.SYSTEM_ERROR
    assert (response.ext[OUTCOME_FIELD], response.ext[RETRIABLE_FIELD]) == ("not_stored", "true")


def test_a_batch_may_not_hold_timer_messages(broker: Broker) -> None:
    body = encode_batch([BatchItem(b"x", b"TIMER_DELAY_SEC\x011\x02", 0)])
    fields = {"a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "1", "h": "0"}
    response = broker.call(RequestCode.SEND_BATCH_MESSAGE, {**fields, "m": "true"}, body)
    assert response.code == ResponseCode.MESSAGE_ILLEGAL


@pytest.mark.parametrize("keys", ["", "KEYS\x01K k K\x02"])
def test_recall_is_done_once_and_answered_again(broker: Broker, keys: str) -> None:
    handle = send(broker, KEY + keys + "TIMER_DELAY_SEC\x015\x02").ext["recallHandle"]
    for _ in range(2):
        response = recall(broker, handle)
        assert (response.code, response.ext) == (0, {"msgId": "K"})
        assert 0 not in broker.group.state.timers
    assert broker.group.state.timers.was_recalled(0)


def test_a_delivered_message_is_not_recalled(broker: Broker) -> None:
    handle = send(broker, KEY + "TIMER_DELAY_SEC\x015\x02").ext["recallHandle"]
    deliver(broker.group, 0)
    response = recall(broker, handle)
    assert response.code == ResponseCode.ILLEGAL_OPERATION
    assert "was delivered already" in (response.remark or "")


def test_delivery_or_recall_first_one_wins(broker: Broker) -> None:
    handle = send(broker, KEY + "TIMER_DELAY_SEC\x015\x02").ext["recallHandle"]
    assert broker.processors.timer_claims.claim(0)  # a delivery is on its way
    response = recall(broker, handle)
    assert response.code == ResponseCode.SYSTEM_BUSY
    assert response.ext[RETRIABLE_FIELD] == "true"
    broker.processors.timer_claims.give_back([0])
    command = request(RequestCode.RECALL_MESSAGE, {"topic": "T", "recallHandle": handle})
    assert broker.handle(command) is DEFERRED
    assert not broker.processors.timer_claims.claim(0)
    broker.group.settle()
    assert broker.connection.replies[-1][1].code == 0


def test_a_message_that_was_sent_again_is_recalled_everywhere(
    broker: Broker, clock: ManualClock
) -> None:
    send(broker, KEY + "TIMER_DELAY_SEC\x015\x02")
    send(broker, KEY + "TIMER_DELAY_SEC\x015\x02", b="U")
    clock.now_s += 3
    handle = send(broker, KEY + "TIMER_DELAY_SEC\x015\x02").ext["recallHandle"]
    assert recall(broker, handle).code == 0
    timers = broker.group.state.timers
    assert [offset in timers for offset in range(3)] == [False, True, False]


def test_a_recall_that_is_not_stored_gives_its_claim_back(broker: Broker) -> None:
    handle = send(broker, KEY + "TIMER_DELAY_SEC\x015\x02").ext["recallHandle"]
    command = request(RequestCode.RECALL_MESSAGE, {"topic": "T", "recallHandle": handle})
    assert broker.handle(command) is DEFERRED
    broker.group.step_down()
    assert broker.connection.replies[-1][1].ext[OUTCOME_FIELD] == "not_stored"
    broker.group.lead()
    assert recall(broker, handle).code == 0


@pytest.mark.parametrize("body", [b"", b"x" * 4097])
def test_recall_by_a_refused_message_gives_its_claim_back(broker: Broker, body: bytes) -> None:
    handle = send(broker, KEY + "TIMER_DELAY_SEC\x015\x02").ext["recallHandle"]
    properties = "UNIQ_KEY\x01L\x02TIMER_DELAY_SEC\x015\x02TIMER_DEL_UNIQKEY\x01K\x02"
    fields = dict(zip("abcdefghi", ["p", "T", "TBW102", *"41010", properties], strict=True))
    response = broker.call(RequestCode.SEND_MESSAGE_V2, fields, body)
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert 0 in broker.group.state.timers
    assert recall(broker, handle).code == 0


@pytest.mark.parametrize(
    ("handle", "topic", "code"),
    [
        ("%%%", "T", ResponseCode.SYSTEM_ERROR),
        (RecallHandle("U", BROKER, 5000, "K").encode(), "T", ResponseCode.SYSTEM_ERROR),
        (RecallHandle("T", "other", 5000, "K").encode(), "T", ResponseCode.SYSTEM_ERROR),
        (RecallHandle("T", BROKER, 5000, "K").encode(), "T", ResponseCode.QUERY_NOT_FOUND),
    ],
)
def test_handles_that_name_nothing_are_refused(
    broker: Broker, handle: str, topic: str, code: int
) -> None:
    send(broker, KEY + "TIMER_DELAY_SEC\x015\x02")
    response = recall(broker, handle, topic)
    assert response.code == code
    assert 0 in broker.group.state.timers


@pytest.mark.parametrize("named", ["K", "T+K"])
def test_a_message_that_names_another_takes_it_back(broker: Broker, named: str) -> None:
    send(broker, KEY + "TIMER_DELAY_SEC\x015\x02")
    properties = f"UNIQ_KEY\x01L\x02TIMER_DELAY_MS\x014500\x02TIMER_DEL_UNIQKEY\x01{named}\x02"
    response = send(broker, properties)
    assert response.code == 0
    assert (response.ext["queueId"], response.ext["queueOffset"]) == ("1", "1")
    assert len(broker.group.state.timers) == 0
    assert broker.group.state.timers.was_recalled(0)
    assert stored(broker.group, TIMER_TOPIC, 0, 1).property_map["UNIQ_KEY"] == "L"


def test_recall_of_a_removed_message_is_refused(broker: Broker) -> None:
    send(broker, KEY + "TIMER_DELAY_SEC\x015\x02")
    deletes = "UNIQ_KEY\x01L\x02TIMER_DELAY_SEC\x01{}\x02TIMER_DEL_UNIQKEY\x01K\x02"
    response = send(broker, deletes.format(6))  # another time
    assert (response.code, response.remark) == (
        13,
        f"recall failed, no message K is scheduled for {EPOCH_MS + 6000}",
    )
    deliver(broker.group, 0)
    response = send(broker, deletes.format(5))
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "was delivered already" in (response.remark or "")


def test_a_handle_has_rocketmqs_form() -> None:
    handle = RecallHandle("T", "b", 17, "K")
    assert handle.encode() == "djEgVCBiIDE3IEs="
    assert RecallHandle.decode("djEgVCBiIDE3IEs") == handle


@pytest.mark.parametrize("handle", ["", "djIgVCBiIDE3IEs=", "djEgVCBiIHggSw==", "é", "A" * 3000])
def test_bad_recall_handle_is_refused(handle: str) -> None:
    with pytest.raises(BadRequestError, match=r"is no recall handle; nothing was recalled$"):
        RecallHandle.decode(handle)
