"""POP over the fake group: what comes to which client, when again, and what a handle does."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
import trio

from commitlog.record import iter_records
from dledger.broker_errors import PendingFullError, TableFullError
from dledger.filters.errors import DamagedMessageError
from dledger.filters.property_filter import Matching, scan
from dledger.group_api import OnBarrier
from dledger.processors import pop_messages
from dledger.processors.destination import Destinations
from dledger.processors.get_message import MIN_SCAN_UNITS
from dledger.processors.pop_messages import PopMessages
from dledger.services import pop_decision
from dledger.services.pop_decision import Found, Receive
from dledger.services.pop_grants import PASSED_OVER_MS, SET_ASIDE_S
from dledger.services.queue_locks import LEASE_S
from dledger.state.pop import HAS_ROW, MAX_OUT_PER_QUEUE, PopChange, PopGrant, PopMark
from dledger.state.snapshot import load, snapshot
from dledger.state.state_record import SubscriptionGroupsChange, state_batch
from dledger.state.topics import POP_QUEUE, STATE_TOPIC, SubscriptionGroupConfig, TopicConfig
from dledger.testing.doubles import ManualClock, VirtualClock
from remoting.access.accounts import INNER_TOPICS
from remoting.errors import BadRequestError
from remoting.processor import DEFERRED
from remoting.protocol.bodies import LockBatchRequestBody, MessageQueue, ResetOffsetBody
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, request
from remoting.protocol.headers import PullMessageHeader
from remoting.protocol.own_fields import FROM_NOW_FIELD, STALE_FIELD, decode_stale
from remoting.protocol.pop_requests import (
    MAX_READ_BITS,
    MAX_REQUEST_BITS,
    BatchAck,
    BatchAckMessageRequestBody,
    PopMessageResponseHeader,
    QueryAssignmentResponseBody,
    decode_start_offsets,
)
from remoting.protocol.receipt_handle import ReceiptHandle
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, FakeConnection, FakeGroup, Term

INVISIBLE_MS = 30_000


def fields(**changes: Any) -> dict[str, str]:
    values = {
        "consumerGroup": "g",
        "topic": "T",
        "queueId": -1,
        "maxMsgNums": 32,
        "invisibleTime": INVISIBLE_MS,
        "pollTime": 0,
        "bornTime": 0,
        "initMode": 0,
        **changes,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def pop(broker: Broker, **changes: Any) -> RemotingCommand:
    command = request(RequestCode.POP_MESSAGE, fields(**changes))
    handled = broker.handle(command)
    while handled is DEFERRED:
        broker.group.settle()
        answers = [answer for asked, answer in broker.connection.replies if asked is command]
        if answers:
            return answers[0]
        assert broker.group.waiting, "not answered"
    assert isinstance(handled, RemotingCommand), handled
    return handled


def hold(broker: Broker, code: int = RequestCode.POP_MESSAGE, **changes: Any) -> RemotingCommand:
    """Send a request that finds nothing and waits."""
    command = request(code, fields(pollTime=15_000, **changes))
    assert broker.handle(command) is DEFERRED
    broker.group.settle()
    assert answer_of(broker, command) is None
    return command


def answer_of(broker: Broker, command: RemotingCommand) -> RemotingCommand | None:
    found = [answer for asked, answer in broker.connection.replies if asked is command]
    return found[0] if found else None


def bodies(response: RemotingCommand) -> list[tuple[bytes, int]]:
    """Return the body of each message, and how often it was handed out before."""
    assert response.code == 0, response
    return [
        (bytes(record.body), record.reconsume_times)
        for record in iter_records(bytes(response.body))
    ]


def handles(response: RemotingCommand) -> list[ReceiptHandle]:
    """Put the handles together as a client does."""
    header = PopMessageResponseHeader.decode(response.ext)
    starts = decode_start_offsets(header.start_offset_info or "")
    return [
        ReceiptHandle(
            starts["0", record.queue_id],
            header.pop_time,
            header.invisible_time,
            header.revive_qid,
            BROKER,
            record.queue_id,
            record.queue_offset,
        )
        for record in iter_records(bytes(response.body))
    ]


def receipt(handle: ReceiptHandle, **changes: Any) -> dict[str, str]:
    values = {
        "consumerGroup": "g",
        "topic": "T",
        "queueId": handle.queue_id,
        "offset": handle.offset,
        "extraInfo": handle.encode(),
        **changes,
    }
    return {name: str(value) for name, value in values.items()}


def ack(broker: Broker, handle: ReceiptHandle, **changes: Any) -> RemotingCommand:
    return broker.call(RequestCode.ACK_MESSAGE, receipt(handle, **changes))


def change(broker: Broker, handle: ReceiptHandle, invisible_ms: int) -> RemotingCommand:
    ext = receipt(handle, invisibleTime=invisible_ms)
    return broker.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext)


def changed(handle: ReceiptHandle, response: RemotingCommand) -> ReceiptHandle:
    assert response.code == 0, response
    return ReceiptHandle(
        handle.offset,
        int(response.ext["popTime"]),
        int(response.ext["invisibleTime"]),
        int(response.ext["reviveQid"]),
        BROKER,
        handle.queue_id,
        handle.offset,
    )


def damage(patch: pytest.MonkeyPatch, *queues: tuple[str, int]) -> None:
    """Let messages of some queues be unreadable where they are looked for."""
    find = PopMessages.find

    def found(self: PopMessages, receive: Receive, queue_id: int, *rest: int) -> Found:
        if (receive.topic, queue_id) in queues:
            raise DamagedMessageError("unreadable", 0, 1)
        return find(self, receive, queue_id, *rest)

    patch.setattr(PopMessages, "find", found)


def pass_ms(broker: Broker, ms: int) -> None:
    assert isinstance(broker.clock, ManualClock)
    broker.clock.now_s += ms / 1000


def retries(group: FakeGroup, times: int) -> None:
    config = SubscriptionGroupConfig("g", retry_max_times=times)
    group.propose(state_batch(SubscriptionGroupsChange((config,))), lambda _: None)
    group.settle()


@pytest.fixture
def popping(broker: Broker) -> Broker:
    broker.make_topic("T", queues=2)
    broker.group.put("T", 0, b"a", b"b", b"c")
    return broker


def test_pop_hands_out_what_pull_would_read(popping: Broker) -> None:
    response = pop(popping)
    assert bodies(response) == [(b"a", 0), (b"b", 0), (b"c", 0)]
    assert response.ext["startOffsetInfo"] == "0 0 0"
    assert response.ext["msgOffsetInfo"] == "0 0 0,1,2"
    assert response.ext["invisibleTime"] == str(INVISIBLE_MS)
    assert response.ext["popTime"] == str(popping.group.log.last_store_time_ms)
    assert response.ext["restNum"] == "0"
    assert set(popping.group.state.pops["g", "T", 0].out) == {0, 1, 2}


def test_no_other_consumer_sees_a_message_that_is_out(popping: Broker) -> None:
    assert bodies(pop(popping, maxMsgNums=2)) == [(b"a", 0), (b"b", 0)]
    assert bodies(pop(popping, maxMsgNums=2)) == [(b"c", 0)]
    assert pop(popping).code == ResponseCode.PULL_NOT_FOUND
    assert bodies(pop(popping, consumerGroup="h")) == [(b"a", 0), (b"b", 0), (b"c", 0)]


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


def test_expired_message_comes_again_with_its_attempts(popping: Broker) -> None:
    pop(popping, maxMsgNums=2)
    pass_ms(popping, INVISIBLE_MS - 1)
    assert bodies(pop(popping)) == [(b"c", 0)]
    pass_ms(popping, 1)
    assert bodies(pop(popping)) == [(b"a", 1), (b"b", 1)]
    pass_ms(popping, INVISIBLE_MS)
    assert bodies(pop(popping, maxMsgNums=2)) == [(b"a", 2), (b"c", 1)]


def test_acknowledged_message_never_comes_again(popping: Broker) -> None:
    first, second, third = handles(pop(popping))
    assert ack(popping, second).code == 0
    assert popping.group.state.consumer_offset("g", "T", 0) == 0
    pass_ms(popping, INVISIBLE_MS)
    assert bodies(pop(popping)) == [(b"a", 1), (b"c", 1)]
    assert ack(popping, first).code == ResponseCode.NO_MESSAGE
    assert ack(popping, second).code == ResponseCode.NO_MESSAGE
    assert ack(popping, third).code == ResponseCode.NO_MESSAGE


def test_offset_follows_the_lowest_that_is_out(popping: Broker) -> None:
    first, second, third = handles(pop(popping))
    for handle, offset in ((second, 0), (first, 2), (third, 3)):
        assert ack(popping, handle).code == 0
        assert popping.group.state.consumer_offset("g", "T", 0) == offset
    assert popping.group.state.pops == {}


def test_late_acknowledgement_counts_until_next_grant(popping: Broker) -> None:
    handle = handles(pop(popping, maxMsgNums=1))[0]
    pass_ms(popping, 2 * INVISIBLE_MS)
    assert ack(popping, handle).code == 0
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]


def test_changed_time_gives_a_new_handle(popping: Broker) -> None:
    old = handles(pop(popping, maxMsgNums=1))[0]
    new = changed(old, change(popping, old, 60_000))
    assert new.revive_queue_id != old.revive_queue_id
    assert ack(popping, old).code == ResponseCode.NO_MESSAGE
    assert change(popping, old, 5).code == ResponseCode.NO_MESSAGE
    pass_ms(popping, 59_999)
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]
    assert ack(popping, new).code == 0


def test_handles_stand_across_a_fail_over(popping: Broker, clock: ManualClock) -> None:
    old, kept, _ = handles(pop(popping))
    new = changed(old, change(popping, old, 60_000))
    popping.group.leadership = None
    popping.processors.role_changed()
    assert ack(popping, kept).code == ResponseCode.SERVICE_NOT_AVAILABLE
    popping.group.leadership = Term(2)
    other = Broker(popping.group, clock)
    assert ack(other, old).code == ResponseCode.NO_MESSAGE
    assert ack(other, kept).code == 0
    assert ack(other, new).code == 0


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
    found = answer_of(popping, command)
    assert found is not None
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
    found = answer_of(popping, command)
    assert found is not None
    assert found.code == 0
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
    record = next(iter_records(bytes(popping.group.log.read(*_place(units)))))
    assert bytes(record.body) == b"a"
    assert record.property_map["DLQ_ORIGIN_TOPIC"] == "T"
    assert record.reconsume_times == 2
    assert set(popping.group.state.pops["g", "T", 0].out) == {1, 2}
    assert popping.group.state.consumer_offset("g", "T", 0) == 1


def _place(units: Any) -> tuple[int, int]:
    return int(units["phy_offset"][0]), int(units["size"][0])


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
    found = answer_of(broker, command)
    assert found is not None
    assert bodies(found) == [(b"b", 0)]


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


@pytest.mark.parametrize("times", [0, 1, 3])
@pytest.mark.parametrize("order", ["false", "true"])
def test_message_is_out_retries_and_once_more(broker: Broker, times: int, order: str) -> None:
    broker.make_topic("T", queues=1)
    broker.group.put("T", 0, b"a")
    retries(broker.group, times)
    for attempt in range(times + 1):
        given = pop(broker, order=order)
        assert bodies(given) == [(b"a", attempt)]
        assert broker.group.state.max_offset("%DLQ%g", 0) == 0
        if attempt % 2:  # handed back, not waited for: the same attempt goes on
            assert change(broker, handles(given)[0], 1).code == 0
            pass_ms(broker, 1)
        else:
            pass_ms(broker, INVISIBLE_MS)
    assert pop(broker, order=order).code == ResponseCode.PULL_NOT_FOUND
    broker.group.settle()
    assert broker.group.state.max_offset("%DLQ%g", 0) == 1
    assert broker.group.state.pops == {}
    assert broker.group.state.consumer_offset("g", "T", 0) == 1
    units = broker.group.queues.queue("%DLQ%g", 0).read(0, 1)
    record = next(iter_records(bytes(broker.group.log.read(*_place(units)))))
    assert (bytes(record.body), record.reconsume_times) == (b"a", times + 1)


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


def test_fifo_waits_for_the_message_before(popping: Broker) -> None:
    first = pop(popping, maxMsgNums=1, order="true", queueId=0)
    assert bodies(first) == [(b"a", 0)]
    assert pop(popping, maxMsgNums=1, order="true").code == ResponseCode.PULL_NOT_FOUND
    assert ack(popping, handles(first)[0]).code == 0
    second = pop(popping, maxMsgNums=1, order="true")
    assert bodies(second) == [(b"b", 0)]
    pass_ms(popping, INVISIBLE_MS)
    assert bodies(pop(popping, order="true")) == [(b"b", 1), (b"c", 0)]
    assert ack(popping, handles(second)[0]).code == ResponseCode.NO_MESSAGE


def test_fifo_hands_out_again_before_what_is_new(popping: Broker) -> None:
    pop(popping, maxMsgNums=2, order="true")
    pass_ms(popping, INVISIBLE_MS)
    assert bodies(pop(popping, maxMsgNums=1, order="true")) == [(b"a", 1)]
    assert pop(popping, order="true").code == ResponseCode.PULL_NOT_FOUND


def test_fifo_goes_on_where_the_message_before_has_died(broker: Broker) -> None:
    broker.make_topic("T", queues=1)
    retries(broker.group, 0)
    broker.group.put("T", 0, b"a", b"b")
    assert bodies(pop(broker, order="true", maxMsgNums=1)) == [(b"a", 0)]
    pass_ms(broker, INVISIBLE_MS)
    assert bodies(pop(broker, order="true")) == [(b"b", 0)], (
        "with the entry that gives up the first"
    )
    assert broker.group.state.max_offset("%DLQ%g", 0) == 1


def test_held_fifo_wakes_at_the_acknowledgement(popping: Broker) -> None:
    handle = handles(pop(popping, maxMsgNums=1, order="true"))[0]
    command = hold(popping, order="true", maxMsgNums=1)
    assert ack(popping, handle).code == 0
    popping.group.settle()
    found = answer_of(popping, command)
    assert found is not None
    assert bodies(found) == [(b"b", 0)]


def test_held_pop_wakes_at_an_arrival(broker: Broker) -> None:
    broker.make_topic("T", queues=2)
    first, second = hold(broker), hold(broker)
    info = broker.call(RequestCode.POLLING_INFO, fields())
    assert info.ext["pollingNum"] == "2"
    broker.group.put("T", 1, b"x")
    broker.group.settle()
    found = answer_of(broker, first)
    assert found is not None
    assert bodies(found) == [(b"x", 0)]
    assert answer_of(broker, second) is None, "one message, one consumer"


def test_held_pop_of_a_paused_group_gets_nothing(broker: Broker) -> None:
    broker.make_topic("T")
    group = broker.group
    held = hold(broker)
    asked = hold(broker, RequestCode.NOTIFICATION)
    paused = SubscriptionGroupConfig("g", consume_enable=False)
    group.propose(state_batch(SubscriptionGroupsChange(put=(paused,))), lambda _: None)
    group.settle()
    group.put("T", 0, b"one")
    group.settle()
    assert [answer_of(broker, each) for each in (held, asked)] == [None, None]
    assert not group.state.pops
    resumed = SubscriptionGroupConfig("g")
    group.propose(state_batch(SubscriptionGroupsChange(put=(resumed,))), lambda _: None)
    group.settle()
    group.put("T", 0, b"two")
    group.settle()
    answered = answer_of(broker, held)
    assert answered is not None
    assert bodies(answered) == [(b"one", 0), (b"two", 0)]


def test_notification_answers_and_takes_no_message(broker: Broker) -> None:
    broker.make_topic("T", queues=2)
    command = hold(broker, RequestCode.NOTIFICATION)
    broker.group.put("T", 1, b"x")
    found = answer_of(broker, command)
    assert found is not None
    assert found.ext["hasMsg"] == "true"
    at_once = broker.call(RequestCode.NOTIFICATION, fields())
    assert at_once.ext["hasMsg"] == "true"
    assert bodies(pop(broker)) == [(b"x", 0)]
    assert broker.call(RequestCode.NOTIFICATION, fields()).ext["hasMsg"] == "false"


def test_notification_sees_behind_many_other_tags(broker: Broker) -> None:
    """A receive reads some hundred messages at a time, and passes over what does not match."""
    broker.make_topic("T", queues=1)
    for _ in range(2 * MIN_SCAN_UNITS // 100):
        broker.group.put("T", 0, *[b"x"] * 100)
    broker.group.put("T", 0, b"y", properties=b"TAGS\x01B\x02")
    asked = fields(expType="TAG", exp="B")
    answers = list[RemotingCommand]()
    while not answers or answers[-1].code != 0:
        assert broker.call(RequestCode.NOTIFICATION, asked).ext["hasMsg"] == "true"
        answers.append(pop(broker, expType="TAG", exp="B"))
    assert bodies(answers[-1]) == [(b"y", 0)]
    assert len(answers) <= 4
    assert broker.call(RequestCode.NOTIFICATION, asked).ext["hasMsg"] == "false"


def scans_of(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let one decision scan no more than one queue; return where scans are counted."""
    monkeypatch.setattr(pop_decision, "MAX_SCAN_COST_PER_ENTRY", 1)
    counts: list[int] = []

    def counted(*args: Any) -> Matching:
        counts.append(broker.group.log.last_index)
        return scan(*args)

    monkeypatch.setattr(pop_messages, "scan", counted)
    return counts


