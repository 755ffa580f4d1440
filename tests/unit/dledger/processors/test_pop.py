"""POP over the fake group: what comes to which client, when again, and what a handle does."""

import json
from typing import Any

import pytest

from dledger.broker_errors import TableFullError
from dledger.commitlog.record import iter_records
from dledger.group_api import OnBarrier
from dledger.processors.destination import Destinations
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.pop_requests import QueryAssignmentResponseBody, ReceiptHandle
from dledger.remoting.protocol.topic_names import INNER_TOPICS, STATE_TOPIC
from dledger.services.pop_grants import SET_ASIDE_S
from dledger.state.pop import MAX_OUT_PER_QUEUE, RequestMode
from dledger.state.topics import POP_QUEUE, TopicConfig
from tests.harness.broker import Broker, topic_fields
from tests.harness.fake_group import BROKER, FakeGroup, Term
from tests.harness.pops import (
    INVISIBLE_MS,
    ack,
    answer_of,
    answered,
    bodies,
    change,
    fields,
    handles,
    hold,
    pass_ms,
    place_of,
    pop,
    receipt,
    retries,
)


def test_pop_hands_out_what_pull_would_read(popping: Broker) -> None:
    response = pop(popping)
    assert bodies(response) == [(b"a", 0), (b"b", 0), (b"c", 0)]
    assert response.ext["startOffsetInfo"] == "0 0 0"
    assert response.ext["msgOffsetInfo"] == "0 0 0,1,2"
    assert response.ext["invisibleTime"] == str(INVISIBLE_MS)
    assert response.ext["popTime"] == str(popping.group.log.last_store_time_ms)
    assert response.ext["restNum"] == "0"
    assert set(popping.group.state.pops["g", "T", 0].out) == {0, 1, 2}


@pytest.mark.parametrize("order", ["true", "false"])
@pytest.mark.parametrize("is_next_leader", [False, True])
def test_repeated_receive_gets_what_it_got(
    popping: Broker, order: str, is_next_leader: bool
) -> None:
    ask = {"maxMsgNums": 2, "order": order, "attemptId": "a"}
    lost = handles(pop(popping, **ask))
    broker = popping
    if is_next_leader:
        popping.group.leadership = Term(2)
        broker = Broker(popping.group)
    pass_ms(broker, INVISIBLE_MS - 1)
    again = pop(broker, **ask)
    assert bodies(again) == [(b"a", 0), (b"b", 0)], "it is no further attempt"
    pass_ms(broker, INVISIBLE_MS - 1)
    other = pop(broker, order=order, attemptId="b")
    assert other.code == ResponseCode.PULL_NOT_FOUND if order == "true" else bodies(other)
    assert [ack(broker, handle).code for handle in lost] == [ResponseCode.NO_MESSAGE] * 2
    assert ack(broker, handles(again)[0]).code == 0
    assert bodies(pop(broker, **ask)) == [(b"b", 0)], "what is acknowledged never comes again"
    pass_ms(broker, INVISIBLE_MS + 100)
    assert (b"b", 1) in bodies(pop(broker, **ask)), "its time is over: it is another attempt"


def test_repeated_receive_waits_as_the_first(popping: Broker) -> None:
    held = [hold(popping, topic="T", queueId=1, attemptId="a") for _ in range(2)]
    popping.group.put("T", 1, b"x")
    while popping.group.waiting:
        popping.group.settle()
    for command in held:
        assert bodies(answered(popping, command)) == [(b"x", 0)]


