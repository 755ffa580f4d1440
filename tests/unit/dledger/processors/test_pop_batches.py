"""Batches of acknowledgements: what counts of one, and what is refused."""

from __future__ import annotations

from base64 import b64encode

import pytest

from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.own_fields import STALE_FIELD, decode_stale
from dledger.remoting.protocol.pop_requests import (
    MAX_READ_BITS,
    MAX_REQUEST_BITS,
    BatchAck,
    BatchAckMessageRequestBody,
    ReceiptHandle,
)
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, Term
from tests.harness.pops import INVISIBLE_MS, ack, answer_of, answered, bodies, handles, pass_ms, pop


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