SQL = {"expType": "SQL92", "exp": "a = 1"}


def test_filters_of_a_decision_share_one_bound(
    group: FakeGroup, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a filter that matches little stalls the leader for a whole backlog of many queues."""
    broker = Broker(group, clock, enable_property_filter=True)
    broker.make_topic("T", queues=8)
    for queue_id in range(8):
        group.put("T", queue_id, b"x", b"y", properties=b"a\x012\x02")
    group.put("T", 3, b"z", properties=b"a\x011\x02")
    scans = scans_of(broker, monkeypatch)
    asked = [request(RequestCode.POP_MESSAGE, fields(pollTime=15_000, **SQL)) for _ in range(2)]
    assert [broker.handle(each) for each in asked] == [DEFERRED] * 2
    while group.waiting:
        group.settle()
    assert len(scans) == len(set(scans)) == 8, "one queue at a time, and each once"
    (found,) = [answer for each in asked if (answer := answer_of(broker, each)) is not None]
    assert bodies(found) == [(b"z", 0)]
    for queue_id in range(8):
        passed = group.state.consumer_offset("g", "T", queue_id)
        assert passed == 2, "the message that is out is not passed"


async def test_notices_that_scan_take_turns_with_others(
    group: FakeGroup, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    group.clock = clock
    broker = Broker(group, clock, enable_property_filter=True)
    broker.make_topic("T", queues=2)
    broker.make_group("g")
    group.put("T", 0, b"x", properties=b"a\x012\x02")
    group.put("T", 1, b"x", properties=b"a\x012\x02")
    busy = request(RequestCode.POP_MESSAGE, fields(topic="U"))
    broker.make_topic("U", queues=1)
    group.put("U", 0, b"u")
    scans = scans_of(broker, monkeypatch)
    assert broker.handle(busy) is DEFERRED
    asked = [
        request(RequestCode.NOTIFICATION, fields(pollTime=15_000, queueId=queue_id, **SQL))
        for queue_id in (0, 1, 0)
    ]
    assert [broker.handle(each) for each in asked] == [DEFERRED] * 3
    group.settle()
    assert len(scans) == 1, "the others wait for their turn"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.processors.pops.run)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert len(scans) == 3
    answers = [answer_of(broker, each) for each in asked]
    assert [each and each.ext["hasMsg"] for each in answers] == ["true"] * 3


def test_notice_that_looked_at_some_queues_calls_for_a_pop(
    group: FakeGroup, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(group, clock, enable_property_filter=True)
    broker.make_topic("T", queues=4)
    for queue_id in range(3):
        group.put("T", queue_id, b"x", properties=b"a\x012\x02")
    group.put("T", 3, b"z", properties=b"a\x011\x02")
    scans_of(broker, monkeypatch)
    for _ in range(4):
        notice = broker.call(RequestCode.NOTIFICATION, fields(**SQL))
        assert notice.ext["hasMsg"] == "true"
        popped = pop(broker, **SQL)
        if popped.code == 0:
            break
    assert bodies(popped) == [(b"z", 0)]


def test_new_group_at_the_end_of_many_queues_begins_in_steps(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of tens of thousands of queues would fit no entry, and no try would ever end."""
    monkeypatch.setattr(pop_decision, "MAX_MESSAGES_PER_ENTRY", 10)
    group = broker.group
    broker.make_topic("T", queues=25)
    for queue_id in range(25):
        group.put("T", queue_id, b"old")
    command = request(RequestCode.POP_MESSAGE, fields(pollTime=15_000, initMode=1))
    command.ext[FROM_NOW_FIELD] = "true"
    assert broker.handle(command) is DEFERRED
    while group.waiting:
        group.settle()
    begun = [
        len(change.grants)
        for applied in group.applied
        for change in applied.changes
        if isinstance(change, PopChange)
    ]
    assert begun == [10, 10, 5]
    assert {group.state.consumer_offset("g", "T", each) for each in range(25)} == {1}
    group.put("T", 17, b"new")
    group.settle()
    found = answer_of(broker, command)
    assert found is not None
    assert bodies(found) == [(b"new", 0)]


@pytest.mark.parametrize("is_taken", [False, True])
async def test_held_pop_goes_on_when_nothing_could_be_stored(
    group: FakeGroup, autojump_clock: trio.testing.MockClock, *, is_taken: bool
) -> None:
    """What it passed over is not in the log, and no message arrives that would wake it."""
    clock = VirtualClock()
    group.clock = clock
    broker = Broker(group, clock)
    broker.make_topic("T", queues=1)
    broker.make_group("g")
    for _ in range(MIN_SCAN_UNITS // 100):
        group.put("T", 0, *[b"x"] * 100)
    group.put("T", 0, b"y", properties=b"TAGS\x01B\x02")
    if not is_taken:
        group.refuse = PendingFullError("full")
    command = request(RequestCode.POP_MESSAGE, fields(pollTime=15_000, expType="TAG", exp="B"))
    assert broker.handle(command) is DEFERRED
    if is_taken:
        group.fail_waiting(PendingFullError("a hanging disk"))
    group.refuse = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.processors.pops.run)
        await trio.sleep(PASSED_OVER_MS / 1000 + 0.1)
        while group.waiting:
            group.settle()
        nursery.cancel_scope.cancel()
    found = answer_of(broker, command)
    assert found is not None
    assert bodies(found) == [(b"y", 0)]


def test_damage_fails_one_notification_alone(
    popping: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    popping.make_topic("U", queues=1)
    popping.group.put("U", 0, b"u")
    damage(monkeypatch, ("U", 0))
    first = request(RequestCode.POP_MESSAGE, fields(maxMsgNums=1))
    second = request(RequestCode.POP_MESSAGE, fields(maxMsgNums=1))
    notice = request(RequestCode.NOTIFICATION, fields(topic="U", pollTime=1_000))
    assert [popping.handle(each) for each in (first, second, notice)] == [DEFERRED] * 3
    popping.group.settle()
    popping.group.settle()
    answers = [answer_of(popping, each) for each in (first, second, notice)]
    assert [bodies(each) for each in answers[:2] if each] == [[(b"a", 0)], [(b"b", 0)]]
    assert answers[2] is not None
    assert answers[2].code != 0


def test_damaged_queue_leaves_those_of_others(
    popping: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    popping.group.put("T", 1, b"d")
    damage(monkeypatch, ("T", 1))
    assert bodies(pop(popping)) == [(b"a", 0), (b"b", 0), (b"c", 0)]
    assert pop(popping).code != ResponseCode.PULL_NOT_FOUND


def test_damaged_message_is_left_out_of_an_answer(
    popping: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = popping.group.log
    units = popping.group.queues.queue("T", 0).read(1, 1)
    read, place = log.read, _place(units)

    def broken(position: int, size: int) -> memoryview:
        record = bytearray(read(position, size))
        if (position, size) == place:
            record[record.index(b"b", 84)] ^= 1
        return memoryview(bytes(record))

    monkeypatch.setattr(log, "read", broken)
    other = pop(popping, consumerGroup="h", order="true")
    assert bodies(other) == [(b"a", 0)], "in order, those behind it wait for it"
    popping.group.damage_reports.clear()
    response = pop(popping)
    assert bodies(response) == [(b"a", 0), (b"c", 0)]
    assert response.ext["msgOffsetInfo"] == "0 0 0,2"
    assert popping.group.damage_reports == [place]
    monkeypatch.undo()
    pass_ms(popping, INVISIBLE_MS)
    assert bodies(pop(popping)) == [(b"a", 1), (b"b", 1), (b"c", 1)]
    assert ack(popping, handles(other)[0], consumerGroup="h").code == 0
    assert bodies(pop(popping, consumerGroup="h", order="true")) == [(b"b", 1), (b"c", 1)]


async def test_held_pop_ends_and_wakes_by_time(
    group: FakeGroup, autojump_clock: trio.testing.MockClock
) -> None:
    clock = VirtualClock()
    group.clock = clock
    broker = Broker(group, clock)
    broker.make_topic("T", queues=1)
    group.put("T", 0, b"a")
    assert bodies(pop(broker)) == [(b"a", 0)]
    early = request(RequestCode.POP_MESSAGE, fields(pollTime=10_000))
    late = request(RequestCode.POP_MESSAGE, fields(pollTime=60_000))
    assert [broker.handle(early), broker.handle(late)] == [DEFERRED] * 2
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.processors.pops.run)
        await trio.sleep(10.5)
        answer = answer_of(broker, early)
        assert answer is not None
        assert answer.code == ResponseCode.POLLING_TIMEOUT
        await trio.sleep(19.0)
        assert not group.waiting
        await trio.sleep(1.0)
        group.settle()
        nursery.cancel_scope.cancel()
    found = answer_of(broker, late)
    assert found is not None
    assert bodies(found) == [(b"a", 1)]


def test_closed_connection_waits_no_more(broker: Broker) -> None:
    broker.make_topic("T", queues=1)
    connection = FakeConnection()
    command = request(RequestCode.POP_MESSAGE, fields(pollTime=15_000))
    assert broker.handle(command, connection) is DEFERRED
    broker.group.settle()
    for closed in connection.on_close:
        closed(connection)
    broker.group.put("T", 0, b"x")
    assert broker.group.state.pops == {}
    assert bodies(pop(broker)) == [(b"x", 0)]


async def test_held_in_order_wakes_for_a_later_end(
    group: FakeGroup, autojump_clock: trio.testing.MockClock
) -> None:
    clock = VirtualClock()
    group.clock = clock
    broker = Broker(group, clock)
    broker.make_topic("T", queues=1)
    group.put("T", 0, b"a", b"b")
    pop(broker, maxMsgNums=1, invisibleTime=2_000)
    pop(broker, maxMsgNums=1, invisibleTime=5_000)
    command = hold(broker, order="true")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.processors.pops.run)
        await trio.sleep(5.5)
        group.settle()
        nursery.cancel_scope.cancel()
    found = answer_of(broker, command)
    assert found is not None
    assert bodies(found) == [(b"a", 1), (b"b", 1)]


@pytest.mark.parametrize("poll_ms", [0, 15_000])
def test_closed_connection_is_decided_no_more(popping: Broker, poll_ms: int) -> None:
    popping.handle(request(RequestCode.POP_MESSAGE, fields(maxMsgNums=1)))
    connection = FakeConnection()
    command = request(RequestCode.POP_MESSAGE, fields(maxMsgNums=1, pollTime=poll_ms))
    assert popping.handle(command, connection) is DEFERRED
    for closed in connection.on_close:
        closed(connection)
    popping.group.settle()
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]


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


def test_new_group_may_begin_at_the_end(popping: Broker) -> None:
    assert pop(popping, initMode=1, fromNow="true").code == ResponseCode.PULL_NOT_FOUND
    popping.group.settle()
    offset = popping.group.state.consumer_offset
    assert (offset("g", "T", 0), offset("g", "T", 1)) == (3, 0)
    popping.group.put("T", 0, b"d")
    popping.group.put("T", 1, b"e")
    assert sorted(bodies(pop(popping, initMode=1))) == [(b"d", 0), (b"e", 0)]


def test_new_group_begins_a_young_queue_at_its_first(popping: Broker) -> None:
    """RocketMQ's proxy asks for the end of each queue, and its brokers give all of a young one."""
    assert sorted(bodies(pop(popping, initMode=1))) == [(b"a", 0), (b"b", 0), (b"c", 0)]
    popping.group.put("T", 1, b"d")
    assert bodies(pop(popping, initMode=1)) == [(b"d", 0)]


def test_new_group_begins_an_old_queue_at_its_end(group: FakeGroup, clock: ManualClock) -> None:
    broker = Broker(group, clock, recent_bytes=300)
    broker.make_topic("T", queues=1)
    broker.group.put("T", 0, b"a", b"b" * 1000)
    assert pop(broker, initMode=1).code == ResponseCode.PULL_NOT_FOUND
    broker.group.settle()
    broker.group.put("T", 0, b"c")
    assert bodies(pop(broker, initMode=1)) == [(b"c", 0)]


def test_held_pop_of_a_new_group_gets_the_next(popping: Broker) -> None:
    command = hold(popping, initMode=1, fromNow="true")
    popping.group.put("T", 0, b"d")
    popping.group.settle()
    found = answer_of(popping, command)
    assert found is not None
    assert bodies(found) == [(b"d", 0)]
    assert bodies(pop(popping, consumerGroup="h")) == [(b"a", 0), (b"b", 0), (b"c", 0), (b"d", 0)]


def test_pop_goes_on_where_pulls_ended(popping: Broker) -> None:
    commit = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "2"}
    popping.make_group("g")
    assert popping.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == 0
    assert bodies(pop(popping)) == [(b"c", 0)]
    popping.processors.offsets.flush()
    assert not popping.group.waiting, "the grant has the offset"


