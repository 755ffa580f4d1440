"""POP beside offsets: where a group begins, pulls, commits, resets and locks.

Batches of acknowledgements: what counts of one, and what is refused.
"""

from base64 import b64encode
from functools import partial
from typing import Any

import pytest
import trio

from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import LockBatchRequestBody, MessageQueue, ResetOffsetBody
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import PullMessageHeader
from dledger.remoting.protocol.own_fields import STALE_FIELD, decode_stale
from dledger.remoting.protocol.pop_requests import (
    MAX_READ_BITS,
    MAX_REQUEST_BITS,
    BatchAck,
    BatchAckMessageRequestBody,
    ReceiptHandle,
)
from dledger.services.pop_grants import PASSED_OVER_MS
from dledger.services.pop_lines import RECENT_S
from dledger.services.queue_locks import LEASE_S
from dledger.state.pop import HAS_ROW, PopChange, PopGrant, PopMark
from dledger.state.snapshot import load, snapshot
from tests.harness.beside import beside
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, FakeGroup, Term
from tests.harness.pops import (
    INVISIBLE_MS,
    ack,
    answer_of,
    answered,
    bodies,
    change,
    changed,
    handles,
    hold,
    pass_ms,
    pop,
)


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


def test_new_group_begins_an_old_queue_at_its_end(group: FakeGroup) -> None:
    broker = Broker(group, recent_bytes=300)
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
    assert bodies(answered(popping, command)) == [(b"d", 0)]
    assert bodies(pop(popping, consumerGroup="h")) == [(b"a", 0), (b"b", 0), (b"c", 0), (b"d", 0)]


def test_pop_goes_on_where_pulls_ended(popping: Broker) -> None:
    popping.make_group("g")
    taken_commit(popping, 2)
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
    refused = popping.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    assert refused.code == ResponseCode.NO_PERMISSION
    other = PullMessageHeader("h", "T", 0, 0, 32, 4, 0, 0, 0, "*").encode()
    assert popping.call(RequestCode.PULL_MESSAGE, other).code == 0
    assert ack(popping, handle).code == 0
    assert popping.call(RequestCode.PULL_MESSAGE, pull).code == 0


def test_messages_that_are_over_keep_no_pull_back(popping: Broker) -> None:
    pop(popping, maxMsgNums=2)
    pull = PullMessageHeader("g", "T", 0, 0, 32, 4, 0, 0, 0, "*").encode()
    commit = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "1"}
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
    broker.handle(request(RequestCode.UPDATE_CONSUMER_OFFSET, commit, oneway=True))
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
    assert popping.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == 0
    taken_commit(popping, 1)
    assert pop(popping).code == ResponseCode.PULL_NOT_FOUND
    popping.processors.offsets.flush()
    popping.group.settle()
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]


def test_cloned_offsets_end_what_is_out(popping: Broker) -> None:
    commit = {"consumerGroup": "h", "topic": "T", "queueId": "0", "commitOffset": "1"}
    popping.make_group("h")
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
    popping.group.store(changes[late])
    assert (popping.group.state.pops, offset_of(popping)) == ({}, 1)
    other = load(snapshot(popping.group.state), popping.group.state)
    assert (other.pops, other.consumer_offset(*key)) == ({}, 1)
    assert bodies(pop(popping)) == [(b"b", 0), (b"c", 0)]
    assert ack(popping, given[0]).code == ResponseCode.NO_MESSAGE


def test_reset_counts_across_a_fail_over(popping: Broker) -> None:
    old = handles(pop(popping))[0]
    assert reset(popping, 0).code == 0
    popping.group.leadership = Term(2)
    other = Broker(popping.group)
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


async def test_reset_of_a_pop_group_wakes_what_is_held(virtual: Broker) -> None:
    """Nothing is out, and consumers have no offsets that they could be asked to set."""
    broker, group = virtual, virtual.group
    broker.make_topic("T", queues=1)
    group.put("T", 0, b"a", b"b")
    for handle in handles(pop(broker)):
        assert ack(broker, handle).code == 0
    command = hold(broker)
    async with beside(broker.processors.pops.run):
        await trio.sleep(5)
        ext = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true", "offset": "1"}
        asked = request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)
        assert (await broker.finish(broker.handle(asked))).code == 0
        assert offset_of(broker) == 1
        await trio.sleep(2 * PASSED_OVER_MS / 1000)
        group.settle()
    assert bodies(answered(broker, command)) == [(b"b", 0)]


