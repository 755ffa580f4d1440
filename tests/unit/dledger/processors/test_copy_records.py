"""Records of another cluster: stored as they are at their offsets, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from dledger.commitlog.record import (
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_COMMIT,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_PREPARED,
    encode_record,
    pack_host,
)
from dledger.remoting.processor import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.outcome import OUTCOME_FIELD
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, FakeGroup
from tests.harness.stored_fields import kept_fields

PROPERTIES = b"TAGS\x01a\x02KEYS\x01k\x02DELAY\x013\x02REAL_TOPIC\x01other\x02CLUSTER\x01c\x02"


@pytest.fixture
def broker(group: FakeGroup, clock: ManualClock) -> Broker:
    broker = Broker(group, clock)
    broker.make_topic("T", queues=2)
    return broker


def record(offset: int, body: bytes = b"body", **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "topic": "T",
        "queue_id": 1,
        "body": body,
        "properties": PROPERTIES,
        "flag": 5,
        "sys_flag": SYS_FLAG_COMMIT | SYS_FLAG_COMPRESSED,
        "born_timestamp_ms": 1_600_000_000_123,
        "born_host": pack_host("2001:db8::1", 99),
        "reconsume_times": 2,
        "prepared_transaction_offset": 777,
        "queue_offset": offset,
        "phy_offset": 123_456,
        "store_timestamp_ms": 1_600_000_000_456,
        "store_host": pack_host("10.0.0.9", 10911),
    }
    return encode_record(**{**fields, **changes})


def copy(at: int, *records: bytes, **changes: Any) -> RemotingCommand:
    sizes = b"".join(len(each).to_bytes(4, "big") for each in records)
    ext = {"topic": "T", "queue_id": 1, "offset": at, "count": len(records), **changes}
    return request(RequestCode.COPY_RECORDS, ext, sizes + b"".join(records))


def begin(at: int, **changes: Any) -> RemotingCommand:
    ext = {"topic": "T", "queue_id": 1, "offset": at, **changes}
    return request(RequestCode.BEGIN_QUEUE, ext)


def answers_of(broker: Broker, *commands: RemotingCommand) -> list[RemotingCommand]:
    """Send all of them before the first is appended."""
    assert [broker.handle(command) for command in commands] == [DEFERRED] * len(commands)
    broker.group.settle()
    replies = {id(asked): answer for asked, answer in broker.connection.replies}
    return [replies[id(command)] for command in commands]


def bounds(broker: Broker) -> tuple[int, int]:
    state = broker.group.state
    return state.min_offset("T", 1), state.max_offset("T", 1)


def stored(broker: Broker, offset: int) -> bytes:
    unit = broker.group.queues.queue("T", 1).read(offset, 1)[0]
    return bytes(broker.group.log.record_at(int(unit["phy_offset"])))


def test_copy_keeps_all_but_what_a_broker_writes(broker: Broker) -> None:
    sent = [record(0), record(1, b"other", sys_flag=0, born_host=pack_host("10.1.1.1", 7))]
    (answer,) = answers_of(broker, copy(0, *sent))
    assert (answer.code, answer.ext["offset"]) == (0, 2)
    for offset in (0, 1):
        found = stored(broker, offset)
        assert kept_fields(found) == kept_fields(sent[offset])
        assert found[28:36] != sent[offset][28:36], "the position is of this log"
    assert stored(broker, 0)[39] & SYS_FLAG_BORN_HOST_V6


def test_copy_is_appended_at_its_offset_only(broker: Broker) -> None:
    answers = answers_of(broker, copy(0, record(0)), copy(0, record(0)), copy(2, record(2)))
    assert [answer.code for answer in answers] == [0, 51152, 51152]
    assert [answer.ext.get("nextOffset") for answer in answers] == [None, "1", "1"]
    assert answers[1].ext["outcome"] == "not_stored"
    assert bounds(broker) == (0, 1)


def test_copies_and_sends_of_one_queue_exclude_each_other(broker: Broker) -> None:
    broker.group.put("T", 1, b"sent")
    (answer,) = answers_of(broker, copy(0, record(0)))
    assert (answer.code, answer.ext["nextOffset"]) == (ResponseCode.OFFSET_NOT_EXPECTED, "1")


def test_read_only_topic_takes_copies(broker: Broker) -> None:
    broker.make_topic("T", queues=2, perm=4)
    (answer,) = answers_of(broker, copy(0, record(0)))
    assert answer.code == 0


def _damaged(offset: int) -> bytes:
    data = bytearray(record(offset))
    data[101] ^= 1  # in the body, behind an IPv6 born host
    return bytes(data)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (copy(0, record(1)), "record 0 of the batch does not stand behind"),
        (copy(0, record(0), record(2)), "record 1 of the batch does not stand behind"),
        (copy(0, record(0, topic="U")), "another topic"),
        (copy(0, record(0, topic="TT")), "another topic"),
        (copy(0, record(0, queue_id=0)), "another queue"),
        (copy(0, record(0, sys_flag=SYS_FLAG_PREPARED)), "not committed"),
        (copy(0, record(0, sys_flag=SYS_FLAG_INNER_BATCH)), "system flags"),
        (copy(0, record(0, store_host=pack_host("::1", 1))), "system flags"),
        (copy(0, record(0, b"")), "has no body"),
        (copy(0, record(0, bytes(5000))), "a body over 4096 bytes"),
        (copy(0, _damaged(0)), "checksum"),
        (copy(0, record(0)[:-1]), "another size"),
        (copy(0, b"short"), "too short"),
    ],
)
def test_what_is_no_copy_is_refused(broker: Broker, command: RemotingCommand, words: str) -> None:
    answer = broker.handle(command)
    assert (answer.code, answer.ext["outcome"]) == (ResponseCode.MESSAGE_ILLEGAL, "not_stored")
    assert words in answer.remark
    broker.group.settle()
    assert bounds(broker) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": "None"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, ResponseCode.NO_PERMISSION),
        ({"topic": "RMQ_SYS_DLEDGER_STATE"}, ResponseCode.NO_PERMISSION),
        ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, ResponseCode.NO_PERMISSION),
        ({"topic": "rmq_sys_wheel_timer"}, ResponseCode.NO_PERMISSION),
        ({"topic": BROKER}, ResponseCode.NO_PERMISSION),
        ({"topic": 5}, ResponseCode.SYSTEM_ERROR),
        ({"queue_id": 2}, ResponseCode.INVALID_PARAMETER),
        ({"queue_id": -1}, ResponseCode.SYSTEM_ERROR),
        ({"queue_id": "1"}, ResponseCode.SYSTEM_ERROR),
        ({"offset": -1}, ResponseCode.SYSTEM_ERROR),
        ({"offset": True}, ResponseCode.SYSTEM_ERROR),
        ({"offset": 1 << 63}, ResponseCode.SYSTEM_ERROR),
    ],
)
def test_copy_to_what_is_not_there_is_refused(
    broker: Broker, changes: dict[str, Any], code: int
) -> None:
    for command in (copy(0, record(0), **changes), begin(7, **changes)):
        answer = broker.handle(command)
        assert (answer.code, answer.ext["outcome"]) == (code, "not_stored")
    assert not broker.group.waiting


@pytest.mark.parametrize("count", [0, 2, 1 << 20, "1", None])
def test_wrong_count_of_records_is_refused(broker: Broker, count: Any) -> None:
    answer = broker.handle(copy(0, record(0), count=count))
    assert answer.ext["outcome"] == "not_stored"
    assert not broker.group.waiting


def test_follower_takes_no_copies(broker: Broker) -> None:
    broker.group.leadership = None
    for command in (copy(0, record(0)), begin(5)):
        assert broker.handle(command).code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_queue_begins_where_the_other_cluster_has_it(broker: Broker) -> None:
    (answer,) = answers_of(broker, begin(41))
    assert answer.code == 0
    assert bounds(broker) == (41, 41)
    refused, taken = answers_of(broker, copy(0, record(0)), copy(41, record(41)))
    assert (refused.code, refused.ext["nextOffset"]) == (51152, "41")
    assert (taken.code, taken.ext["offset"]) == (0, 42)
    assert bounds(broker) == (41, 42)
    assert kept_fields(stored(broker, 41)) == kept_fields(record(41))


def test_queue_that_has_begun_begins_nowhere_else(broker: Broker) -> None:
    first, second = answers_of(broker, begin(41), begin(50))
    assert (first.code, second.code, second.ext["nextOffset"]) == (0, 51152, "41")
    broker.group.put("T", 0, b"sent")
    (third,) = answers_of(broker, begin(9, queue_id=0))
    assert (third.code, third.ext["nextOffset"]) == (51152, "1")
    assert bounds(broker) == (41, 41)


def test_send_behind_a_begin_gets_the_next_offset(broker: Broker) -> None:
    """Both wait for the same flush: the send is no part of the entry that begins the queue."""
    ahead, behind = answers_of(broker, begin(41), copy(41, record(41), record(42)))
    assert (ahead.code, behind.code) == (0, 0)
    assert bounds(broker) == (41, 43)
    begins = [len(applied.changes) for applied in broker.group.applied if applied.changes]
    assert begins[-1] == 1


def test_topic_made_again_begins_at_zero(broker: Broker) -> None:
    answers_of(broker, begin(41))
    assert broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    broker.make_topic("T", queues=2)
    (answer,) = answers_of(broker, copy(0, record(0)))
    assert (answer.code, answer.ext["offset"]) == (0, 1)


def test_full_disk_takes_no_copies(broker: Broker) -> None:
    broker.processors.space.is_full = True
    refused = broker.handle(copy(0, record(0)))
    assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert refused.ext[OUTCOME_FIELD] == "not_stored"
    broker.group.settle()
    assert bounds(broker) == (0, 0)
    broker.processors.space.is_full = False
    (answer,) = answers_of(broker, copy(0, record(0)))
    assert answer.code == 0


def test_a_commit_that_only_goes_forward_moves_none_back(broker: Broker) -> None:
    """Also where a consumer's offset waits for its flush: a mirror cannot have seen it."""
    of_group = {"consumerGroup": "g", "topic": "T", "queueId": "1"}

    def committed_after(offset: int, **more: str) -> str:
        ext = {**of_group, "commitOffset": str(offset), **more}
        assert broker.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext).code == 0
        return str(broker.call(RequestCode.QUERY_CONSUMER_OFFSET, of_group).ext["offset"])

    assert committed_after(5) == "5"
    assert committed_after(4, onlyForward="true", sync="true") == "5"
    assert committed_after(5, onlyForward="true", sync="true") == "5"
    assert committed_after(6, onlyForward="true") == "6"
    assert committed_after(4) == "4"