def test_pulls_are_refused_while_messages_are_out(popping: Broker) -> None:
    handle = handles(pop(popping, maxMsgNums=1))[0]
    pull = PullMessageHeader("g", "T", 0, 0, 32, 4, 0, 0, 0, "*").encode()
    refused = popping.call(RequestCode.PULL_MESSAGE, pull)
    assert refused.code == ResponseCode.NO_PERMISSION
    assert "are out for the group g by POP" in (refused.remark or "")
    commit = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "0"}
    refused = popping.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**commit, "sync": "true"})
    assert refused.code == ResponseCode.NO_PERMISSION
    other = PullMessageHeader("h", "T", 0, 0, 32, 4, 0, 0, 0, "*").encode()
    assert popping.call(RequestCode.PULL_MESSAGE, other).code == 0
    assert ack(popping, handle).code == 0
    assert popping.call(RequestCode.PULL_MESSAGE, pull).code == 0


def test_messages_that_are_over_keep_no_pull_back(popping: Broker) -> None:
    pop(popping, maxMsgNums=2)
    pull = PullMessageHeader("g", "T", 0, 0, 32, 4, 0, 0, 0, "*").encode()
    commit = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "1"}
    commit["sync"] = "true"
    pass_ms(popping, INVISIBLE_MS - 1)
    assert popping.call(RequestCode.PULL_MESSAGE, pull).code == ResponseCode.NO_PERMISSION
    pass_ms(popping, 1)
    assert popping.call(RequestCode.PULL_MESSAGE, pull).code == 0
    assert popping.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == 0
    assert popping.group.state.pops == {}
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]


