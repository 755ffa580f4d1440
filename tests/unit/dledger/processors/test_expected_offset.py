"""Sends that expect an offset: appended at it, or refused with the one that is next."""

from __future__ import annotations

from typing import Any

import pytest

from dledger.remoting.processor import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup
from tests.unit.dledger.processors.test_send import ext


def send(expected: object, **changes: Any) -> RemotingCommand:
    command = plain(**changes)
    command.ext["expectedQueueOffset"] = str(expected)
    return command


def plain(**changes: Any) -> RemotingCommand:
    fields = ext(**{"queue_id": "0", **changes})
    return request(RequestCode.SEND_MESSAGE_V2, fields, b"body")


@pytest.fixture
def writing(group: FakeGroup, clock: ManualClock) -> Broker:
    broker = Broker(group, clock)
    broker.make_topic("T", queues=2)
    return broker


def answers_of(broker: Broker, *commands: RemotingCommand) -> list[RemotingCommand]:
    """Send all of them before the first is appended."""
    assert [broker.handle(command) for command in commands] == [DEFERRED] * len(commands)
    broker.group.settle()
    replies = {id(asked): answer for asked, answer in broker.connection.replies}
    return [replies[id(command)] for command in commands]


def test_send_at_the_expected_offset_is_stored(writing: Broker) -> None:
    (first,) = answers_of(writing, send(0))
    assert (first.code, first.ext["queueOffset"]) == (0, "0")
    (second,) = answers_of(writing, send(1))
    assert (second.code, second.ext["queueOffset"]) == (0, "1")


def test_other_offset_is_refused_with_the_present_one(writing: Broker) -> None:
    writing.group.put("T", 0, b"a", b"b")
    for expected in (0, 1, 3):
        (refused,) = answers_of(writing, send(expected))
        assert refused.code == ResponseCode.OFFSET_NOT_EXPECTED
        assert refused.ext["outcome"] == "not_stored"
        assert refused.ext["nextOffset"] == "2"
    assert writing.group.state.max_offset("T", 0) == 2


def test_two_that_expect_one_offset_are_one_winner(writing: Broker) -> None:
    answers = answers_of(writing, send(0), send(0), plain(), send(2), send(1))
    assert [answer.code for answer in answers] == [0, 51152, 0, 0, 51152]
    assert [answer.ext.get("nextOffset") for answer in answers] == [None, "1", None, None, "3"]
    assert writing.group.state.max_offset("T", 0) == 3


@pytest.mark.parametrize("text", ["-1", "x", "", str(1 << 63)])
def test_what_is_no_offset_is_refused(writing: Broker, text: str) -> None:
    answer = writing.handle(send(text))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.ext["outcome"] == "not_stored"


def test_delayed_send_expects_no_offset(writing: Broker) -> None:
    answer = writing.handle(send(0, properties="DELAY\x011\x02"))
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert not writing.group.waiting
