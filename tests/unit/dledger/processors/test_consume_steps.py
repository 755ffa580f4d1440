"""Steps of consumers: messages and offsets in one entry, where the group stands as expected."""

from typing import Any

import pytest

from dledger.commitlog.record import encode_record
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup

GROUP = "workers"


@pytest.fixture
def broker(group: FakeGroup) -> Broker:
    broker = Broker(group)
    broker.make_topic("In", queues=2)
    broker.make_topic("Out", queues=2)
    broker.make_group(GROUP)
    return broker


def record(topic: str, queue_id: int, body: bytes) -> bytes:
    return encode_record(topic=topic, queue_id=queue_id, body=body, properties=b"")


def step(
    commits: list[list[Any]], *bodies: bytes, topic: str = "Out", **changes: Any
) -> RemotingCommand:
    """Return a step that sends *bodies* to queue 1 of *topic*."""
    records = [record(topic, 1, body) for body in bodies]
    sizes = b"".join(len(each).to_bytes(4, "big") for each in records)
    ext = {
        "group": GROUP,
        "consumer_group": GROUP,
        "runs": [[topic, 1, len(bodies)]] if bodies else [],
        "commits": commits,
    }
    return request(RequestCode.CONSUME_STEP, {**ext, **changes}, sizes + b"".join(records))


def answers_of(broker: Broker, *commands: RemotingCommand) -> list[RemotingCommand]:
    """Send all of them before the first is appended."""
    assert [broker.handle(command) for command in commands] == [DEFERRED] * len(commands)
    broker.group.settle()
    replies = {id(asked): answer for asked, answer in broker.connection.replies}
    return [replies[id(command)] for command in commands]


def committed(broker: Broker, queue_id: int = 0) -> int | None:
    return broker.group.state.consumer_offset(GROUP, "In", queue_id)


def sent(broker: Broker) -> int:
    return broker.group.state.max_offset("Out", 1)


def test_step_stores_messages_and_offsets_in_one_entry(broker: Broker) -> None:
    before = broker.group.log.last_index
    (answer,) = answers_of(broker, step([["In", 0, -1, 3], ["In", 1, -1, 0]], b"a", b"b"))
    assert (answer.code, answer.ext["results"]) == (0, [[0, 0]])
    assert (committed(broker, 0), committed(broker, 1), sent(broker)) == (3, 0, 2)
    assert broker.group.log.last_index == before + 1
    (answer,) = answers_of(broker, step([["In", 0, 3, 5]], b"c"))
    assert (answer.code, answer.ext["results"]) == (0, [[0, 2]])


def test_step_that_sends_nothing_moves_the_offset(broker: Broker) -> None:
    (answer,) = answers_of(broker, step([["In", 0, -1, 7]]))
    assert (answer.code, committed(broker), sent(broker)) == (0, 7, 0)


def test_repeated_step_is_refused_and_stored_once(broker: Broker) -> None:
    answers = answers_of(broker, *(step([["In", 0, -1, 3]], b"a") for _ in range(3)))
    assert [answer.code for answer in answers] == [0, 51153, 51153]
    assert answers[1].code == ResponseCode.COMMIT_NOT_EXPECTED
    assert answers[1].ext["outcome"] == "not_stored"
    assert (answers[1].ext["committedOffset"], answers[1].ext["topic"]) == ("3", "In")
    assert (committed(broker), sent(broker)) == (3, 1)


def test_one_queue_elsewhere_refuses_the_whole_step(broker: Broker) -> None:
    answers_of(broker, step([["In", 1, -1, 2]]))
    (answer,) = answers_of(broker, step([["In", 0, -1, 3], ["In", 1, 1, 4]], b"a"))
    assert (answer.code, answer.ext["queueId"]) == (51153, "1")
    assert (committed(broker, 0), committed(broker, 1), sent(broker)) == (None, 2, 0)


def test_one_refused_run_refuses_the_whole_step(broker: Broker) -> None:
    records = [record("Out", 1, b"a"), record("Out", 7, b"b")]
    sizes = b"".join(len(each).to_bytes(4, "big") for each in records)
    command = step([["In", 0, -1, 3]], runs=[["Out", 1, 1], ["Out", 7, 1]])
    command.body = sizes + b"".join(records)
    answer = broker.handle(command)
    assert (answer.code, answer.ext["outcome"]) == (ResponseCode.INVALID_PARAMETER, "not_stored")
    broker.group.settle()
    assert (committed(broker), sent(broker)) == (None, 0)