def taken_commit(broker: Broker, offset: int) -> None:
    """Commit as a pulling consumer of RocketMQ does: for the next flush, within a second."""
    commit = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": str(offset)}
    assert broker.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == 0
    assert not broker.group.waiting


def test_commit_taken_before_a_grant_does_not_end_it(popping: Broker) -> None:
    pop(popping, maxMsgNums=2)
    pass_ms(popping, INVISIBLE_MS)
    taken_commit(popping, 1)
    assert pop(popping).code == ResponseCode.PULL_NOT_FOUND, "the commit is on its way"
    popping.processors.offsets.flush()
    popping.group.settle()
    given = pop(popping)
    assert bodies(given) == [(b"b", 0), (b"c", 0)]
    popping.processors.offsets.flush()
    popping.group.settle()
    assert pop(popping).code == ResponseCode.PULL_NOT_FOUND
    assert [ack(popping, handle).code for handle in handles(given)] == [0, 0]


def test_taken_commit_gives_way_to_a_changed_time(popping: Broker) -> None:
    old = handles(pop(popping, maxMsgNums=1))[0]
    pass_ms(popping, INVISIBLE_MS)
    taken_commit(popping, 3)
    kept = changed(old, change(popping, old, 60_000))
    popping.processors.offsets.flush()
    popping.group.settle()
    assert (offset_of(popping), set(popping.group.state.pops["g", "T", 0].out)) == (0, {0})
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]
    assert ack(popping, kept).code == 0


