"""Offsets of groups and bounds of queues; resets and clones."""

import json
from typing import Any

import pytest
import trio

from dledger.commitlog.errors import DiskFullError
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup
from tests.harness.pops import fields

QUERY = RequestCode.QUERY_CONSUMER_OFFSET
UPDATE = RequestCode.UPDATE_CONSUMER_OFFSET
RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET


def queue(**changes: Any) -> dict[str, str]:
    values = {"consumerGroup": "g", "topic": "T", "queueId": "0", **changes}
    return {key: str(value) for key, value in values.items()}


def query(broker: Broker, **changes: Any) -> RemotingCommand:
    return broker.call(QUERY, queue(**changes))


def update(broker: Broker, offset: int, **changes: Any) -> RemotingCommand:
    return broker.call(UPDATE, queue(commitOffset=offset, **changes))


def take(broker: Broker, offset: int, **changes: Any) -> None:
    """Commit one-way, as RocketMQ's consumers do: for the next flush."""
    broker.handle(request(UPDATE, queue(commitOffset=offset, **changes), oneway=True))


@pytest.fixture
def filled(broker: Broker) -> Broker:
    broker.make_topic("T")
    for second in range(6):
        broker.clock.now_s = float(second)  # type: ignore[union-attr]  # it is the manual clock
        broker.group.put("T", 0, b"a%d" % second, b"b%d" % second)
    return broker


# ------------------------------------------------------------------------------ consumer offsets


READS = {
    QUERY: queue(),
    RequestCode.GET_CONSUME_STATS: {"consumerGroup": "g"},
    RequestCode.QUERY_CONSUME_TIME_SPAN: {"group": "g", "topic": "T"},
    RESET: {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "false", "queueId": "0"},
}


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("code", READS)
def test_read_is_answered_when_what_was_taken_is_stored(
    filled: Broker, code: RequestCode, is_flushed: bool
) -> None:
    take(filled, 5)
    if is_flushed:
        filled.processors.offsets.flush()
    assert filled.call(code, READS[code]).code in (0, ResponseCode.CONSUMER_NOT_ONLINE)
    assert filled.group.state.consumer_offset("g", "T", 0) == 5


def test_read_answers_what_is_stored_when_no_more_can_be(filled: Broker) -> None:
    assert update(filled, 2).code == 0
    take(filled, 5)
    filled.group.refuse = DiskFullError("full")
    assert query(filled).ext["offset"] == "2"
    filled.group.refuse = None
    assert query(filled).ext["offset"] == "5"


def test_synchronous_query_reads_behind_the_barrier(filled: Broker) -> None:
    update(filled, 5)
    query_now = request(QUERY, queue(sync="true", setZeroIfNotFound="false"))
    filled.group.barriers_pass = False
    assert filled.handle(query_now) is DEFERRED
    filled.group.pass_barriers()
    assert filled.connection.replies.pop()[1].ext["offset"] == "5"
    filled.group.step_down("elsewhere:1")
    for refused in (filled.call(QUERY, queue(sync="true")), update(filled, 4)):
        assert (refused.code, refused.ext["leaderAddr"]) == (14, "elsewhere:1")


def test_many_commits_become_one_entry(filled: Broker) -> None:
    before = filled.group.log.last_index
    for offset in range(10):
        take(filled, offset)
        take(filled, offset, consumerGroup="h", queueId=1)
    filled.processors.offsets.flush()
    filled.group.settle()
    assert filled.group.log.last_index == before + 1
    assert filled.group.state.consumer_offsets == {("g", "T"): {0: 9}, ("h", "T"): {1: 9}}
    take(filled, 9)
    filled.processors.offsets.flush()
    assert filled.group.waiting == 0, "nothing new, no entry"