def test_old_handle_beside_a_receive_doubles_nothing(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, barrier = broker.group, broker.group.read_barrier
    for topic in ("T", "U"):
        broker.make_topic(topic)
    group.put("U", 0, b"u")
    held = hold(broker)
    asked = [
        request(RequestCode.POP_MESSAGE, fields(topic="U", consumerGroup="h")),
        request(RequestCode.POP_MESSAGE, fields()),
        request(
            RequestCode.ACK_MESSAGE, receipt(ReceiptHandle(0, 1, INVISIBLE_MS, 1_001, BROKER, 0, 0))
        ),
    ]

    def barrier_that_applies(on_done: OnBarrier) -> None:
        for listener in group.on_applied:
            listener([("T", 0, 1)])
        barrier(on_done)

    monkeypatch.setattr(group, "read_barrier", barrier_that_applies)
    # The last two wait for the entry of the first, and are decided together.
    assert [broker.handle(each) for each in asked] == [DEFERRED] * 3
    group.put("T", 0, b"a")
    group.settle()
    answers = [answer_of(broker, each) for each in asked]
    assert answers[1] is not None
    assert bodies(answers[1]) == [(b"a", 0)]
    assert answers[2] is not None
    assert answers[2].code == ResponseCode.NO_MESSAGE
    assert answer_of(broker, held) is None


def test_requests_of_one_moment_share_an_entry(popping: Broker) -> None:
    first = pop(popping, maxMsgNums=1)
    before = popping.group.state.max_offset(STATE_TOPIC, POP_QUEUE)
    commands = [request(RequestCode.POP_MESSAGE, fields(maxMsgNums=1)) for _ in range(2)]
    commands.append(request(RequestCode.ACK_MESSAGE, receipt(handles(first)[0])))
    assert [popping.handle(command) for command in commands] == [DEFERRED] * 3
    popping.group.settle()
    popping.group.settle()
    answers = [answer_of(popping, command) for command in commands]
    assert [answer and answer.code for answer in answers] == [0, 0, 0]
    assert [bodies(answer) for answer in answers[:2] if answer] == [[(b"b", 0)], [(b"c", 0)]]
    assert popping.group.state.max_offset(STATE_TOPIC, POP_QUEUE) == before + 2


def test_stale_is_answered_behind_the_barrier_alone(popping: Broker) -> None:
    handle = handles(pop(popping, maxMsgNums=1))[0]
    assert ack(popping, handle).code == 0
    group = popping.group
    group.barriers_pass = False
    command = request(RequestCode.ACK_MESSAGE, receipt(handle))
    assert popping.handle(command) is DEFERRED
    group.settle()
    assert answer_of(popping, command) is None, "another node may lead, and know better"
    group.step_down("10.0.0.2:10911")
    found = answered(popping, command)
    assert found.code != ResponseCode.NO_MESSAGE
    assert found.ext["leaderAddr"] == "10.0.0.2:10911"


def test_handle_of_a_newer_leader_counts_when_known(popping: Broker) -> None:
    handle = handles(pop(popping, maxMsgNums=1))[0]
    row = popping.group.state.pops.pop(("g", "T", 0))
    popping.group.barriers_pass = False
    command = request(RequestCode.ACK_MESSAGE, receipt(handle))
    assert popping.handle(command) is DEFERRED
    popping.group.state.pops["g", "T", 0] = row
    popping.group.pass_barriers()
    popping.group.settle()
    assert answered(popping, command).code == 0
    assert popping.group.state.pops == {}


def test_foreign_handles_are_refused(popping: Broker) -> None:
    handle = handles(pop(popping))[0]
    assert ack(popping, handle, consumerGroup="h").code == ResponseCode.NO_MESSAGE
    assert ack(popping, handle, offset=1).code == 0, "one grant, one token for its queue"
    for text in ("", "1 2 3", handle.encode().replace(" ", "  ", 1), "a b c d 0 e f g"):
        assert ack(popping, handle, extraInfo=text).code == ResponseCode.SYSTEM_ERROR


def test_spent_message_goes_to_the_dead_letters(popping: Broker) -> None:
    retries(popping.group, 1)
    assert len(bodies(pop(popping, maxMsgNums=1))) == 1
    pass_ms(popping, INVISIBLE_MS)
    assert bodies(pop(popping, maxMsgNums=1)) == [(b"a", 1)]
    pass_ms(popping, INVISIBLE_MS)
    before = popping.group.log.last_index
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]
    assert popping.group.log.last_index == before + 1, "the copy and its mark are one entry"
    units = popping.group.queues.queue("%DLQ%g", 0).read(0, 1)
    assert popping.group.state.max_offset("%DLQ%g", 0) == 1
    record = next(iter_records(bytes(popping.group.log.read(*place_of(units)))))
    assert bytes(record.body) == b"a"
    assert record.property_map["DLQ_ORIGIN_TOPIC"] == "T"
    assert record.reconsume_times == 2
    assert set(popping.group.state.pops["g", "T", 0].out) == {1, 2}
    assert popping.group.state.consumer_offset("g", "T", 0) == 1