def test_commit_that_goes_back_is_not_lost_to_a_pop(popping: Broker) -> None:
    popping.make_group("g")
    commit = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "2"}
    assert popping.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**commit, "sync": "true"}).code == 0
    taken_commit(popping, 1)
    assert pop(popping).code == ResponseCode.PULL_NOT_FOUND
    popping.processors.offsets.flush()
    popping.group.settle()
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]


def test_cloned_offsets_end_what_is_out(popping: Broker) -> None:
    commit = {"consumerGroup": "h", "topic": "T", "queueId": "0", "commitOffset": "1"}
    popping.make_group("h")
    commit["sync"] = "true"
    assert popping.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == 0
    pop(popping)
    clone = {"srcGroup": "h", "destGroup": "g", "topic": "T", "offline": "false"}
    assert popping.call(RequestCode.CLONE_GROUP_OFFSET, clone).code == 0
    assert popping.group.state.pops == {}
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]


def reset(broker: Broker, offset: int, **changes: Any) -> RemotingCommand:
    values = {"topic": "T", "group": "g", "timestamp": -1, "isForce": "true", "offset": offset}
    ext = {name: str(value) for name, value in {**values, **changes}.items()}
    return broker.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)


def offset_of(broker: Broker, queue_id: int = 0) -> int | None:
    return broker.group.state.consumer_offset("g", "T", queue_id)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_reset_while_messages_are_out(popping: Broker, offset: int) -> None:
    given = handles(pop(popping))
    assert ack(popping, given[1]).code == 0
    answer = reset(popping, offset)
    assert answer.code == 0, answer
    table = ResetOffsetBody.decode(answer.body).offset_table
    assert {queue.queue_id: at for queue, at in table.items()} == {0: offset, 1: 0}
    assert (popping.group.state.pops, offset_of(popping)) == ({}, offset)
    for handle in given:
        assert ack(popping, handle).code == ResponseCode.NO_MESSAGE
        assert change(popping, handle, 5).code == ResponseCode.NO_MESSAGE
    assert offset_of(popping) == offset, "no old receipt moves it"
    again = pop(popping)
    if offset == 3:
        assert again.code == ResponseCode.PULL_NOT_FOUND
        return
    assert bodies(again) == [(b"a", 0), (b"b", 0), (b"c", 0)][offset:]
    assert ack(popping, given[-1]).code == ResponseCode.NO_MESSAGE
    assert ack(popping, handles(again)[-1]).code == 0
    assert offset_of(popping) == offset