def test_appended_step_counts_although_its_answer_is_unknown(broker: Broker) -> None:
    """The first is in the log and not applied; its proposer was answered "unknown"."""
    first, second = step([["In", 0, -1, 3]], b"a"), step([["In", 0, -1, 3]], b"a")
    broker.handle(first)
    broker.group.append()
    broker.group.time_out()
    (answer,) = answers_of(broker, second)
    assert (answer.code, answer.ext["committedOffset"]) == (51153, "3")
    assert (committed(broker), sent(broker)) == (3, 1)


def test_commit_that_waits_for_its_flush_comes_before_the_step(broker: Broker) -> None:
    fields = {"consumerGroup": GROUP, "topic": "In", "queueId": "0", "commitOffset": "3"}
    broker.handle(request(RequestCode.UPDATE_CONSUMER_OFFSET, fields, oneway=True))
    assert committed(broker) is None
    answers = answers_of(broker, step([["In", 0, -1, 4]], b"a"), step([["In", 0, 3, 5]], b"b"))
    assert [answer.code for answer in answers] == [51153, 0]
    broker.processors.offsets.flush()
    broker.group.settle()
    assert (committed(broker), sent(broker)) == (5, 1)


def test_sync_commit_on_its_way_comes_before_the_step(broker: Broker) -> None:
    fields = {"consumerGroup": GROUP, "topic": "In", "queueId": "0", "commitOffset": "3"}
    commit = request(RequestCode.UPDATE_CONSUMER_OFFSET, fields, b"")
    commit_answer, refused, taken = answers_of(
        broker, commit, step([["In", 0, -1, 4]], b"a"), step([["In", 0, 3, 5]], b"b")
    )
    assert (commit_answer.code, refused.code, taken.code) == (0, 51153, 0)


def test_step_makes_a_topic_that_is_missing(broker: Broker) -> None:
    (answer,) = answers_of(broker, step([["In", 0, -1, 3]], b"a", topic="New"))
    assert (answer.code, answer.ext["results"]) == (0, [[0, 0]])
    assert broker.group.state.max_offset("New", 1) == 1


@pytest.mark.parametrize(
    "commits",
    [
        None,
        [],
        "x",
        [["In", 0, 0]],
        [["In", 0, 0, "1"]],
        [["In", 0, -2, 1]],
        [["In", 0, 3, 2]],
        [["In", 0, -1, -1]],
        [["In", -1, 0, 1]],
        [[7, 0, 0, 1]],
        [["In", 0, 0, 1], ["In", 0, 1, 2]],
        [["In", 0, True, 1]],
        [["In", 0, 0, 1 << 63]],
        [["In", 0, 0, 1]] * 5000,
    ],
)
def test_what_is_no_list_of_commits_is_refused(broker: Broker, commits: Any) -> None:
    answer = broker.handle(step(commits, b"a"))
    assert answer.ext["outcome"] == "not_stored"
    broker.group.settle()
    assert (committed(broker), sent(broker)) == (None, 0)


@pytest.mark.parametrize(
    ("commits", "changes", "code"),
    [
        ([["None", 0, -1, 3]], {}, ResponseCode.TOPIC_NOT_EXIST),
        ([["In", 2, -1, 3]], {}, ResponseCode.INVALID_PARAMETER),
        ([["In", 0, -1, 3]], {"consumer_group": 7}, ResponseCode.SYSTEM_ERROR),
        ([["In", 0, -1, 3]], {"consumer_group": "a b"}, None),
    ],
)
def test_step_of_what_does_not_exist_is_refused(
    broker: Broker, commits: Any, changes: dict[str, Any], code: int | None
) -> None:
    answer = broker.handle(step(commits, b"a", **changes))
    assert answer.ext["outcome"] == "not_stored"
    assert code is None or answer.code == code
    broker.group.settle()
    assert (committed(broker), sent(broker)) == (None, 0)
