"""Handlers are found by what they declare: code, limit, rule, reads and local."""

from __future__ import annotations

from typing import Any

import pytest

from dledger.broker_errors import NotLeaderError
from dledger.commitlog.errors import ConfigError
from dledger.processors.handles import SUB, Limit, declared, handlers_of, handles, message_at, needs
from dledger.processors.wiring import PROCESSORS
from dledger.remoting.access.accounts import ADMIN, SIGNED
from dledger.remoting.connection import Connection
from dledger.remoting.processor import Handled, Limiter
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from tests.harness.fake_group import FakeConnection, FakeGroup

CODE = RequestCode
LIMITERS = {limit: Limiter(limit.value, 1) for limit in Limit}


class Example:
    """Declares a handler of each kind."""

    @handles(CODE.SEND_MESSAGE, CODE.SEND_MESSAGE_V2, limit=Limit.SEND, rule=SIGNED, appends=True)
    def send(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)

    @handles(CODE.PULL_MESSAGE, limit=Limit.PULL, rule=needs(SUB, topic="topic"), reads=True)
    def pull(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)

    @handles(CODE.VIEW_MESSAGE_BY_ID, limit=Limit.CLIENT, rule=message_at("offset", SUB))
    def view(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)

    @handles(CODE.DELETE_TOPIC_IN_BROKER, limit=Limit.ADMIN, rule=ADMIN, local=True)
    def delete(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)

    def helper(self) -> None:
        """Not declared: no handler."""


class Twin:
    """Declares a code that another handler has."""

    @handles(CODE.SEND_MESSAGE, limit=Limit.SEND, rule=SIGNED)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)


def test_handlers_of_refuses_a_code_with_two_handlers(group: FakeGroup) -> None:
    with pytest.raises(ConfigError, match="has a handler already"):
        handlers_of([Example(), Twin()], LIMITERS, group)


def test_handlers_of_refuses_reads_while_a_snapshot_is_refilled(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = handlers_of([Example()], LIMITERS, group)
    monkeypatch.setattr(group, "readable", False)
    connection: Any = None
    with pytest.raises(NotLeaderError):
        handlers[CODE.PULL_MESSAGE][0](connection, request(CODE.PULL_MESSAGE))
    assert handlers[CODE.SEND_MESSAGE][0](connection, request(CODE.SEND_MESSAGE)) is not None


def test_handlers_of_applies_before_all_but_sends(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = handlers_of([Example()], LIMITERS, group)
    caught_up: list[int] = []
    monkeypatch.setattr(group, "catch_up", lambda: caught_up.append(1))
    connection: Any = FakeConnection()
    handlers[CODE.SEND_MESSAGE][0](connection, request(CODE.SEND_MESSAGE))
    assert caught_up == []
    for code in (CODE.PULL_MESSAGE, CODE.VIEW_MESSAGE_BY_ID, CODE.DELETE_TOPIC_IN_BROKER):
        handlers[code][0](connection, request(code))
    assert len(caught_up) == 3


def test_sends_of_a_broker_are_these() -> None:
    """Only what reads no message and is answered early may see less than all that is answered."""
    sends = {code for _, found in declared(PROCESSORS) if found.appends for code in found.codes}
    assert {code.name for code in sends} == {
        *("SEND_MESSAGE", "SEND_MESSAGE_V2", "SEND_BATCH_MESSAGE", "SEND_RECORDS", "CONSUME_STEP"),
    }


def test_reads_of_a_broker_are_these() -> None:
    """The whole list, so that none leaves it unnoticed."""
    reads = {code for _, found in declared(PROCESSORS) if found.reads for code in found.codes}
    assert {code.name for code in reads} == {
        *("PULL_MESSAGE", "LITE_PULL_MESSAGE", "BULK_PULL", "QUERY_CONSUMER_OFFSET"),
        *("SEARCH_OFFSET_BY_TIMESTAMP", "GET_MAX_OFFSET", "GET_MIN_OFFSET"),
        *("GET_EARLIEST_MSG_STORETIME", "VIEW_MESSAGE_BY_ID", "QUERY_MESSAGE"),
        *("QUERY_CONSUME_QUEUE", "GET_CONSUME_STATS", "GET_BROKER_CONSUME_STATS"),
        *("QUERY_CONSUME_TIME_SPAN", "GET_TOPIC_STATS_INFO", "INVOKE_BROKER_TO_RESET_OFFSET"),
        *("CONSUME_MESSAGE_DIRECTLY", "POP_MESSAGE", "NOTIFICATION"),
    }