@pytest.mark.parametrize("late", ["ack", "change", "again", "fresh"])
def test_reset_ends_what_was_decided_before_it(popping: Broker, late: str) -> None:
    """The reset comes into the log before an entry that was decided without it."""
    given = handles(pop(popping, maxMsgNums=2))
    key = ("g", "T", 0)
    token = popping.group.state.pops[key].out[0].token
    pass_ms(popping, INVISIBLE_MS)
    changes = {
        "ack": PopChange(acked=(PopMark(key, 0, token),)),
        "change": PopChange(changed=(PopMark(key, 0, token, 1_000),)),
        "again": PopChange(grants=(PopGrant(key, 9, 2, 2, (), ((0, token),), HAS_ROW),)),
        "fresh": PopChange(grants=(PopGrant(key, 9, 2, 3, (2,), (), HAS_ROW),)),
    }
    assert reset(popping, 1).code == 0
    popping.group.propose(state_batch(changes[late]), lambda _: None)
    popping.group.settle()
    assert (popping.group.state.pops, offset_of(popping)) == ({}, 1)
    other = load(
        snapshot(popping.group.state),
        builtin_topics=popping.group.state.builtin_topics,
        builtin_groups=popping.group.state.builtin_groups,
    )
    assert (other.pops, other.consumer_offset(*key)) == ({}, 1)
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]
    assert ack(popping, given[0]).code == ResponseCode.NO_MESSAGE


def test_reset_counts_across_a_fail_over(popping: Broker, clock: ManualClock) -> None:
    old = handles(pop(popping))[0]
    assert reset(popping, 0).code == 0
    popping.group.leadership = Term(2)
    other = Broker(popping.group, clock)
    assert ack(other, old).code == ResponseCode.NO_MESSAGE
    assert bodies(pop(other)) == [(b"a", 0), (b"b", 0), (b"c", 0)]
    assert ack(other, old).code == ResponseCode.NO_MESSAGE