def test_forward_commit_is_answered_when_what_stands_is_stored(broker: Broker) -> None:
    of_group = {"consumerGroup": "g", "topic": "T", "queueId": "1"}
    code = RequestCode.UPDATE_CONSUMER_OFFSET
    broker.handle(request(code, {**of_group, "commitOffset": "5"}))
    assert broker.group.state.consumer_offset("g", "T", 1) is None
    forward = {**of_group, "commitOffset": "4", "onlyForward": "true", "sync": "true"}
    assert broker.handle(request(code, forward)) is DEFERRED
    broker.group.settle()
    assert broker.connection.replies.pop()[1].code == 0
    assert broker.group.state.consumer_offset("g", "T", 1) == 5


def test_deposed_leader_confirms_no_forward_commit(broker: Broker) -> None:
    of_group = {"consumerGroup": "g", "topic": "T", "queueId": "1", "sync": "true"}
    code = RequestCode.UPDATE_CONSUMER_OFFSET
    assert broker.call(code, {**of_group, "commitOffset": "5"}).code == 0
    broker.group.barriers_pass = False
    forward = {**of_group, "commitOffset": "4", "onlyForward": "true"}
    assert broker.handle(request(code, forward)) is DEFERRED
    broker.group.step_down("elsewhere:1")
    refused = broker.connection.replies.pop()[1]
    assert (refused.code, refused.ext["leaderAddr"]) == (14, "elsewhere:1")
