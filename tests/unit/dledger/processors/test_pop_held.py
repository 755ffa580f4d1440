"""POP requests and notifications that wait, filters that scan, and damage in their way."""

from typing import Any

import pytest
import trio

from dledger.broker_errors import PendingFullError
from dledger.filters.property_filter import Matching, scan
from dledger.processors import pop_messages
from dledger.processors.get_message import MIN_SCAN_UNITS
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.own_fields import FROM_NOW_FIELD
from dledger.services import pop_decision
from dledger.services.pop_grants import PASSED_OVER_MS
from dledger.state.pop import PopChange
from dledger.state.state_record import SubscriptionGroupsChange
from dledger.state.topics import SubscriptionGroupConfig
from dledger.testing.doubles import VirtualClock
from tests.harness.beside import beside
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup
from tests.harness.pops import (
    INVISIBLE_MS,
    ack,
    answer_of,
    answered,
    bodies,
    damage,
    fields,
    handles,
    hold,
    pass_ms,
    place_of,
    pop,
)


def test_held_fifo_wakes_at_the_acknowledgement(popping: Broker) -> None:
    handle = handles(pop(popping, maxMsgNums=1, order="true"))[0]
    command = hold(popping, order="true", maxMsgNums=1)
    assert ack(popping, handle).code == 0
    popping.group.settle()
    found = answered(popping, command)
    assert bodies(found) == [(b"b", 0)]


def test_held_pop_wakes_at_an_arrival(broker: Broker) -> None:
    broker.make_topic("T", queues=2)
    first, second = hold(broker), hold(broker)
    info = broker.call(RequestCode.POLLING_INFO, fields())
    assert info.ext["pollingNum"] == "2"
    broker.group.put("T", 1, b"x")
    broker.group.settle()
    assert bodies(answered(broker, first)) == [(b"x", 0)]
    assert answer_of(broker, second) is None, "one message, one consumer"


@pytest.mark.parametrize("code", [RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION])
def test_held_pop_receives_from_queues_added_since(broker: Broker, code: int) -> None:
    broker.make_topic("T", queues=2)
    held = hold(broker, code)
    broker.make_topic("T", queues=4)
    broker.group.put("T", 3, b"x")
    broker.group.settle()
    found = answered(broker, held)
    if code == RequestCode.POP_MESSAGE:
        assert bodies(found) == [(b"x", 0)]
    else:
        assert found.ext["hasMsg"] == "true"


def test_held_pop_of_a_paused_group_gets_nothing(broker: Broker) -> None:
    broker.make_topic("T")
    group = broker.group
    held = hold(broker)
    asked = hold(broker, RequestCode.NOTIFICATION)
    paused = SubscriptionGroupConfig("g", consume_enable=False)
    group.store(SubscriptionGroupsChange(put=(paused,)))
    group.put("T", 0, b"one")
    group.settle()
    assert [answer_of(broker, each) for each in (held, asked)] == [None, None]
    assert not group.state.pops
    resumed = SubscriptionGroupConfig("g")
    group.store(SubscriptionGroupsChange(put=(resumed,)))
    group.put("T", 0, b"two")
    group.settle()
    assert bodies(answered(broker, held)) == [(b"one", 0), (b"two", 0)]


def test_notification_answers_and_takes_no_message(broker: Broker) -> None:
    broker.make_topic("T", queues=2)
    command = hold(broker, RequestCode.NOTIFICATION)
    broker.group.put("T", 1, b"x")
    assert answered(broker, command).ext["hasMsg"] == "true"
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
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a filter that matches little stalls the leader for a whole backlog of many queues."""
    broker = Broker(group, enable_property_filter=True)
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
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.clock = VirtualClock()
    broker = Broker(group, enable_property_filter=True)
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
    async with beside(broker.processors.pops.run):
        await trio.sleep(1)
    assert len(scans) == 3
    answers = [answer_of(broker, each) for each in asked]
    assert [each and each.ext["hasMsg"] for each in answers] == ["true"] * 3


def test_notice_that_looked_at_some_queues_calls_for_a_pop(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(group, enable_property_filter=True)
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
    found = answered(broker, command)
    assert bodies(found) == [(b"new", 0)]


@pytest.mark.parametrize("is_taken", [False, True])
async def test_held_pop_goes_on_when_nothing_could_be_stored(
    virtual: Broker, *, is_taken: bool
) -> None:
    """What it passed over is not in the log, and no message arrives that would wake it."""
    broker, group = virtual, virtual.group
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
    async with beside(broker.processors.pops.run):
        await trio.sleep(PASSED_OVER_MS / 1000 + 0.1)
        while group.waiting:
            group.settle()
    assert bodies(answered(broker, command)) == [(b"y", 0)]


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
    read, place = log.read, place_of(units)

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


async def test_held_pop_ends_and_wakes_by_time(virtual: Broker) -> None:
    broker, group = virtual, virtual.group
    broker.make_topic("T", queues=1)
    group.put("T", 0, b"a")
    assert bodies(pop(broker)) == [(b"a", 0)]
    early = request(RequestCode.POP_MESSAGE, fields(pollTime=10_000))
    late = request(RequestCode.POP_MESSAGE, fields(pollTime=60_000))
    assert [broker.handle(early), broker.handle(late)] == [DEFERRED] * 2
    async with beside(broker.processors.pops.run):
        await trio.sleep(10.5)
        assert answered(broker, early).code == ResponseCode.POLLING_TIMEOUT
        await trio.sleep(19.0)
        assert not group.waiting
        await trio.sleep(1.0)
        group.settle()
    assert bodies(answered(broker, late)) == [(b"a", 1)]


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


async def test_held_pop_goes_on_when_less_is_out(
    virtual: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of another group end, and none arrives that would wake it."""
    monkeypatch.setattr(pop_decision, "MAX_OUT", 2)
    broker, group = virtual, virtual.group
    broker.make_topic("T", queues=1)
    group.put("T", 0, b"a", b"b")
    given = handles(pop(broker))
    command = hold(broker, consumerGroup="h")
    async with beside(broker.processors.pops.run):
        await trio.sleep(5)
        assert not group.waiting
        assert ack(broker, given[0]).code == 0
        await trio.sleep(2 * PASSED_OVER_MS / 1000)
        group.settle()
    found = answered(broker, command)
    assert bodies(found) == [(b"a", 0)]


async def test_held_in_order_wakes_for_a_later_end(virtual: Broker) -> None:
    broker, group = virtual, virtual.group
    broker.make_topic("T", queues=1)
    group.put("T", 0, b"a", b"b")
    pop(broker, maxMsgNums=1, invisibleTime=2_000)
    pop(broker, maxMsgNums=1, invisibleTime=5_000)
    command = hold(broker, order="true")
    async with beside(broker.processors.pops.run):
        await trio.sleep(5.5)
        group.settle()
    assert bodies(answered(broker, command)) == [(b"a", 1), (b"b", 1)]


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