def test_reset_forward_without_force_ends_nothing(popping: Broker) -> None:
    given = handles(pop(popping))
    answer = reset(popping, 3, isForce="false")
    assert answer.code == 0
    table = ResetOffsetBody.decode(answer.body).offset_table
    assert {queue.queue_id: at for queue, at in table.items()} == {0: 0, 1: 0}
    assert set(popping.group.state.pops["g", "T", 0].out) == {0, 1, 2}
    assert [ack(popping, handle).code for handle in given] == [0, 0, 0]


def test_reset_of_one_queue_leaves_the_others(popping: Broker) -> None:
    popping.group.put("T", 1, b"x")
    given = {(each.queue_id, each.offset): each for each in handles(pop(popping))}
    assert reset(popping, 0, queueId=0).code == 0
    assert set(popping.group.state.pops) == {("g", "T", 1)}
    assert ack(popping, given[1, 0]).code == 0
    assert ack(popping, given[0, 0]).code == ResponseCode.NO_MESSAGE
    assert reset(popping, 0, queueId=7).code != 0


def test_reset_by_a_deposed_leader_stores_nothing(popping: Broker) -> None:
    given = handles(pop(popping))
    popping.group.barriers_pass = False
    ext = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true", "offset": "0"}
    command = request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)
    assert popping.handle(command) is DEFERRED
    popping.group.step_down("10.0.0.2:10911")
    found = answer_of(popping, command)
    assert found is not None
    assert found.ext["leaderAddr"] == "10.0.0.2:10911"
    assert len(popping.group.state.pops["g", "T", 0].out) == len(given)


def test_pop_passes_over_queues_that_pulls_wait_for(broker: Broker) -> None:
    broker.make_topic("T", queues=1)
    pull = PullMessageHeader("g", "T", 0, 0, 32, 4 | 2, 0, 15_000, 0, "*").encode()
    assert broker.handle(request(RequestCode.PULL_MESSAGE, pull)) is DEFERRED
    broker.group.settle()
    assert pop(broker).code == ResponseCode.PULL_NOT_FOUND
    broker.group.put("T", 0, b"x")
    assert bodies(pop(broker)) == [(b"x", 0)], "the pull is answered: nothing waits"
    assert PASSED_OVER_MS > 0


def test_pop_waits_for_a_lock_while_its_lease_runs(popping: Broker) -> None:
    queues = [MessageQueue("T", BROKER, 0)]
    body = LockBatchRequestBody("g", "a client", mq_set=queues)
    assert popping.call(RequestCode.LOCK_BATCH_MQ, {}, body.encode()).code == 0
    pass_ms(popping, int(LEASE_S * 1000) - 1)
    assert pop(popping).code == ResponseCode.PULL_NOT_FOUND
    pass_ms(popping, 1)
    assert bodies(pop(popping)) == [(b"a", 0), (b"b", 0), (b"c", 0)]


def test_batch_acknowledges_what_it_names(popping: Broker) -> None:
    given = handles(pop(popping))
    item = BatchAck(
        c="g",
        t="T",
        so=0,
        q=0,
        rq=given[0].revive_queue_id,
        pt=given[0].pop_time_ms,
        b=BatchAck.encode_offsets(0, [0, 2]),
    )
    body = BatchAckMessageRequestBody(broker_name=BROKER, acks=[item])
    assert popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body.encode()).code == 0
    assert set(popping.group.state.pops["g", "T", 0].out) == {1}
    item.b = [0b10]
    again = popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body.encode())
    assert again.code == 0, "newer writers have the bytes as a list"
    assert popping.group.state.pops == {}
    assert popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body.encode()).code == 208


@pytest.mark.parametrize(
    "body", [b'{"acks":[{"b":[1e999]}]}', b'{"acks":[' + b",".join([b"{}"] * 4_097) + b"]}"]
)
def test_bad_batches_are_refused(popping: Broker, body: bytes) -> None:
    assert popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body).code == ResponseCode.SYSTEM_ERROR


def test_bits_of_all_items_of_a_batch_are_bounded(popping: Broker) -> None:
    given = handles(pop(popping))
    named = BatchAck(
        c="g",
        t="T",
        q=0,
        rq=given[0].revive_queue_id,
        pt=given[0].pop_time_ms,
        b=BatchAck.encode_offsets(0, [0]),
    )
    zeros = bytes(MAX_READ_BITS // 8)
    for empty in (b64encode(zeros).decode(), list(zeros)):
        item = BatchAck(c="g", t="T", q=0, rq=named.rq, pt=named.pt, b=empty)
        assert item.offsets == []
        body = BatchAckMessageRequestBody(broker_name=BROKER, acks=[named, item, item]).encode()
        answer = popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark == f"more than {MAX_REQUEST_BITS} bits in one request"
        assert set(popping.group.state.pops["g", "T", 0].out) == {0, 1, 2}
    body = BatchAckMessageRequestBody(broker_name=BROKER, acks=[named, item]).encode()
    assert popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body).code == 0
    assert set(popping.group.state.pops["g", "T", 0].out) == {1, 2}


def test_half_right_batch_acknowledges_the_right_half(popping: Broker) -> None:
    given = handles(pop(popping))
    assert ack(popping, given[0]).code == 0
    item = BatchAck(
        c="g",
        t="T",
        q=0,
        rq=given[0].revive_queue_id,
        pt=given[0].pop_time_ms,
        b=BatchAck.encode_offsets(0, [0, 1]),
    )
    body = BatchAckMessageRequestBody(broker_name=BROKER, acks=[item])
    answer = popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body.encode())
    assert answer.code == ResponseCode.NO_MESSAGE
    assert answer.ext[STALE_FIELD] == "0"
    assert set(popping.group.state.pops["g", "T", 0].out) == {2}