def test_commit_is_answered_when_it_is_applied(filled: Broker) -> None:
    take(filled, 9)
    command = request(UPDATE, queue(commitOffset=4))
    assert filled.handle(command) is DEFERRED
    assert filled.connection.replies == []
    filled.group.settle()
    assert filled.connection.reply_.code == 0
    assert filled.group.state.consumer_offset("g", "T", 0) == 4
    filled.processors.offsets.flush()
    filled.group.settle()
    assert filled.group.state.consumer_offset("g", "T", 0) == 4, "9 was older"


def test_what_was_taken_ends_with_its_topic(filled: Broker) -> None:
    take(filled, 3)
    assert filled.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    filled.make_topic("T")
    filled.processors.offsets.flush()
    filled.group.settle()
    assert filled.group.state.consumer_offset("g", "T", 0) is None


COPY = {"srcGroup": "g", "destGroup": "h", "topic": "T", "offline": "true"}
MODE = b'{"topic":"T","consumerGroup":"g","mode":"POP","popShareQueueNum":0}'


@pytest.mark.parametrize(
    ("code", "ext", "body"),
    [
        (UPDATE, queue(commitOffset=3), b""),
        (RequestCode.CLONE_GROUP_OFFSET, COPY, b""),
        (RESET, {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true"}, b""),
        (RequestCode.SET_MESSAGE_REQUEST_MODE, {}, MODE),
        (RequestCode.POP_MESSAGE, fields(), b""),
    ],
)
def test_nothing_is_stored_behind_a_deletion(
    filled: Broker, code: RequestCode, ext: dict[str, str], body: bytes
) -> None:
    """Of a topic whose deletion is in the log, and not applied, nothing is left behind it."""
    assert update(filled, 2).code == 0
    delete = request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    assert filled.handle(delete) is DEFERRED
    filled.call(code, ext, body)
    filled.processors.offsets.flush()
    filled.group.settle()
    state = filled.group.state
    assert (dict(state.consumer_offsets), dict(state.request_modes), dict(state.pops)) == ({},) * 3


def test_negative_offsets_are_ignored_and_answered_ok(filled: Broker) -> None:
    assert update(filled, -1).code == 0
    assert filled.processors.offsets.offset("g", "T", 0) is None


@pytest.mark.parametrize(("changes", "code"), [({"queueId": 4}, 29), ({"consumerGroup": "a/b"}, 1)])
def test_commits_that_name_nothing_real_are_not_kept(
    filled: Broker, changes: dict[str, Any], code: int
) -> None:
    response = update(filled, 1, **changes)
    assert (response.code, response.ext["outcome"]) == (code, "not_stored")
    filled.processors.offsets.flush()
    assert filled.group.waiting == 0


def test_commits_for_unknown_topics_and_groups_are_refused(group: FakeGroup) -> None:
    broker = Broker(group, auto_create_subscription_group=False)
    assert update(broker, 1).code == 17
    broker.make_topic("T")
    assert update(broker, 1).code == 26


@pytest.mark.parametrize(("zero", "code"), [(None, 0), ("true", 0), ("false", 22)])
def test_a_young_queue_is_read_from_its_begin(filled: Broker, zero: str | None, code: int) -> None:
    extra = {} if zero is None else {"setZeroIfNotFound": zero}
    response = query(filled, **extra)
    assert response.code == code
    assert query(filled, queueId=3, **extra).code == code, "empty queue"
    if not code:
        assert response.ext["offset"] == "0"


def test_an_old_queue_has_no_offset_of_its_own(group: FakeGroup) -> None:
    broker = Broker(group, recent_bytes=100)
    broker.make_topic("T")
    group.put("T", 0, b"x", b"y" * 500)
    assert query(broker).code == 22
    group.state.queues["T", 0].min_offset = 1
    assert query(broker).code == 22


# ------------------------------------------------------------------------------ bounds


def test_bounds_are_answered(filled: Broker) -> None:
    filled.group.state.queues["T", 0].min_offset = 2
    assert filled.call(RequestCode.GET_MAX_OFFSET, queue()).ext["offset"] == "12"
    assert filled.call(RequestCode.GET_MIN_OFFSET, queue()).ext["offset"] == "2"
    assert filled.call(RequestCode.GET_MAX_OFFSET, queue(queueId=3)).ext["offset"] == "0"


def test_earliest_store_time_is_answered(filled: Broker) -> None:
    base = filled.clock.wall_ms() - 5000
    earliest = RequestCode.GET_EARLIEST_MSG_STORETIME
    assert filled.call(earliest, queue()).ext["timestamp"] == str(base)
    filled.group.state.queues["T", 0].min_offset = 4
    assert filled.call(earliest, queue()).ext["timestamp"] == str(base + 2000)
    assert filled.call(earliest, queue(queueId=3)).ext["timestamp"] == "-1"


@pytest.mark.parametrize(
    ("after_ms", "lower", "upper"),
    [(-1, 0, 0), (0, 0, 1), (1, 2, 1), (1000, 2, 3), (4999, 10, 9), (5000, 10, 11), (5001, 12, 11)],
)
def test_offsets_are_found_by_store_time(
    filled: Broker, after_ms: int, lower: int, upper: int
) -> None:
    timestamp = filled.clock.wall_ms() - 5000 + after_ms
    code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    for boundary, offset in ((None, lower), ("LOWER", lower), ("UPPER", upper)):
        extra = {} if boundary is None else {"boundaryType": boundary}
        assert filled.call(code, queue(timestamp=timestamp, **extra)).ext["offset"] == str(offset)
    assert filled.call(code, queue(timestamp=timestamp, queueId=3)).ext["offset"] == "0"


# ------------------------------------------------------------------------------ never stale

BEYOND = {"timestamp": 1 << 50}


@pytest.mark.parametrize(
    ("code", "more"),
    [
        (RequestCode.GET_MAX_OFFSET, {}),
        (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, BEYOND),
        (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {**BEYOND, "boundaryType": "UPPER"}),
    ],
)
def test_end_of_a_queue_is_answered_by_leaders_only(
    filled: Broker, code: RequestCode, more: dict[str, Any]
) -> None:
    before = int(filled.call(code, queue(**more)).ext["offset"])
    filled.group.barriers_pass = False
    assert filled.handle(request(code, queue(**more))) is DEFERRED
    filled.group.put("T", 0, b"late")
    filled.group.pass_barriers()
    assert filled.connection.replies.pop()[1].ext["offset"] == str(before + 1)
    assert filled.handle(request(code, queue(**more))) is DEFERRED
    filled.group.step_down("elsewhere:1")
    for response in (filled.connection.reply_, filled.call(code, queue(**more))):
        assert (response.code, response.ext["leaderAddr"]) == (14, "elsewhere:1")


def test_a_time_within_the_queue_is_found_without_the_barrier(filled: Broker) -> None:
    filled.group.barriers_pass = False
    timestamp = filled.clock.wall_ms() - 5000 + 1000
    code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    assert filled.call(code, queue(timestamp=timestamp)).ext["offset"] == "2"
    filled.group.step_down("elsewhere:1")
    assert filled.call(code, queue(timestamp=timestamp)).ext["offset"] == "2"


def test_follower_never_answers_that_no_offset_exists(filled: Broker) -> None:
    code = RequestCode.QUERY_CONSUMER_OFFSET
    ask = {"consumerGroup": "g", "setZeroIfNotFound": "false"}
    assert filled.call(code, queue(**ask)).code == 22
    commit = queue(consumerGroup="g", commitOffset=7)
    assert filled.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == 0
    filled.group.step_down("elsewhere:1")
    assert filled.call(code, queue(**ask)).ext["offset"] == "7"
    response = filled.call(code, queue(**ask, queueId=1))
    assert (response.code, response.ext["leaderAddr"]) == (14, "elsewhere:1")


@pytest.fixture
def consumed(broker: Broker, clock: ManualClock) -> Broker:
    """Ten messages in queue 0, a second apart; the group has consumed six."""
    broker.make_topic("T", 2)
    for number in range(10):
        broker.group.put("T", 0, b"m%d" % number)
        clock.now_s += 1
    for queue_id in range(2):
        ext = {
            "consumerGroup": "g",
            "topic": "T",
            "queueId": str(queue_id),
            "commitOffset": "6" if queue_id == 0 else "0",
        }
        assert broker.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext).code == 0
    return broker


def connect(broker: Broker, *, language: str = "JAVA", version: int = 407) -> FakeConnection:
    connection = FakeConnection()
    data = ConsumerData("g", subscription_data_set=[SubscriptionData(topic="T")])
    body = HeartbeatData(client_id=f"c-{language}", consumer_data_set=[data]).encode()
    command = request(RequestCode.HEART_BEAT, {}, body)
    command.language, command.version = language, version
    broker.handle(command, connection)
    broker.group.settle()
    connection.asked.clear()
    return connection


def reset(broker: Broker, **changes: Any) -> RemotingCommand:
    ext = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true", **changes}
    return broker.call(RESET, {key: str(value) for key, value in ext.items()})


def offsets(body: Any) -> dict[int, int]:
    """Read the fastjson dialect: a queue is a key."""
    text = bytes(body).decode()
    found = {}
    for part in text.removeprefix('{"offsetTable":{').removesuffix("}}").split(",{"):
        queue, _, offset = part.rpartition(":")
        found[json.loads("{" + queue.lstrip("{"))["queueId"]] = int(offset)
    return found


def test_reset_answers_and_notifies_the_same_offsets(consumed: Broker) -> None:
    client = connect(consumed)
    response = reset(consumed)
    assert (response.code, offsets(response.body)) == (0, {0: 10, 1: 0})
    (reported,) = client.asked
    assert reported.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET
    assert reported.ext == {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true"}
    assert bytes(reported.body) == bytes(response.body)


def test_reset_notifies_the_cpp_client_in_its_form(consumed: Broker) -> None:
    client = connect(consumed, language="CPP", version=63)
    reset(consumed)
    (reported,) = client.asked
    assert json.loads(bytes(reported.body)) == {
        "offsetTable": [
            {"topic": "T", "brokerName": "broker-a", "queueId": 0, "offset": 10},
            {"topic": "T", "brokerName": "broker-a", "queueId": 1, "offset": 0},
        ]
    }


@pytest.mark.parametrize(
    ("after_s", "force", "offset"),
    [(2, "true", 2), (2, "false", 2), (8, "true", 8), (8, "false", 6)],
)
def test_reset_by_time_goes_back_only_without_force(
    consumed: Broker, after_s: int, force: str, offset: int
) -> None:
    connect(consumed)
    began_ms = consumed.clock.wall_ms() - 10_000
    response = reset(consumed, timestamp=began_ms + 1000 * after_s, isForce=force)
    assert offsets(response.body)[0] == offset


@pytest.mark.parametrize(("asked", "offset"), [(1, 3), (4, 4), (99, 10)])
def test_one_queue_may_be_set_to_an_offset_it_has(
    consumed: Broker, asked: int, offset: int
) -> None:
    consumed.group.state.queues["T", 0].min_offset = 3
    connect(consumed)
    assert offsets(reset(consumed, queueId=0, offset=asked).body) == {0: offset}


def test_reset_without_clients_is_left_to_the_tool(consumed: Broker) -> None:
    response = reset(consumed)
    assert response.code == 206
    assert "Group: g Topic: T" in (response.remark or "")


@pytest.mark.parametrize(
    "changes", [{"topic": "X"}, {"group": "other"}, {"queueId": 7}, {"timestamp": "x"}]
)
def test_what_is_not_there_is_refused(consumed: Broker, changes: dict[str, Any]) -> None:
    client = connect(consumed)
    assert reset(consumed, **changes).code == 1
    assert client.asked == []


def test_reset_with_an_old_client_notifies_none(consumed: Broker) -> None:
    client, _ = connect(consumed), connect(consumed, language="OLD", version=20)
    client.asked.clear()
    assert reset(consumed).code == 1
    assert client.asked == []


def test_the_end_is_asked_behind_the_barrier_of_a_leader(consumed: Broker) -> None:
    connect(consumed)
    consumed.group.barriers_pass = False
    ext = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true"}

    def event() -> None:
        consumed.group.put("T", 0, b"late")
        consumed.group.pass_barriers()

    answer = trio.run(consumed.finish, consumed.handle(request(RESET, ext)), event)
    assert offsets(answer.body)[0] == 11
    consumed.group.step_down("elsewhere:1")
    assert reset(consumed).code == 14


CLONE = RequestCode.CLONE_GROUP_OFFSET


def commit(broker: Broker, topic: str, queue_id: int, offset: int) -> None:
    ext = {
        "consumerGroup": "from",
        "topic": topic,
        "queueId": str(queue_id),
        "commitOffset": str(offset),
    }
    assert broker.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext).code == 0


def clone(broker: Broker, **more: str) -> RemotingCommand:
    return broker.call(CLONE, {"srcGroup": "from", "destGroup": "to", **more})


def offset(broker: Broker, topic: str, queue_id: int) -> int | None:
    return broker.group.state.consumer_offset("to", topic, queue_id)


@pytest.fixture
def cloned(broker: Broker) -> Broker:
    for topic in ("T", "U"):
        broker.make_topic(topic, 4)
        commit(broker, topic, 0, 5)
        commit(broker, topic, 3, 7)
    return broker


def test_all_topics_are_cloned_in_one_entry(cloned: Broker) -> None:
    take(cloned, 9, consumerGroup="from", queueId=1)
    before = cloned.group.log.last_index
    assert clone(cloned).code == 0
    assert cloned.group.log.last_index == before + 1
    assert [offset(cloned, "T", queue) for queue in range(4)] == [5, 9, None, 7]
    assert [offset(cloned, "U", queue) for queue in range(4)] == [5, None, None, 7]
    assert cloned.group.state.consumer_offset("from", "T", 1) == 9, "what is copied is stored"


def test_one_topic_may_be_named(cloned: Broker) -> None:
    assert clone(cloned, topic="U").code == 0
    assert (offset(cloned, "T", 0), offset(cloned, "U", 0)) == (None, 5)


def test_clone_skips_topics_no_longer_read(cloned: Broker) -> None:
    data = ConsumerData("from", subscription_data_set=[SubscriptionData(topic="T")])
    body = HeartbeatData(client_id="c", consumer_data_set=[data]).encode()
    assert cloned.call(RequestCode.HEART_BEAT, {}, body).code == 0
    cloned.group.settle()
    assert clone(cloned, offline="false").code == 0
    assert (offset(cloned, "T", 0), offset(cloned, "U", 0)) == (5, None)
    assert clone(cloned, offline="true").code == 0
    assert offset(cloned, "U", 0) == 5


def test_a_group_without_offsets_leaves_nothing(cloned: Broker) -> None:
    before = cloned.group.log.last_index
    assert cloned.call(CLONE, {"srcGroup": "nobody", "destGroup": "to"}).code == 0
    assert cloned.group.log.last_index == before


@pytest.mark.parametrize(("ext", "code"), [({"destGroup": "a b"}, 1), ({"srcGroup": None}, 1)])
def test_what_makes_no_sense_is_refused(cloned: Broker, ext: dict[str, Any], code: int) -> None:
    whole = {"srcGroup": "from", "destGroup": "to", **ext}
    asked = {key: value for key, value in whole.items() if value is not None}
    assert cloned.call(CLONE, asked).code == code


def test_clone_needs_a_leader_and_reports_an_unknown_end(cloned: Broker) -> None:
    asked = request(CLONE, {"srcGroup": "from", "destGroup": "to"})
    assert cloned.handle(asked) is DEFERRED
    cloned.group.append()
    cloned.group.step_down("elsewhere:1")
    assert cloned.connection.replies[-1][1].ext["outcome"] == "unknown"
    assert clone(cloned).code == 14