def test_reset_after_the_last_pop_of_a_group_is_stored(popping: Broker) -> None:
    for handle in handles(pop(popping)):
        assert ack(popping, handle).code == 0
    pass_ms(popping, round(RECENT_S * 1000))
    assert reset(popping, 2).code == 0
    assert offset_of(popping) == 2
    pass_ms(popping, 1)
    assert reset(popping, 0).code == ResponseCode.CONSUMER_NOT_ONLINE
    assert offset_of(popping) == 2


def test_reset_by_a_deposed_leader_stores_nothing(popping: Broker) -> None:
    given = handles(pop(popping))
    popping.group.barriers_pass = False
    ext = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true", "offset": "0"}
    command = request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)
    event = partial(popping.group.step_down, "10.0.0.2:10911")
    found = trio.run(popping.finish, popping.handle(command), event)
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


def item_of(given: list[ReceiptHandle], *offsets: int) -> BatchAck:
    """Return one item that acknowledges *offsets* of queue 0."""
    rq, pt = given[0].revive_queue_id, given[0].pop_time_ms
    return BatchAck(c="g", t="T", q=0, rq=rq, pt=pt, b=BatchAck.encode_offsets(0, list(offsets)))


def test_batch_acknowledges_what_it_names(popping: Broker) -> None:
    given = handles(pop(popping))
    item = item_of(given, 0, 2)
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
    named = item_of(given, 0)
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
    item = item_of(given, 0, 1)
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
    acks = [item_of(given, *offsets)]
    body = BatchAckMessageRequestBody(broker_name=BROKER, acks=acks).encode()
    return request(RequestCode.BATCH_ACK_MESSAGE, {}, body)


def test_batch_of_a_deposed_leader_fails_as_a_whole(popping: Broker) -> None:
    """What it does not know it does not refuse: its entry is the barrier of a batch."""
    given = handles(pop(popping))
    row = popping.group.state.pops["g", "T", 0]
    unknown_here = row.out[1]
    row.remove(1)
    command = batch_of(given, 0, 1)
    assert popping.handle(command) is DEFERRED
    assert popping.group.waiting == 1
    popping.group.step_down("10.0.0.2:10911")
    found = answered(popping, command)
    assert (found.code, found.ext["leaderAddr"]) == (14, "10.0.0.2:10911")
    assert found.code != ResponseCode.NO_MESSAGE
    row.put(1, unknown_here)
    assert set(row.out) == {0, 1, 2}
    popping.group.leadership = Term(2)
    other = Broker(popping.group)
    assert other.handle(command) is DEFERRED
    popping.group.settle()
    assert answered(other, command).code == 0
    assert set(popping.group.state.pops["g", "T", 0].out) == {2}


def test_batch_of_unknown_outcome_is_not_called_stale(popping: Broker) -> None:
    given = handles(pop(popping))
    assert ack(popping, given[1]).code == 0
    command = batch_of(given, 0, 1)
    assert popping.handle(command) is DEFERRED
    popping.group.append()
    popping.group.time_out()
    found = answered(popping, command)
    assert found.code not in (0, ResponseCode.NO_MESSAGE)
    popping.group.apply()
    assert set(popping.group.state.pops["g", "T", 0].out) == {2}, "stored after all"
    again = batch_of(given, 0, 2)
    assert popping.handle(again) is DEFERRED
    popping.group.settle()
    assert answered(popping, again).code == ResponseCode.NO_MESSAGE
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
    found = answered(popping, command)
    assert found.code == ResponseCode.NO_MESSAGE
    assert "1 of 2 handles" in (found.remark or "")
    assert set(popping.group.state.pops["g", "T", 0].out) == {2}
    pass_ms(popping, INVISIBLE_MS)
    assert bodies(pop(popping)) == [(b"c", 1)]