def test_last_message_dies_without_another_to_hand_out(broker: Broker) -> None:
    broker.make_topic("T", queues=1)
    broker.group.put("T", 0, b"a")
    retries(broker.group, 0)
    pop(broker)
    pass_ms(broker, INVISIBLE_MS)
    command = hold(broker)
    assert broker.group.state.max_offset("%DLQ%g", 0) == 1
    assert broker.group.state.pops == {}
    broker.group.put("T", 0, b"b")
    broker.group.settle()
    assert bodies(answered(broker, command)) == [(b"b", 0)]


def test_notice_calls_for_a_spent_message(broker: Broker) -> None:
    """A client that polls by notices alone gets it by its next POP."""
    broker.make_topic("T", queues=1)
    broker.group.put("T", 0, b"a")
    retries(broker.group, 0)
    pop(broker)
    notice = request(RequestCode.NOTIFICATION, fields())
    pass_ms(broker, INVISIBLE_MS - 1)
    answer = broker.handle(notice)
    assert isinstance(answer, RemotingCommand)
    assert answer.ext["hasMsg"] == "false"
    pass_ms(broker, 1)
    before = broker.group.log.last_index
    answer = broker.handle(notice)
    assert isinstance(answer, RemotingCommand)
    assert answer.ext["hasMsg"] == "true"
    assert (broker.group.log.last_index, broker.group.waiting) == (before, 0)
    assert pop(broker).code == ResponseCode.PULL_NOT_FOUND
    broker.group.settle()
    assert broker.group.state.max_offset("%DLQ%g", 0) == 1
    answer = broker.handle(notice)
    assert isinstance(answer, RemotingCommand)
    assert answer.ext["hasMsg"] == "false"