def test_refused_batch_names_stale_receipts_of_items(popping: Broker) -> None:
    """Their places go through all items: here one by one, the last of them twice."""
    given = handles(pop(popping))
    assert ack(popping, given[1]).code == 0
    rq, pt = given[0].revive_queue_id, given[0].pop_time_ms
    acks = [
        BatchAck(
            c="g", t="T", q=0, so=offset, rq=rq, pt=pt, b=BatchAck.encode_offsets(offset, [offset])
        )
        for offset in (0, 1, 2, 2)
    ]
    body = BatchAckMessageRequestBody(broker_name=BROKER, acks=acks).encode()
    answer = popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body)
    assert answer.code == ResponseCode.NO_MESSAGE
    assert answer.ext[STALE_FIELD] == "1,3"
    assert decode_stale(answer.ext[STALE_FIELD], 4) == {1, 3}
    assert popping.group.state.pops == {}
    all_stale = popping.call(RequestCode.BATCH_ACK_MESSAGE, {}, body)
    assert (all_stale.code, all_stale.ext[STALE_FIELD]) == (ResponseCode.NO_MESSAGE, "0,1,2,3")


@pytest.mark.parametrize("text", ["", "x", "1,", "-1", "4", "0,4"])
def test_places_outside_the_batch_are_refused(text: str) -> None:
    with pytest.raises(BadRequestError):
        decode_stale(text, 4)


def batch_of(given: list[ReceiptHandle], *offsets: int) -> RemotingCommand:
    item = BatchAck(
        c="g",
        t="T",
        q=0,
        rq=given[0].revive_queue_id,
        pt=given[0].pop_time_ms,
        b=BatchAck.encode_offsets(0, list(offsets)),
    )
    body = BatchAckMessageRequestBody(broker_name=BROKER, acks=[item]).encode()
    return request(RequestCode.BATCH_ACK_MESSAGE, {}, body)


def test_batch_of_a_deposed_leader_fails_as_a_whole(popping: Broker, clock: ManualClock) -> None:
    """What it does not know it does not refuse: its entry is the barrier of a batch."""
    given = handles(pop(popping))
    row = popping.group.state.pops["g", "T", 0]
    unknown_here = row.out[1]
    row.remove(1)
    command = batch_of(given, 0, 1)
    assert popping.handle(command) is DEFERRED
    assert popping.group.waiting == 1
    popping.group.step_down("10.0.0.2:10911")
    found = answer_of(popping, command)
    assert found is not None
    assert (found.code, found.ext["leaderAddr"]) == (14, "10.0.0.2:10911")
    assert found.code != ResponseCode.NO_MESSAGE
    row.put(1, unknown_here)
    assert set(row.out) == {0, 1, 2}
    popping.group.leadership = Term(2)
    other = Broker(popping.group, clock)
    assert other.handle(command) is DEFERRED
    popping.group.settle()
    found = answer_of(other, command)
    assert found is not None
    assert found.code == 0
    assert set(popping.group.state.pops["g", "T", 0].out) == {2}


def test_batch_of_unknown_outcome_is_not_called_stale(popping: Broker) -> None:
    given = handles(pop(popping))
    assert ack(popping, given[1]).code == 0
    command = batch_of(given, 0, 1)
    assert popping.handle(command) is DEFERRED
    popping.group.append()
    popping.group.time_out()
    found = answer_of(popping, command)
    assert found is not None
    assert found.code not in (0, ResponseCode.NO_MESSAGE)
    popping.group.apply()
    assert set(popping.group.state.pops["g", "T", 0].out) == {2}, "stored after all"
    again = batch_of(given, 0, 2)
    assert popping.handle(again) is DEFERRED
    popping.group.settle()
    found = answer_of(popping, again)
    assert found is not None
    assert found.code == ResponseCode.NO_MESSAGE
    assert popping.group.state.pops == {}
    assert popping.group.state.consumer_offset("g", "T", 0) == 3


def test_batch_known_in_part_behind_the_barrier(popping: Broker) -> None:
    given = handles(pop(popping))
    assert ack(popping, given[1]).code == 0
    row = popping.group.state.pops.pop(("g", "T", 0))
    popping.group.barriers_pass = False
    command = batch_of(given, 0, 1)
    assert popping.handle(command) is DEFERRED
    assert popping.group.waiting == 0, "none of its handles is known: nothing to store yet"
    popping.group.state.pops["g", "T", 0] = row
    popping.group.pass_barriers()
    assert answer_of(popping, command) is None
    popping.group.settle()
    found = answer_of(popping, command)
    assert found is not None
    assert found.code == ResponseCode.NO_MESSAGE
    assert "1 of 2 handles" in (found.remark or "")
    assert set(popping.group.state.pops["g", "T", 0].out) == {2}
    pass_ms(popping, INVISIBLE_MS)
    assert bodies(pop(popping)) == [(b"c", 1)]


def test_queues_take_turns(broker: Broker) -> None:
    broker.make_topic("T", queues=4)
    for queue_id in range(4):
        broker.group.put("T", queue_id, b"%d" % queue_id, b"more")
    found = {bodies(pop(broker, maxMsgNums=1))[0][0] for _ in range(4)}
    assert found == {b"0", b"1", b"2", b"3"}


def test_answer_is_bounded_by_bytes(group: FakeGroup, clock: ManualClock) -> None:
    broker = Broker(group, clock, max_transfer_bytes_in_memory=600)
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


TOPIC_AGAIN = {
    "topic": "T",
    "defaultTopic": "TBW102",
    "readQueueNums": "1",
    "writeQueueNums": "1",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": "0",
    "order": "false",
}


@pytest.mark.parametrize("popped", [0, 2])
def test_topic_made_again_is_popped_from_its_start(popping: Broker, popped: int) -> None:
    if popped:
        pop(popping, maxMsgNums=popped)
    commands = [
        request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}),
        request(RequestCode.UPDATE_AND_CREATE_TOPIC, TOPIC_AGAIN),
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


def test_follower_sends_pop_to_the_leader(popping: Broker) -> None:
    popping.group.leadership = None
    answer = pop(popping)
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert answer.ext["leaderAddr"] == popping.group.leader_address


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
    assert popping.group.state.request_modes == {"T": {"h": ["POP", 8]}}
    query = {"topic": "T", "consumerGroup": "g", "clientId": "c", "messageModel": "CLUSTERING"}
    answer = popping.call(RequestCode.QUERY_ASSIGNMENT, {}, json.dumps(query).encode())
    assigned = QueryAssignmentResponseBody.decode(answer.body).message_queue_assignments
    assert {item.mode for item in assigned} <= {"PULL"}