def test_due_message_does_not_wait_for_spent_ones(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.make_topic("T", queues=1)
    broker.group.put("T", 0, *[b"spent"] * 300, b"due")
    retries(broker.group, 1)
    for invisible_ms in (INVISIBLE_MS, 1_000):
        assert len(bodies(pop(broker, maxMsgNums=300, invisibleTime=invisible_ms))) == 300
        pass_ms(broker, invisible_ms - 1)
        if invisible_ms == 1_000:
            assert bodies(pop(broker)) == [(b"due", 0)]
        pass_ms(broker, 1)

    def refuse(self: Destinations, group: str) -> tuple[str, TopicConfig | None]:
        raise TableFullError("no more topics")

    monkeypatch.setattr(Destinations, "dead_letter_topic", refuse)
    pass_ms(broker, INVISIBLE_MS)
    assert bodies(pop(broker)) == [(b"due", 1)]
    monkeypatch.undo()
    for count in (44, 300):  # what is behind those that had no copy, and later these
        assert pop(broker).code == ResponseCode.PULL_NOT_FOUND
        broker.group.settle()
        assert broker.group.state.max_offset("%DLQ%g", 0) == count
        pass_ms(broker, int(SET_ASIDE_S * 1000))
    assert set(broker.group.state.pops["g", "T", 0].out) == {300}


def test_message_that_no_consumer_got_is_spent_by_none(broker: Broker) -> None:
    """A proxy gives back what reached no client; the group allows one attempt alone."""
    broker.make_topic("T", queues=1)
    retries(broker.group, 0)
    broker.group.put("T", 0, b"a")
    for _ in range(3):
        found = pop(broker)
        assert bodies(found) == [(b"a", 0)]
        assert change(broker, handles(found)[0], 1, unseen="true").code == 0
        pass_ms(broker, 1)
    assert change(broker, handles(pop(broker))[0], 1).code == 0
    pass_ms(broker, 1)
    assert pop(broker).code == ResponseCode.PULL_NOT_FOUND
    broker.group.settle()
    assert broker.group.state.max_offset("%DLQ%g", 0) == 1


def test_filter_passes_over_other_tags(broker: Broker) -> None:
    broker.make_topic("T", queues=1)
    broker.group.put("T", 0, b"a", b"b", properties=b"TAGS\x01other\x02")
    assert pop(broker, exp="wanted", expType="TAG").code == ResponseCode.PULL_NOT_FOUND
    broker.group.settle()
    assert broker.group.state.consumer_offset("g", "T", 0) == 2
    broker.group.put("T", 0, b"c", properties=b"TAGS\x01wanted\x02")
    assert bodies(pop(broker, exp="wanted", expType="TAG")) == [(b"c", 0)]


def test_handle_with_the_position_of_a_proxy_is_taken(popping: Broker) -> None:
    """RocketMQ's proxy adds the position in the log."""
    (handle, *_) = handles(pop(popping, maxMsgNums=1))
    assert ack(popping, handle, extraInfo=f"{handle.encode()} 4711").code == 0
    popping.group.settle()
    assert popping.group.state.consumer_offset("g", "T", 0) == 1


def test_queues_take_turns(broker: Broker) -> None:
    broker.make_topic("T", queues=4)
    for queue_id in range(4):
        broker.group.put("T", queue_id, b"%d" % queue_id, b"more")
    found = {bodies(pop(broker, maxMsgNums=1))[0][0] for _ in range(4)}
    assert found == {b"0", b"1", b"2", b"3"}


def test_answer_is_bounded_by_bytes(group: FakeGroup) -> None:
    broker = Broker(group, max_transfer_bytes_in_memory=600)
    broker.make_topic("T", queues=1)
    group.put("T", 0, *[b"x" * 200] * 5)
    assert len(bodies(pop(broker))) == 2
    group.put("T", 0, b"y" * 2000)
    assert len(bodies(pop(broker))) == 2
    assert len(bodies(pop(broker))) == 1
    assert [len(body) for body, _ in bodies(pop(broker))] == [2000]


def test_full_queue_hands_out_no_new_messages(
    popping: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_OUT_PER_QUEUE == 10_000
    monkeypatch.setattr("dledger.services.pop_decision.MAX_OUT_PER_QUEUE", 2)
    first = pop(popping)
    assert len(bodies(first)) == 2
    assert pop(popping).code == ResponseCode.PULL_NOT_FOUND
    assert ack(popping, handles(first)[0]).code == 0
    assert bodies(pop(popping)) == [(b"c", 0)]


def test_number_of_messages_that_are_out_is_bounded(
    popping: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dledger.services.pop_decision.MAX_OUT", 3)
    popping.group.put("T", 1, b"d", b"e", b"f")
    given = [handle for _ in range(3) for handle in handles(pop(popping, maxMsgNums=1))]
    assert len(given) == 3
    assert pop(popping).code == ResponseCode.PULL_NOT_FOUND, "all came within a second"
    assert ack(popping, given[0]).code == 0
    pass_ms(popping, 1_000)
    assert len(handles(pop(popping))) == 1


def test_unknown_outcome_refuses_until_it_is_known(popping: Broker) -> None:
    group = popping.group
    group.stalled = True
    command = request(RequestCode.POP_MESSAGE, fields(maxMsgNums=1))
    assert popping.handle(command) is DEFERRED
    group.append()
    group.leadership = None
    popping.processors.role_changed()
    assert popping.handle(request(RequestCode.POP_MESSAGE, fields())).code == 14


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"invisibleTime": 0}, 1),
        ({"invisibleTime": 12 * 3_600_000 + 1}, 1),
        ({"queueId": 2}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "U"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"exp": "a >", "expType": "SQL92"}, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ({"maxMsgNums": None}, 1),
    ],
)
def test_bad_pops_are_refused(popping: Broker, changes: dict[str, Any], code: int) -> None:
    assert pop(popping, **changes).code == code
    assert popping.group.state.pops == {}


@pytest.mark.parametrize("code", [RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION])
@pytest.mark.parametrize("topic", sorted(INNER_TOPICS))
def test_topics_of_the_broker_are_not_popped(popping: Broker, code: int, topic: str) -> None:
    before = popping.group.log.last_index
    answer = popping.handle(request(code, fields(topic=topic, exp="none", pollTime=15_000)))
    assert isinstance(answer, RemotingCommand)
    assert answer.code == ResponseCode.NO_PERMISSION
    popping.group.settle()
    assert popping.group.log.last_index == before


@pytest.mark.parametrize("popped", [0, 2])
def test_topic_made_again_is_popped_from_its_start(popping: Broker, popped: int) -> None:
    if popped:
        pop(popping, maxMsgNums=popped)
    commands = [
        request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}),
        request(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields()),
    ]
    for command in commands:
        popping.handle(command)
    asked = request(RequestCode.POP_MESSAGE, fields())
    popping.handle(asked)
    for _ in range(3):
        popping.group.settle()
    assert popping.group.state.pops == {}
    popping.group.put("T", 0, b"n0", b"n1")
    assert bodies(pop(popping)) == [(b"n0", 0), (b"n1", 0)]


def test_group_that_is_being_removed_gets_nothing(popping: Broker) -> None:
    pop(popping, maxMsgNums=2)
    command = request(
        RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "cleanOffset": "true"}
    )
    popping.handle(command)
    asked = request(RequestCode.POP_MESSAGE, fields())
    popping.handle(asked)
    for _ in range(3):
        popping.group.settle()
    assert popping.group.state.pops == {}
    assert popping.group.state.consumer_offset("g", "T", 0) is None


def test_request_mode_is_kept_in_the_log(popping: Broker) -> None:
    body = {"topic": "T", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 8}
    asked = json.dumps(body).encode()
    assert popping.call(RequestCode.SET_MESSAGE_REQUEST_MODE, {}, asked).code == 0
    listed = popping.call(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)
    assert json.loads(bytes(listed.body)) == {"messageRequestModeMap": {"T": {"g": body}}}
    query = {"topic": "T", "consumerGroup": "g", "clientId": "c", "messageModel": "CLUSTERING"}
    answer = popping.call(RequestCode.QUERY_ASSIGNMENT, {}, json.dumps(query).encode())
    assigned = QueryAssignmentResponseBody.decode(answer.body).message_queue_assignments
    assert [(item.message_queue.queue_id, item.mode) for item in assigned] == [(-1, "POP")]
    for wrong in ({"mode": "PUSH"}, {"topic": "%RETRY%g"}, {"topic": "U"}):
        asked = json.dumps({**body, **wrong}).encode()
        assert popping.call(RequestCode.SET_MESSAGE_REQUEST_MODE, {}, asked).code != 0


@pytest.mark.parametrize("clean", ["true", "false"])
@pytest.mark.parametrize("has_config", [True, False])
def test_deleted_group_has_no_mode(popping: Broker, clean: str, has_config: bool) -> None:
    if has_config:
        popping.make_group("g")
    for group in ("g", "h"):
        body = {"topic": "T", "consumerGroup": group, "mode": "POP", "popShareQueueNum": 8}
        asked = json.dumps(body).encode()
        assert popping.call(RequestCode.SET_MESSAGE_REQUEST_MODE, {}, asked).code == 0
    remove = {"groupName": "g", "cleanOffset": clean}
    assert popping.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, remove).code == 0
    assert popping.group.state.request_modes == {("T", "h"): RequestMode("h", "T", "POP", 8)}
    query = {"topic": "T", "consumerGroup": "g", "clientId": "c", "messageModel": "CLUSTERING"}
    answer = popping.call(RequestCode.QUERY_ASSIGNMENT, {}, json.dumps(query).encode())
    assigned = QueryAssignmentResponseBody.decode(answer.body).message_queue_assignments
    assert {item.mode for item in assigned} <= {"PULL"}
